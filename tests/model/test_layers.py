"""Layers: the calls of each module, and their cost."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from overwinter.model.export import export
from overwinter.model.layers import spans
from overwinter.model.macs import macs


def test_spans_cover_all_calls_and_unknown_paths_join_a_neighbour():
    assert spans([None, "a", "a", None, "b", "a"]) == [("a", 0, 4), ("b", 4, 5), ("a", 5, 6)]
    assert spans([None, None]) == [("", 0, 2)]
    assert spans([]) == []


@given(st.lists(st.none() | st.sampled_from("abc")))
def test_spans_are_unbroken_and_differ_from_their_neighbours(paths):
    found = spans(paths)
    assert [index for _, start, stop in found for index in range(start, stop)] == list(range(len(paths)))
    assert all(one[0] != other[0] for one, other in pairwise(found))


def test_layers_of_a_model_have_paths_costs_and_output_bytes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            self.head = nn.Linear(8, 5)

        def forward(self, image):
            return self.head(self.features(image).mean((2, 3)))

    program, _ = export(Net(), (torch.randn(4, 3, 10, 10),))
    table = {layer.path: layer for layer in program.layers}
    assert list(table) == ["features.0", "features.1", "", "head"]
    assert table["features.0"].macs == 8 * 8 * 8 * 3 * 3 * 3
    assert table["features.0"].weight_bytes == (8 * 3 * 3 * 3 + 8) * 4
    assert table["features.0"].output_bytes == 8 * 8 * 8 * 4
    assert table[""].output_bytes == 8 * 4
    assert table["head"].macs == 40
    assert table["head"].output_bytes == 5 * 4
    assert sum(layer.weight_bytes for layer in program.layers) == sum(weight.nbytes for weight in program.weights)


def test_a_shared_weight_counts_only_where_it_is_first_used():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    program, weights = export(Tied(), (torch.randn(2, 4),))
    assert len(weights) == 1
    assert [(layer.path, layer.weight_bytes) for layer in program.layers] == [("first", 64), ("second", 0)]


def test_the_output_bytes_of_a_layer_include_values_that_skip_it():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.body = nn.Linear(4, 4)

        def forward(self, x):
            stem = self.stem(x)
            return stem + self.body(stem)

    program, _ = export(Residual(), (torch.randn(2, 4),))
    assert [(layer.path, layer.output_bytes) for layer in program.layers] == [("stem", 16), ("body", 32), ("", 16)]


COUNTS = {
    "aten.linear.default": (((2, 7, 4), (5, 4), (5,)), (2, 7, 5), 2 * 7 * 5 * 4),
    "aten.matmul.default": (((2, 7, 4), (4, 5)), (2, 7, 5), 2 * 7 * 5 * 4),
    "aten.addmm.default": (((5,), (7, 4), (4, 5)), (7, 5), 7 * 5 * 4),
    "aten.addbmm.default": (((7, 5), (3, 7, 4), (3, 4, 5)), (7, 5), 3 * 7 * 5 * 4),
    "aten.bmm.default": (((3, 7, 4), (3, 4, 5)), (3, 7, 5), 3 * 7 * 5 * 4),
    "aten.conv2d.default": (((1, 8, 9, 9), (16, 4, 3, 3)), (1, 16, 7, 7), 16 * 7 * 7 * 4 * 9),
    "aten.conv_transpose2d.input": (((1, 8, 5, 5), (8, 3, 2, 2)), (1, 3, 10, 10), 8 * 25 * 3 * 4),
    "aten.scaled_dot_product_attention.default": (
        ((1, 2, 7, 4), (1, 2, 9, 4), (1, 2, 9, 4)),
        (1, 2, 7, 4),
        2 * 7 * 9 * 8,
    ),
    "aten.lstm.input": (((1, 7, 4), [], [(20, 4), (20, 5), (20,), (20,)]), (1, 7, 5), 7 * 20 * 9),
    "aten.rnn_relu_cell.default": (((2, 4), (2, 5), (5, 4), (5, 5)), (2, 5), 2 * 5 * (4 + 5)),
    "aten.einsum.default": (("bij,bjk->bik", [(3, 7, 4), (3, 4, 5)]), (3, 7, 5), 3 * 7 * 4 * 5),
    "aten._grouped_mm.default": (((9, 4), (3, 4, 5), (3,)), (9, 5), 9 * 4 * 5),
    "aten.embedding_bag.padding_idx": (((10, 4), (7,), (3,)), (3, 4), 7 * 4),
    "aten.fft_fft.default": (((3, 8),), (3, 8), 5 * 3 * 8 * 3 // 2),
    "aten.fft_rfft2.default": (((3, 8, 4), None, [-2, -1]), (3, 8, 3), 5 * 3 * 32 * 5 // 4),
    "aten.fft_fftn.default": (((3, 8, 4), None, [1]), (3, 8, 4), 5 * 96 * 3 // 2),
    "aten.stft.center": (((2, 64), 16), (2, 9, 17), 5 * 2 * 17 * 16 * 4 // 4),
    "aten.relu.default": (((2, 7),), (2, 7), 0),
}


def test_multiply_accumulates_are_counted_for_each_kind_of_operator():
    for operator, (args, output, count) in COUNTS.items():
        assert macs(operator, args, output) == count, operator


def test_a_size_of_one_that_einsum_broadcasts_counts_at_its_broadcast_size():
    for shapes in ([(3, 7, 4), (1, 4, 5)], [(1, 7, 4), (3, 4, 5)]):
        assert macs("aten.einsum.default", ("bij,bjk->bik", shapes), (3, 7, 5)) == 3 * 7 * 4 * 5
