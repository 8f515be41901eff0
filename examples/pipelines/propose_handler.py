"""The handler of PNet in faces.toml: takes a picture, returns boxes that may contain a face."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from overwinter.core.errors import CallerError

INPUTS = [{"name": "image", "datatype": "UINT8", "shape": ["height", "width", 3]}]
OUTPUTS = [{"name": "boxes", "datatype": "FP32", "shape": ["found", 5]}]

SMALLEST_FACE = 40
PYRAMID = 0.709
WINDOW = 12
STRIDE = 2
PASS = 0.6


def preprocess(inputs: dict[str, Tensor], state: object) -> dict[str, Tensor]:
    """Convert a picture [height, width, 3] to all scales, each in the corner of a canvas of the largest."""
    pixels = (inputs["image"].permute(2, 0, 1)[None].float() - 127.5) / 128
    sizes = _sizes(inputs["image"])
    height, width = sizes[0]
    small = [F.interpolate(pixels, size, mode="area") for size in sizes]
    return {"image": torch.cat([F.pad(each, (0, width - each.shape[3], 0, height - each.shape[2])) for each in small])}


def postprocess(outputs: dict[str, Tensor], inputs: dict[str, Tensor], state: object) -> dict[str, Tensor]:
    """Convert scores and shifts of every window to boxes [found, 5]: left, top, right, bottom, score; square."""
    found = []
    for number, size in enumerate(_sizes(inputs["image"])):
        scores, shifts = outputs["scores"][number, 1], outputs["shifts"][number]
        rows, columns = (scores >= PASS).nonzero(as_tuple=True)
        corners = STRIDE * torch.stack([columns, rows], 1)
        # The area outside of the scaled picture is canvas.
        inside = (corners + WINDOW <= torch.tensor([size[1], size[0]]) + 1).all(1)
        rows, columns, corners = rows[inside], columns[inside], corners[inside]
        scale = WINDOW / SMALLEST_FACE * PYRAMID**number
        window = ((torch.cat([corners, corners + WINDOW - 1], 1) + 1) / scale).floor()
        moves = shifts[:, rows, columns].T
        boxes = torch.cat([window, scores[rows, columns, None]], 1)
        found.append(torch.cat([boxes, moves], 1)[_best(boxes, 0.5)])
    every = torch.cat(found)
    every = every[_best(every, 0.7)]
    extent = (every[:, 2:4] - every[:, :2]).repeat(1, 2)
    moved = every[:, :4] + every[:, 5:] * extent
    return {"boxes": torch.cat([_square(moved), every[:, 4:5]], 1)}


def _sizes(image: Tensor) -> list[tuple[int, int]]:
    """Return height and width of the picture at every scale, the largest first."""
    height, width = image.shape[:2]
    if min(height, width) < SMALLEST_FACE:
        raise CallerError(
            f"a picture must be at least {SMALLEST_FACE} pixels wide and high; this one is {width} x {height}"
        )
    scale = WINDOW / SMALLEST_FACE
    sizes = []
    while min(height, width) * scale >= WINDOW:
        sizes.append((int(height * scale + 1), int(width * scale + 1)))
        scale *= PYRAMID
    return sizes


def _square(boxes: Tensor) -> Tensor:
    """Grow each box around its centre until it is square."""
    size = boxes[:, 2:] - boxes[:, :2]
    side = size.amax(1, keepdim=True)
    corner = boxes[:, :2] + size / 2 - side / 2
    return torch.cat([corner, corner + side], 1)


def _best(boxes: Tensor, limit: float) -> list[int]:
    """Return the rows to keep, best first, so that no two share more than `limit` of their union."""
    areas = (boxes[:, 2:4] - boxes[:, :2]).prod(1)
    waiting = boxes[:, 4].argsort(descending=True, stable=True)
    kept: list[int] = []
    while len(waiting):
        best, rest = waiting[0], waiting[1:]
        kept.append(int(best))
        start = boxes[best, :2].maximum(boxes[rest, :2])
        stop = boxes[best, 2:4].minimum(boxes[rest, 2:4])
        shared = (stop - start).clamp(min=0).prod(1)
        waiting = rest[shared / (areas[best] + areas[rest] - shared) <= limit]
    return kept
