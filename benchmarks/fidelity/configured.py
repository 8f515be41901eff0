"""Builds small models from `transformers` configurations."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from benchmarks.fidelity.architecture import EXAMPLE, OTHER, Architecture, Field, Sizes, floats, mask, tokens

TEXT = {"input_ids": tokens("batch", "sequence"), "attention_mask": mask("batch", "sequence")}
PAIR = {**TEXT, "decoder_input_ids": tokens("batch", "target")}
IMAGE = {"pixel_values": floats("batch", 3, 32, 32)}
AUDIO = {"input_values": floats("batch", "samples")}

SMALL_CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
"""The sizes of most configurations."""


def configured(model: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of this `transformers` class from its configuration with these sizes."""

    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, model)
        config = {key: value() if callable(value) else value for key, value in sizes.items()}
        return kind(kind.config_class(**config))

    return build


def config(name: str, **sizes: Any) -> Callable[[], Any]:
    """Return a function that makes a configuration, which is part of another."""

    def build() -> Any:
        import transformers

        return getattr(transformers, name)(**sizes)

    return build


def network(
    kind: str,
    model: str,
    inputs: Mapping[str, Field],
    sizes: Mapping[str, Any],
    *,
    name: str | None = None,
    example: Sizes = EXAMPLE,
    other: Sizes = OTHER,
    default_dynamic: bool = False,
) -> Architecture:
    """Return an architecture from `transformers`, named as its model type by default."""
    return Architecture(
        name=name or kind.replace("_", "-"),
        source=f"transformers {model}",
        module=configured(model, **sizes),
        inputs=inputs,
        example=example,
        other=other,
        default_dynamic=default_dynamic,
        kind=kind,
    )
