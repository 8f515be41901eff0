"""The messages of the node to executors. Their answers are among those of workers (messages.py)."""

import msgspec

from overwinter.core.ids import SHARED, DeviceId, StoreName, TenantId
from overwinter.worker.messages import Bind, Load, Message, RunBatch, Stop, Unbind


class Reserve(Message, frozen=True):
    """Reserve the device; the first message. Descriptors: the memory if it is `shared`, then the file of any switch."""

    shared: bool = False
    """Whether other devices may copy from it."""
    sharers: int = 0
    """The number of devices behind its switch, whose file has the time when it is next free; 0: there is no switch."""


class BringFrom(Message, frozen=True):
    """The next run copies blocks from this peer. Descriptor: the peer's memory, unless it was sent before."""

    peer: DeviceId


class PeerEnded(Message, frozen=True):
    """The executor of this device has ended, and the device will have other memory."""

    peer: DeviceId


class HandOver(Message, frozen=True):
    """A function that will run on the device. Descriptors: the program, then the blocks that the executor lacks."""

    tenant: TenantId
    """The owner of the memory that its blocks will have."""
    load: Load
    bind: Bind
    private_bytes: dict[int, int] = msgspec.field(default_factory=dict)
    """The private memory of a worker of its program, by the number of requests in a run; empty: it is not known."""
    run_s: dict[int, float] = msgspec.field(default_factory=dict)
    """The seconds of a run on one core, by the number of its requests; empty: it was not profiled."""
    sizes: tuple[int, ...] = ()
    """The bytes of each block of `bind` on the device, if the function is a slice: another slice may use other weights
    of the block. Empty: as many as its weights take.
    """
    store: StoreName = SHARED
    """The host store of its blocks. A block that is in several host stores has a separate file in each."""


class Learn(Message, frozen=True):
    """The program of a function was profiled since its hand-over. The figures are of the same kind as in `HandOver`."""

    function: str
    private_bytes: dict[int, int]
    run_s: dict[int, float]


class Evict(Message, frozen=True):
    """Evict these functions from the device. Their blocks in the host store stay mapped."""

    functions: tuple[str, ...]


class Unmap(Message, frozen=True):
    """Forget a function, but not its blocks on the device. It will be handed over again before its next run."""

    function: str


class WarmUp(Message, frozen=True):
    """Warm up a function: on a virtual device, run its program once on zeros, and compile its form that does not wait
    for blocks; on a GPU, register its blocks. Any message that arrives meanwhile interrupts the warm-up.
    """

    function: str


ToExecutor = Reserve | HandOver | Learn | WarmUp | BringFrom | PeerEnded | Evict | Unmap | Unbind | RunBatch | Stop
