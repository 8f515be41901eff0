"""Decides whether a call could write to a weight or an input, and whether a program with in-place writes can be cut.

The decision uses the operator table alone, so it is known before anything runs. It is conservative: a result of a view
operator is assumed to share memory with every argument.
"""

from overwinter.core.errors import ProgramError
from overwinter.model.liveness import alive_across
from overwinter.model.operators import MUTATING, VIEWS
from overwinter.model.structure import SYMBOLIC_KINDS, Call, Program, Slot, slots_of


def written_slot(call: Call) -> int | None:
    """Return the slot that a call writes to, or None; raise ProgramError if the first argument of a mutating call is
    not a slot.
    """
    if call.operator not in MUTATING:
        return None
    if not call.args or not isinstance(call.args[0], Slot):
        raise ProgramError(f"{call.operator} writes in place, so its first argument must be a value")
    return call.args[0].number


def check_writes(program: Program) -> None:
    """Raise ProgramError if any call might write to the memory of a weight or an input, or writes in place to an
    argument that is not a slot.
    """
    owner: dict[int, int] = {slot: slot for slot in range(program.first_value)}
    for index, call in enumerate(program.calls):
        target = written_slot(call)
        if target is not None and target in owner:
            raise ProgramError(
                f"call {index}, {call.operator}, writes in place to {program.slot_name(owner[target])} or a view of "
                "it, which is read-only; use the out-of-place form, or clone() first"
            )
        if call.operator in VIEWS:
            shared = next((owner[slot] for slot in slots_of(call) if slot in owner), None)
            if shared is not None:
                owner.update(dict.fromkeys(call.outputs, shared))


def check_span(program: Program, start: int, stop: int) -> None:
    """Raise ProgramError if the calls from `start` to `stop` cannot run separately from the rest.

    Values that share memory are copied when they are sent to another process. A later in-place write to one of them
    would then not change the others.
    """
    group = memory_groups(program)
    for cut in {start, stop} - {0, len(program.calls)}:
        _check_cut(program, cut, group)
    before = program.first_value + sum(len(call.outputs) for call in program.calls[:start])
    stale = {group[slot] for slot in alive_across(program, stop) if slot < before}
    for index in range(start, stop):
        target = written_slot(program.calls[index])
        if target is not None and group[target] in stale:
            raise ProgramError(
                f"calls {start} to {stop} cannot run separately: call {index} writes to the memory of an earlier value "
                "that later calls need"
            )


def _check_cut(program: Program, cut: int, group: list[int]) -> None:
    members: dict[int, int] = {}
    for slot in alive_across(program, cut):
        members[group[slot]] = members.get(group[slot], 0) + 1
    for index in range(cut, len(program.calls)):
        target = written_slot(program.calls[index])
        if target is not None and members.get(group[target], 0) > 1:
            raise ProgramError(
                f"the program cannot be cut before call {cut}: call {index}, {program.calls[index].operator}, writes "
                "to memory that several values share across the cut"
            )


def memory_groups(program: Program) -> list[int]:
    """Return for each slot the smallest slot with which it may share memory, directly or indirectly."""
    parent = list(range(program.first_value + len(program.values)))

    def root(slot: int) -> int:
        while parent[slot] != slot:
            parent[slot] = parent[parent[slot]]
            slot = parent[slot]
        return slot

    numbers = {program.first_value + at for at, value in enumerate(program.values) if value.dtype in SYMBOLIC_KINDS}
    for call in program.calls:
        if call.operator not in VIEWS and call.operator not in MUTATING:
            continue
        sources = slots_of(call) if call.operator in VIEWS else slots_of(call)[:1]
        ends = sorted({root(slot) for slot in (*sources, *call.outputs) if slot not in numbers})
        for end in ends[1:]:
            parent[end] = ends[0]
    return [root(slot) for slot in range(len(parent))]
