"""What the mind knows of a function: names, sizes and promises, never tensors."""

from typing import Literal

import msgspec

from overwinter.core.ids import SHARED, Address, FunctionId, FunctionName, StoreName, TenantId
from overwinter.core.profile import Profile

MOST = {
    "slo_ms": 86_400_000,
    "timeout_s": 86_400,
    "max_batch": 65_536,
    "max_bodies": 4096,
    "queue_limit": 1_000_000,
    "keep_alive_s": 31_536_000,
    "threads": 256,
    "concurrency": 64,
    "memory_mib": 1 << 24,
}
"""The largest value of each setting: beyond, somebody mistook a unit."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a function's owner may choose; every bound has a unit."""

    slo_ms: float | None = None
    timeout_s: float = 60.0
    max_batch: int = 1
    """Most requests in one run, for models whose requests were found to get from a shared run what they get alone. 1
    keeps every answer bit-equal to a run of its own."""
    max_bodies: int = 8
    """Most bodies at once; the node starts a second one only when the first cannot do what is waiting."""
    queue_limit: int = 512
    keep_alive_s: float = 60.0
    threads: int = 1
    """Most cores of one body. How many sum up a number in parts may change its last bits."""
    concurrency: int = 1
    """Most runs at once in one body."""
    late: Literal["serve", "refuse"] = "serve"
    """What becomes of a request that can no longer be answered within the promise: as soon as it can be, until its
    timeout, or refused at once so that those behind it are in time."""
    pinned: bool = False
    """Never leaves the host store while it is deployed and loaded."""
    dedicated: bool = False
    """Keeps its blocks in its tenant's own host store, shared with that tenant's functions alone."""
    memory_mib: int = 4096
    """Most private memory of one body: its own heap, not the shared weights."""

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        for name in (
            "slo_ms",
            "timeout_s",
            "max_batch",
            "max_bodies",
            "queue_limit",
            "threads",
            "memory_mib",
            "concurrency",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.keep_alive_s < 0:
            raise ValueError(f"keep_alive_s must not be negative, got {self.keep_alive_s}")


class BlobSize(msgspec.Struct, frozen=True, array_like=True):
    """One block that a function needs, as the mind sees it."""

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
    """All that must lie in the host store before a body can run."""
    profile: Profile | None = None
    """What is known of its speed on this machine."""

    @property
    def store(self) -> StoreName:
        """The host store in which its blocks lie."""
        return StoreName(self.tenant) if self.settings.dedicated else SHARED
