"""The smallest model of the zoo: a few linear layers, whose cost is mostly memory traffic."""

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Sequential):
    """(batch, first width) features to (batch, last width) logits."""

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])

    def forward(self, features: Tensor) -> Tensor:
        """Compute the logits; the parameter names the input of requests."""
        return super().forward(features)
