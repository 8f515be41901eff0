"""Exported files with conditions on their sizes."""

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from benchmarks.fidelity.architecture import Architecture, floats
from benchmarks.fidelity.plain_modules import FunctionModule, Gated

Inputs = dict[str, Tensor]


def parity(x: Tensor) -> Tensor:
    """Answers differently for an even batch."""
    return x if x.shape[0] % 2 == 0 else -x


def with_automatic_sizes(module: nn.Module, inputs: Inputs) -> ExportedProgram:
    """Export with sizes that PyTorch may restrict by guards."""
    dynamic = {"x": {0: Dim.AUTO}}
    return torch.export.export(module, (inputs["x"],), dynamic_shapes=dynamic, strict=False)


def with_assertions(module: nn.Module, inputs: Inputs) -> ExportedProgram:
    """Export with conditions as assertions in the graph rather than as guards."""
    return torch.export.export(
        module,
        (inputs["x"],),
        dynamic_shapes={"x": {0: Dim("rows", min=2, max=64)}},
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )


def with_even_size(module: nn.Module, inputs: Inputs) -> ExportedProgram:
    """Export with a size that is twice another."""
    pairs = Dim("pairs", min=1, max=32)
    return torch.export.export(module, (inputs["x"],), dynamic_shapes={"x": {0: 2 * pairs}}, strict=False)


def pair_sums(x: Tensor) -> Tensor:
    """Adds pairs of rows."""
    return x.unflatten(0, (-1, 2)).sum(1)


ROWS = {"x": floats("batch", 12)}

MODELS: list[Architecture] = [
    Architecture("pt2-gated", "PyTorch .pt2", Gated, ROWS, saved=with_automatic_sizes),
    Architecture("pt2-guarded", "PyTorch .pt2", lambda: FunctionModule(parity), ROWS, saved=with_automatic_sizes),
    Architecture("pt2-asserted", "PyTorch .pt2", lambda: FunctionModule(parity), ROWS, saved=with_assertions),
    Architecture(
        "pt2-twofold",
        "PyTorch .pt2",
        lambda: FunctionModule(pair_sums),
        ROWS,
        example={"batch": 4},
        saved=with_even_size,
    ),
]
