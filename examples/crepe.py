"""CREPE, tiny and full: the pitch of each frame of sound, by six convolutions over 1024 samples at 16 kHz."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from examples.weights import weights_path

RATE = 16_000
FRAME = 1024
BINS = 360
KERNELS = (512, 64, 64, 64, 64, 64)
STRIDES = (4, 1, 1, 1, 1, 1)
PADDINGS = ((254, 254), *[(31, 32)] * 5)
CHANNELS = {
    "tiny": (1, 128, 16, 16, 16, 32, 64),
    "full": (1, 1024, 128, 128, 128, 256, 512),
}

Example = tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, str]]]


class Crepe(nn.Module):
    """Maps normalised frames, FP32 [batch, 1024], to the probabilities of 360 pitches, FP32 [batch, 360]."""

    def __init__(self, size: str) -> None:
        super().__init__()
        channels = CHANNELS[size]
        for step, (source, target) in enumerate(pairwise(channels)):
            convolution = nn.Conv2d(source, target, (KERNELS[step], 1), (STRIDES[step], 1))
            self.add_module(f"conv{step + 1}", convolution)
            self.add_module(f"conv{step + 1}_BN", nn.BatchNorm2d(target, eps=0.0010000000474974513))
        self.classifier = nn.Linear(channels[-1] * 4, BINS)

    def forward(self, frames: Tensor) -> dict[str, Tensor]:
        x = frames[:, None, :, None]
        for step, (before, after) in enumerate(PADDINGS):
            x = F.pad(x, (0, 0, before, after))
            x = F.relu(self.get_submodule(f"conv{step + 1}")(x))
            x = self.get_submodule(f"conv{step + 1}_BN")(x)
            x = F.max_pool2d(x, (2, 1), (2, 1))
        x = x.permute(0, 2, 1, 3).flatten(1)
        return {"probabilities": torch.sigmoid(self.classifier(x))}


def load(size: str) -> Crepe:
    """Load the published weights of "tiny" or "full"; raise MissingWeightsError if their package is not installed."""
    published = torch.load(weights_path(f"crepe-{size}"), map_location="cpu", weights_only=True)
    module = Crepe(size)
    module.load_state_dict(published, assign=True)
    return module.eval().requires_grad_(False)


def tone(hertz: float, frames: int = 8) -> Tensor:
    """Make a pure tone, FP32 [1, frames * 1024] at 16 kHz."""
    return torch.sin(torch.arange(frames * FRAME) * (2 * torch.pi * hertz / RATE))[None]


def tiny() -> Example:
    """The model for `overwinter deploy examples.crepe:tiny`: 2 MB."""
    return _example("tiny")


def full() -> Example:
    """The model for `overwinter deploy examples.crepe:full`: 89 MB."""
    return _example("full")


def _example(size: str) -> Example:
    return load(size), {"frames": tone(440, 2).reshape(2, FRAME)}, {"frames": {0: "batch"}}
