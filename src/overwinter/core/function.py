"""What the scheduler knows of a function: names, sizes and SLOs, never tensors."""

from typing import Literal

import msgspec

from overwinter.core.bounds import Bound, check_bounds, seconds
from overwinter.core.ids import (
    SHARED,
    Address,
    FamilyId,
    FunctionId,
    FunctionName,
    StoreName,
    TenantId,
    is_part,
)
from overwinter.core.profile import Profile

TIME_BOUNDS = {
    "slo_ms": Bound(0.1, 86_400_000, "ms", "no worker answers faster, and a longer SLO is pointless", whole=False),
    "timeout_s": seconds(0.001, 86_400, "a shorter one expires before a worker can answer, and a day is the maximum"),
}
"""The bounds of the times in the settings of a function and of a pipeline."""

SETTINGS_BOUNDS = TIME_BOUNDS | {
    "max_batch": Bound(1, 65_536, "requests", "a run has at least one, and its tensors must fit in memory"),
    "max_workers": Bound(1, 4096, "workers", "each one is a process"),
    "queue_limit": Bound(1, 4096, "requests", "a cancelled one is searched for among all that wait"),
    "keep_alive_s": seconds(0, 31_536_000, "0 stops an idle worker at once, and a year is the maximum"),
    "threads": Bound(1, 256, "cores", "a worker needs one, and more do not make a run faster"),
    "concurrency": Bound(1, 32, "runs", "each one needs two descriptors of the node and a thread"),
    "memory_mib": Bound(256, 1 << 20, "MiB", "PyTorch alone takes up to 200, and no worker has more than 1 TiB"),
}
"""The bounds of every number in a function's settings."""


Device = Literal["cpu", "pool", "any"]

Availability = Literal["READY", "UNAVAILABLE", "LOADING"]
"""Whether a version of a function, or a pipeline, answers requests; LOADING: it is on trial."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a function, chosen by its owner."""

    slo_ms: float | None = None
    timeout_s: float = 60.0
    max_batch: int = 1
    """The most requests in one run. More than 1 is allowed for models whose requests get the same results in a shared
    run as alone, up to rounding; with 1, answers are equal bit for bit to those of a separate run.
    """
    max_workers: int = 8
    """The most workers; functions that share workers have at most the sum of theirs. The node starts a further one only
    when the others do not suffice for the waiting requests or the expected rate.
    """
    queue_limit: int = 512
    keep_alive_s: float | None = None
    """The most seconds that a worker of the function stays idle, unless it also has a function with a longer time, or
    is one of several, whose number follows the rate; None: until its memory is needed, or as the node's policy decides.
    """
    threads: int = 1
    """The most cores of one worker. The number of threads that sum in parallel may change the last bits of results."""
    concurrency: int = 1
    """The most concurrent runs of one worker."""
    late: Literal["serve", "refuse"] = "serve"
    """What happens to a request that can no longer meet the SLO: `serve` answers it, usually after those that can be in
    time; `refuse` refuses it before a run, so that later requests can meet theirs. Where even a request that had just
    arrived would be late, or a cold start took longer than the SLO, the newest are still answered. Workers answer all
    if no configuration meets the SLO.
    """
    pinned: bool = False
    """Whether its blocks stay in the host store while it is deployed and loaded."""
    dedicated: bool = False
    """Whether its blocks are in the tenant's own host store, shared with functions of that tenant only."""
    memory_mib: int = 4096
    """The most private memory of one worker: its heap and that of PyTorch, without the shared weights. A node that
    allows its workers less memory limits it to that.
    """
    isolation: Literal["family", "function"] = "family"
    """Whether its workers are shared with the other functions of its family (`family`; docs/decisions/families.md has
    the conditions), or with none (`function`).
    """

    device: Device = "cpu"
    """Where its program runs: in a worker on CPU cores, on any device of the pool, or where each request is answered
    sooner (`any`). A handler runs in a worker.
    """

    def __post_init__(self) -> None:
        check_bounds(self, SETTINGS_BOUNDS)


def reset_settings(former: Settings, new: Settings) -> list[str]:
    """Return the names of the settings that a former version had, and that have their default in a new one."""
    default = Settings()
    return [
        field
        for field in Settings.__struct_fields__
        if getattr(former, field) != getattr(default, field) == getattr(new, field)
    ]


WORKER_SETTINGS = frozenset(("max_workers", "threads", "concurrency", "memory_mib", "isolation"))
"""The settings of workers, which mean nothing for a function of the pool without a handler."""


def runs_on_pool(device: Device, is_part: bool, has_handler: bool) -> bool:
    """Whether a function with this setting runs on devices. A function with a handler, or with `any`, runs in workers;
    if its program also runs on the pool, that is a function of its own (a part).
    """
    return is_part or (device == "pool" and not has_handler)


class BlobSize(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One blob that a function needs: its program, a block of weights, the source of its handler, or an asset."""

    address: Address
    nbytes: int
    """The memory that it takes in a host store: whole pages."""
    layout_bytes: int = 0
    """The part of `nbytes` that is not copied to devices: what describes the weights in the block, and padding."""


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One deployed version of a function."""

    id: FunctionId
    name: FunctionName
    version: int
    tenant: TenantId
    settings: Settings
    program: Address
    has_handler: bool
    """Whether it has a handler, which is code of its author."""
    blobs: tuple[BlobSize, ...]
    """All blobs that must be in the host store before a worker can run. The scheduler calls all of them blocks."""
    profile: Profile | None = None
    """The measured latencies and memory on this machine."""
    family: FamilyId = FamilyId("")
    """The family whose workers can bind it; empty: it shares workers with no function."""
    following: FunctionId | None = None
    """The slice of its program that runs after it; None: its program is not cut, or it is the last slice."""

    @property
    def on_pool(self) -> bool:
        """Whether it runs on devices."""
        return runs_on_pool(self.settings.device, is_part(self.name), self.has_handler)

    @property
    def has_pool_program(self) -> bool:
        """Whether its program runs on devices as another function."""
        return self.settings.device != "cpu" and not self.on_pool

    @property
    def weights(self) -> dict[Address, int]:
        """The blocks of a function that runs on devices, all but the program, and the bytes of each on a device."""
        return {blob.address: blob.nbytes - blob.layout_bytes for blob in self.blobs if blob.address != self.program}

    @property
    def store(self) -> StoreName:
        """The host store of its blocks."""
        return StoreName(self.tenant) if self.settings.dedicated else SHARED
