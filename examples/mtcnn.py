"""MTCNN, which finds faces: three small networks that propose, refine and decide. mtcnn_cascade.py calls them."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from examples.mtcnn_cascade import WINDOW, Call
from examples.weights import weights_path

Example = tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, str]]]


class PNet(nn.Module):
    """Proposes: maps an image FP32 [batch, 3, height, width], both at least 13, to a score and shift for every second
    pixel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, 3)
        self.prelu1 = nn.PReLU(10)
        self.conv2 = nn.Conv2d(10, 16, 3)
        self.prelu2 = nn.PReLU(16)
        self.conv3 = nn.Conv2d(16, 32, 3)
        self.prelu3 = nn.PReLU(32)
        self.conv4_1 = nn.Conv2d(32, 2, 1)
        self.conv4_2 = nn.Conv2d(32, 4, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        for size in image.shape[2:]:
            # 12 pixels give a single window, which an export with dynamic sizes would treat as a special case.
            torch._check(size > WINDOW, lambda: f"an image must be larger than {WINDOW} pixels")
        x = self.prelu1(self.conv1(image))
        # Pooling with ceil_mode, as published, would branch on the size; one more row and column of -inf give the same
        # result.
        x = F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=float("-inf")), 2, 2)
        x = self.prelu2(self.conv2(x))
        x = self.prelu3(self.conv3(x))
        return {"scores": self.conv4_1(x).softmax(1), "shifts": self.conv4_2(x)}


class RNet(nn.Module):
    """Refines: maps crops FP32 [batch, 3, 24, 24] to a score [batch, 2] and a shift of the box [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 28, 3)
        self.prelu1 = nn.PReLU(28)
        self.conv2 = nn.Conv2d(28, 48, 3)
        self.prelu2 = nn.PReLU(48)
        self.conv3 = nn.Conv2d(48, 64, 2)
        self.prelu3 = nn.PReLU(64)
        self.dense4 = nn.Linear(576, 128)
        self.prelu4 = nn.PReLU(128)
        self.dense5_1 = nn.Linear(128, 2)
        self.dense5_2 = nn.Linear(128, 4)

    def forward(self, crops: Tensor) -> dict[str, Tensor]:
        x = F.max_pool2d(self.prelu1(self.conv1(crops)), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.prelu2(self.conv2(x)), 3, 2, ceil_mode=True)
        x = self.prelu3(self.conv3(x))
        x = self.prelu4(self.dense4(x.permute(0, 3, 2, 1).flatten(1)))
        return {"scores": self.dense5_1(x).softmax(1), "shifts": self.dense5_2(x)}


class ONet(nn.Module):
    """Decides: maps crops FP32 [batch, 3, 48, 48] to a score, a shift of the box and five points [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3)
        self.prelu1 = nn.PReLU(32)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.prelu2 = nn.PReLU(64)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.prelu3 = nn.PReLU(64)
        self.conv4 = nn.Conv2d(64, 128, 2)
        self.prelu4 = nn.PReLU(128)
        self.dense5 = nn.Linear(1152, 256)
        self.prelu5 = nn.PReLU(256)
        self.dense6_1 = nn.Linear(256, 2)
        self.dense6_2 = nn.Linear(256, 4)
        self.dense6_3 = nn.Linear(256, 10)

    def forward(self, crops: Tensor) -> dict[str, Tensor]:
        x = F.max_pool2d(self.prelu1(self.conv1(crops)), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.prelu2(self.conv2(x)), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.prelu3(self.conv3(x)), 2, 2, ceil_mode=True)
        x = self.prelu4(self.conv4(x))
        x = self.prelu5(self.dense5(x.permute(0, 3, 2, 1).flatten(1)))
        return {"scores": self.dense6_1(x).softmax(1), "shifts": self.dense6_2(x), "points": self.dense6_3(x)}


def pnet() -> Example:
    """The model for `overwinter deploy examples.mtcnn:pnet`."""
    image = torch.linspace(-1, 1, 2 * 3 * 30 * 41).reshape(2, 3, 30, 41)
    return _load("pnet", PNet()), {"image": image}, {"image": {0: "batch", 2: "height", 3: "width"}}


def rnet() -> Example:
    """The model for `overwinter deploy examples.mtcnn:rnet`."""
    return _load("rnet", RNet()), {"crops": _crops(24)}, {"crops": {0: "batch"}}


def onet() -> Example:
    """The model for `overwinter deploy examples.mtcnn:onet`."""
    return _load("onet", ONet()), {"crops": _crops(48)}, {"crops": {0: "batch"}}


def local(modules: Mapping[str, nn.Module]) -> Call:
    """Return a function that runs the three networks in this process, by name, in plain PyTorch."""

    def call(name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            outputs = modules[name](**{key: torch.from_numpy(array) for key, array in arrays.items()})
        return {key: tensor.numpy() for key, tensor in outputs.items()}

    return call


def _load(name: str, module: nn.Module) -> nn.Module:
    module.load_state_dict(torch.load(weights_path(name), map_location="cpu", weights_only=True))
    return module.eval().requires_grad_(False)


def _crops(side: int) -> Tensor:
    return torch.linspace(-1, 1, 2 * 3 * side * side).reshape(2, 3, side, side)
