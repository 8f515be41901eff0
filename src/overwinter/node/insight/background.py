"""Which workers compute while nothing runs?

A handler may leave threads behind that take cores when its function has nothing to do. What a worker computes beyond
the cores of its runs is billed as if it had run, and one that goes on is stopped: cores are for those who have work.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from overwinter.core.ids import Seconds, WorkerId
from overwinter.core.underway import LivingBody
from overwinter.node import clock
from overwinter.node.insight.statistics import FunctionStatistics, Statistics, Told
from overwinter.node.processes import Processes

LOOK_S = 1.0
NOISE = 0.05
"""Of a core: a worker that tidies up after itself is not billed for it."""
SHARE = 0.1
"""Of a core: what a worker may compute for ever while nothing runs."""
BOUND_S = 5.0
"""Of a core, beyond that share: then it is stopped."""


class Seen(NamedTuple):
    """What was known of a worker at the last look."""

    at: Seconds
    computed_s: float
    allowed_s: float
    over_s: float
    """What it computed beyond its share, and did not make good by being still."""


class Background:
    """Looks now and then. Belongs to the loop's thread: a look costs less than a microsecond a worker."""

    def __init__(
        self,
        statistics: Statistics,
        processes: Callable[[], Processes],
        log: Callable[[str], None],
        bound_s: float = BOUND_S,
    ) -> None:
        self._statistics = statistics
        self._processes = processes
        self._log = log
        self._bound_s = bound_s
        self._seen: dict[WorkerId, Seen] = {}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(clock.now())

    def look(self, now: Seconds) -> None:
        """Bill what was computed since the last look, and stop who does not end."""
        before, self._seen = self._seen, {}
        for worker, living in list(self._statistics.bodies.items()):
            body = self._processes().body(worker)
            # Until it is ready it loads: that is the wake's.
            if body is None or body.pid is None or not body.ready:
                continue
            computed_s = clock.computed_s(body.pid)
            if computed_s is None:
                continue
            seen = _seen(before.get(worker), living, computed_s, now)
            self._seen[worker] = seen
            if seen.over_s > self._bound_s:
                reason = f"it computed {seen.over_s:.1f} s of a core beyond its runs"
                self._log(f"worker {worker} of {living.function} is stopped: {reason}")
                living.tally.decisions.append(Told(now, "stop", reason))
                self._processes().give_up(body, reason)


def _seen(last: Seen | None, living: LivingBody[FunctionStatistics], computed_s: float, now: Seconds) -> Seen:
    """What is known now; what the worker computed on its own is billed."""
    busy_s = living.busy_s + (now - living.busy_since if living.runs else 0.0)
    allowed_s = busy_s * living.cores
    if last is None:
        return Seen(now, computed_s, allowed_s, 0.0)
    own_s = max(0.0, computed_s - last.computed_s - (allowed_s - last.allowed_s))
    passed_s = now - last.at
    if own_s > NOISE * passed_s:
        living.tally.background_core_s += own_s
    return Seen(now, computed_s, allowed_s, max(0.0, last.over_s + own_s - SHARE * passed_s))
