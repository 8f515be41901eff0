"""Computes which call reads each value of a program last, which values cross a cut, and the peak memory."""

from collections.abc import Mapping, Sequence

from overwinter.core.datatypes import DATATYPE_BYTES
from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.structure import Call, Program, evaluate, slots_of


def with_frees(calls: Sequence[Call], first_value: int, output_slots: Sequence[int]) -> tuple[Call, ...]:
    """Return the calls with `frees` filled in: each result that is not an output is freed after its last use."""
    last_use: dict[int, int] = {}
    for index, call in enumerate(calls):
        for slot in (*call.outputs, *slots_of(call)):
            last_use[slot] = index
    freed: list[list[int]] = [[] for _ in calls]
    for slot in sorted(last_use.keys() - set(output_slots)):
        if slot >= first_value:
            freed[last_use[slot]].append(slot)
    return tuple(
        Call(call.operator, call.args, call.kwargs, call.outputs, tuple(frees))
        for call, frees in zip(calls, freed, strict=True)
    )


def span(program: Program, start: int, stop: int | None) -> tuple[int, int]:
    """Return the span with its end filled in; raise ProgramError unless it is within the program's calls."""
    end = len(program.calls) if stop is None else stop
    if not 0 <= start <= end <= len(program.calls):
        raise ProgramError(f"calls {start} to {end} are not a span of a program of {len(program.calls)} calls")
    return start, end


def live_in(program: Program, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
    """Return the slots that calls `start` to `stop` need as inputs, in ascending order.

    If they begin with the program's first call, these are all the program's inputs; otherwise the inputs and earlier
    results that they read (or, if they end at the program's end, that the program returns).
    """
    start, end = span(program, start, stop)
    if start == 0:
        return tuple(range(program.first_input, program.first_value))
    first_own = program.first_value + sum(len(call.outputs) for call in program.calls[:start])
    read = {slot for call in program.calls[start:end] for slot in slots_of(call)}
    if end == len(program.calls):
        read.update(program.output_slots)
    return tuple(sorted(slot for slot in read if program.first_input <= slot < first_own))


def live_out(program: Program, stop: int | None = None, start: int = 0) -> tuple[int, ...]:
    """Return the slots that calls `start` to `stop` return: their results that the program returns or that call `stop`
    or a later one reads, in ascending order.

    At the program's end these are its output slots, in the program's order.
    """
    start, end = span(program, start, stop)
    if end == len(program.calls):
        return program.output_slots
    first_own = program.first_value + sum(len(call.outputs) for call in program.calls[:start])
    first_later = first_own + sum(len(call.outputs) for call in program.calls[start:end])
    read = set(program.output_slots).union(*(slots_of(call) for call in program.calls[end:]))
    return tuple(sorted(slot for slot in read if first_own <= slot < first_later))


def first_uses(program: Program) -> list[int]:
    """Return for each weight the first call that reads it; the number of calls if none does."""
    found = [len(program.calls)] * len(program.weights)
    for index in reversed(range(len(program.calls))):
        for slot in slots_of(program.calls[index]):
            if slot < program.first_input:
                found[slot] = index
    return found


def alive_across(program: Program, cut: int) -> set[int]:
    """Return the results made before call `cut` and needed at or after it, without inputs and weights."""
    made = program.first_value + sum(len(call.outputs) for call in program.calls[:cut])
    read = set(program.output_slots).union(*(slots_of(call) for call in program.calls[cut:]))
    return {slot for slot in read if program.first_value <= slot < made}


def dimension_sizes(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return each dynamic size in the program's order, by default the example's; raise ProgramError for an
    invalid one.
    """
    unknown = sizes.keys() - program.dimensions.keys()
    if unknown:
        known = ", ".join(program.dimensions) or "none"
        raise ProgramError(f"no dimension {sorted(unknown)[0]!r}; the program's dimensions: {known}")
    filled: dict[str, int] = {}
    for name, (smallest, largest) in program.dimensions.items():
        size = sizes.get(name, program.example[name])
        if not smallest <= size <= largest:
            raise ProgramError(f"dimension {name!r} has size {size}, which is not within {smallest} to {largest}")
        filled[name] = size
    return filled


def peak_activation_bytes(program: Program, sizes: Mapping[str, int] | None = None) -> int:
    """Return the most bytes of inputs and results alive at once, at these dynamic sizes (by default the example's).

    Values that share memory are counted once, as long as any of them is alive. Weights, scratch memory of operators and
    the allocator's rounding are not counted. Raises ProgramError for an unknown dimension or a size out of range.
    """
    filled = dimension_sizes(program, sizes or {})
    inputs = sum(input_bytes(spec, filled) for spec in program.inputs)
    owner = list(range(program.first_value))
    for at, value in enumerate(program.values):
        owner.append(owner[value.base] if value.base >= 0 else program.first_value + at)
    holders: dict[int, int] = {}
    held: dict[int, int] = {}
    alive = peak = inputs
    for call in program.calls:
        for slot in call.outputs:
            root = owner[slot]
            holders[root] = holders.get(root, 0) + 1
            if root == slot:
                held[root] = evaluate(program.values[slot - program.first_value].nbytes, filled)
                alive += held[root]
        peak = max(peak, alive)
        for slot in call.frees:
            root = owner[slot]
            holders[root] -= 1
            if not holders[root]:
                alive -= held.pop(root, 0)
    return peak


def input_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Return the bytes of one input at these dynamic sizes."""
    count = 1
    for size in spec.shape:
        count *= sizes[size] if isinstance(size, str) else size
    return count * DATATYPE_BYTES[spec.datatype]
