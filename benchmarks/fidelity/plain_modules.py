"""The modules of the plain PyTorch architectures."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from benchmarks.fidelity.architecture import VOCABULARY

WIDTH = 12


class UNet(nn.Module):
    """Maps (batch, 3, height, width) to (batch, 1, height, width): down twice and up twice, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 24, 3, 2, 1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(24)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(24, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.leave = nn.Conv2d(8, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = f.relu(self.enter(image))
        seen = []
        for step, norm in zip(self.down, self.norms, strict=True):
            seen.append(x)
            x = f.relu(norm(step(x)))
        for step in self.up:
            across = seen.pop()
            x = f.interpolate(step(x), size=across.shape[2:], mode="bilinear", align_corners=False) + across
        return self.leave(x)


class SpatialTransformer(nn.Module):
    """Transforms images by parameters that a small network predicts (Jaderberg et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Conv2d(3, 4, 7, 4), nn.ReLU(), nn.Flatten(), nn.Linear(196, 6), nn.Tanh())

    def forward(self, image: Tensor) -> Tensor:
        angle = self.locate(image).unflatten(1, (2, 3))
        grid = f.affine_grid(angle, list(image.shape), align_corners=False)
        return f.grid_sample(image, grid, align_corners=False)


class ImageFFT(nn.Module):
    """A filter over all frequencies of an image (Rao et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 32, 17, 2))

    def forward(self, image: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(image, norm="ortho")
        return torch.fft.irfft2(spectrum * torch.view_as_complex(self.weight), s=(32, 32), norm="ortho")


class FourierLayer(nn.Module):
    """(batch, sequence, width): a Fourier transform of a series, its inverse and a linear layer (Li et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        return self.mix(torch.fft.irfft(spectrum, n=x.shape[1], dim=1)) + spectrum.abs().mean(1, keepdim=True)


class LongConvolution(nn.Module):
    """(batch, sequence, width): a state space model as one long convolution, computed by FFT (Gu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(WIDTH))
        self.frequency = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        steps = torch.arange(length, device=x.device).unsqueeze(1)
        kernel = torch.exp(-self.decay.abs() * steps) * torch.cos(self.frequency * steps)
        spectrum = torch.fft.rfft(x, n=2 * length, dim=1) * torch.fft.rfft(kernel, n=2 * length, dim=0)
        return torch.fft.irfft(spectrum, n=2 * length, dim=1)[:, :length]


class VariationalAutoencoder(nn.Module):
    """Encodes a vector as mean and deviation, and decodes the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(WIDTH, 32), nn.ELU(), nn.LayerNorm(32), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, spread = self.encode(x).chunk(2, dim=1)
        return {"restored": torch.sigmoid(self.decode(mean)), "mean": mean, "spread": f.softplus(spread)}


class Coupling(nn.Module):
    """An invertible layer, and the logarithm of its Jacobian's determinant (Dinh et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH // 2, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.chunk(2, dim=1)
        scale, shift = self.net(kept).chunk(2, dim=1)
        return torch.cat([kept, changed * scale.tanh().exp() + shift], dim=1), scale.tanh().sum(1)


class MaskedEncoder(nn.Module):
    """PyTorch's transformer encoder over padded series; outputs all positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=~present)


class PooledEncoder(MaskedEncoder):
    """The same, averaged over the positions that are not padding."""

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        kept = present.unsqueeze(2)
        return (super().forward(x, present) * kept).sum(1) / kept.sum(1)


class Attention(nn.Module):
    """PyTorch's attention, and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x)


class RecurrentNetwork(nn.Module):
    """A bidirectional recurrent network; outputs the states at all positions."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.network = kind(WIDTH, 8, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.network(x)[0]
        return states


class DilatedStack(nn.Module):
    """(batch, sequence, width): causal convolutions with growing dilation (van den Oord et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**depth) for depth in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = x + f.glu(layer(f.pad(x, (layer.dilation[0], 0))), dim=1)
        return x.transpose(1, 2)


class Gated(nn.Module):
    """A gated multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(f.glu(self.gate(x))) + x


class BagOfWords(nn.Module):
    """Maps (batch, sequence) token ids to the mean of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.bag(input_ids)


class AdjacencyGNN(nn.Module):
    """Maps (nodes, width) and an adjacency matrix to (nodes, width): two rounds of messages (Kipf and Welling,
    2017).
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            x = f.relu(layer(adjacency @ x / degree)) + x
        return x


class Routed(nn.Module):
    """Routes each row to one of four experts: the values determine the number of rows of each."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.choose(x).argmax(1)
        answer = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            answer = answer.index_add(0, rows, expert(x[rows]))
        return answer


class LazyPositions(nn.Module):
    """Computes its table of positions at the first call, keeps it, and grows it for longer series."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.table is None or self.table.shape[0] < length:
            self.table = torch.arange(length, dtype=x.dtype).unsqueeze(1).mul(torch.linspace(0.1, 1, WIDTH)).sin()
        return self.leave(x + self.table[:length])


class FunctionModule(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class IndexedFunctionModule(FunctionModule):
    """A function of a tensor and an index as a module."""

    def forward(self, x: Tensor, at: Tensor) -> Any:
        return self.function(x, at)
