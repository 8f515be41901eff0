"""Finds workers that compute more than they should.

A worker may use the cores of its runs, as long as a run, or the load before the first run, takes no more than four
times its usual time. A worker that only waits for a core because others compute is not late: its processor time must
exceed that bound too. A handler may leave threads behind, and may run forever. A worker that computes more is demoted
permanently: it gets no more work, and its run continues on idle cores. Its processor time outside runs is billed as run
time, and it is stopped if it continues to compute. So is a worker that was forked ahead and computes before a function
runs in it.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from overwinter.core.events import Demoted, Event
from overwinter.core.ids import Seconds, WorkerId
from overwinter.node import clock
from overwinter.node.demotion import demote
from overwinter.node.faults import Faults
from overwinter.node.log_throttle import LogThrottle
from overwinter.node.processes import Processes
from overwinter.node.workers import WorkerProcess
from overwinter.telemetry.in_progress import LiveWorker
from overwinter.telemetry.statistics import DecisionRecord, FunctionStatistics, Statistics

CHECK_INTERVAL_S = 0.1
TURNS = 10
"""Workers without runs that did not compute are checked this many times less often."""
LATE_FACTOR, LATE_LEAST_S = 4.0, 1.0
"""A run or a load is late after this multiple of its usual time, and not before this time."""
NOISE = 0.05
"""The share of a core that a worker may use outside runs without being billed."""
SHARE = 0.1
"""The share of a core that a worker may use outside runs without limit of time."""
DEMOTE_AFTER_S = 0.1
"""The seconds of a core beyond its runs and its share after which a worker is demoted."""
AHEAD_S = 1.0
"""The seconds of a core that a process forked ahead may use before a function runs in it; then it is stopped."""
STOP_AFTER_S = 5.0
"""The seconds of a core beyond its runs and its share after which a worker is stopped."""


class Observation(NamedTuple):
    """The state of a worker at the last check."""

    at: Seconds
    computed_s: float
    allowed_s: float
    over_s: float = 0.0
    """The seconds that it computed outside runs beyond its share; they decrease while it uses less than the share."""
    late_s: float = 0.0
    """The seconds that it computed for an operation that took too long."""
    loading: bool = False
    begun: Seconds | None = None
    """When the oldest of its runs began."""
    run_s: float = 0.0
    """The seconds that it has computed since then."""
    still: bool = False
    """Whether it did not compute between the last two checks."""


class OveruseCheck:
    """Checks the processor time of all workers periodically on the loop's thread: microseconds per active worker."""

    def __init__(
        self,
        statistics: Statistics,
        processes: Processes,
        thread: Executor,
        post: Callable[[Event], None],
        log: Callable[[str], None],
        bound_s: float = STOP_AFTER_S,
    ) -> None:
        self._statistics = statistics
        self._processes = processes
        self._thread = thread
        self._post = post
        self._throttle = LogThrottle(log)
        self._bound_s = bound_s
        self._seen: dict[WorkerId, Observation] = {}
        self._turn = 0
        self._demoted: dict[WorkerId, bool] = {}
        """The demoted workers, and whether the scheduler knows."""

    async def run(self, faults: Faults) -> None:
        """Check periodically, without end."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            found: list[WorkerProcess] = []
            with faults.contained("workers' time"):
                found = self.check(clock.now())
            for process in found:
                with faults.contained("demoting workers"):
                    await self.demote(process)

    def check(self, now: Seconds) -> list[WorkerProcess]:
        """Bill the processor time since the last check, and stop workers that do not stop computing; returns those to
        demote.
        """
        before, self._seen = self._seen, {}
        self._demoted = {
            worker: reported for worker, reported in self._demoted.items() if worker in self._statistics.workers
        }
        self._turn = (self._turn + 1) % TURNS
        found = []
        for worker, live in list(self._statistics.workers.items()):
            last = before.get(worker)
            if last is not None and worker % TURNS != self._turn and _is_idle(last, live):
                self._seen[worker] = last
                continue
            process = self._processes.process(worker)
            if process is None or process.pid is None:
                continue
            computed_s = clock.computed_s(process.pid)
            if computed_s is None:
                continue
            seen = self._seen[worker] = _seen(last, live, process.ready, computed_s, now)
            if seen.over_s > self._bound_s:
                self._stop(process, live, seen, now)
            elif worker in self._demoted:
                self._report_demotion(process)
            elif max(seen.over_s, seen.late_s) > DEMOTE_AFTER_S:
                self._record_demotion(process, live, seen, now)
                found.append(process)
        self._check_ahead()
        return found

    def _check_ahead(self) -> None:
        """A process forked ahead only waits, and must not compute."""
        ahead = self._processes.ahead
        for process in list(ahead.workers.values()):
            computed_s = None if process.pid is None else clock.computed_s(process.pid)
            if computed_s is not None and computed_s > AHEAD_S:
                ahead.give_up(process, f"it computed {computed_s:.1f} s of a core before anything ran in it")

    async def demote(self, process: WorkerProcess) -> None:
        """Demote a worker, so that it gets only idle cores. This takes a while, so a thread does it."""
        processes = self._processes
        if process.pid is None or process.pidfd is None or processes.process(process.worker) is not process:
            return
        # The node closes its own descriptor when the process ends, while the thread may still use it.
        pidfd = os.dup(process.pidfd)
        demoting = partial(demote, processes.zygotes.groups, process.pid, pidfd)
        await asyncio.get_running_loop().run_in_executor(self._thread, demoting)

    def _record_demotion(
        self, process: WorkerProcess, live: LiveWorker[FunctionStatistics], seen: Observation, now: Seconds
    ) -> None:
        what = "run" if process.ready else "load"
        reason = f"its {what} takes much longer than usual"
        if seen.over_s > DEMOTE_AFTER_S:
            reason = f"it computed {seen.over_s:.1f} s of a core beyond its runs"
        message = f"worker {process.worker} of {live.function} computes only when a core is free from now on: {reason}"
        self._throttle.log(("demote", process.family.tenant), message)
        live.tally.decisions.append(DecisionRecord(now, "demote", reason))
        self._demoted[process.worker] = False

    def _report_demotion(self, process: WorkerProcess) -> None:
        """Inform the scheduler at the next check: a worker that was slow to load may have begun to run by then."""
        if process.ready and not self._demoted[process.worker]:
            self._demoted[process.worker] = True
            self._post(Demoted(process.worker))

    def _stop(
        self, process: WorkerProcess, live: LiveWorker[FunctionStatistics], seen: Observation, now: Seconds
    ) -> None:
        reason = f"it computed {seen.over_s:.1f} s of a core beyond its runs"
        self._throttle.log(
            ("stop", process.family.tenant), f"worker {process.worker} of {live.function} is stopped: {reason}"
        )
        live.tally.decisions.append(DecisionRecord(now, "stop", reason))
        self._processes.forks.give_up(process, reason)


def _seen(
    last: Observation | None, live: LiveWorker[FunctionStatistics], ready: bool, computed_s: float, now: Seconds
) -> Observation:
    """The current state; processor time outside runs is billed."""
    allowed_s = live.total_busy_s(now) * live.cores
    if last is None:
        return Observation(now, computed_s, allowed_s, loading=not ready)
    spent_s, passed_s = computed_s - last.computed_s, now - last.at
    if not ready or last.loading:
        # The time counts for the wake, including the part after its end until this check.
        is_late = not ready and _is_late(live, ready, computed_s, now)
        late_s = last.late_s + spent_s if is_late else 0.0
        return Observation(now, computed_s, allowed_s, late_s=late_s, loading=not ready)
    begun = _begun(live)
    run_s = spent_s + (last.run_s if begun == last.begun else 0.0)
    late_s = last.late_s + spent_s if _is_late(live, ready, run_s, now) else 0.0
    own_s = max(0.0, spent_s - (allowed_s - last.allowed_s))
    if own_s > NOISE * passed_s:
        charged = live.tally if live.trial_tally is None else live.trial_tally
        charged.background_core_s += own_s
    over_s = max(0.0, last.over_s + own_s - SHARE * passed_s)
    still = spent_s < NOISE * passed_s and over_s == 0.0
    return Observation(now, computed_s, allowed_s, over_s, late_s, False, begun, run_s, still)


def _is_idle(last: Observation, live: LiveWorker[FunctionStatistics]) -> bool:
    """Whether it computed nothing at the last check, and has run nothing since."""
    return last.still and not live.is_busy and live.busy_s * live.cores == last.allowed_s


def _begun(live: LiveWorker[FunctionStatistics]) -> Seconds | None:
    """Return when the oldest of its runs began; None: it runs nothing."""
    return min((run.begun for run in live.runs.values()), default=None)


def _is_late(live: LiveWorker[FunctionStatistics], ready: bool, computed_s: float, now: Seconds) -> bool:
    """Whether a worker's operation should have ended long ago and has computed accordingly. An operation slowed down by
    others takes long as well, but computes no more than usual.
    """
    begun = _begun(live) if ready else live.since
    usual_s = LATE_FACTOR * (live.tally.usual_run_s if ready else live.tally.usual_wake_s)
    if begun is None:
        return False
    return now - begun > max(LATE_LEAST_S, usual_s) and computed_s >= usual_s * live.cores
