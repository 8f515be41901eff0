"""The configuration of a node. Read once at start, passed to constructors, never changed."""

import msgspec

from overwinter.core.bounds import Bound, check_bounds, seconds
from overwinter.core.policies import Policy, policy_named

BYTES_MOST = 1 << 50
"""No machine has a PiB."""
WORKERS_MOST = 65_536
"""No node has more, whatever its system allows."""

SCHEDULER_BOUNDS = {
    "cores": Bound(1, 4096, "cores", "no machine has more"),
    "memory_bytes": Bound(1, BYTES_MOST, "bytes", "no machine has a PiB"),
    "host_bytes": Bound(0, BYTES_MOST, "bytes", "no machine has a PiB"),
    "host_keep_alive_s": seconds(0, 31_536_000, "a year is for ever"),
    "workers_max": Bound(1, WORKERS_MOST, "workers", "each is a process"),
    "tenant_workers_max": Bound(1, WORKERS_MOST, "workers", "each is a process"),
    "runs_max": Bound(1, 32 * WORKERS_MOST, "runs", "each holds two descriptors of the node and a thread of a worker"),
    "workers_ahead": Bound(0, 4096, "processes", "each takes memory, and waits"),
    "requests_max": Bound(2, 10_000_000, "requests", "each is kept in memory, and one must leave room for another"),
    "attempts_max": Bound(1, 100, "tries", "a request that kills its worker each time is no accident"),
    "start_timeout_s": seconds(0.1, 3600, "no process starts sooner, and one that has not after an hour never will"),
    "stop_timeout_s": seconds(0.01, 3600, "a worker must hear of it, and its memory is wanted"),
    "drain_timeout_s": seconds(0, 86_400, "0 ends a run at once, and what goes on for a day holds what others need"),
    "warm_up_max_s": seconds(0, 60, "the tenant's zygote forks nothing meanwhile"),
    "prepared_max": Bound(1, 100_000, "programs", "each takes memory of the zygote"),
    "backoff_first_s": seconds(0.001, 3600, "a function that fails at once would be tried without an end"),
    "backoff_max_s": seconds(0.001, 86_400, "a function that was mended should be tried again"),
    "retry_after_min_s": seconds(0, 3600, "nobody waits for longer"),
}
"""Of every number in the configuration of the scheduler."""

NODE_BOUNDS = {
    "drain_s": seconds(0, 3600, "0 answers nothing that is under way, and who stops a node wants it to end"),
    "port": Bound(0, 65_535, "", "that is what ports are"),
    "journal_ring": Bound(1, 10_000_000, "steps", "each is kept in memory"),
    "profile_share": Bound(0.0001, 1, "of the time", "it is a share", whole=False),
    "functions_max": Bound(1, 1_000_000, "versions", "each is kept in memory"),
    "tenant_functions_max": Bound(1, 1_000_000, "versions", "each is kept in memory"),
    "tenant_deploys_max": Bound(1, 1000, "deploys", "each holds a thread and a worker"),
    "pipelines_max": Bound(1, 1_000_000, "pipelines", "each is kept in memory"),
    "manifests_bytes_max": Bound(1 << 20, BYTES_MOST, "bytes", "a manifest must fit, and all are kept in memory"),
    "memory_free_min_bytes": Bound(0, BYTES_MOST, "bytes", "no machine has a PiB"),
    "accounting_s": seconds(0.01, 86_400, "a look at every worker takes its time"),
    "zygotes_max": Bound(0, 4096, "zygotes", "each is a process; with 0 the base zygote forks all workers"),
    "zygote_timeout_s": seconds(0.5, 3600, "a fork takes its time where all are busy; one that hangs stops wakes"),
    "warm_up_timeout_s": seconds(0.1, 3600, "a program must be compiled and run, and others wait for it"),
    "verify_share": Bound(0, 1, "of a core", "it is a share", whole=False),
    "disk_free_min_bytes": Bound(0, BYTES_MOST, "bytes", "no disk of a node has a PiB"),
    "tenant_disk_bytes": Bound(1, BYTES_MOST, "bytes", "no disk of a node has a PiB"),
    "unneeded_keep_s": seconds(0, 31_536_000, "a year is for ever"),
}
"""Of every number in the configuration of a node."""

