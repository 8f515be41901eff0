"""Models that AsyFunc, Tetris and Torpor serve, and a few others, by name: architectures with seeded random weights,
full size or small.

`build("resnet50")` has the sizes of the papers' tables. `build("resnet50", small=True)` has the same layers in the same
order, but fewer channels and units, for tests. No weights are downloaded. `python -m benchmarks.zoo` prints the table.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.architectures import huggingface
from benchmarks.architectures.densenet import DenseNet
from benchmarks.architectures.inception import InceptionV3
from benchmarks.architectures.mlp import MLP
from benchmarks.architectures.ssd import SSD300
from benchmarks.architectures.text import DSSM, TextCNN, TextLSTM
from benchmarks.architectures.vgg import VGG
from benchmarks.architectures.yolo import YOLOv8x

BATCH = 2
SMALL_VOCABULARY = 100

Inputs = dict[str, Tensor]
Dynamic = dict[str, dict[int, str]]


class Model(NamedTuple):
    """A network ready to be deployed: evaluation mode, no gradients."""

    module: nn.Module
    example_inputs: Inputs
    """A batch of 2, by the names of the arguments of `module.forward`."""
    dynamic: Dynamic
    """The dynamic dimensions and their names, "batch" and "sequence"; the export sets their bounds."""


class Recipe(NamedTuple):
    """How to build one model of the zoo; both functions are given `small`."""

    used_by: str
    module: Callable[[bool], nn.Module]
    inputs: Callable[[bool], tuple[Inputs, Dynamic]]


def build(name: str, small: bool = False, seed: int = 0) -> Model:
    """Build the model called `name`; raise ValueError if there is none.

    The same `small` and `seed` give the same bits. The caller's random state does not change.
    """
    if name not in RECIPES:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(NAMES)}")
    recipe = RECIPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = recipe.module(small).eval()
        example_inputs, dynamic = recipe.inputs(small)
        with torch.no_grad():
            randomise_constants(module)
            scale_outputs(module, example_inputs)
    return Model(module.requires_grad_(False), example_inputs, dynamic)


def randomise_constants(module: nn.Module) -> None:
    """Change, in place, all one-dimensional parameters and the running statistics. Most are initialised with zeros or
    ones, which training would change, and equal tensors would be stored once.
    """
    for path, parameter in module.named_parameters():
        if parameter.dim() == 1 and "bias" in path.rpartition(".")[2]:
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        elif parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
    for path, buffer in module.named_buffers():
        if path.endswith("running_mean"):
            buffer.normal_(std=0.05)
        elif path.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)


def scale_outputs(module: nn.Module, example_inputs: Inputs) -> None:
    """Scale, in place, every trainable convolution so that its output for the example has a standard deviation of about
    one.

    Otherwise a signal vanishes or explodes in many random layers, and an answer that ignores its input checks nothing.
    The factors are powers of two, so that they do not depend on the last bits, which vary with the number of threads.
    """

    def rescale(layer: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
        factor = 2.0 ** -round(math.log2(output.std().item()))
        for parameter in layer.parameters():
            parameter.mul_(factor)
        return output * factor

    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv1d | nn.Conv2d)]
    hooks = [layer.register_forward_hook(rescale) for layer in convolutions if layer.weight.requires_grad]
    module(**example_inputs)
    for hook in hooks:
        hook.remove()


def state_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield all parameters and floating-point buffers, shared ones once."""
    yield from module.parameters()
    yield from (buffer for buffer in module.buffers() if buffer.is_floating_point())


