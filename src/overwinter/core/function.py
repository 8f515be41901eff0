"""What the mind knows of a function: names, sizes and promises, never tensors."""

import msgspec

from overwinter.core.ids import Address, FunctionId, FunctionName, TenantId

MOST = {
    "slo_ms": 86_400_000,
    "timeout_s": 86_400,
    "max_batch": 65_536,
    "max_bodies": 4096,
    "queue_limit": 1_000_000,
    "keep_alive_s": 31_536_000,
    "threads": 256,
    "memory_mib": 1 << 24,
}
"""The largest value of each setting: beyond, somebody mistook a unit."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a function's owner may choose; every bound has a unit."""

    slo_ms: float | None = None
    timeout_s: float = 60.0
    max_batch: int = 1
    """Most requests in one run. 1 keeps every answer bit-equal to a run of its own."""
    max_bodies: int = 1
    queue_limit: int = 512
    keep_alive_s: float = 60.0
    threads: int = 1
    memory_mib: int = 4096
    """Most private memory of one body: its own heap, not the shared weights."""

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        for name in ("slo_ms", "timeout_s", "max_batch", "max_bodies", "queue_limit", "threads", "memory_mib"):
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
