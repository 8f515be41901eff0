"""The operator table against the operators themselves."""

import pytest
import torch

from overwinter.model.compile import resolve
from overwinter.model.operators import (
    FRESH,
    MUTATING,
    REQUIRED,
    SIZE_OPERATORS,
    SYMBOLIC,
    TENSOR_OPERATORS,
    VIEWS,
    is_allowed,
    is_symbolic,
)

FORBIDDEN = [
    "aten._pin_memory.default",
    "aten._unsafe_index.Tensor",
    "aten.as_strided.default",
    "aten.bernoulli.p",
    "aten.dropout.default",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_strided.default",
    "aten.from_file.default",
    "aten.multinomial.default",
    "aten.new_empty.default",
    "aten.normal_.default",
    "aten.rand.default",
    "aten.randn_like.default",
    "aten.random_.default",
    "aten.record_stream.default",
    "aten.resize_.default",
    "aten.set_.source_Tensor",
    "aten.t_.default",
    "aten.unsqueeze_.default",
]


def test_each_operator_is_in_one_list():
    assert not FRESH & VIEWS
    assert not FRESH & MUTATING
    assert not VIEWS & MUTATING


@pytest.mark.parametrize("name", sorted(TENSOR_OPERATORS | SIZE_OPERATORS))
def test_operator_exists_and_does_to_memory_what_its_list_says(name):
    arguments, returns = resolve(name)._schema.arguments, resolve(name)._schema.returns
    written = [at for at, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]
    assert written == ([0] if name in MUTATING else [])
    if name in FRESH:
        assert not any(result.alias_info for result in returns)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_dangerous_operators_are_not_allowed(name):
    assert not is_allowed(name)
    resolve(name)


def test_required_arguments_have_the_names_and_places_of_the_schema():
    for name, requirements in REQUIRED.items():
        arguments = resolve(name)._schema.arguments
        for position, label, value in requirements:
            assert arguments[position].name == label
            if arguments[position].has_default_value():
                assert arguments[position].default_value == value


def test_functions_over_numbers_are_symbolic():
    assert all(is_symbolic(name) and is_allowed(name) for name in SYMBOLIC)
    assert SYMBOLIC["operator.floordiv"](7, 2) == 3
    assert SYMBOLIC["torch.sym_max"](7, 2) == 7


MAY_BE_MISTAKEN_FOR_VIEWS = {
    "aten.diff.default": (torch.ones(3), 1),
    "aten.repeat.default": (torch.ones(3), (1,)),
    "aten.repeat_interleave.self_int": (torch.ones(3), 1),
    "aten.pad.default": (torch.ones(3), (0, 0)),
    "aten.constant_pad_nd.default": (torch.ones(3), (0, 0)),
    "aten.roll.default": (torch.ones(3), (0,), (0,)),
    "aten.flip.default": (torch.ones(3), ()),
    "aten.rot90.default": (torch.ones(3, 3), 0),
    "aten.cat.default": ((torch.ones(3),),),
    "aten.hstack.default": ((torch.ones(3),),),
    "aten.vstack.default": ((torch.ones(1, 3),),),
    "aten.floor.default": (torch.ones(3, dtype=torch.int64),),
    "aten.round.default": (torch.ones(3, dtype=torch.int64),),
    "aten.nan_to_num.default": (torch.ones(3, dtype=torch.int64),),
    "aten.sum.dim_IntList": (torch.ones(3, 1), (1,)),
    "aten.mean.dim": (torch.ones(3, 1), (1,)),
    "aten.any.default": (torch.ones((), dtype=torch.bool),),
    "aten.cumsum.default": (torch.ones(()), 0),
    "aten.sort.default": (torch.ones(()),),
    "aten.max_pool1d.default": (torch.ones(1, 1, 3), 1),
    "aten.max_pool2d.default": (torch.ones(1, 1, 3, 3), 1),
    "aten.adaptive_avg_pool2d.default": (torch.ones(1, 1, 3, 3), (3, 3)),
    "aten.upsample_nearest2d.vec": (torch.ones(1, 1, 3, 3), (3, 3), None),
    "aten.tensordot.default": (torch.ones(3), torch.ones(3), (0,), (0,)),
    "aten.take_along_dim.default": (torch.ones(3), torch.zeros(3, dtype=torch.int64), 0),
    "aten.clamp.default": (torch.ones(3), 0),
    "aten.hardtanh.default": (torch.ones(3),),
    "aten.tril.default": (torch.ones(3, 3),),
    "aten._to_copy.default": (torch.ones(3),),
    "aten.concat.default": ((torch.ones(3),),),
    "aten.softmax.int": (torch.ones(1), 0),
    "aten.matmul.default": (torch.ones(1), torch.ones(1)),
    "aten.kron.default": (torch.ones(1), torch.ones(1)),
    "aten.slice_scatter.default": (torch.ones(3), torch.ones(3)),
    "aten.index_put.default": (torch.ones(3), (torch.zeros(1, dtype=torch.int64),), torch.ones(1)),
    "aten.fliplr.default": (torch.ones(1, 1),),
    "aten.angle.default": (torch.ones(3),),
}
"""Operators at arguments where giving back the argument would be the least work."""


@pytest.mark.parametrize("name", MAY_BE_MISTAKEN_FOR_VIEWS)
def test_fresh_operators_never_give_back_their_argument(name):
    assert name in FRESH
    args = MAY_BE_MISTAKEN_FOR_VIEWS[name]
    source = args[0][0] if isinstance(args[0], tuple) else args[0]
    with torch.inference_mode():
        results = resolve(name)(*args)
    for result in results if isinstance(results, tuple | list) else [results]:
        assert result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
