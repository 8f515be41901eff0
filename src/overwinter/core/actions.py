"""The actions that a scheduler returns. They are frozen data; the node or the simulator carries them out."""

from typing import Literal

import msgspec

from overwinter.core.ids import SHARED, Address, FunctionId, OperationId, RequestId, RunId, Seconds, StoreName, WorkerId

Start = Literal["warm", "bound", "host", "disk"]
"""What a request's function needed: nothing, a bind in a worker of its family, or a worker, with blocks from disk."""

Decision = Literal[
    "scale-out",
    "scale-in",
    "bind",
    "unbind",
    "best-effort",
    "evict",
    "wait",
    "shed",
    "quarantine",
    "stop",
    "reclaim",
    "ahead",
]
"""Kinds of decisions that are explained."""


class _Action(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the tagged union."""


class LoadBlocks(_Action, frozen=True):
    """Bring a function's missing blocks from the repository to the host store; answer BlocksLoaded or LoadFailed."""

    function: FunctionId
    operation: OperationId
    """Which the answer repeats: the function may have been let go, and loaded anew, meanwhile."""


class Drop(_Action, frozen=True):
    """Remove these blocks from a host store: no function that stays there needs them."""

    addresses: tuple[Address, ...]
    store: StoreName = SHARED


class Evict(_Action, frozen=True):
    """A function's blocks are no longer held for it in its host store; Drop removes those that nobody else needs."""

    function: FunctionId
    why: str
    """For `explain`."""


class StartWorker(_Action, frozen=True):
    """Fork a worker; answered by WorkerReady or WorkerExited. On trial it runs once by itself before it is ready."""

    worker: WorkerId
    function: FunctionId
    on_trial: bool = False
    cores: int = 1
    concurrency: int = 1
    """Runs that it may be handed at once."""
    ahead: WorkerId | None = None
    """The process forked ahead in which it goes on, if that still lives; else one is forked."""


class ForkAhead(_Action, frozen=True):
    """Fork a worker ahead from the zygote of this function's tenant; it waits until a start uses it or it is stopped.
    Answered by WorkerReady or WorkerExited.
    """

    worker: WorkerId
    function: FunctionId


class Prepare(_Action, frozen=True):
    """Let the tenant's zygote compile this function's program and create its primitives before a later fork."""

    function: FunctionId
    forget: Address | None = None
    """A program that it should hold no longer."""


class Run(_Action, frozen=True):
    """Send these requests to a worker as one batch; answered by RunEnded or WorkerExited."""

    worker: WorkerId
    run: RunId
    requests: tuple[RequestId, ...]
    function: FunctionId | None = None
    """Whose requests they are; None: of the function that the worker was started for."""
    functions: tuple[FunctionId, ...] = ()
    """Of each request, whose it is, where they are several functions'; that of the first request leads."""


class Bind(_Action, frozen=True):
    """Bind a further function of its family in a worker; answered by Bound, BindFailed or WorkerExited."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """Which the answer repeats."""


class Unbind(_Action, frozen=True):
    """Unbind a function in a worker; the worker has no run of it under way."""

    worker: WorkerId
    function: FunctionId


class StopWorker(_Action, frozen=True):
    """Stop a worker: an idle one is asked to end, a hung one is killed; answered by WorkerExited."""

    worker: WorkerId
    kill: bool = False


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
    """Whose it was; None: of none that is here."""


class LoadFinished(_Action, frozen=True):
    """Report the result of a deploy or a load to its caller. The scheduler drops a new version that failed."""

    function: FunctionId
    error: str | None = None
    reason: str = ""


class Explanation(_Action, frozen=True):
    """No effect: the reason of a decision about a function, for `explain`."""

    function: FunctionId
    what: Decision
    why: str


class SetAlarm(_Action, frozen=True):
    """Post Alarm at this time; replaces the alarm set before."""

    at: Seconds


Action = (
    LoadBlocks
    | Drop
    | Evict
    | StartWorker
    | ForkAhead
    | Prepare
    | Run
    | Bind
    | Unbind
    | StopWorker
    | Reply
    | Refuse
    | LoadFinished
    | Explanation
    | SetAlarm
)
