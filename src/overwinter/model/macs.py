"""Counts the multiply-accumulates of a call.

They are counted for the operators that dominate a model's arithmetic; all others count as zero, as in the tables
of the papers whose policies `core/policies.py` lists.
"""

from collections.abc import Callable, Sequence
from math import log2, prod
from typing import Any

Shape = tuple[int, ...]
Arguments = Sequence[Any]
"""A call's arguments, with each tensor replaced by its shape."""


def macs(operator: str, args: Arguments, output: Shape) -> int:
    """Return the multiply-accumulates of one call, from its arguments' shapes and the shape of its first result."""
    count = _COUNTS.get(operator)
    return count(args, output) if count else 0


def _rows_by_columns(at: int) -> Callable[[Arguments, Shape], int]:
    """Return the rule for products in which each element of the result sums over the last axis of argument `at`."""

    def count(args: Arguments, output: Shape) -> int:
        return prod(output) * int(args[at][-1])

    return count


def _summed_products(args: Arguments, _output: Shape) -> int:
    left: Shape = args[1]
    right: Shape = args[2]
    return prod(left) * right[-1]


def _convolution(args: Arguments, output: Shape) -> int:
    kernel: Shape = args[1]
    return prod(output) * prod(kernel[1:])


def _transposed_convolution(args: Arguments, _output: Shape) -> int:
    source: Shape = args[0]
    kernel: Shape = args[1]
    return prod(source) * prod(kernel[1:])


def _either_convolution(args: Arguments, output: Shape) -> int:
    return _transposed_convolution(args, output) if args[6] else _convolution(args, output)


def _attention(args: Arguments, _output: Shape) -> int:
    query: Shape = args[0]
    key: Shape = args[1]
    value: Shape = args[2]
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(args: Arguments, _output: Shape) -> int:
    source: Shape = args[0]
    weights: Sequence[Shape] = args[2]
    return prod(source[:-1]) * sum(prod(shape) for shape in weights if len(shape) == 2)


def _cell(args: Arguments, _output: Shape) -> int:
    source: Shape = args[0]
    weights: Sequence[Shape] = args[2:4]
    return prod(source[:-1]) * sum(prod(shape) for shape in weights)


def _einsum(args: Arguments, _output: Shape) -> int:
    """Count every combination of the indices if two or more tensors are multiplied; 0 for an equation with `...`."""
    equation, shapes = args[0].replace(" ", ""), args[1]
    if len(shapes) < 2 or "..." in equation:
        return 0
    sizes: dict[str, int] = {}
    for letters, shape in zip(equation.split("->")[0].split(","), shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            # A size of 1 is repeated to the size that another tensor has.
            if size != 1 or letter not in sizes:
                sizes[letter] = size
    return prod(sizes.values())


def _bags(args: Arguments, _output: Shape) -> int:
    table: Shape = args[0]
    indices: Shape = args[1]
    return prod(indices) * table[-1]


def _fourier(count: int | None, real: bool = False) -> Callable[[Arguments, Shape], int]:
    """Return the rule for a Fourier transform of the dimensions that the call names, or the last `count` (None: all).

    A transform of n points counts 2.5 n log2(n) multiply-accumulates, or half as many if its input or output is `real`.
    """

    def transformed(args: Arguments, output: Shape) -> int:
        points = [max(sizes) for sizes in zip(args[0], output, strict=True)]
        dims = args[2] if len(args) > 2 and args[2] is not None else range(-(count or len(points)), 0)
        lengths = [points[dim] for dim in (dims if isinstance(dims, Sequence) else [dims])]
        return int((1.25 if real else 2.5) * prod(points) * log2(max(1, prod(lengths))))

    return transformed


def _frames(args: Arguments, output: Shape) -> int:
    """Count a transform of `n_fft` real points for each frame."""
    length: int = args[1]
    return int(1.25 * prod(output) / output[-2] * length * log2(length))


_COUNTS: dict[str, Callable[[Arguments, Shape], int]] = {
    "aten._grouped_mm.default": _rows_by_columns(0),
    "aten.addbmm.default": _summed_products,
    "aten.addmm.default": _rows_by_columns(1),
    "aten.addmv.default": _rows_by_columns(1),
    "aten.baddbmm.default": _rows_by_columns(1),
    "aten.bmm.default": _rows_by_columns(0),
    "aten.conv1d.default": _convolution,
    "aten.conv1d.padding": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv2d.padding": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.conv3d.padding": _convolution,
    "aten.conv_transpose1d.default": _transposed_convolution,
    "aten.conv_transpose2d.input": _transposed_convolution,
    "aten.conv_transpose3d.input": _transposed_convolution,
    "aten.convolution.default": _either_convolution,
    "aten.dot.default": _rows_by_columns(0),
    "aten.einsum.default": _einsum,
    "aten.embedding_bag.default": _bags,
    "aten.embedding_bag.padding_idx": _bags,
    "aten.fft_fft.default": _fourier(1),
    "aten.fft_fft2.default": _fourier(2),
    "aten.fft_fftn.default": _fourier(None),
    "aten.fft_ifft.default": _fourier(1),
    "aten.fft_ifft2.default": _fourier(2),
    "aten.fft_ifftn.default": _fourier(None),
    "aten.fft_irfft.default": _fourier(1, real=True),
    "aten.fft_irfft2.default": _fourier(2, real=True),
    "aten.fft_irfftn.default": _fourier(None, real=True),
    "aten.fft_rfft.default": _fourier(1, real=True),
    "aten.fft_rfft2.default": _fourier(2, real=True),
    "aten.fft_rfftn.default": _fourier(None, real=True),
    "aten.gru.input": _recurrent,
    "aten.gru_cell.default": _cell,
    "aten.inner.default": _rows_by_columns(0),
    "aten.linear.default": _rows_by_columns(1),
    "aten.lstm.input": _recurrent,
    "aten.lstm_cell.default": _cell,
    "aten.matmul.default": _rows_by_columns(0),
    "aten.mm.default": _rows_by_columns(0),
    "aten.mv.default": _rows_by_columns(0),
    "aten.rnn_relu.input": _recurrent,
    "aten.rnn_relu_cell.default": _cell,
    "aten.rnn_tanh.input": _recurrent,
    "aten.rnn_tanh_cell.default": _cell,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.stft.center": _frames,
    "aten.stft.default": _frames,
}
