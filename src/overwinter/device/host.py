"""Blocks in host memory, as a source of copies."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from overwinter.core.ids import Address
from overwinter.device.interface import Source


class HostBlocks(Source):
    """The mapped files of blocks, by address. They stay as long as this object, so lending needs no lock."""

    def __init__(self, blocks: Mapping[Address, torch.Tensor]) -> None:
        """`blocks`: the bytes of each, flat."""
        self._blocks = dict(blocks)

    @contextmanager
    def lend(self, blocks: Collection[Address]) -> Iterator[Mapping[Address, torch.Tensor]]:
        """Give the bytes of those of these blocks that are here."""
        yield {address: self._blocks[address] for address in blocks if address in self._blocks}
