"""Checks the outputs of a run against the program's declaration.

The check runs after every run, so everything possible is computed in advance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from overwinter.core.datatypes import DTYPES
from overwinter.model.structure import Program


class _Output(NamedTuple):
    """One declared output: its fixed sizes, and the sizes that must equal an input's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    fixed: tuple[tuple[int, int], ...]
    """The fixed dimensions and their sizes."""
    named: tuple[tuple[int, int, int], ...]
    """The named dimensions: dimension, index of an input, and dimension of that input."""


class DeclaredOutputs:
    """The outputs that a program declares."""

    def __init__(self, program: Program) -> None:
        places = {
            size: (number, dim)
            for number, spec in enumerate(program.inputs)
            for dim, size in enumerate(spec.shape)
            if isinstance(size, str)
        }
        self._outputs = [
            _Output(
                spec.name,
                getattr(torch, DTYPES[spec.datatype]),
                spec.shape,
                tuple((dim, size) for dim, size in enumerate(spec.shape) if isinstance(size, int)),
                tuple((dim, *places[size]) for dim, size in enumerate(spec.shape) if size in places),
            )
            for spec in program.outputs
        ]

    def fault(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
        """Return how the first output that differs from its declaration for these inputs does so; empty if none does.

        Sizes computed from others are not checked.
        """
        for output, value in zip(self._outputs, outputs, strict=True):
            if not _fits(output, value, inputs):
                kind = "meta " if value.is_meta else "" if value.layout is torch.strided else "sparse "
                given = f"{kind}{_name(value.dtype)} {list(value.shape)}"
                declared = f"{_name(output.dtype)} {list(output.shape)}"
                return f"output {output.name!r} is {given}; it is declared as {declared}"
        return ""


def _fits(output: _Output, value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    # Loops over single sizes: a generator, or comparing whole shapes, is several times slower.
    if value.dtype is not output.dtype or value.dim() != len(output.shape):
        return False
    if value.layout is not torch.strided or value.is_meta:
        return False
    for dim, size in output.fixed:
        if value.size(dim) != size:
            return False
    for dim, number, at in output.named:  # noqa: SIM110
        if value.size(dim) != inputs[number].size(at):
            return False
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
