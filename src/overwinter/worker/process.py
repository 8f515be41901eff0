"""The main loop of a worker: loads one family, then binds and runs its functions until its channel closes.

A worker has one thread for each concurrent run. One of them leads: it waits for the next message, passes the lead to
another thread, and handles the message. So a run never changes threads, and a worker with a concurrency of one is the
same loop in one thread. A bind is handled like a run, concurrently with others.
"""

import ctypes
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from overwinter.core.errors import OverwinterError, WorkerError
from overwinter.core.ids import Address
from overwinter.worker.batches import run_batch, unbound
from overwinter.worker.buffer import Slot
from overwinter.worker.channel import Channel, ChannelClosedError
from overwinter.worker.family import Family
from overwinter.worker.inbox import Inbox
from overwinter.worker.measure import Gauge
from overwinter.worker.messages import (
    Answer,
    Bind,
    BindFailed,
    Bound,
    Load,
    LoadFailed,
    Measure,
    Ready,
    RunBatch,
    Stop,
    ToWorker,
    Trying,
    Unbind,
)
from overwinter.worker.runner import Prepared
from overwinter.worker.shortage import lacks_memory

Job = Callable[[], Answer | Bound | BindFailed]
"""The work of one thread while another thread receives messages; returns the message to the node."""

STACK_BYTES = 8 << 20
"""The stack of each further thread. The first thread usually has as much, so a handler runs equally in all."""

_libc = ctypes.CDLL(None)
_ARENA_MAX = -8


class Worker:
    """One worker process after its fork, with one slot for each concurrent run."""

    def __init__(
        self,
        end: socket.socket,
        slots: Sequence[Slot],
        prepared: Mapping[Address, Prepared],
        gauge: Gauge | None = None,
    ) -> None:
        """Create the worker; with a gauge it can be measured."""
        self._channel: Channel[ToWorker] = Channel(end, ToWorker)  # type: ignore[arg-type]
        self._under_way: set[int] = set()
        """The runs and binds in progress, by the numbers of their messages."""
        self._inbox = Inbox(self._channel, lambda: bool(self._under_way))
        self._slots = slots
        self._prepared = prepared
        self._gauge = gauge
        self._family: Family | None = None
        self._lead = threading.Lock()
        self._followers: list[threading.Thread] = []
        self._messages = 0
        self._over = False

    def work(self) -> None:
        """Serve until a message to stop or until the node ends; runs in progress are still answered."""
        self._serve()
        for follower in self._followers:
            follower.join()

    def _serve(self) -> None:
        """Run in each thread: receive messages until there is a job, then run it while another thread receives."""
        while True:
            with self._lead:
                job = None if self._over else self._next()
                self._over = job is None
            if job is None:
                return
            answer = job()
            # The job may hold the last reference to a function.
            del job
            # One packet by one call, so that the answers of threads cannot mix.
            self._channel.send(answer)

    def _next(self) -> Job | None:
        """Return the next run or bind; None when no more will come."""
        while True:
            try:
                message, fds = self._inbox.receive()
            except ChannelClosedError:
                return None
            match message:
                case RunBatch():
                    runners = [self._loaded.runner(name) or unbound(name) for name in message.functions]
                    return self._counted(partial(run_batch, message, self._slots[message.slot], runners))
                case Bind(function):
                    return self._counted(partial(self._bind, function, self._loaded.take(message, fds)))
                case Unbind(function):
                    self._loaded.drop(function)
                case Load():
                    if not self._load(message, fds):
                        return None
                case Measure(function):
                    runner = self._loaded.runner(function)
                    assert self._gauge is not None, "nothing to measure with"
                    assert runner is not None, "nothing to measure"
                    self._channel.send(self._gauge.measured(runner, message))
                case Stop():
                    return None

    @property
    def _loaded(self) -> Family:
        assert self._family is not None, "nothing is loaded"
        return self._family

    def _counted(self, job: Job) -> Job:
        """Return the job, counted as in progress until it is done."""
        self._messages += 1
        number = self._messages
        self._under_way.add(number)

        def done() -> Answer | Bound | BindFailed:
            try:
                return job()
            finally:
                self._under_way.discard(number)

        return done

    def _load(self, load: Load, fds: list[int]) -> bool:
        """Load the family and bind its first function; return whether both succeeded.

        The node may hash the function's blocks meanwhile, and then sends the bind.
        """
        if load.tried:
            self._channel.send(Trying())
        torch.set_num_threads(load.threads)
        made = _made(load, fds, self._prepared)
        try:
            bind, bind_fds = self._channel.receive()
        except ChannelClosedError:
            return False
        if not isinstance(bind, Bind):
            # The worker is stopped before the blocks were hashed.
            return False
        try:
            family = made()
            warning = family.take(bind, bind_fds)()
            self._grow(load.concurrency, load.threads)
        except Exception as error:  # noqa: BLE001 - the boundary to an untested program and handler
            self._channel.send(LoadFailed(*_fault(bind.function, error)))
            return False
        self._family = family
        self._channel.send(Ready(warning))
        return True

    def _bind(self, function: str, finish: Callable[[], str]) -> Bound | BindFailed:
        """Bind another function."""
        try:
            finish()
        except Exception as error:  # noqa: BLE001 - the boundary to the function's own code: the worker lives on
            return BindFailed(function, *_fault(function, error))
        return Bound(function)

    def _grow(self, concurrency: int, threads: int) -> None:
        """Start a thread for each further concurrent run; raise WorkerError if the system refuses one."""
        if concurrency > 1:
            threading.stack_size(STACK_BYTES)
            # Additional heaps would keep the memory that their threads freed.
            _libc.mallopt(_ARENA_MAX, 1)
        for number in range(1, concurrency):
            follower = threading.Thread(target=self._follow, args=(threads,), name=f"run-{number}", daemon=True)
            try:
                follower.start()
            except RuntimeError as error:
                raise WorkerError(
                    f"no thread could be started for {concurrency} concurrent runs: {error}; each needs "
                    f"{STACK_BYTES >> 20} MiB of its memory_mib: raise memory_mib, or lower concurrency"
                ) from error
            self._followers.append(follower)

    def _follow(self, threads: int) -> None:
        """Run a further thread. An exception in it ends the worker, because its run would not be answered."""
        try:
            # PyTorch keeps a part of the thread count per thread.
            torch.set_num_threads(threads)
            self._serve()
        except BaseException:  # noqa: BLE001 - the boundary of the thread: it is printed and ends the worker
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def _made(load: Load, fds: list[int], prepared: Mapping[Address, Prepared]) -> Callable[[], Family]:
    """Return a function that returns the loaded family, or raises why loading failed."""
    made: Future[Family] = Future()
    try:
        made.set_result(Family(load, fds, prepared))
    except Exception as error:  # noqa: BLE001 - the boundary to an untested program
        made.set_exception(error)
    return made.result


def _fault(function: str, error: Exception) -> tuple[str, str]:
    """Return the error of a failed bind: whose fault it is, what happened, and the remedy if memory was lacking."""
    kind, message = "ProgramError", f"{type(error).__name__}: {error}"
    if isinstance(error, OverwinterError):
        kind, message = type(error).__name__, str(error)
    if lacks_memory(error):
        message = (
            f"there is too little memory to load {function} ({message}): raise memory_mib, or load less; if the "
            "machine lacks memory, unload other functions"
        )
    return kind, message
