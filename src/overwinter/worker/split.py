"""Runs requests of several functions of a family as one batch, as far as their weights are the same.

The calls of a program are split into spans: separate spans, which read weights that differ between the functions, and
shared spans, which do not. A shared span runs once over all rows. A separate span runs for each function over its rows,
with its weights, and its results are concatenated where a shared span needs them. The spans of a program together are
a split.

Running one request alone and two together shows which dimension of a value holds the rows, and how many times each row
occurs in it. The first time a split is used for requests of certain sizes, the results of two requests together are
compared with those of each alone, for all values that cross between spans. The split is used only if they agree within
the bound that a batch of one function's requests meets. The two requests are generated, because those of callers may
be equal, and equal requests agree even if their rows are mixed up. Those of callers are used only if no generated ones
can be run. See docs/decisions/trunks.md.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from overwinter.core.errors import ProgramError
from overwinter.model.aliasing import memory_groups, written_slot
from overwinter.model.closeness import bound_of, equal_bits, is_near
from overwinter.model.compile import Compiled, compile_program
from overwinter.model.liveness import live_in, live_out
from overwinter.model.operators import ITEM_OPERATORS
from overwinter.model.program import Program
from overwinter.model.random_inputs import Kind, RandomInputs
from overwinter.model.structure import BATCH, Call
from overwinter.worker.spans import Span, possible_splits

SPLITS_KEPT = 8
"""The most splits of one program that are kept."""
SIZES_KEPT = 1024
"""The most request sizes for which a split keeps its findings; the oldest are dropped first."""
GENERATED_KINDS: tuple[Kind, ...] = ("wide", "near")
"""The kinds of generated requests that are used before the requests of callers."""
FAILED = (ProgramError, RuntimeError, ArithmeticError, IndexError, ValueError, TypeError, KeyError)
"""What a request that cannot be run, or a split that does not fit, may raise."""

Values = dict[int, Any]
"""Tensors and numbers, by slot."""
Sizes = tuple[torch.Size, ...]
"""The sizes of a request's inputs, without its rows."""


class FunctionBatch(NamedTuple):
    """The requests of one function in a shared run."""

    weights: Sequence[torch.Tensor]
    inputs: list[torch.Tensor]

    @property
    def rows(self) -> int:
        """The rows of its requests together."""
        return self.inputs[0].shape[0]


class _Rows(NamedTuple):
    """How a value contains the rows. A tensor has `times` consecutive entries for each row along `dim`. A number is
    `times` times the number of rows; its `dim` has no meaning.
    """

    dim: int
    times: int

    def part(self, value: Any, place: tuple[int, int]) -> Any:
        """Return the value for these rows only."""
        at, rows = place
        if isinstance(value, torch.Tensor):
            return value.narrow(self.dim, at * self.times, rows * self.times)
        return rows * self.times

    def join(self, parts: list[Any], places: Sequence[tuple[int, int]]) -> Any:
        """Return the value for all rows."""
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts, self.dim)
        return sum(rows for _, rows in places) * self.times


class _CompiledSpan(NamedTuple):
    separate: bool
    run: Compiled
    taken: tuple[int, ...]
    """The inputs and the results of earlier spans that it reads."""
    given: tuple[int, ...]
    """Its results that are read later; of the last span, the outputs of the program."""
    joined: set[int]
    """The results of a separate span that a later shared span reads."""
    dead: tuple[int, ...]
    """The values that nothing reads after this span."""


