"""The functions of an executor, as it runs them: each run brings the blocks that the device lacks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from overwinter.core.errors import ActivationsError, NoSpaceError, ProgramError
from overwinter.core.ids import Address
from overwinter.device import swap
from overwinter.device.activations import Activations
from overwinter.device.blocks import WeightPosition
from overwinter.device.function import DeviceFunction, DeviceProgram, EmptyProgram
from overwinter.device.null import NullProgram
from overwinter.device.swap import Route
from overwinter.worker.own_device import OwnDevice
from overwinter.worker.prepared import Prepared
from overwinter.worker.weights import MappedBlock

NumberedPosition = tuple[int, WeightPosition]
"""The number of a weight in its program, and its position, at which another weight may lie too: of two tied weights,
one may be the transpose of the other.
"""


class Program:
    """A program in the two forms that a run needs: one to check and join requests, and one that the device runs."""

    def __init__(self, content: bytes, own: OwnDevice, run_s: Mapping[int, float]) -> None:
        """Compile it as a first run needs it. `run_s`: the seconds of a run by its number of requests. Raises
        ProgramError if the program cannot be compiled, or if `run_s` is empty on a null device.
        """
        self.prepared = Prepared(content, self._run)
        if own.kind == "null":
            if not run_s:
                raise ProgramError("a null device takes the times of runs from a profile: use `overwinter profile`")
            self.on_device: DeviceProgram = NullProgram(self.prepared.program, run_s)
        else:
            self.on_device = DeviceProgram(self.prepared.program, own.device.torch_device)
        self.activations = Activations(self.prepared.program)
        _ = self.on_device.run_waiting  # This compiles it.

    def learn(self, private_bytes: Mapping[int, int], run_s: Mapping[int, float]) -> None:
        """Use the figures of a profile, as far as there are any: see `HandOver`."""
        self.activations.learn(private_bytes)
        if isinstance(self.on_device, NullProgram) and run_s:
            self.on_device.use_times(run_s)

    def _run(self, weights: Sequence[torch.Tensor], inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return self.on_device.run(weights, inputs)


class WarmUpInterruptedError(Exception):
    """A message came during a warm-up."""


class SwappedFunction:
    """A function whose runs bring its missing blocks to the device, with counts of the bytes brought."""

    def __init__(
        self, own: OwnDevice, program: Program, function: DeviceFunction, blocks: Mapping[Address, MappedBlock]
    ) -> None:
        """`blocks`: those of the function in the host store. This object keeps them and the program in memory."""
        self._own = own
        self._program = program
        self._function = function
        empty = EmptyProgram(program.on_device)
        self._without_calls = DeviceFunction(function.name, function.tenant, empty, function.positions, function.blocks)
        """The function with its blocks, and without the calls of its program."""
        self._mapped = blocks
        contents = {address: block.content() for address, block in blocks.items()}
        self._host = Route(own.device.host(contents), own.link)
        self.moved_bytes = 0
        """The bytes that were brought since `begin`."""
        self.peer_bytes = 0
        """Those of them that a peer provided."""
        self.unplaced = False
        """Whether blocks did not fit on the device at some time since `begin`."""

    def begin(self) -> None:
        """Count from now on."""
        self.moved_bytes, self.peer_bytes, self.unplaced = 0, 0, False

    def run(self, _: Sequence[torch.Tensor], inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Run the program over the weights on the device. Raises ActivationsError if the device has too little memory
        for such inputs, and the errors of `swap.run`.
        """
        shapes = [list(tensor.shape) for tensor in inputs]
        if not self.admits(shapes):
            needed, own = self._program.activations.nbytes(shapes), self._own
            raise ActivationsError(
                f"{self._function.name} needs {needed} bytes for what it computes from inputs of shapes {shapes}, and "
                f"{own.device.name} has {own.activation_bytes}: send less at once, or serve with more "
                "--device-activations"
            )
        return self._swap(self._function, inputs)

    def admits(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether the device has memory for what the program computes from inputs of these shapes."""
        return self._program.activations.nbytes(shapes) <= self._own.activation_bytes

    def may_share(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether the program may run over inputs of these shapes in spans, which are compiled for the CPU."""
        return self._own.kind == "virtual" and self.admits(shapes)

    def warm_up(self, zeros: Sequence[torch.Tensor], interrupted: Callable[[], bool]) -> None:
        """Run the device's program (`run_waiting`) once on zeros over the weights in the host store, so that its
        operators prepare what they need, and compile its other form (`run`). On a GPU, only register the blocks. Runs
        nothing on a device that has too little memory for the run. Raises WarmUpInterruptedError, and the errors of
        operators.
        """
        program, own = self._program.on_device, self._own

        def check(_: int) -> None:
            if interrupted():
                raise WarmUpInterruptedError

        if own.kind == "cuda":
            # Registering takes as long as copying, so it is done block by block.
            for address, nbytes in self._function.blocks.items():
                check(0)
                self._host.source.find({address: nbytes})
        if own.kind != "virtual" or not self.admits([list(each.shape) for each in zeros]):
            return
        positions = zip(self._program.prepared.program.weights, self._function.positions, strict=True)
        weights = [self._mapped[address].tensor(weight, offset) for weight, (address, offset) in positions]
        program.run_waiting(weights, zeros, check)
        check(0)
        _ = program.run  # This compiles the other form.

    def bring(self) -> None:
        """Bring the missing blocks. That may move other blocks. Raises the errors of `swap.run`."""
        self._swap(self._without_calls, ())

    def placed(self) -> dict[NumberedPosition, torch.Tensor]:
        """Return the weights, which are all on the device, by their numbers and positions."""
        return dict(zip(enumerate(self._function.positions), self._function.bind(self._own.device), strict=True))

    def weights(self, known: Mapping[NumberedPosition, torch.Tensor]) -> list[torch.Tensor]:
        """Return the weights in the order of the program."""
        return [known[each] for each in enumerate(self._function.positions)]

    def forget(self) -> None:
        """Forget the function on the device."""
        self._own.device.evict(self._function.name)

    def _swap(self, function: DeviceFunction, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        own, before = self._own, self._missing_bytes()
        try:
            routes = (*own.peers.routes, self._host)
            outputs, moved = swap.run(own.device, function, inputs, routes, own.swap_settings)
            self.peer_bytes += sum(moved[:-1])
            return outputs
        except NoSpaceError:
            self.unplaced = True
            raise
        finally:
            self.moved_bytes += before - self._missing_bytes() if before else 0

    def _missing_bytes(self) -> int:
        return sum(self._own.device.missing(self._function.blocks).values())
