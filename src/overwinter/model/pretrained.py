"""How is a directory written by `transformers` opened for export? For the deployer's side only.

The directory holds `config.json` and safetensors; nothing is fetched. `transformers` is imported here, when asked to.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overwinter.core.errors import ProgramError

BATCH = 2
SEQUENCE = 16
AUDIO_SAMPLES = 16_000


class Pretrained(NamedTuple):
    """A model with what `export` needs besides."""

    module: torch.nn.Module
    example_inputs: dict[str, torch.Tensor]
    dynamic: dict[str, dict[int, str]]


class _Plain(torch.nn.Module):
    """A model that returns a dictionary of its output tensors, without caches or nested containers."""

    def __init__(self, model: torch.nn.Module, **fixed: bool) -> None:
        super().__init__()
        self.model = model
        self.fixed = fixed

    def run(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's output tensors by name."""
        outputs = self.model(**inputs, **self.fixed)
        return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


class _Text(_Plain):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.run(input_ids=input_ids, attention_mask=attention_mask)


class _Image(_Plain):
    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.run(pixel_values=pixel_values)


class _Audio(_Plain):
    def forward(self, input_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.run(input_values=input_values)


def load_transformers(path: Path) -> Pretrained:
    """The model in a `transformers` directory, wrapped to return plain tensors, with example inputs and dynamic sizes.

    Text models take `input_ids` and `attention_mask` of any batch and length, image models `pixel_values`, audio
    models `input_values`. ProgramError if the directory is incomplete, `transformers` is missing or the model
    takes another kind of input.
    """
    config_path = path / "config.json"
    try:
        names = json.loads(config_path.read_text(encoding="utf-8")).get("architectures") or ["AutoModel"]
    except FileNotFoundError as error:
        raise ProgramError(f"{path} is no transformers directory: it has no config.json") from error
    except (ValueError, AttributeError) as error:
        raise ProgramError(f"{config_path} is not a JSON object: {error}") from error
    try:
        import transformers
    except ImportError as error:
        raise ProgramError("opening a transformers directory needs `pip install transformers safetensors`") from error
    architecture = getattr(transformers, str(names[0]), None)
    if architecture is None or not hasattr(architecture, "from_pretrained"):
        raise ProgramError(
            f"transformers {transformers.__version__} has no model class {names[0]!r}, named in {config_path}"
        )
    try:
        model = architecture.from_pretrained(path, local_files_only=True, use_safetensors=True, dtype="auto")
    except (OSError, ValueError, RuntimeError) as error:
        raise ProgramError(f"transformers cannot load {path}: {error}") from error
    return _with_inputs(model.eval())


def _with_inputs(model: Any) -> Pretrained:
    match model.main_input_name:
        case "input_ids":
            return _text_model(model)
        case "pixel_values":
            side = getattr(model.config, "image_size", None) or 224
            height, width = side if isinstance(side, list | tuple) else (side, side)
            example = torch.rand(BATCH, getattr(model.config, "num_channels", 3), height, width, dtype=model.dtype)
            return Pretrained(_Image(model), {"pixel_values": example}, {"pixel_values": {0: "batch"}})
        case "input_values":
            example = torch.rand(BATCH, AUDIO_SAMPLES, dtype=model.dtype)
            return Pretrained(_Audio(model), {"input_values": example}, {"input_values": {0: "batch"}})
        case other:
            raise ProgramError(f"{type(model).__name__} takes {other!r}; export it from a module of one's own instead")


def _text_model(model: Any) -> Pretrained:
    if getattr(model.config, "is_encoder_decoder", False):
        raise ProgramError(f"{type(model).__name__} has a decoder of its own; export its parts from a module instead")
    inputs = {name: torch.ones(BATCH, SEQUENCE, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    module = _Text(model, use_cache=False) if hasattr(model.config, "use_cache") else _Text(model)
    return Pretrained(module.eval(), inputs, {name: {0: "batch", 1: "sequence"} for name in inputs})
