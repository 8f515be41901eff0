"""What a body does: load one function, then run what it is told until nobody tells it anything."""

import ctypes
import gc
import mmap
import select
import socket
from collections.abc import Mapping

import torch

from overwinter.core.errors import OverwinterError
from overwinter.core.ids import Address
from overwinter.worker.channel import Channel, ChannelClosedError
from overwinter.worker.messages import Answer, Failure, Load, LoadFailed, Outputs, Ready, RunBatch, Stop, ToBody
from overwinter.worker.runner import Outcome, Prepared, Runner, load
from overwinter.worker.tray import Tray, offsets
from overwinter.worker.values import parcels, read

IDLE_MS = 100
"""A body that had nothing to do for so long gives its free heap back to the system."""

_libc = ctypes.CDLL(None)


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
    """One worker process after its fork."""

    def __init__(self, end: socket.socket, inputs: Tray, outputs: Tray, prepared: Mapping[Address, Prepared]) -> None:
        self._channel: Channel[ToBody] = Channel(end, ToBody)  # type: ignore[arg-type]
        self._inputs = inputs
        self._outputs = outputs
        self._prepared = prepared
        self._runner: Runner | None = None

    def work(self) -> None:
        """Serve until told to stop or until the node is gone."""
        waiting = select.poll()
        waiting.register(self._channel.fileno(), select.POLLIN)
        tidy = False
        while True:
            if not tidy and not waiting.poll(IDLE_MS):
                gc.collect()
                give_back_heap()
                tidy = True
                continue
            try:
                message, fds = self._channel.receive()
            except ChannelClosedError:
                return
            tidy = False
            match message:
                case RunBatch():
                    self._run(message)
                case Load():
                    if not self._load(message, fds):
                        return
                case Stop():
                    return

    def _load(self, message: Load, fds: list[int]) -> bool:
        torch.set_num_threads(message.threads)
        try:
            self._runner, _ = load(message, fds, self._prepared)
            if message.on_trial:
                self._runner.rehearse()
        except OverwinterError as error:
            self._channel.send(LoadFailed(type(error).__name__, str(error)))
            return False
        except Exception as error:  # noqa: BLE001 - the border to a program and a handler that nobody has run before
            self._channel.send(LoadFailed("ProgramError", f"{type(error).__name__}: {error}"))
            return False
        finally:
            _close(fds)
        self._channel.send(Ready())
        return True

    def _run(self, message: RunBatch) -> None:
        assert self._runner is not None, "a run before a load"
        try:
            self._inputs.follow(message.tray_bytes)
            places = offsets(meta for metas in message.requests for meta in metas)
            requests = [
                {meta.name: read(self._inputs, meta, at) for meta, at in zip(metas, places, strict=False)}
                for metas in message.requests
            ]
            outcomes = self._runner.answer(requests)
            answer = self._pack(message, outcomes)
        except Exception as error:  # noqa: BLE001 - the border to the function's own code: the body lives on
            failure = Failure("WorkerError", f"{type(error).__name__}: {error}")
            answer = Answer(message.run, (failure,) * len(message.requests), 0)
        self._channel.send(answer)

    def _pack(self, message: RunBatch, outcomes: list[Outcome]) -> Answer:
        packed: list[Outputs | Failure] = []
        filled = []
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                packed.append(outcome)
                continue
            try:
                sent = parcels(outcome)
            except OverwinterError as error:
                packed.append(Failure(type(error).__name__, str(error)))
                continue
            filled += sent
            packed.append(Outputs(tuple(parcel.meta for parcel in sent)))
        *places, nbytes = offsets(parcel.meta for parcel in filled)
        self._outputs.hold(nbytes)
        for parcel, at in zip(filled, places, strict=True):
            parcel.write(self._outputs, at)
        return Answer(message.run, tuple(packed), self._outputs.nbytes)


def _close(fds: list[int]) -> None:
    for fd in fds:
        socket.close(fd)
