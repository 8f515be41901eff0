"""The node's record of one worker: what it serves, and how much it computes."""

from math import inf
from typing import Protocol

import msgspec

from overwinter.core.ids import FunctionId, RequestId, RunId, WorkerId
from overwinter.node import clock
from overwinter.node.answers import AnswerCheck
from overwinter.node.bindings import Bindings
from overwinter.node.contained import ContainedProcess, PendingRun, ProcessFiles
from overwinter.node.functions import DeployedFunction
from overwinter.node.recent_output import OutputLine, RecentOutput
from overwinter.worker.messages import Answer, Bind, Failure, Load, Measured, PoolCall, Ready

AFTER_RUN_S = 0.002
"""The CPU seconds of a worker after a run that do not count as used outside runs."""


class WorkerListener(Protocol):
    """Receives the events of a worker: the node's `Runs`, or a measurement."""

    def worker_ready(self, process: "WorkerProcess", ready: Ready, /) -> None:
        """The worker is loaded."""
        ...

    def worker_calls(self, process: "WorkerProcess", call: PoolCall, /) -> None:
        """The worker calls a program on the pool; raises ValueError if it may not."""
        ...

    def worker_answered(self, process: "WorkerProcess", answer: Answer, /) -> None:
        """The worker ran something; raises ValueError if the answer is impossible."""
        ...

    def worker_measured(self, process: "WorkerProcess", measured: Measured, /) -> None:
        """The worker sent its measurements; raises ValueError if they were not requested."""
        ...

    def worker_exited(self, process: "WorkerProcess", error: str, reason: str, /) -> None:
        """The worker ended."""
        ...


