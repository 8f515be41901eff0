"""The node's record of one process that a zygote forks into a sandbox: its channel, buffers, runs and end."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

from overwinter.core.ids import FunctionId, RequestId, RunId, TenantId, WorkerId
from overwinter.core.tensor import Tensor
from overwinter.node.answers import AnswerCheck
from overwinter.node.closing import ClosingThread
from overwinter.node.demotion import Demotion
from overwinter.node.memory import SECTOR_BYTES
from overwinter.node.outbox import Outbox
from overwinter.node.output import Outputs
from overwinter.node.packed_answers import PackedAnswer, Received
from overwinter.node.process_identity import kill
from overwinter.worker.buffer import FILE_BYTES, KEPT_BYTES, SharedBuffer, Slot, offsets
from overwinter.worker.channel import Channel, connected
from overwinter.worker.messages import Answer, Failure, FromWorker


class PendingRun(NamedTuple):
    """A run that has a slot of a process and is not answered yet."""

    slot: int
    requests: tuple[RequestId, ...]
    functions: tuple[FunctionId, ...]
    """The function of each request; of a run without requests, all its functions."""


class ProcessFiles(NamedTuple):
    """What all processes share: the readers of their pipes, and the thread that closes their buffers."""

    outputs: Outputs
    closing: ClosingThread


class ContainedProcess:
    """One process: a worker or an executor. It has a slot for each concurrent run."""

    function: FunctionId
    """The function that it runs, or its first one."""
    answer_check: AnswerCheck
    is_demoted = False
    """Whether it gets only idle cores, until it is killed."""
    unsent_bytes_max = 0
    """The most bytes of messages to it that are kept until it has read others; 0 if it may run a function's code."""
    has_exited = False
    """Whether the kernel has reported its end. Its zygote may do so later, with the cause."""
    dropped_by_zygote = 0
    """How many programs its zygote was told to drop after the fork."""
    _demotion: Demotion | None = None
    """Restores the CPU weight of a demoted process."""

    def __init__(
        self,
        worker: WorkerId,
        tenant: TenantId | None,
        what: str,
        slots: int,
        files: ProcessFiles,
        keep: Callable[[str], None],
        outputs_bytes: int = FILE_BYTES,
    ) -> None:
        """`tenant`: the only one whose functions it runs; None: those of any tenant. `what`: its kind, as the log
        names it. `keep` gets its output. `outputs_bytes`: the most that the outputs of a run may have. Raises OSError
        when the system has no descriptors or memory left.
        """
        self._files = files
        self.worker = worker
        self.forked_as = worker
        """The id under which its zygote knows it."""
        self.tenant = tenant
        self.on_message: Callable[[FromWorker], None] = _no_listener
        """Receives its messages; raises ValueError for an impossible one."""
        self.on_end: Callable[[str], None] = _no_listener
        """Receives how it ended, once."""
        self.client = tenant or ""
        """The client of the queue in which its messages wait."""
        self.is_ahead = False
        """Whether it was forked ahead and has no function yet."""
        self.asked = False
        """Whether a zygote was asked to fork it."""
        self.lost_blocks = False
        """Whether it is killed because one of its blocks changed in memory, or was missing there."""
        self.dismissed = False
        """Whether the node has ended it or instructed it to end, or its zygote was lost."""
        self.pid: int | None = None
        self.pidfd: int | None = None
        """Refers to its process even if the pid is reused; None before it has reported its start."""
        self._kill_requested = False
        self.smaps: int | None = None
        """The descriptor of the file with the kernel's figures of its memory."""
        self.inherited_bytes = self.inherited_at_fork_bytes = 0
        """The memory that it shares with its zygote, as last measured, and at its fork."""
        self.failure: Failure | None = None
        self.ready = False
        self.over = False
        """Whether its exit was reported. Data copied from its buffers after that is ignored."""
        self._closed = False
        self._copies = 0
        self.last_run: RunId | None = None
        self._pending_runs: dict[RunId, PendingRun] = {}
        # The last used slot is taken first, because its pages are mapped.
        self._free = list(range(slots))
        with ExitStack() as undo:
            self.slots = [_slot(worker, outputs_bytes, undo) for _ in range(slots)]
            self.output = files.outputs.open(what, tenant, keep)
            undo.callback(self.output.close)
            self.channel: Channel[Received]
            self.channel, self.far_end = connected(Received, fds_max=0)  # type: ignore[arg-type]
            undo.pop_all()
        self.outbox = Outbox(self.channel, self.unsent_bytes_max)
        """Sends it messages."""

    def buffer_fds(self) -> list[int]:
        """The descriptors of its buffers, slot by slot."""
        return [buffer.fd for slot in self.slots for buffer in slot]

    def copy_inputs(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Copy inputs into a slot's buffer, in order, until the process is over. Raises OSError as `SharedBuffer.grow`
        does.
        """
        _copy_into(self.slots[slot].inputs, tensors, lambda: self.over)

    def copy_outputs(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Copy the outputs of a program into a slot's other buffer; otherwise as `copy_inputs`."""
        _copy_into(self.slots[slot].outputs, tensors, lambda: self.over)

    def assign_slot(self, run: RunId, requests: tuple[RequestId, ...], functions: tuple[FunctionId, ...]) -> int:
        """Assign a slot to the run; the scheduler never sends more runs than there are slots."""
        self.last_run = run
        slot = self._free.pop()
        self._pending_runs[run] = PendingRun(slot, requests, functions)
        return slot

    def complete_run(self, answer: Answer) -> PendingRun:
        """Return the run that was answered, which keeps its slot until `free`; raise ValueError if there is none, or if
        it has another number of requests.
        """
        self._check_counts(answer)
        return self._pending_runs.pop(answer.run)

    def unpacked(self, packed: PackedAnswer) -> Answer:
        """Decode the outcomes of an answer, one by one. Raises ValueError for an answer that does not fit its run."""
        self._check_counts(packed)
        outcomes = tuple(self.answer_check.unpacked(each) for each in packed.outcomes)
        measured = packed.moved_bytes, packed.peer_bytes, packed.unplaced, packed.program_s, packed.fault
        return Answer(packed.run, outcomes, *measured)

    def _check_counts(self, answer: Answer | PackedAnswer) -> None:
        pending = self._pending_runs.get(answer.run)
        if pending is None:
            raise ValueError(f"run {answer.run} was not requested")
        if len(pending.requests) != len(answer.outcomes):
            counts = f"{len(pending.requests)} requests and {len(answer.outcomes)} outcomes"
            raise ValueError(f"run {answer.run} has {counts}")

    def take_back(self, run: RunId) -> PendingRun:
        """Return a run that is not sent to the process after all; it keeps its slot until `free`."""
        return self._pending_runs.pop(run)

    def free(self, pending: PendingRun) -> None:
        """Free the slot of a run that was answered and whose outputs were copied, or that was taken back."""
        self._free.append(pending.slot)

    def is_idle_after(self, run: RunId) -> bool:
        """Whether nothing runs, and this run was the last one."""
        return len(self._free) == len(self.slots) and self.last_run == run

    def copy_begins(self) -> None:
        """Keep the buffers open during a copy in a thread, even if the worker ends."""
        self._copies += 1

    def copy_ended(self) -> None:
        """A copy has ended."""
        self._copies -= 1
        self._close_buffers()

    def end_failure(self, how: str) -> Failure:
        """Return the failure by which its end is reported, if the process did not report one itself."""
        return Failure("WorkerError", how)

    def buffer_bytes(self) -> tuple[int, int]:
        """The memory of its buffers for inputs, which the node writes, and of those for outputs."""
        inputs = sum(os.fstat(slot.inputs.fd).st_blocks for slot in self.slots)
        outputs = sum(os.fstat(slot.outputs.fd).st_blocks for slot in self.slots)
        return inputs * SECTOR_BYTES, outputs * SECTOR_BYTES

    def is_large(self) -> bool:
        """Whether a buffer is larger than the memory that it keeps while nothing runs."""
        return any(buffer.nbytes > KEPT_BYTES for slot in self.slots for buffer in slot)

    def release(self) -> Iterator[None]:
        """Release the memory of large buffers, piece by piece, while nothing runs."""
        for buffer in chain.from_iterable(self.slots):
            yield from buffer.release()

    def fail(self, error: str, reason: str) -> None:
        """Record why it is ended, for the report of its end."""
        self.failure = Failure(error, reason)

    def forked(self, pid: int, pidfd: int, smaps: int | None) -> None:
        """Record its process, and kill it if that was requested before."""
        self.pid, self.pidfd, self.smaps = pid, pidfd, smaps
        if self._kill_requested:
            self.kill()

    def can_meet_slo(self, cpu_time_s: float) -> bool:
        """Whether it is a worker whose function has an SLO that it can still meet. `cpu_time_s`: its CPU time now."""
        return False

    def kill(self) -> None:
        """Kill its process, now or as soon as there is one."""
        self._kill_requested = True
        if self.pidfd is not None:
            kill(self.pidfd)
        if self._demotion is not None:
            self._demotion.restore()

    def demoted(self, demotion: Demotion | None) -> None:
        """Record that it gets only idle cores until it is killed: see `demotion.demote`."""
        if self._closed:
            # Its descriptors may be those of another process now.
            return
        self.is_demoted, self._demotion = True, demotion
        if self._kill_requested:
            self.kill()

    def close(self) -> None:
        """Close the node's descriptors for the process."""
        self.over = self._closed = True
        if self._demotion is not None:
            self._demotion.ended()
        self.last_run = None
        self.channel.close()
        self.output.close()
        for fd in (self.smaps, self.pidfd):
            if fd is not None:
                os.close(fd)
        self.close_far_end()
        self._close_buffers()

    def close_far_end(self) -> None:
        """Close the process's descriptors here: they were sent to it, or never will be."""
        self.far_end.close()
        self.output.close_far_end()

    def _close_buffers(self) -> None:
        if self._closed and not self._copies:
            for slot in self.slots:
                slot.inputs.close(self._files.closing.close_file)
                slot.outputs.close(self._files.closing.close_file)


def _no_listener(_: object) -> None:
    raise AssertionError("nobody listens to the process yet")


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
    # The node does not count this file with the worker's buffers, so it has the size of its contents, at least 64 KiB.
    *_, nbytes = offsets(tensor.meta for tensor in tensors)
    buffer = SharedBuffer.make("overwinter-samples", nbytes)
    try:
        _copy_into(buffer, tensors)
        return os.dup(buffer.fd)
    finally:
        buffer.close()


def _copy_into(buffer: SharedBuffer, tensors: Sequence[Tensor], stops: Callable[[], bool] = lambda: False) -> None:
    """Copy tensors one after another; `stops`: whether the rest is not needed any more."""
    places = offsets(tensor.meta for tensor in tensors)
    for tensor, at in zip(tensors, places, strict=False):
        if stops():
            return
        buffer.put(at, tensor.data)


def _slot(worker: WorkerId, outputs_bytes: int, undo: ExitStack) -> Slot:
    """Create the buffers of a slot, which `undo` closes if the creation of the process's record fails."""
    inputs = SharedBuffer.make(f"overwinter-in-{worker}")
    undo.callback(inputs.close)
    outputs = SharedBuffer.make(f"overwinter-out-{worker}", outputs_bytes)
    undo.callback(outputs.close)
    return Slot(inputs, outputs)
