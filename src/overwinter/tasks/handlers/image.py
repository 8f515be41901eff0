"""Reads images: PNG, JPEG or what else Pillow opens, to pixel values. Asset: task.json."""

import io
import json
from typing import Any

import torch
from PIL import Image, ImageOps

from overwinter.core.errors import CallerError

INPUTS = [{"name": "image", "datatype": "BYTES", "shape": ["batch"]}]


def setup(assets: dict[str, bytes]) -> dict[str, Any]:
    """What is done to an image, as its processor says."""
    state: dict[str, Any] = json.loads(assets["task.json"])
    return state


def preprocess(inputs: dict[str, list[bytes]], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Encoded images [batch] to pixel values [batch, 3, height, width]."""
    if not inputs["image"]:
        raise CallerError("input 'image' holds no image")
    values = torch.stack([read(number, content, state) for number, content in enumerate(inputs["image"])])
    return {"pixel_values": values.to(getattr(torch, state["dtype"]))}


def read(number: int, content: bytes, state: dict[str, Any]) -> torch.Tensor:
    """One image; CallerError when it is none."""
    try:
        return pixels(content, state)
    except Exception as error:
        raise CallerError(f"input 'image' holds at {number} what cannot be read as an image: {error}") from error


def pixels(content: bytes, state: dict[str, Any]) -> torch.Tensor:
    """One image, upright and in RGB, resized, cropped to its middle, rescaled and normalised."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    if state["resize"] is not None:
        image = image.resize(resized(image.size, state["resize"]), Image.Resampling(state["resample"]))
    if state["crop"] is not None:
        height, width = state["crop"]
        left, top = (image.width - width) // 2, (image.height - height) // 2
        # Outside of the image is black.
        image = image.crop((left, top, left + width, top + height))
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    # Through 64 bits, as transformers does, for the same last bit.
    scaled = (values.permute(2, 0, 1).double() * state["scale"]).float()
    mean, deviation = (torch.tensor(state[name]).view(3, 1, 1) for name in ("mean", "std"))
    normal: torch.Tensor = (scaled - mean) / deviation
    return normal.contiguous()


def resized(size: tuple[int, int], target: list[int]) -> tuple[int, int]:
    """Width and height: `target` is the shorter side alone, or height and width."""
    if len(target) == 2:
        return target[1], target[0]
    width, height = size
    shorter = target[0]
    if width <= height:
        return shorter, int(shorter * height / width)
    return int(shorter * width / height), shorter
