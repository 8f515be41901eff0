"""Measures one function: which configurations, in which order, and what the results add to its profile."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from statistics import median
from typing import TypeVar

import msgspec

from overwinter.core.errors import StoreError, WorkerError
from overwinter.core.profile import LAYER_LATENCIES_MAX, LAYER_TEXT_MAX, Configuration, LayerPoint, Point, Profile
from overwinter.core.profiling import Progress, ReportProgress, with_points
from overwinter.model.program import Program
from overwinter.node.functions import DeployedFunction
from overwinter.profiling.bench import Bench, Layers

LONGEST_S = 10.0
"""If the median run of a batch took longer than this, larger batches are not measured."""

Found = TypeVar("Found")


class Survey:
    """The measurement of one function: its plan and its results."""

    def __init__(
        self,
        bench: Bench,
        wake: Callable[[DeployedFunction], Awaitable[None]],
        function: DeployedFunction,
        program: Program,
        report: ReportProgress,
    ) -> None:
        self._bench = bench
        self._wake = wake
        self._function = function
        self._program = program
        self._report = report
        self._done = self._total = 0
        self._points: list[Point] = []
        self._layers: list[Layers] = []
        self._wakes: list[float] = []
        self._known: set[Configuration] = set()
        self._known_batches: set[int] = set()
        self.blank = Profile(
            weight_bytes=sum(weight.nbytes for weight in program.weights),
            macs=sum(layer.macs for layer in program.layers),
        )
        """The profile without measurements."""

    @property
    def found(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points or self._layers)

    def skip_known(self, profile: Profile) -> None:
        """Skip the configurations, and the batch sizes of layers, that this profile contains."""
        self._known = {point.configuration for point in profile.points}
        if profile.layers and len(profile.layers) == len(self._program.layers):
            self._known_batches = _batches(profile)

    async def run(self, configurations: Sequence[Configuration], batches: Sequence[int]) -> None:
        """Measure the unknown configurations, and then the layers; raise WorkerError if no configuration runs."""
        missing = [configuration for configuration in configurations if configuration not in self._known]
        timed = self._layer_batches(batches)
        self._total = len(missing) + len(timed)
        self._say("begins")
        left_out: dict[tuple[int, int], str] = {}
        for configuration in missing:
            row = (configuration.cores, configuration.concurrency)
            if row not in left_out:
                left_out.update(await self._measure(configuration))
            else:
                self._done += 1
                self._say(f"{configuration.text()} is left out: {left_out[row]}")
        if missing and not self._points:
            raise WorkerError(next(iter(left_out.values())))
        for batch in timed:
            await self._measure_layers(batch)

    def _layer_batches(self, batches: Sequence[int]) -> list[int]:
        """Return the batch sizes at which to measure the layers: the unknown ones that a profile can hold."""
        kept = self._kept({*self._known_batches, *batches})
        if missing := len({*self._known_batches, *batches}) - len(kept):
            self._say(f"a profile cannot hold the layers at {missing} more batch sizes: they are not measured there")
        return [batch for batch in kept if batch not in self._known_batches]

    def _kept(self, batches: Collection[int]) -> list[int]:
        """Return those of these batch sizes, the smallest first, for which a profile can hold the latencies of all
        layers.
        """
        layers = self._program.layers
        if not layers or sum(len(layer.path) for layer in layers) > LAYER_TEXT_MAX:
            return []
        return sorted(batches)[: LAYER_LATENCIES_MAX // len(layers)]

    async def _measure(self, configuration: Configuration) -> dict[tuple[int, int], str]:
        """Measure one configuration; return why larger batches with its cores and concurrency need not be measured, if
        there is a reason.
        """
        self._say(configuration.text())
        try:
            found = await self._with_blocks(lambda: self._bench.point(self._function, self._program, configuration))
        except WorkerError as error:
            self._done += 1
            return {(configuration.cores, configuration.concurrency): str(error)}
        self._done += 1
        self._points.append(found.point)
        if found.wake_s is not None:
            self._wakes.append(found.wake_s)
        self._say(configuration.text(), found.pid, found.point)
        if found.point.latency_s > LONGEST_S:
            return {
                (configuration.cores, configuration.concurrency): f"a smaller batch took {found.point.latency_s:.0f} s"
            }
        return {}

    async def _measure_layers(self, batch: int) -> None:
        what = f"layers, batch {batch}"
        self._say(what)
        try:
            found = await self._with_blocks(lambda: self._bench.layers(self._function, self._program, batch))
        except WorkerError as error:
            self._done += 1
            self._say(f"{what}: {error}")
            return
        self._done += 1
        self._layers.append(found)
        self._say(what, found.pid)

    async def _with_blocks(self, measure: Callable[[], Awaitable[Found]]) -> Found:
        """Measure. If the function's blocks are not in memory, wake it and measure again."""
        try:
            return await measure()
        except StoreError:
            await self._wake(self._function)
            return await measure()

    def added_to(self, known: Profile) -> Profile:
        """Return the profile with the results added."""
        profile = with_points(known, self._points, median(self._wakes) if self._wakes else None)
        return msgspec.structs.replace(profile, layers=self._layer_points(known))

    def _layer_points(self, known: Profile) -> tuple[LayerPoint, ...]:
        fits = len(known.layers) == len(self._program.layers)
        kept = self._kept({*(_batches(known) if fits else ()), *(found.batch for found in self._layers)})
        points = []
        for at, layer in enumerate(self._program.layers):
            latency_s = dict(known.layers[at].latency_s) if fits else {}
            latency_s.update({found.batch: found.seconds[at] for found in self._layers})
            points.append(
                LayerPoint(
                    path=layer.path,
                    macs=layer.macs,
                    weight_bytes=layer.weight_bytes,
                    output_bytes=layer.output_bytes,
                    latency_s={batch: latency_s[batch] for batch in kept},
                )
            )
        return tuple(points) if kept else ()

    def _say(self, what: str, pid: int | None = None, point: Point | None = None) -> None:
        self._report(Progress(done=self._done, total=self._total, what=what, pid=pid, point=point))


def _batches(profile: Profile) -> set[int]:
    """Return the batch sizes at which all layers were measured."""
    return set.intersection(*(set(layer.latency_s) for layer in profile.layers)) if profile.layers else set()
