"""What a body does: load one function, then run what it is told until nobody tells it anything.

A body that may have several runs at once has as many threads. One of them leads: it waits for the next message, hands
the lead to another, and runs what it was told. So a run never changes threads on its way, and a body of one run at a
time is the same loop in one thread.
"""

import ctypes
import gc
import mmap
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence

import torch

from overwinter.core.errors import OverwinterError, WorkerError
from overwinter.core.ids import Address, RunId
from overwinter.core.tensor import TensorMeta
from overwinter.worker.channel import Channel, ChannelClosedError
from overwinter.worker.measure import Gauge
from overwinter.worker.messages import (
    Answer,
    Failure,
    Load,
    LoadFailed,
    Measure,
    Outputs,
    Ready,
    RunBatch,
    Stop,
    ToBody,
    Trying,
)
from overwinter.worker.runner import Named, Outcome, Prepared, Runner, load
from overwinter.worker.shortage import lacks_memory
from overwinter.worker.tray import Slot, Tray, offsets
from overwinter.worker.trial import doubts, prove
from overwinter.worker.values import parcels, read

IDLE_MS = 100
"""A body that had nothing to do for so long gives its free heap back to the system."""

STACK_BYTES = 8 << 20
"""Of a further thread: as much as the first usually has, so that a handler runs alike in all."""

_libc = ctypes.CDLL(None)
_ARENA_MAX = -8


def give_back_heap() -> None:
    """Return freed memory to the system."""
    _libc.malloc_trim(0)


def give_back_code() -> None:
    """Let go of the pages of libraries that were only read while loading; what runs again is mapped again."""
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for bounds, rights, _, _, inode, *_ in regions:
        if rights.startswith("r-x") and inode != "0":
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


class Body:
    """One worker process after its fork; each slot is room for one run at a time."""

    def __init__(
        self,
        end: socket.socket,
        slots: Sequence[Slot],
        prepared: Mapping[Address, Prepared],
        gauge: Gauge | None = None,
    ) -> None:
        """With a gauge it can be measured."""
        self._channel: Channel[ToBody] = Channel(end, ToBody)  # type: ignore[arg-type]
        self._waiting = select.poll()
        self._waiting.register(self._channel.fileno(), select.POLLIN)
        self._slots = slots
        self._prepared = prepared
        self._gauge = gauge
        self._runner: Runner | None = None
        self._lead = threading.Lock()
        self._followers: list[threading.Thread] = []
        self._running: set[int] = set()
        self._tidy = False
        self._over = False

    def work(self) -> None:
        """Serve until told to stop or until the node is gone; what runs then is still answered."""
        self._serve()
        for follower in self._followers:
            follower.join()

    def _serve(self) -> None:
        """What each thread does: lead until there is a run, then run it while another leads."""
        while True:
            with self._lead:
                message = None if self._over else self._next()
                self._over = message is None
            if message is None:
                return
            answer = self._run(message)
            # Before the answer: after it the slot may be in use again.
            self._running.discard(message.slot)
            # One packet and one call, so that no other thread's answer can come between.
            self._channel.send(answer)

    def _next(self) -> RunBatch | None:
        """The next run; None when nothing more will come."""
        while True:
            idle = not self._running
            if not self._tidy and not self._waiting.poll(IDLE_MS):
                if idle:
                    gc.collect()
                    give_back_heap()
                    self._tidy = True
                continue
            try:
                message, fds = self._channel.receive()
            except ChannelClosedError:
                return None
            self._tidy = False
            match message:
                case RunBatch():
                    self._running.add(message.slot)
                    return message
                case Load():
                    if not self._load(message, fds):
                        return None
                case Measure():
                    assert self._gauge is not None, "nothing to measure with"
                    assert self._runner is not None, "a measurement before a load"
                    self._channel.send(self._gauge.measured(self._runner, message))
                case Stop():
                    return None

    def _load(self, message: Load, fds: list[int]) -> bool:
        torch.set_num_threads(message.threads)
        if message.on_trial or message.inputs or message.samples:
            self._channel.send(Trying())
        try:
            self._runner, _ = load(message, fds, self._prepared)
            told = self._try(self._runner, message)
            self._grow(message.concurrency, message.threads)
        except Exception as error:  # noqa: BLE001 - the border to a program and a handler that nobody has run before
            self._channel.send(_load_failed(message.function, error))
            return False
        finally:
            _close(fds)
        self._channel.send(Ready(told))
        return True

    def _try(self, runner: Runner, message: Load) -> str:
        """Raises why a new version is refused; else what its author should know."""
        if message.on_trial:
            runner.rehearse()
        prove(runner, _read(self._slots[0].inputs, message.samples))
        return doubts(runner, message.inputs) if message.inputs and not message.samples else ""

    def _grow(self, concurrency: int, threads: int) -> None:
        """Start a thread for each further run at once; WorkerError when the system has none."""
        if concurrency > 1:
            threading.stack_size(STACK_BYTES)
            # Further heaps would keep what their threads freed.
            _libc.mallopt(_ARENA_MAX, 1)
        for number in range(1, concurrency):
            follower = threading.Thread(target=self._follow, args=(threads,), name=f"run-{number}", daemon=True)
            try:
                follower.start()
            except RuntimeError as error:
                raise WorkerError(
                    f"there is no thread for {concurrency} runs at once: {error}; each needs {STACK_BYTES >> 20} MiB "
                    "of its memory_mib: set it to more, or ask for fewer runs at once"
                ) from error
            self._followers.append(follower)

    def _follow(self, threads: int) -> None:
        """A further thread. What it does not survive, the body does not: nobody else would answer its run."""
        try:
            # Part of the count is each thread's own.
            torch.set_num_threads(threads)
            self._serve()
        except BaseException:  # noqa: BLE001 - the border of the thread: whatever it was, it is told and ends the body
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _run(self, message: RunBatch) -> Answer:
        assert self._runner is not None, "a run before a load"
        slot = self._slots[message.slot]
        try:
            slot.inputs.follow(message.tray_bytes)
            requests = _read(slot.inputs, message.requests)
            return _packed(message.run, self._runner.answer(requests), slot.outputs)
        except Exception as error:  # noqa: BLE001 - the border to the function's own code: the body lives on
            failure = Failure("WorkerError", f"{type(error).__name__}: {error}")
            return Answer(message.run, (failure,) * len(message.requests), 0)


