"""Opens for export a directory written by `transformers`. For the deployer's side only.

The directory contains `config.json` and safetensors; nothing is downloaded, and no code in the directory runs.
`transformers` is imported on demand. The inputs of a model follow from its configuration and the signature of its
`forward`: there is no list of architectures.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overwinter.core.errors import ProgramError

SIZES = {
    "batch": 2,
    "texts": 2,
    "images": 3,
    "sequence": 16,
    "decoder_sequence": 8,
    "samples": 16_000,
    "frames": 128,
    "height": 224,
    "width": 224,
}
"""The names of dynamic sizes, with the example's size if the model does not define one."""
USUALLY_FIXED = {"height", "width"}
"""Sizes that vary only if the deployer asks for it."""
PARTS = {"encoder": "get_encoder", "text": "get_text_features", "image": "get_image_features"}
"""The parts of a model that can be deployed alone, and the method for each: `get_encoder` returns a module, the other
two compute the output of their part.
"""
ANY = "any"
DATA_ONLY = {"local_files_only": True, "trust_remote_code": False}
"""The options for loading anything from a directory. By default `transformers` would ask on the terminal whether to run
code.
"""
_CODE = re.compile(r".*(attn|experts)_implementation")
"""Settings that may name kernels, which are code to download."""
_OWN_KERNELS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""The values of these settings that name code of PyTorch and `transformers`."""
_FURTHER_CODE = ("quantization_config", "transformers_weights", "configuration_files", "attribute_map")
"""Settings that make `transformers` use other libraries, read other files, or give settings other names."""
_INDEX = "model.safetensors.index.json"

Axes = tuple[str | int, ...]


class Pretrained(NamedTuple):
    """A model with the other arguments of `export`."""

    module: torch.nn.Module
    example_inputs: dict[str, torch.Tensor]
    dynamic: dict[str, dict[int, str]]


class PlainModel(torch.nn.Module):
    """A model, or one method of it, that returns a dictionary of its output tensors, without caches or containers."""

    def __init__(self, model: Any, method: str = "forward", *, first_only: bool = False) -> None:
        """Wrap a model; with `first_only`, only its first output is returned."""
        super().__init__()
        self.model = model
        self.method = method
        self.first_only = first_only
        # The cache for the next token would appear as additional outputs.
        self.fixed = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the model's output tensors by name."""
        given = {name: value for name, value in locals().items() if isinstance(value, torch.Tensor)}
        outputs = getattr(self.model, self.method)(**given, **self.fixed)
        if isinstance(outputs, torch.Tensor):
            return {"output": outputs}
        tensors = [(name, value) for name, value in outputs.items() if isinstance(value, torch.Tensor)]
        return dict(tensors[:1] if self.first_only else tensors)

    def takes(self) -> set[str]:
        """Return the names of all arguments of the wrapped method."""
        return set(signature(getattr(self.model, self.method)).parameters)


def load_transformers(path: Path, options: Mapping[str, Any] | None = None) -> Pretrained:
    """The model in a `transformers` directory, wrapped to return plain tensors, with example inputs and dynamic sizes.

    `options` may give a size by its name, as `{"sequence": 128}` (fixed) or `{"height": "any"}` (may vary), and the
    `part` of the model to deploy. Raises ProgramError if the directory is incomplete or names code, `transformers` is
    missing or cannot load the model, the model takes another kind of input, or an option is invalid for it.
    """
    sizes = dict(options or {})
    part = sizes.pop("part", None)
    return with_examples(_part(load_model(path), part), sizes)


def load_model(path: Path, *, headless: bool = False) -> Any:
    """Load the model class that the directory's configuration names, or its base without a head, in evaluation mode."""
    config_path = path / "config.json"
    config = read_json(config_path)
    _check_code(config_path, config)
    _check_files(path)
    names = config.get("architectures") or ["AutoModel"]
    transformers = import_transformers()
    name = "AutoModel" if headless else str(names[0])
    architecture = getattr(transformers, name, None) or _nested(transformers, path, name)
    own = "; code of a directory is not run: give the model as module:callable" if "auto_map" in config else ""
    if not hasattr(architecture, "from_pretrained") or not (name == "AutoModel" or hasattr(architecture, "forward")):
        raise ProgramError(
            f"transformers {transformers.__version__} has no model class {name!r}, named in {config_path}{own}"
        )
    try:
        return architecture.from_pretrained(path, use_safetensors=True, dtype="auto", **DATA_ONLY).eval()
    except Exception as error:  # for a damaged directory, anything may be raised
        raise ProgramError(f"transformers cannot load {path}: {type(error).__name__}: {error}{own}") from error


