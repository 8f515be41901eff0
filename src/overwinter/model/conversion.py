"""How does an exported graph become a program?"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.dtypes import DATATYPES, ITEM_BYTES
from overwinter.model.graph import SAME_MEMORY, module_path, operator_name, simplify, source_line
from overwinter.model.layers import layer_table
from overwinter.model.liveness import with_frees
from overwinter.model.macs import macs
from overwinter.model.operators import is_allowed
from overwinter.model.program import validate
from overwinter.model.sizes import Sizes, symbolic_kind
from overwinter.model.structure import (
    Argument,
    Call,
    Device,
    Dtype,
    MemoryFormat,
    Program,
    Scalar,
    Slot,
    Value,
    Weight,
    evaluate,
)


class Exported(NamedTuple):
    """A program and its weights: contiguous CPU tensors in the program's order."""

    program: Program
    weights: list[torch.Tensor]


def convert(exported: ExportedProgram, labels: Sequence[str], sizes: Sizes) -> Exported:
    """The program of an exported graph whose inputs are called `labels`; the graph is changed in place.

    ProgramError, naming the operator and the line that called it, for what a program cannot hold.
    """
    nodes = simplify(exported.graph_module)
    for node in nodes:
        name = operator_name(node.target)
        if node.target is not operator.getitem and not is_allowed(name):
            raise ProgramError(f"{name} is not an operator that a program may call; called at {source_line(node)}")
    conversion = _Conversion(exported, labels, sizes)
    conversion.number_weights(nodes)
    conversion.number_inputs()
    for node in nodes:
        conversion.add(node)
    program = conversion.finish()
    validate(program)
    return Exported(program, conversion.weights)


