"""The input and the output of a scaler for one function."""

from collections.abc import Callable

import msgspec

from overwinter.core.ids import Seconds, WorkerId
from overwinter.core.profile import Point, Shape


class Standing(msgspec.Struct, frozen=True):
    """One worker of the function that exists or is starting."""

    worker: WorkerId
    point: Point
    """Its configuration as it was measured."""
    load: float
    """Share of its concurrent runs under way, 0 to 1."""
    since: Seconds
    """When it last became what it is."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """All that a scaler may know. Rates are requests per second."""

    rate: float
    """What is expected for the time ahead."""
    slo_s: float | None
    points: tuple[Point, ...]
    """The configurations that the function's settings allow."""
    workers: tuple[Standing, ...] = ()
    free_cores: float
    free_workers: int
    """How many more workers the node and the function's settings allow."""
    free_bytes: float
    """Memory for more workers; infinite without a bound."""
    weight_bytes: int
    missing_bytes: int
    """Of the function's blocks, what the host store lacks."""
    macs: int
    """Of one request."""
    shared: bool = True
    """Whether workers share their weights; if not, each has its own copy of `weight_bytes`."""
    alpha: float = 0.8
    beta: float = 0.6
    gamma: float = 0.0
    """Bytes that one core weighs as much as, in m + alpha*c of Tetris."""

    def memory(self, point: Point) -> float:
        """Bytes that one more worker so made adds, the blocks that must be brought first apart."""
        return point.memory_bytes + (0 if self.shared else self.weight_bytes)


class Scaled(msgspec.Struct, frozen=True):
    """What should change, in order."""

    start: tuple[Shape, ...] = ()
    stop: tuple[WorkerId, ...] = ()
    unserved: float = 0.0
    """Rate for which there was no room."""
    best_effort: bool = False
    """No configuration keeps the SLO; the function is served as fast as it can be."""


Scaler = Callable[[Demand], Scaled]
