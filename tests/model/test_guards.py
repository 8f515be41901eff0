"""Operators with insufficient checks in PyTorch, at arguments for which they would access memory outside their tensors,
return uninitialized memory or crash the process.
"""

from types import SimpleNamespace

import pytest
import torch

from overwinter.model.compile import compile_program, resolve
from overwinter.model.export import export
from overwinter.model.guards import guarded
from overwinter.model.structure import Call, Slot
from tests.model.tiny import make_program

VALUES = torch.tensor([0.0, 1.0, 2.0, 3.0])
TABLE = torch.arange(15.0).reshape(5, 3)
TOKENS = torch.tensor([0, 1, 2, 3])
ROWS = torch.ones(6, 16)
MATRICES = torch.ones(2, 16, 16)
HISTC = "aten.histc.default"
BAG = "aten.embedding_bag.padding_idx"
GROUPS = "aten._grouped_mm.default"


def run(operator, *args, **kwargs):
    with torch.inference_mode():
        return guarded(operator, resolve(operator))(*args, **kwargs)


def bag(indices, offsets, mode=0, table=TABLE):
    return run(BAG, table, torch.tensor(indices), torch.tensor(offsets), False, mode, False, None, False, -1)


def test_within_bounds_the_operators_give_their_usual_results():
    assert torch.equal(run(HISTC, VALUES, bins=2, min=0, max=4), torch.tensor([2.0, 2.0]))
    assert torch.equal(bag([0, 1, 2, 3], [0, 3, 3])[0], torch.stack([TABLE[:3].sum(0), torch.zeros(3), TABLE[3]]))
    assert torch.equal(run(GROUPS, ROWS, MATRICES, torch.tensor([2, 6], dtype=torch.int32)), 16 * torch.ones(6, 16))


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (VALUES.half(), {"bins": 2051, "min": 0, "max": 4}),
        (VALUES.bfloat16(), {"bins": 511, "min": 0, "max": 4}),
        (VALUES, {"bins": (1 << 24) + 3, "min": 0, "max": 4}),
        (VALUES, {"bins": 4, "min": -3.4e38, "max": 3.4e38}),
        (VALUES, {"bins": 4, "min": 1e8, "max": 1e8 + 1}),
        (VALUES, {"bins": 4, "min": float("nan"), "max": 1}),
        (VALUES, {"bins": 4}),
    ],
)
def test_histograms_whose_bins_the_kernel_would_miss_are_refused(values, options):
    with pytest.raises(ValueError, match="histc takes"):
        run(HISTC, values, **options)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("offsets", [[0, -3], [0, 9], [1, 2], [0, 4, 2], [0, 1 << 40, 4], [-1, 4]])
def test_bags_outside_the_indices_are_refused(mode, offsets):
    with pytest.raises((ValueError, RuntimeError), match="offsets"):
        bag([0, 1, 2, 3], offsets, mode)


def test_bags_of_invalid_shapes_modes_and_indices_are_refused():
    with pytest.raises(ValueError, match="one-dimensional"):
        bag([[0, 1]], [0])
    with pytest.raises(ValueError, match="modes"):
        bag([0, 1], [0], 3)
    with pytest.raises(RuntimeError):
        bag([0, 9], [0])


def test_results_that_a_mode_of_bags_does_not_write_are_zero():
    _, bags, sizes, maxima = bag([0, 1, 2, 3], [0, 3])
    assert not any(result.any() for result in (bags, sizes, maxima))
    assert bag([0, 1, 2, 3], [0, 3], mode=1)[2].tolist() == [3, 1]
    assert bag([0, 1, 2, 3], [0, 3], mode=2)[3].tolist() == [[2, 2, 2], [3, 3, 3]]


@pytest.mark.parametrize("offsets", [[-1, 6], [4, 2], [2, 7], [2]])
def test_groups_outside_the_rows_are_refused(offsets):
    with pytest.raises(ValueError, match="_grouped_mm takes"):
        run(GROUPS, ROWS, MATRICES, torch.tensor(offsets, dtype=torch.int32))


def test_rows_of_no_group_are_zero():
    given = run(GROUPS, ROWS, MATRICES, torch.tensor([2, 4], dtype=torch.int32))
    assert torch.equal(given, torch.cat([16 * torch.ones(4, 16), torch.zeros(2, 16)]))


def test_programs_call_the_guarded_operators():
    run_program = compile_program(make_program([Call(HISTC, (Slot(1),), {"bins": 4}, (2,))]))
    with pytest.raises(ValueError, match="histc takes"):
        run_program([VALUES], [VALUES])


def lstm(params, states=None, bidirectional=False):
    states = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)) if states is None else states
    return run(
        "aten.lstm.input", torch.ones(5, 2, 3), states, params, len(params) > 2, 1, 0.0, False, bidirectional, False
    )


