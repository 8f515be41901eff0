"""The events that a scheduler handles. They are frozen data: names, sizes and times, never tensors."""

import msgspec

from overwinter.core.function import FunctionSpec
from overwinter.core.ids import (
    SHARED,
    Address,
    FunctionId,
    FunctionName,
    OperationId,
    RequestId,
    RunId,
    Seconds,
    StoreName,
    TenantId,
    WorkerId,
)
from overwinter.core.profile import Profile
from overwinter.core.versions import Shares


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the tagged union."""


class Deployed(_Event, frozen=True):
    """A version exists. A new one is `on_trial` until a worker of it has run; a restored one is not."""

    function: FunctionSpec
    on_trial: bool = False
    resident: bool = False
    """Whether the host store holds all its blocks already."""
    quarantined: str = ""
    """Why it is not to be served until it is loaded: how the scheduler failed on it before the node started."""


class Removed(_Event, frozen=True):
    """The owner removed a version."""

    function: FunctionId


class TrafficSet(_Event, frozen=True):
    """From now on these versions get the requests that name none; if empty, the newest version."""

    name: FunctionName
    shares: Shares


class LoadAsked(_Event, frozen=True):
    """A caller wants the function to be awake now, and available if it was unloaded."""

    function: FunctionId


class UnloadAsked(_Event, frozen=True):
    """A caller wants the function to release its memory and to answer no requests."""

    function: FunctionId


class Arrived(_Event, frozen=True):
    """A request arrived; the node holds its inputs under the same id."""

    request: RequestId
    name: FunctionName
    version: int | None
    deadline: Seconds | None
    """None: the function's own timeout counts."""
    priority: int = 0
    """1 is served first, larger numbers later; 0 is the ordinary, 100."""
    due: Seconds | None = None
    """When it is late; None: when the SLO of its function says."""


class Cancelled(_Event, frozen=True):
    """The caller of this request disconnected."""

    request: RequestId


class BlocksLoaded(_Event, frozen=True):
    """All blocks of a function are in the host store; `added` bytes came from disk."""

    function: FunctionId
    operation: OperationId
    """Of the LoadBlocks that this answers."""
    added: int
    addresses: tuple[Address, ...] = ()
    """What was loaded, so that it can be let go if nobody wants it any more; only told when bytes were added."""
    store: StoreName = SHARED


class LoadFailed(_Event, frozen=True):
    """The host store could not load a function's blocks."""

    function: FunctionId
    operation: OperationId
    """Of the LoadBlocks that this answers."""
    error: str
    message: str
    addresses: tuple[Address, ...] = ()
    store: StoreName = SHARED


class WorkerReady(_Event, frozen=True):
    """A worker has its program and its weights and is idle."""

    worker: WorkerId


class Bound(_Event, frozen=True):
    """A worker has bound a further function."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """Of the Bind that this answers."""


class BindFailed(_Event, frozen=True):
    """A worker could not bind a further function, and has released what it had of it."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """Of the Bind that this answers."""
    error: str
    message: str
    lost_blocks: bool = False
    """The host store no longer held what it should: stage anew."""


class RunFailure(msgspec.Struct, frozen=True):
    """A request of a run that failed, and the reason."""

    request: RequestId
    error: str
    message: str


class RunEnded(_Event, frozen=True):
    """A worker answered a run; the node holds the outputs of the requests not in `failures`."""

    worker: WorkerId
    run: RunId
    failures: tuple[RunFailure, ...] = ()


class WorkerExited(_Event, frozen=True):
    """A worker process ended, whether it was asked to or not."""

    worker: WorkerId
    error: str
    reason: str
    lost_blocks: bool = False
    """The host store no longer held what it should: stage anew."""


class Demoted(_Event, frozen=True):
    """A worker computed more than its runs allow: from now on it gets only idle cores."""

    worker: WorkerId


class ZygoteLost(_Event, frozen=True):
    """A zygote died or was stopped for another; the programs that it had prepared are lost."""

    tenant: TenantId | None = None
    """Whose it was; None: everybody's is gone."""


class Profiled(_Event, frozen=True):
    """A profile of a function on this machine is known or has changed."""

    function: FunctionId
    profile: Profile


class RateForecast(_Event, frozen=True):
    """The future request rate of a function is known."""

    function: FunctionId
    rate: float
    """Requests per second."""


class MemoryPressure(_Event, frozen=True):
    """The machine runs short of memory: so many bytes should be released."""

    nbytes: int


class MemoryMeasured(_Event, frozen=True):
    """The memory of these workers. That of the others is unchanged, or nearly so."""

    taken: tuple[tuple[WorkerId, int], ...]
    """Bytes of each."""


class HostCapacityMeasured(_Event, frozen=True):
    """The size of the tmpfs changed: from now on all host stores together may hold so many bytes."""

    nbytes: int


class Alarm(_Event, frozen=True):
    """The time of the last SetAlarm has come."""


Event = (
    Deployed
    | Removed
    | TrafficSet
    | LoadAsked
    | UnloadAsked
    | Arrived
    | Cancelled
    | BlocksLoaded
    | LoadFailed
    | WorkerReady
    | Bound
    | BindFailed
    | RunEnded
    | WorkerExited
    | Demoted
    | ZygoteLost
    | Profiled
    | RateForecast
    | MemoryPressure
    | MemoryMeasured
    | HostCapacityMeasured
    | Alarm
)
