"""All that a scheduler may ask for. Frozen data; the node or the simulator carries it out."""

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
    """Take these blocks out of a host store: no function that is kept there needs them."""

    addresses: tuple[Address, ...]
    store: StoreName = SHARED


class StartWorker(_Action, frozen=True):
    """Fork a worker; answer WorkerReady or WorkerExited. On trial it runs once by itself before it is ready."""

    worker: WorkerId
    function: FunctionId
    on_trial: bool = False
    cores: int = 1
    concurrency: int = 1
    """Runs that it may be handed at once."""
    ahead: WorkerId | None = None
    """The process forked ahead in which it goes on, if that still lives; else one is forked."""


class ForkAhead(_Action, frozen=True):
    """Fork a process from the zygote of this function's tenant that waits for a start to go on in it, or for its end;
    answer WorkerReady or WorkerExited.
    """

    worker: WorkerId
    function: FunctionId


class Prepare(_Action, frozen=True):
    """Let its tenant's zygote compile this function's program and build its primitives before a later fork."""

    function: FunctionId
    forget: Address | None = None
    """A program that it should hold no longer."""


class Run(_Action, frozen=True):
    """Hand these requests to a worker as one batch; answer RunEnded or WorkerExited."""

    worker: WorkerId
    run: RunId
    requests: tuple[RequestId, ...]
    function: FunctionId | None = None
    """Whose requests they are; None: of the function that the worker was started for."""
    functions: tuple[FunctionId, ...] = ()
    """Of each request, whose it is, where they are several functions'; that of the first request leads."""


class Bind(_Action, frozen=True):
    """Bind a further function of its family in a worker; answer Bound, BindFailed or WorkerExited."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """Which the answer repeats."""


class Unbind(_Action, frozen=True):
    """Let a worker let go of a function that it has bound, and that it runs nothing of."""

    worker: WorkerId
    function: FunctionId


class StopWorker(_Action, frozen=True):
    """End a worker: an idle one is asked, a hung one is killed; answer WorkerExited."""

    worker: WorkerId
    kill: bool = False


class Reply(_Action, frozen=True):
    """Hand a request its outputs."""

    request: RequestId
    function: FunctionId
    start: Start


class Refuse(_Action, frozen=True):
    """Tell a request that it gets no answer, and why."""

    request: RequestId
    error: str
    message: str
    retry_after_s: float | None = None
    function: FunctionId | None = None
    """Whose it was; None: of none that is here."""


class LoadFinished(_Action, frozen=True):
    """Tell who waits for a deploy or a load how it went. A new version that failed is forgotten by the scheduler."""

    function: FunctionId
    error: str | None = None
    reason: str = ""


class Explanation(_Action, frozen=True):
    """Nothing to carry out: why something was decided about a function, for people who ask."""

    function: FunctionId
    what: Decision
    why: str


class SetAlarm(_Action, frozen=True):
    """Send Alarm at this time; replaces the alarm set before."""

    at: Seconds


Action = (
    LoadBlocks
    | Drop
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
