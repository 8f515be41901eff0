"""Blocks in host memory, as a source of copies."""

from collections.abc import Mapping

import torch

from overwinter.core.ids import Address
from overwinter.device.interface import FoundBlocks, Source


class HostBlocks(Source):
    """The mapped files of blocks, by address. They stay as long as this object."""

    def __init__(self, blocks: Mapping[Address, torch.Tensor]) -> None:
        """`blocks`: the bytes of each, flat."""
        self._blocks = dict(blocks)

    def find(self, blocks: Mapping[Address, int]) -> FoundBlocks:
        """Give the bytes of those of these blocks that are here."""
        return FoundBlocks({address: self._blocks[address] for address in blocks if address in self._blocks})
