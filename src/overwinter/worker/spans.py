"""Decides how a program is split into spans for functions that differ in some of its weights.

A call is separate if it reads a differing weight, or a value without rows that was computed from one. Separate
calls belong to the same separate span if no other call between them reads a weight; calls between them without weights
are part of that span. The other calls form shared spans. See docs/decisions/trunks.md.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from overwinter.model.program import Program
from overwinter.model.structure import BATCH, SYMBOLIC_KINDS, slots_of


class Span(NamedTuple):
    """Consecutive calls of a program."""

    start: int
    """The first call."""
    stop: int
    """The first call after it."""
    separate: bool
    """Whether it runs separately for each function."""


def possible_splits(program: Program, differing: frozenset[int]) -> Iterator[list[Span]]:
    """Yield the possible splits of a program into spans, the best first: only those in which weights are shared."""
    end = len(program.calls)
    calls = _separate_calls(program, differing)
    if not calls:
        yield [Span(0, end, False)]
        return
    reads = [any(slot < program.first_input for slot in slots_of(call)) for call in program.calls]
    spans = list[Span]()
    at = 0
    for start, stop in _separate_spans(calls, reads):
        if at < start:
            spans.append(Span(at, start, False))
        spans.append(Span(start, stop, True))
        at = stop
    if at < end:
        spans.append(Span(at, end, False))
    # One cut, before the first separate call.
    coarse = [Span(0, calls[0], False), Span(calls[0], end, True)]
    for each in (spans, coarse):
        if any(any(reads[span.start : span.stop]) for span in each if not span.separate):
            yield [span for span in each if span.start < span.stop]


def _separate_spans(calls: Sequence[int], reads: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the separate spans. Separate calls with no other weight between them form one: joining and splitting the
    rows would cost more than it saves.
    """
    start = last = calls[0]
    for call in calls[1:]:
        if any(reads[last + 1 : call]):
            yield start, last + 1
            start = call
        last = call
    yield start, last + 1


def _separate_calls(program: Program, differing: frozenset[int]) -> list[int]:
    """Return the calls that read a differing weight, or a value without rows that was computed from one, such as a
    transposed weight.
    """
    batch = list(program.dimensions).index(BATCH)
    read_separately = set(differing)
    found = []
    for index, call in enumerate(program.calls):
        if read_separately.isdisjoint(slots_of(call)):
            continue
        found.append(index)
        read_separately.update(slot for slot in call.outputs if not _has_rows(program, slot, batch))
    return found


def _has_rows(program: Program, slot: int, batch: int) -> bool:
    value = program.values[slot - program.first_value]
    if value.dtype in SYMBOLIC_KINDS:
        return True
    while value.base >= program.first_value:
        value = program.values[value.base - program.first_value]
    # A value that shares memory with a weight counts as the weight, even if it is expanded over the rows.
    is_weight = 0 <= value.base < program.first_input
    return not is_weight and any(term.powers[batch] for term in value.nbytes)
