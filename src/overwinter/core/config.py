"""The configuration of a node. Read once at start, passed to constructors, never changed."""

import msgspec

from overwinter.core.bounds import Bound, check_bounds, seconds
from overwinter.core.devices import DeviceConfig, DeviceIsolation, check_devices
from overwinter.core.policies import Policy, policy_named

BYTES_MOST = 1 << 50
"""1 PiB, more than any machine has."""
WORKERS_MOST = 65_536
"""The most workers of any node."""

SCHEDULER_BOUNDS = {
    "cores": Bound(1, 4096, "cores", "no machine has more"),
    "memory_bytes": Bound(1, BYTES_MOST, "bytes", "no machine has a PiB"),
    "host_bytes": Bound(0, BYTES_MOST, "bytes", "no machine has a PiB"),
    "host_keep_alive_s": seconds(0, 31_536_000, "a year is the maximum"),
    "workers_max": Bound(1, WORKERS_MOST, "workers", "each one is a process"),
    "tenant_workers_max": Bound(1, WORKERS_MOST, "workers", "each one is a process"),
    "runs_max": Bound(1, 32 * WORKERS_MOST, "runs", "each one needs two descriptors of the node and a thread"),
    "workers_ahead": Bound(0, 4096, "processes", "each one takes memory while it waits"),
    "requests_max": Bound(2, 10_000_000, "requests", "each one takes memory, and two tenants need one each"),
    "attempts_max": Bound(1, 100, "attempts", "a request that always kills its worker should fail"),
    "start_timeout_s": seconds(0.1, 3600, "no process starts faster, or needs more than an hour"),
    "stop_timeout_s": seconds(0.01, 3600, "a worker needs time to react, and its memory is needed"),
    "drain_timeout_s": seconds(0, 86_400, "0 ends runs at once; longer runs block other functions"),
    "warm_up_max_s": seconds(0, 60, "the tenant's zygote cannot fork meanwhile"),
    "prepared_max": Bound(1, 100_000, "programs", "each one takes memory of the zygote"),
    "backoff_first_s": seconds(0.001, 3600, "a function that fails at once needs a pause"),
    "backoff_max_s": seconds(0.001, 86_400, "a repaired function should be tried again"),
    "retry_after_min_s": seconds(0, 3600, "clients do not wait longer"),
}
"""The bounds of every number in the configuration of the scheduler."""

NODE_BOUNDS = {
    "drain_s": seconds(0, 3600, "0 answers no open request, and a stop must end"),
    "port": Bound(0, 65_535, "", "port numbers have 16 bits"),
    "journal_ring": Bound(1, 10_000_000, "steps", "each one is kept in memory"),
    "profile_share": Bound(0.0001, 1, "of the time", "it is a fraction", whole=False),
    "functions_max": Bound(1, 1_000_000, "versions", "each one is kept in memory"),
    "tenant_functions_max": Bound(1, 1_000_000, "versions", "each one is kept in memory"),
    "tenant_deploys_max": Bound(1, 1000, "deploys", "each one needs a thread and a worker"),
    "pipelines_max": Bound(1, 1_000_000, "pipelines", "each one is kept in memory"),
    "manifests_bytes_max": Bound(1 << 20, BYTES_MOST, "bytes", "one manifest must fit, and all are kept in memory"),
    "memory_free_min_bytes": Bound(0, BYTES_MOST, "bytes", "no machine has a PiB"),
    "accounting_s": seconds(0.01, 86_400, "each comparison reads every worker"),
    "zygotes_max": Bound(0, 4096, "zygotes", "each one is a process; with 0 the base zygote forks all workers"),
    "zygote_timeout_s": seconds(0.5, 3600, "forks are slow on a busy machine; a hung zygote stops wakes"),
    "warm_up_timeout_s": seconds(0.1, 3600, "a program must be compiled and run while others wait"),
    "verify_share": Bound(0, 1, "of a core", "it is a fraction", whole=False),
    "disk_free_min_bytes": Bound(0, BYTES_MOST, "bytes", "no node's disk has a PiB"),
    "tenant_disk_bytes": Bound(1, BYTES_MOST, "bytes", "no node's disk has a PiB"),
    "unneeded_keep_s": seconds(0, 31_536_000, "a year is the maximum"),
}
"""The bounds of every number in the configuration of a node."""

