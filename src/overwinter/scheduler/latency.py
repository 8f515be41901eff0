"""How long does a run of a function take, and in which configurations may its workers be made?

From its profile, corrected by what was observed in service; without one, from its settings and its runs so far.
"""

from math import inf

from overwinter.core.function import FunctionSpec
from overwinter.core.policies import Policy
from overwinter.core.profile import Point, Shape, between

WORKER_BYTES = 16 << 20
"""Private memory that a worker is taken to have before it was measured."""
WAKE_S = 0.03
"""What a wake takes while nothing better is known."""
SMOOTHING = 0.2
PACE_MAX = 8.0


class LatencyModel:
    """What is known of one function's runs."""

    def __init__(
        self, spec: FunctionSpec, policy: Policy, memory_bytes: int | None = None, cores: int | None = None
    ) -> None:
        """`memory_bytes`, `cores`: of all workers together; None: no bound."""
        settings, profile = spec.settings, spec.profile
        self.run_s: float | None = None
        """Smoothed seconds of a run, whatever its batch."""
        self.pace = 1.0
        """Observed by profiled latency, smoothed: a node with other work on its cores is slower than its profile."""
        self.wake_s = WAKE_S if profile is None or profile.wake_s is None else profile.wake_s
        self.points: tuple[Point, ...] = ()
        """The measured configurations that settings, policy and memory allow."""
        self.too_large_bytes: int | None = None
        """What the smallest needs, where memory allows none of those that settings and policy allow."""
        self._known: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self._latencies: dict[tuple[int, int, int], float] = {}
        if profile is not None:
            limit = inf if memory_bytes is None else memory_bytes
            allowed = tuple(
                point
                for point in profile.points
                if point.cores <= min(settings.threads, policy.cores_max)
                and point.batch <= min(settings.max_batch, policy.batch_max)
                and point.concurrency <= min(settings.concurrency, policy.concurrency_max)
            )
            self.points = tuple(point for point in allowed if point.memory_bytes <= limit)
            if allowed and not self.points:
                self.too_large_bytes = min(point.memory_bytes for point in allowed)
        for point in sorted(self.points, key=lambda point: point.batch):
            self._known.setdefault((point.cores, point.concurrency), []).append((point.batch, point.latency_s))
        self.weight_bytes = sum({blob.address: blob.nbytes for blob in spec.blobs}.values())
        self.macs = 0 if profile is None else profile.macs
        slo_s = inf if settings.slo_ms is None else settings.slo_ms / 1000
        # What was not measured is no reason to refuse it: alone it fits.
        guessed_bytes = WORKER_BYTES if memory_bytes is None else min(WORKER_BYTES, memory_bytes)
        in_time = [point for point in self.points if point.latency_s <= (slo_s if point.batch == 1 else slo_s / 2)]
        self.usual = min(in_time or self.points, key=_plainness, default=None) or Point(
            settings.threads if cores is None else min(settings.threads, cores),
            guessed_bytes,
            settings.max_batch,
            settings.concurrency,
            0.0,
        )
        """The configuration of a worker when nothing speaks for another: the plainest that keeps the SLO."""
        self.first: Shape | None = None
        """What the scaler makes a function's only worker at a low rate; None: not asked yet."""
        self.first_rate = 0.0
        """Up to this rate that worker is all there is to say, and the scaler need not be asked."""

    def point(self, shape: Shape) -> Point:
        """What is known of a worker so made."""
        return next((point for point in self.points if point.shape == shape), self.usual)

    def latency_s(self, point: Point, batch: int) -> float | None:
        """Seconds that a run of `batch` requests should take in a worker so made; None: nothing is known."""
        key = (point.cores, point.concurrency, batch)
        latency = self._latencies.get(key)
        if latency is None:
            known = self._known.get((point.cores, point.concurrency))
            if known is None:
                return self.run_s
            latency = self._latencies[key] = between(known, batch)
        return latency * self.pace

    def observe(self, point: Point, batch: int, seconds: float) -> None:
        """A run took so long."""
        self.run_s = seconds if self.run_s is None else self.run_s + SMOOTHING * (seconds - self.run_s)
        if point.latency_s > 0:
            expected = self.latency_s(point, batch)
            if expected:
                ratio = seconds * self.pace / expected
                self.pace = min(PACE_MAX, max(1 / PACE_MAX, self.pace + SMOOTHING * (ratio - self.pace)))


def _plainness(point: Point) -> tuple[int, int, int]:
    return point.cores, point.concurrency, -point.batch
