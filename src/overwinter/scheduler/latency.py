"""The latency model of runs of one function or several, and the possible configurations of their workers.

It uses the profile, corrected by observations in service; without a profile, the settings and the runs so far.

For the shared part, a shared run takes as long as a run of one function with the whole batch; for the separate parts,
as long as separate runs.
"""

from collections.abc import Sequence
from math import inf

from overwinter.core.function import BlobSize, FunctionSpec
from overwinter.core.ids import Address
from overwinter.core.policies import Policy
from overwinter.core.profile import Configuration, Point, between
from overwinter.scheduler.trunks import Trunk

WORKER_BYTES = 16 << 20
"""The private memory that is assumed for an unmeasured worker."""
WAKE_S = 0.03
"""The assumed time of a wake before one was measured."""
SMOOTHING = 0.2
SLOWDOWN_MAX = 8.0


def shared_run_s(together: float, apart: float, separate_part: float) -> float:
    """Return the seconds of a shared run.

    `together`: the seconds as a run of one function; `apart`: the seconds as separate runs; `separate_part`: the part
    of a run that is not shared, from 0 to 1.
    """
    return together + separate_part * max(0.0, apart - together)


def sizes_of(blobs: Sequence[BlobSize]) -> dict[Address, int]:
    """Return the sizes of the blocks, each once."""
    return {blob.address: blob.nbytes for blob in blobs}


class LatencyModel:
    """The latency model of the runs of a family's functions."""

    def __init__(
        self, spec: FunctionSpec, policy: Policy, memory_bytes: int | None = None, cores: int | None = None
    ) -> None:
        """Create the model from one function of the family. `memory_bytes`, `cores`: limits of all workers together;
        None: unlimited.
        """
        settings, profile = spec.settings, spec.profile
        self.run_s: float | None = None
        """The smoothed seconds of a run, of any batch size."""
        self.program_s: float | None = None
        """The smoothed seconds of the program alone, where a worker ran it for a handler, of any batch size."""
        self.slowdown = 1.0
        """The smoothed ratio of observed to profiled latency: other load on the cores makes a node slower than its
        profile.
        """
        self.wake_s = WAKE_S if profile is None or profile.wake_s is None else profile.wake_s
        self.points: tuple[Point, ...] = ()
        """The measured configurations that settings, policy and memory allow."""
        self.too_large_bytes: int | None = None
        """The memory of the smallest allowed configuration if none fits in memory."""
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
        self.weight_bytes = sum(sizes_of(spec.blobs).values())
        self.macs = 0 if profile is None else profile.macs
        slo_s = inf if settings.slo_ms is None else settings.slo_ms / 1000
        # An unmeasured function must not be refused: one worker of it always fits.
        guessed_bytes = WORKER_BYTES if memory_bytes is None else min(WORKER_BYTES, memory_bytes)
        in_time = [point for point in self.points if point.latency_s <= (slo_s if point.batch == 1 else slo_s / 2)]
        self.default_point = min(in_time or self.points, key=_preference, default=None) or Point(
            settings.threads if cores is None else min(settings.threads, cores),
            guessed_bytes,
            settings.max_batch,
            settings.concurrency,
            0.0,
        )
        """The default configuration of a worker: of the measured ones that meet the SLO (with batches, half the SLO),
        or else of all measured ones, the one with the fewest cores, then the least concurrency, then the largest batch.
        If `points` is empty, that of the settings.
        """
        self.low_rate_configuration: Configuration | None = None
        """The configuration that the scaler chooses for the only worker at a low rate; None: not chosen yet."""
        self.low_rate_max = 0.0
        """Up to this rate, in requests per second, one such worker suffices, and the scaler need not be called."""

    def point(self, configuration: Configuration) -> Point:
        """Return the measured point of this configuration; the default one if it was not measured."""
        return next((point for point in self.points if point.configuration == configuration), self.default_point)

    def latency_s(self, point: Point, batch: int) -> float | None:
        """Return the expected seconds of a run of `batch` requests in a worker of this configuration; None: unknown."""
        key = (point.cores, point.concurrency, batch)
        latency = self._latencies.get(key)
        if latency is None:
            known = self._known.get((point.cores, point.concurrency))
            if known is None:
                return self.run_s
            latency = self._latencies[key] = between(known, batch)
        return latency * self.slowdown

    def shared_run_s(self, point: Point, counts: Sequence[int], separate_part: float) -> float | None:
        """Return the expected seconds of a shared run with these numbers of requests of each function."""
        together = self.latency_s(point, sum(counts))
        if together is None or len(counts) == 1:
            return together
        return shared_run_s(together, self._apart_s(point, counts), separate_part)

    def _apart_s(self, point: Point, counts: Sequence[int]) -> float:
        """Return the seconds of separate runs of each function; 0 if the profile has no such workers."""
        if (point.cores, point.concurrency) not in self._known:
            return 0.0
        return sum(self.latency_s(point, count) or 0.0 for count in counts)

    def observe_program(self, seconds: float) -> None:
        """Record the time of the program alone, in a call that a worker ran itself; 0: there was none."""
        if seconds:
            self.program_s = _smoothed(self.program_s, seconds)

    def keep_observations(self, before: "LatencyModel") -> None:
        """Take over the measured times from a model of the same program, but not the slowdown, which is relative to the
        profile.
        """
        self.run_s, self.program_s = before.run_s, before.program_s

    def observe(self, point: Point, counts: Sequence[int], seconds: float, trunk: Trunk) -> None:
        """Record the time of a run of one or more functions, with these numbers of requests of each."""
        trunk.sharing.observe(point, counts, seconds)
        self.run_s = _smoothed(self.run_s, seconds)
        if point.latency_s > 0:
            together = expected = self.latency_s(point, sum(counts))
            if not expected or not together:
                return
            if len(counts) > 1:
                apart = self._apart_s(point, counts)
                expected = shared_run_s(together, apart, trunk.separate_part)
                trunk.observe(together, apart, seconds)
            ratio = seconds * self.slowdown / expected
            self.slowdown = min(
                SLOWDOWN_MAX, max(1 / SLOWDOWN_MAX, self.slowdown + SMOOTHING * (ratio - self.slowdown))
            )


def _smoothed(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + SMOOTHING * (seconds - before)


def _preference(point: Point) -> tuple[int, int, int]:
    return point.cores, point.concurrency, -point.batch
