"""Inception-v3: blocks of parallel branches with factorised convolutions (Szegedy et al., 2016).

Letters name the block types as in the published code. The auxiliary classifier is left out: it only serves training.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as f


class Conv(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, features: Tensor) -> Tensor:
        """Same height and width, unless stride or missing padding shrink them."""
        return f.relu(self.norm(self.conv(features)))


class Branches(nn.Module):
    """Parallel branches, whose channels are concatenated in order."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, sum of the branches' channels, height, width)."""
        return torch.cat([branch(features) for branch in self.branches], dim=1)


def wide(inputs: int, outputs: int, kernel: int) -> Conv:
    """A convolution over `kernel` columns of one row."""
    return Conv(inputs, outputs, (1, kernel), padding=(0, kernel // 2))


def tall(inputs: int, outputs: int, kernel: int) -> Conv:
    """A convolution over `kernel` rows of one column."""
    return Conv(inputs, outputs, (kernel, 1), padding=(kernel // 2, 0))


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    """Average over the neighbours, then mix channels."""
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(inputs, outputs, 1))


def block_a(inputs: int, pool: int, d: int) -> Branches:
    """35x35: 1x1, 5x5, two 3x3, pool."""
    return Branches(
        Conv(inputs, 64 // d, 1),
        nn.Sequential(Conv(inputs, 48 // d, 1), Conv(48 // d, 64 // d, 5, padding=2)),
        nn.Sequential(
            Conv(inputs, 64 // d, 1), Conv(64 // d, 96 // d, 3, padding=1), Conv(96 // d, 96 // d, 3, padding=1)
        ),
        pooled(inputs, pool),
    )


def block_b(inputs: int, d: int) -> Branches:
    """35x35 to 17x17."""
    return Branches(
        Conv(inputs, 384 // d, 3, stride=2),
        nn.Sequential(
            Conv(inputs, 64 // d, 1), Conv(64 // d, 96 // d, 3, padding=1), Conv(96 // d, 96 // d, 3, stride=2)
        ),
        nn.MaxPool2d(3, stride=2),
    )


def block_c(inputs: int, middle: int, d: int) -> Branches:
    """17x17: 1x1, one and two factorised 7x7, pool."""
    out = 192 // d
    return Branches(
        Conv(inputs, out, 1),
        nn.Sequential(Conv(inputs, middle, 1), wide(middle, middle, 7), tall(middle, out, 7)),
        nn.Sequential(
            Conv(inputs, middle, 1),
            tall(middle, middle, 7),
            wide(middle, middle, 7),
            tall(middle, middle, 7),
            wide(middle, out, 7),
        ),
        pooled(inputs, out),
    )


def block_d(inputs: int, d: int) -> Branches:
    """17x17 to 8x8."""
    middle = 192 // d
    return Branches(
        nn.Sequential(Conv(inputs, middle, 1), Conv(middle, 320 // d, 3, stride=2)),
        nn.Sequential(
            Conv(inputs, middle, 1), wide(middle, middle, 7), tall(middle, middle, 7), Conv(middle, middle, 3, stride=2)
        ),
        nn.MaxPool2d(3, stride=2),
    )


def block_e(inputs: int, d: int) -> Branches:
    """8x8: branches that fork again."""
    out = 384 // d
    return Branches(
        Conv(inputs, 320 // d, 1),
        nn.Sequential(Conv(inputs, out, 1), Branches(wide(out, out, 3), tall(out, out, 3))),
        nn.Sequential(
            Conv(inputs, 448 // d, 1),
            Conv(448 // d, out, 3, padding=1),
            Branches(wide(out, out, 3), tall(out, out, 3)),
        ),
        pooled(inputs, 192 // d),
    )


class InceptionV3(nn.Module):
    """(batch, 3, height, width) images, at least 75x75, to (batch, classes) logits; `divisor` thins every layer."""

    def __init__(self, classes: int = 1000, divisor: int = 1) -> None:
        super().__init__()
        d = divisor
        self.stem = nn.Sequential(
            Conv(3, 32 // d, 3, stride=2),
            Conv(32 // d, 32 // d, 3),
            Conv(32 // d, 64 // d, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            Conv(64 // d, 80 // d, 1),
            Conv(80 // d, 192 // d, 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.blocks = nn.Sequential(
            block_a(192 // d, 32 // d, d),
            block_a(256 // d, 64 // d, d),
            block_a(288 // d, 64 // d, d),
            block_b(288 // d, d),
            block_c(768 // d, 128 // d, d),
            block_c(768 // d, 160 // d, d),
            block_c(768 // d, 160 // d, d),
            block_c(768 // d, 192 // d, d),
            block_d(768 // d, d),
            block_e(1280 // d, d),
            block_e(2048 // d, d),
        )
        self.dropout = nn.Dropout()
        self.classifier = nn.Linear(2048 // d, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Classify a batch of images."""
        features = f.adaptive_avg_pool2d(self.blocks(self.stem(image)), 1)
        return self.classifier(self.dropout(features).flatten(1))
