"""Reads the settings of an image task from a directory: its image processor, and the names of its classes."""

import io
import json
from typing import Any

import torch

from overwinter.core.errors import ProgramError
from overwinter.model.pretrained import DATA_ONLY, import_transformers
from overwinter.tasks.bundle import Bundle, TaskRequest, function_of_scores, handler_source, labels

SHAPES = ((300, 417), (260, 190))
"""The heights and widths of the sample images: one landscape, one portrait."""
TOP = 5
"""The default number of labels per image, as in the pipeline of `transformers`."""


def classification(request: TaskRequest, model: Any) -> Bundle:
    """Return the bundle of a function that returns the `top_k` best labels of each image and their scores, 5 by
    default.
    """
    names = labels(model)
    try:
        # Load the processor for Pillow even if it was written for torchvision, which a node does not have.
        processor = import_transformers().AutoImageProcessor.from_pretrained(request.path, backend="pil", **DATA_ONLY)
    except (OSError, ValueError, ImportError) as error:
        raise ProgramError(f"transformers cannot read the image processor in {request.path}: {error}") from error
    top = min(request.number("top_k") or TOP, len(names))
    shown = {"labels": names, "function": function_of_scores(model), "top_k": top}
    state = {**shown, **_steps(processor), "dtype": str(model.dtype).removeprefix("torch.")}
    pictures = [_picture(*shape) for shape in SHAPES]
    expected = [{"pixel_values": _processed(processor, picture).to(model.dtype)} for picture in pictures]
    return Bundle(
        handler_source("image", "classification"),
        {"task.json": json.dumps(state).encode()},
        {"image": pictures},
        expected,
        {"pixel_values": ("batch", *expected[0]["pixel_values"].shape[1:])},
    )


def _steps(processor: Any) -> dict[str, Any]:
    """Return the steps of the processor; the rules of some classes of processors become sizes, means and deviations."""
    kind = type(processor).__name__.removesuffix("Pil").removesuffix("Processor")
    resize = _target(processor) if processor.do_resize else None
    crop = [processor.crop_size["height"], processor.crop_size["width"]] if processor.do_center_crop else None
    match kind, resize:
        case "ConvNextImage", [side] if side < 384:
            resize, crop = [int(side / processor.crop_pct)], [side, side]
        case "ConvNextImage", [side]:
            resize = [side, side]
        case "PoolFormerImage", [side]:
            resize = [int(side / processor.crop_pct)]
        case "LevitImage", [side]:
            resize = [int((256 / 224) * side)]
        case _:
            pass
    mean, deviation = [0.0] * 3, [1.0] * 3
    if processor.do_normalize:
        mean, deviation = [[float(part) for part in each] for each in (processor.image_mean, processor.image_std)]
    if kind == "EfficientNetImage":
        mean = [part + 1.0 for part in mean] if processor.rescale_offset else mean
        deviation = [part * part for part in deviation] if processor.include_top else deviation
    return {
        "resize": resize,
        "resample": 2 if processor.resample is None else int(processor.resample),
        "crop": crop,
        "scale": processor.rescale_factor if processor.do_rescale else 1.0,
        "mean": mean,
        "std": deviation,
    }


def _target(processor: Any) -> list[int]:
    """Return the shorter side of a resized image, or its height and width."""
    size = processor.size or {}
    for names in (["shortest_edge"], ["height", "width"]):
        if all(size.get(name) for name in names) and not size.get("longest_edge"):
            return [size[name] for name in names]
    raise ProgramError(
        f"{type(processor).__name__} limits the longer side of an image, or its height and width, which the handler of "
        "this task does not; deploy the directory without a task and with a --handler"
    )


def _picture(height: int, width: int) -> bytes:
    """Create a PNG with edges, gradients and noise."""
    from PIL import Image

    source = torch.Generator().manual_seed(height)
    slopes = torch.linspace(0, 200, height)[:, None, None] * torch.linspace(0, 1, width)[None, :, None]
    blocks = 40 * ((torch.arange(height)[:, None, None] // 32 + torch.arange(width)[None, :, None] // 32) % 2)
    noise = torch.randint(0, 16, (height // 4 + 1, width // 4 + 1, 3), generator=source)
    spread = noise.repeat_interleave(4, 0).repeat_interleave(4, 1)[:height, :width]
    values = (slopes + blocks + spread).clamp(0, 255).to(torch.uint8)
    content = io.BytesIO()
    Image.frombytes("RGB", (width, height), bytes(values.contiguous().flatten().tolist())).save(content, "PNG")
    return content.getvalue()


def _processed(processor: Any, picture: bytes) -> torch.Tensor:
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    values: torch.Tensor = processor(images=image, return_tensors="pt")["pixel_values"]
    return values