class WorkerProcess(ContainedProcess):
    """A contained process that serves a family."""

    def __init__(
        self, worker: WorkerId, function: DeployedFunction, load: Load, listener: WorkerListener, files: ProcessFiles
    ) -> None:
        """`function` is the one for which it is forked. Raises OSError when the system lacks descriptors or memory."""
        tenant = function.family.tenant
        super().__init__(worker, tenant, "worker", load.concurrency, files, self._keep)
        self.listener = listener
        self.waits = False
        """Whether it was forked ahead and has reported that it waits in the sandbox."""
        self.function, self.family = function.id, function.family
        self.output.assign(function.id)
        self._slo_ms = function.manifest.settings.slo_ms
        self.recent_output: RecentOutput | None = None
        """The record of its output; None before it has a function."""
        self.bindings = Bindings()
        self.answer_check = AnswerCheck(load.outputs, counted=not load.measured)
        self.trial_began = False
        """Whether it has reported the start of a trial."""
        self.has_handler = load.source_bytes is not None
        """Whether Python code of the function's author runs in it."""
        self.calls_programs = load.handler_only or load.pool_first
        """Whether its programs may run on the pool."""
        self._slo_spent_at_s: dict[RunId, float] = {}
        """Its CPU seconds at which each run in progress has used up its SLO."""
        self._outside_runs_s = 0.0
        self._outside_runs_from: float | None = None
        """Its CPU time up to which the CPU seconds outside runs are counted; None: a run is in progress, or its CPU
        time is unknown.
        """

    def take_over(self, worker: WorkerId, function: DeployedFunction, load: Load) -> None:
        """Use a process forked ahead as this worker, for this function's family."""
        self.worker, self.function, self.family = worker, function.id, function.family
        self._slo_ms = function.manifest.settings.slo_ms
        self.answer_check = AnswerCheck(load.outputs)
        self.has_handler = load.source_bytes is not None
        self.calls_programs = load.handler_only or load.pool_first
        self.is_ahead = False
        self.output.assign(function.id)

    def bind_message(self, function: DeployedFunction) -> Bind:
        """Return the message to bind a further function, which hands over the blocks that the worker lacks. Only the
        first function of a worker can be on trial.
        """
        bind = function.bind_message()
        handed = tuple(self.bindings.lacking(bind, function.store))
        return msgspec.structs.replace(bind, handed=handed, trial=None)

    def _keep(self, text: str) -> None:
        if self.recent_output is not None:
            self.recent_output.add(OutputLine(clock.wall(), self.worker, text))

    def assign_slot(self, run: RunId, requests: tuple[RequestId, ...], functions: tuple[FunctionId, ...]) -> int:
        """Assign a slot to the run, and note the CPU time of the process."""
        cpu_time_s = self._cpu_time_s()
        if not self._pending_runs:
            self._count_outside_runs(cpu_time_s)
            self._outside_runs_from = None
        # The CPU time of a worker is that of all its slots.
        slo_s = (self._slo_ms or 0.0) / 1000 * len(self.slots)
        self._slo_spent_at_s[run] = (cpu_time_s or 0.0) + slo_s
        return super().assign_slot(run, requests, functions)

    def can_meet_slo(self, cpu_time_s: float) -> bool:
        """Whether the function for which it was started has an SLO, and no run in progress has computed for longer than
        the SLO.

        `cpu_time_s`: its CPU seconds now. The time for which others slowed a run down does not count.
        """
        if self._slo_ms is None:
            return False
        return all(cpu_time_s <= until_s for until_s in self._slo_spent_at_s.values())

    def complete_run(self, answer: Answer) -> PendingRun:
        """Return the run that was answered. Raises ValueError if there is none, or for an impossible answer."""
        pending = super().complete_run(answer)
        if answer.moved_bytes or answer.peer_bytes or answer.unplaced:
            raise ValueError("a worker has no device")
        if not 0 <= answer.program_s < inf:
            raise ValueError(f"a program cannot take {answer.program_s} s")
        del self._slo_spent_at_s[answer.run]
        if not self._pending_runs:
            cpu_time_s = self._cpu_time_s()
            self._outside_runs_from = None if cpu_time_s is None else cpu_time_s + AFTER_RUN_S
        return pending

    def take_back(self, run: RunId) -> PendingRun:
        """Return a run that is not sent to the worker after all; it keeps its slot until `free`."""
        del self._slo_spent_at_s[run]
        return super().take_back(run)

    def cpu_time_outside_runs_s(self) -> float:
        """The CPU seconds that it has used while it was ready and nothing ran."""
        if not self._pending_runs:
            self._count_outside_runs(self._cpu_time_s())
        return self._outside_runs_s

    def _count_outside_runs(self, cpu_time_s: float | None) -> None:
        """Count the CPU seconds since its last run or the last count. `cpu_time_s`: those that it has used in all."""
        if not self.ready or cpu_time_s is None:
            return
        if self._outside_runs_from is not None:
            self._outside_runs_s += max(0.0, cpu_time_s - self._outside_runs_from)
        self._outside_runs_from = max(cpu_time_s, self._outside_runs_from or 0.0)

    @property
    def in_progress(self) -> frozenset[RunId | str]:
        """The runs and binds that it has not answered yet."""
        return frozenset(self._pending_runs) | self.bindings.pending_binds

    def _cpu_time_s(self) -> float | None:
        return None if self.pid is None else clock.cpu_time_s(self.pid)

    def end_failure(self, how: str) -> Failure:
        """Return the failure by which its end is reported, if the worker did not report one itself. If it ends by
        itself during a trial, the function's author is at fault.
        """
        if self.ready or not self.trial_began or self.dismissed:
            return Failure("WorkerError", how)
        message = f"the trial of {self.function} failed: {how}"
        if not self.has_handler:
            return Failure("ProgramError", f"{message}. Its program ended it; if it needs more memory, set memory_mib")
        return Failure(
            "HandlerError",
            f"{message}. Its program or its handler ended it; if the handler cannot answer a generated request, give "
            "one that it can answer with --sample NAME=VALUE, or samples=[{...}] in Python; if it needs more memory, "
            "set memory_mib",
        )
