"""Do requests that share a run of a program get the answers that they get alone?

Known of a program only by trying: an operator may mix the rows of a batch (a mean over them, a matrix of all against
all) and no shape need show it.
"""

from collections.abc import Callable, Sequence

import torch

from overwinter.core.agreement import Batching
from overwinter.model.closeness import Meter
from overwinter.model.structure import BATCH, Program

SAME_KERNELS = 0.01
"""What of the bound holds between two runs of equal sizes. Their kernels are the same; only what goes by the values
(how many rows an expert gets) may still change the order of a sum."""

_ATTEMPTS = 10
"""Two draws of a truth value are often the same."""

Tensors = list[torch.Tensor]


def batching(
    program: Program, bound: float, request: Callable[[int, int], Tensors], answer: Callable[[Tensors], Tensors]
) -> Batching:
    """Try it with requests of several numbers of rows. `request` draws one of so many rows from a seed, and `answer`
    runs the program or raises.

    Each request must get, within `bound`, what it gets alone; and the first of two, within a hundredth of that, what it
    gets when the other asks something else.
    """
    low, high = program.dimensions.get(BATCH, (1, 1))
    if program.unjoinable:
        return Batching(program.unjoinable)
    if 2 * low > high:
        return Batching(f"a request has {low} rows or more, a run {high} at most")
    shared = [rows for rows in ((low, low), (low, low + 1, low + 2)) if sum(rows) <= high]
    requests = [request(rows, seed) for seed, rows in enumerate(shared[0])]
    stranger = _unlike(requests[1], request)
    if not stranger:
        return Batching("no two different requests could be drawn from the example inputs")
    meter = Meter(program, bound)
    for rows in shared:
        requests = [request(count, seed) for seed, count in enumerate(rows)]
        try:
            joined = _shared(answer, requests)
            fault = ""
            if rows is shared[0]:
                [beside, _] = _shared(answer, [requests[0], stranger])
                fault = Meter(program, bound * SAME_KERNELS).compare(joined[0], beside)
            for inputs, given in zip(requests, joined, strict=True):
                fault = fault or meter.compare(answer(inputs), given)
        except Exception as error:  # noqa: BLE001 - any operator may raise anything for what it was not made for
            fault = str(error)
        if fault:
            return Batching(f"requests of {' and '.join(map(str, rows))} rows in one run get other answers: {fault}")
    return Batching("", tuple(shared), meter.closeness())


def _unlike(other: Tensors, request: Callable[[int, int], Tensors]) -> Tensors:
    """A request of as many rows that asks something else; empty if none is found."""
    for seed in range(100, 100 + _ATTEMPTS):
        drawn = request(other[0].shape[0], seed)
        if not all(map(torch.equal, other, drawn)):
            return drawn
    return []


def _shared(answer: Callable[[Tensors], Tensors], requests: Sequence[Tensors]) -> list[Tensors]:
    """The answer to each of several requests from one run."""
    sizes = [inputs[0].shape[0] for inputs in requests]
    outputs = answer([torch.cat(parts) for parts in zip(*requests, strict=True)])
    return [list(parts) for parts in zip(*(torch.split(output, sizes) for output in outputs), strict=True)]
