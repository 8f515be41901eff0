"""Which operators may a program call, and what do they do to memory?

The lists are explicit: the `aten` namespace also holds operators that read files, resize, alias foreign memory
or show memory that nobody wrote (`from_file`, `set_`, `resize_`, `as_strided`, `empty`), and operators that draw random
numbers. None of these is listed. An operator on tensors is in exactly one of three lists:

* FRESH      its results share no memory with its arguments;
* VIEWS      its results may share memory with any of its tensor arguments;
* MUTATING   it writes to its first argument and returns it.

From these follows, without PyTorch, whether a call could write to a weight or an input (`aliasing.py`): weights are
mapped read-only, so such a call would kill the process that makes it.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple


def _aten(names: str) -> frozenset[str]:
    """Full names from a list; one with no overload means `default`."""
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split())


_ELEMENTWISE = """
    abs acos acosh add.Scalar add.Tensor addcdiv addcmul angle asin asinh atan atan2 atanh ceil celu clamp
    clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor complex copy cos cosh div.Scalar
    div.Scalar_mode div.Tensor div.Tensor_mode elu erf erfc erfinv exp exp2 expm1 float_power.Tensor_Scalar floor
    floor_divide floor_divide.Scalar fmod.Scalar fmod.Tensor frac gelu glu hardshrink hardsigmoid hardswish hardtanh
    hypot leaky_relu lerp.Scalar lerp.Tensor log log10 log1p log2 log_sigmoid logaddexp maximum minimum mish
    mul.Scalar mul.Tensor nan_to_num neg polar pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prelu reciprocal relu
    relu6 remainder.Scalar remainder.Tensor round round.decimals rsqrt rsub.Scalar rsub.Tensor selu sgn sigmoid sign
    silu sin sinh softplus softshrink sqrt square sub.Scalar sub.Tensor tan tanh threshold trunc xlogy.Tensor
"""

_COMPARISON = """
    __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Tensor bitwise_and.Scalar bitwise_and.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_not bitwise_or.Scalar bitwise_or.Tensor bitwise_right_shift.Tensor_Scalar
    bitwise_xor.Scalar bitwise_xor.Tensor eq.Scalar eq.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor isfinite
    isin.Tensor_Tensor isinf isnan le.Scalar le.Tensor logical_and logical_not logical_or logical_xor lt.Scalar
    lt.Tensor ne.Scalar ne.Tensor where.Scalar where.ScalarOther where.ScalarSelf where.self
"""

_REDUCTION = """
    all all.dim amax amin any any.dim argmax argmin argsort argsort.stable count_nonzero count_nonzero.dim_IntList
    cumprod cumsum diff kthvalue linalg_norm linalg_vector_norm logcumsumexp logsumexp max max.dim max.other mean
    mean.dim median.dim min min.dim min.other norm.Scalar norm.ScalarOpt_dim prod prod.dim_int sort sort.stable std
    std.correction std.dim sum sum.dim_IntList topk var var.correction var.dim var_mean.correction var_mean.dim
"""

_LINEAR = """
    addbmm addmm addmv addr baddbmm bilinear bmm cdist conv1d conv1d.padding conv2d conv2d.padding conv3d
    conv3d.padding conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cosine_similarity cross
    dot embedding gru.input gru_cell inner kron linalg_cross linear lstm.input lstm_cell matmul mm mv outer
    pairwise_distance rnn_relu.input rnn_tanh.input rnn_tanh_cell scaled_dot_product_attention tensordot
"""

_NORMALISATION = """
    _log_softmax _native_batch_norm_legit_no_training _softmax _weight_norm batch_norm group_norm instance_norm
    layer_norm log_softmax.int native_group_norm native_layer_norm rms_norm softmax.int
"""

_POOLING = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec
    _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d
    col2im constant_pad_nd grid_sampler im2col max_pool1d max_pool2d max_pool2d_with_indices max_pool3d pad
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d upsample_bicubic2d upsample_bicubic2d.vec
    upsample_bilinear2d upsample_bilinear2d.vec upsample_linear1d upsample_linear1d.vec upsample_nearest1d
    upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec upsample_nearest3d upsample_nearest3d.vec
    upsample_trilinear3d upsample_trilinear3d.vec
"""

_MOVEMENT = """
    _to_copy cat clone concat concatenate diag_embed flip fliplr flipud gather hstack index.Tensor index_add
    index_copy index_fill.int_Scalar index_put index_select masked_fill.Scalar masked_fill.Tensor masked_scatter
    one_hot repeat repeat_interleave.self_int roll rot90 scatter.src scatter.value scatter_add scatter_reduce.two
    select_scatter slice_scatter stack take_along_dim tril triu vstack
"""

_CREATION = """
    arange arange.start arange.start_step eye eye.m full full_like hann_window hann_window.periodic linspace new_full
    new_ones new_zeros ones ones_like scalar_tensor tril_indices triu_indices zeros zeros_like
"""

_FOURIER = "fft_fft fft_fft2 fft_ifft fft_ifft2 fft_irfft fft_rfft istft stft stft.center"

