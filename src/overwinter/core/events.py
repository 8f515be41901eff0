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
    """A version, or a part of it, exists. A new one is `on_trial` until its worker is ready or, on the pool, its blocks
    are loaded; a restored one is not.
    """

    function: FunctionSpec
    on_trial: bool = False
    resident: bool = False
    """Whether the host store already has all its blocks."""
    quarantined: str = ""
    """Why the function is out of service; empty: it is not. If the scheduler failed on it before the node started, a
    load ends that; if its program cannot be read, the node refuses to load it.
    """


class Removed(_Event, frozen=True):
    """A version, or a part of it, was removed."""

    function: FunctionId


class TrafficSet(_Event, frozen=True):
    """From now on these versions get the requests without a version; if empty, the newest version does."""

    name: FunctionName
    shares: Shares


class LoadAsked(_Event, frozen=True):
    """A caller wants the function to be awake now. If it was unloaded, it becomes available again."""

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
    """When the request expires; None: after the timeout of its function."""
    priority: int = 0
    """The priority: 1 is served first, larger numbers later; 0 means the default, 100."""
    due: Seconds | None = None
    """The due time; None: given by the SLO of its function."""
    caller: tuple[WorkerId, RunId] | None = None
    """The run of a handler that waits for the answer."""


class Cancelled(_Event, frozen=True):
    """Nobody waits for this request: its caller disconnected, or its pipeline or the calling handler's run ended."""

    request: RequestId


class BlocksLoaded(_Event, frozen=True):
    """All blocks of a function are in the host store; `added` bytes came from disk."""

    function: FunctionId
    operation: OperationId
    """The operation of the LoadBlocks that this answers."""
    added: int
    addresses: tuple[Address, ...] = ()
    """All its blocks, so that they can be released if they are no longer needed; empty if all were there before."""
    store: StoreName = SHARED


class LoadFailed(_Event, frozen=True):
    """A function's blocks could not be loaded; or they were, and a pipeline does not accept the version on trial."""

    function: FunctionId
    operation: OperationId
    """The operation of the LoadBlocks that this answers."""
    error: str
    message: str
    addresses: tuple[Address, ...] = ()
    store: StoreName = SHARED


class WorkerReady(_Event, frozen=True):
    """A worker has its program and its weights and is idle; or an executor has its device; or a process forked ahead
    waits to be used.
    """

    worker: WorkerId


class Bound(_Event, frozen=True):
    """A worker has bound another function."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """The operation of the Bind that this answers."""


class BindFailed(_Event, frozen=True):
    """A worker could not bind another function. It keeps the function's blocks until the node unbinds the function."""

    worker: WorkerId
    function: FunctionId
    operation: OperationId
    """The operation of the Bind that this answers."""
    error: str
    message: str
    lost_blocks: bool = False
    """Whether blocks were missing from the host store, so that they must be loaded again."""


class RunFailure(msgspec.Struct, frozen=True):
    """A failed request of a run, with the reason."""

    request: RequestId
    error: str
    message: str


class RunEnded(_Event, frozen=True):
    """A worker or an executor answered a run; the node holds the outputs of the requests not in `failures`."""

    worker: WorkerId
    run: RunId
    failures: tuple[RunFailure, ...] = ()
    moved_bytes: int = 0
    """The bytes that were transferred to a device for the run."""
    unplaced: bool = False
    """Whether nothing ran because the blocks did not fit on the device: its free memory is not contiguous."""
    peer_bytes: int = 0
    """The part of the moved bytes that came from another device."""
    program_s: float = 0.0
    """The mean seconds of the calls of the program that the pool left to a handler's worker; 0: there were none."""
    fault: str = ""
    """Why the executor ends after this run: its device is unusable in this process."""


class PreparedOnDevice(_Event, frozen=True):
    """An executor has ended a preparation."""

    worker: WorkerId
    operation: OperationId
    """The operation of the PrepareOnDevice that this answers."""
    interrupted: bool = False
    """Whether it ended early, because a run was ordered or the function was unbound."""


class WorkerExited(_Event, frozen=True):
    """A worker, an executor or a process forked ahead ended, whether it was asked to or not."""

    worker: WorkerId
    error: str
    reason: str
    lost_blocks: bool = False
    """Whether blocks were missing from the host store, so that they must be loaded again."""


class Demoted(_Event, frozen=True):
    """A worker computed more than its runs allow: from now on it gets only idle cores."""

    worker: WorkerId


class ZygoteLost(_Event, frozen=True):
    """A zygote died, or was stopped to make room for another; the programs that it had prepared are lost."""

    tenant: TenantId | None = None
    """The tenant whose zygote it was; None: the base zygote, and with it all others."""


class Profiled(_Event, frozen=True):
    """A profile of a function on this machine is known or has changed."""

    function: FunctionId
    profile: Profile


class RateForecast(_Event, frozen=True):
    """The forecast of a function's request rate has changed."""

    function: FunctionId
    rate: float
    """The rate in requests per second."""


class MemoryPressure(_Event, frozen=True):
    """The machine is short of memory: this many bytes should be released."""

    nbytes: int


class MemoryMeasured(_Event, frozen=True):
    """The measured memory of these workers. That of the others differs little from the scheduler's estimate."""

    taken: tuple[tuple[WorkerId, int], ...]
    """The private bytes of each worker."""


class HostCapacityMeasured(_Event, frozen=True):
    """The space for host stores on the tmpfs has changed: from now on all together may hold this many bytes."""

    nbytes: int


class Alarm(_Event, frozen=True):
    """The time of the last SetAlarm has been reached."""


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
    | PreparedOnDevice
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
