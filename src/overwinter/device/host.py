"""Blocks in host memory, as a source of copies."""

from collections.abc import Mapping

import torch

from overwinter.core.ids import Address
from overwinter.device.interface import FoundBlocks, Source


class HostBlocks(Source):
    """The mapped files of blocks, by address. They stay mapped as long as this object exists."""

    def __init__(self, blocks: Mapping[Address, torch.Tensor]) -> None:
        """`blocks`: the content of each."""
        self._blocks = dict(blocks)

    def find(self, blocks: Mapping[Address, int]) -> FoundBlocks:
        """Return those of these blocks that are here. `blocks`: the bytes of each."""
        return FoundBlocks({address: self._blocks[address] for address in blocks if address in self._blocks})
