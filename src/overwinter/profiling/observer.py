"""Compares service with the profile: reads each step of the scheduler, and reports lasting differences."""

from collections.abc import Callable, Sequence

import msgspec

from overwinter.core.actions import Action, Run, StartWorker
from overwinter.core.events import Arrived, Event, Removed, RunEnded, WorkerExited, WorkerReady
from overwinter.core.ids import FunctionId, RunId, Seconds, WorkerId
from overwinter.core.profile import Point, Profile, Shape

RUNS_MIN = 20
"""Runs of one configuration before they count against what was measured."""
WAKES_MIN = 5
DEVIATION = 0.2
"""Relative difference that is told."""
EVERY_S = 60.0
"""At most this often for each function."""
SMOOTHING = 0.1


class Correction(msgspec.Struct, frozen=True):
    """What differs from the profile."""

    points: tuple[Point, ...]
    wake_s: float | None


class _Worker(msgspec.Struct):
    function: FunctionId
    cores: int
    concurrency: int
    since: Seconds
    on_trial: bool
    running: int = 0
    warm: bool = False
    """It has run: what only the first run pays for is paid."""


class _Run(msgspec.Struct):
    process: _Worker
    function: FunctionId
    batch: int
    begun: Seconds
    full: bool
    """It began as the last that the worker may have at once."""


class _Seen(msgspec.Struct):
    count: int = 0
    mean_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.mean_s += max(SMOOTHING, 1 / self.count) * (seconds - self.mean_s)


class Observer:
    """A reader of steps. It is called for every step of a node, so it examines few of them and stores a handful of
    numbers.
    """

    def __init__(
        self, profile_of: Callable[[FunctionId], Profile | None], tell: Callable[[FunctionId, Correction], None]
    ) -> None:
        """`profile_of` returns the profile, `tell` is called with corrections of it."""
        self.arrivals = 0
        self.arrived_at: Seconds | None = None
        self._profile_of = profile_of
        self._tell = tell
        self._workers: dict[WorkerId, _Worker] = {}
        self._runs: dict[RunId, _Run] = {}
        self._seen: dict[FunctionId, dict[tuple[int, int, int] | None, _Seen]] = {}
        self._told_at: dict[FunctionId, Seconds] = {}

    def observe(self, now: Seconds, event: Event, actions: Sequence[Action]) -> None:
        """One step."""
        match event:
            case Arrived():
                self.arrivals += 1
                self.arrived_at = now
            case RunEnded():
                self._ended(event, now)
            case WorkerReady(worker):
                self._ready(worker, now)
            case WorkerExited():
                self._exited(event.worker)
            case Removed(function):
                self._seen.pop(function, None)
                self._told_at.pop(function, None)
            case _:
                pass
        for action in actions:
            if type(action) is Run:
                self._began(action, now)
            elif type(action) is StartWorker:
                self._workers[action.worker] = _Worker(
                    action.function, action.cores, action.concurrency, now, action.on_trial
                )

    def _began(self, action: Run, now: Seconds) -> None:
        process = self._workers.get(action.worker)
        if process is not None:
            process.running += 1
            # A run of several functions takes longer than the batch of one that was measured.
            full = process.running == process.concurrency and not action.functions
            self._runs[action.run] = _Run(process, action.function or process.function, len(action.requests), now, full)

    def _ended(self, event: RunEnded, now: Seconds) -> None:
        run = self._runs.pop(event.run, None)
        if run is None:
            return
        process = run.process
        # A configuration was measured with all its runs at once: others say nothing about it.
        counts = run.full and process.running == process.concurrency and process.warm and not event.failures
        process.running -= 1
        process.warm = True
        if counts:
            self._note(run.function, (process.cores, run.batch, process.concurrency), now - run.begun, now)

    def _ready(self, worker: WorkerId, now: Seconds) -> None:
        process = self._workers.get(worker)
        if process is not None and not process.on_trial:
            self._note(process.function, None, now - process.since, now)

    def _exited(self, worker: WorkerId) -> None:
        process = self._workers.pop(worker, None)
        if process is not None and process.running:
            self._runs = {number: run for number, run in self._runs.items() if run.process is not process}

    def _note(self, id_: FunctionId, what: tuple[int, int, int] | None, seconds: float, now: Seconds) -> None:
        if self._profile_of(id_) is None:
            # Gone, or not measured: there is nothing to correct.
            return
        every = self._seen.setdefault(id_, {})
        seen = every.get(what)
        if seen is None:
            seen = every[what] = _Seen()
        seen.add(seconds)
        least = WAKES_MIN if what is None else RUNS_MIN
        if seen.count % least == 0:
            self._compare(id_, now)

    def _compare(self, id_: FunctionId, now: Seconds) -> None:
        profile = self._profile_of(id_)
        told_at = self._told_at.get(id_)
        if profile is None or (told_at is not None and now - told_at < EVERY_S):
            return
        points = []
        wake_s = None
        for what, seen in self._seen[id_].items():
            if what is None:
                if seen.count >= WAKES_MIN and profile.wake_s is not None and _differs(seen.mean_s, profile.wake_s):
                    wake_s = seen.mean_s
                continue
            point = profile.point(Shape(*what))
            if point is not None and seen.count >= RUNS_MIN and _differs(seen.mean_s, point.latency_s):
                points.append(msgspec.structs.replace(point, latency_s=seen.mean_s))
        if points or wake_s is not None:
            self._told_at[id_] = now
            self._tell(id_, Correction(tuple(points), wake_s))


def _differs(seen_s: float, known_s: float) -> bool:
    return abs(seen_s - known_s) > DEVIATION * known_s