def test_a_recurrent_layer_may_have_outputs_smaller_than_its_cell_state():
    layer = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2).requires_grad_(False)
    states = (torch.zeros(4, 2, 2), torch.zeros(4, 2, 4))
    parameters = tuple(layer._flat_weights)
    given = run("aten.lstm.input", ROWS.view(2, 2, 24)[..., :3], states, parameters, True, 2, 0.0, False, True, False)
    assert torch.equal(given[0], layer(ROWS.view(2, 2, 24)[..., :3], states)[0])


GATES = (torch.ones(16, 3), torch.ones(16, 4))


def test_a_recurrent_layer_takes_only_states_and_parameters_of_its_sizes_and_datatype():
    assert lstm(GATES)[0].shape == (5, 2, 4)
    short = (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    for broken in (
        {"params": (torch.ones(16, 3), torch.ones(12, 4))},
        {"params": (torch.ones(16, 2), torch.ones(16, 4))},
        {"params": (*GATES, torch.ones(16), torch.ones(4))},
        {"params": GATES, "bidirectional": True},
        {"params": GATES, "states": short},
        {"params": GATES, "states": short[:1]},
        {"params": tuple(part.double() for part in GATES)},
    ):
        with pytest.raises(ValueError, match="recurrent layer"):
            lstm(**broken)


def test_batch_norm_needs_one_value_of_each_parameter_for_each_channel():
    norm = "aten._native_batch_norm_legit_no_training.default"
    values, right, short = torch.ones(2, 3, 4), torch.ones(3), torch.ones(2)
    assert torch.allclose(run(norm, values, None, None, right, right, 0.1, 1e-5)[0], torch.zeros(2, 3, 4))
    for at in range(4):
        lists = [short if at == place else right for place in range(4)]
        with pytest.raises(ValueError, match="batch norm"):
            run(norm, values, *lists, 0.1, 1e-5)


@pytest.mark.parametrize("norms", [torch.ones(1, 1), torch.ones(4), torch.ones(1, 3), torch.ones(4, 1).double()])
def test_weight_norm_needs_one_norm_for_each_row(norms):
    assert run("aten._weight_norm.default", torch.ones(4, 3), torch.ones(4, 1), 0).shape == (4, 3)
    with pytest.raises(ValueError, match="one norm"):
        run("aten._weight_norm.default", torch.ones(4, 3), norms, 0)


@pytest.mark.parametrize("mode", ["grid_sampler", "grid_sampler_2d"])
@pytest.mark.parametrize("modes", [(3, 0), (-1, 0), (0, 7), (0, -1)])
def test_a_grid_is_sampled_only_in_known_modes(mode, modes):
    with pytest.raises(ValueError, match="modes"):
        run(f"aten.{mode}.default", torch.ones(1, 1, 2, 2), torch.ones(1, 2, 2, 2), *modes, False)


def test_images_are_not_resized_by_a_scale_near_zero():
    image = torch.ones(1, 1, 4, 4)
    with pytest.raises(ValueError, match="scale"):
        run("aten.upsample_bicubic2d.default", image, (8, 8), False, 1e-30, 2.0)
    assert run("aten.upsample_bicubic2d.default", image, (8, 8), False, 2.0, 2.0).shape == (1, 1, 8, 8)


@pytest.mark.parametrize("name", ["div.Tensor_mode", "divide.Tensor_mode", "div.Scalar_mode"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_smallest_integer_is_not_divided_by_minus_one(name, dtype):
    lowest = torch.full((5, 2), torch.iinfo(dtype).min, dtype=dtype).t()
    other = -1 if "Scalar" in name else torch.full((5,), -1, dtype=dtype)
    with pytest.raises(ValueError, match="smallest integer"):
        run(f"aten.{name}", lowest, other, rounding_mode="trunc")
    assert run(f"aten.{name}", lowest + 1, other, rounding_mode="trunc").max() == torch.iinfo(dtype).max


def test_eigenvalues_are_computed_only_of_finite_numbers():
    with pytest.raises(ValueError, match="finite"):
        run("aten.linalg_eigvals.default", torch.full((5, 5), float("nan")))
    assert run("aten.linalg_eigvals.default", torch.eye(2)).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["median.dim", "nanmedian.dim"])
def test_the_median_of_an_expanded_tensor_of_one_number_is_that_number(name):
    assert run(f"aten.{name}", torch.tensor([1.5]).expand(2), 0)[0] == 1.5


@pytest.mark.parametrize(
    ("keys", "values", "shared"),
    [((0, 3), (0, 3), True), ((2, 4), (2, 12), True), ((4, 4), (4, 12), False), ((2, 4), (1, 4), True)],
)
def test_attention_needs_at_least_one_key_head_and_a_value_for_each_key(keys, values, shared):
    query, key, value = (torch.ones(2, heads, length, 8) for heads, length in ((4, 4), keys, values))
    with pytest.raises(ValueError, match="attention"):
        run("aten.scaled_dot_product_attention.default", query, key, value, enable_gqa=shared)


@pytest.mark.parametrize("name", ["binary_cross_entropy", "soft_margin_loss"])
def test_a_loss_needs_a_target_for_each_value_and_a_known_reduction(name):
    with pytest.raises(ValueError, match="target"):
        run(f"aten.{name}.default", torch.tensor(0.5), torch.ones(0), reduction=2)
    with pytest.raises(ValueError, match="reductions"):
        run(f"aten.{name}.default", torch.ones(2), torch.ones(2), reduction=-1)


def test_bags_need_offsets_for_their_indices():
    with pytest.raises(ValueError, match="offsets for its indices"):
        run(BAG, TABLE, TOKENS, TOKENS[:0], False, 0, False, None, False, -1)


@pytest.mark.parametrize(("name", "target"), [("multi_margin_loss", (0,)), ("multilabel_margin_loss", (0, 4))])
def test_a_loss_of_no_rows_is_refused(name, target):
    with pytest.raises(ValueError, match="at least one value"):
        run(f"aten.{name}.default", torch.ones(0, 4), torch.ones(target, dtype=torch.int64))


def test_weight_norm_needs_at_least_one_value():
    with pytest.raises(ValueError, match="at least one"):
        run("aten._weight_norm.default", torch.ones(0, 3), torch.ones(0, 1), 0)


@pytest.mark.parametrize(("dim", "norms"), [(1, (1, 3, 1)), (-1, ())])
def test_weight_norm_takes_norms_along_any_dimension(dim, norms):
    given = run("aten._weight_norm.default", torch.ones(4, 3, 2), torch.ones(norms), dim)
    assert torch.allclose(given, torch._weight_norm(torch.ones(4, 3, 2), torch.ones(norms), dim))


@pytest.mark.parametrize(
    ("weight", "sizes"),
    [(torch.ones(1).expand(4), (2, 4, 9)), (torch.ones(2), (2, 4, 9)), (torch.ones(8), (1, 8, 9)), (None, (2, 2, 18))],
)
def test_group_norm_takes_only_weights_and_sizes_that_fit_its_input(weight, sizes):
    norm, values = "aten.native_group_norm.default", torch.ones(2, 4, 3, 3)
    assert not run(norm, values, None, None, 2, 4, 9, 2, 1e-5)[0].any()
    with pytest.raises(ValueError, match="native_group_norm"):
        run(norm, values, weight, None, *sizes, 2, 1e-5)


def test_a_lazy_negation_of_booleans_is_refused():
    with pytest.raises(ValueError, match="truth"):
        run("aten._neg_view.default", torch.tensor([True]))


@pytest.mark.parametrize("weights", [torch.ones(1), torch.ones(4, dtype=torch.float64)])
def test_bags_need_one_weight_of_the_tables_datatype_for_each_index(weights):
    with pytest.raises(ValueError, match="one weight"):
        run(BAG, TABLE, TOKENS, torch.tensor([0, 2]), False, 0, False, weights, False, -1)


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize(("table", "offsets", "last"), [(TABLE, [0], True), (TABLE[:, :0], [0, 2], False)])
def test_results_that_no_bag_writes_are_zeros(mode, table, offsets, last):
    def unwritten(*args):
        bags = len(offsets) - last
        return torch.zeros(bags, table.shape[1]), torch.full((4,), 9), torch.full((bags + last,), 9), torch.zeros(0)

    operator = SimpleNamespace(_schema=resolve(BAG)._schema, _op=unwritten)
    _, bags, sizes, _ = guarded(BAG, operator)(table, TOKENS, torch.tensor(offsets), False, mode, False, None, last, -1)
    assert not bags.any()
    assert not sizes[len(offsets) - last :].any()


@pytest.mark.parametrize("target", [[4, -1, 0, 0], [1_000_000_000, -1, -1, -1], [-2, -1, -1, -1]])
def test_a_label_is_a_class_or_minus_one(target):
    loss = "aten.multilabel_margin_loss.default"
    assert run(loss, torch.zeros(1, 4), torch.tensor([[3, -1, 0, 0]])).item() == 0.75
    with pytest.raises(ValueError, match="targets from -1 to 3"):
        run(loss, torch.zeros(1, 4), torch.tensor([target]))


def test_a_failed_check_fails_a_run_without_the_operator_that_would_make_a_gpu_unusable():
    class Checked(torch.nn.Module):
        def forward(self, x):
            torch._assert_async(x.amin() > 0, "only what is above zero")
            return x + 1

    made = export(Checked(), (torch.ones(2),), {})
    with torch.inference_mode(), pytest.raises(RuntimeError, match="only what is above zero"):
        compile_program(made.program)([], [torch.zeros(2)])
    used = compile_program(made.program).__globals__.values()
    operators = [resolve(f"aten._assert_async.{overload}") for overload in ("msg", "default")]
    assert not [each for each in used if any(each is operator or each is operator._op for operator in operators)]
