"""The main loop of a worker: loads one family, then binds and runs its functions until it is stopped.

A worker has one thread for each concurrent run. Of those that wait, one leads: it receives messages for all. A thread
waits for a run, or within a run for the answer of the pool. No other thread takes that answer, so a run never changes
threads, and a worker with a concurrency of one is the same loop in one thread. A bind is handled like a run,
concurrently with others.
"""

import ctypes
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch
from msgspec import structs

from overwinter.core.errors import MESSAGE_MAX, OverwinterError, WorkerError
from overwinter.core.ids import Address
from overwinter.worker.batches import run_batch, unbound_failure
from overwinter.worker.buffer import Slot
from overwinter.worker.channel import Channel, ChannelClosedError
from overwinter.worker.family import Family
from overwinter.worker.heap import populate_heap
from overwinter.worker.inbox import Inbox
from overwinter.worker.measure import SelfMeasurement
from overwinter.worker.messages import (
    Answer,
    Bind,
    BindFailed,
    Bound,
    Failure,
    Load,
    LoadFailed,
    Measure,
    PoolCall,
    PoolCallResult,
    Ready,
    RunBatch,
    Stop,
    ToWorker,
    Trying,
    Unbind,
)
from overwinter.worker.pool_calls import PoolCalls
from overwinter.worker.prepared import Prepared
from overwinter.worker.runner import Runner
from overwinter.worker.shortage import lacks_memory

Job = Callable[[], Answer | Bound | BindFailed]
"""The work of one thread, while another thread may receive messages; returns the message to the node."""

