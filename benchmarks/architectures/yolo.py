"""YOLOv8: C2f blocks, a spatial pyramid, a feature pyramid network, and an anchor-free head (Reis et al., 2023).

Only the largest size, x, is here; suppression of overlapping boxes is left to the caller.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as f

STRIDES = (8, 16, 32)
BINS = 16
"""The distance from a grid point to a side is the mean of a distribution over this many values, in strides."""


class Conv(nn.Module):
    """Convolution that keeps or halves the size, batch norm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, outputs, height / stride, width / stride)."""
        return f.silu(self.norm(self.conv(features)))


class Bottleneck(nn.Module):
    """Two 3x3 convolutions, added to their input in the backbone."""

    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.conv1 = Conv(channels, channels, 3)
        self.conv2 = Conv(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, features: Tensor) -> Tensor:
        """Same shape as the input."""
        changed = self.conv2(self.conv1(features))
        return features + changed if self.shortcut else changed


class C2f(nn.Module):
    """Split the channels in two, refine one half `count` times, join every step."""

    def __init__(self, inputs: int, outputs: int, count: int, shortcut: bool = False) -> None:
        super().__init__()
        half = outputs // 2
        self.conv1 = Conv(inputs, 2 * half)
        self.conv2 = Conv((2 + count) * half, outputs)
        self.steps = nn.ModuleList(Bottleneck(half, shortcut) for _ in range(count))

    def forward(self, features: Tensor) -> Tensor:
        """(batch, outputs, height, width)."""
        parts = list(self.conv1(features).chunk(2, dim=1))
        for step in self.steps:
            parts.append(step(parts[-1]))
        return self.conv2(torch.cat(parts, dim=1))


class SPPF(nn.Module):
    """Look at ever larger neighbourhoods by pooling three times in a row."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = Conv(channels, channels // 2)
        self.conv2 = Conv(channels // 2 * 4, channels)
        self.pool = nn.MaxPool2d(5, stride=1, padding=2)

    def forward(self, features: Tensor) -> Tensor:
        """Same shape as the input."""
        parts = [self.conv1(features)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.conv2(torch.cat(parts, dim=1))


class Head(nn.Module):
    """Three feature maps to (batch, boxes, 4) corners in pixels and (batch, boxes, classes) scores."""

    points: Tensor
    strides: Tensor

    def __init__(self, channels: tuple[int, int, int], classes: int, image: int) -> None:
        super().__init__()
        self.classes = classes
        side = max(16, channels[0] // 4, 4 * BINS)
        label = max(channels[0], min(classes, 100))
        self.sides = nn.ModuleList(branch(width, side, 4 * BINS) for width in channels)
        self.labels = nn.ModuleList(branch(width, label, classes) for width in channels)
        self.expectation = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
        self.expectation.weight.data = torch.arange(BINS, dtype=torch.float32).view(1, BINS, 1, 1)
        points, strides = grid(image)
        self.register_buffer("points", points)
        self.register_buffer("strides", strides)

    def forward(self, *maps: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the distances from each grid point to the four sides into corners."""
        batch = maps[0].shape[0]
        sides = torch.cat([head(m).flatten(2) for head, m in zip(self.sides, maps, strict=True)], dim=2)
        labels = torch.cat([head(m).flatten(2) for head, m in zip(self.labels, maps, strict=True)], dim=2)
        bins = sides.view(batch, 4, BINS, -1).transpose(1, 2).softmax(dim=1)
        before, after = self.expectation(bins).squeeze(1).chunk(2, dim=1)
        corners = torch.cat([self.points - before, self.points + after], dim=1) * self.strides
        return corners.transpose(1, 2), labels.transpose(1, 2).sigmoid()


def branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """One head over one feature map."""
    return nn.Sequential(Conv(inputs, hidden, 3), Conv(hidden, hidden, 3), nn.Conv2d(hidden, outputs, 1))


def grid(image: int) -> tuple[Tensor, Tensor]:
    """Centres (2, boxes) of all grid cells in units of their stride, and the strides (boxes)."""
    points, strides = [], []
    for stride in STRIDES:
        ticks = torch.arange(image // stride) + 0.5
        rows, columns = torch.meshgrid(ticks, ticks, indexing="ij")
        points.append(torch.stack([columns.flatten(), rows.flatten()]))
        strides.append(torch.full((len(ticks) ** 2,), float(stride)))
    return torch.cat(points, dim=1), torch.cat(strides)


class YOLOv8x(nn.Module):
    """(batch, 3, image, image) images to corners and scores as `Head` gives them; `divisor` divides the channels of all
    layers before the head.
    """

    def __init__(self, image: int = 640, classes: int = 80, divisor: int = 1) -> None:
        super().__init__()
        p1, p2, p3, p4, p5 = (width // divisor for width in (80, 160, 320, 640, 640))
        self.to_p3 = nn.Sequential(
            Conv(3, p1, 3, 2), Conv(p1, p2, 3, 2), C2f(p2, p2, 3, True), Conv(p2, p3, 3, 2), C2f(p3, p3, 6, True)
        )
        self.to_p4 = nn.Sequential(Conv(p3, p4, 3, 2), C2f(p4, p4, 6, True))
        self.to_p5 = nn.Sequential(Conv(p4, p5, 3, 2), C2f(p5, p5, 3, True), SPPF(p5))
        self.up4 = C2f(p5 + p4, p4, 3)
        self.up3 = C2f(p4 + p3, p3, 3)
        self.shrink3 = Conv(p3, p3, 3, 2)
        self.down4 = C2f(p3 + p4, p4, 3)
        self.shrink4 = Conv(p4, p4, 3, 2)
        self.down5 = C2f(p4 + p5, p5, 3)
        self.head = Head((p3, p4, p5), classes, image)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes as x1, y1, x2, y2 and an independent score of each class in each box."""
        p3 = self.to_p3(image)
        p4 = self.to_p4(p3)
        p5 = self.to_p5(p4)
        up4 = self.up4(torch.cat([f.interpolate(p5, scale_factor=2.0), p4], dim=1))
        out3 = self.up3(torch.cat([f.interpolate(up4, scale_factor=2.0), p3], dim=1))
        out4 = self.down4(torch.cat([self.shrink3(out3), up4], dim=1))
        out5 = self.down5(torch.cat([self.shrink4(out4), p5], dim=1))
        return self.head(out3, out4, out5)