REQUEST_BOUNDS = {
    "requests_bytes_max": Bound(1 << 20, BYTES_MOST, "bytes", "a request must fit, and no machine has a PiB"),
    "client_share": Bound(0.001, 1, "of all", "it is a share", whole=False),
    "request_bytes_max": Bound(1 << 10, 1 << 40, "bytes", "a request has a head, and it lies in memory"),
    "json_bytes_max": Bound(1 << 10, 1 << 32, "bytes", "a request has a head, and JSON costs far more than its bytes"),
    "elements_max": Bound(1, 1 << 32, "elements", "each is looked at"),
    "manifest_bytes_max": Bound(1 << 10, 1 << 32, "bytes", "none is smaller, and it is kept in memory"),
    "block_bytes_max": Bound(1 << 10, BYTES_MOST, "bytes", "no block is smaller, and no machine has a PiB"),
    "uploads_max": Bound(1, 100_000, "uploads", "each holds a descriptor"),
    "room_wait_s": seconds(0, 3600, "who waits for longer has gone"),
    "head_bytes_max": Bound(1 << 8, 1 << 30, "bytes", "a request has a line and headers, which lie in memory"),
    "headers_max": Bound(1, 100_000, "headers", "a request names its host, and each is looked at"),
    "head_timeout_s": seconds(0.01, 3600, "a network takes its time, and each connection is kept"),
    "idle_timeout_s": seconds(0.01, 86_400, "a network takes its time, and each connection is kept"),
    "stall_s": seconds(0.01, 3600, "a network takes its time, and each body is kept"),
    "rate_min_bytes": Bound(1, 1 << 40, "bytes a second", "nothing would be no bound, and no network is faster"),
    "connections_max": Bound(1, 1_000_000, "connections", "each holds a descriptor"),
}
"""Of every number in what requests may take."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds and the policies of the scheduler."""

    policy: str | Policy = "overwinter"
    cores: int | None = None
    """For all workers; None: what the machine has."""
    memory_bytes: int | None = None
    """Private memory of all workers together; None: on a node half of what is there at its start, else no bound."""
    host_bytes: int | None = None
    """Most bytes of all host stores together; None: what their tmpfs has."""
    host_keep_alive_s: float | None = None
    """A function that nobody used for so long leaves the host store for the disk; None: only when room is needed."""
    workers_max: int | None = None
    """Worker processes alive at once on the node; None: as many as the system lets a node have."""
    tenant_workers_max: int | None = None
    """Of these, what one tenant may have; None: all while no other tenant is here, and else all but a sixteenth."""
    runs_max: int | None = None
    """Runs that the workers alive may have at once, together; None: on a node as many as the system lets it have, else
    no bound.
    """
    workers_ahead: int | None = None
    """Processes forked ahead for the tenants that started functions lately, among the workers, at most two for each;
    None: on a node eight, or what fits into a sixteenth of `memory_bytes`, else none."""
    requests_max: int = 100_000
    """Requests without an answer; a tenant may have as many as places are left then, so alone half of them."""
    attempts_max: int = 2
    """Times a request may be tried: one retry after a crash."""
    start_timeout_s: float = 120.0
    """Longest a worker may take from its fork until it is ready."""
    stop_timeout_s: float = 2.0
    """Longest a worker that was asked to stop may take."""
    drain_timeout_s: float = 30.0
    """Longest that a run may go on when its function is removed or unloaded, or its worker is another tenant's turn."""
    warm_up_max_s: float = 0.5
    """Only programs that run within this are prepared in their tenant's zygote, which forks nothing meanwhile."""
    prepared_max: int = 256
    """Programs that a tenant's zygote holds prepared; the one used longest ago makes room."""
    backoff_first_s: float = 0.1
    backoff_max_s: float = 30.0
    retry_after_min_s: float = 1.0

    def __post_init__(self) -> None:
        policy_named(self.policy)
        check_bounds(self, SCHEDULER_BOUNDS)


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits on one request, one caller, and all callers together."""

    requests_bytes_max: int | None = None
    """Memory of all requests under way: bodies, tensors, answers; None: an eighth of what is there at the
    start."""
    client_share: float = 0.5
    """Of that memory, and of connections and uploads, what one caller's address may hold."""
    request_bytes_max: int = 64 << 20
    """Largest body of one request."""
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

    def __post_init__(self) -> None:
        check_bounds(self, REQUEST_BOUNDS)


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address, the directories and the limits of a node."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 10.0
    """How long a node that stops goes on answering the requests that it has."""
    data: str
    """Directory of the repository."""
    host_store: str = "/dev/shm"
    """The tmpfs under which the host store makes its own directory."""
    keep_warm: bool = False
    """Leave the host store in memory after a clean stop, for the next start."""
    verify_share: float = 0.02
    """Of one core, what hashing the blocks in memory again may take; 0: they are not. Those that a node before left are
    hashed as fast as can be while cores are idle."""
    disk_free_min_bytes: int = 256 << 20
    """What deploys leave free of the disk."""
    tenant_disk_bytes: int | None = None
    """Most bytes of disk that the blocks of one tenant take; None: no bound."""
    unneeded_keep_s: float = 600.0
    """Blocks that no function needs stay so long, so that a deploy under way does not lose what it sent."""
    journal: str | None = None
    """File to which every step is appended; None: only the ring."""
    journal_ring: int = 512
    """Steps kept in memory. Each new one is written where the oldest lay: with few that is still in the cache."""
    profile_on_deploy: bool = True
    """Measure each new program in the background."""
    profile_share: float = 0.1
    """Of the time, what measuring may take while the node serves; a node that is idle measures as fast as it can."""
    functions_max: int = 20_000
    """Versions of functions deployed at once."""
    tenant_functions_max: int = 10_000
    """Of these, what one tenant may have."""
    tenant_deploys_max: int = 32
    """Deploys of one tenant under way at once."""
    pipelines_max: int = 1000
    """One tenant may have half of them."""
    manifests_bytes_max: int = 256 << 20
    """Of all functions' manifests together; one tenant may have half. The daemon keeps some six times as much."""
    memory_free_min_bytes: int = 512 << 20
    """When the machine has less memory than this left, blocks that nothing uses, functions bound beside others
    and unused, and idle workers go."""
    zygotes_max: int = 32
    """Tenants that have a zygote of their own at once; one that nobody needs makes room."""
    zygote_timeout_s: float = 5.0
    """Longest a zygote may take to answer or to fork before it is killed and replaced."""
    warm_up_timeout_s: float = 10.0
    """Longest a tenant's zygote may take to prepare one program; one that takes longer is not prepared again."""
    imports: str = ""
    """Modules that the base zygote imports for handlers beside those of Overwinter's tasks, with commas between."""
    accounting_s: float = 10.0
    """Time between two comparisons of the scheduler's bytes with the kernel's."""
    scheduler: SchedulerConfig = SchedulerConfig()
    requests: RequestLimits = RequestLimits()

    def __post_init__(self) -> None:
        check_bounds(self, NODE_BOUNDS)
