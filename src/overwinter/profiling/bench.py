"""Repeats runs of a configuration until its latency is known, also when requests interrupt them.

Each configuration has its own process, because a heap depends on earlier runs. Disturbed measurements are repeated.
"""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from overwinter.core.ids import Seconds, WorkerId
from overwinter.core.profile import Point, Shape
from overwinter.model.program import Program
from overwinter.node.functions import DeployedFunction
from overwinter.node.processes import Processes
from overwinter.profiling.measuring import DisturbedError, MeasuredWorker
from overwinter.profiling.quiet import Quiet
from overwinter.store.hosts import HostStores

RUNS = 20
"""Runs that are enough."""
SECONDS = 1.0
"""Seconds of runs that are enough, when there were RUNS_LEAST."""
RUNS_LEAST = 3
SECONDS_MOST = 10.0
"""Seconds of runs that are enough whatever their number."""
BURST_S = 0.1
"""Seconds between two looks at whether a pause is due."""


class Measurement(NamedTuple):
    """One configuration, and by the way how long its worker took to wake; None: something came between."""

    point: Point
    pid: int
    wake_s: float | None


class Layers(NamedTuple):
    """Seconds of each layer for one size of batch, on one core."""

    batch: int
    seconds: tuple[float, ...]
    pid: int


class Bench:
    """Runs one measurement at a time."""

    def __init__(self, processes: Processes, hosts: HostStores, quiet: Quiet, now: Callable[[], Seconds]) -> None:
        self._processes = processes
        self._hosts = hosts
        self._quiet = quiet
        self._now = now
        self._last = 0

    async def point(self, function: DeployedFunction, program: Program, shape: Shape) -> Measurement:
        """Memory and median latency of a configuration. StoreError when its blocks are not in memory, WorkerError when
        it does not run.
        """
        while True:
            try:
                return await self._point(function, program, shape)
            except DisturbedError:
                continue

    async def layers(self, function: DeployedFunction, program: Program, batch: int) -> Layers:
        """Median seconds of each layer; errors as of `point`."""
        while True:
            try:
                return await self._layers(function, program, batch)
            except DisturbedError:
                continue

    async def _point(self, function: DeployedFunction, program: Program, shape: Shape) -> Measurement:
        worker = self._worker(function, program, shape)
        try:
            wake_s = await self._start(worker, function)
            pid = worker.pid or 0
            runs: list[float] = []
            spent = 0.0
            while not _enough(len(runs) / shape.concurrency, spent):
                mark = await self._quiet.moment()
                begun = self._now()
                took = await worker.waves(BURST_S, lambda mark=mark: self._quiet.disturbed(mark))  # type: ignore[misc]
                self._quiet.spent(self._now() - begun)
                runs += took
                spent += sum(took) / shape.concurrency
            memory_bytes = await worker.private_bytes()
        finally:
            await worker.end()
        return Measurement(Point(shape.cores, memory_bytes, shape.batch, shape.concurrency, median(runs)), pid, wake_s)

    async def _layers(self, function: DeployedFunction, program: Program, batch: int) -> Layers:
        worker = self._worker(function, program, Shape(1, batch, 1))
        try:
            await self._start(worker, function)
            pid = worker.pid or 0
            passes: list[tuple[float, ...]] = []
            warm = False
            spent = 0.0
            while not _enough(len(passes), spent):
                mark = await self._quiet.moment()
                begun = self._now()
                took = await worker.layers(batch, lambda mark=mark: self._quiet.disturbed(mark))  # type: ignore[misc]
                self._quiet.spent(self._now() - begun)
                if warm and not self._quiet.disturbed(mark):
                    passes.append(took)
                    spent += sum(took)
                warm = True
        finally:
            await worker.end()
        return Layers(batch, tuple(median(layer) for layer in zip(*passes, strict=True)), pid)

    def _worker(self, function: DeployedFunction, program: Program, shape: Shape) -> MeasuredWorker:
        # The scheduler counts its workers upwards.
        self._last -= 1
        return MeasuredWorker(self._processes, WorkerId(self._last), function, program, shape, self._now)

    async def _start(self, worker: MeasuredWorker, function: DeployedFunction) -> float | None:
        mark = await self._quiet.moment()
        begun = self._now()
        wake_s = await worker.start(self._hosts.store(function.store).open(function.files(bare=True)))
        self._quiet.spent(self._now() - begun)
        return None if self._quiet.disturbed(mark) else wake_s


def _enough(runs: float, seconds: float) -> bool:
    return runs >= RUNS or (runs >= RUNS_LEAST and seconds >= SECONDS) or (runs > 0 and seconds >= SECONDS_MOST)
