"""Weights keep the order of their dimensions in memory, also after they were stored in blocks."""

import os

import pytest
import torch
from torch import nn

from overwinter.api.deployer import package
from overwinter.core.errors import ProgramError
from overwinter.model.compile import compile_program
from overwinter.model.export import export
from overwinter.model.program import Call, Slot, Weight, decode_program, encode_program, validate
from overwinter.worker.weights import MappedBlock, weight_tensors
from tests.model.tiny import make_program


def mapped(content):
    """Return a mapped block with this content."""
    fd = os.memfd_create("block")
    try:
        os.write(fd, content)
        return MappedBlock(fd, len(content))
    finally:
        os.close(fd)


def stored(exported):
    """Return the weights as a worker reads them from their blocks."""
    ready = package("f", exported.program, exported.weights)
    blocks = [mapped(bytes(ready.contents[block.address]())) for block in ready.manifest.blocks]
    places = {
        piece.weight: (at, piece.offset) for at, block in enumerate(ready.manifest.blocks) for piece in block.pieces
    }
    return weight_tensors(exported.program.weights, [places[at] for at in range(len(places))], blocks)


class Held(nn.Module):
    """One weight, and a function of it and of the input."""

    def __init__(self, weight, function):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


BASE = torch.arange(48.0).reshape(4, 12)
WEIGHTS = {
    "contiguous": (BASE, ()),
    "transposed": (BASE.t(), (1, 0)),
    "permuted": (BASE.reshape(2, 3, 8).permute(2, 0, 1), (1, 2, 0)),
    "sliced": (BASE[:, :5], ()),
    "sliced and transposed": (BASE[:, :5].t(), (1, 0)),
    "stepped": (BASE[:, ::3], ()),
    "expanded": (BASE[0].expand(3, 12), ()),
    "channels last": (BASE.reshape(2, 3, 2, 4).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
    "kernel of one": (BASE.reshape(4, 12, 1, 1).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
    "scalar": (torch.tensor(3.0), ()),
    "empty": (torch.empty(0, 4).t(), ()),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_keeps_the_order_of_its_dimensions_in_memory(name):
    weight, order = WEIGHTS[name]
    exported = export(Held(weight, lambda x, w: x + w.sum() + w.flatten()[:0].sum()), (torch.ones(2),))
    assert exported.program.weights[0].order == order
    (found,) = stored(exported)
    assert torch.equal(found, weight)
    assert name == "empty" or found.stride() == exported.weights[0].stride()
    has_gaps = name.startswith(("sliced", "stepped", "expanded", "empty"))
    assert has_gaps or found.stride() == weight.stride()


def test_a_view_that_needs_the_strides_of_a_transposed_weight_gives_the_same_bits():
    module = Held(BASE.t(), lambda x, w: x + w.t().view(-1))
    exported = export(module, (torch.ones(2, 48),))
    decoded = decode_program(encode_program(exported.program))
    validate(decoded)
    with torch.inference_mode():
        (given,) = compile_program(decoded)(stored(exported), (torch.ones(3, 48),))
    assert torch.equal(given, module(torch.ones(3, 48)))


def test_channels_last_network_answers_bit_for_bit_as_its_module_does():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.AdaptiveAvgPool2d(1))
    module = nn.Sequential(*layers, nn.Flatten()).eval().to(memory_format=torch.channels_last)
    example = torch.rand(2, 3, 20, 20).to(memory_format=torch.channels_last)
    exported = export(module, (example,))
    assert exported.program.weights[0].order == (0, 2, 3, 1)
    with torch.inference_mode():
        for batch in (1, 3):
            x = torch.rand(batch, 3, 20, 20)
            (given,) = compile_program(exported.program)(stored(exported), (x,))
            assert torch.equal(given, module(x))


def test_order_that_does_not_list_the_dimensions_is_refused():
    program = make_program([Call("aten.mul.Tensor", (Slot(1), Slot(0)), {}, (2,))])
    wrong = type(program)(
        **{name: getattr(program, name) for name in program.__struct_fields__}
        | {"weights": (Weight("w", "float32", (4,), (1,)),)}
    )
    with pytest.raises(ProgramError, match="order"):
        validate(wrong)
