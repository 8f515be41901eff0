"""What a program cannot contain: each refusal names the remedy, and most the line or the module, in one sentence."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.ao.quantization import quantize_dynamic
from torch.nn.attention.flex_attention import flex_attention

from overwinter.core.errors import ProgramError
from overwinter.model.compile import compile_program
from overwinter.model.export import export
from tests.model.held import Held

ROWS = torch.randn(3, 8, 4)


@torch.library.custom_op("forms::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


def repeated(self, x):
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))[1]


def flexible(self, x):
    return flex_attention(x, x, x)


def packed(self, x):
    return self.lstm(nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 8), batch_first=True))[1][0]


REFUSED = {
    r"while_loop.*held.*Python loop": (Held(repeated), ROWS),
    r"flex_attention.*held.*scaled_dot_product": (Held(flexible), torch.randn(2, 2, 16, 16)),
    r"packed sequences.*padded": (Held(packed, lstm=nn.LSTM(4, 4, batch_first=True)), ROWS),
    r"_unique2.*held.*nonzero_static": (Held(lambda self, x: torch.unique(x)), ROWS),
    r"rand_like.*held.*input": (Held(lambda self, x: x + torch.rand_like(x)), ROWS),
    r"_add_batch_dim.*batch dimension": (Held(lambda self, x: torch.vmap(lambda row: row @ row.t())(x)), ROWS),
    r"embedding_renorm_.*held.*max_norm": (
        Held(lambda self, x: self.table(x), table=nn.Embedding(10, 4, max_norm=1.0)),
        torch.randint(0, 10, (3, 8)),
    ),
    r"forms.double.*'forms'": (Held(lambda self, x: double(x)), ROWS),
}


@pytest.mark.parametrize("message", REFUSED)
def test_each_refusal_names_the_remedy_and_most_name_the_line(message, capfd):
    module, example = REFUSED[message]
    with pytest.raises(ProgramError, match=message) as refused:
        export(module, (example,))
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_module_is_named():
    inner = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    module = quantize_dynamic(nn.Sequential(nn.Linear(4, 4), inner), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ProgramError, match=r"module '0' is a .*quantized.*Linear; .* float"):
        export(module, (ROWS,))


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_is_named():
    with pytest.raises(ProgramError, match=r"module 'held' is scripted or traced"):
        export(Held(lambda self, x: self.held(x), held=torch.jit.script(nn.Linear(4, 4))), (ROWS,))


@pytest.mark.parametrize("scale", [lambda n: 0.9**n, lambda n: round(n / 3)])
def test_the_refusal_of_arithmetic_with_a_size_names_a_remedy_that_works(scale):
    class Scaled(nn.Module):
        def forward(self, x):
            return x * scale(x.shape[1])

    with pytest.raises(ProgramError, match=r"cannot apply it to a size.*use torch.tensor\(size\)"):
        export(Scaled(), (torch.rand(2, 6),), {"x": {0: "batch", 1: "n"}})

    class Tensors(nn.Module):
        def forward(self, x):
            return x * 0.9 ** torch.tensor(x.shape[1])

    program, weights = export(Tensors(), (torch.rand(2, 6),), {"x": {0: "batch", 1: "n"}})
    for x in (torch.rand(2, 6), torch.rand(3, 9)):
        assert torch.equal(compile_program(program)(weights, (x,))[0], Tensors()(x))