class Splits:
    """The splits of one program, by the weights in which functions differ.

    At most SPLITS_KEPT are kept. When there are so many, functions use a split that covers more weights than they
    differ in, or a new split replaces the least recently used one.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: OrderedDict[frozenset[int], Split | None] = OrderedDict()
        self._making = threading.Lock()

    def of(self, differing: frozenset[int]) -> "Split | None":
        """Return the split for functions that differ in these weights, by number; None if the program cannot be
        split for them, or a split has no benefit.
        """
        with self._making:
            found = differing if differing in self._made else self._wider(differing) or self._make(differing)
            self._made.move_to_end(found)
            return self._made[found]

    def _wider(self, differing: frozenset[int]) -> frozenset[int] | None:
        """Return the weights of the smallest existing split that covers these too, if no more may be made."""
        if len(self._made) < SPLITS_KEPT:
            return None
        made = (each for each, split in self._made.items() if differing < each and split is not None)
        return min(made, key=len, default=None)

    def _make(self, differing: frozenset[int]) -> frozenset[int]:
        """Make a split for these weights. If it replaces the least recently used one, it covers that one's weights too,
        if possible.
        """
        if len(self._made) >= SPLITS_KEPT:
            oldest, _ = self._made.popitem(last=False)
            both = differing | oldest
            split = _split(self._program, both)
            if split is not None:
                self._made[both] = split
                return both
        self._made[differing] = _split(self._program, differing)
        return differing


class _Verified(NamedTuple):
    """The result of the verification for requests of certain sizes."""

    rows: dict[int, _Rows | None] | None
    """How each value that crosses a span boundary depends on the rows; None for a value that does not depend on them.
    If `rows` itself is None, functions in a shared run may get other results than alone.
    """


class _SharedRun:
    """A shared run: the common values, and the separate values of each function."""

    def __init__(self, program: Program, batches: Sequence[FunctionBatch], rows: dict[int, _Rows | None]) -> None:
        self._batches = batches
        self._rows = rows
        self._places = _places(batches)
        self._values: Values = dict(enumerate(_joined(batches), program.first_input))
        self._own: list[Values] = [{} for _ in batches]

    def run(self, span: _CompiledSpan) -> None:
        """Run the span, once or for each function."""
        if not span.separate:
            given = span.run(self._batches[0].weights, [self._values[slot] for slot in span.taken])
            self._values.update(zip(span.given, given, strict=True))
            return
        for number, batch in enumerate(self._batches):
            given = span.run(batch.weights, self.of(number, span.taken))
            self._own[number].update(zip(span.given, given, strict=True))
        for slot in span.joined:
            self._values[slot] = self._join(slot, [mine.pop(slot) for mine in self._own])

    def drop(self, slots: Sequence[int]) -> None:
        """Drop values that are no longer needed."""
        for values in (self._values, *self._own):
            for slot in slots:
                values.pop(slot, None)

    def of(self, number: int, slots: Iterable[int]) -> tuple[Any, ...]:
        """Return values of one of the functions: its own, or its rows of the common ones."""
        return tuple(self._part(number, slot) for slot in slots)

    def _part(self, number: int, slot: int) -> Any:
        if slot in self._own[number]:
            return self._own[number][slot]
        value, rows = self._values[slot], self._rows[slot]
        return value if rows is None else rows.part(value, self._places[number])

    def _join(self, slot: int, parts: list[Any]) -> Any:
        rows = self._rows[slot]
        if rows is not None:
            return rows.join(parts, self._places)
        if isinstance(parts[0], torch.Tensor):
            raise ProgramError(f"value {slot} has no rows, and differs between functions")
        return parts[0]


class Split:
    """A program in spans, for functions that differ in some of its weights."""

    def __init__(self, program: Program, spans: Sequence[Span]) -> None:
        """Compile the spans of the program; raise ProgramError if it cannot be split into them."""
        self._program = program
        self._spans = _compile_spans(program, spans)
        self._verified: dict[Sizes, _Verified] = {}
        self._verifying = threading.Lock()

    def run(self, batches: Sequence[FunctionBatch]) -> list[tuple[torch.Tensor, ...]] | None:
        """Return the program's outputs for each function; None if they may differ from those of separate runs.

        Exceptions of operators are raised.
        """
        found = self._verified_for(batches)
        if found is None or found.rows is None:
            return None
        shared_run = _SharedRun(self._program, batches, found.rows)
        for span in self._spans:
            shared_run.run(span)
            shared_run.drop(span.dead)
        return [shared_run.of(number, self._program.output_slots) for number in range(len(batches))]

    def _verified_for(self, batches: Sequence[FunctionBatch]) -> _Verified | None:
        """Return the result of the verification for requests of these sizes. Each combination of sizes is verified
        separately, because sizes may determine how a value contains the rows.
        """
        sizes = tuple(tensor.shape[1:] for tensor in batches[0].inputs)
        found = self._verified.get(sizes)
        if found is None:
            with self._verifying:
                found = self._verified.get(sizes) or self._verify(batches[0], batches[1])
                if found is not None:
                    self._verified[sizes] = found
                if len(self._verified) > SIZES_KEPT:
                    del self._verified[next(iter(self._verified))]
        return found

    def _verify(self, first: FunctionBatch, second: FunctionBatch) -> _Verified | None:
        """Verify the split with two different requests; None if no such pair can be run."""
        for pair in self._pairs(first, second):
            if all(map(equal_bits, pair[0].inputs, pair[1].inputs)):
                continue
            try:
                alone = [self._crossing_values(each.weights, each.inputs) for each in pair]
            except FAILED:
                continue
            return _Verified(self._verified_rows(pair, alone))
        return None

    def _pairs(self, first: FunctionBatch, second: FunctionBatch) -> Iterator[list[FunctionBatch]]:
        """Yield pairs of requests of two functions with as few rows as possible: generated ones that resemble the
        first, so that mixed-up rows are noticed whatever clients send; then the requests themselves.
        """
        low, _ = self._program.dimensions[BATCH]
        specs = zip(self._program.inputs, first.inputs, strict=True)
        sizes = {size: given for spec, tensor in specs for size, given in zip(spec.shape, tensor.shape, strict=True)}
        named = {size: given for size, given in sizes.items() if isinstance(size, str)} | {BATCH: low}
        draws = RandomInputs(self._program, [tensor[:low] for tensor in first.inputs])
        for kind in GENERATED_KINDS:
            generated = [draws.inputs(named, seed, kind) for seed in range(2)]
            yield [FunctionBatch(each.weights, inputs) for each, inputs in zip((first, second), generated, strict=True)]
        yield [FunctionBatch(each.weights, [tensor[:low] for tensor in each.inputs]) for each in (first, second)]

    def _verified_rows(self, pair: Sequence[FunctionBatch], alone: Sequence[Values]) -> dict[int, _Rows | None] | None:
        """Return how values contain the rows, if both requests get the same together and alone, in all values that
        cross between spans.
        """
        low, bound = pair[0].rows, bound_of(self._program)
        try:
            wide = self._crossing_values(pair[0].weights, _joined(pair))
            rows = {slot: _rows(alone[0][slot], wide[slot], low) for slot in wide}
            shared_run = _SharedRun(self._program, pair, rows)
            for span in self._spans:
                shared_run.run(span)
            agree = all(
                _agree(values[slot], given, bound)
                for number, values in enumerate(alone)
                for slot, given in zip(values, shared_run.of(number, values), strict=True)
            )
        except FAILED:
            return None
        return rows if agree else None

    def _crossing_values(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Values:
        """Return the inputs, the outputs, and the values that cross from one span into another, of a function's run."""
        first = self._program.first_input
        values: Values = dict(enumerate(inputs, first))
        for span in self._spans:
            given = span.run(weights, [values[slot] for slot in span.taken])
            values.update(zip(span.given, given, strict=True))
        return values


