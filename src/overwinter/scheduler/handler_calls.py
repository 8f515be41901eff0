"""Runs of handlers that wait for the answer of their program on the pool, and do not count as hung meanwhile.

Otherwise workers would be killed while a device is busy. A call ends no later than the last deadline of its run's
requests. Then the handler gets at least `stop_timeout_s` to continue.
"""

from math import inf

from overwinter.core.ids import RunId, WorkerId
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import Operation, run_limit_s


def begin(cycle: Cycle, caller: tuple[WorkerId, RunId]) -> None:
    """A call that this run made was accepted as a request: the run does not count as hung until the answer."""
    run = run_of(cycle, caller)
    if run is not None:
        run.hangs_at, run.called_pool = inf, run.function.spec.settings.device == "any"


def end(cycle: Cycle, caller: tuple[WorkerId, RunId]) -> None:
    """A call that this run made was answered, refused or cancelled: the run can count as hung again."""
    run = run_of(cycle, caller)
    if run is not None:
        run.hangs_at = max(run.began + run_limit_s(run.parts, run.overdue_s), cycle.now + cycle.config.stop_timeout_s)
        cycle.timers.arm(caller[0], run.hangs_at)


def run_of(cycle: Cycle, caller: tuple[WorkerId, RunId] | None) -> Operation | None:
    """Return the run that waits for the answer of a request; None: no run does, or it has ended."""
    if caller is None:
        return None
    worker, run = caller
    calling = cycle.state.workers.get(worker)
    return None if calling is None else calling.runs.get(run)
