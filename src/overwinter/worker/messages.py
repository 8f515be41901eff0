"""What the node, the zygotes and the bodies tell each other. Tensors lie in trays, never in here."""

import msgspec

from overwinter.core.ids import Address, RunId, WorkerId
from overwinter.core.tensor import TensorMeta, TensorSpec


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the tagged unions."""


# node -> zygotes


class ForkBody(_Message, frozen=True):
    """Fork a body; descriptors: its end of a channel, where it prints, then for each run it may have at once a tray for
    inputs and one for outputs; if it is `grouped`, last the file by which it enters its tenant's control group.
    """

    worker: WorkerId
    uid: int | None
    """The user it becomes; None: it stays who it is."""
    memory_bytes: int
    """Most private memory, beside the stacks of the threads that runs at once need."""
    mapped_bytes: int
    """Address space that it needs beside that, for blocks and trays."""
    measured_cores: int | None = None
    """It is to be measured, bound to so many cores; None: it serves."""
    grouped: bool = False
    """Otherwise it is in the group of its zygote."""


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
    """The user it and its bodies become; None: it stays who it is."""
    memory_bytes: int
    """As of the largest body that it may fork."""
    mapped_bytes: int


class KillZygote(_Message, frozen=True):
    """Kill a tenant's zygote that has not said yet that it lives, so that nobody else knows its process."""

    number: int


class Load(_Message, frozen=True):
    """What to run; descriptors: program, then blocks, then the handler's source and assets if there is one."""

    function: str
    program: Address
    program_bytes: int
    block_bytes: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    """For each weight of the program: which block, and where in it."""
    threads: int = 1
    """That work on one run."""
    concurrency: int = 1
    """Most runs at once."""
    on_trial: bool = False
    measured: bool = False
    """What runs is zeros."""
    source_bytes: int | None = None
    """None: no handler."""
    assets: tuple[tuple[str, int], ...] = ()
    """Names and sizes of the handler's files."""
    inputs: tuple[TensorSpec, ...] = ()
    """What the handler takes, if it has to prove itself."""
    outputs: tuple[TensorSpec, ...] = ()
    """What it has to give."""
    samples: tuple[tuple[TensorMeta, ...], ...] = ()
    """Requests that it has to answer to prove itself; they lie in the first slot's tray in this order."""


# node -> a tenant's zygote


class Prepare(_Message, frozen=True):
    """Compile this program and build its primitives, so that the next fork has both; descriptors: those of `load`,
    which has no handler.
    """

    load: Load


class Forget(_Message, frozen=True):
    """Hold this program ready no longer."""

    program: Address


ToBase = ForkBody | ForkZygote | KillZygote | Ping
ToZygote = ForkBody | Prepare | Forget | Ping

# zygotes -> node. Who sent what is told by the kernel; a tenant's zygote and its children are believed nothing else.


class Up(_Message, frozen=True):
    """The zygote has what it needs; `uncontained` names what the system would not let it apply; descriptor: its own
    smaps.
    """

    uncontained: tuple[str, ...] = ()


class Forked(_Message, frozen=True):
    """A body lives, as it says itself before anything of its function is there; descriptor: its own smaps."""

    worker: WorkerId


class Unforked(_Message, frozen=True):
    """The system has no room for one more process."""

    worker: WorkerId
    reason: str


class Exited(_Message, frozen=True):
    """A body is gone; `status` as waitpid gives it, turned into an exit code."""

    worker: WorkerId
    status: int


class ProgramReady(_Message, frozen=True):
    """What was to be prepared is done, as far as it can be."""


class Pong(_Message, frozen=True):
    """The answer to a ping."""


FromZygote = Up | Forked | Unforked | Exited | ProgramReady | Pong

# node -> body


class RunBatch(_Message, frozen=True):
    """Run these requests; their inputs lie in the slot's first tray in this order."""

    run: RunId
    slot: int
    """Free of every other run until this one is answered."""
    requests: tuple[tuple[TensorMeta, ...], ...]
    tray_bytes: int


class Measure(_Message, frozen=True):
    """Say how much memory is private; only a body that was made to be measured can."""

    batch: int | None = None
    """Rows of one run before that, in which each layer is timed; None: no run."""


class Stop(_Message, frozen=True):
    """Nothing more will come."""


ToBody = Load | RunBatch | Measure | Stop

# body -> node


class Trying(_Message, frozen=True):
    """The function is on trial from now on: what ends this process before it is ready is the function's doing."""


class Ready(_Message, frozen=True):
    """The function is loaded and, on trial, has run once."""

    doubts: str = ""
    """What its author should know of the trial."""


class LoadFailed(_Message, frozen=True):
    """The function cannot be loaded; the body exits."""

    error: str
    message: str


class Failure(_Message, frozen=True):
    """A request that got no answer."""

    error: str
    message: str


class Outputs(_Message, frozen=True):
    """A request's outputs, which lie in the tray in this order after those of the requests before it."""

    metas: tuple[TensorMeta, ...]


class Answer(_Message, frozen=True):
    """What came of a run, one outcome a request."""

    run: RunId
    outcomes: tuple[Outputs | Failure, ...]
    tray_bytes: int


class Measured(_Message, frozen=True):
    """What was to be measured."""

    private_bytes: int
    layers_s: tuple[float, ...] = ()


FromBody = Trying | Ready | LoadFailed | Answer | Measured
