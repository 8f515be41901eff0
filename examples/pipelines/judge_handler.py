"""The handler of RNet and ONet in faces.toml: takes a picture and boxes, returns the accepted boxes, adjusted."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

INPUTS = [
    {"name": "image", "datatype": "UINT8", "shape": ["height", "width", 3]},
    {"name": "boxes", "datatype": "FP32", "shape": ["proposed", 5]},
]
OUTPUTS = [{"name": "boxes", "datatype": "FP32", "shape": ["found", 5]}]

RNET, ONET = 24, 48
PASS = 0.7
OVERLAP = 0.7


def setup(assets: dict[str, bytes]) -> int:
    """Return the side of the crops that the network takes: RNET or ONET."""
    return int(assets["side"])


def preprocess(inputs: dict[str, Tensor], state: int) -> dict[str, Tensor]:
    """Return the crops of the boxes that overlap the picture, FP32 [crops, 3, side, side]; one grey crop if none
    does.
    """
    pixels = (inputs["image"].permute(2, 0, 1)[None].float() - 127.5) / 128
    crops = [
        F.interpolate(pixels[:, :, top:bottom, left:right], (state, state), mode="area")
        for left, top, right, bottom in _corners(inputs).tolist()
    ]
    return {"crops": torch.cat(crops or [torch.zeros(1, 3, state, state)])}


def postprocess(outputs: dict[str, Tensor], inputs: dict[str, Tensor], state: int) -> dict[str, Tensor]:
    """Convert scores and shifts [crops, ...] to boxes [found, 5], best first; square if a further network
    follows.
    """
    boxes = inputs["boxes"][_inside(inputs)]
    scores = outputs["scores"][: len(boxes), 1]
    passed = scores > PASS
    boxes = boxes[passed, :4]
    extent = (boxes[:, 2:] - boxes[:, :2] + 1).repeat(1, 2)
    boxes = boxes + outputs["shifts"][: len(passed)][passed] * extent
    judged = torch.cat([boxes, scores[passed, None]], 1)
    judged = judged[_best(judged)]
    return {"boxes": judged if state == ONET else torch.cat([_square(judged[:, :4]), judged[:, 4:]], 1)}


def _corners(inputs: dict[str, Tensor]) -> Tensor:
    return _clipped(inputs)[_inside(inputs)]


def _inside(inputs: dict[str, Tensor]) -> Tensor:
    """Return which boxes overlap the picture."""
    corners = _clipped(inputs)
    return (corners[:, 2:] > corners[:, :2]).all(1)


def _clipped(inputs: dict[str, Tensor]) -> Tensor:
    """Return left, top, right and bottom in whole pixels of the picture."""
    height, width = inputs["image"].shape[:2]
    corners = inputs["boxes"][:, :4].trunc().long()
    stop = corners[:, 2:].minimum(torch.tensor([width, height]))
    return torch.cat([corners[:, :2].clamp(min=1) - 1, stop], 1)


def _square(boxes: Tensor) -> Tensor:
    """Grow each box around its centre until it is square."""
    size = boxes[:, 2:] - boxes[:, :2]
    side = size.amax(1, keepdim=True)
    corner = boxes[:, :2] + size / 2 - side / 2
    return torch.cat([corner, corner + side], 1)


def _best(boxes: Tensor) -> list[int]:
    """Return the rows to keep, best first, so that no two share more than OVERLAP of the smaller one."""
    areas = (boxes[:, 2:4] - boxes[:, :2]).prod(1)
    waiting = boxes[:, 4].argsort(descending=True, stable=True)
    kept: list[int] = []
    while len(waiting):
        best, rest = waiting[0], waiting[1:]
        kept.append(int(best))
        start = boxes[best, :2].maximum(boxes[rest, :2])
        stop = boxes[best, 2:4].minimum(boxes[rest, 2:4])
        shared = (stop - start).clamp(min=0).prod(1)
        waiting = rest[shared / areas[best].minimum(areas[rest]) <= OVERLAP]
    return kept
