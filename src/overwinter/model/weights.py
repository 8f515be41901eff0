"""Finds the weights of an exported graph and their layout in memory."""

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.errors import ProgramError

_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def weight_sources(exported: ExportedProgram) -> dict[str, tuple[str, torch.Tensor]]:
    """Return, for each placeholder that is not an input and each constant of an inlined graph, its name in the model
    and its tensor; raise ProgramError if a placeholder is not a tensor.
    """
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        if spec.target is None or spec.kind not in _KINDS:
            raise ProgramError(f"the model holds {spec.target or spec.arg}, which is not a tensor")
        stored = exported.state_dict if spec.target in exported.state_dict else exported.constants
        found[spec.arg.name] = (spec.target, stored[spec.target])
    # An export makes placeholders only for the constants of the outer graph.
    for node in exported.graph.find_nodes(op="get_attr"):
        constant = getattr(exported.graph_module, str(node.target))
        if isinstance(constant, torch.Tensor):
            found[node.name] = (str(node.target), constant)
    return found


def identity(tensor: torch.Tensor, name: str) -> object:
    """Return a key that is equal for two names of one tensor, unless the tensor is empty or not strided."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return name
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def dense(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a weight without gaps between its elements, and the order of its dimensions in memory if it is not the
    shape's.

    A weight with gaps becomes a copy with its dimensions in the same order; an expanded weight (with a stride of 0)
    becomes a copy in the order of its shape. Raise ProgramError for a weight that is not strided, or of an unsupported
    type.
    """
    if tensor.layout is not torch.strided or dtype_name(tensor.dtype) not in DTYPE_BYTES:
        raise ProgramError(
            f"weight {name!r} has the layout {tensor.layout} and the type {tensor.dtype}; only torch.strided tensors "
            f"of these types are supported: {', '.join(DTYPE_BYTES)}"
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    overlaps = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    if overlaps or not tensor.numel() or order == list(range(tensor.dim())):
        return tensor.contiguous(), ()
    stored = tensor.permute(order).contiguous()
    return stored.permute([order.index(dim) for dim in range(len(order))]), tuple(order)


def dtype_name(dtype: torch.dtype) -> str:
    """Return PyTorch's name of an element type."""
    return str(dtype).removeprefix("torch.")
