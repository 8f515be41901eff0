"""Carries out what the mind asks for: one method per action. Whatever takes long comes back as an event."""

import asyncio
import os
from collections.abc import Callable
from typing import assert_never

from overwinter.core.actions import (
    Action,
    Announce,
    Drop,
    Prepare,
    Refuse,
    Reply,
    Run,
    SetAlarm,
    Stage,
    StartBody,
    StopBody,
)
from overwinter.core.errors import MachineError, OverwinterError, StoreError, WorkerError, error_named
from overwinter.core.events import (
    Alarm,
    BodyExited,
    BodyReady,
    Event,
    RunEnded,
    RunFailure,
    Staged,
    StageFailed,
    ZygoteLost,
)
from overwinter.core.ids import FunctionId, RequestId, Seconds, WorkerId, split_id
from overwinter.core.tensor import BYTES, ITEM_BYTES, Tensor, TensorMeta, check_size
from overwinter.node import clock, views
from overwinter.node.functions import DeployedFunction
from overwinter.node.processes import BodyProcess, Processes
from overwinter.store.host import HostStore
from overwinter.worker.messages import Answer, Failure, ForkBody, RunBatch
from overwinter.worker.sandbox import uid_of
from overwinter.worker.tray import offsets


class Payload:
    """A request's tensors while the mind thinks about its name."""

    def __init__(self, inputs: list[Tensor], reply: asyncio.Future[views.Reply]) -> None:
        self.inputs = inputs
        self.reply = reply
        self.outputs: list[Tensor] = []


