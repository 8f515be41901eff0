"""Sends runs of requests to workers and executors: copies their inputs into buffers, and their outputs out of them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from overwinter.core.actions import Run
from overwinter.core.errors import MESSAGE_MAX, ConflictError, OverwinterError
from overwinter.core.events import Event, RunEnded, RunFailure, WorkerExited, WorkerReady
from overwinter.core.ids import FunctionId, RequestId, RunId
from overwinter.core.tensor import Tensor
from overwinter.node.answers import Placed, check_contents, copied_tensors, placed_bytes
from overwinter.node.calls import Payload
from overwinter.node.contained import ContainedProcess, PendingRun
from overwinter.node.copying import Copies
from overwinter.node.functions import DeployedFunction
from overwinter.node.pool_calls import PoolCalls
from overwinter.node.processes import Processes
from overwinter.node.workers import WorkerProcess
from overwinter.worker.messages import Answer, Failure, Measured, PoolCall, Ready, RunBatch
from overwinter.worker.shortage import lacks_memory

BUFFERS_IDLE_S = 1.0
"""The memory of large buffers is released when a worker or an executor was idle for this long."""


class Runs:
    """Sends runs to workers and executors, and receives the events of the workers that serve requests."""

    def __init__(
        self,
        processes: Processes,
        functions: Mapping[FunctionId, DeployedFunction],
        payloads: Mapping[RequestId, Payload],
        pool_calls: PoolCalls,
        copies: Copies,
        post: Callable[[Event], None],
    ) -> None:
        self._processes = processes
        self._functions = functions
        self._payloads = payloads
        self._post = post
        self._pool_calls = pool_calls
        self._copies = copies
        self._loop = asyncio.get_running_loop()

    def worker_ready(self, process: WorkerProcess, ready: Ready) -> None:
        """A worker is loaded. A version on trial is then published, unless a pipeline would break."""
        self._pool_calls.end(process, 0)
        function = self._functions.get(process.function)
        if function is not None and function.on_trial:
            function.trial_warning = ready.warning[:MESSAGE_MAX]
            try:
                if function.check_publish is not None:
                    function.check_publish()
            except ConflictError as error:
                self._processes.forks.give_up(process, str(error), "ConflictError")
                return
        self._post(WorkerReady(process.worker))

    def worker_measured(self, process: WorkerProcess, measured: Measured) -> None:
        """Refuse the message: only workers of a profile measurement report measurements."""
        raise ValueError(f"worker {process.worker} was not asked to measure itself")

    def worker_calls(self, process: WorkerProcess, call: PoolCall) -> None:
        """A worker calls a program on the pool; raises ValueError if it may not."""
        function = self._functions.get(process.function)
        is_tried = function is not None and function.on_trial and not process.ready
        self._pool_calls.call(process, function if is_tried else None, call)

    def worker_exited(self, process: ContainedProcess, error: str, reason: str) -> None:
        """A worker or an executor ended."""
        if isinstance(process, WorkerProcess):
            self._pool_calls.worker_ended(process)
        self._post(WorkerExited(process.worker, error, reason, lost_blocks=process.lost_blocks))

    def begin(self, action: Run) -> None:
        """Begin a run that the scheduler ordered."""
        process = self._processes.process(action.worker)
        if process is None:
            # The worker's exit is about to reach the scheduler.
            return
        functions = action.functions or (action.function or process.function,) * len(action.requests)
        self.run(process, functions, action.run, action.requests)

    def run(
        self, process: ContainedProcess, functions: tuple[FunctionId, ...], run: RunId, requests: tuple[RequestId, ...]
    ) -> None:
        """Send a worker or an executor a run of requests, each of a function that it has. Requests whose callers have
        gone since the run was ordered are left out. Without requests, an executor only copies the blocks of the
        functions to its device.
        """
        pairs = [each for each in zip(functions, requests, strict=False) if each[1] in self._payloads]
        functions = tuple(function for function, _ in pairs) or tuple(dict.fromkeys(functions))
        requests = tuple(request for _, request in pairs)
        inputs = [self._tensors_for(*each) for each in pairs]
        tensors = [tensor for request in inputs for tensor in request]
        metas = tuple(tuple(tensor.meta for tensor in request) for request in inputs)
        slot = process.assign_slot(run, requests, functions)
        if isinstance(process, WorkerProcess) and process.calls_programs:
            self._pool_calls.begin(process, run, slot, [self._functions[function] for function, _ in pairs], requests)

        def failed(error: Exception) -> None:
            if lacks_memory(error):
                if isinstance(process, WorkerProcess):
                    self._pool_calls.end(process, slot)
                self._fail_run(process, run, process.take_back(run), error)
            else:
                self._processes.forks.give_up(process, f"its buffer cannot be enlarged for the run: {error}")

        def begun(_: None) -> None:
            self._processes.forks.send(process, RunBatch(run, functions, slot, metas))

        nbytes = sum(len(tensor.data) for tensor in tensors)
        self._copies.make(process, nbytes, partial(process.copy_inputs, slot, tensors), begun, failed)

    def worker_answered(self, process: ContainedProcess, answer: Answer) -> None:
        """Copy the outputs from the run's buffer; raises ValueError for an impossible answer."""
        pending = process.complete_run(answer)
        known = self._pool_calls.end(process, pending.slot) if isinstance(process, WorkerProcess) else ()
        buffer = process.slots[pending.slot].outputs
        placed, failures = self._reserved(pending, process.answer_check.outcomes_of(answer, known))

        def failed(error: Exception) -> None:
            if lacks_memory(error):
                self._fail_run(process, answer.run, pending, error)
            elif process.over:
                raise error
            else:
                self._processes.forks.give_up(process, f"it sent an invalid answer: {error}")

        take = partial(copied_tensors, placed.values(), buffer)
        done = partial(self._copied, process, answer, pending, placed, failures)
        self._copies.make(process, sum(map(placed_bytes, placed.values())), take, done, failed, check_contents)

    def _reserved(
        self, pending: PendingRun, outcomes: Sequence[Placed | Failure]
    ) -> tuple[dict[RequestId, Placed], list[RunFailure]]:
        """Reserve memory for the outputs before they are copied: a worker may announce more than its callers may hold,
        in a file that takes no memory. Returns the outputs to be copied, and the requests that fail.
        """
        placed: dict[RequestId, Placed] = {}
        failures: list[RunFailure] = []
        for request, outcome in zip(pending.requests, outcomes, strict=True):
            payload = self._payloads.get(request)
            if isinstance(outcome, Failure):
                failures.append(RunFailure(request, outcome.error, outcome.message))
            elif payload is not None:
                try:
                    payload.reserve(placed_bytes(outcome))
                except OverwinterError as error:
                    failures.append(RunFailure(request, type(error).__name__, str(error)))
                else:
                    placed[request] = outcome
        return placed, failures

    def _copied(
        self,
        process: ContainedProcess,
        answer: Answer,
        pending: PendingRun,
        placed: Iterable[RequestId],
        failures: list[RunFailure],
        outputs: Sequence[list[Tensor]],
    ) -> None:
        process.free(pending)
        if process.dismissed and not isinstance(process, WorkerProcess):
            # Its run was given up, or is about to be, and is tried again: slices then need the tensors that an answer
            # would replace.
            return
        functions = dict(zip(pending.requests, pending.functions, strict=False))
        for request, tensors in zip(placed, outputs, strict=True):
            payload = self._payloads.get(request)
            if payload is not None:
                _keep(self._functions.get(functions[request]), payload, tensors)
        if process.is_idle_after(answer.run) and process.is_large():
            self._loop.call_later(BUFFERS_IDLE_S, self._release, process, answer.run, process.release())
        if answer.unplaced:
            # Nothing ran, and the run will be sent again.
            failures.clear()
        fault = answer.fault[:MESSAGE_MAX]
        measured = answer.moved_bytes, answer.unplaced, answer.peer_bytes, answer.program_s, fault
        self._post(RunEnded(process.worker, answer.run, tuple(failures), *measured))

    def _tensors_for(self, id_: FunctionId, request: RequestId) -> list[Tensor]:
        """Return the tensors of a request that its function takes; all if the function was removed meanwhile."""
        function, payload = self._functions.get(id_), self._payloads[request]
        if function is not None and function.begins_program:
            # A request that is run anew may still have the results of slices that ran before.
            payload.values = []
        tensors = [*payload.inputs, *payload.values]
        return tensors if function is None else function.inputs_among(tensors)

    def _fail_run(self, process: ContainedProcess, run: RunId, pending: PendingRun, error: Exception) -> None:
        """Fail the requests of a run, because the node has no memory to copy its inputs or outputs; its worker or
        executor continues.
        """
        process.free(pending)
        message = f"this node has no memory for the tensors of {process.function} now ({error}): try again later"
        failures = tuple(RunFailure(request, "OverloadedError", message) for request in pending.requests)
        self._post(RunEnded(process.worker, run, failures))

    def _release(self, process: ContainedProcess, run: RunId, pieces: Iterator[None]) -> None:
        """Release the buffers piece by piece while nothing runs; other callbacks run between two pieces."""
        if process.is_idle_after(run):
            for _ in pieces:
                self._loop.call_soon(self._release, process, run, pieces)
                return


def _keep(function: DeployedFunction | None, payload: Payload, outputs: list[Tensor]) -> None:
    """Keep the outputs for the answer, or what later slices of the program take."""
    if function is None or not function.later_slices:
        payload.outputs = outputs
        return
    payload.values = function.later_inputs_among([*payload.values, *outputs])
    if function.manifest.settings.device == "pool":
        # With `any` a worker may have to begin anew.
        payload.inputs = function.later_inputs_among(payload.inputs)
