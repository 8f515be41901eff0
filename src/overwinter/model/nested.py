"""Converts the calls of a nested graph to calls of the outer graph.

A wrapper that sets the gradient mode, or disables autocast, is replaced by its nested graph. Enabled autocast is
refused. `torch.cond` runs one of two graphs: here both run, and `torch.where` selects. The result is bit-identical as
long as the unselected graph neither fails nor changes a value from outside it. So the export is refused if either graph
calls an operator that may refuse values, or writes to a value from outside.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from overwinter.core.errors import ProgramError
from overwinter.model.graph import operator_name, source_line
from overwinter.model.operators import FAIL_FOR_SOME_VALUES, MUTATING, VIEWS
from overwinter.model.remedies import operator_remedy

_ASSERTIONS = ("aten._assert_async", "aten._assert_scalar", "aten._functional_assert")


def inline_nested(module: GraphModule) -> None:
    """Inline the calls of nested graphs into the graph, which is changed in place; raise ProgramError if that is
    impossible.
    """
    while True:
        nested = [node for node in module.graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]
        if not nested:
            return
        for node in nested:
            if str(node.target) == "cond":
                _select(module, node)
            else:
                _inline(module, node)


def _inline(module: GraphModule, node: Node) -> None:
    """Replace the call of a wrapper by the calls of the nested graph in it."""
    leading = _WRAPPERS.get(str(node.target))
    if leading is None:
        name = str(node.target)
        raise ProgramError(
            f"{name} cannot be part of a flat program; called at {source_line(node)}{operator_remedy(name)}"
        )
    count, is_harmless = leading
    if not is_harmless(node.args[:count]):
        raise ProgramError(
            f"autocast inside the model is not supported; convert the weights instead ({source_line(node)})"
        )
    results = _copied(module, node, node.args[count], node.args[count + 1 :])
    _replace(module, node, [results[index] for index in _used(node)])


def _select(module: GraphModule, node: Node) -> None:
    """Replace a `torch.cond` by the calls of both its graphs and a selection between their results."""
    condition, *branches, operands = node.args
    value = condition.meta.get("val") if isinstance(condition, Node) else None
    if not isinstance(condition, Node) or not isinstance(value, torch.Tensor):
        raise ProgramError(
            f"torch.cond on a size cannot be part of a flat program; called at {source_line(node)}; use a plain `if` "
            "where the size is fixed, or a condition that is a tensor"
        )
    assert isinstance(operands, tuple | list)
    for branch in branches:
        _check_branch(module, node, branch)
    results = [_copied(module, node, branch, operands) for branch in branches]
    with module.graph.inserting_before(node):
        if value.dim():
            shaped = module.graph.call_function(torch.ops.aten.reshape.default, (condition, []))
            shaped.meta = {**node.meta, "val": value.reshape(())}
            condition = shaped
        chosen: list[Node] = []
        for user in node.users:
            index = int(str(user.args[1]))
            pair = [result[index] for result in results]
            if not all(isinstance(part, Node) and isinstance(part.meta.get("val"), torch.Tensor) for part in pair):
                raise ProgramError(f"torch.cond must return tensors; called at {source_line(node)}")
            chosen.append(module.graph.call_function(torch.ops.aten.where.self, (condition, *pair)))
            chosen[-1].meta = {**node.meta, "val": user.meta["val"]}
    _replace(module, node, chosen)


def _check_branch(module: GraphModule, node: Node, place: Any) -> None:
    """Raise ProgramError if running this branch when the other one is selected could fail or change a value. The graphs
    inside it become a part of it first, so that their calls are checked too.
    """
    nested = module.get_submodule(str(place.target))
    assert isinstance(nested, GraphModule)
    inline_nested(nested)
    graph = nested.graph
    outside = {each for each in graph.nodes if each.op == "placeholder"}
    for inner in graph.nodes:
        name = operator_name(inner.target) if inner.op == "call_function" else ""
        if (name in VIEWS or name == "operator.getitem") and outside.intersection(inner.all_input_nodes):
            outside.add(inner)
        fails = name in FAIL_FOR_SOME_VALUES or name.startswith(_ASSERTIONS)
        if fails or (name in MUTATING and inner.args[0] in outside):
            does = "may fail for some values" if fails else "writes to a value from outside"
            raise ProgramError(
                f"{name} {does}, and both graphs of a torch.cond are run; called at {source_line(inner)}; call it "
                "before or after the torch.cond"
            )
    (output,) = graph.find_nodes(op="output")
    writes = any(operator_name(each.target) in MUTATING for each in module.graph.nodes if each.op == "call_function")
    if writes and outside.intersection(output.all_input_nodes):
        raise ProgramError(
            "a branch of a torch.cond returns a view of a value from outside, in a model that writes in place; called "
            f"at {source_line(node)}; return a clone() of it"
        )


def _copied(module: GraphModule, node: Node, place: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Insert the calls of a nested graph before `node`, and return the graph's results."""
    nested = module.get_submodule(str(place.target))
    assert isinstance(nested, GraphModule)
    placeholders = [inner for inner in nested.graph.nodes if inner.op == "placeholder"]
    value_map: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    names: dict[Node, str] = {}
    for inner in nested.graph.nodes:
        if inner.op == "get_attr":
            names[inner] = f"{place.target}_{inner.target}"
            while hasattr(module, names[inner]):
                # An equal name would replace an attribute that the module also uses.
                names[inner] += "_"
            setattr(module, names[inner], getattr(nested, str(inner.target)))
    with module.graph.inserting_before(node):
        results = module.graph.graph_copy(nested.graph, value_map)
    for inner, copy in value_map.items():
        if inner.op == "get_attr":
            copy.target = names[inner]
        if inner.op == "call_function" and node.meta.get("nn_module_stack"):
            copy.meta.setdefault("nn_module_stack", node.meta["nn_module_stack"])
    if not isinstance(results, tuple | list):
        raise ProgramError(f"unexpected use of a nested graph at {source_line(node)}")
    return results


def _used(node: Node) -> list[int]:
    """Return the index of the result that each user of a call uses."""
    if any(user.target is not operator.getitem for user in node.users):
        raise ProgramError(f"unexpected use of a nested graph at {source_line(node)}")
    return [int(str(user.args[1])) for user in node.users]


def _replace(module: GraphModule, node: Node, results: Sequence[Any]) -> None:
    """Replace a call by these results, one for each of its users, and remove it."""
    for user, result in zip(list(node.users), results, strict=True):
        user.replace_all_uses_with(result)
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _always(_arguments: tuple[Any, ...]) -> bool:
    return True


def _is_off(arguments: tuple[Any, ...]) -> bool:
    return arguments[2] is False


_WRAPPERS: dict[str, tuple[int, Callable[[tuple[Any, ...]], bool]]] = {
    "wrap_with_set_grad_enabled": (1, _always),
    "wrap_with_autocast": (4, _is_off),
}
"""The wrappers that may be inlined: the number of arguments before the nested graph, and when the wrapper has no
effect.
"""
