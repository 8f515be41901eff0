"""What is left of an exported graph when all that a program does not need is taken out?

Gradient switches are inlined; copies of nothing and calls whose results nobody reads are dropped. Assertions stay, but
those on what cannot differ from one run to the next; what depends on sizes only is asserted before all else.
"""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from overwinter.core.errors import ProgramError
from overwinter.model.operators import CHECKS, ITEM_OPERATORS, MUTATING, is_symbolic

SAME_MEMORY = "overwinter_same_memory"
"""Under this key a node's metadata lists the values of dropped calls that gave the node's own value."""

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
_DROPOUTS = frozenset(
    f"aten.{kind}{suffix}.default" for kind in ("dropout", "feature_dropout", "alpha_dropout") for suffix in ("", "_")
)
_METADATA_CHECK = "aten._assert_tensor_metadata.default"
_FUNCTIONAL_CHECKS = {
    "aten._functional_assert_async.msg": "aten._assert_async.msg",
    "aten._functional_assert_scalar.default": "aten._assert_scalar.default",
    "aten._functional_sym_constrain_range.default": "aten.sym_constrain_range.default",
    "aten._functional_sym_constrain_range_for_size.default": "aten.sym_constrain_range_for_size.default",
}
"""Checks that take a token last and give it back, so that they keep their place, and what they check with."""


def operator_name(target: object) -> str:
    """The full name of what a graph's node calls: `aten.linear.default`, `operator.mul`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = getattr(target, "__module__", None) or ""
    return f"{module.removeprefix('_')}.{getattr(target, '__name__', target)}"


def simplify(module: GraphModule) -> list[Node]:
    """The calls of the graph that a program needs, in order; the graph is changed in place."""
    _inline_switches(module)
    written = {_storage(node.args[0]) for node in _calls(module) if operator_name(node.target) in MUTATING}
    for node in _calls(module):
        name = operator_name(node.target)
        if name == _METADATA_CHECK:
            module.graph.erase_node(node)
        elif name in _FUNCTIONAL_CHECKS:
            _without_token(node, _FUNCTIONAL_CHECKS[name])
        elif name == _FRESH_COPY and _storage(node) in written:
            node.target = torch.ops.aten.clone.default
        elif _is_identity(name, node):
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            source.meta.setdefault(SAME_MEMORY, []).append(node.meta["val"])
            module.graph.erase_node(node)
    return _checks_first(_needed(module))


def source_line(node: Node) -> str:
    """Where in the model's source the call was made, for messages."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    places = [at for at, line in enumerate(lines) if line.startswith("File ")]
    outside = [at for at in places if not lines[at].startswith((f'File "{Path(torch.__file__).parent}', 'File "<'))]
    for at in (outside or places)[-1:]:
        return " ".join(lines[at : at + 2])
    return f"module {module_path(node) or '(the model itself)'}"


def module_path(node: Node) -> str | None:
    """The path of the innermost module that made the call, or None if the export does not know it."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    path: str | None = None
    for key, (name, _kind) in stack.items():
        if not key.startswith("_empty_nn_module_stack"):
            path = name.split("@")[0]
    return path


def _calls(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _storage(value: object) -> object:
    meta = value.meta.get("val") if isinstance(value, Node) else None
    return meta.untyped_storage()._cdata if isinstance(meta, torch.Tensor) else None


def _is_identity(name: str, node: Node) -> bool:
    """Whether the call gives its first argument as it is, or a copy that nobody writes to."""
    if name in _DROPOUTS:
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
        return training is False
    return name in _IDENTITIES


def _without_token(node: Node, check: str) -> None:
    """Make a check of the kind that gives a token one that gives nothing."""
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
    """The calls whose results reach an output or a check, every check, and every call that writes in place."""
    wanted: set[Node] = set()
    needed: list[Node] = []
    for node in reversed(list(module.graph.nodes)):
        name = operator_name(node.target)
        if node.op == "output":
            wanted.update(node.all_input_nodes)
        elif node.op == "call_function" and (node in wanted or name in MUTATING or name in CHECKS):
            wanted.update(node.all_input_nodes)
            needed.append(node)
    return needed[::-1]


def _checks_first(nodes: list[Node]) -> list[Node]:
    """The calls with those in front that check nothing but the sizes of inputs, and what these need."""
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


def _inline_switches(module: GraphModule) -> None:
    """Replace each call of a nested graph under a gradient or autocast switch by the nested graph's own calls."""
    while True:
        switches = [node for node in _calls(module) if isinstance(node.target, torch._ops.HigherOrderOperator)]
        if not switches:
            return
        for node in switches:
            _inline(module, node)


def _inline(module: GraphModule, node: Node) -> None:
    leading = _SWITCHES.get(_switch_name(node))
    if leading is None:
        raise ProgramError(f"cannot run control flow {node.target} as a flat program; made at {source_line(node)}")
    count, is_harmless = leading
    if not is_harmless(node.args[:count]):
        raise ProgramError(
            f"autocast inside the model is not supported; convert the weights instead ({source_line(node)})"
        )
    place = node.args[count]
    assert isinstance(place, Node)
    nested = module.get_submodule(str(place.target))
    assert isinstance(nested, GraphModule)
    holes = [inner for inner in nested.graph.nodes if inner.op == "placeholder"]
    value_map: dict[Node, Any] = dict(zip(holes, node.args[count + 1 :], strict=True))
    for inner in nested.graph.nodes:
        if inner.op == "get_attr":
            setattr(module, f"{place.target}_{inner.target}", getattr(nested, str(inner.target)))
    with module.graph.inserting_before(node):
        results = module.graph.graph_copy(nested.graph, value_map)
    for inner, copy in value_map.items():
        if inner.op == "get_attr":
            copy.target = f"{place.target}_{inner.target}"
    for user in list(node.users):
        if user.target is not operator.getitem or not isinstance(results, tuple | list):
            raise ProgramError(f"unexpected use of a nested graph at {source_line(node)}")
        user.replace_all_uses_with(results[int(str(user.args[1]))])
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _switch_name(node: Node) -> str:
    """The bare name of a higher-order operator."""
    return str(node.target)


def _always(_switch: tuple[Any, ...]) -> bool:
    return True


def _is_off(switch: tuple[Any, ...]) -> bool:
    return switch[2] is False


_SWITCHES: dict[str, tuple[int, Callable[[tuple[Any, ...]], bool]]] = {
    "wrap_with_set_grad_enabled": (1, _always),
    "wrap_with_autocast": (4, _is_off),
}
"""Switches that may be inlined: how many arguments come before the nested graph, and when they change nothing."""
