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


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request, one caller and all callers together may take of a node."""

    requests_bytes_max: int | None = None
    """Memory of all requests under way: bodies, tensors, answers; None: an eighth of what is there at the
    start."""
    client_share: float = 0.5
    """Of that memory, and of connections and uploads, what one caller's address may hold."""
    request_bytes_max: int = 64 << 20
    """Largest body of one request. The loop copies it in one go, about a millisecond for each MiB."""
    json_bytes_max: int = 8 << 20
    """JSON of one request, and of one answer's numbers and texts. JSON costs far more than its bytes."""
    elements_max: int = 65_536
    """Elements of BYTES tensors in one request."""
    manifest_bytes_max: int = 8 << 20
    """Largest manifest, pipeline or question about blocks."""
    block_bytes_max: int = 16 << 30
    uploads_max: int = 32
    """Blocks on their way in at once."""
    room_wait_s: float = 10.0
    """Longest that a large request waits for its share of the memory before it is refused."""
    head_bytes_max: int = 64 << 10
    """Bytes of a request's line, headers and trailers, and what chunks of a body are wrapped in."""
    headers_max: int = 128
    head_timeout_s: float = 10.0
    """Longest from a connection's begin, or a request's first byte, to the end of its headers."""
    idle_timeout_s: float = 75.0
    """Longest between two requests of a connection. Longer than common client pools keep theirs, so that they, not
    the node, close first."""
    stall_s: float = 10.0
    """Time in which a body, or the reader of an answer, has to keep up its rate."""
    rate_min_bytes: int = 32 << 10
    """Least bytes a second of a body that comes, or of an answer that is read."""
    connections_max: int = 2048
    """Connections open at once, at most a quarter of the descriptors that the process may have."""


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
    requests: RequestLimits = RequestLimits()
