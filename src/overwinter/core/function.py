"""What the scheduler knows of a function: names, sizes and SLOs, never tensors."""

from typing import Literal

import msgspec

from overwinter.core.bounds import Bound, check_bounds, seconds
from overwinter.core.ids import SHARED, Address, FamilyId, FunctionId, FunctionName, StoreName, TenantId
from overwinter.core.profile import Profile

TIMES = {
    "slo_ms": Bound(0.1, 86_400_000, "ms", "no worker answers sooner, and a day is no low latency", whole=False),
    "timeout_s": seconds(0.001, 86_400, "a shorter one expires before a worker hears of it, a longer one is no wait"),
}
"""Of a function and of a pipeline."""

BOUNDS = TIMES | {
    "max_batch": Bound(1, 65_536, "requests", "a run has at least one, and its tensors must fit into memory"),
    "max_workers": Bound(1, 4096, "workers", "each is a process"),
    "queue_limit": Bound(1, 1_000_000, "requests", "each is kept in memory while it waits"),
    "keep_alive_s": seconds(0, 31_536_000, "0 stops an idle worker at once, and a year is for ever"),
    "threads": Bound(1, 256, "cores", "a worker needs one, and one run gains nothing from more"),
    "concurrency": Bound(1, 32, "runs", "each holds two descriptors of the node and a thread of the worker"),
    "memory_mib": Bound(1, 1 << 20, "MiB", "1 TiB is more than one worker can have"),
}
"""Of every number in a function's settings."""


Availability = Literal["READY", "UNAVAILABLE", "LOADING"]
"""Whether a version of a function, or a pipeline, answers requests; LOADING: it is on trial."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a function, chosen by its owner; every bound has a unit."""

    slo_ms: float | None = None
    timeout_s: float = 60.0
    max_batch: int = 1
    """Most requests in one run, for models whose requests were found to get from a shared run what they get alone. 1
    keeps every answer bit-equal to a run of its own."""
    max_workers: int = 8
    """Most workers at once; the node starts a second one only when the first cannot do what is waiting."""
    queue_limit: int = 512
    keep_alive_s: float | None = None
    """Longest that a worker of it stays idle; None: as long as there is room, or as the node's policy says."""
    threads: int = 1
    """Most cores of one worker. How many sum up a number in parts may change its last bits."""
    concurrency: int = 1
    """Most runs at once in one worker."""
    late: Literal["serve", "refuse"] = "serve"
    """What becomes of a request that can no longer be answered within the SLO: as soon as it can be, until its
    timeout, or refused at once so that those behind it are in time."""
    pinned: bool = False
    """Never leaves the host store while it is deployed and loaded."""
    dedicated: bool = False
    """Keeps its blocks in its tenant's own host store, shared with that tenant's functions alone."""
    memory_mib: int = 4096
    """Most private memory of one worker: its own heap, not the shared weights."""
    isolation: Literal["family", "function"] = "family"
    """Whether its workers may run its tenant's other functions of the same program and handler, too, or nobody else."""

    def __post_init__(self) -> None:
        check_bounds(self, BOUNDS)


class BlobSize(msgspec.Struct, frozen=True, array_like=True):
    """One block that a function needs, as the scheduler sees it."""

    address: Address
    nbytes: int


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One deployed version of a function."""

    id: FunctionId
    name: FunctionName
    version: int
    tenant: TenantId
    settings: Settings
    program: Address
    sandboxed: bool
    """Whether the function brings its own code."""
    blobs: tuple[BlobSize, ...]
    """All that must lie in the host store before a worker can run."""
    profile: Profile | None = None
    """What is known of its speed on this machine."""
    family: FamilyId = FamilyId("")
    """Whose workers can bind it; empty: it shares with nobody."""

    @property
    def store(self) -> StoreName:
        """The host store of its blocks."""
        return StoreName(self.tenant) if self.settings.dedicated else SHARED
