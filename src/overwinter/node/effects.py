"""Carries out the scheduler's actions, one method per action. The results of slow actions return as events."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, assert_never

from overwinter.core.actions import (
    Action,
    Bind,
    Drop,
    Evict,
    Explanation,
    ForkAhead,
    LoadBlocks,
    LoadFinished,
    Prepare,
    Refuse,
    Reply,
    Run,
    SetAlarm,
    StartWorker,
    StopWorker,
    Unbind,
)
from overwinter.core.errors import OverwinterError, StoreError, WorkerError, error_named
from overwinter.core.events import (
    Alarm,
    BlocksLoaded,
    Event,
    LoadFailed,
    RunEnded,
    RunFailure,
    WorkerExited,
    WorkerReady,
    ZygoteLost,
)
from overwinter.core.ids import (
    Address,
    FunctionId,
    OperationId,
    RequestId,
    RunId,
    Seconds,
    TenantId,
    split_id,
)
from overwinter.core.tensor import Tensor
from overwinter.node import clock, views
from overwinter.node.answers import TOLD_MOST, said_bytes
from overwinter.node.copying import Copies
from overwinter.node.faults import MACHINE
from overwinter.node.functions import DeployedFunction, Family, mapped_bytes
from overwinter.node.log import Log
from overwinter.node.placing import Placing
from overwinter.node.processes import Processes
from overwinter.node.sparing import Sparing
from overwinter.node.threads import Threads
from overwinter.node.workers import Flight, WorkerProcess
from overwinter.node.zygotes import Room
from overwinter.store.blocks import without_addresses
from overwinter.store.host import HostStore
from overwinter.store.hosts import HostStores
from overwinter.worker import messages
from overwinter.worker.messages import Answer, Failure, Load, Measured, Ready, RunBatch
from overwinter.worker.shortage import lacks_memory

LOAD_THREADS = 4
"""For what a wake waits for: threads that deploys share wait for each other, and for the repository's lock."""
BUFFERS_IDLE_S = 1.0
"""A worker that had nothing to do for so long gives back the memory of large buffers."""


class Payload:
    """A request's tensors while the scheduler thinks about its name."""

    def __init__(self, inputs: list[Tensor], reply: asyncio.Future[views.Reply]) -> None:
        self.inputs = inputs
        self.reply = reply
        self.outputs: list[Tensor] = []