class NodeEffects:
    """The hands of a node's mind."""

    def __init__(self, host: HostStore, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self.functions: dict[FunctionId, DeployedFunction] = {}
        self.payloads: dict[RequestId, Payload] = {}
        self.announced: dict[FunctionId, list[asyncio.Future[None]]] = {}
        self._runs: dict[WorkerId, tuple[RequestId, ...]] = {}
        # Both are set by the node before the first event.
        self.post: Callable[[Event], None] = _nobody
        self.processes: Processes

    def carry_out(self, action: Action) -> None:  # noqa: C901
        """Begin what `action` asks for."""
        match action:
            case Run():
                self._run(action)
            case Reply():
                self._reply(action)
            case Refuse():
                self._refuse(action)
            case SetAlarm(at):
                self._set_alarm(at)
            case Stage(function):
                self._stage(self.functions[function])
            case Drop(addresses):
                self._host.drop(addresses)
            case StartBody():
                self._start_body(action)
            case Prepare(function):
                self._prepare(function)
            case StopBody(worker, kill):
                self.processes.stop(worker, kill)
            case Announce():
                self._announce(action)
            case _:
                assert_never(action)

    # Blocks

    def _stage(self, function: DeployedFunction) -> None:
        if all(self._host.holds(blob.address) for blob in function.blobs):
            self.post(Staged(function.id, 0))
        else:
            self._tasks.create_task(self._copy_blocks(function))

    async def _copy_blocks(self, function: DeployedFunction) -> None:
        addresses = tuple(blob.address for blob in function.blobs)
        try:
            added = await asyncio.to_thread(self._host.stage, function.blobs)
        except MachineError as error:
            self.post(StageFailed(function.id, type(error).__name__, str(error), addresses))
        else:
            self.post(Staged(function.id, added, addresses))
            # Nobody waits for this: it makes the next wakes cheaper.
            await asyncio.to_thread(self._host.join_pages, function.blobs)

    # Bodies

    def _start_body(self, action: StartBody) -> None:
        function = self.functions[action.function]
        try:
            fds = self._host.open(function.files())
        except StoreError as error:
            # A block that is not there was taken out of the store's tables by `open`; anything else is no loss.
            lost = not all(self._host.holds(blob.address) for blob in function.blobs)
            self.post(BodyExited(action.worker, "StoreError", str(error), lost_blocks=lost))
            return
        try:
            memory_bytes = function.manifest.settings.memory_mib << 20
            order = ForkBody(action.worker, uid_of(action.worker), memory_bytes, function.mapped_bytes())
            self.processes.fork(order, function.load(action.on_trial), fds)
        except WorkerError as error:
            self.post(BodyExited(action.worker, "WorkerError", str(error)))
        finally:
            for fd in fds:
                os.close(fd)

    def _prepare(self, id_: FunctionId) -> None:
        function = self.functions.get(id_)
        if function is None:
            return
        try:
            fds = self._host.open(function.files())
        except StoreError:
            # Its blocks left again; the next body of this program asks anew after a restart of the zygote.
            return
        self.processes.prepare(function.load(on_trial=False), fds)
        for fd in fds:
            os.close(fd)

    def body_ready(self, worker: WorkerId) -> None:
        """A body is loaded."""
        self.post(BodyReady(worker))

    def body_exited(self, worker: WorkerId, error: str, reason: str) -> None:
        """A body is gone."""
        self._runs.pop(worker, None)
        self.post(BodyExited(worker, error, reason))

    def zygote_lost(self) -> None:
        """What the zygote had prepared is gone."""
        self.post(ZygoteLost())

    # Runs

    def _run(self, action: Run) -> None:
        body = self.processes.body(action.worker)
        if body is None:
            # Its end is on the way to the mind.
            return
        inputs = [self.payloads[request].inputs for request in action.requests]
        tensors = [tensor for request in inputs for tensor in request]
        *places, nbytes = offsets(tensor.meta for tensor in tensors)
        body.inputs.hold(nbytes)
        for tensor, at in zip(tensors, places, strict=True):
            body.inputs.view[at : at + len(tensor.data)] = tensor.data
        metas = tuple(tuple(tensor.meta for tensor in request) for request in inputs)
        body.run = action.run
        self._runs[action.worker] = action.requests
        self.processes.send(body, RunBatch(action.run, metas, body.inputs.nbytes))

    def body_answered(self, body: BodyProcess, answer: Answer) -> None:
        """Take the outputs out of the tray; ValueError if the answer cannot be true."""
        requests = self._runs.pop(body.worker, None)
        if requests is None or body.run != answer.run or len(requests) != len(answer.outcomes):
            raise ValueError(f"run {answer.run} was not asked for")
        body.run = None
        body.outputs.follow(answer.tray_bytes)
        failures: list[RunFailure] = []
        at = 0
        for request, outcome in zip(requests, answer.outcomes, strict=True):
            if isinstance(outcome, Failure):
                failures.append(RunFailure(request, outcome.error, outcome.message))
                continue
            *places, stop = offsets(outcome.metas)
            outputs = [_taken(body, meta, at + place) for meta, place in zip(outcome.metas, places, strict=True)]
            at += stop
            payload = self.payloads.get(request)
            if payload is not None:
                payload.outputs = outputs
        self.post(RunEnded(body.worker, answer.run, tuple(failures)))

    # Answers

    def _reply(self, action: Reply) -> None:
        payload = self.payloads.pop(action.request, None)
        if payload is not None and not payload.reply.done():
            name, version = split_id(action.function)
            payload.reply.set_result(views.Reply(name, version, payload.outputs, action.start))

    def _refuse(self, action: Refuse) -> None:
        payload = self.payloads.pop(action.request, None)
        if payload is not None and not payload.reply.done():
            payload.reply.set_exception(error_named(action.error)(action.message, action.retry_after_s))

    def _announce(self, action: Announce) -> None:
        error: OverwinterError | None = None
        if action.error is not None:
            error = error_named(action.error)(action.reason)
        for future in self.announced.pop(action.function, []):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    # Time

    def _set_alarm(self, at: Seconds) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        delay = max(0.0, at - clock.now())
        self._alarm = self._loop.call_later(delay, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.post(Alarm())

    def close(self) -> None:
        """Forget the alarm; whoever still waits is told that the node stops."""
        if self._alarm is not None:
            self._alarm.cancel()
        for payload in self.payloads.values():
            if not payload.reply.done():
                payload.reply.set_exception(WorkerError("the node is stopping"))
        self.payloads.clear()


def _taken(body: BodyProcess, meta: TensorMeta, at: int) -> Tensor:
    """A copy of one output; ValueError or CallerError if it does not lie where it should."""
    stop = at + meta.nbytes
    if meta.nbytes < 0 or stop > body.outputs.nbytes or meta.datatype not in (*ITEM_BYTES, BYTES):
        raise ValueError(f"output {meta.name!r} does not lie in the tray")
    tensor = Tensor(meta.name, meta.datatype, meta.shape, bytes(body.outputs.view[at:stop]))
    try:
        check_size(tensor)
    except OverwinterError as error:
        raise ValueError(str(error)) from error
    return tensor


def _nobody(event: Event) -> None:
    raise RuntimeError(f"nobody hears {event}")
