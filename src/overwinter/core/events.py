"""All that can happen to a node's scheduler. Frozen data: names, sizes and times, never tensors."""

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
    """A version was taken away by its owner."""

    function: FunctionId


class TrafficSet(_Event, frozen=True):
    """Requests for a name without a version go to these versions from now on; to none: to the newest."""

    name: FunctionName
    shares: Shares


class LoadAsked(_Event, frozen=True):
    """Someone wants the function awake now, and available if it had been unloaded."""

    function: FunctionId


class UnloadAsked(_Event, frozen=True):
    """Someone wants the function to give back its memory and to answer no more."""

    function: FunctionId


class Arrived(_Event, frozen=True):
    """A request waits; its inputs lie with the node under the same id."""

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
    """Nobody waits for this request's answer any more."""

    request: RequestId


class BlocksLoaded(_Event, frozen=True):
    """All blocks of a function lie in the host store; `added` bytes came from disk."""

    function: FunctionId
    operation: OperationId
    """Of the LoadBlocks that this answers."""
    added: int
    addresses: tuple[Address, ...] = ()
    """What was loaded, so that it can be let go if nobody wants it any more; only told when bytes were added."""
    store: StoreName = SHARED


class LoadFailed(_Event, frozen=True):
    """The host store could not take a function's blocks."""

    function: FunctionId
    operation: OperationId
    """Of the LoadBlocks that this answers."""
    error: str
    message: str
    addresses: tuple[Address, ...] = ()
    store: StoreName = SHARED


class WorkerReady(_Event, frozen=True):
    """A worker has its program and its weights and waits for work."""

    worker: WorkerId


class Bound(_Event, frozen=True):
    """A worker has bound a further function."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """Of the Bind that this answers."""


class BindFailed(_Event, frozen=True):
    """A worker could not bind a further function, and has let go of what it had of it."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """Of the Bind that this answers."""
    error: str
    message: str
    lost_blocks: bool = False
    """The host store no longer held what it should: stage anew."""


class RunFailure(msgspec.Struct, frozen=True):
    """One request of a run that got no answer, and why."""

    request: RequestId
    error: str
    message: str


class RunEnded(_Event, frozen=True):
    """A worker answered a run; outputs of those not in `failures` lie with the node."""

    worker: WorkerId
    run: RunId
    failures: tuple[RunFailure, ...] = ()


class WorkerExited(_Event, frozen=True):
    """A worker process is gone, asked for or not."""

    worker: WorkerId
    error: str
    reason: str
    lost_blocks: bool = False
    """The host store no longer held what it should: stage anew."""


class Demoted(_Event, frozen=True):
    """A worker computed beyond what it was given: it computes only when nobody else wants the core, for good."""

    worker: WorkerId


class ZygoteLost(_Event, frozen=True):
    """A zygote died or made room; what it had prepared is gone."""

    tenant: TenantId | None = None
    """Whose it was; None: everybody's is gone."""


class Profiled(_Event, frozen=True):
    """A function was measured on this machine, or measured anew."""

    function: FunctionId
    profile: Profile


class RateForecast(_Event, frozen=True):
    """Somebody knows at what rate requests of a function will come."""

    function: FunctionId
    rate: float
    """Requests per second."""


class MemoryPressure(_Event, frozen=True):
    """The machine runs short of memory: so many bytes should be given back."""

    nbytes: int


class MemoryMeasured(_Event, frozen=True):
    """What workers take now. Of the others it is as it was last told, or near enough."""

    taken: tuple[tuple[WorkerId, int], ...]
    """Bytes of each."""


class HostCapacityMeasured(_Event, frozen=True):
    """The tmpfs has become larger or smaller: all host stores together may hold so many bytes from now on."""

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
