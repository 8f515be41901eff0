"""The memory that a run takes besides the weights: its inputs, its live results, and operators' scratch memory.

It is estimated before the run. A run whose estimate exceeds what the device has for it is divided, or refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from overwinter.model.liveness import peak_activation_bytes
from overwinter.model.program import Program
from overwinter.model.structure import BATCH

SCRATCH_FACTOR = 1.5
"""The memory of a run divided by that of its inputs and results, as long as no profile says otherwise
(benchmarks.activations).
"""
GROWTH_LEAST_BYTES = 16 << 20
"""The least difference between two computed peaks for which the measurements count: with less, other memory of the
process may dominate.
"""
KNOWN_MAX = 512
"""The most combinations of sizes whose peak is remembered; computing a peak takes up to milliseconds."""

_MOST_BYTES = 1 << 60


class Activations:
    """The memory of the runs of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._peak = lru_cache(KNOWN_MAX)(self._peak_at)
        self._scratch_factor = SCRATCH_FACTOR

    def learn(self, measured: Mapping[int, int]) -> None:
        """Correct the factor for scratch memory. `measured`: a worker's private memory by the number of requests in a
        run, each with the sizes of the example, as a profile has it.
        """
        if len(measured) > 1 and BATCH in self._program.dimensions:
            few, many = min(measured), max(measured)
            each, (_, high) = self._program.example[BATCH], self._program.dimensions[BATCH]
            least, most = (self._peak(((BATCH, min(each * requests, high)),)) for requests in (few, many))
            computed = most - least
            if computed >= GROWTH_LEAST_BYTES:
                self._scratch_factor = max(1.0, (measured[many] - measured[few]) / computed)

    def nbytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the estimate of the most bytes that a run over inputs of these shapes takes at once."""
        sizes = {
            name: size
            for spec, shape in zip(self._program.inputs, shapes, strict=True)
            for name, size in zip(spec.shape, shape, strict=True)
            if isinstance(name, str)
        }
        return self._with_scratch(tuple(sizes.items()))

    def least_bytes(self) -> int:
        """Return this estimate for the smallest inputs that the program accepts."""
        least = ((name, low) for name, (low, _) in self._program.dimensions.items())
        return self._with_scratch(tuple(least))

    def _with_scratch(self, sizes: tuple[tuple[str, int], ...]) -> int:
        # No device has so much, and a float cannot hold the size of every shape.
        return int(self._scratch_factor * min(self._peak(sizes), _MOST_BYTES))

    def _peak_at(self, sizes: tuple[tuple[str, int], ...]) -> int:
        return peak_activation_bytes(self._program, dict(sizes))
