"""The operators that a program may call, and what they do to memory.

The lists are explicit, because the `aten` namespace also has operators that read files, resize tensors, access other
memory than that of their arguments or expose uninitialized memory (`from_file`, `resize_`, `set_`, `as_strided`,
`empty`), and operators that draw random numbers. These are not listed. An operator that is random only for some values
of an argument is listed with the value that this argument must have (REQUIRED).

An operator that returns tensors is in exactly one of three lists:

* FRESH      its results share no memory with its arguments;
* VIEWS      its results may share memory with any of its tensor arguments;
* MUTATING   it writes to its first argument and returns it.

These lists tell, without PyTorch, whether a call could write to a weight or an input (`aliasing.py`). Weights are
mapped read-only, so such a call would crash the process.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple


def _aten(names: str) -> frozenset[str]:
    """Return full names from a list; a name without an overload means the overload `default`."""
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split())


_ELEMENTWISE = """
    abs absolute acos acosh add.Scalar add.Tensor addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh ceil celu clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min
    clamp_min.Tensor clip clip.Tensor complex copy copysign.Scalar copysign.Tensor cos cosh deg2rad digamma
    div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode divide.Scalar divide.Scalar_mode divide.Tensor
    divide.Tensor_mode elu erf erfc erfinv exp exp2 expm1 fill.Scalar fill.Tensor fix float_power.Scalar
    float_power.Tensor_Scalar float_power.Tensor_Tensor floor floor_divide floor_divide.Scalar fmod.Scalar
    fmod.Tensor frac frexp.Tensor gelu glu hardshrink hardsigmoid hardswish hardtanh hypot i0 igamma igammac
    ldexp.Tensor leaky_relu lerp.Scalar lerp.Tensor lgamma log log10 log1p log2 log_sigmoid log_sigmoid_forward
    logaddexp logaddexp2 logit maximum minimum mish mul.Scalar mul.Tensor multiply.Scalar multiply.Tensor mvlgamma
    nan_to_num neg negative nextafter polar polygamma pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prelu rad2deg
    reciprocal relu relu6 remainder.Scalar remainder.Scalar_Tensor remainder.Tensor round round.decimals rrelu rsqrt
    rsub.Scalar rsub.Tensor selu sgn sigmoid sign silu sin sinc sinh softplus softshrink special_airy_ai
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf
    special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc
    special_gammaincc special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr
    special_logit special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma special_psi
    special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_sinc
    special_spherical_bessel_j0 special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar
    special_xlogy special_xlogy.other_scalar special_xlogy.self_scalar special_zeta special_zeta.other_scalar
    special_zeta.self_scalar sqrt square sub.Scalar sub.Tensor subtract.Scalar subtract.Tensor tan tanh threshold
    true_divide.Scalar true_divide.Tensor trunc xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
"""

_COMPARISON = """
    __and__.Scalar __and__.Tensor __lshift__.Scalar __lshift__.Tensor __or__.Scalar __or__.Tensor __rshift__.Scalar
    __rshift__.Tensor __xor__.Scalar __xor__.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor
    bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not
    bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor
    bitwise_xor.Tensor bucketize.Scalar bucketize.Tensor eq.Scalar eq.Tensor fmax fmin ge.Scalar ge.Tensor
    greater.Scalar greater.Tensor greater_equal.Scalar greater_equal.Tensor gt.Scalar gt.Tensor heaviside isclose
    isfinite isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor isinf isnan isneginf isposinf isreal le.Scalar
    le.Tensor less.Scalar less.Tensor less_equal.Scalar less_equal.Tensor logical_and logical_not logical_or
    logical_xor lt.Scalar lt.Tensor ne.Scalar ne.Tensor not_equal.Scalar not_equal.Tensor searchsorted.Scalar
    searchsorted.Tensor signbit where.Scalar where.ScalarOther where.ScalarSelf where.self
