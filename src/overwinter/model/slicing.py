"""Cuts a program into slices: consecutive calls that are programs of their own.

A slice takes the values of earlier slices that it needs, and returns those of its own that later slices need. Such a
value has its own memory, is in row-major order, and its sizes are fixed or dimensions, so that another process gets the
same tensor. A slice computes other values again: numbers, views, and what depends on weights and sizes only.
"""

from collections.abc import Iterator

from msgspec import structs

from overwinter.core.datatypes import DATATYPES
from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.aliasing import memory_groups, written_slot
from overwinter.model.liveness import with_frees
from overwinter.model.operators import ITEM_OPERATORS
from overwinter.model.structure import (
    SYMBOLIC_KINDS,
    Argument,
    Call,
    Layer,
    Program,
    Scalar,
    Slot,
    Value,
    evaluate,
    slots_of,
)


class Slicer:
    """The slices of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._input_names = {spec.name for spec in program.inputs}
        self._maker = [index for index, call in enumerate(program.calls) for _ in call.outputs]
        """The call that makes each value."""
        self._first_made = [program.first_value]
        """The first value that each call or a later one makes."""
        for call in program.calls:
            self._first_made.append(self._first_made[-1] + len(call.outputs))
        self._groups = memory_groups(program)
        self._last_write: dict[int, int] = {}
        """The last call that writes to each group of values that share memory."""
        for index, call in enumerate(program.calls):
            target = written_slot(call)
            if target is not None:
                self._last_write[self._groups[target]] = index
        self._root: list[int] = []
        """The value to which the calls wrote in place that made each value; the value itself if none did."""
        for call in program.calls:
            target = written_slot(call)
            first = program.first_value
            root = None if target is None else target if target < first else self._root[target - first]
            self._root += [slot if root is None else root for slot in call.outputs]
        self._fixed: list[bool] = []
        """Whether each call depends on weights and sizes only, and no call writes to its results."""
        self._can_pass: list[bool] = []
        """Whether later slices can have each value: it can be sent, or computed again from values that can."""
        for call in program.calls:
            self._fixed.append(self._is_fixed(call))
            needed_can = self._needed_can_pass(call)
            self._can_pass += [
                needed_can if self._is_derived(slot) else self._can_be_sent(slot) for slot in call.outputs
            ]

    def cuts(self) -> Iterator[tuple[int, int]]:
        """Yield the calls before which the program can be cut, and the bytes of the values that are alive across the
        cut, at the example's sizes: no later call writes to these values, and later slices can have them.
        """
        program, end = self._program, len(self._program.calls)
        last = {slot: index for index, call in enumerate(program.calls) for slot in slots_of(call)}
        last |= dict.fromkeys(program.output_slots, end)
        alive: dict[int, int] = {}
        dying: dict[int, list[int]] = {}
        written: dict[int, list[int]] = {}
        hindering = set[int]()
        """The alive values that a later call writes to, or that no later slice can have."""
        nbytes = 0
        for index, call in enumerate(program.calls[:-1]):
            for slot in call.outputs:
                if last.get(slot, 0) <= index:
                    continue
                alive[slot] = evaluate(self._value(slot).nbytes, program.example)
                dying.setdefault(last[slot], []).append(slot)
                nbytes += alive[slot]
                if not self._can_pass[slot - program.first_value]:
                    hindering.add(slot)
                elif (write := self._last_write.get(self._groups[slot], 0)) > index:
                    written.setdefault(write, []).append(slot)
                    hindering.add(slot)
            for slot in dying.pop(index, ()):
                nbytes -= alive.pop(slot)
                hindering.discard(slot)
            hindering.difference_update(written.pop(index, ()))
            if not hindering:
                yield index + 1, nbytes

    def slice(self, start: int, stop: int) -> Program:
        """Return calls `start` to `stop` as a program; raise ProgramError if it cannot be cut there."""
        program = self._program
        taken, repeated = self._needs(start, stop)
        if start == 0:
            taken = list(range(program.first_input, program.first_value))
        outputs, given = program.outputs, program.output_slots
        if stop < len(program.calls):
            after, _ = self._needs(stop, len(program.calls))
            given = tuple(slot for slot in after if slot >= self._first_made[start])
            outputs = tuple(self._spec(slot) for slot in given)
        indices = [*repeated, *range(start, stop)]
        read = {slot for index in indices for slot in slots_of(program.calls[index])}.union(given)
        weights = sorted(slot for slot in read if slot < program.first_input)
        places = {slot: number for number, slot in enumerate((*weights, *taken))}
        calls, values = list[Call](), list[Value]()
        for index in indices:
            call = self._moved(program.calls[index], places, len(weights) + len(taken) + len(values))
            places |= zip(program.calls[index].outputs, call.outputs, strict=True)
            for slot in program.calls[index].outputs:
                values.append(structs.replace(self._value(slot), base=places.get(self._value(slot).base, -1)))
            calls.append(call)
        output_slots = tuple(self._place(slot, places) for slot in given)
        held = tuple(program.weights[slot] for slot in weights)
        return Program(
            inputs=tuple(self._spec(slot) for slot in taken),
            outputs=outputs,
            weights=held,
            calls=with_frees(calls, len(weights) + len(taken), output_slots),
            values=tuple(values),
            output_slots=output_slots,
            layers=(Layer("", 0, len(calls), 0, sum(weight.nbytes for weight in held), 0),),
            dimensions=program.dimensions,
            example=program.example,
        )

    def _needs(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return what calls `start` to `stop` take from before, and the earlier calls that they repeat."""
        program = self._program
        pending = [slot for call in program.calls[start:stop] for slot in slots_of(call)]
        if stop == len(program.calls):
            pending += program.output_slots
        taken, repeated, seen = set[int](), set[int](), set[int]()
        while pending:
            slot = pending.pop()
            if slot in seen or not program.first_input <= slot < self._first_made[start]:
                continue
            seen.add(slot)
            if slot < program.first_value:
                taken.add(slot)
            elif (target := self._target(slot)) is not None:
                pending.append(target)
            elif self._is_repeated(slot):
                maker = self._maker_of(slot)
                if maker not in repeated:
                    repeated.add(maker)
                    pending += slots_of(program.calls[maker])
            else:
                self._check_sent(slot)
                taken.add(slot)
        return sorted(taken), sorted(repeated)

    def _maker_of(self, slot: int) -> int:
        return self._maker[slot - self._program.first_value]

    def _value(self, slot: int) -> Value:
        return self._program.values[slot - self._program.first_value]

    def _target(self, slot: int) -> int | None:
        """Return the value to which the call that made this slot's value writes; None if it writes to none."""
        return written_slot(self._program.calls[self._maker_of(slot)])

    def _is_fixed(self, call: Call) -> bool:
        """Whether a call depends on weights and sizes only; `_fixed` already says so for all earlier calls."""
        program = self._program
        if call.operator in ITEM_OPERATORS or any(self._groups[slot] in self._last_write for slot in call.outputs):
            return False
        values = (slot for slot in slots_of(call) if slot >= program.first_input)
        return all(
            slot >= program.first_value and (self._is_number(slot) or self._fixed[self._maker_of(slot)])
            for slot in values
        )

    def _is_number(self, slot: int) -> bool:
        return self._value(slot).dtype in SYMBOLIC_KINDS

    def _is_repeated(self, slot: int) -> bool:
        maker = self._maker_of(slot)
        if self._program.calls[maker].operator in ITEM_OPERATORS:
            return False
        return self._is_number(slot) or self._value(slot).base >= 0 or self._fixed[maker]

    def _needed_can_pass(self, call: Call) -> bool:
        """Whether later slices can have what a call needs, which `_can_pass` already says, if they repeat it; if it
        writes in place, whether they can have the value to which it writes.
        """
        target, first = written_slot(call), self._program.first_value
        return all(
            each < first or self._can_pass[each - first] for each in (slots_of(call) if target is None else [target])
        )

    def _is_derived(self, slot: int) -> bool:
        """Whether later slices have a value from others, instead of receiving it."""
        return self._target(slot) is not None or self._is_repeated(slot)

    def _can_be_sent(self, slot: int) -> bool:
        value = self._value(slot)
        return value.shape is not None and value.dtype in DATATYPES

    def _check_sent(self, slot: int) -> None:
        if not self._can_be_sent(slot):
            operator = self._program.calls[self._maker_of(slot)].operator
            raise ProgramError(f"value {slot}, a result of {operator}, cannot be sent from one slice to another")

    def _spec(self, slot: int) -> TensorSpec:
        program = self._program
        if slot < program.first_value:
            return program.inputs[slot - program.first_input]
        value = self._value(slot)
        assert value.shape is not None, "it was checked"
        return TensorSpec(self._name(slot), DATATYPES[value.dtype], value.shape)

    def _name(self, slot: int) -> str:
        """Return a name that no input of the program has."""
        name = f"value {slot}"
        while name in self._input_names:
            name += "'"
        return name

    def _moved(self, call: Call, places: dict[int, int], first: int) -> Call:
        """Return a call with the slots of a slice; `first`: that of its first result."""
        args = tuple(self._moved_argument(argument, places) for argument in call.args)
        kwargs = {key: self._moved_argument(argument, places) for key, argument in call.kwargs.items()}
        return Call(call.operator, args, kwargs, tuple(range(first, first + len(call.outputs))))

    def _moved_argument(self, argument: Argument, places: dict[int, int]) -> Argument:
        if isinstance(argument, tuple):
            return tuple(self._moved_part(part, places) for part in argument)
        return self._moved_part(argument, places)

    def _moved_part(self, part: Scalar, places: dict[int, int]) -> Scalar:
        return Slot(self._place(part.number, places)) if isinstance(part, Slot) else part

    def _place(self, slot: int, places: dict[int, int]) -> int:
        """Return the slot in a slice. What an earlier slice wrote in place is in the slot that it wrote to."""
        return places[slot] if slot in places else places[self._root[slot - self._program.first_value]]
