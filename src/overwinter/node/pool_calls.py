"""Runs programs on the pool for the workers that run the handlers of their functions.

A worker calls a program by one message within a run. The call becomes a request to the program, which the scheduler
treats as a function of its own. This request has the tensors that the worker sends, and the latest of the deadlines of
the run's requests to the function. Its answer goes back to the worker. With the device `any`, the worker runs the
program itself if the request fails, except with DeadlineError or because nobody waits for the run any more.
A worker is not trusted, so it may call only programs of the run's functions, one at a time for each run.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import TypeVar
from weakref import WeakValueDictionary

from overwinter.core.actions import WARMEST_FIRST
from overwinter.core.call import Call, Result
from overwinter.core.errors import MESSAGE_MAX, DeadlineError, OverloadedError, OverwinterError, WorkerError
from overwinter.core.ids import FunctionId, RequestId, RunId, Seconds, TenantId, WorkerId, whole_names
from overwinter.core.tensor import Tensor, TensorMeta
from overwinter.node import clock
from overwinter.node.answers import AnswerCheck, check_contents, copied_tensors, placed_bytes
from overwinter.node.calls import Calls, Payload
from overwinter.node.copying import FAULTS, Copies
from overwinter.node.faults import contain
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.processes import Processes
from overwinter.node.workers import WorkerProcess
from overwinter.scheduler.policies.queueing import ORDINARY
from overwinter.store.manifest import SAMPLES_MAX
from overwinter.worker.messages import Failure, Outputs, PoolCall, PoolCallResult
from overwinter.worker.shortage import lacks_memory

CALLS_PER_REQUEST = 2
"""A request is in one call together with others, and in a call of its own if that fails."""

ABANDONED = "nobody waits for this run any more"

T = TypeVar("T")


class _Run:
    """A run in a worker, or a trial."""

    def __init__(
        self,
        functions: Mapping[FunctionId, DeployedFunction],
        function_of: Mapping[RequestId, FunctionId],
        caller: tuple[WorkerId, RunId] | None = None,
    ) -> None:
        """`function_of`: the function of each request. `caller`: the worker and the run. A trial has neither."""
        self.functions = functions
        self.caller = caller
        self.function_of = function_of
        self.calls_left = CALLS_PER_REQUEST * (len(function_of) or SAMPLES_MAX)
        self.call: asyncio.Task[None] | None = None
        self.failures: set[Failure] = set()
        """Why its calls failed."""


class PoolCalls:
    """The runs of workers whose programs run on the pool, and the calls of these programs. Used on the event loop's
    thread only.
    """

    def __init__(self, calls: Calls, copies: Copies, processes: Processes, tasks: asyncio.TaskGroup, log: Log) -> None:
        self._calls = calls
        self._copies = copies
        self._processes = processes
        self._tasks = tasks
        self._log = log
        self._runs: dict[WorkerProcess, dict[int, _Run]] = {}
        """By worker and slot."""
        self._turns: WeakValueDictionary[TenantId, asyncio.Lock] = WeakValueDictionary()
        """Held during a call of a trial, by tenant."""
        self._after_runs: dict[FunctionId, Callable[[], None]] = {}
        """What is to be done when no run of a function is in progress any more."""
        self._closing = False

    # Runs

    def begin(
        self,
        process: WorkerProcess,
        run: RunId,
        slot: int,
        functions: Sequence[DeployedFunction],
        requests: Sequence[RequestId],
    ) -> None:
        """A run is sent to a worker."""
        function_of = {request: function.id for request, function in zip(requests, functions, strict=True)}
        named = {function.id: function for function in functions}
        self._begin(process, slot, _Run(named, function_of, (process.worker, run)))

    def end(self, process: WorkerProcess, slot: int) -> set[Failure]:
        """A run or a trial has ended, and its call in progress with it. Return why its calls failed."""
        run = self._runs.get(process, {}).pop(slot, None)
        if run is None:
            return set()
        if run.call is not None:
            run.call.cancel()
        for function in run.functions:
            if function in self._after_runs:
                # Later: the actions of the scheduler's current step may still name the program.
                asyncio.get_running_loop().call_soon(self._end_runs, function)
        return run.failures

    def worker_ended(self, process: WorkerProcess) -> None:
        """A worker has ended."""
        for slot in list(self._runs.get(process, {})):
            self.end(process, slot)
        self._runs.pop(process, None)

    def after_runs(self, function: FunctionId, then: Callable[[], None]) -> None:
        """Call `then` as soon as no run of the function is in progress, unless `cancel_after_runs` or `close` is called
        before.
        """
        if self._is_running(function):
            self._after_runs[function] = then
        else:
            then()

    def cancel_after_runs(self, function: FunctionId) -> None:
        """Do not do what was to be done after the runs of the function."""
        self._after_runs.pop(function, None)

    def close(self) -> None:
        """Cancel all calls, because the node stops."""
        self._closing = True
        self._after_runs.clear()
        for process in list(self._runs):
            self.worker_ended(process)

    def _end_runs(self, function: FunctionId) -> None:
        if function in self._after_runs and not self._is_running(function):
            self._after_runs.pop(function)()

    def _begin(self, process: WorkerProcess, slot: int, run: _Run) -> None:
        self._runs.setdefault(process, {})[slot] = run

    def _is_running(self, function: FunctionId) -> bool:
        return any(function in run.functions for runs in self._runs.values() for run in runs.values())

    # Calls

    def call(self, process: WorkerProcess, function: DeployedFunction | None, message: PoolCall) -> None:
        """Run a program for a worker; raise ValueError if the worker may not call it. `function`: the one on trial in
        the worker.
        """
        run = self._runs.get(process, {}).get(message.slot)
        if run is None and function is not None and message.slot == 0:
            run = _Run({function.id: function}, {})
            self._begin(process, 0, run)
        called = None if run is None else run.functions.get(FunctionId(message.function))
        program = called.program if called is not None and (called.handler_only or called.pool_first) else None
        if run is None or called is None or program is None or run.call is not None or not run.calls_left:
            raise ValueError(f"it may not run the program of {message.function:.100} now")
        run.calls_left -= 1
        if not self._closing:
            work = self._answer(process, run, called, program, message)
            run.call = self._tasks.create_task(contain(work, partial(self._call_failed, process)))

    async def _answer(
        self,
        process: WorkerProcess,
        run: _Run,
        function: DeployedFunction,
        program: DeployedFunction,
        message: PoolCall,
    ) -> None:
        """Send the worker the outputs of the program, or why there are none."""
        buffer = process.slots[message.slot].outputs
        try:
            check = AnswerCheck(program.manifest.inputs)
            [placed] = check.placed([message.inputs])
            async with self._turn(run, function):
                waiting = self._waiting(run, function)
                # Before the inputs are copied: the worker may announce more than its callers may hold.
                _reserve(waiting, placed_bytes(placed))
                take = partial(copied_tensors, [placed], buffer)
                [inputs] = await self._copied(process, placed_bytes(placed), take, check_contents)
                outputs = await self._run(run, function, program, waiting, inputs)
                metas = tuple(tensor.meta for tensor in outputs)
                await self._copied(process, _nbytes(metas), partial(process.copy_outputs, message.slot, outputs))
            answer = PoolCallResult(message.number, Outputs(metas))
        except OverwinterError as error:
            answer = PoolCallResult(message.number, None if _worker_runs_it(function, error) else _failure(run, error))
        except FAULTS as error:
            if not lacks_memory(error):
                if not process.over:
                    self._processes.forks.give_up(process, f"it sent impossible inputs of a program: {error}")
                return
            text = f"this node has no memory for the tensors of {function.id} now ({error}): try again later"
            answer = PoolCallResult(
                message.number, None if function.pool_first else _failure(run, OverloadedError(text))
            )
        run.call = None
        if not process.over:
            self._processes.forks.send(process, answer)

    def _call_failed(self, process: WorkerProcess, error: Exception) -> None:
        text = f"a call of a program by worker {process.worker} of {process.function} failed: {error}"
        self._log(text, level="error", function=process.function)
        if not process.over:
            self._processes.forks.give_up(process, text)

    def _turn(self, run: _Run, function: DeployedFunction) -> AbstractAsyncContextManager[object]:
        """Let the calls of a tenant's trials take turns: no request exists whose memory limit counts their tensors."""
        if run.function_of:
            return nullcontext()
        return self._turns.setdefault(function.manifest.tenant, asyncio.Lock())

    def _waiting(self, run: _Run, function: DeployedFunction) -> list[Payload]:
        """Return the requests of the function that wait for the run; raise WorkerError if none does any more. A trial
        has no requests.
        """
        own = [request for request, its in run.function_of.items() if its == function.id]
        waiting = [payload for request in own if (payload := self._calls.payloads.get(request)) is not None]
        if own and not waiting:
            raise WorkerError(ABANDONED)
        return waiting

    async def _run(
        self,
        run: _Run,
        function: DeployedFunction,
        program: DeployedFunction,
        waiting: Sequence[Payload],
        inputs: list[Tensor],
    ) -> list[Tensor]:
        """Return the outputs of the program. The call is cancelled when no request waits for it any more."""
        try:
            with _abandoned(waiting):
                result = await self._calls.infer(_call(run, function, program, waiting, inputs))
        finally:
            # The traceback of an error would keep them.
            inputs.clear()
        for payload in waiting:
            payload.start = max(payload.start, result.start, key=WARMEST_FIRST.index)
        return result.outputs

    async def _copied(
        self,
        process: WorkerProcess,
        nbytes: int,
        work: Callable[[], T],
        check: Callable[[T], Iterator[None]] | None = None,
    ) -> T:
        """Copy tensors from or to the worker's buffers. If the worker ends meanwhile, its end cancels this wait."""
        copied: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._copies.make(process, nbytes, work, partial(_set, copied), partial(_fail, copied), check)
        return await copied


