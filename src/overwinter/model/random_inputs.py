"""Draws random inputs for trying a model.

Only the author knows what inputs mean, so they are drawn to resemble the examples. If a model fails with them, simpler
ones are drawn: each kind is tried after the previous one.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from overwinter.core.datatypes import DTYPES
from overwinter.model.operators import VIEWS
from overwinter.model.structure import Program, Slot

Kind = Literal["wide", "near", "example", "least"]
KINDS: tuple[Kind, ...] = ("wide", "near", "example", "least")
"""The kinds of inputs, from the widest: values of a range that the examples suggest; values between the least and the
greatest of the examples; the examples, cut or repeated; for integers, the least value of the examples.
"""

LARGEST = torch.iinfo(torch.int64).max

_EMBEDDING = "aten.embedding.default"
_SAME_NUMBERS = VIEWS | {"aten._to_copy.default", "aten.clone.default"}


class RandomInputs:
    """Creates inputs of a program from one example of each, or from the declaration if there are none."""

    def __init__(self, program: Program, examples: Sequence[torch.Tensor]) -> None:
        self._specs = program.inputs
        given = examples or [torch.zeros(0, dtype=getattr(torch, DTYPES[spec.datatype])) for spec in program.inputs]
        self._examples = [example.detach().cpu() for example in given]
        self._rows = _table_rows(program)

    def inputs(self, sizes: Mapping[str, int], seed: int, kind: Kind) -> list[torch.Tensor]:
        """Return inputs of these dynamic sizes; equal seeds give equal inputs."""
        generator = torch.Generator().manual_seed(seed)
        drawn = []
        for at, (spec, example) in enumerate(zip(self._specs, self._examples, strict=True)):
            shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
            if kind == "example":
                drawn.append(_repeated(example, shape))
            elif example.is_floating_point():
                drawn.append(_floats(example, shape, generator, kind))
            else:
                drawn.append(_whole(example, shape, generator, kind, self._rows.get(at)))
        return drawn


def _floats(example: torch.Tensor, shape: list[int], generator: torch.Generator, kind: Kind) -> torch.Tensor:
    """Return floats with the mean and deviation of the example, within its range.

    If all values are equal, `wide` ranges from 0 to twice the value (for 0, from -1 to 1), and other kinds repeat it.
    If some values are infinite or NaN, the example's own values are used.
    """
    values = example.double().flatten()
    if not values.isfinite().all():
        return example.flatten()[torch.randint(values.numel(), shape, generator=generator)]
    low, high = (values.min().item(), values.max().item()) if values.numel() else (0.0, 0.0)
    if low < high:
        drawn = values.mean() + values.std() * torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.clamp(low, high).to(example.dtype)
    if kind == "wide":
        low, high = (-1.0, 1.0) if low == 0 else (0.0, 2 * low)
    return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(example.dtype)


def _whole(
    example: torch.Tensor, shape: list[int], generator: torch.Generator, kind: Kind, rows: int | None
) -> torch.Tensor:
    """Return integers or booleans: row numbers of the table in which they are looked up, a mask, values between 1 or -1
    and the only value of the example, or values in the example's range.
    """
    low, high = (int(example.min()), int(example.max())) if example.numel() else (0, 0)
    if kind == "wide" and rows is not None:
        low, high = 0, rows - 1
    elif kind == "wide" and low == high and low in (0, 1):
        return _mask(low, shape, generator).to(example.dtype)
    elif kind == "wide" and low == high:
        low, high = min(1, low), max(-1, high)
    elif kind == "least":
        high = low
    # The end of the range must be an int64 too.
    shift = 1 if high == LARGEST else 0
    drawn = torch.randint(max(low - shift, -LARGEST - 1), high + 1 - shift, shape, generator=generator)
    return (drawn + shift).to(example.dtype)


def _mask(value: int, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Return rows that begin with `value` and may end with the other value, as in the mask of padded texts."""
    if not shape:
        return torch.tensor(value)
    kept = torch.randint(1, shape[-1] + 1, [*shape[:-1], 1], generator=generator) if shape[-1] else 0
    return torch.where(torch.arange(shape[-1]) < kept, value, 1 - value)


def _repeated(example: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if not example.numel():
        return torch.zeros(shape, dtype=example.dtype)
    for dim, size in enumerate(shape):
        example = example.index_select(dim, torch.arange(size) % example.shape[dim])
    return example


def _table_rows(program: Program) -> dict[int, int]:
    """Return the inputs, by number, that select rows of a weight, with the number of rows."""
    origins = {program.first_input + at: at for at in range(len(program.inputs))}
    rows: dict[int, int] = {}
    for call in program.calls:
        match call.args:
            case [Slot(table), Slot(chosen), *_] if call.operator == _EMBEDDING:
                if chosen in origins and table < program.first_input:
                    least = program.weights[table].shape[0]
                    rows[origins[chosen]] = min(least, rows.get(origins[chosen], least))
            case [Slot(same), *_] if call.operator in _SAME_NUMBERS and same in origins and len(call.outputs) == 1:
                origins[call.outputs[0]] = origins[same]
            case _:
                pass
    return rows
