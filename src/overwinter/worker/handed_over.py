"""The functions that were handed over to an executor, with their programs and the blocks of the host store."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

from overwinter.core.errors import MESSAGE_MAX, OverwinterError, StoreError
from overwinter.core.ids import Address
from overwinter.device.function import DeviceFunction
from overwinter.model.program import decode_program, encode_program
from overwinter.model.slicing import Slicer
from overwinter.worker.batches import unbound_failure
from overwinter.worker.executor_messages import HandOver
from overwinter.worker.messages import Failure
from overwinter.worker.own_device import OwnDevice
from overwinter.worker.runner import Runner
from overwinter.worker.swapped import NumberedPosition, Program, SwappedFunction
from overwinter.worker.weights import Blocks, MappedBlock, read_program


class Member(NamedTuple):
    """A function that can run."""

    program: Program
    runner: Runner
    swapped: SwappedFunction


class HandedOver:
    """The functions that were handed over to an executor and not forgotten since."""

    def __init__(self, own: OwnDevice) -> None:
        self._own = own
        self._blocks = Blocks()
        self._programs: WeakValueDictionary[tuple[Address, tuple[int, int] | None], Program] = WeakValueDictionary()
        self._functions: dict[str, Member | Failure] = {}
        self._taken: dict[str, list[MappedBlock | StoreError]] = {}
        """The blocks of each function. They stay mapped even if it cannot run, because later functions may share them.
        """

    def get(self, function: str) -> Member | Failure:
        """Return a function, or why it cannot run."""
        return self._functions.get(function) or unbound_failure(function)

    def add(self, message: HandOver, fds: Sequence[int]) -> Failure | None:
        """Map a function's blocks, and compile its program unless another function has it. Return why the function
        cannot run, or None.
        """
        bind, name = message.bind, message.bind.function
        handed = dict(zip(bind.handed, fds[1:], strict=True))
        self._taken[name] = self._blocks.take(bind.blocks, handed, message.store)
        try:
            self._functions[name] = self._member(message, fds[0], self._taken[name])
        except Exception as error:  # noqa: BLE001 - the boundary to an untested program
            kind = type(error).__name__ if isinstance(error, OverwinterError) else "ProgramError"
            failure = Failure(kind, f"{name} cannot run on {self._own.device.name}: {error}"[:MESSAGE_MAX])
            self._functions[name] = failure
            return failure
        return None

    def learn(self, function: str, private_bytes: Mapping[int, int], run_s: Mapping[int, float]) -> None:
        """Use these figures of a function's program from now on (`HandOver`)."""
        found = self._functions.get(function)
        if isinstance(found, Member):
            found.program.learn(private_bytes, run_s)

    def forget(self, function: str) -> None:
        """Forget a function, but not its blocks on the device."""
        self._functions.pop(function, None)
        self._taken.pop(function, None)

    def _member(self, message: HandOver, program_fd: int, taken: Sequence[MappedBlock | StoreError]) -> Member:
        load, bind = message.load, message.bind
        program = self._programs.get((load.program, load.calls))
        if program is None:
            content = _slice_of(read_program(program_fd, load.program_bytes, load.program), load.calls)
            program = Program(content, self._own, message.run_s)
            if load.calls is not None:
                # Between slices the rows may be in another order than the requests, as where a model sorts them.
                program.prepared.joinable = False
            self._programs[load.program, load.calls] = program
        program.learn(message.private_bytes, message.run_s)
        mapped: dict[Address, MappedBlock] = {}
        for (address, _), block in zip(bind.blocks, taken, strict=True):
            if not isinstance(block, MappedBlock):
                raise block
            mapped[address] = block
        positions = [(bind.blocks[block][0], offset) for block, offset in bind.pieces]
        sizes = {address: nbytes for (address, _), nbytes in zip(bind.blocks, message.sizes, strict=False)}
        function = DeviceFunction(bind.function, message.tenant, program.on_device, positions, sizes)
        swapped = SwappedFunction(self._own, program, function, mapped)
        runner = Runner(bind.function, program.prepared, [], None, run=swapped.run, may_share=swapped.may_share)
        return Member(program, runner, swapped)


def _slice_of(content: bytes, calls: tuple[int, int] | None) -> bytes:
    """Return these calls of an encoded program as an encoded program; if `calls` is None, all of it."""
    return content if calls is None else encode_program(Slicer(decode_program(content)).slice(*calls))


def bring_together(members: Sequence[Member]) -> Failure | None:
    """Bring the blocks of functions that share a run, and give their runners the weights on the device, which are the
    same tensors as far as they lie at the same positions.
    """
    try:
        for member in members:
            member.swapped.bring()
    except OverwinterError as error:
        return Failure(type(error).__name__, str(error))
    known: dict[NumberedPosition, torch.Tensor] = {}
    for member in members:
        known |= member.swapped.placed()
    for member in members:
        member.runner.weights = member.swapped.weights(known)
    return None
