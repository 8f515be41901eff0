"""The bytes that the kernel, the host stores and the scheduler counted when they were last compared."""

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
    """The memory of one process, in bytes."""

    private: int
    """The pages of private mappings that it has written to and shares with no other process. Weights and buffers are
    excluded, although the kernel counts a page of a shared mapping as private while only one process maps it.
    """
    pss: int
    """All mapped memory, where a page that n processes map counts 1/n."""
    shared: int
    """The part of it in shared mappings: weights and buffers."""
    inherited: int
    """The anonymous pages that it has in common with other processes, since a fork."""
    others: int
    """The part of `inherited` that PSS attributes to other processes: (n - 1)/n of a page that n processes share."""
    mappings: int
    """The number of mappings."""


class FileMemory(NamedTuple):
    """One file of a tmpfs."""

    nbytes: int
    allocated: int
    """The memory of the file, which is less than its size if it has holes."""


class StoreView(NamedTuple):
    """One host store, as its own table, the kernel and the scheduler report it."""

    resident: Mapping[Address, int]
    """The store's own table."""
    files: Mapping[Address, FileMemory]
    """The files, as the kernel reports them."""
    held: Mapping[Address, int]
    """The blocks as the scheduler counts them, including those that are being loaded."""
    settled: bool
    """Whether no block is being loaded."""


class MeasuredWorkerMemory(NamedTuple):
    """The measured memory of a worker."""

    function: FunctionId
    memory: ProcessMemory
    expected: int | None
    """The expected memory by its profile; None: its function was removed, or its configuration was not measured before
    the worker's start, or was measured again since.
    """
    at: Seconds


class Accounts:
    """The last results of the accounting of memory, and the numbers of mismatches and of comparisons (`passes`) so far.
    The loop's thread writes them; other threads read them.
    """

    def __init__(self) -> None:
        self.workers: dict[WorkerId, MeasuredWorkerMemory] = {}
        self.stores: dict[StoreName, StoreView] = {}
        self.zygotes = 0
        """The memory of the zygotes, as `ProcessMemory.pss`."""
        self.mismatches: Counter[Kind] = Counter()
        self.passes = 0
