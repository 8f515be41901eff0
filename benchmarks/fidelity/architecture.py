"""One architecture of the comparison: a module to build, and its inputs at any size."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from benchmarks.zoo import randomise_constants

VOCABULARY = 100
EXAMPLE: Mapping[str, int] = {"batch": 2, "sequence": 8}
OTHER: Mapping[str, int] = {"sequence": 11}

Sizes = Mapping[str, int]


class Field(NamedTuple):
    """One input. A string in its shape is the name of a dynamic size."""

    shape: tuple[int | str, ...]
    make: Callable[[list[int], Generator], Tensor]

    def at(self, sizes: Sizes, generator: Generator) -> Tensor:
        """Return a random tensor of these sizes."""
        return self.make([size if isinstance(size, int) else sizes[size] for size in self.shape], generator)


class Architecture(NamedTuple):
    """One row of the table."""

    name: str
    source: str
    module: Callable[[], nn.Module]
    inputs: Mapping[str, Field]
    example: Sizes = EXAMPLE
    """The sizes of the example inputs."""
    other: Sizes = OTHER
    """Another value for each size other than the batch."""
    default_dynamic: bool = False
    """Deploy without `dynamic`: dimension 0 of every input is then "batch"."""
    kind: str = ""
    """The model type of `transformers`, if it is one."""
    saved: Callable[[nn.Module, dict[str, Tensor]], torch.export.ExportedProgram] | None = None
    """Exports the model, if a `.pt2` file is deployed instead of the module."""

    def build(self, seed: int) -> nn.Module:
        """Return the module in evaluation mode, equal at each call: random weights, none left at zero or one."""
        torch.manual_seed(seed)
        module = self.module().eval()
        with torch.no_grad():
            scale_initial_weights(module)
            randomise_constants(module)
        return module.requires_grad_(False)

    def reference(self, seed: int) -> Callable[..., Any]:
        """Return what is compared with the node, to be called with inputs by name: the module, or the module in its
        file.
        """
        module = self.build(seed)
        if self.saved is None:
            return module
        loaded = self.saved(module, self.inputs_at({}, seed)).module()
        return lambda **inputs: loaded(*inputs.values())

    @property
    def names(self) -> list[str]:
        """The dynamic sizes, in the order of the inputs."""
        every = [size for field in self.inputs.values() for size in field.shape if isinstance(size, str)]
        return list(dict.fromkeys(every))

    @property
    def dynamic(self) -> dict[str, dict[int, str]] | None:
        """The `dynamic` argument of a deploy."""
        if self.default_dynamic:
            return None
        return {
            name: {dim: size for dim, size in enumerate(field.shape) if isinstance(size, str)}
            for name, field in self.inputs.items()
        }

    def with_fixed_sizes(self) -> list["Architecture"]:
        """Return the same with only the batch dynamic, in a list, which is empty if no other size can be fixed."""
        fixed = {name: self.example[name] for name in self.names if name != "batch"}
        if not fixed or self.default_dynamic:
            return []
        shapes = {
            name: tuple(fixed.get(size, size) if isinstance(size, str) else size for size in field.shape)
            for name, field in self.inputs.items()
        }
        return [self._replace(inputs={name: field._replace(shape=shapes[name]) for name, field in self.inputs.items()})]

    def inputs_at(self, sizes: Sizes, seed: int) -> dict[str, Tensor]:
        """Return random inputs of these sizes, by default the example's."""
        generator = torch.Generator().manual_seed(seed)
        return {name: field.at({**self.example, **sizes}, generator) for name, field in self.inputs.items()}

    def cases(self) -> list[dict[str, int]]:
        """Return the sizes to compare at: batches of 1, 2 and 3, another value of every other size, and each of them at
        1, 2 and 3.
        """
        names = self.names
        others = [name for name in names if name != "batch"]
        found: list[dict[str, int]] = [{"batch": batch} for batch in (1, 2, 3) if "batch" in names]
        if others:
            found.append({name: self.other[name] for name in others})
        found += [{name: size} for size in (1, 2, 3) for name in others]
        return found or [{}]


def scale_initial_weights(module: nn.Module) -> None:
    """Draw each matrix again, wider: with a model's small initial weights all outputs would be nearly equal.

    This includes embedding tables; buffers are not changed.
    """
    for parameter in module.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            parameter.normal_(std=parameter[0].numel() ** -0.5)


def floats(*shape: int | str, dtype: torch.dtype = torch.float32) -> Field:
    """Return an input of normally distributed numbers."""
    return Field(shape, lambda sizes, generator: torch.randn(sizes, generator=generator).to(dtype))


def tokens(*shape: int | str, low: int = 3, high: int = VOCABULARY) -> Field:
    """Return an input of random integers from `low` to below `high`."""
    return Field(shape, lambda sizes, generator: torch.randint(low, high, sizes, generator=generator))


def mask(*shape: int | str, dtype: torch.dtype = torch.int64) -> Field:
    """Return an input that is a mask, 1 for tokens and 0 for padding: each row ends in padding of random length, at
    most half of the row.
    """

    def make(sizes: list[int], generator: Generator) -> Tensor:
        rows, length = sizes
        ends = length - torch.randint(0, length // 2 + 1, (rows, 1), generator=generator)
        return (torch.arange(length) < ends).to(dtype)

    return Field(shape, make)


def leaves(outputs: Any) -> list[Tensor]:
    """Return the tensors in a module's outputs, in the order of an export."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
