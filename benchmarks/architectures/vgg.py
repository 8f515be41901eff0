"""VGG: a plain stack of 3x3 convolutions and three wide linear layers (Simonyan and Zisserman, 2015)."""

from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512, 512)
REPEATS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def stage(inputs: int, width: int, repeats: int) -> list[nn.Module]:
    """3x3 convolutions of one width at one resolution, each followed by a ReLU."""
    layers: list[nn.Module] = []
    for index in range(repeats):
        layers += [nn.Conv2d(width if index else inputs, width, 3, padding=1), nn.ReLU()]
    return layers


class VGG(nn.Module):
    """(batch, 3, height, width) images to (batch, classes) logits; `divisor` thins every layer."""

    def __init__(self, depth: int, classes: int = 1000, divisor: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, repeats in zip(WIDTHS, REPEATS[depth], strict=True):
            layers += [*stage(channels, width // divisor, repeats), nn.MaxPool2d(2)]
            channels = width // divisor
        hidden = 4096 // divisor
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 49, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Classify a batch of images."""
        return self.classifier(self.pool(self.features(image)).flatten(1))
