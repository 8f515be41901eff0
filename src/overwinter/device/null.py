"""A null device: a transfer takes the time of its link, and a run the time in its function's profile, but no byte is
moved, and the outputs are those of weights and inputs of zeros.

A node with null devices shows how it would use devices that its machine lacks, and so whether the simulator is right.
"""

import mmap
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from overwinter.core.ids import Address, TenantId
from overwinter.core.profile import between
from overwinter.device.allocation import Allocator, Extent, Move
from overwinter.device.function import DeviceProgram
from overwinter.device.interface import Copy
from overwinter.device.link import Link
from overwinter.device.virtual import VirtualDevice
from overwinter.model.compile import compile_program
from overwinter.model.program import Program
from overwinter.model.structure import BATCH

KEPT_BYTES = 16 << 20
"""The most bytes of outputs that a program keeps, those for all shapes of its inputs together."""


class NullDevice(VirtualDevice):
    """A device that reserves address space for its blocks, but no memory: all its bytes are one page of zeros."""

    def __init__(self, name: str, allocator: Allocator) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            super().__init__(name, allocator)

    def _reserve(self, nbytes: int, shared: int | None) -> mmap.mmap:
        """Return read-only memory, which the kernel charges to no process. Raises OSError."""
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)

    def _clear(self, extent: Extent, tenant: TenantId) -> None:
        """No tenant's bytes are ever there."""

    def _move(self, moves: Sequence[Move]) -> None:
        """There are no bytes."""

    def _copy(self, copies: Sequence[Copy], blocks: Mapping[Address, torch.Tensor], link: Link) -> None:
        """Take the time of the link."""
        for _ in link.transfer(sum(copy.nbytes for copy in copies)):
            pass


class NullProgram(DeviceProgram):
    """A program that takes the time in a profile."""

    def __init__(
        self,
        program: Program,
        run_s: Mapping[int, float],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`run_s`: the seconds of a run by its number of requests of the example's sizes; it has at least one entry."""
        super().__init__(program, torch.device("cpu"))
        self.run = self.run_waiting = self._run
        self._compiled = compile_program(program, checks_values=False)
        self.use_times(run_s)
        self._clock = clock
        self._sleep = sleep
        self._outputs: dict[tuple[torch.Size, ...], tuple[torch.Tensor, ...]] = {}

    def use_times(self, run_s: Mapping[int, float]) -> None:
        """Take these times from now on."""
        self._known = sorted(run_s.items())

    def _run(
        self,
        weights: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        wait: Callable[[int], None] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs after the time in the profile and the time that `wait` takes. Each call of the program
        takes an equal part of the time in the profile.
        """
        call_s = self._seconds(inputs) / max(1, len(self.program.calls))
        at_s, done = self._clock(), 0
        outputs = self._outputs_for_zeros(weights, inputs)
        if wait is not None:
            for call in sorted(set(self.first_uses)):
                at_s, done = at_s + (call - done) * call_s, call
                self._sleep(max(0.0, at_s - self._clock()))
                # Only the wait is added, because a sleep that lasts too long shortens the next one.
                began_s = self._clock()
                wait(call)
                at_s += self._clock() - began_s
        self._sleep(max(0.0, at_s + (len(self.program.calls) - done) * call_s - self._clock()))
        return outputs

    def _seconds(self, inputs: Sequence[torch.Tensor]) -> float:
        """Return the time of a run over these inputs, linear between and above the measured batches."""
        rows = next(
            (
                size
                for spec, tensor in zip(self.program.inputs, inputs, strict=True)
                for name, size in zip(spec.shape, tensor.shape, strict=True)
                if name == BATCH
            ),
            1,
        )
        each = max(1, self.program.example.get(BATCH, 1))
        return between(self._known, max(1, rows // each))

    def _outputs_for_zeros(
        self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs for inputs of zeros. They are kept by the shapes of the inputs, up to KEPT_BYTES."""
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._outputs:
            found = tuple(self._compiled(weights, [torch.zeros_like(each) for each in inputs]))
            nbytes = sum(each.nbytes for each in found)
            if nbytes > KEPT_BYTES:
                return found
            if nbytes + self.kept_bytes > KEPT_BYTES:
                self._outputs.clear()
            self._outputs[shapes] = found
        return self._outputs[shapes]

    @property
    def kept_bytes(self) -> int:
        """The bytes of the outputs that are kept."""
        return sum(each.nbytes for outputs in self._outputs.values() for each in outputs)
