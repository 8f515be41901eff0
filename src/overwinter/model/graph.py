"""Removes from an exported graph what a program does not need.

Copies without an effect are dropped, and so are calls with unused results, unless they write in place. Some operators
that a program may not call are replaced by equivalent ones. Assertions stay, except those on the metadata of tensors
(such as their types), which are the same in each run. Assertions that depend only on sizes of inputs are moved to the
start.
"""

import operator
from pathlib import Path
from textwrap import shorten
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from overwinter.core.errors import ProgramError
from overwinter.model.guards import guarded
from overwinter.model.operators import CHECKS, ITEM_OPERATORS, MUTATING, VIEWS, is_allowed, is_symbolic
from overwinter.model.remedies import operator_remedy

MAX_LINE = 300
"""The most characters of a source line in a message."""

SAME_MEMORY = "overwinter_same_memory"
"""The metadata key under which a node lists the values of removed calls that were equal to its own value."""

_CONVERSION = "aten.to.dtype"
_FRESH_COPY = "aten.lift_fresh_copy.default"
_IDENTITIES = frozenset(
    {
        "aten.alias.default",
        "aten.detach.default",
        "aten.detach_.default",
        "aten.lift_fresh.default",
        _FRESH_COPY,
    }
)
_PLAIN_FORMATS = (torch.contiguous_format, torch.preserve_format)
_DROPOUTS = frozenset(
    f"aten.{kind}dropout{suffix}.default"
    for kind in ("", "feature_", "alpha_", "feature_alpha_")
    for suffix in ("", "_")
)
_NESTING = frozenset({"cond", "wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""The operators whose nested graph can become part of a program (nested.py)."""
_ATEN = torch.ops.aten
_REPLACEMENTS: dict[str, tuple[torch._ops.OpOverload, int]] = {
    "aten._reshape_alias.default": (_ATEN.reshape.default, 2),
    "aten.empty.memory_format": (_ATEN.zeros.default, 1),
    "aten.empty_like.default": (_ATEN.zeros_like.default, 1),
    "aten.instance_norm.default": (_ATEN.batch_norm.default, 9),
    "aten.new_empty.default": (_ATEN.new_zeros.default, 2),
    "transformers.grouped_mm_fallback.default": (_ATEN._grouped_mm.default, 3),
}
"""For operators that a program may not call, or only with other arguments: the substitute, and the number of arguments
that it takes.

Uninitialised memory becomes zeros. An instance norm with given statistics is a batch norm. For a grouped matrix
multiplication `transformers` calls PyTorch's operator at run time, and a substitute of its own during an export.
"""
_METADATA_CHECK = "aten._assert_tensor_metadata.default"
_FUNCTIONAL_CHECKS = {
    "aten._functional_assert_async.msg": "aten._assert_async.msg",
    "aten._functional_assert_scalar.default": "aten._assert_scalar.default",
    "aten._functional_sym_constrain_range.default": "aten.sym_constrain_range.default",
    "aten._functional_sym_constrain_range_for_size.default": "aten.sym_constrain_range_for_size.default",
}
"""The plain form of each check that passes a token through as its last argument to keep its position."""

_SAME_TENSOR = _IDENTITIES - {_FRESH_COPY} | _DROPOUTS | {"operator.getitem"}
"""Other calls that may return their first argument or a view of it."""

_TAKEN_OUT = _IDENTITIES | _DROPOUTS | _FUNCTIONAL_CHECKS.keys() | {_METADATA_CHECK}


def operator_name(target: object) -> str:
    """Return the full name of a node's operator: `aten.linear.default`, `operator.mul`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = getattr(target, "__module__", None) or ""
    name = f"{module.removeprefix('_')}.{getattr(target, '__name__', target)}"
    # The function that PyTorch offers as torch.sym_sqrt calls itself so.
    return "torch.sym_sqrt" if name == "torch._sym_sqrt" else name


def required_parameters(target: object) -> set[str]:
    """Return the parameters of an operator that have no default: they may be None, but may not be left out."""
    if not isinstance(target, torch._ops.OpOverload):
        return set()
    return {argument.name for argument in target._schema.arguments if not argument.has_default_value()}


def simplify(module: GraphModule) -> list[Node]:
    """Return the calls of the graph that a program needs, in the program's order; the graph is changed in place."""
    _replace(module)
    written = _written(module)
    for node in _calls(module):
        name = operator_name(node.target)
        if name == _METADATA_CHECK:
            module.graph.erase_node(node)
        elif name in _FUNCTIONAL_CHECKS:
            _without_token(node, _FUNCTIONAL_CHECKS[name])
        elif name == _FRESH_COPY and node in written:
            node.target = torch.ops.aten.clone.default
        elif name == _CONVERSION and node in written and _returns_copy(node):
            # Unlike the conversion, which may return its argument, this operator counts as one that never does.
            node.target, node.args, node.kwargs = _ATEN._to_copy.default, node.args[:1], {"dtype": node.args[1]}
        elif _is_identity(name, node):
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            source.meta.setdefault(SAME_MEMORY, []).append(node.meta["val"])
            module.graph.erase_node(node)
    return _checks_first(_needed(module))


def guard_calls(module: GraphModule) -> None:
    """Let a graph, and those nested in it, run like an untrusted program: with checks of arguments, and only with
    allowed operators.

    ProgramError names an operator that is not allowed, or that is called with a function as its argument.
    """
    for part in module.modules():
        if not isinstance(part, GraphModule):
            continue
        _replace(part)
        for node in _calls(part):
            # Check calls without used results too: they run here. A nested graph is checked as a module of its own.
            name = operator_name(node.target)
            nested = isinstance(node.target, torch._ops.HigherOrderOperator) and str(node.target) in _NESTING
            # An operator in the place of a nested graph would be called unchecked.
            if any(map(callable, pytree.tree_leaves((node.args, node.kwargs)))):
                raise ProgramError(f"{name} is called with a function as its argument, at {source_line(node)}")
            if not (nested or node.target is operator.getitem or is_allowed(name) or name in _TAKEN_OUT):
                raise ProgramError(
                    f"{name} is not an operator that a program may call; called at "
                    f"{source_line(node)}{operator_remedy(name)}"
                )
            if not isinstance(node.target, torch._ops.OpOverload):
                continue
            checked = guarded(name, node.target)
            if isinstance(checked, FunctionType):
                # The graph is printed as source, where the qualified name of a nested function would not be valid.
                checked.__qualname__ = checked.__name__
                node.target = checked
        part.recompile()


def source_line(node: Node) -> str:
    """Return the line in the model's source that made the call, or else the call's module, for messages."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    places = [at for at, line in enumerate(lines) if line.startswith("File ")]
    outside = [at for at in places if not lines[at].startswith((f'File "{Path(torch.__file__).parent}', 'File "<'))]
    for at in (outside or places)[-1:]:
        return shorten(" ".join(lines[at : at + 2]), MAX_LINE)
    return f"module {module_path(node) or '(the model itself)'}"


def module_path(node: Node) -> str | None:
    """Return the path of the innermost module that made the call, or None if the export does not know it."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    path: str | None = None
    for key, (name, _kind) in stack.items():
        if not key.startswith("_empty_nn_module_stack"):
            path = name.split("@")[0]
    return path


def _replace(module: GraphModule) -> None:
    for node in _calls(module):
        found = _REPLACEMENTS.get(operator_name(node.target))
        if found is None or node.kwargs.get("memory_format") not in (None, *_PLAIN_FORMATS):
            continue
        if found[0] is _ATEN.batch_norm.default and node.args[5] is not False:
            continue
        node.target, count = found
        node.args = node.args[:count]
        if node.target is _ATEN.zeros.default:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}


def _calls(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _written(module: GraphModule) -> set[Node]:
    """Return the nodes whose memory a later call may write to. A saved export does not keep which values share memory,
    so the operators tell.
    """
    written: set[Node] = set()
    for node in reversed(module.graph.nodes):
        name = operator_name(node.target) if node.op == "call_function" else ""
        if name in MUTATING:
            written.update(node.all_input_nodes[:1])
        elif node in written and (name in VIEWS or name in _SAME_TENSOR):
            written.update(node.all_input_nodes)
    return written


def _returns_copy(node: Node) -> bool:
    """Whether a conversion to a type returns a copy: the type is another one, or it was told to copy."""
    source, dtype, *options = node.args
    if not isinstance(source, Node) or node.kwargs or len(options) > 2:
        return False
    return source.meta["val"].dtype != dtype or options[1:] == [True]


def _is_identity(name: str, node: Node) -> bool:
    """Whether the call returns its first argument unchanged, or a copy that is never written."""
    if name in _DROPOUTS:
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
        return training is False
    return name in _IDENTITIES


def _writes(node: Node) -> bool:
    """Whether the call writes in place. The schema tells, because a program may not call all operators that do."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def _without_token(node: Node, check: str) -> None:
    """Replace a check that returns a token by one that returns nothing."""
    *args, token = node.args
    node.replace_all_uses_with(token)  # type: ignore[arg-type]
    _, packet, overload = check.split(".")
    node.target = getattr(getattr(torch.ops.aten, packet), overload)
    if packet.startswith("sym_constrain"):
        node.args, node.kwargs = (args[0],), dict(zip(("min", "max"), args[1:], strict=False))
    else:
        node.args = tuple(args)
    node.meta.pop("val", None)


def _needed(module: GraphModule) -> list[Node]:
    """Return the checks, the calls that write in place, and those whose results reach one of these or an output."""
    wanted: set[Node] = set()
    needed: list[Node] = []
    for node in reversed(list(module.graph.nodes)):
        name = operator_name(node.target)
        if node.op == "output":
            wanted.update(node.all_input_nodes)
        elif node.op == "call_function" and (node in wanted or _writes(node) or name in CHECKS):
            wanted.update(node.all_input_nodes)
            needed.append(node)
    return needed[::-1]


def _checks_first(nodes: list[Node]) -> list[Node]:
    """Return the calls. Checks that depend only on sizes of inputs, and the calls that they need, are at the front."""
    sized: set[Node] = set()
    for node in nodes:
        name = operator_name(node.target)
        is_number = is_symbolic(name) and name not in ITEM_OPERATORS
        if (is_number or name in CHECKS) and all(
            source in sized or (source.op == "placeholder" and is_number) for source in node.all_input_nodes
        ):
            sized.add(node)
    first: set[Node] = set()
    for node in reversed(nodes):
        if node in sized and (operator_name(node.target) in CHECKS or any(user in first for user in node.users)):
            first.add(node)
    return [node for node in nodes if node in first] + [node for node in nodes if node not in first]
