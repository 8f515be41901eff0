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
    SingleArgument,
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
        self._producer = [index for index, call in enumerate(program.calls) for _ in call.outputs]
        """The call that produces each value."""
        self._first_results = [program.first_value]
        """For each call, the first value that it or a later call produces."""
        for call in program.calls:
            self._first_results.append(self._first_results[-1] + len(call.outputs))
        self._groups = memory_groups(program)
        self._last_write: dict[int, int] = {}
        """The last call that writes to each group of values that share memory."""
        for index, call in enumerate(program.calls):
            target = written_slot(call)
            if target is not None:
                self._last_write[self._groups[target]] = index
        self._root: list[int] = []
        """For each value, the one to which the calls that produced it wrote in place; the value itself if none did."""
        for call in program.calls:
            target = written_slot(call)
            first = program.first_value
            root = None if target is None else target if target < first else self._root[target - first]
            self._root += [slot if root is None else root for slot in call.outputs]
        self._fixed: list[bool] = []
        """Whether each call depends on weights and numbers only, without reading a number from a tensor, and no call
        writes to its results.
        """
        self._can_pass: list[bool] = []
        """Whether later slices can have each value: it can be sent, or computed again from values that can."""
        for call in program.calls:
            self._fixed.append(self._is_fixed(call))
            inputs_can_pass = self._inputs_can_pass(call)
            self._can_pass += [
                inputs_can_pass if self._is_derived(slot) else self._can_be_sent(slot) for slot in call.outputs
            ]

    def cuts(self) -> Iterator[tuple[int, int]]:
        """Yield the calls before which the program can be cut, and the bytes of the values that are live across the
        cut, at the example's sizes: no later call writes to these values, and later slices can have them.
        """
        program, end = self._program, len(self._program.calls)
        last = {slot: index for index, call in enumerate(program.calls) for slot in slots_of(call)}
        last |= dict.fromkeys(program.output_slots, end)
        live: dict[int, int] = {}
        ending: dict[int, list[int]] = {}
        written: dict[int, list[int]] = {}
        blocking = set[int]()
        """The live values that prevent a cut: a later call writes to them, or no later slice can have them."""
        nbytes = 0
        for index, call in enumerate(program.calls[:-1]):
            for slot in call.outputs:
                if last.get(slot, 0) <= index:
                    continue
                live[slot] = evaluate(self._value(slot).nbytes, program.example)
                ending.setdefault(last[slot], []).append(slot)
                nbytes += live[slot]
                if not self._can_pass[slot - program.first_value]:
                    blocking.add(slot)
                elif (write := self._last_write.get(self._groups[slot], 0)) > index:
                    written.setdefault(write, []).append(slot)
                    blocking.add(slot)
            for slot in ending.pop(index, ()):
                nbytes -= live.pop(slot)
                blocking.discard(slot)
            blocking.difference_update(written.pop(index, ()))
            if not blocking:
                yield index + 1, nbytes

    def slice(self, start: int, stop: int) -> Program:
        """Return calls `start` to `stop` as a program; `start` and `stop` are cuts that `cuts` yields, or ends of the
        program. Raises ProgramError if a value cannot be sent from one slice to another.
        """
        program = self._program
        received, repeated = self._needs(start, stop)
        if start == 0:
            received = list(range(program.first_input, program.first_value))
        outputs, returned = program.outputs, program.output_slots
        if stop < len(program.calls):
            after, _ = self._needs(stop, len(program.calls))
            returned = tuple(slot for slot in after if slot >= self._first_results[start])
            outputs = tuple(self._spec(slot) for slot in returned)
        indices = [*repeated, *range(start, stop)]
        read = {slot for index in indices for slot in slots_of(program.calls[index])}.union(returned)
        weights = sorted(slot for slot in read if slot < program.first_input)
        new_slots = {slot: number for number, slot in enumerate((*weights, *received))}
        calls, values = list[Call](), list[Value]()
        for index in indices:
            call = self._renumbered(program.calls[index], new_slots, len(weights) + len(received) + len(values))
            new_slots |= zip(program.calls[index].outputs, call.outputs, strict=True)
            for slot in program.calls[index].outputs:
                values.append(structs.replace(self._value(slot), base=new_slots.get(self._value(slot).base, -1)))
            calls.append(call)
        output_slots = tuple(self._new_slot(slot, new_slots) for slot in returned)
        held = tuple(program.weights[slot] for slot in weights)
        return Program(
            inputs=tuple(self._spec(slot) for slot in received),
            outputs=outputs,
            weights=held,
            calls=with_frees(calls, len(weights) + len(received), output_slots),
            values=tuple(values),
            output_slots=output_slots,
            layers=(Layer("", 0, len(calls), 0, sum(weight.nbytes for weight in held), 0),),
            dimensions=program.dimensions,
            example=program.example,
        )

    def _needs(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return the values that calls `start` to `stop` receive, and the earlier calls that they repeat."""
        program = self._program
        pending = [slot for call in program.calls[start:stop] for slot in slots_of(call)]
        if stop == len(program.calls):
            pending += program.output_slots
        received, repeated, seen = set[int](), set[int](), set[int]()
        while pending:
            slot = pending.pop()
            if slot in seen or not program.first_input <= slot < self._first_results[start]:
                continue
            seen.add(slot)
            if slot < program.first_value:
                received.add(slot)
            elif (target := self._target(slot)) is not None:
                pending.append(target)
            elif self._is_repeated(slot):
                producer = self._producer_of(slot)
                if producer not in repeated:
                    repeated.add(producer)
                    pending += slots_of(program.calls[producer])
            else:
                self._check_sent(slot)
                received.add(slot)
        return sorted(received), sorted(repeated)

    def _producer_of(self, slot: int) -> int:
        return self._producer[slot - self._program.first_value]

    def _value(self, slot: int) -> Value:
        return self._program.values[slot - self._program.first_value]

    def _target(self, slot: int) -> int | None:
        """Return the value to which the call that produced this slot's value writes; None if it writes to none."""
        return written_slot(self._program.calls[self._producer_of(slot)])

    def _is_fixed(self, call: Call) -> bool:
        """Return the entry of `_fixed` for a call; those of all earlier calls are known."""
        program = self._program
        if call.operator in ITEM_OPERATORS or any(self._groups[slot] in self._last_write for slot in call.outputs):
            return False
        values = (slot for slot in slots_of(call) if slot >= program.first_input)
        return all(
            slot >= program.first_value and (self._is_number(slot) or self._fixed[self._producer_of(slot)])
            for slot in values
        )

    def _is_number(self, slot: int) -> bool:
        return self._value(slot).dtype in SYMBOLIC_KINDS

    def _is_repeated(self, slot: int) -> bool:
        producer = self._producer_of(slot)
        if self._program.calls[producer].operator in ITEM_OPERATORS:
            return False
        return self._is_number(slot) or self._value(slot).base >= 0 or self._fixed[producer]

    def _inputs_can_pass(self, call: Call) -> bool:
        """Whether later slices that repeat a call can have what it reads; for a call that writes in place, whether they
        can have the value to which it writes. `_can_pass` holds this for all earlier values.
        """
        target, first = written_slot(call), self._program.first_value
        return all(
            each < first or self._can_pass[each - first] for each in (slots_of(call) if target is None else [target])
        )

    def _is_derived(self, slot: int) -> bool:
        """Whether later slices derive a value from others, instead of receiving it."""
        return self._target(slot) is not None or self._is_repeated(slot)

    def _can_be_sent(self, slot: int) -> bool:
        value = self._value(slot)
        return value.shape is not None and value.dtype in DATATYPES

    def _check_sent(self, slot: int) -> None:
        if not self._can_be_sent(slot):
            operator = self._program.calls[self._producer_of(slot)].operator
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

    def _renumbered(self, call: Call, new_slots: dict[int, int], first: int) -> Call:
        """Return a call with the slots of a slice; `first`: that of its first result."""
        args = tuple(self._renumbered_argument(argument, new_slots) for argument in call.args)
        kwargs = {key: self._renumbered_argument(argument, new_slots) for key, argument in call.kwargs.items()}
        return Call(call.operator, args, kwargs, tuple(range(first, first + len(call.outputs))))

    def _renumbered_argument(self, argument: Argument, new_slots: dict[int, int]) -> Argument:
        if isinstance(argument, tuple):
            return tuple(self._renumbered_part(part, new_slots) for part in argument)
        return self._renumbered_part(argument, new_slots)

    def _renumbered_part(self, part: SingleArgument, new_slots: dict[int, int]) -> SingleArgument:
        return Slot(self._new_slot(part.number, new_slots)) if isinstance(part, Slot) else part

    def _new_slot(self, slot: int, new_slots: dict[int, int]) -> int:
        """Return the slot in a slice. What an earlier slice wrote in place is in the slot that it wrote to."""
        return new_slots[slot] if slot in new_slots else new_slots[self._root[slot - self._program.first_value]]
