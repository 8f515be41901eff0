"""The main loop of an executor: owns one device, and runs on it whatever function a request asks for.

The executor has the program of a function, and maps its blocks from the host store, until the node unmaps or unbinds
the function. A run brings the blocks that the device lacks while it computes. Functions with the same program share it,
and a block is mapped once. No handler runs here.
"""

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from msgspec import structs

from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import (
    MESSAGE_MAX,
    ActivationsError,
    NoSpaceError,
    OverwinterError,
    ProgramError,
    WorkerError,
)
from overwinter.core.ids import Address
from overwinter.device import swap
from overwinter.device.activations import Activations
from overwinter.device.blocks import WeightPosition
from overwinter.device.function import DeviceFunction, DeviceProgram, EmptyProgram
from overwinter.device.null import NullProgram
from overwinter.device.swap import Route
from overwinter.model.program import decode_program, encode_program
from overwinter.model.slicing import Slicer
from overwinter.worker.batches import run_batch, shortened, unbound_failure
from overwinter.worker.buffer import Slot
from overwinter.worker.channel import Channel, ChannelClosedError, close_all
from overwinter.worker.inbox import Inbox
from overwinter.worker.messages import (
    Answer,
    BindFailed,
    BringFrom,
    Evict,
    Failure,
    HandOver,
    LoadFailed,
    PeerEnded,
    Ready,
    Reserve,
    RunBatch,
    Stop,
    ToExecutor,
    Unbind,
    Unmap,
    WarmedUp,
    WarmUp,
)
from overwinter.worker.own_device import OwnDevice, own_device
from overwinter.worker.runner import Prepared, Runner
from overwinter.worker.weights import Blocks, MappedBlock, read_program

NumberedPosition = tuple[int, WeightPosition]
"""The number of a weight in its program, and its position, at which another weight may lie too: of two tied ones, one
may be the transposed other.
"""