"""

_REDUCTION = """
    all all.dim all.dims amax amin aminmax any any.dim any.dims argmax argmin argsort argsort.stable count_nonzero
    count_nonzero.dim_IntList cummax cummin cumprod cumsum cumulative_trapezoid.dx cumulative_trapezoid.x diff dist
    frobenius_norm.dim histc kthvalue linalg_matrix_norm linalg_matrix_norm.str_ord linalg_norm linalg_norm.ord_str
    linalg_vecdot linalg_vector_norm logcumsumexp logsumexp max max.dim max.other mean mean.dim median median.dim
    min min.dim min.other mode msort nanmean nanmedian nanmedian.dim nanquantile nanquantile.scalar nansum
    norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype nuclear_norm nuclear_norm.dim prod
    prod.dim_int quantile quantile.scalar renorm sort sort.stable special_logsumexp std std.correction std.dim
    std_mean std_mean.correction std_mean.dim sum sum.dim_IntList topk trace trapezoid.dx trapezoid.x trapz.dx
    trapz.x var var.correction var.dim var_mean var_mean.correction var_mean.dim vdot
"""

_LINEAR = """
    _grouped_mm addbmm addmm addmv addr baddbmm bilinear bmm cdist conv1d conv1d.padding conv2d conv2d.padding
    conv3d conv3d.padding conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution
    cosine_similarity cross dot embedding embedding_bag embedding_bag.padding_idx ger gru.input gru_cell inner kron
    linalg_cross linalg_matmul linalg_multi_dot linear lstm.input lstm_cell matmul mm mv outer pairwise_distance
    pdist rnn_relu.input rnn_relu_cell rnn_tanh.input rnn_tanh_cell scaled_dot_product_attention tensordot
"""

_LOSS = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
    hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss
"""

_DECOMPOSITION = """
    cholesky cholesky_inverse cholesky_solve det inverse linalg_cholesky linalg_cholesky_ex linalg_det linalg_eig
    linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lu linalg_lu_factor
    linalg_lu_factor_ex linalg_matrix_exp linalg_matrix_power linalg_pinv linalg_pinv.atol_rtol_float
    linalg_pinv.atol_rtol_tensor linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular
    linalg_svd linalg_svdvals logdet matrix_exp matrix_power pinverse qr slogdet svd triangular_solve
"""

_NORMALISATION = """
    _log_softmax _native_batch_norm_legit_no_training _safe_softmax _softmax _weight_norm batch_norm group_norm
    instance_norm layer_norm log_softmax.int native_channel_shuffle native_group_norm native_layer_norm rms_norm
    softmax.int special_log_softmax special_softmax
"""

_POOLING = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec
    _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    affine_grid_generator avg_pool1d avg_pool2d avg_pool3d col2im constant_pad_nd grid_sampler grid_sampler_2d
    grid_sampler_3d im2col max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices max_unpool2d max_unpool3d pad reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d upsample_bicubic2d upsample_bicubic2d.vec
    upsample_bilinear2d upsample_bilinear2d.vec upsample_linear1d upsample_linear1d.vec upsample_nearest1d
    upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec upsample_nearest3d upsample_nearest3d.vec
    upsample_trilinear3d upsample_trilinear3d.vec
"""

_MOVEMENT = """
    _to_copy block_diag cat clone column_stack concat concatenate diag diag_embed diagflat diagonal_scatter dstack
    flip fliplr flipud gather hstack index.Tensor index_add index_copy index_fill.int_Scalar index_fill.int_Tensor
    index_put index_reduce index_select linalg_vander masked_fill.Scalar masked_fill.Tensor masked_scatter
    nonzero_static one_hot pad_sequence put repeat repeat_interleave.Tensor repeat_interleave.self_Tensor
    repeat_interleave.self_int roll rot90 row_stack scatter.reduce scatter.src scatter.value scatter.value_reduce
    scatter_add scatter_reduce.two select_scatter slice_scatter stack take take_along_dim tril triu vander vstack
"""

_CREATION = """
    arange arange.start arange.start_step bartlett_window bartlett_window.periodic blackman_window
    blackman_window.periodic eye eye.m fft_fftfreq fft_rfftfreq full full_like hamming_window
    hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta hann_window
    hann_window.periodic kaiser_window kaiser_window.beta kaiser_window.periodic linspace logspace new_full new_ones
    new_zeros ones ones_like scalar_tensor tril_indices triu_indices zeros zeros_like
"""

_FOURIER = """
    fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift
    fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn istft stft
    stft.center
