"""The memory of a virtual device, out of which other processes copy blocks without asking its owner.

It is a file that the owner and these processes map. A table behind the blocks has the position of each block that
others may copy. The owner clears a block's entry before it writes anything else to the block's memory, and never waits.
A process that has copied a block looks at its entry again, and the copy is void if the entry has changed. So no process
waits for another, and one that ends does not disturb the others.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from overwinter.core.ids import Address
from overwinter.device.allocation import Extent
from overwinter.device.partitions import GRANULE_BYTES

BYTES_PER_SLOT = GRANULE_BYTES
"""The memory for which the table has one slot. Almost all blocks are larger, so few slots are used."""
PROBES = 8
"""The number of consecutive slots that are tried for a block. If all are taken, other devices cannot copy the block."""

_SEAL_FUTURE_WRITE = 0x10

_ENTRY = struct.Struct("@QQQ64s")
"""A number that no other entry has, or 0 if the slot is empty; the offset and size of the block in bytes; its content
address.
"""
_WORDS = _ENTRY.size // 8


class Entry(NamedTuple):
    """The content of a slot of the table."""

    number: int
    offset: int
    nbytes: int
    address: bytes


def shared_bytes(nbytes: int) -> int:
    """Return the size of the file for a device's memory with its table."""
    nbytes = -(-nbytes // BYTES_PER_SLOT) * BYTES_PER_SLOT
    return nbytes + nbytes // BYTES_PER_SLOT * _ENTRY.size


def shared_memory(nbytes: int) -> int:
    """Create the memory of a device from which others may copy, and return its descriptor. Raises OSError."""
    if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise OSError(f"the device needs {nbytes} bytes, and this machine has less memory")
    return sized_file("overwinter-device", shared_bytes(nbytes), more_seals=True)


def sized_file(name: str, nbytes: int, *, more_seals: bool = False) -> int:
    """Create a memory file whose size is sealed, so that no process can truncate it under another that has mapped it.
    `more_seals`: whether it may be sealed further. Raises OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | (0 if more_seals else fcntl.F_SEAL_SEAL)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd


def forbid_writing(fd: int) -> None:
    """Let only processes that have already mapped a file write to it. Any process that may read it could otherwise
    open it again for writing. Raises OSError, also on a kernel before Linux 5.1, which lacks this seal.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def find_entry(table: memoryview, address: Address) -> Entry | None:
    """Return the entry of a block in a table that its owner may be writing; None: others cannot copy the block."""
    key = address.encode().ljust(64, b"\0")
    for slot in _slots(address, len(table) // _ENTRY.size):
        entry = Entry(*_ENTRY.unpack_from(table, slot * _ENTRY.size))
        if entry.number and entry.address == key:
            return entry
    return None


class Table:
    """The table in a device's memory, as its owner keeps it."""

    def __init__(self, memory: memoryview) -> None:
        """`memory`: that of the device with its table, which is empty."""
        self._bytes = memory[table_start(len(memory)) :]
        # One instruction writes a word, so a reader never sees a part of a number.
        self._numbers = self._bytes.cast("Q")
        self._entered: dict[Address, tuple[int, Extent]] = {}
        """The slot of each block's entry, and where the block lies."""
        self._next = count(1)

    def enter(self, address: Address, extent: Extent) -> None:
        """Let others copy a block, whose bytes are there."""
        self.clear(address)
        slots = _slots(address, len(self._bytes) // _ENTRY.size)
        slot = next((each for each in slots if not self._numbers[each * _WORDS]), None)
        if slot is None:
            return
        self._entered[address] = slot, extent
        _ENTRY.pack_into(self._bytes, slot * _ENTRY.size, 0, *extent, address.encode())
        self._numbers[slot * _WORDS] = next(self._next)

    def clear(self, address: Address) -> None:
        """Void the copies of a block that have not ended; its memory may change afterwards."""
        slot, _ = self._entered.pop(address, (None, None))
        if slot is not None:
            self._numbers[slot * _WORDS] = 0

    def clear_moved(self, new_extent: Callable[[Address], Extent]) -> list[Address]:
        """Clear the entries of the blocks that are to be moved, and return these blocks. `new_extent`: where a block
        will lie.
        """
        moved = [address for address, (_, old) in self._entered.items() if new_extent(address) != old]
        for address in moved:
            self.clear(address)
        return moved


def table_start(file_bytes: int) -> int:
    """Return the offset of the table in a file of this size, table included."""
    return file_bytes - file_bytes // (BYTES_PER_SLOT + _ENTRY.size) * _ENTRY.size


def _slots(address: Address, number: int) -> Iterator[int]:
    first = zlib.crc32(address.encode())
    return ((first + each) % number for each in range(min(PROBES, number)))
