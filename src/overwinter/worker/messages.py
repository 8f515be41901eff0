"""The messages between the node, its zygotes, workers and executors. Tensors are in buffers, never in messages."""

from typing import Annotated

import msgspec
from msgspec import Meta

from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import Address, RunId, WorkerId
from overwinter.core.tensor import TensorMeta, TensorMetas, TensorSpec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the tagged unions, also of those in executor_messages.py."""


# node -> zygotes


class ForkWorker(Message, frozen=True):
    """Fork a worker.

    Descriptors: its end of a channel, a pipe for its output, then for each concurrent run a buffer for inputs and one
    for outputs; finally the files by which it enters its tenant's control groups.
    """

    worker: WorkerId
    uid: int | None
    """The user of the worker; None: the user does not change."""
    memory_bytes: int
    """The limit of its private memory, without the stacks of the threads for concurrent runs."""
    mapped_bytes: int
    """The address space that it needs in addition, for blocks and buffers."""
    measured_cores: int | None = None
    """The cores of a worker that is measured; None: the worker serves requests."""
    groups: int = 0
    """The number of its tenant's control groups that it enters; without one it stays in those of its zygote."""
    ahead: bool = False
    """Whether the function is still unknown: the worker enters its sandbox and waits for its limits (`TakeOver`)."""
    device: DeviceConfig | None = None
    """The device that the process owns as an executor; None: it is a worker."""


class Ping(Message, frozen=True):
    """Request an answer, by which the node knows that messages are read."""


# node -> base zygote


class ForkZygote(Message, frozen=True):
    """Fork a tenant's zygote. Descriptors: its end of a channel, and the files by which it enters its tenant's
    control groups, if there are any.
    """

    number: int
    """Identifies this fork."""
    uid: int | None
    """The user of the zygote and its workers; None: the user does not change."""
    memory_bytes: int
    """The limit of the largest worker that it may fork."""
    mapped_bytes: int


class KillZygote(Message, frozen=True):
    """Kill a tenant's zygote that has not reported its start. Only the base zygote, its parent, knows its process."""

    number: int


# node -> workers; in `Prepare` node -> a tenant's zygote, and in `HandOver` (executor_messages.py) node -> an executor


class Load(Message, frozen=True):
    """The common parts of a family; a bind follows. Descriptors: the program, then the source of any handler."""

    program: Address
    program_bytes: int
    threads: int = 1
    """The threads of one run."""
    concurrency: int = 1
    """The most concurrent runs."""
    measured: bool = False
    """Whether runs compute on zeros, to be measured."""
    source_bytes: int | None = None
    """The length of the handler's source; None: there is no handler."""
    inputs: tuple[TensorSpec, ...] = ()
    """The inputs of the handler."""
    outputs: tuple[TensorSpec, ...] = ()
    """The outputs of the function, which its handler must return if it has one."""
    on_trial: bool = False
    """Whether the first function that the worker binds is on trial."""
    handler_only: bool = False
    """Whether the program runs on the pool: the worker runs the handler only, and binds no weights."""
    pool_first: bool = False
    """Whether the program runs on the pool, and in the worker only if its inputs are too large or the pool refuses."""
    calls: tuple[int, int] | None = None
    """Of a cut program, the first call of its slice, and the first after it; None: all calls run. Executors only."""


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """The trial that a function must pass before it is bound."""

    warm_up: bool
    """Run the program once on zeros."""
    generated: bool = False
    """Answer a generated request. A failure is reported, but does not refuse the function."""
    samples: tuple[tuple[TensorMeta, ...], ...] = ()
    """Answer these requests, which are in a buffer in this order."""


class Bind(Message, frozen=True):
    """One function of the family: its weights and its assets.

    Descriptors: the blocks that the worker lacks, then the assets, then the buffer of the trial's samples if there are
    any.
    """

    function: str
    blocks: tuple[tuple[Address, int], ...]
    """Each block that contains its weights, once, with its size."""
    pieces: tuple[tuple[int, int], ...]
    """For each weight of the program: the index of its block, and its offset there."""
    handed: tuple[int, ...]
    """The indexes in `blocks` of those that are sent: the process lacks them, or their earlier files were dropped."""
    assets: tuple[tuple[str, Address, int], ...] = ()
    """The names, addresses and sizes of the handler's files."""
    trial: Trial | None = None
    """The trial, for the first function only: a failed trial may end the worker, and other functions with it."""


# node -> a tenant's zygote


class Prepare(Message, frozen=True):
    """Compile this program and run it once, so that the libraries create its primitives (prepared kernels) and later
    forks have both. `load` and `bind` contain nothing of a handler.

    Descriptors: those of `load`, then those of `bind`.
    """

    load: Load
    bind: Bind


class Forget(Message, frozen=True):
    """Drop this compiled program."""

    program: Address


ToBase = ForkWorker | ForkZygote | KillZygote | Ping
ToZygote = ForkWorker | Prepare | Forget | Ping

