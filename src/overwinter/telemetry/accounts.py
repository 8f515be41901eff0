"""What the kernel, the host stores and the scheduler counted, side by side, as the last pass over them found it."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from overwinter.core.ids import Address, FunctionId, Seconds, StoreName, WorkerId

Kind = Literal["files", "blocks", "workers"]
KINDS: Mapping[Kind, str] = {
    "files": "a host store's table and its files on the tmpfs",
    "blocks": "the scheduler's blocks and a host store's",
    "workers": "a worker's profile and its private memory",
}


class ProcessMemory(NamedTuple):
    """Bytes of one process."""

    private: int
    """In writable private mappings, mapped by no other process. The kernel calls a shared page private
    as long as one process maps it: weights and buffers must not count here."""
    pss: int
    """Everything, a page that n processes map counting 1/n."""
    shared: int
    """Of this, what lies in shared mappings: weights and buffers."""


class FileMemory(NamedTuple):
    """One file of a tmpfs."""

    nbytes: int
    allocated: int
    """Memory behind it: less than its bytes where it has holes."""


class StoreView(NamedTuple):
    """One host store: what three sides say of it."""

    resident: Mapping[Address, int]
    """The store's own table."""
    files: Mapping[Address, FileMemory]
    """The kernel's."""
    held: Mapping[Address, int]
    """The scheduler's, what is on its way included."""
    settled: bool
    """Nothing is on its way."""


class MeasuredWorkerMemory(NamedTuple):
    """A worker that was measured."""

    function: FunctionId
    memory: ProcessMemory
    expected: int | None
    """By its profile; None: never measured."""
    at: Seconds


class Accounts:
    """The results of the last passes. The loop's thread replaces its tables as a whole; other threads read them."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, MeasuredWorkerMemory] = {}
        self.stores: dict[StoreName, StoreView] = {}
        self.zygotes = 0
        """PSS of the zygotes."""
        self.mismatches: Counter[Kind] = Counter()
        self.passes = 0
