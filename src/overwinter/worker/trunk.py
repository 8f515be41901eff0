"""How do requests of several functions of a family run as one batch?

As far as their weights are the same, together: a program's calls are split into spans, those that read weights which
the functions have otherwise ("own") and the others between them. A shared span runs once over all rows; an own span
runs for each function over its rows, with its weights, and what it gives is joined again where a shared span needs it.

Which dimension of a value holds the rows is found by running one request alone and two together. The first time a
split is used, what it gives for two requests is compared with what each gives alone: it is used only if they agree
within the bound that a batch of one function's requests keeps. See docs/decisions/trunks.md.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from overwinter.core.errors import ProgramError
from overwinter.model.aliasing import memory_groups, written_slot
from overwinter.model.closeness import Meter, bound_of
from overwinter.model.compile import Compiled, compile_program
from overwinter.model.dtypes import SYMBOLIC_KINDS
from overwinter.model.liveness import live_in, live_out
from overwinter.model.operators import ITEM_OPERATORS
from overwinter.model.program import Program
from overwinter.model.structure import BATCH, Call, slots_of

KEPT = 8
"""Splits of one program that are kept; beyond, the one used longest ago goes."""

Cut = tuple[int, int, bool]
"""The first call of a span, the one behind it, and whether its weights are each function's own."""
Values = dict[int, Any]
"""Tensors and whole numbers by their slots."""


class Share(NamedTuple):
    """What one function has in a batch."""

    weights: Sequence[torch.Tensor]
    inputs: list[torch.Tensor]

    @property
    def rows(self) -> int:
        """Rows of its requests together."""
        return self.inputs[0].shape[0]


class _Rows(NamedTuple):
    """How a value has the rows: along a dimension, or as a number that counts them; so many times each."""

    dim: int
    times: int

    def part(self, value: Any, place: tuple[int, int]) -> Any:
        """The value for these rows alone."""
        at, rows = place
        if isinstance(value, torch.Tensor):
            return value.narrow(self.dim, at * self.times, rows * self.times)
        return rows * self.times

    def join(self, parts: list[Any], places: Sequence[tuple[int, int]]) -> Any:
        """The value for all rows."""
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts, self.dim)
        return sum(rows for _, rows in places) * self.times


class _Span(NamedTuple):
    own: bool
    run: Compiled
    taken: tuple[int, ...]
    given: tuple[int, ...]
    joined: set[int]
    """What of an own span's results a later shared span takes."""
    dead: tuple[int, ...]
    """What nothing takes after it."""


