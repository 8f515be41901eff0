"""DenseNet: blocks in which every layer reads the outputs of all layers before it (Huang et al., 2017)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as f

BLOCKS = {169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}


class DenseLayer(nn.Module):
    """Computes `growth` new channels from the gathered ones."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, gathered: list[Tensor]) -> Tensor:
        """Return only the new channels."""
        squeezed = self.conv1(f.relu(self.norm1(torch.cat(gathered, dim=1))))
        return self.conv2(f.relu(self.norm2(squeezed)))


class DenseBlock(nn.Module):
    """`count` dense layers at one resolution."""

    def __init__(self, inputs: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + index * growth, growth) for index in range(count))

    def forward(self, features: Tensor) -> Tensor:
        """Return the input's channels, then those of each layer."""
        gathered = [features]
        for layer in self.layers:
            gathered.append(layer(gathered))
        return torch.cat(gathered, dim=1)


class DenseNet(nn.Module):
    """(batch, 3, height, width) images to (batch, classes) logits; the first convolution has 2 * `growth` channels."""

    def __init__(self, depth: int, classes: int = 1000, growth: int = 32) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential()
        for index, count in enumerate(BLOCKS[depth]):
            if index:
                self.blocks.append(transition(channels))
                channels //= 2
            self.blocks.append(DenseBlock(channels, growth, count))
            channels += count * growth
        self.norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Classify a batch of images."""
        features = f.relu(self.norm(self.blocks(self.stem(image))))
        return self.classifier(f.adaptive_avg_pool2d(features, 1).flatten(1))


def transition(channels: int) -> nn.Sequential:
    """Halve channels, height and width between two blocks."""
    return nn.Sequential(
        nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)
    )