def _load_failed(function: str, error: Exception) -> LoadFailed:
    """Why a function cannot be loaded, and the way out where there was too little memory."""
    kind, told = "ProgramError", f"{type(error).__name__}: {error}"
    if isinstance(error, OverwinterError):
        kind, told = type(error).__name__, str(error)
    if lacks_memory(error):
        told = (
            f"there is too little memory to load {function} ({told}): set memory_mib to more, or load less; if it is "
            "the machine's that lacks, unload other functions"
        )
    return LoadFailed(kind, told)


def _read(tray: Tray, requests: Iterable[Sequence[TensorMeta]]) -> list[Named]:
    """The inputs of requests that lie in the tray in this order."""
    requests = list(requests)
    places = offsets(meta for metas in requests for meta in metas)
    return [{meta.name: read(tray, meta, at) for meta, at in zip(metas, places, strict=False)} for metas in requests]


def _packed(run: RunId, outcomes: list[Outcome], tray: Tray) -> Answer:
    """The answer, with the outputs written into the tray."""
    packed: list[Outputs | Failure] = []
    filled = 0
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            packed.append(outcome)
            continue
        try:
            sent = parcels(outcome)
            *places, nbytes = offsets(parcel.meta for parcel in sent)
            tray.hold(filled + nbytes)
            for parcel, at in zip(sent, places, strict=True):
                parcel.write(tray.map, filled + at)
        except OverwinterError as error:
            packed.append(Failure(type(error).__name__, str(error)))
            continue
        filled += nbytes
        packed.append(Outputs(tuple(parcel.meta for parcel in sent)))
    return Answer(run, tuple(packed), tray.nbytes)


def _close(fds: list[int]) -> None:
    for fd in fds:
        socket.close(fd)