class _Conversion:
    """The slots given out so far, and the parts of the program made so far."""

    def __init__(self, exported: ExportedProgram, labels: Sequence[str], sizes: Sizes) -> None:
        self.exported = exported
        self.labels = labels
        self.sizes = sizes
        self.graph = exported.graph_module.graph
        self.holes = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        self.slots: dict[Node, int] = {}
        self.results: dict[Node, tuple[int, ...]] = {}
        """The slots of a call that gives several tensors."""
        self.owners: dict[int, int] = {}
        """The slot that first held each piece of memory."""
        self.weights: list[torch.Tensor] = []
        self.names: list[str] = []
        self.inputs: list[TensorSpec] = []
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.paths: list[str | None] = []
        self.macs: list[int] = []

    def number_weights(self, nodes: Sequence[Node]) -> None:
        """Give the first slots to the weights that are used, in the order of use; one slot to tied weights."""
        sources = self._weight_sources()
        seen: dict[object, int] = {}
        (output,) = self.graph.find_nodes(op="output")
        for node in (*nodes, output):
            for hole in node.all_input_nodes:
                if hole in self.slots or hole.name not in sources:
                    continue
                name, tensor = sources[hole.name]
                slot = seen.setdefault(_identity(tensor, name), len(self.weights))
                if slot == len(self.weights):
                    self._add_weight(name, tensor)
                self._place(hole, slot)

    def number_inputs(self) -> None:
        """Give the next slots to the inputs."""
        signature = self.exported.graph_signature
        specs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        for label, spec in zip(self.labels, specs, strict=True):
            if not isinstance(spec.arg, TensorArgument):
                raise ProgramError(f"input {label!r} must be a tensor; wrap the model to fix other arguments")
            hole = self.holes[spec.arg.name]
            self._place(hole, len(self.weights) + len(self.inputs))
            self.inputs.append(self._spec(label, hole.meta["val"]))

    def add(self, node: Node) -> None:
        """Append a call."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            assert isinstance(index, int)
            self._place(node, self.results[source][index])
            return
        value = node.meta.get("val")
        if value is None:
            raise ProgramError(f"{operator_name(node.target)} gives no tensor; called at {source_line(node)}")
        first = len(self.weights) + len(self.inputs) + len(self.values)
        parts = list(value) if isinstance(value, tuple | list) else [value]
        slots = tuple(range(first, first + len(parts)))
        for slot, part in zip(slots, parts, strict=True):
            self.values.append(self._value(slot, part, node))
        if isinstance(value, tuple | list):
            self.results[node] = slots
        else:
            self._place(node, first)
        args = tuple(self._argument(argument, node) for argument in node.args)
        self.calls.append(Call(operator_name(node.target), args, self._kwargs(node), slots))
        self.paths.append(module_path(node))
        self.macs.append(self._macs(node, parts[0]))

    def finish(self) -> Program:
        """The program, with liveness, outputs and layers."""
        (node,) = self.graph.find_nodes(op="output")
        results = node.args[0]
        outputs: list[TensorSpec] = []
        output_slots: list[int] = []
        for name, result in zip(_output_names(self.exported, len(results)), results, strict=True):
            if result is None:
                continue
            if not isinstance(result, Node) or not isinstance(result.meta.get("val"), torch.Tensor):
                raise ProgramError(f"output {name!r} must be a tensor, not {result}")
            outputs.append(self._spec(name, result.meta["val"]))
            output_slots.append(self.slots[result])
        first_value = len(self.weights) + len(self.inputs)
        shapes = [tuple(tensor.shape) for tensor in self.weights]
        dtypes = [_name(tensor.dtype) for tensor in self.weights]
        program = Program(
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            weights=tuple(Weight(*weight) for weight in zip(self.names, dtypes, shapes, strict=True)),
            calls=with_frees(self.calls, first_value, output_slots),
            values=tuple(self.values),
            output_slots=tuple(output_slots),
            layers=(),
            dimensions=dict(self.sizes.ranges),
            example=dict(self.sizes.example),
        )
        sizes = self.sizes.example
        held = {first_value + at: evaluate(value.nbytes, sizes) for at, value in enumerate(self.values)}
        layers = layer_table(program, self.paths, self.macs, held)
        return Program(**{name: getattr(program, name) for name in program.__struct_fields__} | {"layers": layers})

    def _weight_sources(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Each placeholder that is no input: its name in the model and its tensor."""
        found: dict[str, tuple[str, torch.Tensor]] = {}
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                continue
            if spec.target is None or spec.kind not in (
                InputKind.PARAMETER,
                InputKind.BUFFER,
                InputKind.CONSTANT_TENSOR,
            ):
                raise ProgramError(f"the model holds {spec.target or spec.arg}, which is no tensor")
            stored = self.exported.state_dict if spec.target in self.exported.state_dict else self.exported.constants
            found[spec.arg.name] = (spec.target, stored[spec.target])
        return found

    def _add_weight(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or _name(tensor.dtype) not in ITEM_BYTES:
            raise ProgramError(
                f"weight {name!r} is {tensor.layout} of {tensor.dtype}; only dense plain tensors are supported"
            )
        self.names.append(name)
        self.weights.append(tensor.detach().cpu().contiguous())

    def _place(self, node: Node, slot: int) -> None:
        """Let a node's value be in a slot, and what shares its memory be known as the slot's."""
        self.slots[node] = slot
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        owner = self.owners.setdefault(value.untyped_storage()._cdata, slot)
        for same in node.meta.get(SAME_MEMORY, ()):
            self.owners.setdefault(same.untyped_storage()._cdata, owner)

    def _spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        datatype = DATATYPES.get(_name(tensor.dtype))
        if datatype is None:
            raise ProgramError(f"{name!r} is of {tensor.dtype}, which the wire does not know")
        return TensorSpec(name, datatype, self.sizes.shape(tensor))

    def _value(self, slot: int, value: Any, node: Node) -> Value:
        if not isinstance(value, torch.Tensor):
            return Value(symbolic_kind(value))
        try:
            nbytes = self.sizes.nbytes(value)
        except ProgramError as error:
            raise ProgramError(f"{operator_name(node.target)}, called at {source_line(node)}: {error}") from error
        owner = self.owners.setdefault(value.untyped_storage()._cdata, slot)
        return Value(_name(value.dtype), nbytes, -1 if owner == slot else owner)

    def _argument(self, argument: Any, node: Node) -> Argument:
        if isinstance(argument, tuple | list):
            return tuple(self._scalar(part, node) for part in argument)
        return self._scalar(argument, node)

    def _scalar(self, argument: Any, node: Node) -> Scalar:
        match argument:
            case Node() if argument in self.slots:
                return Slot(self.slots[argument])
            case None | bool() | int() | float() | str():
                return argument
            case torch.dtype():
                return Dtype(_name(argument))
            case torch.memory_format():
                return MemoryFormat(_name(argument))
            case torch.device():
                return Device()
            case _:
                pass
        raise ProgramError(
            f"{operator_name(node.target)} takes {argument!r}, which no program can hold; called at {source_line(node)}"
        )

    def _kwargs(self, node: Node) -> dict[str, Argument]:
        """The named arguments without those that say nothing, and with the device where the result has no other."""
        kept = {
            key: self._argument(argument, node)
            for key, argument in node.kwargs.items()
            if argument is not None
            and not (key == "pin_memory" and argument is False)
            and argument is not torch.strided
        }
        if isinstance(node.target, torch._ops.OpOverload):
            arguments = node.target._schema.arguments
            has_tensor = any("Tensor" in str(argument.type) for argument in arguments)
            if not has_tensor and any(argument.name == "device" for argument in arguments):
                kept["device"] = Device()
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


def _identity(tensor: torch.Tensor, name: str) -> object:
    """Equal for two names of one tensor."""
    if not tensor.numel():
        return name
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _name(thing: torch.dtype | torch.memory_format) -> str:
    return str(thing).removeprefix("torch.")


def _output_names(exported: ExportedProgram, count: int) -> list[str]:
    """A name for each result: its path in what the model returns; `output` for a single tensor."""
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
