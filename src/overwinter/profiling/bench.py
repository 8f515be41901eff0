"""Repeats runs of a configuration until its latency is known, also when requests interrupt them.

Each configuration has its own process, because a heap depends on earlier runs. Disturbed measurements are repeated.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import NamedTuple

from overwinter.core.errors import MachineError
from overwinter.core.ids import Seconds, WorkerId
from overwinter.core.profile import Configuration, Point
from overwinter.model.program import Program
from overwinter.node.functions import DeployedFunction
from overwinter.node.processes import Processes
from overwinter.profiling.measuring import DisturbedError, MeasuredWorker
from overwinter.profiling.quiet import Quiet
from overwinter.store.hosts import HostStores

RUNS = 20
"""The number of waves of concurrent runs after which a measurement ends."""
SECONDS = 1.0
"""The seconds of waves, each as long as its mean run, after which it ends if there were at least RUNS_LEAST waves."""
RUNS_LEAST = 3
SECONDS_MOST = 10.0
"""The seconds of waves after which it ends if there was at least one."""
BURST_S = 0.1
"""The seconds between two checks whether a pause is due."""


class Measurement(NamedTuple):
    """The result of one configuration."""

    point: Point
    pid: int
    wake_s: float | None
    """The time from the fork of its worker until it was ready; None: the start was disturbed."""


class Layers(NamedTuple):
    """The seconds of each layer for one batch size, on one core."""

    batch: int
    seconds: tuple[float, ...]
    pid: int


class Bench:
    """Runs measurements, each in a separate worker."""

    def __init__(self, processes: Processes, hosts: HostStores, quiet: Quiet, now: Callable[[], Seconds]) -> None:
        self._processes = processes
        self._hosts = hosts
        self._quiet = quiet
        self._now = now
        self._last = 0

    async def point(self, function: DeployedFunction, program: Program, configuration: Configuration) -> Measurement:
        """Measure the memory and the median latency of a configuration. Raises StoreError if the function's blocks are
        not in memory, WorkerError if the configuration does not run.
        """
        while True:
            try:
                return await self._point(function, program, configuration)
            except DisturbedError:
                continue

    async def layers(self, function: DeployedFunction, program: Program, batch: int) -> Layers:
        """Measure the median seconds of each layer; raises the errors of `point`."""
        while True:
            try:
                return await self._layers(function, program, batch)
            except DisturbedError:
                continue

    async def _point(self, function: DeployedFunction, program: Program, configuration: Configuration) -> Measurement:
        worker = self._worker(function, program, configuration)
        try:
            wake_s = await self._start(worker, function)
            pid = worker.pid or 0
            runs: list[float] = []
            spent = 0.0
            while not _enough(len(runs) / configuration.concurrency, spent):
                mark = await self._quiet.wait_until_quiet()
                begun = self._now()
                took = await worker.waves(BURST_S, lambda mark=mark: self._quiet.disturbed(mark))  # type: ignore[misc]
                self._quiet.spent(self._now() - begun)
                runs += took
                spent += sum(took) / configuration.concurrency
            memory_bytes = await worker.private_bytes()
        finally:
            await worker.end()
        return Measurement(
            Point(configuration.cores, memory_bytes, configuration.batch, configuration.concurrency, median(runs)),
            pid,
            wake_s,
        )

    async def _layers(self, function: DeployedFunction, program: Program, batch: int) -> Layers:
        worker = self._worker(function, program, Configuration(1, batch, 1))
        try:
            await self._start(worker, function)
            pid = worker.pid or 0
            passes: list[tuple[float, ...]] = []
            warm = False
            spent = 0.0
            while not _enough(len(passes), spent):
                mark = await self._quiet.wait_until_quiet()
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

    def _worker(self, function: DeployedFunction, program: Program, configuration: Configuration) -> MeasuredWorker:
        # The scheduler's workers have positive numbers.
        self._last -= 1
        return MeasuredWorker(self._processes, WorkerId(self._last), function, program, configuration, self._now)

    async def _start(self, worker: MeasuredWorker, function: DeployedFunction) -> float | None:
        host, files = self._hosts.store(function.store), function.files(bare=True)
        # A function of the pool counts as awake although nothing has verified its blocks.
        for address in host.unverified(files):
            # If this fails, `open` reports why.
            with suppress(MachineError):
                await asyncio.to_thread(host.verify, address)
        mark = await self._quiet.wait_until_quiet()
        begun = self._now()
        wake_s = await worker.start(host.open(files))
        self._quiet.spent(self._now() - begun)
        return None if self._quiet.disturbed(mark) else wake_s


def _enough(runs: float, seconds: float) -> bool:
    return runs >= RUNS or (runs >= RUNS_LEAST and seconds >= SECONDS) or (runs > 0 and seconds >= SECONDS_MOST)
