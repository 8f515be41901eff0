"""The node's record of one worker: its channel, its buffers, and what is known of its end."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple, Protocol

from overwinter.core.ids import RequestId, RunId, WorkerId
from overwinter.core.tensor import Tensor
from overwinter.node import clock
from overwinter.node.answers import AnswerCheck
from overwinter.node.bindings import Bindings
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.memory import SECTOR_BYTES
from overwinter.node.output import Output
from overwinter.node.process_identity import kill
from overwinter.node.recent_output import Line, RecentOutput
from overwinter.worker.buffer import KEPT_BYTES, SharedBuffer, Slot, offsets
from overwinter.worker.channel import Channel, pair
from overwinter.worker.messages import Answer, Failure, FromWorker, Load, Measured, Ready

AFTER_RUN_S = 0.002
"""The CPU time that a worker may use after a run to tidy up."""


class Flight(NamedTuple):
    """A run that the worker has not answered yet."""

    slot: int
    requests: tuple[RequestId, ...]
    slo_spent_at_s: float
    """The worker's CPU seconds at which the run has used up its SLO."""


class WorkerListener(Protocol):
    """A listener for events of one worker: the runs of the node, or a measurement."""

    def worker_ready(self, process: "WorkerProcess", ready: Ready, /) -> None:
        """The worker is loaded."""
        ...

    def worker_answered(self, process: "WorkerProcess", answer: Answer, /) -> None:
        """The worker ran something; ValueError if the answer is impossible."""
        ...

    def worker_measured(self, process: "WorkerProcess", measured: Measured, /) -> None:
        """The worker sent its measurements; ValueError if they were not requested."""
        ...

    def worker_exited(self, process: "WorkerProcess", error: str, reason: str, /) -> None:
        """The worker ended."""
        ...


