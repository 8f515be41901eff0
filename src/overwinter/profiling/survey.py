"""Plans the measurements of one function, their order, and the use of their results."""

from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import TypeVar

import msgspec

from overwinter.core.errors import StoreError, WorkerError
from overwinter.core.profile import LayerPoint, Point, Profile, Shape
from overwinter.core.profiling import Progress, Tell, with_points
from overwinter.model.program import Program
from overwinter.node.functions import DeployedFunction
from overwinter.profiling.bench import Bench, Layers

LONGEST_S = 10.0
"""Batches larger than one that took this long are not measured."""

BEGINS = "begins"
"""The first reported step, when the measurement's turn has come."""

Found = TypeVar("Found")


class Survey:
    """The measurement of one function: its plan and its results."""

    def __init__(
        self,
        bench: Bench,
        wake: Callable[[DeployedFunction], Awaitable[None]],
        function: DeployedFunction,
        program: Program,
        tell: Tell,
    ) -> None:
        self._bench = bench
        self._wake = wake
        self._function = function
        self._program = program
        self._tell = tell
        self._done = self._total = 0
        self._points: list[Point] = []
        self._layers: list[Layers] = []
        self._wakes: list[float] = []
        self._known_shapes: set[Shape] = set()
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

    def known(self, profile: Profile) -> None:
        """Skip the configurations in this profile."""
        self._known_shapes = {point.shape for point in profile.points}
        if profile.layers and len(profile.layers) == len(self._program.layers):
            self._known_batches = set.intersection(*(set(layer.latency_s) for layer in profile.layers))

    async def run(self, shapes: Sequence[Shape], batches: Sequence[int]) -> None:
        """Measure the unknown configurations; raise WorkerError if none runs."""
        missing = [shape for shape in shapes if shape not in self._known_shapes]
        timed = [batch for batch in batches if batch not in self._known_batches]
        self._total = len(missing) + len(timed)
        self._say(BEGINS)
        stuck: dict[tuple[int, int], str] = {}
        for shape in missing:
            row = (shape.cores, shape.concurrency)
            if row not in stuck:
                stuck.update(await self._measure(shape))
            else:
                self._done += 1
                self._say(f"{_text(shape)} is left out: {stuck[row]}")
        if missing and not self._points:
            raise WorkerError(next(iter(stuck.values())))
        for batch in timed:
            await self._time(batch)

    async def _measure(self, shape: Shape) -> dict[tuple[int, int], str]:
        """Measure one configuration; return why larger batches of its kind need not be measured, if there is a
        reason.
        """
        self._say(_text(shape))
        try:
            found = await self._with_blocks(lambda: self._bench.point(self._function, self._program, shape))
        except WorkerError as error:
            self._done += 1
            return {(shape.cores, shape.concurrency): str(error)}
        self._done += 1
        self._points.append(found.point)
        if found.wake_s is not None:
            self._wakes.append(found.wake_s)
        self._say(_text(shape), found.pid, found.point)
        if found.point.latency_s > LONGEST_S:
            return {(shape.cores, shape.concurrency): f"a smaller batch took {found.point.latency_s:.0f} s"}
        return {}

    async def _time(self, batch: int) -> None:
        what = f"layers, b={batch}"
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

    async def _with_blocks(self, step: Callable[[], Awaitable[Found]]) -> Found:
        try:
            return await step()
        except StoreError:
            await self._wake(self._function)
            return await step()

    def added_to(self, known: Profile) -> Profile:
        """Return the profile with the results added."""
        profile = with_points(known, self._points, median(self._wakes) if self._wakes else None)
        return msgspec.structs.replace(profile, layers=self._layer_points(known))

    def _layer_points(self, known: Profile) -> tuple[LayerPoint, ...]:
        fits = len(known.layers) == len(self._program.layers)
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
                    latency_s=dict(sorted(latency_s.items())),
                )
            )
        return tuple(points) if any(point.latency_s for point in points) else ()

    def _say(self, what: str, pid: int | None = None, point: Point | None = None) -> None:
        self._tell(Progress(done=self._done, total=self._total, what=what, pid=pid, point=point))


def _text(shape: Shape) -> str:
    return f"c={shape.cores} b={shape.batch} p={shape.concurrency}"
