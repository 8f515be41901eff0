"""Exports a model of the zoo once, and deploys it many times under other names or with other weights."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks import zoo
from benchmarks.programs import flatten
from overwinter.api.arrays import to_tensor
from overwinter.api.client import Client
from overwinter.api.deployer import Package, Uploaded, package, settings_of
from overwinter.core.tensor import Tensor, TensorSpec
from overwinter.model.agreement import agree
from overwinter.model.export import export
from overwinter.model.program import Program

DRIFT = 0.02
"""The largest relative change of a weight in a variant."""


class Family:
    """A program, and weights that can be changed in place into those of a variant."""

    def __init__(
        self, name: str, tokens: int | None = None, small: bool = False, model: zoo.Model | None = None
    ) -> None:
        """Export the model. `tokens`: the length of texts in `one`, if the model takes texts of any length; `model`:
        replaces the zoo's model of that name.
        """
        self.name = name
        self.tokens = tokens
        self.model = zoo.build(name, small=small) if model is None else model
        self.module = self.model.module
        exported = export(self.module, self.model.example_inputs, self.model.dynamic)
        self.program, self.weights, self.agreement = agree(exported)
        self._original: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)

    def one(self, row: int = 0) -> dict[str, torch.Tensor]:
        """Return one of the two rows of the example inputs, as a batch of 1."""
        inputs = {name: tensor[row : row + 1].contiguous() for name, tensor in self.model.example_inputs.items()}
        for name, dims in self.model.dynamic.items():
            for dim, size in dims.items():
                if size == "sequence" and self.tokens is not None:
                    inputs[name] = inputs[name].narrow(dim, 0, self.tokens).contiguous()
        return inputs

    def packaged(
        self,
        name: str,
        handler: str | None = None,
        program: Program | None = None,
        *,
        assets: Mapping[str, bytes] | None = None,
        tenant: str = "default",
        **settings: Any,
    ) -> Package:
        """Package the model with its current weights, and optionally a handler with assets, or another program."""
        agreement = self.agreement if program is None else None
        own: dict[str, Any] = {"handler": handler, "assets": assets, "tenant": tenant}
        chosen = settings_of(None, settings)
        return package(name, program or self.program, self.weights, agreement, settings=chosen, **own)

    def deploy(
        self, client: Client, name: str, handler: str | None = None, program: Program | None = None, **settings: Any
    ) -> Uploaded:
        """Deploy the result of `packaged`."""
        return self.packaged(name, handler, program, **settings).upload(client)

    def answer(
        self, row: int = 0, factor: int | None = None, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> bytes:
        """Return the answer of plain PyTorch to `one`, or to other inputs: the bytes of all outputs in order, each
        multiplied by the factor.
        """
        with torch.inference_mode():
            outputs = flatten(self.module(**(self.one(row) if inputs is None else inputs)))
            outputs = outputs if factor is None else [output * factor for output in outputs]
        return b"".join(bytes(tensor.data) for tensor in as_tensors({str(at): t for at, t in enumerate(outputs)}))

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the module by name, including buffers that are usually not saved."""
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def vary(self, names: Iterable[str], variant: int) -> None:
        """Change these tensors into those of a variant, as if trained a little further; 0 is the original."""
        generator = torch.Generator().manual_seed(variant)
        state = self.state()
        for name in names:
            tensor = state[name]
            original = self._original.setdefault(name, tensor.clone())
            noise = torch.empty_like(original).uniform_(1 - DRIFT, 1 + DRIFT, generator=generator)
            tensor.copy_(original * noise if variant else original)

    def head(self) -> list[str]:
        """Return the names of the tensors of the last linear layer, which is retrained for a new task."""
        path = [path for path, layer in self.module.named_modules() if isinstance(layer, nn.Linear)][-1]
        return [name for name in self.state() if name.startswith(f"{path}.")]

    def floats(self) -> list[str]:
        """Return the names of all floating-point tensors: a variant in which they differ shares no block of weights."""
        return [name for name, tensor in self.state().items() if tensor.is_floating_point()]

    def norms(self) -> list[str]:
        """Return the names of the tensors of all batch norms, including statistics, which change in any training."""
        paths = [path for path, layer in self.module.named_modules() if isinstance(layer, nn.BatchNorm2d)]
        wanted = {f"{path}.{part}" for path in paths for part in ("weight", "bias", "running_mean", "running_var")}
        return [name for name in self.state() if name in wanted]


def as_tensors(values: dict[str, torch.Tensor]) -> list[Tensor]:
    """Return named tensors in their wire format."""
    return [to_tensor(name, value, _never) for name, value in values.items()]


def _never() -> TensorSpec:
    raise AssertionError("a PyTorch tensor has its own datatype")
