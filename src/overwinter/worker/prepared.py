"""A program as a process holds it for all functions of a family."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from overwinter.model.compile import compile_program, value_checks
from overwinter.model.declared_outputs import DeclaredOutputs
from overwinter.model.liveness import peak_activation_bytes
from overwinter.model.program import Program, decode_program
from overwinter.worker.split import Splits

Compiled = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


class Prepared:
    """A compiled program without weights."""

    def __init__(self, content: bytes, run: Compiled | None = None) -> None:
        """`run` takes the place of the compiled program; then nothing is compiled."""
        self.program: Program = decode_program(content)
        self.run: Compiled = run or compile_program(self.program)
        self.declared = DeclaredOutputs(self.program)
        self.splits = Splits(self.program)
        self.joinable = not self.program.batching_obstacle
        """Whether requests may share a run, judged by the shapes that the program declares."""

    @cached_property
    def activation_bytes(self) -> int:
        """The memory of a run on inputs of the example's sizes."""
        return peak_activation_bytes(self.program)

    def unchecked(self) -> Compiled:
        """Return the program without checks of tensor values, which zeros may violate."""
        return compile_program(self.program, checks_values=False) if value_checks(self.program) else self.run
