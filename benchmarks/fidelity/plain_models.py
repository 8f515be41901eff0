"""Architectures in plain PyTorch, as authors write them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from benchmarks.architectures.text import DSSM, TextCNN
from benchmarks.fidelity.architecture import VOCABULARY, Architecture, Field, floats, mask, tokens
from benchmarks.fidelity.plain_modules import (
    AdjacencyGNN,
    Attention,
    BagOfWords,
    Coupling,
    DilatedStack,
    FourierLayer,
    FunctionModule,
    Gated,
    ImageFFT,
    IndexedFunctionModule,
    LazyPositions,
    LongConvolution,
    MaskedEncoder,
    PooledEncoder,
    RecurrentNetwork,
    Routed,
    SpatialTransformer,
    UNet,
    VariationalAutoencoder,
)

SIGNAL = {"x": floats("batch", 12)}
SERIES = {"x": floats("batch", "sequence", 12)}
PADDED = {**SERIES, "present": mask("batch", "sequence", dtype=torch.bool)}
PICTURE = {"image": floats("batch", 3, 32, 32)}
FREE = {"image": floats("batch", 3, "height", "width")}
FREE_SIZES: dict[str, dict[str, int]] = {
    "example": {"batch": 2, "height": 32, "width": 48},
    "other": {"height": 64, "width": 40},
}


def convolutions() -> nn.Sequential:
    """A small image classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, groups=4),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def channels_last() -> nn.Module:
    """A model whose weights are in channels-last order, as usual for images."""
    return convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def transposed() -> nn.Module:
    """A layer whose weight is a transposed view of another tensor, as in weights from other frameworks."""
    module = nn.Linear(12, 20)
    module.weight = nn.Parameter(torch.randn(12, 20).t())
    return module


def quantised() -> nn.Module:
    """Linear layers with int8 weights; their inputs are quantized at each call."""
    module = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def double() -> nn.Module:
    """A model in double precision that creates a tensor at each call."""
    torch.set_default_dtype(torch.float64)
    return FunctionModule(lambda x: (x * torch.ones(12), torch.linspace(0, 1, 12)))


def unfused() -> nn.Module:
    """A model without the fused kernel, which returns zeros for padding."""
    torch.backends.mha.set_fastpath_enabled(False)
    return MaskedEncoder()


def adjacency(sizes: list[int], generator: torch.Generator) -> Tensor:
    """A random adjacency matrix of zeros and ones."""
    return (torch.rand(sizes, generator=generator) < 0.5).float()


def positive_but_three(sizes: list[int], generator: torch.Generator) -> Tensor:
    """Positive numbers, except for a batch of 3, whose last row is negative."""
    made = torch.rand(sizes, generator=generator) + 0.1
    return torch.cat([made[:2], -made[2:]])


def checked(x: Tensor) -> Tensor:
    """A model that refuses values that are not positive."""
    torch._assert_async((x > 0).all(), "all of x must be positive")
    return x.log()


def checked_index(x: Tensor, at: Tensor) -> Tensor:
    """A model that reads a value and constrains it."""
    row = at.max().item()
    torch._check(row >= 0)
    torch._check(row < x.shape[0])
    return x[row]


def squeezed(x: Tensor) -> Tensor:
    """A condition on the number of dimensions, which only a batch of one meets."""
    y = x.mean(1, keepdim=True).squeeze()
    return y * 10 if y.dim() == 0 else y


def branched(x: Tensor) -> Tensor:
    """A branch on a value by `torch.cond`."""
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


def attended(x: Tensor) -> Tensor:
    """Attention with a modified score."""
    from torch.nn.attention.flex_attention import flex_attention

    q = x.unflatten(2, (3, 4)).transpose(1, 2)
    return flex_attention(q, q, q, score_mod=lambda score, _b, _h, row, column: score - (row - column).abs())


def plain(name: str, module: Any, inputs: dict[str, Field] = SIGNAL, **more: Any) -> Architecture:
    """Return an architecture of plain PyTorch."""
    return Architecture(name, "PyTorch", module, inputs, **more)