class NodeEffects:
    """Carries out the actions of a node's scheduler."""

    def __init__(self, hosts: HostStores, tasks: asyncio.TaskGroup, log: Log) -> None:
        self._hosts = hosts
        self._tasks = tasks
        self.log = log
        self._sparing = Sparing(log)
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(LOAD_THREADS, "load")
        self._copies = Copies()
        self._alarm: asyncio.TimerHandle | None = None
        self.functions: dict[FunctionId, DeployedFunction] = {}
        self.payloads: dict[RequestId, Payload] = {}
        self.load_waiters: dict[FunctionId, list[asyncio.Future[None]]] = {}
        # Both are set by the node before the first event.
        self.post: Callable[[Event], None] = _nobody
        self.processes: Processes
        self.placing = Placing(self, hosts, self._threads, tasks)

    def carry_out(self, action: Action) -> None:  # noqa: C901, PLR0912
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
            case LoadBlocks(function, operation):
                self._load_blocks(self.functions[function], operation)
            case Drop(addresses, store):
                self._hosts.store(store).drop(addresses)
            case StartWorker():
                self.placing.start_worker(action)
            case ForkAhead(worker, function):
                self.placing.fork_ahead(worker, self.functions.get(function))
            case Bind():
                self.placing.bind(action)
            case Unbind(worker, function):
                self.placing.unbind(worker, function)
            case Prepare(function, forget):
                self._prepare(function, forget)
            case StopWorker(worker, kill):
                self.placing.stop_worker(worker, kill)
            case LoadFinished():
                self._announce(action)
            case Evict():
                # For the readers of the journal; Drop removes its blocks.
                pass
            case Explanation():
                self._decided(action)
            case _:
                assert_never(action)

    # Blocks

    def _load_blocks(self, function: DeployedFunction, operation: OperationId) -> None:
        host = self._hosts.store(function.store)
        if all(host.holds(blob.address) for blob in function.blobs):
            self.post(BlocksLoaded(function.id, operation, 0, (), function.store))
        else:
            self._tasks.create_task(self._copy_blocks(function, operation, host))

    async def _copy_blocks(self, function: DeployedFunction, operation: OperationId, host: HostStore) -> None:
        addresses = tuple(blob.address for blob in function.blobs)
        try:
            added = await self._loop.run_in_executor(self._threads, host.load, function.blobs)
        except MACHINE as error:
            name, told = type(error).__name__, self.told(function, error)
            self.post(LoadFailed(function.id, operation, name, told, addresses, function.store))
        else:
            self.post(BlocksLoaded(function.id, operation, added, addresses, function.store))
            # Nobody waits for this: it makes the next wakes cheaper.
            with suppress(*MACHINE):
                await asyncio.to_thread(host.join_pages, function.blobs)

    # Workers

    def told(self, function: DeployedFunction, error: Exception) -> str:
        """What callers hear of an error of the store; the log hears all of it."""
        self.log(f"function {function.id}: {error}", level="error", function=function.id)
        return f"function {function.id}: {without_addresses(str(error))}"

    def _prepare(self, id_: FunctionId, forget: Address | None) -> None:
        function = self.functions.get(id_)
        if function is not None:
            self.processes.prepare(function.manifest.tenant, id_, forget)

    def tenants(self) -> set[TenantId]:
        """The tenants that have functions."""
        return {function.manifest.tenant for function in self.functions.values()}

    def room_of(self, tenant: TenantId) -> Room:
        """The limits of the tenant's largest worker."""
        families: dict[Family, list[DeployedFunction]] = {}
        for function in self.functions.values():
            if function.manifest.tenant == tenant:
                families.setdefault(function.family, []).append(function)
        memory_bytes = [function.memory_bytes for its in families.values() for function in its]
        mapped = [mapped_bytes(its) for its in families.values()]
        return Room(max(Room().memory_bytes, *memory_bytes), max(Room().mapped_bytes, *mapped))

    def warm_up_of(self, id_: FunctionId) -> tuple[Load, messages.Bind, list[int]] | None:
        """A function's program and weights, and their descriptors; None when it is not to be prepared."""
        function = self.functions.get(id_)
        if function is None or not function.warm_ups:
            return None
        try:
            fds = self._hosts.store(function.store).open(function.files(bare=True))
            return function.load(bare=True), function.bind(bare=True), fds
        except StoreError:
            # Its blocks left again; the next worker of this program asks anew after a restart of the zygote.
            return None

    def worker_ready(self, process: WorkerProcess, ready: Ready) -> None:
        """A worker is loaded."""
        function = self.functions.get(process.function)
        if function is not None and function.on_trial:
            function.doubts = ready.doubts[:TOLD_MOST]
        self.post(WorkerReady(process.worker))

    def worker_waits(self, process: WorkerProcess) -> None:
        """A worker that was forked ahead can be taken over."""
        self.post(WorkerReady(process.worker))

    def worker_measured(self, process: WorkerProcess, measured: Measured) -> None:
        """Workers that serve are not measured this way."""
        raise ValueError(f"worker {process.worker} was not asked to measure itself")

    def worker_exited(self, process: WorkerProcess, error: str, reason: str) -> None:
        """A worker ended."""
        self.post(WorkerExited(process.worker, error, reason, lost_blocks=process.lost_blocks))

    def zygote_lost(self, tenant: TenantId | None, culprit: FunctionId | None, overran: bool) -> None:
        """The prepared programs of a tenant are lost, with None of all; `culprit` was being warmed up, for too long if
        it overran.
        """
        warmed_up = None if culprit is None else self.functions.get(culprit)
        if warmed_up is not None:
            left = 0 if overran else max(0, warmed_up.warm_ups - 1)
            for function in self.functions.values():
                if function.program_subject == warmed_up.program_subject:
                    function.warm_ups = min(function.warm_ups, left)
        self.post(ZygoteLost(tenant))

    # Runs

    def _run(self, action: Run) -> None:
        process = self.processes.process(action.worker)
        if process is None:
            # Its end is on the way to the scheduler.
            return
        functions = action.functions or (action.function or process.function,) * len(action.requests)
        self.run(process, functions, action.run, action.requests)

    def run(
        self, process: WorkerProcess, functions: tuple[FunctionId, ...], run: RunId, requests: tuple[RequestId, ...]
    ) -> None:
        """Send a worker a run of requests, each of a function that it has bound."""
        inputs = [self.payloads[request].inputs for request in requests]
        tensors = [tensor for request in inputs for tensor in request]
        metas = tuple(tuple(tensor.meta for tensor in request) for request in inputs)
        slot = process.begin(run, requests)

        def failed(error: Exception) -> None:
            if lacks_memory(error):
                self._end_run(process, run, process.take_back(run), error)
            else:
                self.processes.give_up(process, f"its buffer cannot be made to hold what it is to run: {error}")

        def begun(buffer_bytes: int) -> None:
            self.processes.send(process, RunBatch(run, functions, slot, metas, buffer_bytes))

        nbytes = sum(len(tensor.data) for tensor in tensors)
        self._copies.make(process, nbytes, partial(process.lay, slot, tensors), begun, failed)

    def worker_answered(self, process: WorkerProcess, answer: Answer) -> None:
        """Copy the outputs from the run's buffer; ValueError for an impossible answer."""
        flight = process.end(answer)

        def failed(error: Exception) -> None:
            if lacks_memory(error):
                self._end_run(process, answer.run, flight, error)
            elif process.over:
                raise error
            else:
                self.processes.give_up(process, f"it answered nonsense: {error}")

        take = partial(process.answer_check.outputs_of, answer, process.slots[flight.slot].outputs)
        self._copies.make(process, said_bytes(answer), take, partial(self._taken, process, answer, flight), failed)

    def _taken(
        self, process: WorkerProcess, answer: Answer, flight: Flight, outcomes: Sequence[list[Tensor] | Failure]
    ) -> None:
        process.free(flight)
        failures: list[RunFailure] = []
        for request, outcome in zip(flight.requests, outcomes, strict=True):
            payload = self.payloads.get(request)
            if isinstance(outcome, Failure):
                failures.append(RunFailure(request, outcome.error, outcome.message))
            elif payload is not None:
                payload.outputs = outcome
        if process.is_idle_since(answer.run) and process.is_large():
            self._loop.call_later(BUFFERS_IDLE_S, self._give_back, process, answer.run, process.give_back())
        self.post(RunEnded(process.worker, answer.run, tuple(failures)))

    def _end_run(self, process: WorkerProcess, run: RunId, flight: Flight, error: Exception) -> None:
        """The node has no memory to copy the inputs or outputs of a run: its requests fail, and its worker
        continues.
        """
        process.free(flight)
        told = f"this node has no memory for the tensors of {process.function} now ({error}): try again later"
        failures = tuple(RunFailure(request, "OverloadedError", told) for request in flight.requests)
        self.post(RunEnded(process.worker, run, failures))

    def _give_back(self, process: WorkerProcess, run: RunId, pieces: Iterator[None]) -> None:
        """As long as nothing runs; others have their turn between two pieces."""
        if process.is_idle_since(run):
            for _ in pieces:
                self._loop.call_soon(self._give_back, process, run, pieces)
                return

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

    def _announce(self, action: LoadFinished) -> None:
        error: OverwinterError | None = None
        if action.error is not None:
            error = error_named(action.error)(action.reason)
        for future in self.load_waiters.pop(action.function, []):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _decided(self, action: Explanation) -> None:
        # The others are for the readers of the journal.
        if action.what == "stop":
            function = self.functions.get(action.function)
            self._sparing.say(action.function if function is None else function.manifest.tenant, action.why)

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
        """Cancel the alarm; fail the open requests, because the node stops."""
        if self._alarm is not None:
            self._alarm.cancel()
        waiting: list[asyncio.Future[Any]] = [payload.reply for payload in self.payloads.values()]
        waiting += itertools.chain.from_iterable(self.load_waiters.values())
        for future in waiting:
            if not future.done():
                future.set_exception(WorkerError("the node is stopping"))
        self.payloads.clear()
        self.load_waiters.clear()


def _nobody(event: Event) -> None:
    raise RuntimeError(f"nobody hears {event}")
