"""The source of blocks of a host store in tests."""

import os
from collections.abc import Mapping


class Source:
    """Blocks by address, all of them intact."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def open(self, address):
        fd = os.memfd_create("block")
        os.write(fd, self._contents[address])
        os.lseek(fd, 0, 0)
        return fd

    def set_aside(self, address):
        raise AssertionError(address)