"""

FRESH: frozenset[str] = _aten(
    " ".join(
        (
            *(_ELEMENTWISE, _COMPARISON, _REDUCTION, _LINEAR, _LOSS, _DECOMPOSITION, _NORMALISATION),
            *(_POOLING, _MOVEMENT, _CREATION, _FOURIER),
        )
    )
)
"""Operators whose results share no memory with their arguments."""

VIEWS: frozenset[str] = _aten("""
    _conj _neg_view _unsafe_view adjoint alias atleast_1d atleast_1d.Sequence atleast_2d atleast_2d.Sequence
    atleast_3d atleast_3d.Sequence broadcast_tensors broadcast_to cartesian_prod chain_matmul channel_shuffle chunk
    conj conj_physical contiguous detach diagonal dsplit.array dsplit.int einsum expand expand_as flatten.using_ints
    hsplit.array hsplit.int imag linalg_diagonal mH mT matrix_H meshgrid meshgrid.indexing moveaxis.int
    moveaxis.intlist movedim.int movedim.intlist narrow numpy_T permute pixel_shuffle pixel_unshuffle positive ravel
    real reshape reshape_as resolve_conj resolve_neg select.int slice.Tensor split.Tensor split.sizes
    split_with_sizes squeeze squeeze.dim squeeze.dims sum_to_size swapaxes swapdims t tensor_split.indices
    tensor_split.sections tile to.device to.dtype to.dtype_layout to.other transpose.int type_as unbind.int
    unflatten.int unfold unsafe_chunk unsafe_split.Tensor unsafe_split_with_sizes unsqueeze view view.dtype view_as
    view_as_complex view_as_real vsplit.array vsplit.int
""")
"""Operators whose results may share memory with any tensor argument."""

MUTATING: frozenset[str] = _aten("""
    abs_ absolute_ acos_ acosh_ add_.Scalar add_.Tensor addbmm_ addcdiv_ addcmul_ addmm_ addmv_ addr_ arccos_
    arccosh_ arcsin_ arcsinh_ arctan2_ arctan_ arctanh_ asin_ asinh_ atan2_ atan_ atanh_ baddbmm_
    bitwise_and_.Scalar bitwise_and_.Tensor bitwise_left_shift_.Tensor bitwise_left_shift_.Tensor_Scalar
    bitwise_not_ bitwise_or_.Scalar bitwise_or_.Tensor bitwise_right_shift_.Tensor
    bitwise_right_shift_.Tensor_Scalar bitwise_xor_.Scalar bitwise_xor_.Tensor ceil_ celu_ clamp_ clamp_.Tensor
    clamp_max_ clamp_max_.Tensor clamp_min_ clamp_min_.Tensor clip_ clip_.Tensor copy_ copysign_.Scalar
    copysign_.Tensor cos_ cosh_ cumprod_ cumsum_ deg2rad_ digamma_ div_.Scalar div_.Scalar_mode div_.Tensor
    div_.Tensor_mode divide_.Scalar divide_.Scalar_mode divide_.Tensor divide_.Tensor_mode elu_ eq_.Scalar
    eq_.Tensor erf_ erfc_ erfinv_ exp2_ exp_ expm1_ fill_.Scalar fill_.Tensor fill_diagonal_ fix_ floor_
    floor_divide_.Scalar floor_divide_.Tensor fmod_.Scalar fmod_.Tensor frac_ ge_.Scalar ge_.Tensor gelu_ gt_.Scalar
    gt_.Tensor hardsigmoid_ hardswish_ hardtanh_ hypot_ index_add_ index_copy_ index_fill_.int_Scalar
    index_fill_.int_Tensor index_put_ index_reduce_ le_.Scalar le_.Tensor leaky_relu_ lerp_.Scalar lerp_.Tensor
    lgamma_ log10_ log1p_ log2_ log_ logical_and_ logical_not_ logical_or_ logical_xor_ logit_ lt_.Scalar lt_.Tensor
    masked_fill_.Scalar masked_fill_.Tensor masked_scatter_ mish_ mul_.Scalar mul_.Tensor multiply_.Scalar
    multiply_.Tensor nan_to_num_ ne_.Scalar ne_.Tensor neg_ negative_ pow_.Scalar pow_.Tensor put_ rad2deg_
    reciprocal_ relu6_ relu_ remainder_.Scalar remainder_.Tensor round_ round_.decimals rsqrt_ scatter_.reduce
    scatter_.src scatter_.value scatter_.value_reduce scatter_add_ scatter_reduce_.two selu_ sgn_ sigmoid_ sign_
    silu_ sin_ sinc_ sinh_ sqrt_ square_ sub_.Scalar sub_.Tensor subtract_.Scalar subtract_.Tensor tan_ tanh_
    threshold_ tril_ triu_ true_divide_.Scalar true_divide_.Tensor trunc_ xlogy_.Scalar_Other xlogy_.Tensor zero_