class Trunks:
    """The splits of one program, by the weights that functions do not have in common."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: OrderedDict[frozenset[int], Trunk | None] = OrderedDict()
        self._making = threading.Lock()

    def of(self, own: frozenset[int]) -> "Trunk | None":
        """The split for functions that have these weights, by number, each otherwise; None if nothing is won by it."""
        with self._making:
            if own not in self._made:
                self._made[own] = _trunk(self._program, own)
                if len(self._made) > KEPT:
                    self._made.popitem(last=False)
            self._made.move_to_end(own)
            return self._made[own]


class Trunk:
    """A program in spans, for functions that differ in some of its weights."""

    def __init__(self, program: Program, cuts: Sequence[Cut]) -> None:
        """ProgramError if it cannot be cut there."""
        self._program = program
        self._spans = _spans(program, cuts)
        self._rows: dict[int, _Rows | None] = {}
        """Of what crosses from one span into another; None: it does not depend on the rows."""
        self._trying = threading.Lock()
        self._fits: bool | None = None

    def fits(self, shares: Sequence[Share]) -> bool:
        """Whether functions get together what they get alone; tried once, with the first rows of two."""
        if self._fits is None:
            with self._trying:
                if self._fits is None:
                    self._fits = self._try(*shares[:2])
        return self._fits

    def run(self, shares: Sequence[Share]) -> list[tuple[torch.Tensor, ...]]:
        """The program's outputs for each function. Whatever an operator raises passes through."""
        values: Values = dict(enumerate(_joined(shares), self._program.first_input))
        own: list[Values] = [{} for _ in shares]
        places = _places(shares)
        for span in self._spans:
            if span.own:
                for share, mine, place in zip(shares, own, places, strict=True):
                    taken = [self._part(slot, values, mine, place) for slot in span.taken]
                    mine.update(zip(span.given, span.run(share.weights, taken), strict=True))
                for slot in span.joined:
                    values[slot] = self._join(slot, [mine.pop(slot) for mine in own], places)
            else:
                given = span.run(shares[0].weights, [values[slot] for slot in span.taken])
                values.update(zip(span.given, given, strict=True))
            for slot in span.dead:
                values.pop(slot, None)
                for mine in own:
                    mine.pop(slot, None)
        slots = self._program.output_slots
        return [
            tuple(self._part(slot, values, mine, place) for slot in slots)
            for mine, place in zip(own, places, strict=True)
        ]

    def _part(self, slot: int, values: Values, mine: Values, place: tuple[int, int]) -> Any:
        """A function's own value, or its rows of that of all."""
        if slot in mine:
            return mine[slot]
        value, rows = values[slot], self._rows[slot]
        return value if rows is None else rows.part(value, place)

    def _join(self, slot: int, parts: list[Any], places: Sequence[tuple[int, int]]) -> Any:
        rows = self._rows[slot]
        if rows is not None:
            return rows.join(parts, places)
        if isinstance(parts[0], torch.Tensor):
            raise ProgramError(f"value {slot} has no rows, and each function has its own")
        return parts[0]

    def _try(self, first: Share, second: Share) -> bool:
        """What the two raise alone passes through: it says nothing about the split."""
        low, _ = self._program.dimensions[BATCH]
        pair = [Share(each.weights, [tensor[:low] for tensor in each.inputs]) for each in (first, second)]
        alone, other = (self._through(each.weights, each.inputs) for each in pair)
        try:
            wide = self._through(first.weights, _joined(pair))
            self._rows = {slot: _rows(alone[slot], wide[slot], low) for slot in wide}
            together = self.run(pair)
        except (ProgramError, RuntimeError, ArithmeticError, IndexError, ValueError, TypeError, KeyError):
            return False
        meter = Meter(self._program, bound_of(self._program))
        wanted = [[values[slot] for slot in self._program.output_slots] for values in (alone, other)]
        return not any(meter.compare(right, given) for right, given in zip(wanted, together, strict=True))

    def _through(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Values:
        """All values that cross from one span into another, and the outputs, of one function's run."""
        first = self._program.first_input
        values: Values = dict(enumerate(inputs, first))
        for span in self._spans:
            given = span.run(weights, [values[slot] for slot in span.taken])
            values.update(zip(span.given, given, strict=True))
        return values


def _places(shares: Sequence[Share]) -> list[tuple[int, int]]:
    """Where the rows of each begin, and how many they are."""
    places, at = [], 0
    for share in shares:
        places.append((at, share.rows))
        at += share.rows
    return places


def _joined(shares: Sequence[Share]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*(share.inputs for share in shares), strict=True)]


