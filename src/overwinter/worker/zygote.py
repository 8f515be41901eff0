"""The zygote: imports PyTorch once, stays single-threaded, and forks bodies in milliseconds.

There are two. The first holds nothing of anybody's; bodies with code of their own are forked from it. From
it the node forks the second, which compiles programs, builds their primitives, and forks the bodies that
run nothing but a program. Neither ever runs a function's own code.

Started by launch.py.
"""

import contextlib
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

import torch

from overwinter.core.errors import OverwinterError
from overwinter.core.ids import Address, WorkerId
from overwinter.worker import namespaces, sandbox
from overwinter.worker.body import STACK_BYTES, Body, give_back_code, give_back_heap
from overwinter.worker.channel import Channel, ChannelClosedError
from overwinter.worker.measure import Gauge
from overwinter.worker.messages import Exited, ForkBody, Forked, ForkZygote, Kill, Load, Prepare, ToZygote, Up
from overwinter.worker.places import python_places
from overwinter.worker.runner import Prepared, load
from overwinter.worker.tray import Slot, Tray
from overwinter.worker.weights import MappedBlock, read_all

THREADS_MAX = 1 << 13
"""Of all bodies together, where they are one user."""
TRAY_BYTES_MAX = 2 << 30
"""Most bytes of the answers that a body may give at once."""


