"""The main loop of an executor: owns one device, and runs on it whatever function a request asks for.

The executor has the program of a function, and maps its blocks from the host store, until the node unmaps or unbinds
the function. While a run computes, it brings the blocks that the device lacks. Functions with the same program share
it, and a block is mapped once. No handler runs here.
"""

import socket
import sys
from collections.abc import Sequence
from contextlib import closing

import torch
from msgspec import structs

from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import WorkerError
from overwinter.worker.batches import run_batch, shortened
from overwinter.worker.buffer import Slot
from overwinter.worker.channel import Channel, ChannelClosedError, close_all
from overwinter.worker.executor_messages import (
    BringFrom,
    Evict,
    HandOver,
    Learn,
    PeerEnded,
    Reserve,
    ToExecutor,
    Unmap,
    WarmUp,
)
from overwinter.worker.handed_over import HandedOver, Member, bring_together
from overwinter.worker.inbox import Inbox
from overwinter.worker.messages import (
    Answer,
    BindFailed,
    Failure,
    LoadFailed,
    Ready,
    RunBatch,
    Stop,
    Unbind,
    WarmedUp,
)
from overwinter.worker.own_device import OwnDevice, own_device
from overwinter.worker.swapped import WarmUpInterruptedError


class Executor:
    """One executor process after its fork."""

    def __init__(self, channel: Channel[ToExecutor], slot: Slot, own: OwnDevice) -> None:
        """`slot`: the buffers of its run; there is one at a time."""
        self._channel = channel
        self._inbox = Inbox(channel, lambda: False)
        self._slot = slot
        self._own = own
        self._functions = HandedOver(own)

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
            case Learn(function, private_bytes, run_s):
                self._functions.learn(function, private_bytes, run_s)
            case WarmUp(function):
                self._channel.send(WarmedUp(self._warm_up(function)))
            case Evict(functions):
                for function in functions:
                    self._own.device.evict(function)
            case Unmap(function):
                self._functions.forget(function)
            case Unbind(function):
                self._functions.forget(function)
                self._own.device.evict(function)
            case BringFrom() | PeerEnded():
                self._own.peers.take(message, fds)
            case Reserve() | Stop():
                return False
        return True

    def _run(self, message: RunBatch) -> Answer:
        """Run requests, as one batch if they may share a run; without requests, bring the blocks of the functions."""
        found = {name: self._functions.get(name) for name in message.functions}
        members = [each for each in found.values() if isinstance(each, Member)]
        for member in members:
            member.swapped.begin()
        failure = bring_together(members) if len(members) > 1 or not message.requests else None
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
        if isinstance(member, Member):
            try:
                with torch.inference_mode():
                    member.swapped.warm_up(member.runner.zeros(), self._inbox.has_message)
            except WarmUpInterruptedError:
                return True
            except Exception as error:  # noqa: BLE001 - the boundary to an untested program
                text = f"{type(error).__name__}: {error}"
                sys.stderr.write(f"overwinter executor: {function} was not warmed up: {text}\n")
        return False

    def _add_function(self, message: HandOver, fds: Sequence[int]) -> None:
        """Take a function. Only a failure is reported; the runs of the function that were sent meanwhile then fail."""
        try:
            failure = self._functions.add(message, fds)
        finally:
            close_all(fds)
        if failure is not None:
            self._channel.send(BindFailed(message.bind.function, failure.error, failure.message))


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