def _check_code(path: Path, config: Any) -> None:
    """Raise ProgramError if a configuration, or a part of it, names code to download or of other libraries."""
    if isinstance(config, list):
        for value in config:
            _check_code(path, value)
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        kernels = value if isinstance(value, Mapping) else {key: value}
        if _CODE.fullmatch(key) and any(each not in _OWN_KERNELS for each in kernels.values()):
            raise ProgramError(f"{path} names kernels, which are code: {key} is {value!r}; leave it out")
        if key in _FURTHER_CODE and value is not None:
            raise ProgramError(f"{path} has {key}, which may let other code run; save the model without it")
        _check_code(path, value)


def _check_files(path: Path) -> None:
    """Raise ProgramError if weights would be read from anything but safetensors of the directory."""
    if (path / "adapter_config.json").exists():
        raise ProgramError(f"{path} is an adapter, which needs other code; merge it into its model and save that")
    parts = read_json(path / _INDEX).get("weight_map") if (path / _INDEX).exists() else {}
    for name in parts.values() if isinstance(parts, dict) else (parts,):
        if not (isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", name)):
            raise ProgramError(f"{path / _INDEX} names {name!r}, which is not a safetensors file of this directory")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of the directory; raise ProgramError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ProgramError(f"{path.parent} has no {path.name}, which a transformers directory needs") from error
    except ValueError as error:
        raise ProgramError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise ProgramError(f"{path} is not a JSON object")
    return content


def import_transformers() -> Any:
    """Import the package; ProgramError names the command that installs it."""
    try:
        import transformers
    except ImportError as error:
        raise ProgramError("opening a transformers directory needs `pip install transformers safetensors`") from error
    return transformers


def with_examples(plain: PlainModel, sizes: Mapping[str, Any]) -> Pretrained:
    """Return the model with example inputs and the names of their dynamic sizes; `sizes` are the options. Raises
    ProgramError for an invalid size, or if the model takes another kind of input.
    """
    axes = _axes(plain)
    config = plain.model.config
    known = {name: size for name, size in _sizes(config).items() if any(name in each for each in axes.values())}
    varying = set(known) - USUALLY_FIXED
    for name, size in sizes.items():
        if name not in known:
            raise ProgramError(f"{type(plain.model).__name__} has no size {name!r}; there are {', '.join(known)}")
        if size == ANY:
            varying.add(name)
        elif isinstance(size, int) and size > 0:
            varying.discard(name)
            known[name] = size
        else:
            raise ProgramError(f"the size {name} must be an integer above 0 or {ANY!r}, not {size!r}")
    source = torch.Generator().manual_seed(0)
    shapes = {name: [known[axis] if isinstance(axis, str) else axis for axis in each] for name, each in axes.items()}
    examples = {name: _EXAMPLES[name](shape, config, source) for name, shape in shapes.items()}
    floating = {name: value.to(plain.model.dtype) for name, value in examples.items() if value.is_floating_point()}
    return Pretrained(plain.eval(), examples | floating, dynamic_of(axes, varying))


def dynamic_of(axes: Mapping[str, Axes], varying: Collection[str]) -> dict[str, dict[int, str]]:
    """Return the dynamic sizes in the form that `export` needs."""
    return {
        name: {at: axis for at, axis in enumerate(each) if isinstance(axis, str) and axis in varying}
        for name, each in axes.items()
    }


def _nested(transformers: Any, path: Path, name: str) -> Any:
    """Return a model class that `transformers` does not list at the top level, such as a separately saved encoder."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, **DATA_ONLY)
        module = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    except (OSError, ValueError, KeyError, ImportError):
        return None
    return getattr(module, name, None)


def _part(model: Any, part: str | None) -> PlainModel:
    if part is None:
        return PlainModel(model)
    # Every model has `get_encoder`. For some models it returns the model itself.
    apart = getattr(model.config, "is_encoder_decoder", False)
    known = [name for name, method in PARTS.items() if hasattr(model, method) and (apart or name != "encoder")]
    if part not in known:
        raise ProgramError(f"{type(model).__name__} has no part {part!r}; it has {', '.join(known) or 'none'}")
    return PlainModel(model.get_encoder()) if part == "encoder" else PlainModel(model, PARTS[part])


def _axes(plain: PlainModel) -> dict[str, Axes]:
    """Return the inputs to give, by name, with the meaning of each dimension."""
    model, takes = plain.model, plain.takes()
    kind = type(model).__name__
    main = _main_input(plain, takes)
    # A contrastive model compares each text with each image, so their numbers may differ.
    apart = {"input_ids", main, "pixel_values"} <= takes and hasattr(model, "get_text_features")
    texts, images = ("texts", "images") if apart else ("batch", "batch")
    axes: dict[str, Axes] = {}
    if main == "input_ids" or apart:
        axes |= {name: (texts, "sequence") for name in ("input_ids", "attention_mask") if name in takes}
    if "pixel_values" in (main, *(takes if main == "input_ids" else ())):
        axes["pixel_values"] = (images, *_image_axes(model.config))
    elif main == "input_values":
        mels = setting(model.config, "num_mel_bins")
        axes[main] = ("batch", setting(model.config, "max_length"), mels) if mels else ("batch", "samples")
    elif main == "input_features":
        axes[main] = ("batch", *_feature_axes(model.config, kind))
    decodes = getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in takes
    # A classifier with a decoder computes the decoder's input from the encoder's.
    if decodes and "Classification" not in kind and "QuestionAnswering" not in kind:
        axes["decoder_input_ids"] = ("batch", "decoder_sequence")
    return axes


def _main_input(plain: PlainModel, takes: set[str]) -> str:
    name = str(plain.model.main_input_name)
    known = ["input_ids", "pixel_values", "input_values", "input_features"]
    if name not in takes:
        name = next((each for each in known if each in takes), name)
    if name not in known:
        raise ProgramError(
            f"{type(plain.model).__name__} takes {name!r}; deploy it as module:callable, from your own module "
            "that has example inputs"
        )
    return name


def _image_axes(config: Any) -> Axes:
    frames = setting(config, "num_frames")
    return (*((frames,) if frames else ()), setting(config, "num_channels") or 3, "height", "width")


def _feature_axes(config: Any, kind: str) -> Axes:
    mels, positions = setting(config, "num_mel_bins"), setting(config, "max_source_positions")
    if mels and positions:
        # Whisper halves the number of frames, and takes inputs of the full length only.
        return (mels, 2 * positions)
    for name in ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins"):
        width = setting(config, name)
        if width:
            return ("frames", width)
    raise ProgramError(
        f"{kind} takes 'input_features' of a shape that its config.json does not define; deploy it as "
        "module:callable, with example inputs"
    )


def _sizes(config: Any) -> dict[str, int]:
    side, longest = setting(config, "image_size"), setting(config, "max_position_embeddings")
    sizes = dict(SIZES)
    if isinstance(longest, int) and longest > 0:
        sizes["sequence"] = min(sizes["sequence"], longest)
    if side:
        sizes["height"], sizes["width"] = side if isinstance(side, list | tuple) else (side, side)
    return sizes


def setting(config: Any, name: str) -> Any:
    """Return a value of a configuration, or of one of its parts; None if none has it."""
    parts = (config, *(getattr(config, f"{part}_config", None) for part in ("vision", "audio", "backbone", "text")))
    return next((value for part in parts if (value := getattr(part, name, None)) is not None), None)


def _tokens(shape: list[int], config: Any, source: torch.Generator) -> torch.Tensor:
    return torch.randint(0, setting(config, "vocab_size") or 2, shape, generator=source)


def _mask(shape: list[int], config: Any, source: torch.Generator) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


def _numbers(shape: list[int], config: Any, source: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=source)


_EXAMPLES: dict[str, Callable[[list[int], Any, torch.Generator], torch.Tensor]] = {
    "input_ids": _tokens,
    "attention_mask": _mask,
    "pixel_values": _numbers,
    "input_values": _numbers,
    "input_features": _numbers,
    "decoder_input_ids": _tokens,
}
