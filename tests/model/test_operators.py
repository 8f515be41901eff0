"""The operator table, compared with the operators themselves."""

import pytest
import torch

from overwinter.model.compile import resolve
from overwinter.model.operators import (
    FAIL_FOR_SOME_VALUES,
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
    "aten._ctc_loss.default",
    "aten._pin_memory.default",
    "aten._reshape_alias.default",
    "aten._unsafe_index.Tensor",
    "aten.as_strided.default",
    "aten.bernoulli.p",
    "aten.dropout.default",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_strided.default",
    "aten.fractional_max_pool2d.default",
    "aten.from_file.default",
    "aten.lcm.default",
    "aten.linalg_ldl_solve.default",
    "aten.linalg_lu_solve.default",
    "aten.multinomial.default",
    "aten.new_empty.default",
    "aten.normal_.default",
    "aten.rand.default",
    "aten.randn_like.default",
    "aten.random_.default",
    "aten.record_stream.default",
    "aten.resize_.default",
    "aten.segment_reduce.default",
    "aten.set_.source_Tensor",
    "aten.t_.default",
    "aten.unsqueeze_.default",
]


def test_no_operator_is_in_two_lists():
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


def test_operators_that_fail_for_some_values_are_in_the_table():
    assert FAIL_FOR_SOME_VALUES <= TENSOR_OPERATORS


SINGULAR = torch.zeros(2, 2)
OUTSIDE = torch.tensor([7])
REFUSED_VALUES = {
    "aten.embedding.default": (SINGULAR, OUTSIDE),
    "aten.floor_divide.default": (OUTSIDE, torch.zeros(1, dtype=torch.int64)),
    "aten.gather.default": (torch.ones(3), 0, OUTSIDE),
    "aten.index.Tensor": (torch.ones(3), [OUTSIDE]),
    "aten.index_put.default": (torch.ones(3), [OUTSIDE], torch.ones(1)),
    "aten.index_select.default": (torch.ones(3), 0, OUTSIDE),
    "aten.linalg_inv.default": (SINGULAR,),
    "aten.linalg_cholesky.default": (-torch.eye(2),),
    "aten.nll_loss.default": (torch.ones(1, 3), OUTSIDE),
    "aten.max_unpool2d.default": (torch.ones(1, 1, 1), OUTSIDE[None, None], (2, 2)),
    "aten.one_hot.default": (OUTSIDE, 3),
    "aten.put.default": (torch.ones(3), OUTSIDE, torch.ones(1)),
    "aten.quantile.default": (torch.ones(3), torch.tensor(2.0)),
    "aten.remainder.Tensor": (OUTSIDE, torch.zeros(1, dtype=torch.int64)),
    "aten.scatter_add.default": (torch.ones(3), 0, OUTSIDE, torch.ones(1)),
    "aten.take.default": (torch.ones(3), OUTSIDE),
}


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_operators_that_are_listed_as_failing_for_some_values_raise_for_such_values(name):
    assert name in FAIL_FOR_SOME_VALUES
    with torch.inference_mode(), pytest.raises((RuntimeError, IndexError)):
        resolve(name)(*REFUSED_VALUES[name])


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


def test_symbolic_functions_are_allowed_and_compute_with_numbers():
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
    "aten.absolute.default": (torch.ones(3),),
    "aten.block_diag.default": ((torch.ones(3, 3),),),
    "aten.clip.default": (torch.ones(3), 0),
    "aten.column_stack.default": ((torch.ones(3, 1),),),
    "aten.cummax.default": (torch.ones(()), 0),
    "aten.diag.default": (torch.ones(3, 3),),
    "aten.diagflat.default": (torch.ones(1),),
    "aten.diagonal_scatter.default": (torch.ones(3, 3), torch.ones(3)),
    "aten.dstack.default": ((torch.ones(1, 1, 3),),),
    "aten.fft_fftn.default": (torch.ones(3, dtype=torch.complex64), None, ()),
    "aten.fft_fftshift.default": (torch.ones(1),),
    "aten.fix.default": (torch.ones(3, dtype=torch.int64),),
    "aten.linalg_matmul.default": (torch.ones(1), torch.ones(1)),
    "aten.linalg_matrix_power.default": (torch.ones(3, 3), 1),
    "aten.matrix_power.default": (torch.ones(3, 3), 1),
    "aten.pad_sequence.default": ((torch.ones(3),),),
    "aten.quantile.default": (torch.ones(1), torch.ones(())),
    "aten.repeat_interleave.self_Tensor": (torch.ones(1), torch.ones(1, dtype=torch.int64)),
    "aten.trapezoid.dx": (torch.ones(2),),
    "aten.vander.default": (torch.ones(1), 1),
}
"""Operators with arguments for which returning the argument itself would be the least work."""


@pytest.mark.parametrize("name", MAY_BE_MISTAKEN_FOR_VIEWS)
def test_operators_with_fresh_results_never_return_the_memory_of_their_argument(name):
    assert name in FRESH
    args = MAY_BE_MISTAKEN_FOR_VIEWS[name]
    source = args[0][0] if isinstance(args[0], tuple) else args[0]
    with torch.inference_mode():
        results = resolve(name)(*args)
    for result in results if isinstance(results, tuple | list) else [results]:
        assert result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
