"""Compares a program with the model from which it was exported.

For the deployer's side only: the model's own code runs here. Program and model run on the same random inputs, at the
sizes where exports go wrong; `docs/decisions/agreement.md` lists them with the reasons.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from overwinter.core.agreement import Agreement, Batching
from overwinter.core.errors import ProgramError
from overwinter.model.closeness import ClosenessMeter, bound_of
from overwinter.model.compile import compile_program
from overwinter.model.conversion import Exported, Reference
from overwinter.model.declared_outputs import DeclaredOutputs
from overwinter.model.joining import batching
from overwinter.model.random_inputs import KINDS, Kind, RandomInputs
from overwinter.model.structure import BATCH, Program

LEAST_SIZE = 2
"""The least value of any dynamic size in an export: the program is valid from here, and possibly not at 1."""

_FACTORS = (2, 0.5, 4, 0.25, 8)
"""The multiples of the example's sizes that the other sizes get when a check refuses one size at its minimum."""

Tensors = list[torch.Tensor]
Sizes = dict[str, int]


class Agreed(NamedTuple):
    """A program that was compared with its model, and its weights."""

    program: Program
    weights: Tensors
    agreement: Agreement


class _Fault(NamedTuple):
    message: str
    raised: bool
    """Whether only one of the model and the program raised an error; otherwise their outputs differ."""
    checked: bool = False
    """Whether a check of the program refuses these sizes, as it would refuse requests."""


def agree(exported: Exported, max_batch: int = 1) -> Agreed:
    """Compare a program with its model, and exclude sizes at which they differ.

    The minimum of a size that is wrong at 1 becomes 2; if only one of program and model accepts larger values of a
    size, its maximum becomes the example's, or 2 if that is 1. Sizes that a check of the program refuses are only
    noted, but 1 counts as wrong if it is refused with all tried values of the other sizes. Raises ProgramError for any
    other difference, and for a model that fails at the example's sizes or keeps state.
    """
    assert exported.reference is not None, "only a newly exported program can be compared"
    comparison = _Comparison(exported.program, exported.weights, exported.reference)
    base = comparison.begin()
    _try_least(comparison, base)
    _try_larger(comparison, base)
    if comparison.ranges != exported.program.dimensions:
        exported = exported.reference.convert(comparison.ranges)
    agreement = Agreement(
        sizes=tuple(comparison.sizes),
        bound=comparison.bound,
        outputs=comparison.meter.closeness(),
        batching=comparison.batching(exported.program, base, max_batch),
        notes=tuple(comparison.notes),
    )
    return Agreed(exported.program, exported.weights, agreement)


def _try_least(comparison: "_Comparison", base: Sizes) -> None:
    """Try each size at its minimum, separately and all together; a minimum of 1 may have to become 2."""
    for name, low in comparison.below(base).items():
        fault = comparison.fault_with(name, low, base)
        is_raised = fault and comparison.raise_minimum(name, {**base, name: LEAST_SIZE}, fault)
        if fault and not is_raised and comparison.unless_checked(fault):
            raise ProgramError(fault.message)
    least = comparison.below(base)
    fault = comparison.unless_checked(comparison.fault_at({**base, **least})) if len(least) > 1 else None
    # Most requests have a batch of 1, so the batch is excluded last.
    names = sorted(least, key=lambda name: name == BATCH)
    if fault and not any(comparison.raise_minimum(name, {**base, **least, name: LEAST_SIZE}, fault) for name in names):
        raise ProgramError(fault.message)


def _try_larger(comparison: "_Comparison", base: Sizes) -> None:
    """Try all sizes at 1.5 times those of `base`, made odd and within their ranges; at twice those of `base` if program
    and model both fail there, or a check of the program refuses these sizes. If only the program or only the model
    fails, try each size separately.
    """
    for factor, odd in ((1.5, 1), (2, 0)):
        larger = {name: min(comparison.ranges[name][1], int(size * factor) | odd) for name, size in base.items()}
        larger = {name: size for name, size in larger.items() if size > base[name]}
        compared = len(comparison.sizes)
        fault = comparison.unless_checked(comparison.fault_at({**base, **larger})) if larger else None
        if fault is not None:
            _lower_maxima(comparison, base, larger, fault)
        if len(comparison.sizes) > compared:
            return