class WorkerProcess:
    """One worker: its channel, a slot for each concurrent run, and its end."""

    def __init__(
        self, worker: WorkerId, function: DeployedFunction, load: Load, listener: WorkerListener, log: Log
    ) -> None:
        """`function` is the one for which it is forked; `log` gets its output. OSError when the system has no
        descriptors left.
        """
        self.worker, self.listener = worker, listener
        self.forked_as = worker
        """The id under which its zygote knows it."""
        self.is_ahead = False
        """Whether it was forked in advance and has no function yet."""
        self.waits = False
        """Whether it has been forked in advance and has reported that it is contained."""
        self.function, self.family = function.id, function.family
        self._slo_ms = function.manifest.settings.slo_ms
        self.recent_output: RecentOutput | None = None
        """The record of its output; None before it has a function."""
        self.bindings = Bindings()
        self.lost_blocks = False
        """Whether it is killed because one of its blocks changed in memory."""
        self.answer_check = AnswerCheck(load.outputs)
        self.tried = False
        """Whether it has reported the start of a trial."""
        self.dismissed = False
        """Whether the node has ended it, or instructed it to end."""
        self._has_handler = load.source_bytes is not None
        self.pid: int | None = None
        self.pidfd: int | None = None
        """Refers to its process even if the pid is reused; None before it has reported its start."""
        self._kill_requested = False
        self.smaps: int | None = None
        """The descriptor of the file with the kernel's figures of its memory."""
        self.inherited_bytes = 0
        """The memory that it shares with its zygote, as last measured."""
        self.failure: Failure | None = None
        self.ready = False
        self.over = False
        """Whether its exit was reported. Data copied from its buffers after that is ignored."""
        self._closed = False
        self._copies = 0
        self.last_run: RunId | None = None
        self._flights: dict[RunId, Flight] = {}
        self._outside_runs_s = 0.0
        self._outside_runs_from: float | None = None
        """Its CPU seconds when its last run ended; None: a run is in progress, or the value is unknown."""
        # The last used slot is taken first, because its pages are mapped.
        self._free = list(range(load.concurrency))
        with ExitStack() as undo:
            self.slots = [
                Slot(_buffer(f"overwinter-in-{worker}", undo), _buffer(f"overwinter-out-{worker}", undo))
                for _ in range(load.concurrency)
            ]
            self.output = Output("worker", log, self._keep)
            self.output.assign(function.id)
            undo.callback(self.output.close)
            near_end, self.far_end = pair()
            undo.pop_all()
        near_end.setblocking(False)
        self.channel: Channel[FromWorker] = Channel(near_end, FromWorker, fds_max=0)  # type: ignore[arg-type]

    def take_over(self, worker: WorkerId, function: DeployedFunction, load: Load) -> None:
        """Use a process forked in advance as this worker, for this function's family."""
        self.worker, self.function, self.family = worker, function.id, function.family
        self._slo_ms = function.manifest.settings.slo_ms
        self.answer_check = AnswerCheck(load.outputs)
        self._has_handler = load.source_bytes is not None
        self.is_ahead = False
        self.output.assign(function.id)

    def _keep(self, text: str) -> None:
        if self.recent_output is not None:
            self.recent_output.add(Line(clock.wall(), self.worker, text))

    def buffer_fds(self) -> list[int]:
        """The descriptors of its buffers, slot by slot."""
        return [buffer.fd for slot in self.slots for buffer in slot]

    def copy_inputs(self, slot: int, tensors: Sequence[Tensor]) -> int:
        """Copy inputs into a slot's buffer, in order; return the buffer's size. Raises OSError when the system lacks
        memory.
        """
        return _copy_into(self.slots[slot].inputs, tensors)

    def begin(self, run: RunId, requests: tuple[RequestId, ...]) -> int:
        """Take a slot for the run; the scheduler never sends more runs than there are slots."""
        if not self._flights:
            self.computed_outside_runs_s()
            self._outside_runs_from = None
        self.last_run = run
        slot = self._free.pop()
        # The CPU time of a worker is that of all its slots.
        slo_s = (self._slo_ms or 0.0) / 1000 * len(self.slots)
        self._flights[run] = Flight(slot, requests, (self._computed_s() or 0.0) + slo_s)
        return slot

    def can_meet_slo(self, computed_s: float) -> bool:
        """Whether it serves functions with an SLO, and no run in progress has computed for longer than that.

        `computed_s`: its CPU seconds now. The time for which others slowed a run down does not count.
        """
        if self._slo_ms is None:
            return False
        return all(computed_s <= flight.slo_spent_at_s for flight in self._flights.values())

    def end(self, answer: Answer) -> Flight:
        """Return the run that was answered, which keeps its slot until `free`; raise ValueError if there is none."""
        flight = self._flights.pop(answer.run, None)
        if flight is None or len(flight.requests) != len(answer.outcomes):
            raise ValueError(f"run {answer.run} was not requested")
        if not self._flights:
            computed_s = self._computed_s()
            self._outside_runs_from = None if computed_s is None else computed_s + AFTER_RUN_S
        return flight

    def take_back(self, run: RunId) -> Flight:
        """Return a run that is not sent to the worker; it keeps its slot until `free`."""
        return self._flights.pop(run)

    def computed_outside_runs_s(self) -> float:
        """The processor seconds that it has used while it was ready and nothing ran."""
        computed_s = self._computed_s() if self.ready and not self._flights else None
        if computed_s is not None:
            if self._outside_runs_from is not None:
                self._outside_runs_s += max(0.0, computed_s - self._outside_runs_from)
            self._outside_runs_from = max(computed_s, self._outside_runs_from or 0.0)
        return self._outside_runs_s

    def _computed_s(self) -> float | None:
        return None if self.pid is None else clock.computed_s(self.pid)

    def free(self, flight: Flight) -> None:
        """Free the slot of a run whose outputs were copied."""
        self._free.append(flight.slot)

    def is_idle_since(self, run: RunId) -> bool:
        """Whether nothing runs, and this run was the last one."""
        return len(self._free) == len(self.slots) and self.last_run == run

    def copy_begins(self) -> None:
        """Keep the buffers open during a copy in a thread, even if the worker ends."""
        self._copies += 1

    def copy_ended(self) -> None:
        """A copy has ended."""
        self._copies -= 1
        self._close_buffers()

    def ended(self, how: str) -> Failure:
        """Return why its process ended, if the worker did not report it. During a trial, only the author's code runs in
        it.
        """
        if self.ready or not self.tried or self.dismissed:
            return Failure("WorkerError", how)
        message = f"the trial of {self.function} failed: {how}"
        if not self._has_handler:
            return Failure("ProgramError", f"{message}. Its program ended it; if it needs more memory, set memory_mib")
        return Failure(
            "HandlerError",
            f"{message}. Its program or its handler ended it; if the handler cannot answer a generated request, give "
            "one that it can answer with --sample NAME=VALUE, or samples=[{...}] in Python; if it needs more memory, "
            "set memory_mib",
        )

    def buffer_bytes(self) -> int:
        """The memory of its buffers."""
        return sum(os.fstat(buffer.fd).st_blocks for slot in self.slots for buffer in slot) * SECTOR_BYTES

    def is_large(self) -> bool:
        """Whether its buffers may have more memory than they may keep."""
        return any(buffer.nbytes > KEPT_BYTES for slot in self.slots for buffer in slot)

    def release(self) -> Iterator[None]:
        """Release the memory of large buffers, piece by piece, while nothing runs."""
        for buffer in chain.from_iterable(self.slots):
            yield from buffer.release()

    def forked(self, pid: int, pidfd: int, smaps: int | None) -> None:
        """Record its process, and kill it if that was requested before."""
        self.pid, self.pidfd, self.smaps = pid, pidfd, smaps
        if self._kill_requested:
            self.kill()

    def kill(self) -> None:
        """Kill its process, now or as soon as there is one."""
        self._kill_requested = True
        if self.pidfd is not None:
            kill(self.pidfd)

    def close(self) -> None:
        """Close the node's resources of the worker."""
        self.over = self._closed = True
        self.last_run = None
        self.channel.close()
        self.output.close()
        for fd in (self.smaps, self.pidfd):
            if fd is not None:
                os.close(fd)
        self.close_far_end()
        self._close_buffers()

    def close_far_end(self) -> None:
        """Close the descriptors for the worker's process: they were sent, or never will be."""
        self.far_end.close()
        self.output.close_far_end()

    def _close_buffers(self) -> None:
        if self._closed and not self._copies:
            for slot in self.slots:
                slot.inputs.close()
                slot.outputs.close()


def ending(status: int) -> str:
    """Format how a process ended."""
    if -status not in set(signal.Signals):
        return f"its process exited with status {status}"
    name = signal.Signals(-status).name
    hint = ": it may have written to a weight, which is mapped read-only" if -status == signal.SIGSEGV else ""
    return f"its process was killed by signal {-status} ({name}){hint}"


def new_buffer(tensors: Sequence[Tensor]) -> int:
    """Copy these tensors in order into a new buffer, and return its descriptor; the caller closes it. Raises
    OSError.
    """
    buffer = SharedBuffer.make("overwinter-samples")
    try:
        _copy_into(buffer, tensors)
        return os.dup(buffer.fd)
    finally:
        buffer.close()


def _copy_into(buffer: SharedBuffer, tensors: Sequence[Tensor]) -> int:
    *places, nbytes = offsets(tensor.meta for tensor in tensors)
    buffer.grow(nbytes)
    for tensor, at in zip(tensors, places, strict=True):
        buffer.put(at, tensor.data)
    return buffer.nbytes


def _buffer(name: str, undo: ExitStack) -> SharedBuffer:
    """Create a buffer, which is closed if creating another one of the worker fails."""
    buffer = SharedBuffer.make(name)
    undo.callback(buffer.close)
    return buffer
