"""The address space that a worker needs for the blocks of its family."""

from collections import Counter
from collections.abc import Iterable

from overwinter.core.ids import Address, TenantId
from overwinter.node.functions import BUFFERS_BYTES, DeployedFunction
from overwinter.store.mapping import HUGE_BYTES


class FamilyBlocks:
    """The blocks of the members of a family. They are counted when members change, because families can be large."""

    def __init__(self, tenant: TenantId, memory_bytes: int) -> None:
        self.tenant = tenant
        self.memory_bytes = memory_bytes
        """The limit of the private memory of one worker, the same for all members."""
        self.member_count = 0
        self._nbytes = 0
        self._holders: Counter[Address] = Counter()

    def add(self, function: DeployedFunction) -> None:
        """Add a member."""
        self.member_count += 1
        for block in function.weight_blocks:
            if not self._holders[block.address]:
                self._nbytes += block.nbytes
            self._holders[block.address] += 1

    def remove(self, function: DeployedFunction) -> None:
        """Remove a member."""
        self.member_count -= 1
        for block in function.weight_blocks:
            self._holders[block.address] -= 1
            if not self._holders[block.address]:
                del self._holders[block.address]
                self._nbytes -= block.nbytes

    @property
    def mapped_bytes(self) -> int:
        """The address space for mappings in a worker that may bind any member: blocks with their alignment, and
        buffers.
        """
        return self._nbytes + len(self._holders) * HUGE_BYTES + BUFFERS_BYTES


def mapped_bytes(functions: Iterable[DeployedFunction]) -> int:
    """The address space for mappings in a worker that may bind any of these functions."""
    blocks = FamilyBlocks(TenantId(""), 0)
    for function in functions:
        blocks.add(function)
    return blocks.mapped_bytes