REQUEST_BOUNDS = {
    "requests_bytes_max": Bound(1 << 20, BYTES_MOST, "bytes", "one request must fit, and no machine has a PiB"),
    "caller_share": Bound(0.001, 1, "of all", "it is a fraction", whole=False),
    "request_bytes_max": Bound(1 << 10, 1 << 40, "bytes", "a request has a head, and is kept in memory"),
    "json_bytes_max": Bound(1 << 10, 1 << 32, "bytes", "a request has a head, and JSON costs far more than its bytes"),
    "elements_max": Bound(1, 1 << 32, "elements", "each one is checked"),
    "manifest_bytes_max": Bound(1 << 10, 1 << 32, "bytes", "no manifest is smaller, and it is kept in memory"),
    "block_bytes_max": Bound(1 << 10, BYTES_MOST, "bytes", "no block is smaller, and no machine has a PiB"),
    "uploads_max": Bound(1, 100_000, "uploads", "each one needs a descriptor"),
    "memory_wait_s": seconds(0, 3600, "clients do not wait longer"),
    "head_bytes_max": Bound(1 << 8, 1 << 30, "bytes", "a request has a request line and headers, kept in memory"),
    "headers_max": Bound(1, 100_000, "headers", "a request has a Host header, and each one is checked"),
    "head_timeout_s": seconds(0.01, 3600, "networks are slow, and each connection takes memory"),
    "idle_timeout_s": seconds(0.01, 86_400, "networks are slow, and each connection takes memory"),
    "stall_s": seconds(0.01, 3600, "networks are slow, and each body takes memory"),
    "rate_min_bytes": Bound(1, 1 << 40, "bytes a second", "0 would not be a limit, and no network is faster"),
    "connections_max": Bound(1, 1_000_000, "connections", "each one needs a descriptor"),
}
"""The bounds of every number in the limits of requests."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds and the policies of the scheduler."""

    policy: str | Policy = "overwinter"
    cores: int | None = None
    """The cores for all workers; None: all cores that the node may use."""
    memory_bytes: int | None = None
    """The limit of the private memory of all workers together; None: on a node half of the memory that is available at
    its start and that devices do not take, otherwise unlimited.
    """
    host_bytes: int | None = None
    """The most bytes of all host stores together; None: unlimited. On a node, the limit is at most 95 % of the sum of
    their own blocks and the free space of their tmpfs.
    """
    host_keep_alive_s: float | None = None
    """Seconds without use after which a function that is not pinned leaves the host store; None: only when its memory
    is needed.
    """
    workers_max: int | None = None
    """The most worker processes of the node; None: on a node as many as the system's limits allow, otherwise
    WORKERS_MOST.
    """
    tenant_workers_max: int | None = None
    """The most workers of one tenant; None: all of them while no other tenant has functions, otherwise all but a
    sixteenth.
    """
    runs_max: int | None = None
    """The most concurrent runs of all workers together; None: on a node as many as the system's limits allow, otherwise
    unlimited.
    """
    workers_ahead: int | None = None
    """The processes forked ahead for tenants that recently started functions, at most two for each. They count as
    workers. None: on a node at most eight, as far as they fit in a sixteenth of `memory_bytes`; otherwise none.
    """
    requests_max: int = 100_000
    """The most open requests. Those of a tenant may be at most as many as are still free, so a single tenant has at
    most half of all.
    """
    attempts_max: int = 2
    """The most attempts of a request: by default one retry after a crash."""
    start_timeout_s: float = 120.0
    """The most seconds from the fork of a worker or an executor until it is ready, and the most of a bind in a worker.
    """
    stop_timeout_s: float = 2.0
    """The most seconds that a worker or an executor may take to stop; then it is killed."""
    drain_timeout_s: float = 30.0
    """The most seconds that a run may continue after its function is removed or unloaded, or another tenant needs its
    worker, its device or the memory of its blocks; with the `device_isolation` "function", also if another function
    needs its device.
    """
    warm_up_max_s: float = 0.5
    """Only programs whose runs are at most this long are compiled in the zygote of their tenant, which cannot fork
    meanwhile.
    """
    prepared_max: int = 256
    """The most compiled programs of a tenant's zygote; the least recently used is dropped first. An executor that has
    this many functions prepares no others ahead.
    """
    backoff_first_s: float = 0.1
    backoff_max_s: float = 30.0
    retry_after_min_s: float = 1.0
    devices: tuple[DeviceConfig, ...] = ()
    """The devices of the pool, on which functions with `device = "pool"` run, and at times those with `any`."""
    device_isolation: DeviceIsolation = "tenant"
    """Who shares the executor of a device. With `none` all tenants do, as in Torpor; otherwise a device serves one
    tenant or function at a time, and its executor is replaced when another one gets the device. Memory that changes its
    tenant is cleared in any case.
    """

    def __post_init__(self) -> None:
        policy_named(self.policy)
        check_devices(self.devices)
        check_bounds(self, SCHEDULER_BOUNDS)


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits on one request, one caller, and all callers together."""

    requests_bytes_max: int | None = None
    """The memory limit of all requests together, for bodies, tensors and answers; None: an eighth of the available
    memory at the start.
    """
    caller_share: float = 0.5
    """The share of that memory that one caller may use: the tenant of a token, or without tokens a client's address."""
    request_bytes_max: int = 64 << 20
    """The most bytes of the body of an inference request."""
    json_bytes_max: int = 8 << 20
    """The most bytes of JSON in a request, and in the numbers and strings of an answer. Decoding takes several times as
    much memory.
    """
    elements_max: int = 65_536
    """The most elements of BYTES tensors in a request."""
    manifest_bytes_max: int = 8 << 20
    """The most bytes of a manifest."""
    block_bytes_max: int = 16 << 30
    uploads_max: int = 32
    """The most concurrent uploads of blocks."""
    memory_wait_s: float = 10.0
    """The most seconds that a large request waits for memory before it is refused."""
    head_bytes_max: int = 64 << 10
    """The most bytes of a request's request line, headers and trailers, and of the framing of a chunked body beyond 8
    bytes for each byte of the body.
    """
    headers_max: int = 128
    head_timeout_s: float = 10.0
    """The most seconds from the start of a connection, or the first byte of a request, to the end of its headers."""
    idle_timeout_s: float = 75.0
    """The most seconds between two requests of a connection. The default exceeds the timeout of common client pools, so
    that clients close first.
    """
    stall_s: float = 10.0
    """The seconds over which the transfer rate of a body or an answer is measured."""
    rate_min_bytes: int = 32 << 10
    """The lowest transfer rate of a body or an answer, in bytes per second."""
    connections_max: int = 2048
    """The most open connections, at most a quarter of the process's descriptors."""

    def __post_init__(self) -> None:
        check_bounds(self, REQUEST_BOUNDS)


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address, the directories and the limits of a node."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 10.0
    """How long a stopping node continues to answer its open requests."""
    data: str
    """The directory of the repository."""
    host_store: str = "/dev/shm"
    """The tmpfs in which the host store creates its directory."""
    keep_warm: bool = False
    """Whether to keep the host store in memory after a clean stop, for the next start."""
    verify_share: float = 0.02
    """The share of one core for verifying the blocks in memory. Blocks that an earlier run of the node left are
    verified at full speed while cores are idle. With 0 only those blocks are verified, and only before they are used.
    """
    disk_free_min_bytes: int = 256 << 20
    """The disk space that deploys must leave free."""
    tenant_disk_bytes: int | None = None
    """The most bytes of disk for the blocks of one tenant; None: unlimited."""
    unneeded_keep_s: float = 600.0
    """How long blocks without a function are kept, so that a deploy in progress does not lose its uploads."""
    journal: str | None = None
    """The file to which the journal is written; a previous file is renamed. None: only the ring buffer in memory."""
    journal_ring: int = 512
    """The steps kept in memory. A new step replaces the oldest; a small ring stays in the CPU's cache."""
    profile_on_deploy: bool = True
    """Whether to profile each new program in the background, unless it is cut into slices."""
    profile_share: float = 0.1
    """The share of the time for profiling while the node serves; an idle node profiles at full speed."""
    functions_max: int = 20_000
    """The most deployed versions of all functions."""
    tenant_functions_max: int = 10_000
    """The most deployed versions of one tenant."""
    tenant_deploys_max: int = 32
    """The most concurrent deploys of one tenant."""
    pipelines_max: int = 1000
    """The most deployed pipelines; one tenant may have half of them."""
    manifests_bytes_max: int = 256 << 20
    """The most bytes of the manifests of all functions; one tenant may have half. In memory they take about six times
    as much.
    """
    memory_free_min_bytes: int = 512 << 20
    """With less available memory the node stops processes forked ahead, evicts unused blocks, unbinds unused functions
    and stops workers: idle ones, then those that use far more memory than expected.
    """
    zygotes_max: int = 32
    """The most tenants with a zygote; an unused zygote is stopped for another tenant."""
    zygote_timeout_s: float = 5.0
    """The most seconds that a zygote may take to answer or to fork before it is killed and replaced."""
    warm_up_timeout_s: float = 10.0
    """The most seconds that a tenant's zygote may take to compile a program; a slower program is not tried again."""
    imports: str = ""
    """The modules that the base zygote imports for handlers, separated by commas, in addition to those of Overwinter's
    tasks.
    """
    accounting_s: float = 10.0
    """The seconds between two comparisons of the scheduler's accounting with the kernel's figures."""
    scheduler: SchedulerConfig = SchedulerConfig()
    requests: RequestLimits = RequestLimits()

    def __post_init__(self) -> None:
        check_bounds(self, NODE_BOUNDS)