T = TypeVar("T")

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
        measurement: SelfMeasurement | None = None,
    ) -> None:
        """Create the worker; it can be measured only with `measurement`."""
        self._channel: Channel[ToWorker] = Channel(end, ToWorker)  # type: ignore[arg-type]
        self._in_progress: set[int] = set()
        """The runs and binds in progress, by the numbers of their messages."""
        self._inbox = Inbox(self._channel, lambda: bool(self._in_progress))
        self._slots = slots
        self._prepared = prepared
        self._measurement = measurement
        self._family: Family | None = None
        self._pool_calls = PoolCalls(slots, self._call)
        self._answers: dict[int, PoolCallResult | None] = {}
        """The calls of programs on the pool that threads wait for, and their answers."""
        self._jobs: deque[Job] = deque()
        self._waiting = threading.Condition()
        """Guards the jobs and the answers."""
        self._leads = False
        """Whether a thread receives messages."""
        self._followers: list[threading.Thread] = []
        self._messages = 0
        self._stopping = False

    def work(self) -> None:
        """Serve until a message to stop or until the node ends; runs in progress are still answered."""
        if not self._load():
            return
        self._serve()
        for follower in self._followers:
            follower.join()

    def _serve(self) -> None:
        """The loop of each thread: do jobs until no more will come."""
        while (job := self._wait_for(lambda: self._jobs.popleft() if self._jobs else None)) is not None:
            answer = job()
            # The job may hold the last reference to a function.
            del job
            # One packet by one call, so that the answers of threads cannot mix.
            self._channel.send(answer)

    def _call(self, call: PoolCall) -> PoolCallResult | None:
        """Ask the node to run a program on the pool, and wait for the answer; None if none will come."""
        self._answers[call.number] = None
        try:
            self._channel.send(call)
            return self._wait_for(lambda: self._answers[call.number])
        finally:
            del self._answers[call.number]

    def _wait_for(self, find: Callable[[], T | None]) -> T | None:
        """Return what `find` returns as soon as a message brings it; None when no more messages will come."""
        received = False
        with self._waiting:
            while (found := find()) is None and not self._stopping:
                if received:
                    # The message was for another thread.
                    self._waiting.notify_all()
                received = not self._leads
                if received:
                    self._receive()
                else:
                    self._waiting.wait()
            # Another thread may lead from now on.
            self._waiting.notify()
            return found

    def _receive(self) -> None:
        """Receive and handle a message; meanwhile other threads may take what came before."""
        self._leads = True
        self._waiting.release()
        try:
            received = self._inbox.receive()
        except ChannelClosedError:
            received = Stop(), []
        finally:
            self._waiting.acquire()
            self._leads = False
        self._take(*received)

    def _take(self, message: ToWorker, fds: list[int]) -> None:
        match message:
            case RunBatch():
                self._jobs.append(self._counted(partial(self._run, message, self._runners(message))))
            case PoolCallResult(number):
                # Nobody waits for the answer to a call in a trial that took too long.
                if number in self._answers:
                    self._answers[number] = message
            case Bind(function):
                self._jobs.append(self._counted(partial(self._bind, function, self._loaded.take(message, fds))))
            case Unbind(function):
                self._loaded.drop(function)
            case Measure(function):
                runner = self._loaded.runner(function)
                assert self._measurement is not None, "nothing to measure with"
                assert runner is not None, "nothing to measure"
                self._channel.send(self._measurement.measured(runner, message))
            case Load():
                raise AssertionError("it is loaded already")
            case Stop():
                self._stopping = True

    def _runners(self, message: RunBatch) -> list[Runner | Failure]:
        return [self._loaded.runner(name) or unbound_failure(name) for name in message.functions]

    def _run(self, message: RunBatch, runners: Sequence[Runner | Failure]) -> Answer:
        with self._pool_calls.within(message.slot):
            answer = run_batch(message, self._slots[message.slot], runners)
            program_s = self._pool_calls.program_s()
            return structs.replace(answer, program_s=program_s) if program_s else answer

    @property
    def _loaded(self) -> Family:
        assert self._family is not None, "nothing is loaded"
        return self._family

    def _counted(self, job: Job) -> Job:
        """Return the job, counted as in progress until it is done."""
        self._messages += 1
        number = self._messages
        self._in_progress.add(number)

        def done() -> Answer | Bound | BindFailed:
            try:
                return job()
            finally:
                self._in_progress.discard(number)

        return done

    def _load(self) -> bool:
        """Load the family and bind its first function; return whether both succeeded.

        The node may hash the function's blocks meanwhile, and then sends the bind.
        """
        try:
            load, fds = self._inbox.receive()
            if not isinstance(load, Load):
                # The worker is stopped before it loads anything.
                return False
            if load.on_trial:
                self._channel.send(Trying())
            torch.set_num_threads(load.threads)
            family_or_error = _try_load(load, fds, self._prepared, self._pool_calls)
            bind, bind_fds = self._channel.receive()
        except ChannelClosedError:
            return False
        if not isinstance(bind, Bind):
            # The worker is stopped before the blocks were hashed.
            return False
        try:
            family = family_or_error()
            finish = family.take(bind, bind_fds)
            if load.program in self._prepared and not (load.on_trial or load.measured or load.handler_only):
                # After the blocks are mapped, because the kernel maps none while it populates memory. Only in a worker
                # that was forked with compiled programs are large tensors in the heap.
                populate_heap(family.prepared.activation_bytes)
            warning = finish()
            self._start_threads(load.concurrency, load.threads)
        except Exception as error:  # noqa: BLE001 - the boundary to an untested program and handler
            self._channel.send(LoadFailed(*_fault(bind.function, error)))
            return False
        self._family = family
        self._channel.send(Ready(warning[:MESSAGE_MAX]))
        return True

    def _bind(self, function: str, finish: Callable[[], str]) -> Bound | BindFailed:
        """Bind another function."""
        try:
            finish()
        except Exception as error:  # noqa: BLE001 - the boundary to the function's own code: the worker continues
            return BindFailed(function, *_fault(function, error))
        return Bound(function)

    def _start_threads(self, concurrency: int, threads: int) -> None:
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
                    f"no thread could be started for {concurrency} concurrent runs ({error}): raise memory_mib, or "
                    "lower concurrency"
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


def _try_load(
    load: Load, fds: list[int], prepared: Mapping[Address, Prepared], pool_calls: PoolCalls
) -> Callable[[], Family]:
    """Return a function that returns the loaded family, or raises why loading failed."""
    outcome: Future[Family] = Future()
    try:
        outcome.set_result(Family(load, fds, prepared, pool_calls))
    except Exception as error:  # noqa: BLE001 - the boundary to an untested program
        outcome.set_exception(error)
    return outcome.result


def _fault(function: str, error: Exception) -> tuple[str, str]:
    """Return the error of a failed load or bind: whose fault it is, what happened, and the remedy if memory was
    lacking.
    """
    kind, message = "ProgramError", f"{type(error).__name__}: {error}"
    if isinstance(error, OverwinterError):
        kind, message = type(error).__name__, str(error)
    if lacks_memory(error):
        message = (
            f"there is too little memory to load {function} ({message}): raise memory_mib, or load less; if the "
            "machine lacks memory, unload other functions"
        )
    return kind, message[:MESSAGE_MAX]
