"""Validates programs.

For any bytes, decoding and validating either succeed or raise ProgramError: nothing is executed or imported, names are
looked up in tables only, and every count is bounded. A valid program calls only listed operators, reads only slots that
are set and not yet freed, and writes to no weight and no input.
"""

import re
from collections.abc import Iterable
from keyword import iskeyword

from overwinter.core.datatypes import DATATYPE_BYTES, DTYPE_BYTES
from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.aliasing import check_writes
from overwinter.model.encoding import (
    MAX_ALL_TERMS,
    MAX_CALLS,
    MAX_DIMENSIONS,
    MAX_PARTS,
    MAX_TENSORS,
    MAX_VALUES,
    MAX_WEIGHTS,
    decode_program,
    encode_program,
)
from overwinter.model.operators import (
    CHECKS,
    ITEM_OPERATORS,
    NUMBER_CHECKS,
    REQUIRED,
    SIZE_OPERATORS,
    is_allowed,
    is_symbolic,
)
from overwinter.model.structure import (
    FORMAT_VERSION,
    MEMORY_FORMATS,
    SYMBOLIC_KINDS,
    Argument,
    Call,
    Device,
    Dtype,
    Layer,
    MemoryFormat,
    Program,
    SingleArgument,
    Slot,
    Term,
    Value,
    Weight,
    count_parts,
)

__all__ = [
    "Argument",
    "Call",
    "Device",
    "Dtype",
    "Layer",
    "MemoryFormat",
    "Program",
    "Slot",
    "Term",
    "Value",
    "Weight",
    "decode_program",
    "encode_program",
    "validate",
]

MAX_CALL_PARTS = 10_000
"""The most arguments of one call and parts of them, taken together, and the most results of one call."""
MAX_TERMS = 64
"""The most terms of the size of a value."""
MAX_RANK = 64
MAX_TEXT = 1_000
MAX_SIZE = 1 << 40
MAX_DEGREE = 16
MAX_COEFFICIENT = float(1 << 60)
MAX_NUMBER_BITS = 1 << 16
"""The widest number that a program may compute from sizes or elements: repeated squaring must not fill the memory."""

ITEM_BITS = 1 << 10
"""The widest Python number that an element of a tensor can become: the largest float64 as an integer."""

