"""Reads images (PNG, JPEG and other formats of Pillow) as pixel values. Asset: task.json."""

import io
import json
from typing import Any

import torch
from PIL import Image, ImageOps

from overwinter.core.errors import CallerError

INPUTS = [{"name": "image", "datatype": "BYTES", "shape": ["batch"]}]


def setup(assets: dict[str, bytes]) -> dict[str, Any]:
    """Read the steps of the image processor."""
    state: dict[str, Any] = json.loads(assets["task.json"])
    return state


def preprocess(inputs: dict[str, list[bytes]], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Convert encoded images [batch] to pixel values [batch, 3, height, width]."""
    if not inputs["image"]:
        raise CallerError("input 'image' is empty")
    images = [read(number, content, state) for number, content in enumerate(inputs["image"])]
    sizes = sorted({(image.shape[2], image.shape[1]) for image in images})
    if len(sizes) > 1:
        raise CallerError(
            f"the images of input 'image' have different sizes after preprocessing (width, height), {sizes[0]} and "
            f"{sizes[1]}; those of one request must have one size"
        )
    return {"pixel_values": torch.stack(images).to(getattr(torch, state["dtype"]))}


def read(number: int, content: bytes, state: dict[str, Any]) -> torch.Tensor:
    """Decode one image; raise CallerError if that is impossible."""
    try:
        return pixels(content, state)
    except MemoryError as error:
        # Pillow raises it without a text.
        raise CallerError(
            f"element {number} of input 'image' has too many pixels for the memory of a worker: send a smaller image, "
            "or deploy with a higher memory_mib"
        ) from error
    except Exception as error:
        raise CallerError(f"element {number} of input 'image' cannot be read as an image: {error}") from error


def pixels(content: bytes, state: dict[str, Any]) -> torch.Tensor:
    """Convert one image to pixels: upright, RGB, resized, centre-cropped, rescaled and normalised."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    if state["resize"] is not None:
        image = image.resize(resized(image.size, state["resize"]), Image.Resampling(state["resample"]))
    if state["crop"] is not None:
        height, width = state["crop"]
        left, top = (image.width - width) // 2, (image.height - height) // 2
        # Areas outside of the image become black.
        image = image.crop((left, top, left + width, top + height))
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    # Compute in 64 bits, as transformers does, so that the last bit is equal.
    scaled = (values.permute(2, 0, 1).double() * state["scale"]).float()
    mean, deviation = (torch.tensor(state[name]).view(3, 1, 1) for name in ("mean", "std"))
    normal: torch.Tensor = (scaled - mean) / deviation
    return normal.contiguous()


def resized(size: tuple[int, int], target: list[int]) -> tuple[int, int]:
    """Return width and height for `target`, which is the length of the shorter side, or height and width."""
    if len(target) == 2:
        return target[1], target[0]
    width, height = size
    shorter = target[0]
    if width <= height:
        return shorter, int(shorter * height / width)
    return int(shorter * width / height), shorter
