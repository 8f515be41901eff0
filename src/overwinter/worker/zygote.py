"""The zygotes: single-threaded processes that import PyTorch once and fork workers in milliseconds.

There is one base zygote. It holds nothing of any tenant: it imports libraries (`libraries.py`), and forks workers and
tenants' zygotes. A tenant's zygote has the sandbox of that tenant's workers, except that it may fork and open its own
files of /proc; it prepares the tenant's programs (`programs.py`) and forks its workers. No zygote ever runs a
function's own code.

launch.py starts the base zygote.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import NamedTuple

import torch

from overwinter.core.ids import Address, WorkerId
from overwinter.worker import namespaces
from overwinter.worker.buffer import SharedBuffer, Slot
from overwinter.worker.channel import Channel, ChannelClosedError, close_all
from overwinter.worker.executor import execute
from overwinter.worker.gpu_files import gpu_paths
from overwinter.worker.heap import release_code, release_heap
from overwinter.worker.libraries import import_ahead
from overwinter.worker.measure import SelfMeasurement
from overwinter.worker.messages import (
    Exited,
    Forget,
    Forked,
    ForkFailed,
    ForkWorker,
    ForkZygote,
    KillZygote,
    Ping,
    Pong,
    PreparationEnded,
    Prepare,
    TakeOver,
    ToBase,
    ToZygote,
    Up,
    Waiting,
)
from overwinter.worker.orphans import kill_orphans
from overwinter.worker.prepared import Prepared
from overwinter.worker.process import STACK_BYTES, Worker
from overwinter.worker.programs import Programs
from overwinter.worker.python_paths import python_paths
from overwinter.worker.sandbox import Sandbox, WorkerLimits, die_with_parent

SHARED_USER_THREADS_MAX = 1 << 13
"""The thread limit of all workers if they share one user."""
GPU_FILE_BYTES = 2 << 30
"""The size to which the driver of a GPU may write files of its own."""
PROGRAMS_BYTES = 1 << 30
"""The memory for programs of a tenant's zygote, in addition to the limit of one of its workers."""

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_libc = ctypes.CDLL(None, use_errno=True)

MainFunction = Callable[[], None]
"""The main function of a forked process; it never returns."""
Order = ToBase | ToZygote


class Resources(NamedTuple):
    """The resources of a zygote."""

    channel: Channel[Order]
    wakeup: socket.socket
    """Readable when a child ended."""
    sandbox: Sandbox
    programs: Programs | None
    """None in the base zygote, which has no programs."""
    has_namespaces: bool = False
    """Whether this process has namespaces of its own; in a tenant's zygote False."""