FRESH: frozenset[str] = _aten(
    " ".join(
        (
            *(_ELEMENTWISE, _COMPARISON, _REDUCTION, _LINEAR, _NORMALISATION),
            *(_POOLING, _MOVEMENT, _CREATION, _FOURIER),
        )
    )
)
"""Operators whose results share no memory with their arguments."""

VIEWS: frozenset[str] = _aten("""
    _reshape_alias _unsafe_view adjoint alias broadcast_tensors broadcast_to channel_shuffle chunk contiguous detach
    diagonal einsum expand expand_as flatten.using_ints hsplit.int imag mT meshgrid meshgrid.indexing movedim.int
    movedim.intlist narrow permute pixel_shuffle pixel_unshuffle ravel real reshape reshape_as select.int slice.Tensor
    split.Tensor split.sizes split_with_sizes squeeze squeeze.dim squeeze.dims swapaxes swapdims t
    tensor_split.indices tensor_split.sections tile to.device to.dtype to.dtype_layout to.other transpose.int type_as
    unbind.int unflatten.int unfold unsqueeze view view.dtype view_as view_as_complex view_as_real vsplit.int
""")
"""Operators whose results may share memory with any tensor argument."""

MUTATING: frozenset[str] = _aten("""
    abs_ add_.Scalar add_.Tensor addcdiv_ addcmul_ addmm_ baddbmm_ bitwise_and_.Tensor bitwise_not_ bitwise_or_.Tensor
    ceil_ celu_ clamp_ clamp_max_ clamp_min_ copy_ cos_ cumsum_ div_.Scalar div_.Tensor elu_ erf_ exp_ fill_.Scalar
    fill_.Tensor floor_ hardsigmoid_ hardswish_ hardtanh_ index_add_ index_copy_ index_fill_.int_Scalar index_put_
    leaky_relu_ log_ logical_and_ logical_not_ logical_or_ masked_fill_.Scalar masked_fill_.Tensor masked_scatter_
    mish_ mul_.Scalar mul_.Tensor nan_to_num_ neg_ pow_.Scalar pow_.Tensor reciprocal_ relu6_ relu_ round_ rsqrt_
    scatter_.src scatter_.value scatter_add_ selu_ sigmoid_ silu_ sin_ sqrt_ square_ sub_.Scalar sub_.Tensor tanh_
    threshold_ tril_ triu_ zero_
""")
"""Operators that write to their first argument and return it."""

TENSOR_OPERATORS: frozenset[str] = FRESH | VIEWS | MUTATING

SIZE_OPERATORS: frozenset[str] = frozenset({"aten.sym_size.int", "aten.sym_numel.default"})
"""Operators that read a whole number out of a tensor's shape."""

ITEM_OPERATORS: frozenset[str] = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})
"""Operators that read the number in a tensor of one element."""

CHECKS: frozenset[str] = frozenset(
    {
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
"""Operators that give nothing and fail the run unless their first argument is as it should be."""

NUMBER_CHECKS: frozenset[str] = frozenset(name for name in CHECKS if not name.startswith("aten._assert_async"))
"""Those of them that look at a number; the others look at a tensor."""

SYMBOLIC: dict[str, Callable[..., Any]] = {
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.trunc": math.trunc,
    "operator.add": operator.add,
    "operator.and_": operator.and_,
    "operator.eq": operator.eq,
    "operator.floordiv": operator.floordiv,
    "operator.ge": operator.ge,
    "operator.gt": operator.gt,
    "operator.le": operator.le,
    "operator.lt": operator.lt,
    "operator.mod": operator.mod,
    "operator.mul": operator.mul,
    "operator.ne": operator.ne,
    "operator.neg": operator.neg,
    "operator.or_": operator.or_,
    "operator.sub": operator.sub,
    "operator.truediv": operator.truediv,
    "torch.sym_float": float,
    "torch.sym_int": int,
    "torch.sym_ite": lambda truth, first, second: first if truth else second,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_not": operator.not_,
    "torch.sym_sqrt": math.sqrt,
}
"""Functions over the numbers that come from shapes or tensors, with what computes them at run time."""


class Requirement(NamedTuple):
    """The only value that an argument may have, where another would make the operator random or write to a weight."""

    position: int
    name: str
    value: bool | float | None


_IN_EVALUATION = (Requirement(6, "train", False),)

REQUIRED: dict[str, tuple[Requirement, ...]] = {
    "aten.batch_norm.default": (Requirement(5, "training", False),),
    "aten.gru.input": _IN_EVALUATION,
    "aten.instance_norm.default": (Requirement(3, "running_mean", None), Requirement(4, "running_var", None)),
    "aten.lstm.input": _IN_EVALUATION,
    "aten.rnn_relu.input": _IN_EVALUATION,
    "aten.rnn_tanh.input": _IN_EVALUATION,
    "aten.scaled_dot_product_attention.default": (Requirement(4, "dropout_p", 0.0),),
}
"""Arguments that must be one literal; left out, they have that value or the call is not complete."""


def is_allowed(name: str) -> bool:
    """Whether a program may call this operator or symbolic function."""
    return name in TENSOR_OPERATORS or is_symbolic(name) or name in CHECKS


def is_symbolic(name: str) -> bool:
    """Whether its result is a Python number rather than tensors."""
    return name in SIZE_OPERATORS or name in ITEM_OPERATORS or name in SYMBOLIC
