"""Finds faces in a picture with the three networks of MTCNN. It is a client and does not use PyTorch."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Call = Callable[[str, Mapping[str, Array]], Mapping[str, Array]]
"""Runs one network: `call("pnet", {"image": array})` returns its outputs by name."""

SMALLEST_FACE = 20
PYRAMID = 0.709
WINDOW = 12
STRIDE = 2
PASS = {"pnet": 0.6, "rnet": 0.7, "onet": 0.7}


class Face(NamedTuple):
    """A face: its box (left, top, right, bottom), the probability, and eyes, nose and mouth [5, 2]."""

    box: Array
    probability: float
    points: Array


def detect(image: Array, call: Call) -> list[Face]:
    """Return the faces in an RGB picture, uint8 [height, width, 3], best first; `call` runs each network."""
    pixels = image.transpose(2, 0, 1).astype(np.float64)
    boxes = _square(_propose(pixels, call))
    boxes, crops = _crop(pixels, boxes, 24)
    if len(boxes) == 0:
        return []
    boxes, answer = _judge("rnet", boxes, call("rnet", {"crops": crops}))
    kept = _suppress(boxes, 0.7)
    boxes = _square(_shift(boxes[kept], answer["shifts"][kept], 1.0))
    boxes, crops = _crop(pixels, boxes, 48)
    if len(boxes) == 0:
        return []
    boxes, answer = _judge("onet", boxes, call("onet", {"crops": crops}))
    across_then_down = answer["points"].reshape(-1, 2, 5).transpose(0, 2, 1)
    points = boxes[:, None, :2] - 1 + across_then_down * (boxes[:, None, 2:4] - boxes[:, None, :2] + 1)
    boxes = _shift(boxes, answer["shifts"], 1.0)
    kept = _suppress(boxes, 0.7, by_smaller=True)
    return [Face(boxes[at, :4], float(boxes[at, 4]), points[at]) for at in kept]


def _propose(pixels: Array, call: Call) -> Array:
    """Return boxes [n, 5] (left, top, right, bottom, score) from PNet at every scale of the picture."""
    height, width = pixels.shape[1:]
    scale = WINDOW / SMALLEST_FACE
    found = [np.empty((0, 5))]
    moves = [np.empty((0, 4))]
    while min(height, width) * scale >= WINDOW:
        small = _resize(pixels, int(height * scale + 1), int(width * scale + 1))
        answer = call("pnet", {"image": _normal(small[None])})
        scores = answer["scores"][0, 1]
        rows, columns = np.nonzero(scores >= PASS["pnet"])
        corner = STRIDE * np.stack([columns, rows], 1) + 1
        window = np.concatenate([corner, corner + WINDOW - 1], 1)
        boxes = np.concatenate([np.floor(window / scale), scores[rows, columns, None]], 1)
        kept = _suppress(boxes, 0.5)
        found.append(boxes[kept])
        moves.append(answer["shifts"][0][:, rows, columns].T[kept])
        scale *= PYRAMID
    boxes = np.concatenate(found)
    kept = _suppress(boxes, 0.7)
    return _shift(boxes[kept], np.concatenate(moves)[kept], 0.0)


def _judge(name: str, boxes: Array, answer: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Return the boxes that pass network `name` with its scores, and all its outputs for them."""
    scores = answer["scores"][:, 1]
    passed = scores > PASS[name]
    boxes = np.concatenate([boxes[passed, :4], scores[passed, None]], 1)
    return boxes, {key: array[passed] for key, array in answer.items()}


def _shift(boxes: Array, shifts: Array, edge: float) -> Array:
    """Move each corner by a share of the box's size, which is `edge` larger than the distance of its corners."""
    size = boxes[:, 2:4] - boxes[:, :2] + edge
    return np.concatenate([boxes[:, :4] + shifts * np.tile(size, 2), boxes[:, 4:]], 1)


def _square(boxes: Array) -> Array:
    """Grow each box around its centre until it is square."""
    size = boxes[:, 2:4] - boxes[:, :2]
    side = size.max(1, keepdims=True)
    corner = boxes[:, :2] + size * 0.5 - side * 0.5
    return np.concatenate([corner, corner + side, boxes[:, 4:]], 1)


def _crop(pixels: Array, boxes: Array, side: int) -> tuple[Array, Array]:
    """Return the boxes that overlap the picture, and their pixels in it, FP32 [n, 3, side, side]."""
    height, width = pixels.shape[1:]
    corners = np.trunc(boxes[:, :4]).astype(int)
    start = np.maximum(corners[:, :2], 1) - 1
    stop = np.minimum(corners[:, 2:], (width, height))
    inside = (stop > start).all(1)
    crops = [
        _resize(pixels[:, top:bottom, left:right], side, side)
        for (left, top), (right, bottom) in zip(start[inside], stop[inside], strict=True)
    ]
    return boxes[inside], _normal(np.array(crops).reshape(-1, 3, side, side))


def _resize(pixels: Array, height: int, width: int) -> Array:
    """Resize [3, h, w] so that each new pixel is the mean of the old pixels that it covers."""
    for axis, size in ((1, height), (2, width)):
        old = pixels.shape[axis]
        edges = np.arange(size + 1) * old
        start, stop = edges[:-1] // size, -(-edges[1:] // size)
        total = np.insert(pixels.cumsum(axis), 0, 0.0, axis)
        shape = (-1, 1) if axis == 1 else (-1,)
        pixels = (total.take(stop, axis) - total.take(start, axis)) / (stop - start).reshape(shape)
    return pixels


def _normal(pixels: Array) -> Array:
    return ((pixels - 127.5) / 128).astype(np.float32)


def _suppress(boxes: Array, limit: float, by_smaller: bool = False) -> list[int]:
    """Return the rows of `boxes` to keep, best first, so that no two overlap by more than `limit`.

    Overlap is the area of the intersection divided by that of the union or, with `by_smaller`, by that of the smaller
    box, where the pixels at both edges of a box count.
    """
    edge = 1.0 if by_smaller else 0.0
    areas = (boxes[:, 2:4] - boxes[:, :2] + edge).prod(1)
    waiting = boxes[:, 4].argsort(kind="stable")[::-1]
    kept: list[int] = []
    while len(waiting):
        best, rest = waiting[0], waiting[1:]
        kept.append(int(best))
        start = np.maximum(boxes[best, :2], boxes[rest, :2])
        stop = np.minimum(boxes[best, 2:4], boxes[rest, 2:4])
        shared = np.maximum(stop - start + edge, 0.0).prod(1)
        whole = np.minimum(areas[best], areas[rest]) if by_smaller else areas[best] + areas[rest] - shared
        waiting = rest[shared / whole <= limit]
    return kept