_OPERAND = re.compile(r"\b[A-Za-z_]\w*\b(?!\()", re.ASCII)
"""The names in an expression of sizes, except those of functions that it calls."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def validate(program: Program) -> None:
    """Raise ProgramError, which names the part at fault, unless the program is safe to compile and run."""
    _require(
        program.version == FORMAT_VERSION, f"program format {program.version}, this node supports {FORMAT_VERSION}"
    )
    _check_dimensions(program)
    _check_specs("input", program.inputs, program.dimensions)
    _check_specs("output", program.outputs, None)
    _check_output_sizes(program)
    _check_weights(program.weights)
    _require(len(program.calls) <= MAX_CALLS, f"{len(program.calls)} calls, the limit is {MAX_CALLS}")
    parts = sum(map(count_parts, program.calls))
    _require(parts <= MAX_PARTS, f"the arguments of all calls have {parts} parts, the limit is {MAX_PARTS}")
    _check_values(program)
    _Walk(program).check()
    _check_layers(program)
    check_writes(program)


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise ProgramError(message)


def _check_text(what: str, text: str) -> None:
    _require(
        len(text) <= MAX_TEXT and text.isprintable(), f"{what} must be printable and at most {MAX_TEXT} characters long"
    )


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        _check_text(f"the name of each {what}", name)
        _require(bool(name) and name not in seen, f"{what} names must be given and differ: {name!r}")
        seen.add(name)


def _check_dimensions(program: Program) -> None:
    _require(len(program.dimensions) <= MAX_DIMENSIONS, f"more than {MAX_DIMENSIONS} dynamic dimensions")
    _require(list(program.example) == list(program.dimensions), "example must give a size to each dimension, in order")
    for name, (smallest, largest) in program.dimensions.items():
        named = len(name) <= MAX_TEXT and _IDENTIFIER.fullmatch(name)
        _require(bool(named), f"dimension name {name[:80]!r} is not an identifier")
        _require(largest <= MAX_SIZE, f"dimension {name!r} is up to {largest}, the limit is {MAX_SIZE}")
        inside = 0 <= smallest <= program.example[name] <= largest
        _require(inside, f"dimension {name!r}: example {program.example[name]} is not within {smallest} to {largest}")


def _check_specs(what: str, specs: tuple[TensorSpec, ...], dimensions: Iterable[str] | None) -> None:
    _require(len(specs) <= MAX_TENSORS, f"more than {MAX_TENSORS} {what}s")
    _check_unique(what, (spec.name for spec in specs))
    for spec in specs:
        _require(spec.datatype in DATATYPE_BYTES, f"{what} {spec.name!r} has unknown datatype {spec.datatype[:80]!r}")
        _require(len(spec.shape) <= MAX_RANK, f"{what} {spec.name!r} has more than {MAX_RANK} dimensions")
        for size in spec.shape:
            if isinstance(size, int):
                _require(0 <= size <= MAX_SIZE, f"{what} {spec.name!r} has a size of {size}")
                continue
            _check_text(f"each size of {what} {spec.name!r}", size)
            _require(dimensions is None or size in dimensions, f"{what} {spec.name!r} has an unknown size {size!r}")


def _check_output_sizes(program: Program) -> None:
    """Check that each size of an output is a number, or names at least one dimension and no unknown one."""
    for spec in program.outputs:
        for size in spec.shape:
            found = _OPERAND.findall(size) if isinstance(size, str) else []
            # The last case of a choice between sizes has the condition True.
            names = [name for name in found if not iskeyword(name)]
            unknown = next((name for name in names if name not in program.dimensions), None)
            _require(unknown is None, f"output {spec.name!r} has a size {size!r} of an unknown {unknown!r}")
            _require(
                isinstance(size, int) or bool(names), f"output {spec.name!r} has a size {size!r}, which is not valid"
            )


def _check_weights(weights: tuple[Weight, ...]) -> None:
    _require(len(weights) <= MAX_WEIGHTS, f"{len(weights)} weights, the limit is {MAX_WEIGHTS}")
    _check_unique("weight", (weight.name for weight in weights))
    for weight in weights:
        _require(weight.dtype in DTYPE_BYTES, f"weight {weight.name!r} has unknown type {weight.dtype[:80]!r}")
        sized = len(weight.shape) <= MAX_RANK and all(0 <= size <= MAX_SIZE for size in weight.shape)
        _require(sized and weight.nbytes <= MAX_SIZE, f"weight {weight.name!r} has an impossible shape")
        # The length first: to sort a long order would block all threads of the process.
        listed = len(weight.order) == len(weight.shape) and sorted(weight.order) == list(range(len(weight.shape)))
        _require(
            not weight.order or listed,
            f"weight {weight.name!r} has {len(weight.shape)} dimensions, which its order does not list",
        )


def _check_values(program: Program) -> None:
    _require(len(program.values) <= MAX_VALUES, f"{len(program.values)} values, the limit is {MAX_VALUES}")
    terms = sum(len(value.nbytes) for value in program.values)
    _require(terms <= MAX_ALL_TERMS, f"the sizes of all values have {terms} terms, the limit is {MAX_ALL_TERMS}")
    made = sum(len(call.outputs) for call in program.calls)
    _require(len(program.values) == made, f"{len(program.values)} values are described, the calls make {made}")
    for at, value in enumerate(program.values):
        slot = program.first_value + at
        if value.dtype not in DTYPE_BYTES and value.dtype not in SYMBOLIC_KINDS:
            raise ProgramError(f"value {slot} has unknown type {value.dtype[:80]!r}")
        if not -1 <= value.base < slot:
            raise ProgramError(f"value {slot} cannot share memory with slot {value.base}")
        for size in value.shape or ():
            if size not in program.dimensions and not (isinstance(size, int) and 0 <= size <= MAX_SIZE):
                raise ProgramError(f"value {slot} has a malformed shape")
        if len(value.shape or ()) > MAX_RANK:
            raise ProgramError(f"value {slot} has more than {MAX_RANK} dimensions")
        if len(value.nbytes) > MAX_TERMS:
            raise ProgramError(f"the size of value {slot} has {len(value.nbytes)} terms, the limit is {MAX_TERMS}")
        for term in value.nbytes:
            powers = len(term.powers) == len(program.dimensions) and all(power >= 0 for power in term.powers)
            bounded = sum(term.powers) <= MAX_DEGREE and abs(term.coefficient) <= MAX_COEFFICIENT
            if not powers or not bounded:
                raise ProgramError(f"value {slot} has a malformed size")


def _check_layers(program: Program) -> None:
    at = 0
    for layer in program.layers:
        _check_text("the path of each layer", layer.path)
        follows = layer.start == at and layer.stop > at
        _require(follows, f"layer {layer.path!r} has no calls, or does not begin where the one before it ends")
        counts = (layer.macs, layer.weight_bytes, layer.output_bytes)
        _require(all(count >= 0 for count in counts), f"layer {layer.path!r} has a negative count")
        at = layer.stop
    _require(at == len(program.calls), f"the layers cover {at} of {len(program.calls)} calls")


class _Walk:
    """One pass over the calls in order, with the slots that are set at that moment."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.alive = set(range(program.first_value))
        self.bits: dict[int, int] = {}
        """The most bits of each number, whether it comes from sizes or from an element of a tensor."""

    def check(self) -> None:
        program = self.program
        slot = program.first_value
        for index, call in enumerate(program.calls):
            where = f"call {index}, {call.operator[:80]}"
            _require(is_allowed(call.operator), f"{where}: not an operator that a program may call")
            self._check_arguments(call, where)
            self._check_outputs(call, slot, where)
            slot += len(call.outputs)
            self._check_frees(call, where)
        _require(len(program.output_slots) == len(program.outputs), "each output needs one slot")
        for slot in program.output_slots:
            _require(slot in self.alive, f"output slot {slot} holds nothing at the end")
            _require(slot not in self.bits, f"output slot {slot} holds a number, not a tensor")

    def _check_arguments(self, call: Call, where: str) -> None:
        parts: list[SingleArgument] = []
        for argument in (*call.args, *call.kwargs.values()):
            parts.extend(argument if isinstance(argument, tuple) else (argument,))
        _require(len(parts) + len(call.args) + len(call.kwargs) <= MAX_CALL_PARTS, f"{where}: too many arguments")
        for key in call.kwargs:
            named = len(key) <= MAX_TEXT and _IDENTIFIER.fullmatch(key) and not iskeyword(key)
            _require(bool(named), f"{where}: {key[:80]!r} is not an argument name")
        for part in parts:
            self._check_part(part, where)
        for position, name, value in REQUIRED.get(call.operator, ()):
            _require(len(call.args) <= position or name not in call.kwargs, f"{where}: {name} is given twice")
            given = call.args[position] if len(call.args) > position else call.kwargs.get(name, value)
            _require(type(given) is type(value) and given == value, f"{where}: {name} must be {value}")

    def _check_part(self, part: SingleArgument, where: str) -> None:
        match part:
            case Slot(number):
                if number not in self.alive:
                    raise ProgramError(f"{where}: reads slot {number}, which holds nothing")
            case Dtype(name):
                _require(name in DTYPE_BYTES, f"{where}: unknown type {name[:80]!r}")
            case MemoryFormat(name):
                _require(name in MEMORY_FORMATS, f"{where}: unknown memory format {name[:80]!r}")
            case str():
                _check_text(f"{where}: each text", part)
            case int():
                if not -(1 << 63) <= part < 1 << 63:
                    raise ProgramError(f"{where}: {part} does not fit in 64 bits")
            case None | float() | Device():
                pass

    def _check_outputs(self, call: Call, first: int, where: str) -> None:
        count = len(call.outputs)
        if call.operator in CHECKS:
            self._check_assertion(call, where)
            return
        _require(0 < count <= MAX_CALL_PARTS, f"{where}: a call must give 1 to {MAX_CALL_PARTS} results, not {count}")
        _require(call.outputs == tuple(range(first, first + count)), f"{where}: results must take the next free slots")
        symbolic = is_symbolic(call.operator)
        for slot in call.outputs:
            kind = self.program.values[slot - self.program.first_value].dtype
            if (kind in SYMBOLIC_KINDS) != symbolic:
                raise ProgramError(f"{where}: cannot give a {kind}")
        if symbolic:
            self.bits[first] = self._number_bits(call, where)
            _require(count == 1, f"{where}: gives one number")
        self.alive.update(call.outputs)

    def _check_assertion(self, call: Call, where: str) -> None:
        _require(not call.outputs, f"{where}: a check gives nothing, not {len(call.outputs)} results")
        match call.args[:1]:
            case (Slot(number),):
                is_number = number in self.bits
            case (bool() | int() | float(),):
                is_number = True
            case _:
                raise ProgramError(f"{where}: has nothing to check")
        if is_number != (call.operator in NUMBER_CHECKS):
            raise ProgramError(f"{where}: cannot check a {'number' if is_number else 'tensor'}")

    def _number_bits(self, call: Call, where: str) -> int:
        """Return the most bits that the call's result can need, treating every function of numbers as a product."""
        if call.operator in ITEM_OPERATORS:
            return ITEM_BITS
        if call.operator in SIZE_OPERATORS:
            return MAX_SIZE.bit_length()
        bits = 1
        _require(not call.kwargs, f"{where}: takes no named arguments")
        for argument in call.args:
            if isinstance(argument, Slot):
                _require(argument.number in self.bits, f"{where}: slot {argument.number} holds no number")
                bits += self.bits[argument.number]
            else:
                _require(isinstance(argument, int | float), f"{where}: takes numbers only")
                bits += 64
        _require(bits <= MAX_NUMBER_BITS, f"{where}: its result could need {bits} bits")
        return bits

    def _check_frees(self, call: Call, where: str) -> None:
        for slot in call.frees:
            if slot not in self.alive or slot < self.program.first_value:
                raise ProgramError(f"{where}: frees slot {slot}, which is no live result")
            self.alive.discard(slot)