class Zygote:
    """Serves one channel: forks and reaps; a tenant's zygote also compiles programs."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._channel = resources.channel
        self._children: dict[int, WorkerId | None] = {}
        """The worker of each child process; None for a tenant's zygote."""
        self._zygotes: dict[int, ForkZygote] = {}
        """The tenants' zygotes, by process id."""
        self._main_of_fork: MainFunction | None = None

    def serve(self) -> MainFunction:
        """Serve until the node ends (then exit), or until this process is a fork; return the fork's main function."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._resources.wakeup, select.POLLIN)
        while self._main_of_fork is None:
            ready = {fd for fd, _ in poll.poll()}
            if self._resources.wakeup.fileno() in ready:
                self._resources.wakeup.recv(4096)
                self._reap()
            if self._channel.fileno() in ready:
                try:
                    self._handle(*self._channel.receive())
                except ChannelClosedError:
                    os._exit(0)
        return self._main_of_fork

    def _handle(self, message: Order, fds: list[int]) -> None:
        match message:
            case ForkWorker():
                self._fork_worker(message, fds)
            case ForkZygote():
                self._fork_zygote(message, fds)
            case KillZygote(number):
                for pid, order in self._zygotes.items():
                    if order.number == number:
                        os.kill(pid, signal.SIGKILL)
            case Prepare():
                assert self._resources.programs is not None, "the base zygote has no programs"
                self._resources.programs.prepare(message, fds)
                self._send(PreparationEnded())
            case Forget(program):
                assert self._resources.programs is not None, "the base zygote has no programs"
                self._resources.programs.forget(program)
            case Ping():
                self._send(Pong())

    def _fork_worker(self, message: ForkWorker, fds: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            close_all(fds)
            self._send(ForkFailed(message.worker, f"{error}"))
            return
        if pid == 0:
            self._main_of_fork = lambda: _run_worker(message, fds, parent, self._resources)
            return
        close_all(fds)
        self._children[pid] = message.worker
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)

    def _fork_zygote(self, message: ForkZygote, fds: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            # The node notices that the other end of its channel is closed.
            close_all(fds)
            return
        if pid == 0:
            self._main_of_fork = lambda: _run_zygote(message, fds, parent, self._resources)
            return
        close_all(fds)
        self._children[pid] = None
        self._zygotes[pid] = message

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            worker = self._children.get(pid)
            if worker is not None:
                # Kill the worker's process group too. The group id cannot be reused before the worker is reaped.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            self._children.pop(pid, None)
            if pid in self._zygotes:
                # Its orphans are children of this process now. In a shared namespace another node may use its user id.
                uid = self._zygotes.pop(pid).uid if self._resources.has_namespaces else None
                kill_orphans(self._children, uid)
            elif worker is not None:
                self._send(Exited(worker, os.waitstatus_to_exitcode(status)))

    def _send(self, message: Exited | ForkFailed | PreparationEnded | Pong) -> None:
        try:
            self._channel.send(message)
        except ChannelClosedError:
            os._exit(0)


def _own_smaps() -> int:
    """Open the smaps file of this process.

    The kernel checks permissions only when the file is opened, and it shows only this process. So the node can read it
    as any user, whatever this process becomes.
    """
    return os.open("/proc/self/smaps", os.O_RDONLY | os.O_CLOEXEC)


def _enter_group(group: int) -> None:
    """Enter a control group; `group` is its open file of threads. Only for a process with one thread, because a write
    moves only one; a write takes 50 µs.
    """
    try:
        os.write(group, b"0")
    except OSError as error:
        # This process then stays in the group of its parent.
        sys.stderr.write(f"not in its tenant's control group: {error}\n")
    os.close(group)


def _set_process_name(name: str) -> None:
    """Set the process name, for tools that list processes; 15 characters at most."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _run_worker(message: ForkWorker, fds: list[int], parent: int, resources: Resources) -> None:
    """Enter the sandbox, serve as a worker or an executor, and exit. Never returns."""
    status = 1
    try:
        # This holds until the process enters the sandbox: a change of user there resets it, and `enter` sets it again.
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        _set_process_name("ow-ahead" if message.ahead else "ow-worker" if message.device is None else "ow-executor")
        groups = [fds.pop() for _ in range(message.groups)]
        smaps = _own_smaps()
        # Sent before this process enters its tenant's groups, where it may get little CPU time: the node waits for this
        # message as the answer of the zygote.
        resources.channel.send(Forked(message.worker), [smaps])
        for group in groups:
            _enter_group(group)
        end, output, *buffers = fds
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output, stream.fileno())
        slots = [
            Slot(SharedBuffer.open(fd), SharedBuffer.open(other))
            for fd, other in zip(buffers[::2], buffers[1::2], strict=True)
        ]
        limits = _limits(message, len(slots))
        measurement = None if message.measured_cores is None else SelfMeasurement(message.measured_cores)
        keep = [end, *buffers] if measurement is None else [end, *buffers, measurement.fd]
        uses_gpu = message.device is not None and message.device.kind == "cuda"
        resources.sandbox.enter(message.uid, limits, keep, "gpu" if uses_gpu else "worker")
        if message.ahead:
            resources.sandbox.lower_limits(_limits(_wait_for_take_over(end), len(slots)))
            _set_process_name("ow-worker")
        if message.device is not None:
            execute(socket.socket(fileno=end), slots[0], message.device)
        else:
            prepared: Mapping[Address, Prepared] = {} if resources.programs is None else resources.programs
            Worker(socket.socket(fileno=end), slots, prepared, measurement).work()
        status = 0
    except ChannelClosedError:
        # The node has closed the zygote's channel, or that of this process, which was forked ahead.
        pass
    except BaseException:  # noqa: BLE001 - any exception ends the process here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _limits(order: ForkWorker | TakeOver, slots: int) -> WorkerLimits:
    """Return the limits of a worker with this many slots."""
    memory_bytes = order.memory_bytes + (slots - 1) * STACK_BYTES
    uses_gpu = isinstance(order, ForkWorker) and order.device is not None and order.device.kind == "cuda"
    return WorkerLimits(memory_bytes, order.mapped_bytes, GPU_FILE_BYTES if uses_gpu else 0)


