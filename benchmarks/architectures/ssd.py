"""SSD300: a VGG16 whose six feature maps each predict boxes around fixed default boxes (Liu et al., 2016).

The 91-class version with 35.6 million parameters; suppression of overlapping boxes is left to the caller.
"""

import math
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from benchmarks.architectures.vgg import stage

IMAGE = 300
GRIDS = (38, 19, 10, 5, 3, 1)
STEPS = (8, 16, 32, 64, 100, 300)
SCALES = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)
ASPECTS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
EXTRAS = ((1024, 256, 512, 2, 1), (512, 128, 256, 2, 1), (256, 128, 256, 1, 0), (256, 128, 256, 1, 0))
"""(inputs, bottleneck, outputs, stride, padding) of the layers that shrink the map below 19x19."""
LARGEST_LOG_RATIO = math.log(1000 / 16)


def default_boxes() -> Tensor:
    """All (8732, 4) default boxes as centre x, centre y, width, height in pixels."""
    boxes: list[tuple[float, float, float, float]] = []
    for level, (grid, step) in enumerate(zip(GRIDS, STEPS, strict=True)):
        scale = SCALES[level]
        sides = [(scale, scale), (math.sqrt(scale * SCALES[level + 1]),) * 2]
        for aspect in ASPECTS[level]:
            root = math.sqrt(aspect)
            sides += [(scale * root, scale / root), (scale / root, scale * root)]
        boxes += [
            ((column + 0.5) * step, (row + 0.5) * step, min(width, 1.0) * IMAGE, min(height, 1.0) * IMAGE)
            for row, column, (width, height) in product(range(grid), range(grid), sides)
        ]
    return torch.tensor(boxes)


class Backbone(nn.Module):
    """VGG16 with convolutions in place of its linear layers, and four more stages; returns six feature maps."""

    def __init__(self, divisor: int) -> None:
        super().__init__()
        c64, c128, c256, c512, c1024 = (width // divisor for width in (64, 128, 256, 512, 1024))
        self.fine = nn.Sequential(
            *stage(3, c64, 2),
            nn.MaxPool2d(2),
            *stage(c64, c128, 2),
            nn.MaxPool2d(2),
            *stage(c128, c256, 3),
            nn.MaxPool2d(2, ceil_mode=True),
            *stage(c256, c512, 3),
        )
        self.scale = nn.Parameter(torch.full((1, c512, 1, 1), 20.0))
        coarse = nn.Sequential(
            nn.MaxPool2d(2),
            *stage(c512, c512, 3),
            nn.MaxPool2d(3, stride=1, padding=1),
            nn.Conv2d(c512, c1024, 3, padding=6, dilation=6),
            nn.ReLU(),
            nn.Conv2d(c1024, c1024, 1),
            nn.ReLU(),
        )
        self.coarser = nn.ModuleList([coarse])
        for inputs, bottleneck, outputs, stride, padding in EXTRAS:
            self.coarser.append(
                nn.Sequential(
                    nn.Conv2d(inputs // divisor, bottleneck // divisor, 1),
                    nn.ReLU(),
                    nn.Conv2d(bottleneck // divisor, outputs // divisor, 3, stride=stride, padding=padding),
                    nn.ReLU(),
                )
            )

    def forward(self, image: Tensor) -> list[Tensor]:
        """Feature maps from 38x38 down to 1x1."""
        features = self.fine(image)
        maps = [self.scale * f.normalize(features)]
        for layer in self.coarser:
            features = layer(features)
            maps.append(features)
        return maps


class SSD300(nn.Module):
    """(batch, 3, 300, 300) images to (batch, 8732, 4) corners in pixels and (batch, 8732, classes) scores."""

    defaults: Tensor

    def __init__(self, classes: int = 91, divisor: int = 1) -> None:
        super().__init__()
        self.classes = classes
        self.backbone = Backbone(divisor)
        channels = [512 // divisor, 1024 // divisor] + [outputs // divisor for _, _, outputs, _, _ in EXTRAS]
        anchors = [2 + 2 * len(aspects) for aspects in ASPECTS]
        heads = list(zip(channels, anchors, strict=True))
        self.places = nn.ModuleList(nn.Conv2d(width, 4 * count, 3, padding=1) for width, count in heads)
        self.labels = nn.ModuleList(nn.Conv2d(width, classes * count, 3, padding=1) for width, count in heads)
        self.register_buffer("defaults", default_boxes())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes as x1, y1, x2, y2 and the probability of each class in each box."""
        maps = self.backbone(image)
        offsets = torch.cat([rows(head(m), 4) for head, m in zip(self.places, maps, strict=True)], dim=1)
        logits = torch.cat([rows(head(m), self.classes) for head, m in zip(self.labels, maps, strict=True)], dim=1)
        return self.decode(offsets), logits.softmax(dim=-1)

    def decode(self, offsets: Tensor) -> Tensor:
        """Move and stretch the default boxes; the tenths and fifths are the variances of the original."""
        centres, sides = self.defaults.split(2, dim=1)
        centres = centres + offsets[..., :2] / 10 * sides
        sides = sides * torch.exp((offsets[..., 2:] / 5).clamp(max=LARGEST_LOG_RATIO))
        return torch.cat([centres - sides / 2, centres + sides / 2], dim=-1)


def rows(prediction: Tensor, columns: int) -> Tensor:
    """(batch, anchors * columns, height, width) to (batch, height * width * anchors, columns)."""
    return prediction.permute(0, 2, 3, 1).reshape(prediction.shape[0], -1, columns)
