"""Makes small models of random model types of `transformers`.

Widths, layers, heads and vocabularies of a configuration get small values, found by their names; if the model cannot be
built with these, fewer of them do. Inputs are generated from the parameter names of its `forward`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

from benchmarks.fidelity.architecture import VOCABULARY, Architecture, Field, floats, mask, tokens

PARAMETERS_MAX = 20_000_000
SIDE = 32
EXAMPLE = {"batch": 2, "sequence": 8, "target": 6, "samples": 1600, "frames": 64}
OTHER = {"sequence": 11, "target": 9, "samples": 2345, "frames": 81}

COUNTS = {
    "num_layers num_hidden_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth num_blocks encoder_num_hidden_layers decoder_num_hidden_layers": 2,
    "vocab_size n_words decoder_vocab_size": VOCABULARY,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_k moe_topk": 2,
    "num_queries": 5,
    "num_labels": 5,
}
SIZES = {
    "hidden_size d_model dim n_embd embed_dim emb_dim embedding_size width hidden_dim encoder_hidden_size": 32,
    "intermediate_size encoder_ffn_dim decoder_ffn_dim encoder_intermediate_size ffn_dim d_ff d_inner n_inner "
    "moe_intermediate_size shared_expert_intermediate_size": 64,
    "projection_dim projection_size": 16,
    "image_size": SIDE,
    "patch_size": 8,
}
HEADS = {
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim d_kv": 8,
}
LEVELS = ((COUNTS, SIZES, HEADS), (COUNTS, SIZES), (COUNTS,))
"""The sizes that are made small, in the order of attempts."""


class CannotBuildError(Exception):
    """Says why a model type cannot be tested."""


def model_types(known: Iterable[str]) -> list[str]:
    """Return every model type of `transformers` without the known ones."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(set(CONFIG_MAPPING_NAMES) - set(known))


def name_of(kind: str) -> str:
    """Return the name under which a model of this type is deployed."""
    return f"drawn-{kind.lower().replace('_', '-').replace('.', '-')}"


def architecture(kind: str, seed: int) -> Architecture:
    """Return a small model of this type that runs in eager mode; CannotBuildError says why there is none."""
    model = _model_class(kind)
    try:
        default = model.config_class()
    except Exception as error:
        raise CannotBuildError(f"its configuration has no defaults: {_words(error)}") from error
    fault = ""
    for level in LEVELS:
        small = {name: value for group in level for names, value in group.items() for name in names.split()}
        module, fault = _attempt(lambda small=small: _built(model, _reduced(default, small)), fault)
        if module is None:
            continue
        for inputs in _inputs(module):
            found = _architecture(kind, model, default, small, inputs)
            answered, fault = _attempt(lambda found=found: _answers(found, seed), fault)
            if answered:
                return found
    raise CannotBuildError(fault)


def _architecture(
    kind: str, model: Any, default: Any, small: Mapping[str, int], inputs: Mapping[str, Field]
) -> Architecture:
    return Architecture(
        name=name_of(kind),
        source=f"transformers {model.__name__}, drawn",
        module=lambda: model(_reduced(default, small)),
        inputs=inputs,
        example=EXAMPLE,
        other=OTHER,
        kind=kind,
    )


def _model_class(kind: str) -> Any:
    """Return the class of the bare model of a type; without one, a class of the type for some task."""
    import transformers
    from transformers.models.auto import modeling_auto

    tasks = sorted(name for name in dir(modeling_auto) if name.startswith("MODEL_FOR") and name.endswith("NAMES"))
    for mapping in ("MODEL_MAPPING_NAMES", *tasks):
        name = getattr(modeling_auto, mapping).get(kind)
        name = name if isinstance(name, str | None) else name[0]
        if name is not None and hasattr(transformers, name):
            model = getattr(transformers, name)
            if hasattr(model, "config_class"):
                return model
    raise CannotBuildError("it is part of another type, and no class builds it alone")


def _reduced(config: Any, small: Mapping[str, int]) -> Any:
    """Return a configuration of the same class with small values."""
    return type(config)(**_values(config, small))


def _values(config: Any, small: Mapping[str, int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, dict) and name.endswith("config"):
            part = getattr(config, name)
            values[name] = (
                {"model_type": part.model_type, **_values(part, small)} if hasattr(part, "to_dict") else value
            )
        elif name == "use_cache":
            values[name] = False
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            values[name] = len(values) % 3
        elif name in small and isinstance(value, int) and not isinstance(value, bool):
            values[name] = min(value, small[name])
        elif name == "depths" and isinstance(value, list | tuple):
            values[name] = [1] * len(value)
    return values


def _built(model: Any, config: Any) -> nn.Module:
    """Build the model on the meta device; raise if it has too many parameters."""
    with torch.device("meta"):
        module: nn.Module = model(config)
    count = sum(parameter.numel() for parameter in module.parameters())
    if count > PARAMETERS_MAX:
        raise CannotBuildError(f"it has {count / 1e6:.0f} million parameters even when made small")
    return module


def _inputs(module: Any) -> Iterator[dict[str, Field]]:
    """Yield possible inputs of its `forward`: those of text, then its main input, then all that can be made."""
    taken = set(signature(module.forward).parameters)
    config = module.config
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", None) or SIDE
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = getattr(vision, "num_channels", 3)
    frames = getattr(config, "num_frames", None)
    picture = (channels, height, width) if frames is None else (frames, channels, height, width)
    makeable = {
        "input_ids": tokens("batch", "sequence"),
        "attention_mask": mask("batch", "sequence"),
        "decoder_input_ids": tokens("batch", "target"),
        "pixel_values": floats("batch", *picture),
        "pixel_values_videos": floats("batch", *picture),
        "input_values": floats("batch", "samples"),
        "input_features": floats("batch", getattr(config, "num_mel_bins", 80), "frames"),
    }
    possible = {name: field for name, field in makeable.items() if name in taken}
    if "input_ids" not in possible:
        possible.pop("attention_mask", None)
    if not getattr(config, "is_encoder_decoder", False):
        possible.pop("decoder_input_ids", None)
    text = {name: field for name, field in possible.items() if name.endswith(("input_ids", "attention_mask"))}
    main = {name: field for name, field in possible.items() if name == getattr(module, "main_input_name", "")}
    if not possible:
        names = ", ".join(sorted({*taken} - {"kwargs"})[:3])
        raise CannotBuildError(f"the benchmark can make none of the inputs of its `forward`: {names}")
    yield from (chosen for chosen in (text, main, possible) if chosen)


def _answers(architecture: Architecture, seed: int) -> bool:
    with torch.inference_mode():
        architecture.build(seed)(**architecture.inputs_at({}, seed))
    return True


def _attempt(work: Callable[[], Any], fault: str) -> tuple[Any, str]:
    """Return the result; or None and the error, which is the first error if there were more."""
    try:
        return work(), fault
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        return None, fault or _words(error)


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if isinstance(error, CannotBuildError):
        return lines[0]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:160]}" if lines else type(error).__name__
