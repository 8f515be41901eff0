"""What the node, the zygotes and the bodies tell each other. Tensors lie in trays, never in here."""

import msgspec

from overwinter.core.ids import Address, RunId, WorkerId
from overwinter.core.tensor import TensorMeta, TensorSpec


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the tagged unions."""


# node -> zygote


class ForkBody(_Message, frozen=True):
    """Fork a body; descriptors: its end of a channel, where it prints, then for each run it may have at once a tray for
    inputs and one for outputs.
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


class ForkZygote(_Message, frozen=True):
    """Fork a second zygote that may hold programs; descriptor: its end of a channel."""


class Kill(_Message, frozen=True):
    """Kill a body that does not listen."""

    worker: WorkerId


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


class Prepare(_Message, frozen=True):
    """Compile this program and build its primitives, so that the next fork has both."""

    load: Load
    forget: Address | None = None
    """A program to hold no longer."""


ToZygote = ForkBody | ForkZygote | Kill | Prepare

# zygote -> node


class Up(_Message, frozen=True):
    """The zygote has what it needs; `uncontained` names what the system would not let it apply; descriptor: its own
    smaps.
    """

    uncontained: tuple[str, ...]


class Forked(_Message, frozen=True):
    """A body lives, as it says itself before it is contained; descriptor: its own smaps. The kernel says which process
    it is.
    """

    worker: WorkerId


class Exited(_Message, frozen=True):
    """A body is gone; `status` as waitpid gives it, turned into an exit code."""

    worker: WorkerId
    status: int


FromZygote = Up | Forked | Exited

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
