"""Finds workers that compute more than they should.

A worker may use the cores of its runs, as long as a run, or the load before the first run, takes no more than four
times its usual time, or one second. The usual time of a run grows with the number of its requests. A run that several
functions share counts as one with more requests, because it may also verify their split. A longer run is not yet
overuse, because it may have waited for a core: its CPU time must exceed four times the usual too. A handler may leave
threads behind, and may run forever. A worker that computes more than it may is demoted permanently: it gets no more
work, and its run continues on idle cores. CPU time outside runs is billed as run time, and a worker that continues to
compute outside runs is stopped. So is a worker that was forked ahead and computes before a function runs in it.
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
IDLE_CHECK_EVERY = 10
"""A worker that has no run and did not compute is checked once in this many checks."""
OVERLONG_FACTOR, OVERLONG_LEAST_S = 4.0, 1.0
"""A run or a load is overlong after this multiple of its usual time, and not before this time."""
VERIFICATION_REQUESTS = 6
"""The requests whose runs take as long as the verification of a split (worker/split.py)."""
NOISE = 0.05
"""The share of a core that a worker may use outside runs without being billed."""
SHARE = 0.1
"""The share of a core that a worker may use outside runs without limit of time."""
DEMOTE_AFTER_S = 0.1
"""The CPU seconds outside runs and beyond SHARE, or of an overlong operation, after which a worker is demoted."""
AHEAD_S = 1.0
"""The CPU seconds after which a process forked ahead is stopped, while no function runs in it yet."""
STOP_AFTER_S = 5.0
"""The CPU seconds outside runs and beyond SHARE after which a worker is stopped."""


class Observation(NamedTuple):
    """The state of a worker at the last check."""

    at: Seconds
    cpu_time_s: float
    allowed_s: float
    """The time of its runs and binds so far, multiplied by its cores."""
    excess_s: float = 0.0
    """The CPU seconds outside runs and beyond SHARE. They decrease while it uses less than SHARE."""
    overlong_s: float = 0.0
    """The CPU seconds that it has used for an overlong operation."""
    loading: bool = False
    begun: Seconds | None = None
    """When the oldest of its runs began."""
    run_s: float = 0.0
    """The CPU seconds that it has used since then."""
    still: bool = False
    """Whether it hardly computed between the last two checks (less than NOISE), and has no excess."""


class OveruseCheck:
    """Checks the CPU time of all workers periodically on the event loop's thread: microseconds per active worker."""

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
        self._check_number = 0
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
        """Bill the CPU time outside runs since the last check, and stop workers that use too much of it; returns those
        to demote.
        """
        before, self._seen = self._seen, {}
        self._demoted = {
            worker: reported for worker, reported in self._demoted.items() if worker in self._statistics.workers
        }
        self._check_number = (self._check_number + 1) % IDLE_CHECK_EVERY
        found = []
        for worker, live in list(self._statistics.workers.items()):
            last = before.get(worker)
            if last is not None and worker % IDLE_CHECK_EVERY != self._check_number and _is_idle(last, live):
                self._seen[worker] = last
                continue
            process = self._processes.process(worker)
            if process is None or process.pid is None:
                continue
            cpu_time_s = clock.cpu_time_s(process.pid)
            if cpu_time_s is None:
                continue
            seen = self._seen[worker] = _observe_and_bill(last, live, process.ready, cpu_time_s, now)
            if seen.excess_s > self._bound_s:
                self._stop(process, live, seen, now)
            elif worker in self._demoted:
                self._report_demotion(process)
            elif max(seen.excess_s, seen.overlong_s) > DEMOTE_AFTER_S:
                self._record_demotion(process, live, seen, now)
                found.append(process)
        self._check_ahead()
        return found

    def _check_ahead(self) -> None:
        """A process forked ahead only waits, and must not compute."""
        ahead = self._processes.ahead
        for process in list(ahead.workers.values()):
            cpu_time_s = None if process.pid is None else clock.cpu_time_s(process.pid)
            if cpu_time_s is not None and cpu_time_s > AHEAD_S:
                ahead.give_up(process, f"it used {cpu_time_s:.1f} s of CPU time before anything ran in it")

    async def demote(self, process: WorkerProcess) -> None:
        """Demote a worker, so that it gets only idle cores. This takes a while, so a thread does it."""
        processes = self._processes
        if process.pid is None or process.pidfd is None or processes.process(process.worker) is not process:
            return
        # The node closes its own descriptor when the process ends, while the thread may still use it.
        pidfd = os.dup(process.pidfd)
        demoting = partial(demote, processes.zygotes.groups, process.pid, pidfd, process.tenant)
        process.demoted(await asyncio.get_running_loop().run_in_executor(self._thread, demoting))

    def _record_demotion(
        self, process: WorkerProcess, live: LiveWorker[FunctionStatistics], seen: Observation, now: Seconds
    ) -> None:
        what = "run" if process.ready else "load"
        reason = f"its {what} takes much longer than usual"
        if seen.excess_s > DEMOTE_AFTER_S:
            reason = f"it used {seen.excess_s:.1f} s of CPU time outside its runs"
        message = f"worker {process.worker} of {live.function} gets only idle cores from now on: {reason}"
        self._throttle.log(("demote", process.family.tenant), message)
        live.tally.decisions.append(DecisionRecord(now, "demote", reason))
        self._demoted[process.worker] = False

    def _report_demotion(self, process: WorkerProcess) -> None:
        """Inform the scheduler at the first check after the demotion at which the worker is ready."""
        if process.ready and not self._demoted[process.worker]:
            self._demoted[process.worker] = True
            self._post(Demoted(process.worker))

    def _stop(
        self, process: WorkerProcess, live: LiveWorker[FunctionStatistics], seen: Observation, now: Seconds
    ) -> None:
        reason = f"it used {seen.excess_s:.1f} s of CPU time outside its runs"
        self._throttle.log(
            ("stop", process.family.tenant), f"worker {process.worker} of {live.function} is stopped: {reason}"
        )
        live.tally.decisions.append(DecisionRecord(now, "stop", reason))
        self._processes.forks.give_up(process, reason)


