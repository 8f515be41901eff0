"""The memory of another device, as a source of copies."""

import os
from collections.abc import Mapping
from functools import partial

import torch

from overwinter.core.ids import Address
from overwinter.device.interface import FoundBlocks, Source
from overwinter.device.shared import Entry, find_entry, table_start
from overwinter.store.mapping import mapped_buffer


class PeerMemory(Source):
    """The memory of another device, mapped read-only."""

    def __init__(self, fd: int) -> None:
        """Raises StoreError if the system refuses the mapping."""
        nbytes = os.fstat(fd).st_size
        # Every tensor in the memory references the buffer. The mapping ends with the last of them.
        self._memory = mapped_buffer(fd, nbytes)
        self._table_start = table_start(nbytes)
        self._table = memoryview(self._memory)[self._table_start :]

    def find(self, blocks: Mapping[Address, int]) -> FoundBlocks:
        """Return those of these blocks that are there now. `blocks`: the bytes of each."""
        entries = {address: entry for address in blocks if (entry := find_entry(self._table, address))}
        found = {
            address: torch.frombuffer(self._memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
            for address, entry in entries.items()
            if max(1, blocks[address]) <= entry.nbytes <= self._table_start - entry.offset
        }
        return FoundBlocks(found, partial(self._has_changed, entries))

    def _has_changed(self, entries: Mapping[Address, Entry], address: Address) -> bool:
        return find_entry(self._table, address) != entries[address]
