"""Converts an exported graph to a program."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from overwinter.core.datatypes import DATATYPES, DTYPE_BYTES
from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.checks import Condition, evaluate_condition, kind_of
from overwinter.model.graph import SAME_MEMORY, module_path, operator_name, required_parameters, simplify, source_line
from overwinter.model.layers import layer_table
from overwinter.model.liveness import with_frees
from overwinter.model.macs import macs
from overwinter.model.nested import inline_nested
from overwinter.model.operators import CHECKS, FRESH, is_allowed
from overwinter.model.program import MAX_TEXT, validate
from overwinter.model.remedies import operator_remedy
from overwinter.model.sizes import Sizes, symbolic_kind
from overwinter.model.structure import (
    Argument,
    Call,
    Device,
    Dtype,
    MemoryFormat,
    Program,
    SingleArgument,
    Slot,
    Value,
    Weight,
    evaluate,
)
from overwinter.model.tracing import CheckMessages
from overwinter.model.weights import dense, dtype_name, identity, weight_sources

_EXPRESSION = re.compile(r"failed for expression (?P<condition>.+) on node")
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")


class Reference(NamedTuple):
    """The model that a program was made from."""

    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    """Runs the model on the program's inputs and returns its outputs, both in the program's order."""
    examples: list[torch.Tensor]
    """One example per input; empty if a `.pt2` file holds none."""
    convert: Callable[[Mapping[str, tuple[int, int]]], "Exported"]
    """Converts the model again, for these ranges of the dynamic sizes."""
    run_again: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    """Returns the outputs of a repeated call; it is called after `run`, with the same inputs."""


class Exported(msgspec.Struct):
    """A program and its weights: dense CPU tensors in the program's order, each with the order in memory that its
    `Weight` gives.

    Unpacks as (program, weights).
    """

    program: Program
    weights: list[torch.Tensor]
    reference: Reference | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.program, self.weights))


def convert(
    exported: ExportedProgram,
    labels: Sequence[str],
    shapes: Sequence[tuple[int | str, ...]],
    sizes: Sizes,
    checks: Sequence[Condition],
    messages: CheckMessages,
) -> Exported:
    """Convert an exported graph whose inputs have these labels and shapes; the graph is changed in place.

    The program begins with the `checks`. If one of the graph's own checks fails in a run, the error has the author's
    message for it, if there is one. Raises ProgramError for what a program cannot represent, where possible with the
    operator and its line in the source.
    """
    inline_nested(exported.graph_module)
    nodes = simplify(exported.graph_module)
    for node in nodes:
        name = operator_name(node.target)
        if node.target is not operator.getitem and not is_allowed(name):
            raise ProgramError(
                f"{name} is not an operator that a program may call; called at "
                f"{source_line(node)}{operator_remedy(name)}"
            )
    conversion = _Conversion(exported, sizes, messages)
    conversion.number_weights(nodes)
    conversion.number_inputs(labels, shapes)
    conversion.require(checks)
    for node in nodes:
        conversion.add(node)
    program = conversion.finish()
    validate(program)
    return Exported(program, conversion.weights)


class _Conversion:
    """The slots and parts of the program made so far."""

    def __init__(self, exported: ExportedProgram, sizes: Sizes, messages: CheckMessages) -> None:
        self.exported = exported
        self.sizes = sizes
        self.messages = messages
        self.graph = exported.graph_module.graph
        self.placeholders = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        self.slots: dict[Node, int] = {}
        self.results: dict[Node, tuple[int, ...]] = {}
        """The slots of a call with several results."""
        self.owners: dict[int, int] = {}
        """The first slot that used each memory storage."""
        self.weights: list[torch.Tensor] = []
        self.described: list[Weight] = []
        self.inputs: list[TensorSpec] = []
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.paths: list[str | None] = []
        self.macs: list[int] = []

    def number_weights(self, nodes: Sequence[Node]) -> None:
        """Give the first slots to the used weights, in the order of use; tied weights have one slot."""
        sources = weight_sources(self.exported)
        seen: dict[object, int] = {}
        (output,) = self.graph.find_nodes(op="output")
        for node in (*nodes, output):
            for placeholder in node.all_input_nodes:
                if placeholder in self.slots or placeholder.name not in sources:
                    continue
                name, tensor = sources[placeholder.name]
                slot = seen.setdefault(identity(tensor, name), len(self.weights))
                if slot == len(self.weights):
                    self._add_weight(name, tensor)
                self._place(placeholder, slot)

    def number_inputs(self, labels: Sequence[str], shapes: Sequence[tuple[int | str, ...]]) -> None:
        """Give the next slots to the inputs."""
        signature = self.exported.graph_signature
        specs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        for label, shape, spec in zip(labels, shapes, specs, strict=True):
            if not isinstance(spec.arg, TensorArgument):
                raise ProgramError(
                    f"input {label!r} must be a tensor; wrap the model in a module that sets its other arguments"
                )
            placeholder = self.placeholders[spec.arg.name]
            self._place(placeholder, len(self.weights) + len(self.inputs))
            self.inputs.append(_spec(label, placeholder.meta["val"], shape))

    def require(self, checks: Sequence[Condition]) -> None:
        """Append calls that fail unless the conditions hold."""
        known: dict[tuple[str, tuple[SingleArgument, ...]], Slot] = {}

        def size_of(name: str) -> Slot:
            at, dim = next((at, spec.shape.index(name)) for at, spec in enumerate(self.inputs) if name in spec.shape)
            return call("aten.sym_size.int", (Slot(len(self.weights) + at), dim))

        def call(function: str, args: tuple[SingleArgument, ...]) -> Slot:
            if (function, args) not in known:
                slot = self._next_slot()
                self.values.append(Value(kind_of(function)))
                self._append(Call(function, args, {}, (slot,)))
                known[function, args] = Slot(slot)
            return known[function, args]

        for check in checks:
            truth = evaluate_condition(check.tree, size_of, call)
            self._append(Call("aten._assert_scalar.default", (truth, _message(check.message)), {}, ()))

    def _append(self, call: Call, path: str | None = None, macs: int = 0) -> None:
        self.calls.append(call)
        self.paths.append(path)
        self.macs.append(macs)

    def _next_slot(self) -> int:
        return len(self.weights) + len(self.inputs) + len(self.values)

    def add(self, node: Node) -> None:
        """Append the call of a node; a `getitem` only gets the slot of its part of a result."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            assert isinstance(index, int)
            self._place(node, self.results[source][index])
            return
        if operator_name(node.target) in CHECKS:
            self._add_check(node)
            return
        value = node.meta.get("val")
        if value is None:
            raise ProgramError(f"{operator_name(node.target)} returns no tensor; called at {source_line(node)}")
        first = self._next_slot()
        parts = list(value) if isinstance(value, tuple | list) else [value]
        slots = tuple(range(first, first + len(parts)))
        for slot, part in zip(slots, parts, strict=True):
            self.values.append(self._value(slot, part, node))
        if isinstance(value, tuple | list):
            self.results[node] = slots
        else:
            self._place(node, first)
        args = tuple(self._argument(argument, node) for argument in node.args)
        call = Call(operator_name(node.target), args, self._kwargs(node, parts[0]), slots)
        self._append(call, module_path(node), self._macs(node, parts[0]))

    def _add_check(self, node: Node) -> None:
        """Append a check. A failed assertion on a number reports the author's text, or without one the condition."""
        name = operator_name(node.target)
        args = [self._argument(argument, node) for argument in node.args]
        if name == "aten._assert_scalar.default":
            args[1] = self._failure_message(node)
        args = [_message(argument) if isinstance(argument, str) else argument for argument in args]
        self._append(Call(name, tuple(args), self._kwargs(node, None), ()), module_path(node))

    def _failure_message(self, node: Node) -> str:
        """Return the message for a failed assertion on a number."""
        found = _EXPRESSION.search(str(node.args[1]))
        if found is None:
            return str(node.args[1])
        condition = found["condition"]
        messages = {str(known): message for known, message in self.messages.items()}
        if condition in messages:
            found_messages = [messages[condition]]
        else:
            # The condition may follow from others about the same symbols, for which the author gave a message.
            found_messages = [
                message
                for known, message in messages.items()
                if set(_SYMBOL.findall(known)) == set(_SYMBOL.findall(condition))
            ]
        names = {str(symbol): str(meaning) for symbol, meaning in self.sizes.meanings.items()}
        text = _SYMBOL.sub(lambda symbol: names.get(symbol[0], "a value"), condition)
        return (
            "; ".join(message for message in found_messages if message)
            or f"the model needs {text}, at {source_line(node)}"
        )

    def finish(self) -> Program:
        """Return the program, with liveness, outputs and layers."""
        for spec in self.exported.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise ProgramError(
                    f"the model changes {spec.target!r} ({spec.kind.name.lower()}), and a program keeps no state and "
                    "changes no input: make it an input and an output"
                )
        (node,) = self.graph.find_nodes(op="output")
        results = node.args[0]
        outputs: list[TensorSpec] = []
        output_slots: list[int] = []
        for name, result in zip(_output_names(self.exported, len(results)), results, strict=True):
            if result is None:
                continue
            if not isinstance(result, Node) or not isinstance(result.meta.get("val"), torch.Tensor):
                raise ProgramError(f"output {name!r} must be a tensor, not a number; make it one with torch.full")
            outputs.append(_spec(name, result.meta["val"], self.sizes.shape(result.meta["val"])))
            output_slots.append(self.slots[result])
        first_value = len(self.weights) + len(self.inputs)
        program = Program(
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            weights=tuple(self.described),
            calls=with_frees(self.calls, first_value, output_slots),
            values=tuple(self.values),
            output_slots=tuple(output_slots),
            layers=(),
            dimensions=dict(self.sizes.ranges),
            example=dict(self.sizes.example),
        )
        sizes = self.sizes.example
        held = {first_value + at: evaluate(value.nbytes, sizes) for at, value in enumerate(self.values)}
        return msgspec.structs.replace(program, layers=layer_table(program, self.paths, self.macs, held))

    def _add_weight(self, name: str, tensor: torch.Tensor) -> None:
        stored, order = dense(name, tensor)
        self.described.append(Weight(name, dtype_name(tensor.dtype), tuple(tensor.shape), order))
        self.weights.append(stored)

    def _place(self, node: Node, slot: int) -> None:
        """Assign a slot to a node's value. The slot owns the value's memory unless an earlier one does; that owner
        also owns the memory of removed copies of the value.
        """
        self.slots[node] = slot
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        owner = self.owners.setdefault(value.untyped_storage()._cdata, slot)
        for same in node.meta.get(SAME_MEMORY, ()):
            self.owners.setdefault(same.untyped_storage()._cdata, owner)

    def _value(self, slot: int, value: Any, node: Node) -> Value:
        if not isinstance(value, torch.Tensor):
            return Value(symbolic_kind(value))
        try:
            nbytes = self.sizes.nbytes(value)
        except ProgramError as error:
            raise ProgramError(f"{operator_name(node.target)}, called at {source_line(node)}: {error}") from error
        storage = value.untyped_storage()._cdata
        if operator_name(node.target) in FRESH:
            # In an export the copy of a constant has the memory of the constant.
            self.owners[storage] = slot
        owner = self.owners.setdefault(storage, slot)
        if owner != slot:
            return Value(dtype_name(value.dtype), nbytes, owner)
        return Value(dtype_name(value.dtype), nbytes, shape=self.sizes.row_major_shape(value))

    def _argument(self, argument: Any, node: Node) -> Argument:
        if isinstance(argument, tuple | list):
            return tuple(self._scalar(part, node) for part in argument)
        return self._scalar(argument, node)

    def _scalar(self, argument: Any, node: Node) -> SingleArgument:
        match argument:
            case Node() if argument in self.slots:
                return Slot(self.slots[argument])
            case None | bool() | int() | float() | str():
                return argument
            case torch.dtype():
                return Dtype(dtype_name(argument))
            case torch.memory_format():
                return MemoryFormat(str(argument).removeprefix("torch."))
            case torch.device():
                return Device()
            case _:
                pass
        raise ProgramError(
            f"{operator_name(node.target)} takes {argument!r}, which a program cannot contain; "
            f"called at {source_line(node)}"
        )

    def _kwargs(self, node: Node, result: Any) -> dict[str, Argument]:
        """Return the named arguments, except a default None, an unset `pin_memory` and the strided layout. For an
        operator that has a parameter `device` and takes no tensor, the device and the type of its result are added.
        """
        kept = {
            key: self._argument(argument, node)
            for key, argument in node.kwargs.items()
            if (argument is not None or key in required_parameters(node.target))
            and not (key == "pin_memory" and argument is False)
            and argument is not torch.strided
        }
        if isinstance(node.target, torch._ops.OpOverload):
            arguments = node.target._schema.arguments
            has_tensor = any("Tensor" in str(argument.type) for argument in arguments)
            if not has_tensor and any(argument.name == "device" for argument in arguments):
                kept["device"] = Device()
                kept["dtype"] = Dtype(dtype_name(result.dtype))
        return kept

    def _macs(self, node: Node, result: Any) -> int:
        if not isinstance(result, torch.Tensor):
            return 0
        return macs(
            operator_name(node.target), [self._shape(arg) for arg in node.args], self.sizes.shape_at_example(result)
        )

    def _shape(self, argument: Any) -> Any:
        if isinstance(argument, tuple | list):
            return [self._shape(part) for part in argument]
        value = argument.meta.get("val") if isinstance(argument, Node) else None
        return self.sizes.shape_at_example(value) if isinstance(value, torch.Tensor) else argument


def _message(text: str) -> str:
    """A message that a program may contain."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))[:MAX_TEXT]


def _spec(name: str, tensor: torch.Tensor, shape: tuple[int | str, ...]) -> TensorSpec:
    dtype = dtype_name(tensor.dtype)
    if dtype not in DATATYPES or dtype not in DTYPE_BYTES:
        advice = "; pass it as pairs, with torch.view_as_real and torch.view_as_complex" if tensor.is_complex() else ""
        raise ProgramError(
            f"{name!r} is of {tensor.dtype}, for which the Open Inference Protocol has no datatype{advice}"
        )
    return TensorSpec(name, DATATYPES[dtype], shape)


def _output_names(exported: ExportedProgram, count: int) -> list[str]:
    """A name for each result: its path in the model's return value; `output` for a single tensor."""
    spec = exported.call_spec.out_spec
    if spec is None:
        return [f"output_{index}" for index in range(count)]
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), spec))
    names: list[str] = []
    for path, _leaf in paths:
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        if not parts or parts[0].isdigit():
            parts.insert(0, "output")
        names.append("_".join(parts))
    return names