def _wait_for_take_over(end: int) -> TakeOver:
    """Report that this process waits, and return the message that makes it a worker; raise ChannelClosedError if none
    will come.
    """
    with socket.socket(fileno=os.dup(end)) as own:
        channel = Channel(own, TakeOver)
        channel.send(Waiting())
        message, _ = channel.receive()
    return message


def _run_zygote(message: ForkZygote, fds: list[int], parent: int, resources: Resources) -> None:
    """Become a tenant's zygote: enter the sandbox and serve the channel, as long as the base zygote runs."""
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        _set_process_name("ow-zygote")
        end, *groups = fds
        for group in groups:
            _enter_group(group)
        smaps = _own_smaps()
        # The workers' limits of address space contain what the zygote has mapped, and may not exceed its own limit.
        mapped_bytes = message.mapped_bytes + message.memory_bytes + PROGRAMS_BYTES
        limits = WorkerLimits(message.memory_bytes + PROGRAMS_BYTES, mapped_bytes)
        child_ended = _child_ended()
        resources.sandbox.enter_as_zygote(message.uid, limits, [end, smaps, *(each.fileno() for each in child_ended)])
        _serve(end, Up(), smaps, child_ended, resources.sandbox, Programs())
    except ChannelClosedError:
        # The node closed the zygote's channel before it started.
        pass
    except BaseException:  # noqa: BLE001 - any exception ends the process here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _child_ended() -> tuple[socket.socket, socket.socket]:
    """Return a socket that is readable when a child has ended, and its other end, to which the signal is written."""
    wakeup, alarm = socket.socketpair()
    alarm.setblocking(False)
    return wakeup, alarm


def _serve(
    end: int,
    up: Up,
    smaps: int,
    child_ended: tuple[socket.socket, socket.socket],
    sandbox: Sandbox,
    programs: Programs | None = None,
    has_namespaces: bool = False,
) -> None:
    wakeup, alarm = child_ended
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    incoming = ToBase if programs is None else ToZygote
    channel: Channel[Order] = Channel(socket.socket(fileno=end), incoming)  # type: ignore[arg-type]
    channel.send(up, [smaps])
    os.close(smaps)
    Zygote(Resources(channel, wakeup, sandbox, programs, has_namespaces)).serve()()


def main(end: int, imports: list[str], namespace_faults: list[str], lacking: list[str], uses_gpus: bool) -> None:
    """Serve the channel whose descriptor is `end`, after importing `imports`.

    `namespace_faults` contains the reasons why this process has no separate namespaces; it is empty if it has them.
    `lacking` names the other protections that are missing. `uses_gpus`: whether it forks executors of GPUs.
    """
    faulthandler.enable()
    # Standard output is a pipe here and in all forks. Without line buffering the output of a function would be delayed.
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    _set_process_name("ow-base-zygote")
    # This process inherits the orphans of tenants' zygotes, and ends them.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Use one thread before any fork: a child of a process with an OpenMP team hangs (docs/decisions/first-run.md).
    torch.set_num_threads(1)
    for fault in import_ahead(imports):
        sys.stderr.write(f"{fault}\n")
    lacking = [*lacking, *namespace_faults]
    threads_max = None
    if not namespace_faults:
        # The driver of a GPU names its threads through /proc, and uses no GPU if that fails.
        paths = [*python_paths(), *(gpu_paths() if uses_gpus else ())]
        lacking += namespaces.show_only(paths, writable_proc=uses_gpus)
        if os.geteuid() != 0:
            namespaces.drop_privileges()
            # In this namespace the user has no other processes.
            threads_max = SHARED_USER_THREADS_MAX
    sandbox = Sandbox(threads_max, uses_gpus)
    lacking += sandbox.test()
    smaps = _own_smaps()
    gc.collect()
    gc.freeze()
    release_heap()
    release_code()
    _serve(end, Up(tuple(lacking)), smaps, _child_ended(), sandbox, has_namespaces=not namespace_faults)
