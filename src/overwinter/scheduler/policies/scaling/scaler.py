"""The input and the output of a scaler for one family."""

from collections.abc import Callable
from math import inf

import msgspec

from overwinter.core.ids import Seconds, WorkerId
from overwinter.core.profile import Configuration, Point


class CurrentWorker(msgspec.Struct, frozen=True):
    """One worker of the family that is starting or serves, not one that drains or stops."""

    worker: WorkerId
    point: Point
    """Its configuration with the measured figures."""
    load: float
    """The share of its concurrent runs in use, 0 to 1."""
    since: Seconds
    """When its state last changed."""


class ScalingInput(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a scaler. Rates are requests per second."""

    rate: float
    """The expected rate."""
    slo_s: float | None
    points: tuple[Point, ...]
    """The measured configurations that settings, policy and memory allow."""
    workers: tuple[CurrentWorker, ...] = ()
    free_cores: float
    free_workers: int
    """The workers that may be added: up to the sum of the functions' `max_workers`, or up to the node's limit if that
    is smaller. Workers of other families do not count.
    """
    free_bytes: float
    """The memory for further workers; infinite without a limit."""
    free_runs: float = inf
    """The concurrent runs that further workers may have together; infinite without a limit."""
    weight_bytes: int
    macs: int
    """The multiply-accumulates of one request."""
    shared: bool = True
    """Whether workers share their weights; otherwise each has its own copy of `weight_bytes`."""
    alpha: float = 0.8
    """Workers are added when the rate exceeds this share of their capacity."""
    beta: float = 0.6
    """Workers are removed when the rate is below this share of their capacity."""
    gamma: float = 0.0
    """The bytes that cost as much as one core: what Tetris calls alpha, in m + alpha*c. It is not `alpha` above."""

    def memory(self, point: Point) -> float:
        """The bytes that one more worker of this configuration adds."""
        return point.memory_bytes + (0 if self.shared else self.weight_bytes)


class Scaled(msgspec.Struct, frozen=True):
    """The changes that a scaler asks for, in order."""

    start: tuple[Configuration, ...] = ()
    stop: tuple[WorkerId, ...] = ()
    unserved: float = 0.0
    """The rate that the available resources cannot serve."""
    slo_infeasible: bool = False
    """Whether no configuration meets the SLO, so that the function is served as fast as possible."""


Scaler = Callable[[ScalingInput], Scaled]
