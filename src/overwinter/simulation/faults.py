"""Simulated faults and their times, drawn from one seeded generator in the order of the calls."""

from random import Random

from overwinter.simulation.scenario import Faults


class FaultModel:
    """Draws the faults of a scenario. A fault with rate 0 draws no random number."""

    def __init__(self, faults: Faults, rng: Random) -> None:
        self._faults = faults
        self._rng = rng

    def run_crash(self) -> float | None:
        """The share of a run's execution, or of the handler's part before the program, after which the worker or
        executor dies; None: no crash.
        """
        return self._within(self._faults.run_crash_share)

    def start_crash(self) -> float | None:
        """The share of its time after which a start or a bind ends with the death of its process; None: no crash."""
        return self._within(self._faults.start_crash_share)

    def slowness(self) -> float:
        """The factor on the time of a start, a bind or a load."""
        share = self._faults.slow_load_share
        return self._faults.slow_load_factor if share > 0 and self._rng.random() < share else 1.0

    def worker_life_s(self) -> float | None:
        """The maximum lifetime of a new worker in seconds; None: unbounded."""
        return self._life(self._faults.worker_life_s)

    def executor_life_s(self) -> float | None:
        """The maximum lifetime of a new executor in seconds; None: unbounded."""
        return self._life(self._faults.executor_life_s)

    def unplaced(self) -> bool:
        """Whether the blocks of a run do not fit on its device, because the free memory is not contiguous."""
        return self._within(self._faults.unplaced_share) is not None

    def zygote_life_s(self) -> float | None:
        """The maximum lifetime of a new zygote in seconds; None: unbounded."""
        return self._life(self._faults.zygote_life_s)

    def store_full(self, now: float) -> bool:
        """Whether the host store accepts nothing now."""
        return any(window.from_s <= now < window.until_s for window in self._faults.store_full)

    def _within(self, share: float) -> float | None:
        return self._rng.random() if share > 0 and self._rng.random() < share else None

    def _life(self, mean_s: float | None) -> float | None:
        return None if mean_s is None else self._rng.expovariate(1 / mean_s)