def _agree(wanted: Any, given: Any, bound: float) -> bool:
    """Whether a value of a shared run equals that of a separate run, within the bound."""
    if isinstance(wanted, torch.Tensor):
        return is_near(wanted, given, bound)
    return bool(wanted == given)


def _places(batches: Sequence[FunctionBatch]) -> list[tuple[int, int]]:
    """Return where the rows of each function begin, and their number."""
    places, at = [], 0
    for batch in batches:
        places.append((at, batch.rows))
        at += batch.rows
    return places


def _joined(batches: Sequence[FunctionBatch]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*(batch.inputs for batch in batches), strict=True)]


def _rows(narrow: Any, wide: Any, rows: int) -> _Rows | None:
    """Return how a value contains the rows, from its values for a number of rows and for twice that; raise ProgramError
    if that is ambiguous.
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
        raise ProgramError("the dimension of a value's rows is unknown")
    return _Rows(dim, less // rows)


def _split(program: Program, differing: frozenset[int]) -> Split | None:
    if program.batching_obstacle or any(call.operator in ITEM_OPERATORS for call in program.calls):
        # A number that is read from a tensor of all rows belongs to no single request.
        return None
    for spans in possible_splits(program, differing):
        try:
            return Split(program, spans)
        except ProgramError:
            continue
    return None


def _compile_spans(program: Program, spans: Sequence[Span]) -> list[_CompiledSpan]:
    """Compile the spans; raise ProgramError if they cannot run separately."""
    groups = memory_groups(program)
    crossing = [(live_in(program, span.start, span.stop), live_out(program, span.stop, span.start)) for span in spans]
    last_taken = {slot: number for number, (taken, _) in enumerate(crossing) for slot in taken}
    outputs = set(program.output_slots)
    compiled = []
    for number, (span, (taken, given)) in enumerate(zip(spans, crossing, strict=True)):
        joined: set[int] = set()
        if span.separate:
            _check_writes(program.calls[span.start : span.stop], taken, groups)
            later = zip(spans[number + 1 :], crossing[number + 1 :], strict=True)
            joined.update(slot for each, (slots, _) in later if not each.separate for slot in slots if slot in given)
        dead = tuple(slot for slot, last in last_taken.items() if last == number and slot not in outputs)
        run = compile_program(program, span.start, span.stop)
        compiled.append(_CompiledSpan(span.separate, run, taken, given, joined, dead))
    return compiled


def _check_writes(calls: Sequence[Call], taken: Sequence[int], groups: Sequence[int]) -> None:
    """Raise ProgramError if a span writes to its inputs, because the next function gets the same inputs."""
    shared = {groups[slot] for slot in taken}
    for call in calls:
        target = written_slot(call)
        if target is not None and groups[target] in shared:
            raise ProgramError(f"{call.operator} writes to a value that other functions read")