def weightless(name: str, function: Any, inputs: dict[str, Field] = SIGNAL, **more: Any) -> Architecture:
    """Return an architecture without weights: a function of its inputs."""
    return plain(name, lambda: FunctionModule(function), inputs, **more)


NETWORKS = [
    plain("cnn", convolutions, {"input": floats("batch", 3, 32, 32)}),
    plain("cnn-channels-last", channels_last, {"input": floats("batch", 3, 32, 32)}),
    plain("linear-transposed", transposed, {"input": floats("batch", 12)}),
    plain("unet", UNet, FREE, **FREE_SIZES),
    plain("spatial-transformer", SpatialTransformer, PICTURE),
    plain("image-fft", ImageFFT, PICTURE),
    plain("autoencoder", VariationalAutoencoder),
    plain("coupling-flow", Coupling),
    plain("transformer-encoder", PooledEncoder, PADDED),
    plain("transformer-encoder-unfused", unfused, PADDED),
    plain("attention", Attention, SERIES),
    plain("lstm", lambda: RecurrentNetwork(nn.LSTM), {"x": floats("batch", 9, 12)}),
    plain("gru", lambda: RecurrentNetwork(nn.GRU), {"x": floats("batch", 9, 12)}),
    plain("gru-any-length", lambda: RecurrentNetwork(nn.GRU), SERIES),
    plain("dilated-convolutions", DilatedStack, SERIES),
    plain("fourier-layer", FourierLayer, SERIES),
    plain("long-convolution", LongConvolution, SERIES),
    plain("gated-mlp-fp16", lambda: Gated().half(), {"x": floats("batch", 12, dtype=torch.float16)}),
    plain("text-cnn", lambda: TextCNN(VOCABULARY, 16, 8, 5), {"input_ids": tokens("batch", "sequence")}),
    plain(
        "dssm",
        lambda: DSSM(VOCABULARY, 16, 8),
        {"query": tokens("batch", "query"), "document": tokens("batch", "document")},
        example={"batch": 2, "query": 6, "document": 9},
        other={"query": 7, "document": 5},
    ),
    plain("embedding-bag", BagOfWords, {"input_ids": tokens("batch", "sequence")}),
    plain(
        "graph-network",
        AdjacencyGNN,
        {"x": floats("nodes", 12), "adjacency": Field(("nodes", "nodes"), adjacency)},
        example={"nodes": 6},
        other={"nodes": 9},
    ),
    plain(
        "graph-default",
        AdjacencyGNN,
        {"x": floats("batch", 12), "adjacency": Field(("batch", "batch"), adjacency)},
    ),
    plain("routed-experts", Routed),
    plain("lazy-positions", LazyPositions, SERIES),
    plain("int8-dynamic", quantised, {"input": floats("batch", 12)}),
]

TRAPS = [
    weightless("hundredfold-at-one", lambda x: x * 100 if x.shape[0] == 1 else x),
    weightless("squeezed-at-one", squeezed),
    weightless("batch-mean", lambda x: x - x.mean(0)),
    weightless("batch-pooling", lambda x: x.amax(0)),
    weightless("scalar-answer", lambda x: x.square().mean()),
    weightless("own-check", checked, {"x": Field(("batch", 12), positive_but_three)}),
    plain(
        "own-check-of-value",
        lambda: IndexedFunctionModule(checked_index),
        {"x": floats("batch", 12), "at": tokens(3, low=0, high=2)},
    ),
    plain("default-double", double),
    weightless("nan-and-infinity", lambda x: torch.stack([x.sqrt(), f.relu(x).log()], 1)),
    weightless("bucketize", lambda x: torch.bucketize(x, torch.linspace(-1, 1, 8))),
    weightless("histogram", lambda x: torch.histc(x, 8, -2, 2)),
    weightless("condition", branched),
    weightless("flex-attention", attended, SERIES),
    weightless("complex", lambda x: torch.view_as_real(torch.fft.fft2(x.unflatten(1, (3, 4))))),
    weightless("masked-select", lambda x: x[x > 0]),
    weightless("random-noise", lambda x: x + torch.rand_like(x)),
]

MODELS: list[Architecture] = [*NETWORKS, *TRAPS]
