"""The remedies for models that a program cannot represent, and checks and settings of a model for its export.

For the deployer's side only. Each message of a refusal is one sentence: what is refused and, where they are known, the
line or the module that causes it, and the remedy.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from overwinter.core.errors import ProgramError

_RANDOM = "a program cannot draw random numbers; take them as an input"
_SIZED_BY_VALUES = (
    "its result's size depends on values; keep the full size and a mask, with torch.where or torch.nonzero_static"
)
_RAW_MEMORY = "it uses raw strides or uninitialised memory; use reshape, slices, unfold or torch.zeros"
_PACKED = "sizes of packed sequences depend on values; give padded inputs and a mask"
_QUANTIZED = (
    "packed quantized weights are opaque; deploy the float model, or keep int8 weights and their scales as buffers and "
    "multiply them in forward()"
)
_LOOPS = "a program has no loops; use a Python loop with a fixed number of steps"

_OPERATOR_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"rand|randn|randint|randperm|bernoulli|multinomial|normal|uniform|exponential|poisson|rrelu", _RANDOM),
    (r".*dropout", "it draws random numbers, which a program cannot do; call it with training=False"),
    (r"fractional_max_pool", "it draws random numbers in evaluation mode too; use max_pool or adaptive_max_pool"),
    (r"nonzero|unique|_unique|masked_select|bincount|argwhere|combinations", _SIZED_BY_VALUES),
    (r"where\.default", _SIZED_BY_VALUES),
    (r"as_strided|empty|new_empty|resize|set_|_reshape_alias", _RAW_MEMORY),
    (r"_pack_padded|_pad_packed|(lstm|gru|rnn_tanh|rnn_relu)\.data", _PACKED),
    (r"_add_batch_dim|_remove_batch_dim|_vmap", "a program has no torch.vmap; use an explicit batch dimension"),
    (
        r"ctc_loss|segment_reduce|.*lu_solve|.*ldl_|.*_polynomial_",
        "PyTorch does not check its arguments enough; use other operators",
    ),
    (
        r"flex_attention",
        "use torch.nn.functional.scaled_dot_product_attention, for a transformers model attn_implementation='sdpa'",
    ),
    (
        r"embedding_renorm_",
        "max_norm writes to the weights in each call; apply torch.renorm to them once, and set max_norm to None",
    ),
    (r"while_loop|scan|map|associative_scan", _LOOPS),
    (r"(pow|round)$", "a program cannot apply it to a size; use torch.tensor(size)"),
)
"""The remedies for operators, each by a pattern for the beginning of a name without its namespace."""

_FAILURE_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"pack_padded_sequence|pad_packed_sequence|PackedSequence", _PACKED),
    (r"nested_tensor", "give padded inputs and a mask in place of nested tensors"),
)
"""The remedies for failed exports, each by a pattern for a part of the message."""


def operator_remedy(operator: str) -> str:
    """Return the remedy for a refused operator, as the end of a sentence; empty if none is known."""
    namespace, _, name = operator.rpartition("predispatch.")[2].partition(".")
    if name and namespace.startswith("quantized"):
        return f"; {_QUANTIZED}"
    if name and namespace not in ("aten", "builtins", "math", "operator", "torch"):
        return f"; a node has no operators of {namespace!r}, only PyTorch's own"
    bare = name or namespace
    return next((f"; {remedy}" for pattern, remedy in _OPERATOR_REMEDIES if re.match(pattern, bare)), "")


def failure_remedy(failure: str) -> str:
    """Return the remedy for a failed export with this text, as the end of a sentence; empty if none is known."""
    return next((f"; {remedy}" for pattern, remedy in _FAILURE_REMEDIES if re.search(pattern, failure)), "")


def check_module(module: torch.nn.Module) -> None:
    """Raise ProgramError for a module with code or weights that an export cannot represent."""
    for path, part in module.named_modules():
        where = f"module {path!r}" if path else "the model"
        if isinstance(part, torch.jit.ScriptModule):
            raise ProgramError(f"{where} is scripted or traced; deploy the Python module that it was made from")
        packed = any(isinstance(held, torch.ScriptObject) for held in vars(part).values())
        kind = type(part)
        if packed or re.match(r"torch\.(ao\.)?nn\.(intrinsic\.)?quantized\.", f"{kind.__module__}."):
            raise ProgramError(f"{where} is a {kind.__module__}.{kind.__qualname__}; {_QUANTIZED}")


@contextmanager
def no_cache(module: torch.nn.Module) -> Iterator[None]:
    """In this block a `transformers` model returns no key-value cache, which is not a tensor. Its configuration's
    `use_cache` is restored afterwards.
    """
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    before = [(config, config.use_cache) for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value
