"""Checks whether requests that share a run of a program get the same answers as alone.

Only runs can show this: an operator may mix the rows of a batch (a mean over them, or a product of all rows with
all), and this need not be visible in any shape.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from overwinter.core.agreement import Batching
from overwinter.model.closeness import ClosenessMeter
from overwinter.model.structure import BATCH, Program

SAME_KERNELS_FRACTION = 0.01
"""The fraction of the bound that applies between two runs of equal sizes. They use the same kernels; only
value-dependent work (for example the rows of each expert) can still change the order of a sum.
"""

LARGE = 1e4
"""A value that is larger than those of usual inputs, and within the range of every floating-point type."""

MOST_REQUESTS = 64
"""The most requests that are tried in one run, for any `max_batch`."""

_ATTEMPTS = 10
"""Two random booleans are often equal, so several draws are needed."""

Tensors = list[torch.Tensor]


def batching(
    program: Program,
    bound: float,
    request: Callable[[int, int], Tensors],
    answer: Callable[[Tensors], Tensors],
    max_batch: int = 1,
) -> Batching:
    """Try shared runs with requests of several numbers of rows, and with as many requests as may share a run, but at
    most MOST_REQUESTS.

    `request` draws a request with a number of rows from a seed, and `answer` runs the program or raises. Each request
    must get the answer that it gets alone, within `bound`. Each of two requests, in either order, must also get the
    same answer, within a hundredth of `bound`, beside the other one as beside a copy of itself; the other one is in
    turn a random request, an equal one, and each of `_extremes`.
    """
    low, high = program.dimensions.get(BATCH, (1, 1))
    if program.batching_obstacle:
        return Batching(program.batching_obstacle)
    if 2 * low > high:
        return Batching(f"a request has at least {low} rows, a run at most {high}")
    most = (low,) * min(max_batch, MOST_REQUESTS, high // low)
    tried = {(low, low), (low, low + 1, low + 2), most}
    shared = sorted((rows for rows in tried if len(rows) > 1 and sum(rows) <= high), key=sum)
    requests = [request(rows, seed) for seed, rows in enumerate(shared[0])]
    different = _different_request(requests[1], request)
    if not different:
        return Batching("no two different requests could be drawn from the example inputs")
    meter = ClosenessMeter(program, bound)
    for rows in shared:
        requests = [request(count, seed) for seed, count in enumerate(rows)]
        several = f"{len(rows)} requests" if rows == most else f"requests of {' and '.join(map(str, rows))} rows"
        try:
            joined = _shared(answer, requests)
            fault = ""
            if rows is shared[0]:
                others = [different, requests[0], *_extremes(requests[1])]
                fault = _influence(program, bound * SAME_KERNELS_FRACTION, requests[0], joined[0], others, answer)
            for inputs, given in zip(requests, joined, strict=True):
                fault = fault or meter.compare(answer(inputs), given)
        except Exception as error:  # noqa: BLE001 - any operator may raise anything for what it was not made for
            return Batching(f"{several} cannot run together: {error}")
        if fault:
            return Batching(f"{several} in one run get other outputs: {fault}")
    return Batching("", tuple(shared), meter.closeness())


def _influence(
    program: Program,
    bound: float,
    own: Tensors,
    wanted: Tensors,
    others: Sequence[Tensors],
    answer: Callable[[Tensors], Tensors],
) -> str:
    """Return how the answer to a request depends on the other requests of its run; empty if it does not.

    Each of `own` and one of `others` must get the same answer beside the other as beside a copy of itself, whichever
    comes first. `wanted`: what `own` got as the first of a shared run with another request, in place of its answer as
    the first of two copies.
    """
    for different in others:
        pairs = [((own, own), (own, different), 0), ((different, different), (own, different), 1)]
        pairs += [((own, own), (different, own), 1), ((different, different), (different, own), 0)]
        for alike, mixed, at in pairs:
            try:
                expected = wanted if at == 0 and alike[0] is own else _shared(answer, alike)[at]
                given = _shared(answer, mixed)[at]
            except Exception:  # noqa: BLE001 - a run that fails is repeated with each request alone
                continue
            fault = ClosenessMeter(program, bound).compare(expected, given)
            if fault:
                return fault
    return ""


def _extremes(other: Tensors) -> Iterator[Tensors]:
    """Yield requests with as many rows as `other`. The floats are all large, all large and negative, or all NaN; the
    integers are all the largest or the smallest of their input. One such value may change the result for every row.
    """
    for value, pick in ((LARGE, torch.max), (-LARGE, torch.min), (math.nan, torch.max)):
        yield [
            torch.full_like(each, value if each.is_floating_point() else pick(each).item()) if each.numel() else each
            for each in other
        ]


def _different_request(other: Tensors, request: Callable[[int, int], Tensors]) -> Tensors:
    """Return a different request with as many rows; empty if none is found."""
    for seed in range(100, 100 + _ATTEMPTS):
        drawn = request(other[0].shape[0], seed)
        if not all(map(torch.equal, other, drawn)):
            return drawn
    return []


def _shared(answer: Callable[[Tensors], Tensors], requests: Sequence[Tensors]) -> list[Tensors]:
    """Return the answer to each of several requests from one run."""
    sizes = [inputs[0].shape[0] for inputs in requests]
    outputs = answer([torch.cat(parts) for parts in zip(*requests, strict=True)])
    return [list(parts) for parts in zip(*(torch.split(output, sizes) for output in outputs), strict=True)]