@contextmanager
def _abandoned(waiting: Sequence[Payload]) -> Iterator[None]:
    """Cancel what is awaited in the context, and raise WorkerError, when none of these requests waits any more."""
    task, is_open, is_abandoned = asyncio.current_task(), True, False
    assert task is not None, "this runs in a task"

    def check(_: asyncio.Future[Result]) -> None:
        nonlocal is_abandoned
        if is_open and not is_abandoned and all(payload.result.done() for payload in waiting):
            is_abandoned = True
            task.cancel()

    for payload in waiting:
        payload.result.add_done_callback(check)
    try:
        yield
    except asyncio.CancelledError:
        if not is_abandoned:
            raise
        task.uncancel()
        raise WorkerError(ABANDONED) from None
    finally:
        is_open = False
        for payload in waiting:
            payload.result.remove_done_callback(check)


def _call(
    run: _Run,
    function: DeployedFunction,
    program: DeployedFunction,
    waiting: Sequence[Payload],
    inputs: list[Tensor],
) -> Call:
    """Return the request to the program: as urgent as the most urgent of the waiting requests, and open as long as one
    of them may be answered.
    """
    slo_ms, ends_at = function.manifest.settings.slo_ms, max((payload.expires_at for payload in waiting), default=inf)
    calls = [payload.call for payload in waiting if payload.call is not None]
    dues = [call.due for call in calls if call.due is not None]
    if slo_ms is not None:
        dues += [Seconds(payload.arrived + slo_ms / 1000) for payload in waiting]
    return Call(
        program.deployment.name,
        program.deployment.version,
        inputs,
        None if ends_at == inf else ends_at - clock.now(),
        min((call.priority or ORDINARY for call in calls), default=0),
        min(dues, default=None),
        partial(_reserve, waiting),
        run.caller,
    )


def _reserve(waiting: Sequence[Payload], nbytes: int) -> None:
    """Reserve memory for tensors, in equal parts for the requests of a run that are still open: nobody would release
    what is reserved for a closed one.
    """
    still_open = [payload for payload in waiting if not payload.result.done()]
    for payload in still_open:
        if payload.call is not None and payload.call.reserve is not None:
            payload.call.reserve(nbytes // len(still_open))


def _nbytes(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.nbytes for meta in metas)


def _worker_runs_it(function: DeployedFunction, error: OverwinterError) -> bool:
    """Whether the worker runs the program after this error of the pool: not after DeadlineError or if nobody waits."""
    return function.pool_first and not (isinstance(error, DeadlineError) or str(error) == ABANDONED)


def _failure(run: _Run, error: OverwinterError) -> Failure:
    """Note why a call failed, in the words of callers, who do not know the program as a function."""
    failure = Failure(type(error).__name__, whole_names(str(error))[:MESSAGE_MAX])
    run.failures.add(failure)
    return failure


def _set(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