def _observe_and_bill(
    last: Observation | None, live: LiveWorker[FunctionStatistics], ready: bool, cpu_time_s: float, now: Seconds
) -> Observation:
    """Return the current state, and bill the CPU time outside runs."""
    allowed_s = live.total_busy_s(now) * live.cores
    if last is None:
        return Observation(now, cpu_time_s, allowed_s, loading=not ready)
    spent_s, passed_s = cpu_time_s - last.cpu_time_s, now - last.at
    if not ready or last.loading:
        # The time counts for the wake, including the part after its end until this check.
        is_overlong = not ready and _is_overlong(live, ready, cpu_time_s, now)
        overlong_s = last.overlong_s + spent_s if is_overlong else 0.0
        return Observation(now, cpu_time_s, allowed_s, overlong_s=overlong_s, loading=not ready)
    begun = _begun(live)
    run_s = spent_s + (last.run_s if begun == last.begun else 0.0)
    overlong_s = last.overlong_s + spent_s if _is_overlong(live, ready, run_s, now) else 0.0
    own_s = max(0.0, spent_s - (allowed_s - last.allowed_s))
    if own_s > NOISE * passed_s:
        charged = live.tally if live.trial_tally is None else live.trial_tally
        charged.background_core_s += own_s
    excess_s = max(0.0, last.excess_s + own_s - SHARE * passed_s)
    still = spent_s < NOISE * passed_s and excess_s == 0.0
    return Observation(now, cpu_time_s, allowed_s, excess_s, overlong_s, False, begun, run_s, still)


def _is_idle(last: Observation, live: LiveWorker[FunctionStatistics]) -> bool:
    """Whether it was `still` at the last check, and has run nothing since."""
    return last.still and not live.is_busy and live.busy_s * live.cores == last.allowed_s


def _begun(live: LiveWorker[FunctionStatistics]) -> Seconds | None:
    """Return when the oldest of its runs began; None: it runs nothing."""
    return min((run.begun for run in live.runs.values()), default=None)


def _is_overlong(live: LiveWorker[FunctionStatistics], ready: bool, cpu_time_s: float, now: Seconds) -> bool:
    """Whether a worker's run or load takes too long, in both time and CPU time. One that others slow down takes too
    long as well, but uses no more CPU time than usual.
    """
    begun = _begun(live) if ready else live.since
    if begun is None or now - begun <= OVERLONG_LEAST_S:
        return False
    long_s = OVERLONG_FACTOR * (_usual_s(live) if ready else live.tally.usual_wake_s)
    return now - begun > long_s and cpu_time_s >= long_s * live.cores


def _usual_s(live: LiveWorker[FunctionStatistics]) -> float:
    """Return the usual time of the worker's longest run in progress; 0 if unknown. The usual time of the function for
    which the worker was started counts too, because another may not have run yet.
    """
    longest = 0.0
    for run in live.runs.values():
        requests = run.batch + (VERIFICATION_REQUESTS if len(run.requests) > 1 else 0)
        for tally in (live.tally, *run.requests):
            longest = max(longest, tally.usual_run_s, requests * tally.usual_request_s)
    return longest