def parameters_mb(module: nn.Module) -> float:
    """Return the size of all parameters and floating-point buffers in MB of 10^6 bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(module)) / 1e6


def images(full: int, small_side: int, small: bool) -> tuple[Inputs, Dynamic]:
    """Return square images of a fixed side in pixels."""
    side = small_side if small else full
    return {"image": torch.randn(BATCH, 3, side, side)}, {"image": {0: "batch"}}


def tokens(names: tuple[str, ...], vocabulary: int, length: int, small: bool) -> tuple[Inputs, Dynamic]:
    """Return token ids of any length; an `attention_mask` marks the end of the second text as padding."""
    high, length = (SMALL_VOCABULARY, 16) if small else (vocabulary, length)
    inputs = {name: torch.randint(1, high, (BATCH, length)) for name in names}
    if "attention_mask" in inputs:
        inputs["attention_mask"] = torch.ones(BATCH, length, dtype=torch.int64)
        inputs["attention_mask"][1, -length // 4 :] = 0
    return inputs, {name: {0: "batch", 1: "sequence"} for name in names}


def sentences(small: bool) -> tuple[Inputs, Dynamic]:
    """Return token ids of a fixed length, because `torch.export` unrolls an LSTM."""
    inputs, _ = tokens(("input_ids",), 10000, 32, small)
    return inputs, {"input_ids": {0: "batch"}}


def features(small: bool) -> tuple[Inputs, Dynamic]:
    """Return rows of numbers for the MLP."""
    return {"features": torch.randn(BATCH, 32 if small else 512)}, {"features": {0: "batch"}}


BERT_INPUTS = partial(tokens, ("input_ids", "attention_mask"), 30522, 128)

RECIPES: dict[str, Recipe] = {
    "resnet50": Recipe("AsyFunc, Torpor", partial(huggingface.resnet, (3, 4, 6, 3)), partial(images, 224, 64)),
    "resnet101": Recipe("Tetris, Torpor", partial(huggingface.resnet, (3, 4, 23, 3)), partial(images, 224, 64)),
    "resnet152": Recipe("Tetris, Torpor", partial(huggingface.resnet, (3, 8, 36, 3)), partial(images, 224, 64)),
    "densenet169": Recipe(
        "Tetris, Torpor",
        lambda small: DenseNet(169, classes=10, growth=4) if small else DenseNet(169),
        partial(images, 224, 64),
    ),
    "densenet201": Recipe(
        "Torpor",
        lambda small: DenseNet(201, classes=10, growth=4) if small else DenseNet(201),
        partial(images, 224, 64),
    ),
    "inception-v3": Recipe(
        "AsyFunc, Tetris, Torpor",
        lambda small: InceptionV3(classes=10, divisor=8) if small else InceptionV3(),
        partial(images, 299, 96),
    ),
    "efficientnet-b5": Recipe("AsyFunc, Torpor", huggingface.efficientnet_b5, partial(images, 456, 64)),
    "mobilenet-v2": Recipe("Tetris", huggingface.mobilenet_v2, partial(images, 224, 64)),
    "vgg16": Recipe(
        "AsyFunc", lambda small: VGG(16, classes=10, divisor=16) if small else VGG(16), partial(images, 224, 32)
    ),
    "vgg19": Recipe(
        "Tetris", lambda small: VGG(19, classes=10, divisor=16) if small else VGG(19), partial(images, 224, 32)
    ),
    "ssd300": Recipe(
        "AsyFunc, Tetris",
        lambda small: SSD300(classes=5, divisor=16) if small else SSD300(),
        partial(images, 300, 300),
    ),
    "yolov8x": Recipe(
        "AsyFunc",
        lambda small: YOLOv8x(image=64, classes=5, divisor=10) if small else YOLOv8x(),
        partial(images, 640, 64),
    ),
    "vit-base": Recipe("AsyFunc", huggingface.vit_base, partial(images, 224, 32)),
    "bert-base": Recipe("Tetris", huggingface.bert_base, BERT_INPUTS),
    "bert-large": Recipe("Tetris, Torpor", huggingface.bert_large, BERT_INPUTS),
    "distilbert": Recipe("", huggingface.distilbert, BERT_INPUTS),
    "minilm": Recipe("", huggingface.minilm, BERT_INPUTS),
    "gpt2": Recipe("Tetris", huggingface.gpt2, partial(tokens, ("input_ids",), 50257, 64)),
    "llama-small": Recipe("Torpor, as 8B", huggingface.llama_small, partial(tokens, ("input_ids",), 32000, 64)),
    "textcnn": Recipe(
        "Tetris",
        lambda small: TextCNN(SMALL_VOCABULARY, width=16, filters=8) if small else TextCNN(),
        partial(tokens, ("input_ids",), 8000, 64),
    ),
    "lstm": Recipe(
        "Tetris", lambda small: TextLSTM(SMALL_VOCABULARY, width=16, hidden=8) if small else TextLSTM(), sentences
    ),
    "dssm": Recipe(
        "Tetris",
        lambda small: DSSM(SMALL_VOCABULARY, hidden=16, embedding=8) if small else DSSM(),
        partial(tokens, ("query", "document"), 20000, 64),
    ),
    "mlp": Recipe("", lambda small: MLP(32, 48, 48, 16) if small else MLP(512, 768, 768, 256), features),
}

NAMES: tuple[str, ...] = tuple(RECIPES)


def main() -> None:
    """Print one line per model; on the meta device, where tensors have a size but no bytes."""
    print(f"{'name':16} {'parameters':>12} {'MB':>7} {'tensors':>8}  used by")
    for name, recipe in RECIPES.items():
        with torch.device("meta"):
            module = recipe.module(False)
        count = sum(parameter.numel() for parameter in module.parameters())
        tensors = sum(1 for _ in state_tensors(module))
        print(f"{name:16} {count:12,} {parameters_mb(module):7.1f} {tensors:8}  {recipe.used_by or '-'}")


if __name__ == "__main__":
    main()