class Zygote:
    """Serves one channel: forks, reaps, and prepares programs when nobody waits for a fork."""

    def __init__(self, channel: Channel[ToZygote], wakeup: socket.socket, shelter: sandbox.Shelter) -> None:
        self._channel = channel
        self._wakeup = wakeup
        self._shelter = shelter
        self._children: dict[int, WorkerId | None] = {}
        self._prepared: OrderedDict[Address, Prepared] = OrderedDict()
        self._rehearsals: deque[tuple[Load, list[int]]] = deque()
        self._become: Callable[[], None] | None = None

    def serve(self) -> Callable[[], None]:
        """Serve until the node is gone (then exit), or until this process is a fork: returns what it is to become."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while self._become is None:
            ready = {fd for fd, _ in poll.poll(0 if self._rehearsals else None)}
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(4096)
                self._reap()
            if self._channel.fileno() in ready:
                try:
                    self._obey(*self._channel.receive())
                except ChannelClosedError:
                    os._exit(0)
            elif not ready and self._rehearsals:
                self._rehearse(*self._rehearsals.popleft())
        return self._become

    def _obey(self, message: ToZygote, fds: list[int]) -> None:
        match message:
            case ForkBody():
                self._fork_body(message, fds)
            case ForkZygote():
                self._fork_zygote(fds[0])
            case Kill(worker):
                for pid, child in self._children.items():
                    if child == worker:
                        os.kill(pid, signal.SIGKILL)
            case Prepare(wanted, forget):
                if forget is not None:
                    self._prepared.pop(forget, None)
                self._prepare(wanted, fds)

    def _fork_body(self, message: ForkBody, fds: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become = lambda: _be_body(message, fds, parent, self._channel, self._shelter, self._prepared)
            return
        _close(fds)
        self._children[pid] = message.worker
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)

    def _fork_zygote(self, fd: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._channel.close()
            self._become = lambda: _be_zygote(fd, parent, self._shelter)
            return
        os.close(fd)
        self._children[pid] = None

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._children:
                # What it forked goes with it; as long as it is not reaped, the group is surely its own.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            worker = self._children.pop(pid, None)
            if worker is not None:
                self._tell(Exited(worker, os.waitstatus_to_exitcode(status)))

    def _tell(self, message: Exited) -> None:
        try:
            self._channel.send(message)
        except ChannelClosedError:
            os._exit(0)

    def _prepare(self, wanted: Load, fds: list[int]) -> None:
        """Compile now; run once, for the primitives, when nobody waits. The program has proved itself in a body."""
        if wanted.program in self._prepared:
            _close(fds)
            return
        try:
            self._prepared[wanted.program] = Prepared(read_all(fds[0], wanted.program_bytes))
        except OverwinterError as error:
            _say(f"{wanted.function} is not prepared: {error}")
            _close(fds)
            return
        self._rehearsals.append((wanted, fds))

    def _rehearse(self, wanted: Load, fds: list[int]) -> None:
        blocks: list[MappedBlock] = []
        try:
            runner, blocks = load(wanted, fds, self._prepared)
            runner.rehearse()
            del runner
        except Exception as error:  # noqa: BLE001 - the border to a program: what it raises must not end all bodies
            _say(f"{wanted.function} was not rehearsed: {type(error).__name__}: {error}")
        finally:
            _close(fds)
        gc.collect()
        for block in blocks:
            block.close()
        # What the forks share must not be written to by their collectors.
        gc.freeze()
        give_back_heap()


def _say(text: str) -> None:
    sys.stderr.write(f"overwinter zygote: {text}\n")


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _introduce(channel: Channel[ToZygote], message: Forked | Up) -> None:
    """Tell the node that this process lives, and hand it the file in which the kernel counts its memory.

    The kernel asks who may look when the file is opened, and what it then shows is of this process alone: the node may
    look from now on, whoever runs it and whatever the process becomes.
    """
    smaps = os.open("/proc/self/smaps", os.O_RDONLY | os.O_CLOEXEC)
    channel.send(message, [smaps])
    os.close(smaps)


def _be_body(
    message: ForkBody,
    fds: list[int],
    parent: int,
    channel: Channel[ToZygote],
    shelter: sandbox.Shelter,
    prepared: Mapping[Address, Prepared],
) -> None:
    """Never returns: contained, the process serves as a body and exits."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        _introduce(channel, Forked(message.worker))
        end, said, *trays = fds
        for stream in (sys.stdout, sys.stderr):
            os.dup2(said, stream.fileno())
        slots = [Slot(Tray.open(fd), Tray.open(other)) for fd, other in zip(trays[::2], trays[1::2], strict=True)]
        memory_bytes = message.memory_bytes + (len(slots) - 1) * STACK_BYTES
        tray_bytes = min(TRAY_BYTES_MAX, (memory_bytes + message.mapped_bytes) // 2) // len(slots)
        limits = sandbox.Limits(memory_bytes, message.mapped_bytes, tray_bytes)
        gauge = None if message.measured_cores is None else Gauge(message.measured_cores)
        shelter.close_in(message.uid, limits, [end, *trays] if gauge is None else [end, *trays, gauge.fd])
        # A zygote that died before this was not there to be told from any other parent.
        sandbox.die_with_parent(parent)
        Body(socket.socket(fileno=end), slots, prepared, gauge).work()
        status = 0
    except BaseException:  # noqa: BLE001 - the border of the process: whatever it was, it is told and ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _be_zygote(end: int, parent: int, shelter: sandbox.Shelter) -> None:
    """A second zygote, born from the first: serves its own channel."""
    sandbox.die_with_parent(parent)
    _serve(socket.socket(fileno=end), [], shelter)


def _serve(end: socket.socket, uncontained: list[str], shelter: sandbox.Shelter) -> None:
    wakeup, alarm = socket.socketpair()
    alarm.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    channel: Channel[ToZygote] = Channel(end, ToZygote)  # type: ignore[arg-type]
    _introduce(channel, Up(tuple(uncontained)))
    Zygote(channel, wakeup, shelter).serve()()


def main(end: int, unshared: list[str], lacking: list[str]) -> None:
    """Serve the channel whose descriptor is `end`. `unshared` says why this process has no namespaces of its own, and
    is empty if it has; `lacking` names what else is missing already.
    """
    faulthandler.enable()
    # One thread before any fork: a child of a process with an OpenMP team hangs (see docs/decisions).
    torch.set_num_threads(1)
    lacking = [*lacking, *unshared]
    threads_max = None
    if not unshared:
        lacking += namespaces.show_only(python_places())
        if os.geteuid() != 0:
            namespaces.give_up_rights()
            # The user has no processes but these in there.
            threads_max = THREADS_MAX
    shelter = sandbox.Shelter(threads_max)
    lacking += shelter.try_out()
    gc.collect()
    gc.freeze()
    give_back_heap()
    give_back_code()
    _serve(socket.socket(fileno=end), lacking, shelter)
