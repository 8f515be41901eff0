"""Runs of handlers that wait for the answer of their program on the pool, and do not count as hung meanwhile.

A call ends with the last request of its run at the latest. Then the handler gets a moment to react: a device that is
busy must not cost workers.
"""

from math import inf

from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import Operation, hangs_s
from overwinter.scheduler.request import Request


def begin(cycle: Cycle, request: Request) -> None:
    """A request is open; a handler may have made it."""
    run = _caller(cycle, request)
    if run is not None:
        run.hangs_at = inf


def end(cycle: Cycle, request: Request) -> None:
    """A request is answered or cancelled."""
    run = _caller(cycle, request)
    if run is not None and request.caller is not None:
        run.hangs_at = max(run.began + hangs_s(run.parts, run.patience), cycle.now + cycle.config.stop_timeout_s)
        cycle.timers.arm(request.caller[0], run.hangs_at)


def _caller(cycle: Cycle, request: Request) -> Operation | None:
    """The run that waits for the request, if it is still in progress."""
    if request.caller is None:
        return None
    worker, run = request.caller
    calling = cycle.state.workers.get(worker)
    return None if calling is None else calling.runs.get(run)
