"""The messages between the node, the zygotes and the workers. Tensors are in buffers, never in messages."""

import msgspec

from overwinter.core.ids import Address, RunId, WorkerId
from overwinter.core.tensor import TensorMeta, TensorSpec


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the tagged unions."""


# node -> zygotes


class ForkWorker(_Message, frozen=True):
    """Fork a worker; descriptors: its end of a channel, where it prints, then for each run it may have at once a
    buffer for inputs and one for outputs; if it is `grouped`, last the file by which it enters its tenant's control
    group.
    """

    worker: WorkerId
    uid: int | None
    """The user it becomes; None: it stays who it is."""
    memory_bytes: int
    """Most private memory, beside the stacks of the threads that runs at once need."""
    mapped_bytes: int
    """Address space that it needs beside that, for blocks and buffers."""
    measured_cores: int | None = None
    """It is to be measured, bound to so many cores; None: it serves."""
    grouped: bool = False
    """Otherwise it is in the group of its zygote."""
    ahead: bool = False
    """No function is known yet: contained, it waits to be told what it may have (`TakeOver`)."""


class Ping(_Message, frozen=True):
    """Answer, so that the node knows that orders are heard."""


# node -> base zygote


class ForkZygote(_Message, frozen=True):
    """Fork a tenant's zygote; descriptors: its end of a channel, and perhaps the file by which it enters its tenant's
    control group.
    """

    number: int
    """Of this fork."""
    uid: int | None
    """The user it and its workers become; None: it stays who it is."""
    memory_bytes: int
    """As of the largest worker that it may fork."""
    mapped_bytes: int


class KillZygote(_Message, frozen=True):
    """Kill a tenant's zygote that has not reported its start, so that only its parent knows its process."""

    number: int


class Load(_Message, frozen=True):
    """The common parts of a family; descriptors: the program, then the handler's source if there is one. A bind
    follows.
    """

    program: Address
    program_bytes: int
    threads: int = 1
    """That work on one run."""
    concurrency: int = 1
    """Most runs at once."""
    measured: bool = False
    """What runs is zeros."""
    source_bytes: int | None = None
    """None: no handler."""
    inputs: tuple[TensorSpec, ...] = ()
    """What the handler takes."""
    outputs: tuple[TensorSpec, ...] = ()
    """What it has to give."""
    tried: bool = False
    """The function that it is to bind first is on trial."""


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """The trial that a function must pass before it is bound."""

    warm_up: bool
    """Run the program once on zeros."""
    made_up: bool = False
    """Answer a request that is made up; what fails then is told, and refuses nothing."""
    samples: tuple[tuple[TensorMeta, ...], ...] = ()
    """Answer these requests, which lie in a buffer in this order."""


class Bind(_Message, frozen=True):
    """One function of the family: its weights and its assets. Descriptors: the blocks that the worker lacks, then the
    assets, then the buffer of the trial's samples if there are any.
    """

    function: str
    blocks: tuple[tuple[Address, int], ...]
    """Each block that its weights lie in, once, and its bytes."""
    pieces: tuple[tuple[int, int], ...]
    """For each weight of the program: which block, and where in it."""
    handed: tuple[int, ...]
    """Which of the blocks are handed over, by their places in `blocks`: all but those that functions bound before this
    one have.
    """
    assets: tuple[tuple[str, Address, int], ...] = ()
    """Names, addresses and sizes of the handler's files."""
    trial: Trial | None = None
    """Of the first function alone: what is tried may end the worker, and others would end with it."""


# node -> a tenant's zygote


class Prepare(_Message, frozen=True):
    """Compile this program and build its primitives, so that the next fork has both; descriptors: those of `load`, then
    those of `bind`. There is no handler.
    """

    load: Load
    bind: Bind


class Forget(_Message, frozen=True):
    """Hold this program ready no longer."""

    program: Address


ToBase = ForkWorker | ForkZygote | KillZygote | Ping
ToZygote = ForkWorker | Prepare | Forget | Ping

# zygotes -> node. Who sent what is told by the kernel; a tenant's zygote and its children are believed nothing else.


class Up(_Message, frozen=True):
    """The zygote is ready; `uncontained` names the protections that the system does not support; descriptor: its own
    smaps.
    """

    uncontained: tuple[str, ...] = ()


class Forked(_Message, frozen=True):
    """A worker is running, reported before it has anything of its function; descriptor: its own smaps."""

    worker: WorkerId


class Unforked(_Message, frozen=True):
    """The system allows no further process."""

    worker: WorkerId
    reason: str


class Exited(_Message, frozen=True):
    """A worker ended; `status` is the exit code from waitpid."""

    worker: WorkerId
    status: int


class ProgramReady(_Message, frozen=True):
    """A preparation is complete, as far as possible."""


class Pong(_Message, frozen=True):
    """The answer to a ping."""


FromZygote = Up | Forked | Unforked | Exited | ProgramReady | Pong

# node -> worker


class Unbind(_Message, frozen=True):
    """Unbind a function that was bound, or could not be, after its runs."""

    function: str


class RunBatch(_Message, frozen=True):
    """Run these requests; their inputs are in the slot's first buffer in this order."""

    run: RunId
    functions: tuple[str, ...]
    """Of each request, which one it is of."""
    slot: int
    """Free of every other run until this one is answered."""
    requests: tuple[tuple[TensorMeta, ...], ...]
    buffer_bytes: int


class Measure(_Message, frozen=True):
    """Say how much memory is private; only a worker that was made to be measured can."""

    function: str
    batch: int | None = None
    """Rows of one run before that, in which each layer is timed; None: no run."""


class Stop(_Message, frozen=True):
    """Nothing more will come."""


class TakeOver(_Message, frozen=True):
    """A worker that was forked ahead will serve, with these limits, as in `ForkWorker`. A load follows."""

    memory_bytes: int
    mapped_bytes: int


ToWorker = Load | Bind | Unbind | RunBatch | Measure | Stop

# worker -> node


class Waiting(_Message, frozen=True):
    """A worker that was forked ahead is contained, and waits."""


class Trying(_Message, frozen=True):
    """The function is on trial from now on: what ends this process before it is ready, also while the program is
    compiled, is the function's doing.
    """


class Ready(_Message, frozen=True):
    """The family is loaded, its first function bound and, on trial, tried."""

    doubts: str = ""
    """What its author should know of the trial."""


class LoadFailed(_Message, frozen=True):
    """The family cannot be loaded or its first function not bound; the worker exits."""

    error: str
    message: str


class Bound(_Message, frozen=True):
    """A further function is bound."""

    function: str


class BindFailed(_Message, frozen=True):
    """A further function could not be bound; its blocks are kept until it is unbound."""

    function: str
    error: str
    message: str


class Failure(_Message, frozen=True):
    """A request that got no answer."""

    error: str
    message: str


class Outputs(_Message, frozen=True):
    """A request's outputs, which are in the buffer in this order after those of the requests before it."""

    metas: tuple[TensorMeta, ...]


class Answer(_Message, frozen=True):
    """What came of a run, one outcome a request."""

    run: RunId
    outcomes: tuple[Outputs | Failure, ...]
    buffer_bytes: int


class Measured(_Message, frozen=True):
    """The requested measurements."""

    private_bytes: int
    layers_s: tuple[float, ...] = ()


FromWorker = Waiting | Trying | Ready | LoadFailed | Bound | BindFailed | Answer | Measured