class _Program:
    """A program in the two forms that a run needs: one to check and join requests, and one that the device runs."""

    def __init__(self, content: bytes, own: OwnDevice, run_s: Mapping[int, float]) -> None:
        """Compile it as a first run needs it. `run_s`: the seconds of a run by its number of requests. Raises
        ProgramError if the program cannot be compiled, or if `run_s` is empty on a null device.
        """
        self.prepared = Prepared(content, self._run)
        if own.kind == "null":
            if not run_s:
                raise ProgramError("a null device takes the times of runs from a profile: measure one with profile")
            self.on_device: DeviceProgram = NullProgram(self.prepared.program, run_s)
        else:
            self.on_device = DeviceProgram(self.prepared.program, own.device.torch_device)
        self.activations = Activations(self.prepared.program)
        _ = self.on_device.run_waiting  # This compiles it.

    def _run(self, weights: Sequence[torch.Tensor], inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return self.on_device.run(weights, inputs)


class _InterruptedError(Exception):
    """A message came during a warm-up."""


class _SwappedFunction:
    """A function whose runs bring its missing blocks to the device, with counts of the bytes brought."""

    def __init__(
        self, own: OwnDevice, program: _Program, function: DeviceFunction, blocks: Mapping[Address, MappedBlock]
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
        nothing on a device that has too little memory for the run. Raises _InterruptedError, and the errors of
        operators.
        """
        program, own = self._program.on_device, self._own

        def check(_: int) -> None:
            if interrupted():
                raise _InterruptedError

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


class _Member(NamedTuple):
    """A function that was handed over."""

    runner: Runner
    swapped: _SwappedFunction


class Executor:
    """One executor process after its fork."""

    def __init__(self, channel: Channel[ToExecutor], slot: Slot, own: OwnDevice) -> None:
        """`slot`: the buffers of its run; there is one at a time."""
        self._channel = channel
        self._inbox = Inbox(channel, lambda: False)
        self._slot = slot
        self._own = own
        self._blocks = Blocks()
        self._programs: WeakValueDictionary[tuple[Address, tuple[int, int] | None], _Program] = WeakValueDictionary()
        self._functions: dict[str, _Member | Failure] = {}
        """Each function that was handed over, or why it cannot run."""

    def work(self) -> None:
        """Serve until a message to stop comes, the node ends or the device fails."""
        self._channel.send(Ready())
        while self._handle():
            pass

    def _handle(self) -> bool:  # noqa: C901
        """Handle the next message; return whether to handle further ones."""
        try:
            message, fds = self._inbox.receive()
        except ChannelClosedError:
            return False
        match message:
            case RunBatch():
                answer = self._checked(self._run(message), message.functions)
                self._channel.send(answer)
                return not answer.fault
            case HandOver():
                self._add_function(message, fds)
            case WarmUp(function):
                self._channel.send(WarmedUp(self._warm_up(function)))
            case Evict(functions):
                for function in functions:
                    self._own.device.evict(function)
            case Unmap(function):
                self._functions.pop(function, None)
            case Unbind(function):
                self._functions.pop(function, None)
                self._own.device.evict(function)
            case BringFrom() | PeerEnded():
                self._own.peers.take(message, fds)
            case Reserve() | Stop():
                return False
        return True

    def _run(self, message: RunBatch) -> Answer:
        """Run requests, as one batch if they may share a run; without requests, bring the blocks of the functions."""
        found = {name: self._functions.get(name) or unbound_failure(name) for name in message.functions}
        members = [each for each in found.values() if isinstance(each, _Member)]
        for member in members:
            member.swapped.begin()
        failure = _bring_together(members) if len(members) > 1 or not message.requests else None
        runners = [failure or (each if isinstance(each, Failure) else each.runner) for each in found.values()]
        by_name = dict(zip(found, runners, strict=True))
        whose = message.functions if message.requests else ()
        answer = run_batch(message, self._slot, [by_name[name] for name in whose])
        self._own.peers.run_ended()
        swapped = [member.swapped for member in members]
        unplaced = any(each.unplaced for each in swapped)
        if unplaced:
            for each in swapped:
                each.forget()
        return structs.replace(
            answer,
            moved_bytes=sum(each.moved_bytes for each in swapped),
            peer_bytes=sum(each.peer_bytes for each in swapped),
            unplaced=unplaced,
        )

    def _checked(self, answer: Answer, functions: Sequence[str]) -> Answer:
        """Return the answer of a run of these functions, with the fault of the device if the run made it unusable."""
        failed = any(isinstance(each, Failure) for each in answer.outcomes)
        fault = self._own.device.fault() if failed and not answer.unplaced else None
        if fault is None:
            return answer
        who, device = ", ".join(dict.fromkeys(functions)), self._own.device.name
        text = f"device {device} failed while it ran {who}, and its executor is replaced: {fault}"
        sys.stderr.write(f"overwinter executor: {text}\n")
        return structs.replace(
            answer, outcomes=shortened((Failure("WorkerError", text),) * len(answer.outcomes)), fault=fault
        )

    def _warm_up(self, function: str) -> bool:
        """Warm up a function that was handed over; return whether a message interrupted it. An error is no reason to
        refuse requests: zeros are unusual values.
        """
        member = self._functions.get(function)
        if isinstance(member, _Member):
            try:
                with torch.inference_mode():
                    member.swapped.warm_up(member.runner.zeros(), self._inbox.has_message)
            except _InterruptedError:
                return True
            except Exception as error:  # noqa: BLE001 - the boundary to an untested program
                text = f"{type(error).__name__}: {error}"
                sys.stderr.write(f"overwinter executor: {function} was not warmed up: {text}\n")
        return False

    def _add_function(self, message: HandOver, fds: Sequence[int]) -> None:
        """Map a function's blocks, and compile its program unless another function has it. Only a failure is reported,
        and fails the runs of the function that were sent meanwhile.
        """
        name = message.bind.function
        try:
            self._functions[name] = self._member(message, fds)
        except Exception as error:  # noqa: BLE001 - the boundary to an untested program
            kind = type(error).__name__ if isinstance(error, OverwinterError) else "ProgramError"
            why = f"{name} cannot run on {self._own.device.name}: {error}"[:MESSAGE_MAX]
            failure = self._functions[name] = Failure(kind, why)
            self._channel.send(BindFailed(name, failure.error, failure.message))
        finally:
            close_all(fds)

    def _member(self, message: HandOver, fds: Sequence[int]) -> _Member:
        load, bind = message.load, message.bind
        program = self._programs.get((load.program, load.calls))
        if program is None:
            content = _slice_of(read_program(fds[0], load.program_bytes, load.program), load.calls)
            program = _Program(content, self._own, message.run_s)
            if load.calls is not None:
                # Between slices the rows may be in another order than the requests, as where a model sorts them.
                program.prepared.joinable = False
            self._programs[load.program, load.calls] = program
        program.activations.learn(message.private_bytes)
        taken = self._blocks.take(bind.blocks, dict(zip(bind.handed, fds[1:], strict=True)))
        mapped: dict[Address, MappedBlock] = {}
        for (address, _), block in zip(bind.blocks, taken, strict=True):
            if not isinstance(block, MappedBlock):
                raise block
            mapped[address] = block
        positions = [(bind.blocks[block][0], offset) for block, offset in bind.pieces]
        sizes = {address: nbytes for (address, _), nbytes in zip(bind.blocks, message.sizes, strict=False)}
        function = DeviceFunction(bind.function, message.tenant, program.on_device, positions, sizes)
        swapped = _SwappedFunction(self._own, program, function, mapped)
        runner = Runner(bind.function, program.prepared, [], None, run=swapped.run, may_share=swapped.may_share)
        return _Member(runner, swapped)


def _slice_of(content: bytes, calls: tuple[int, int] | None) -> bytes:
    """Return these calls of an encoded program as an encoded program; if `calls` is None, all of it."""
    return content if calls is None else encode_program(Slicer(decode_program(content)).slice(*calls))


def _bring_together(members: Sequence[_Member]) -> Failure | None:
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


def execute(end: socket.socket, slot: Slot, config: DeviceConfig) -> None:
    """Reserve a device and serve it; report to the node if it cannot be reserved."""
    channel: Channel[ToExecutor] = Channel(end, ToExecutor)  # type: ignore[arg-type]
    first, fds = channel.receive()
    assert isinstance(first, Reserve), "it is the first message"
    try:
        own = own_device(config, first, fds)
    except WorkerError as error:
        channel.send(LoadFailed("WorkerError", str(error)))
        return
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"the {config.memory_bytes} bytes of device {config.name} could not be reserved: {error}"
        channel.send(LoadFailed("WorkerError", reason))
        return
    with closing(own.device):
        Executor(channel, slot, own).work()
