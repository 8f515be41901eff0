"""What a node is told at start. Read once, handed in, never changed."""

import msgspec


class MindConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds inside which the mind decides."""

    bodies_max: int = 256
    """Worker processes alive at once on the node."""
    attempts_max: int = 2
    """Times a request may be tried: one retry after a crash."""
    start_timeout_s: float = 120.0
    """Longest a body may take from its fork until it is ready."""
    stop_timeout_s: float = 2.0
    """Longest a body that was asked to stop may take."""
    rehearsal_max_s: float = 0.5
    """Only programs that run within this are prepared in the zygote, which forks nothing meanwhile."""
    backoff_first_s: float = 0.1
    backoff_max_s: float = 30.0
    retry_after_min_s: float = 1.0


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a node listens, where it keeps things, and its limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    data: str
    """Directory of the repository."""
    host_store: str = "/dev/shm"
    """The tmpfs under which the host store makes its own directory."""
    host_bytes: int | None = None
    """Most bytes of the host store; None: what the tmpfs has."""
    keep_warm: bool = False
    """Leave the host store in memory after a clean stop, for the next start."""
    request_bytes_max: int = 256 << 20
    block_bytes_max: int = 16 << 30
    journal: str | None = None
    """File to which every step is appended; None: only the ring."""
    journal_ring: int = 4096
    mind: MindConfig = MindConfig()
