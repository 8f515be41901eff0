"""The duration of a run on a simulated machine whose other workers are idle, from the profile of its function."""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from overwinter.core.ids import FunctionId
from overwinter.scheduler.latency import shared_run_s, sizes_of
from overwinter.scheduler.trunks import separate_part_of
from overwinter.simulation.copies import SimulatedFunction
from overwinter.simulation.machine import SimulatedWorker

SETS_MAX = 4096
"""The most sets of functions whose separate part is remembered."""


class Durations:
    """Seconds of runs of these functions, which vary as their models say."""

    def __init__(self, functions: Mapping[FunctionId, SimulatedFunction], jitter: Random) -> None:
        self._functions = functions
        self._jitter = jitter
        self._run_s: dict[tuple[str, int, int, int, int], float] = {}
        self._separate_parts: dict[tuple[FunctionId, ...], float] = {}

    def variation(self, function: SimulatedFunction) -> float:
        """Return a factor on the time of a run of this function."""
        jitter = function.model.jitter
        return max(0.1, self._jitter.gauss(1.0, jitter)) if jitter else 1.0

    def run_s(self, worker: SimulatedWorker, batch: int, functions: Sequence[FunctionId]) -> float:
        """Return the seconds of a run with this many requests, next to the worker's other runs.

        `functions`: the function of each request in a shared run.
        """
        seconds = self.separate_run_s(worker, batch)
        if functions:
            counts = Counter(functions)
            separate_part = self._separate_part_of([self._functions[id_] for id_ in counts])
            apart = sum(self.separate_run_s(worker, count) for count in counts.values())
            seconds = shared_run_s(seconds, apart, separate_part)
        return seconds * self.variation(worker.function)

    def separate_run_s(self, worker: SimulatedWorker, batch: int) -> float:
        """Return the seconds of a run of one function, without variation, next to the worker's other runs.

        A run never has more than `run_cores` threads, so fewer concurrent runs use fewer of the worker's cores.
        """
        runs, most = len(worker.jobs) + 1, worker.concurrency
        key = (worker.function.model.name, worker.cores, most, runs, batch)
        seconds = self._run_s.get(key)
        if seconds is None:
            profile = worker.function.spec.profile
            measured = [(min(worker.cores, worker.run_cores * at), at) for at in range(runs, most + 1)]
            measured.append((worker.cores, most))
            known = [] if profile is None else [profile.latency_s(cores, batch, at) for cores, at in measured]
            seconds = self._run_s[key] = next(each for each in known if each is not None)
        return seconds

    def on_device_s(self, functions: Sequence[FunctionId]) -> float:
        """Return the seconds of a run on a device that has all blocks. `functions`: the function of each request."""
        counts = Counter(functions)
        different = [self._functions[id_] for id_ in counts]
        seconds = self._separate_run_on_device_s(different[0], len(functions))
        if len(different) > 1:
            apart = sum(map(self._separate_run_on_device_s, different, counts.values()))
            seconds = shared_run_s(seconds, apart, self._separate_part_of(different))
        return seconds * self.variation(different[0])

    def _separate_part_of(self, functions: Sequence[SimulatedFunction]) -> float:
        ids = tuple(sorted(each.spec.id for each in functions))
        if ids not in self._separate_parts:
            if len(self._separate_parts) == SETS_MAX:
                self._separate_parts.clear()
            self._separate_parts[ids] = separate_part_of(*(sizes_of(each.spec.blobs) for each in functions))
        return self._separate_parts[ids]

    def _separate_run_on_device_s(self, function: SimulatedFunction, batch: int) -> float:
        profile = function.spec.profile
        seconds = None if profile is None else profile.latency_s(function.spec.settings.threads, batch, 1)
        assert seconds is not None  # The model must have latencies for the settings.
        return seconds
