"""The actions that a scheduler returns. They are frozen data; the node or the simulator carries them out."""

from typing import Literal, get_args

import msgspec

from overwinter.core.ids import (
    SHARED,
    Address,
    DeviceId,
    FunctionId,
    OperationId,
    RequestId,
    RunId,
    Seconds,
    StoreName,
    TenantId,
    WorkerId,
)

Start = Literal["warm", "bound", "host", "disk"]
"""What a request's function needed: nothing (warm), a bind in a worker of its family (bound), or a new worker or a
transfer to a device, with its blocks in the host store (host) or on disk (disk).
"""

WARMEST_FIRST: tuple[Start, ...] = get_args(Start)
"""The kinds of starts, the shortest first."""

Decision = Literal[
    "scale-out",
    "scale-in",
    "bind",
    "unbind",
    "slo-infeasible",
    "evict",
    "wait",
    "shed",
    "quarantine",
    "isolate",
    "stop",
    "evict-worker",
    "ahead",
]
"""The kinds of decisions that are explained. `quarantine`: a function is out of service, because the scheduler failed
on it. `isolate`: it gets a family of its own, because workers died or hung in its runs or binds.
"""


class _Action(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the tagged union."""


class LoadBlocks(_Action, frozen=True):
    """Load a function's missing blocks from disk into its host store; answered by BlocksLoaded or LoadFailed."""

    function: FunctionId
    operation: OperationId
    """Repeated by the answer, because the function may have been unloaded and loaded again meanwhile."""


class Drop(_Action, frozen=True):
    """Remove these blocks, which no function holds, from a host store."""

    addresses: tuple[Address, ...]
    store: StoreName = SHARED


class Evict(_Action, frozen=True):
    """A function's blocks are no longer held for it in its host store; Drop removes those that no other needs."""

    function: FunctionId
    why: str
    """For `explain`."""


class StartWorker(_Action, frozen=True):
    """Fork a worker; answered by WorkerReady or WorkerExited."""

    worker: WorkerId
    function: FunctionId
    warm_up: bool = msgspec.field(default=False, name="on_trial")
    """Whether it runs its program on zeros before it is ready. A journal names this `on_trial`."""
    cores: int = 1
    concurrency: int = 1
    """The most concurrent runs of the worker."""
    ahead: WorkerId | None = None
    """The process forked ahead that becomes the worker if possible; otherwise a new one is forked."""


class ForkAhead(_Action, frozen=True):
    """Fork a process ahead from the zygote of this function's tenant; it waits until a start uses it or it is
    stopped. Answered by WorkerReady or WorkerExited.
    """

    worker: WorkerId
    function: FunctionId


class Prepare(_Action, frozen=True):
    """Let the tenant's zygote compile this function's program and create its primitives (prepared kernels) before a
    later fork.
    """

    function: FunctionId
    forget: Address | None = None
    """A program that the zygote should drop."""


class Run(_Action, frozen=True):
    """Send these requests to a worker as one batch; answered by RunEnded or WorkerExited."""

    worker: WorkerId
    run: RunId
    requests: tuple[RequestId, ...]
    function: FunctionId | None = None
    """The function of the requests; None: the function for which the worker was started."""
    functions: tuple[FunctionId, ...] = ()
    """The function of each request, if they differ; the run was started for that of the first request."""


class Bind(_Action, frozen=True):
    """Bind a further function of its family in a worker; answered by Bound, BindFailed or WorkerExited."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """Repeated by the answer."""


class Unbind(_Action, frozen=True):
    """Unbind a function in a worker or an executor that has no runs of it."""

    worker: WorkerId
    function: FunctionId


class StopWorker(_Action, frozen=True):
    """Ask a worker, an executor or a process forked ahead to end, or kill it; answered by WorkerExited."""

    worker: WorkerId
    kill: bool = False


class StartExecutor(_Action, frozen=True):
    """Fork the executor of a device; answered by WorkerReady or WorkerExited. StopWorker stops it."""

    executor: WorkerId
    """Workers and executors are numbered together."""
    device: DeviceId
    tenant: TenantId | None = None
    """The only tenant whose functions it will run; None: those of any tenant."""


class RunOnDevice(_Action, frozen=True):
    """Send these requests to an executor as one batch, and meanwhile copy the missing blocks to its device; answered by
    RunEnded or WorkerExited. Without requests, only the blocks are copied.
    """

    executor: WorkerId
    device: DeviceId
    run: RunId
    function: FunctionId
    requests: tuple[RequestId, ...]
    missing_bytes: int = 0
    """The bytes to copy."""
    evict: tuple[FunctionId, ...] = ()
    """The functions that are evicted from the device first."""
    peer: DeviceId | None = None
    """The device from which the blocks that it has are copied; the others come from the host store."""
    functions: tuple[FunctionId, ...] = ()
    """The function of each request, if they differ; the run was started for that of the first request."""


class PrepareOnDevice(_Action, frozen=True):
    """Give an executor a function before its first request: its program, and mappings of its blocks; answered by
    PreparedOnDevice or WorkerExited. A run that is ordered meanwhile ends the preparation early.
    """

    executor: WorkerId
    device: DeviceId
    function: FunctionId
    operation: OperationId
    """Repeated by the answer."""


class Reply(_Action, frozen=True):
    """Send a request its outputs."""

    request: RequestId
    function: FunctionId
    start: Start


class Refuse(_Action, frozen=True):
    """Refuse a request, with the reason."""

    request: RequestId
    error: str
    message: str
    retry_after_s: float | None = None
    function: FunctionId | None = None
    """The function of the request; None: the request names no deployed function."""


class LoadFinished(_Action, frozen=True):
    """Report the result of a deploy or a load to its caller. The scheduler drops a new version that failed."""

    function: FunctionId
    error: str | None = None
    """The name of the error's class in core/errors.py; None: it succeeded."""
    reason: str = ""


class Explanation(_Action, frozen=True):
    """The reason for a decision about a function, for `explain`; it changes nothing."""

    function: FunctionId
    what: Decision
    why: str


class SetAlarm(_Action, frozen=True):
    """Post Alarm at this time; replaces the previous alarm."""

    at: Seconds


Action = (
    LoadBlocks
    | Drop
    | Evict
    | StartWorker
    | ForkAhead
    | Prepare
    | Run
    | StartExecutor
    | RunOnDevice
    | PrepareOnDevice
    | Bind
    | Unbind
    | StopWorker
    | Reply
    | Refuse
    | LoadFinished
    | Explanation
    | SetAlarm
)