def _lower_maxima(comparison: "_Comparison", base: Sizes, larger: Sizes, fault: _Fault) -> None:
    """Lower the maximum of each size whose larger value alone causes a fault to its value in `base`. Raise ProgramError
    if none does, if outputs differ, or if the remaining sizes together cause a fault.
    """
    alone = {name: comparison.fault_at({**base, name: size}) for name, size in larger.items()}
    found = {name: each for name, each in alone.items() if each is not None}
    wrong = [each for each in (fault, *found.values()) if not each.raised]
    if wrong or not found:
        raise ProgramError((wrong or [fault])[0].message)
    for name, each in found.items():
        comparison.lower_maximum(name, base[name], each)
    left = {name: size for name, size in larger.items() if name not in found}
    again = comparison.fault_at({**base, **left}) if left else None
    if again is not None:
        raise ProgramError(again.message)


class _Comparison:
    """The comparison of a program with its model, and its results."""

    def __init__(self, program: Program, weights: Tensors, reference: Reference) -> None:
        self.ranges = dict(program.dimensions)
        self.sizes: list[Sizes] = []
        self.notes: list[str] = []
        self.bound = bound_of(program)
        self.meter = ClosenessMeter(program, self.bound)
        self._program = program
        self._weights = weights
        self._run = compile_program(program)
        self._declared = DeclaredOutputs(program)
        self._checks = {call.args[1] for call in program.calls if call.operator == "aten._assert_scalar.default"}
        self._reference = reference
        self._draws = RandomInputs(program, reference.examples)
        self._kind: Kind = KINDS[0]
        """The most varied kind of inputs on which the model runs at the example's sizes."""

    def begin(self) -> Sizes:
        """Compare at the example's sizes, of which a 1 becomes 2 if its range allows it, and return them. Raise
        ProgramError if program and model differ, if the model fails, or if it keeps state.
        """
        base = {name: min(max(size, LEAST_SIZE), self.ranges[name][1]) for name, size in self._program.example.items()}
        fault = self.fault_at(base)
        if fault is not None:
            raise ProgramError(fault.message)
        if not self.sizes:
            error = self._model(self._draws.inputs(base, 0, "example"))
            raise ProgramError(f"the model itself cannot run with {_sizes_text(base)}: {_first_line(error)}")
        self._check_stateless(base)
        return base

    def _check_stateless(self, sizes: Sizes) -> None:
        """Raise ProgramError if a model's call changes the outputs of the next, because a program keeps no state."""
        inputs = self._draws.inputs(sizes, 0, self._kind)
        first, second = self._model(inputs), self._model(inputs, self._reference.run_again)
        if isinstance(first, Exception) or isinstance(second, Exception):
            error = first if isinstance(first, Exception) else second
            raise ProgramError(f"the model fails when the same call is repeated: {_first_line(error)}")
        fault = ClosenessMeter(self._program, self.bound).compare(first, second)
        if fault:
            raise ProgramError(
                f"the model returns other outputs when the same call is repeated: {fault}; a program keeps no "
                "state between calls: make the state an input and an output"
            )

    def below(self, base: Sizes) -> Sizes:
        """Return the least value of each size that can be less than in `base`."""
        return {name: low for name, (low, _) in self.ranges.items() if low < base[name]}

    def fault_at(self, sizes: Sizes) -> _Fault | None:
        """Compare at these sizes, record them if the answers agree, and return the fault; None also if both fail."""
        for kind in KINDS[KINDS.index(self._kind) :]:
            inputs = self._draws.inputs(sizes, 0, kind)
            wanted = self._model(inputs)
            if not isinstance(wanted, Exception):
                break
        given = self._answer(inputs)
        if isinstance(wanted, Exception):
            lone = _Fault(f"for {_sizes_text(sizes)} the program runs and the model fails: {_first_line(wanted)}", True)
            return None if isinstance(given, Exception) else lone
        if isinstance(given, Exception):
            message = f"for {_sizes_text(sizes)} the model runs and the program fails: {_first_line(given)}"
            return _Fault(message, True, str(given) in self._checks)
        fault = self._difference(inputs, wanted, given)
        if fault:
            return _Fault(f"for {_sizes_text(sizes)} the program and the model differ: {fault}", False)
        if not self.sizes:
            self._kind = kind
        self.sizes.append(sizes)
        return None

    def fault_with(self, name: str, low: int, base: Sizes) -> _Fault | None:
        """Return the fault with one size at its minimum, and the others, if possible, at values that no check of
        the program refuses.
        """
        first = self.fault_at({**base, name: low})
        fault = first
        for factor in _FACTORS:
            if fault is None or not fault.checked:
                break
            others = {other: self._within(other, int(size * factor)) for other, size in base.items()}
            fault = self.fault_at({**others, name: low})
        if first is not None and first.checked and fault is None:
            self._add_note(first.message)
        return fault

    def _within(self, name: str, size: int) -> int:
        low, high = self.ranges[name]
        return max(low, min(size, high))

    def unless_checked(self, fault: _Fault | None) -> _Fault | None:
        """Return the fault, unless a check of the program refuses these sizes; such sizes get only a note."""
        if fault is None or not fault.checked:
            return fault
        self._add_note(fault.message)
        return None

    def raise_minimum(self, name: str, sizes: Sizes, fault: _Fault) -> bool:
        """Raise the minimum of a size that is wrong at 1 to 2, unless `sizes`, where it is 2, have a fault; return
        whether its range was changed.
        """
        low, high = self.ranges[name]
        if low >= LEAST_SIZE or high < LEAST_SIZE or (sizes not in self.sizes and self.fault_at(sizes) is not None):
            return False
        self.ranges[name] = (LEAST_SIZE, high)
        self.notes.append(f"{name} is at least {LEAST_SIZE}: {fault.message}")
        return True

    def lower_maximum(self, name: str, most: int, fault: _Fault) -> None:
        """Lower the maximum of a size to `most`."""
        self.ranges[name] = (self.ranges[name][0], most)
        self.notes.append(f"{name} is at most {most}: {fault.message}")

    def batching(self, program: Program, base: Sizes, max_batch: int) -> Batching:
        """Return whether this many requests to the final program may share a run."""

        def request(rows: int, seed: int) -> Tensors:
            return self._draws.inputs({**base, BATCH: rows}, seed, self._kind)

        def answer(inputs: Tensors) -> Tensors:
            given = self._answer(inputs)
            if isinstance(given, Exception):
                raise given
            return given

        return batching(program, self.bound, request, answer, max_batch)

    def _difference(self, inputs: Tensors, wanted: Tensors, given: Tensors) -> str:
        """Return the difference between the outputs of program and model; empty if there is none.

        The outputs of the model without PyTorch's fused encoder are accepted, too.
        """
        undeclared = self._declared.fault(inputs, given)
        fault = undeclared or self.meter.compare(wanted, given)
        if not fault:
            return ""
        again = self._model(inputs)
        if isinstance(again, Exception) or ClosenessMeter(self._program, self.bound).compare(wanted, again):
            return "the model's outputs are random"
        if undeclared or not torch.backends.mha.get_fastpath_enabled():
            return fault
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            unfused = self._model(inputs)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        if isinstance(unfused, Exception) or self.meter.compare(unfused, given):
            return fault
        self._add_note("compared without PyTorch's fused encoder, which returns zeros for padding")
        return ""

    def _add_note(self, message: str) -> None:
        self.notes += [] if message in self.notes else [message]

    def _answer(self, inputs: Tensors) -> Tensors | Exception:
        """Run the program as in a worker, whatever default type the author's code has set."""
        try:
            with torch.inference_mode(), _float32_by_default():
                return list(self._run(self._weights, inputs))
        except Exception as error:  # noqa: BLE001 - any operator may raise anything for these sizes
            return error

    def _model(self, inputs: Tensors, run: Callable[[Tensors], Tensors] | None = None) -> Tensors | Exception:
        """Run the model, or call `run` instead, on copies of the inputs, which it may change."""
        run = run or self._reference.run
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [tensor.cpu() for tensor in run([tensor.clone() for tensor in inputs])]
        except Exception as error:  # noqa: BLE001 - the boundary to the author's code
            return error


@contextmanager
def _float32_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _sizes_text(sizes: Sizes) -> str:
    return " and ".join(f"{name} {size}" for name, size in sizes.items()) or "its fixed sizes"


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