""")
"""Operators that write to their first argument and return it."""

TENSOR_OPERATORS: frozenset[str] = FRESH | VIEWS | MUTATING

FAIL_FOR_SOME_VALUES: frozenset[str] = _aten(f"""
    _grouped_mm binary_cross_entropy cross_entropy_loss div.Scalar_mode div.Tensor_mode div_.Scalar_mode
    div_.Tensor_mode divide.Scalar_mode divide.Tensor_mode divide_.Scalar_mode divide_.Tensor_mode embedding
    embedding_bag embedding_bag.padding_idx floor_divide floor_divide.Scalar floor_divide_.Scalar
    floor_divide_.Tensor fmod.Scalar fmod.Tensor fmod_.Scalar fmod_.Tensor frobenius_norm.dim gather histc
    index.Tensor index_add index_add_ index_copy index_copy_ index_fill.int_Scalar index_fill.int_Tensor
    index_fill_.int_Scalar index_fill_.int_Tensor index_put index_put_ index_reduce index_reduce_ index_select istft
    linalg_matrix_norm linalg_matrix_norm.str_ord linalg_norm linalg_norm.ord_str masked_scatter masked_scatter_
    max_unpool2d max_unpool3d multi_margin_loss multilabel_margin_loss mvlgamma nanquantile nanquantile.scalar
    nll_loss nll_loss2d nll_loss_nd nuclear_norm nuclear_norm.dim one_hot put put_ quantile quantile.scalar
    remainder.Scalar remainder.Scalar_Tensor remainder.Tensor remainder_.Scalar remainder_.Tensor
    repeat_interleave.Tensor repeat_interleave.self_Tensor scatter.reduce scatter.src scatter.value
    scatter.value_reduce scatter_.reduce scatter_.src scatter_.value scatter_.value_reduce scatter_add scatter_add_
    scatter_reduce.two scatter_reduce_.two searchsorted.Scalar searchsorted.Tensor special_multigammaln take
    take_along_dim {_DECOMPOSITION}
""")
"""Operators that fail for some values, such as an index out of range, a division by zero or a singular matrix."""

SIZE_OPERATORS: frozenset[str] = frozenset({"aten.sym_size.int", "aten.sym_numel.default"})
"""Operators that read a whole number out of a tensor's shape."""

ITEM_OPERATORS: frozenset[str] = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})
"""Operators that read the number from a tensor of one element."""

CHECKS: frozenset[str] = frozenset(
    {
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
"""Operators that return nothing, and fail the run if their first argument is false or out of bounds."""

NUMBER_CHECKS: frozenset[str] = frozenset(name for name in CHECKS if not name.startswith("aten._assert_async"))
"""Those of CHECKS that check a number; the others check a tensor."""

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
"""Functions of numbers that come from shapes or tensors, each with the Python function that computes it in a run."""


class Requirement(NamedTuple):
    """The only value that an argument may have. With others the operator may be random, or write to a weight."""

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
    "aten.rrelu.default": (Requirement(3, "training", False),),
    "aten.scaled_dot_product_attention.default": (Requirement(4, "dropout_p", 0.0),),
}
"""The arguments that must have one literal value. A call may omit one only if its default is this value."""


def is_allowed(name: str) -> bool:
    """Whether a program may call this operator or function of numbers."""
    return name in TENSOR_OPERATORS or is_symbolic(name) or name in CHECKS


def is_symbolic(name: str) -> bool:
    """Whether the result of this operator or function is a Python number rather than tensors."""
    return name in SIZE_OPERATORS or name in ITEM_OPERATORS or name in SYMBOLIC