def _rows(narrow: Any, wide: Any, rows: int) -> _Rows | None:
    """How a value has the rows that was worked out for so many, and for twice as many; ProgramError if that cannot be
    told.
    """
    if not isinstance(narrow, torch.Tensor):
        if narrow == wide:
            return None
        dim, less, more = -1, narrow, wide
    else:
        changed = [dim for dim, (few, many) in enumerate(zip(narrow.shape, wide.shape, strict=True)) if few != many]
        if not changed:
            return None
        dim = changed[0]
        less, more = narrow.shape[dim], wide.shape[dim]
        if len(changed) > 1:
            raise ProgramError("a value has its rows in several dimensions")
    if not isinstance(less, int) or more != 2 * less or less % rows:
        raise ProgramError("how a value has its rows cannot be told")
    return _Rows(dim, less // rows)


# Where to cut


def _trunk(program: Program, own: frozenset[int]) -> Trunk | None:
    if program.unjoinable or any(call.operator in ITEM_OPERATORS for call in program.calls):
        # A number that is read from a tensor of all rows is nobody's.
        return None
    for cuts in _ways(program, own):
        try:
            return Trunk(program, cuts)
        except ProgramError:
            continue
    return None


def _ways(program: Program, own: frozenset[int]) -> Iterator[list[Cut]]:
    """How the calls may be cut, the best first: only ways in which weights are shared."""
    end = len(program.calls)
    calls = _own_calls(program, own)
    if not calls:
        yield [(0, end, False)]
        return
    reads = [any(slot < program.first_input for slot in slots_of(call)) for call in program.calls]
    cuts: list[Cut] = []
    at = 0
    for start, stop in _runs_of(calls, reads):
        if at < start:
            cuts.append((at, start, False))
        cuts.append((start, stop, True))
        at = stop
    if at < end:
        cuts.append((at, end, False))
    coarse: list[Cut] = [(0, calls[0], False), (calls[0], end, True)]
    for way in (cuts, coarse):
        if any(any(reads[start:stop]) for start, stop, is_own in way if not is_own):
            yield [cut for cut in way if cut[0] < cut[1]]


def _runs_of(calls: Sequence[int], reads: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Own calls with no other weight between them are one span: to join and split the rows costs more than it wins."""
    start = last = calls[0]
    for call in calls[1:]:
        if any(reads[last + 1 : call]):
            yield start, last + 1
            start = call
        last = call
    yield start, last + 1


def _own_calls(program: Program, own: frozenset[int]) -> list[int]:
    """The calls that read an own weight, or what was made of one without any rows: a transposed one, say."""
    batch = list(program.dimensions).index(BATCH)
    mine = set(own)
    found = []
    for index, call in enumerate(program.calls):
        if mine.isdisjoint(slots_of(call)):
            continue
        found.append(index)
        mine.update(slot for slot in call.outputs if not _has_rows(program, slot, batch))
    return found


def _has_rows(program: Program, slot: int, batch: int) -> bool:
    value = program.values[slot - program.first_value]
    if value.dtype in SYMBOLIC_KINDS:
        return True
    while value.base >= program.first_value:
        value = program.values[value.base - program.first_value]
    # What shares memory with a weight is that weight, even where it is spread over the rows.
    is_weight = 0 <= value.base < program.first_input
    return not is_weight and any(term.powers[batch] for term in value.nbytes)


def _spans(program: Program, cuts: Sequence[Cut]) -> list[_Span]:
    """The spans, compiled. ProgramError if they cannot run apart."""
    groups = memory_groups(program)
    crossing = [(live_in(program, start, stop), live_out(program, stop, start)) for start, stop, _ in cuts]
    last_taken = {slot: number for number, (taken, _) in enumerate(crossing) for slot in taken}
    outputs = set(program.output_slots)
    spans = []
    for number, ((start, stop, own), (taken, given)) in enumerate(zip(cuts, crossing, strict=True)):
        joined: set[int] = set()
        if own:
            _check_writes(program.calls[start:stop], taken, groups)
            later = zip(cuts[number + 1 :], crossing[number + 1 :], strict=True)
            joined.update(slot for cut, (slots, _) in later if not cut[2] for slot in slots if slot in given)
        dead = tuple(slot for slot, last in last_taken.items() if last == number and slot not in outputs)
        run = compile_program(program, start, stop)
        spans.append(_Span(own, run, taken, given, joined, dead))
    return spans


def _check_writes(calls: Sequence[Call], taken: Sequence[int], groups: Sequence[int]) -> None:
    """ProgramError if a span writes to what it is given: the next function is given the same."""
    shared = {groups[slot] for slot in taken}
    for call in calls:
        target = written_slot(call)
        if target is not None and groups[target] in shared:
            raise ProgramError(f"{call.operator} writes to what other functions read too")
