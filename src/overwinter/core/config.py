"""What a node is told at start. Read once, handed in, never changed."""

import msgspec

from overwinter.core.policies import Policy, policy_named


class MindConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds inside which the mind decides, and its rules."""

    policy: str | Policy = "overwinter"
    cores: int | None = None
    """For all bodies; None: what the machine has."""
    memory_bytes: int | None = None
    """Private memory of all bodies together; None: no bound."""
    host_bytes: int | None = None
    """Most bytes of all host stores together; None: what their tmpfs has."""
    host_keep_alive_s: float | None = None
    """A function that nobody used for so long leaves the host store for the disk; None: only when room is needed."""
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
    prepared_max: int = 256
    """Programs that the zygote holds prepared; the one used longest ago makes room."""
    backoff_first_s: float = 0.1
    backoff_max_s: float = 30.0
    retry_after_min_s: float = 1.0

    def __post_init__(self) -> None:
        policy_named(self.policy)


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a node listens, where it keeps things, and its limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    data: str
    """Directory of the repository."""
    host_store: str = "/dev/shm"
    """The tmpfs under which the host store makes its own directory."""
    keep_warm: bool = False
    """Leave the host store in memory after a clean stop, for the next start."""
    request_bytes_max: int = 256 << 20
    block_bytes_max: int = 16 << 30
    journal: str | None = None
    """File to which every step is appended; None: only the ring."""
    journal_ring: int = 4096
    profile_on_deploy: bool = True
    """Measure each new program in the background."""
    profile_share: float = 0.1
    """Of the time, what measuring may take while the node serves; a node that is idle measures as fast as it can."""
    memory_free_min_bytes: int = 512 << 20
    """When the machine has less memory than this left, blocks that nothing uses leave the host store."""
    accounting_s: float = 10.0
    """Time between two comparisons of the mind's bytes with the kernel's."""
    mind: MindConfig = MindConfig()