# zygotes -> node. Of messages of a tenant's zygote and its children, the node trusts only the sender's process id.


class Up(Message, frozen=True):
    """The zygote is ready; `lacking`: the protections that the system does not support. Descriptor: its smaps."""

    lacking: tuple[str, ...] = ()


class Forked(Message, frozen=True):
    """A worker is running; sent before it has data of its function. Descriptor: its own smaps."""

    worker: WorkerId


class ForkFailed(Message, frozen=True):
    """A fork failed."""

    worker: WorkerId
    reason: str


class Exited(Message, frozen=True):
    """A worker ended; `status` is its exit code, or the negated number of the signal that killed it."""

    worker: WorkerId
    status: int


class PreparationEnded(Message, frozen=True):
    """A preparation has ended, successfully or not."""


class Pong(Message, frozen=True):
    """The answer to a ping."""


FromZygote = Up | Forked | ForkFailed | Exited | PreparationEnded | Pong

# node -> worker; of these, an executor gets Unbind, RunBatch and Stop too


class Unbind(Message, frozen=True):
    """Unbind a function after its runs, even if its bind failed."""

    function: str


class RunBatch(Message, frozen=True):
    """Run these requests; their inputs are in the slot's first buffer in this order."""

    run: RunId
    functions: tuple[str, ...]
    """The function of each request. Without requests: the functions whose blocks are copied to the device ahead."""
    slot: int
    """A slot that no other run uses until this one is answered."""
    requests: tuple[tuple[TensorMeta, ...], ...]


class Measure(Message, frozen=True):
    """Report the private memory; only for a worker that was forked to be measured."""

    function: str
    batch: int | None = None
    """Before that, time each layer in a run of this many rows; None: no run."""


class Stop(Message, frozen=True):
    """End the worker: no further message follows."""


class TakeOver(Message, frozen=True):
    """Use a process forked ahead as a worker, with these limits, as in `ForkWorker`. A load follows."""

    memory_bytes: int
    mapped_bytes: int


class PoolCallResult(Message, frozen=True):
    """The answer to `PoolCall`: the outputs in the second buffer, an error, or None: the worker runs the program."""

    number: int
    outcome: "Outputs | Failure | None"


ToWorker = Load | Bind | Unbind | RunBatch | PoolCallResult | Measure | Stop

# worker -> node


class Waiting(Message, frozen=True):
    """A process forked ahead is in its sandbox, and waits."""


class Trying(Message, frozen=True):
    """The function's trial begins: if this process ends before it is ready, even during compilation, the function is at
    fault.
    """


class Ready(Message, frozen=True):
    """The family is loaded and its first function is bound, after any trial; or the device is reserved."""

    warning: str = ""
    """What the author should know about the trial."""


class LoadFailed(Message, frozen=True):
    """Loading the family, binding its first function or reserving the device has failed; the process exits."""

    error: str
    message: str


class Bound(Message, frozen=True):
    """Another function is bound. An executor does not report this."""

    function: str


class BindFailed(Message, frozen=True):
    """A hand-over or another function's bind has failed. The process keeps the blocks until the function is unbound."""

    function: str
    error: str
    message: str


class Failure(Message, frozen=True):
    """A failed request."""

    error: str
    message: str


class Outputs(Message, frozen=True):
    """A request's outputs. They are in the buffer in this order, after those of the earlier requests."""

    metas: TensorMetas


class Answer(Message, frozen=True):
    """The result of a run, with one outcome per request."""

    run: RunId
    outcomes: tuple[Outputs | Failure, ...]
    moved_bytes: int = 0
    """The bytes that an executor brought to its device for the run."""
    peer_bytes: int = 0
    """The part of these that came from another device."""
    unplaced: bool = False
    """Whether nothing ran because the blocks did not fit on the device."""
    program_s: float = 0.0
    """The mean seconds of the runs of the program that the pool left to the worker; 0: there were none."""
    fault: str = ""
    """Why the executor ends after this run: its device is unusable in this process."""


class WarmedUp(Message, frozen=True):
    """The answer to `WarmUp`: the warm-up has ended, early if it was interrupted."""

    interrupted: bool


class PoolCall(Message, frozen=True):
    """Run a function's program on the pool. Its inputs lie, in order, in the second buffer until `PoolCallResult`."""

    number: int
    """Identifies the answer."""
    function: str
    slot: int
    """The slot of the run in progress; 0 in a trial."""
    inputs: TensorMetas


class Measured(Message, frozen=True):
    """The requested measurements."""

    private_bytes: int
    layers_s: Annotated[tuple[float, ...], Meta(max_length=16_384)] = ()


FromWorker = Waiting | Trying | Ready | LoadFailed | Bound | BindFailed | PoolCall | Answer | WarmedUp | Measured
"""An executor sends Ready, LoadFailed, BindFailed, Answer and WarmedUp only."""
