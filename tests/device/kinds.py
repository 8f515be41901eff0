"""The kinds of devices on which the tests of devices run."""

import pytest
import torch

from overwinter.device.cuda import CudaDevice
from overwinter.device.virtual import VirtualDevice

KINDS = ["virtual", pytest.param("cuda", marks=pytest.mark.gpu)]


def processor(kind):
    """Return the PyTorch device on which a kind of device runs programs; skip the test if there is none."""
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU on this machine")
    # A device does not use TF32, so expected answers must be computed without it.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device("cpu" if kind == "virtual" else kind)


def made(kind, name, allocator):
    return CudaDevice(name, allocator) if kind == "cuda" else VirtualDevice(name, allocator)
