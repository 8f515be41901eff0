"""Measures one configuration in a separate worker.

The worker is forked and sandboxed like any other, and runs take the path of requests: buffers, channel, answers. Inputs
are zeros. If a function has a handler, only its program is measured, because a handler needs real inputs.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf, prod
from typing import Any

from overwinter.core.datatypes import DATATYPE_BYTES
from overwinter.core.errors import WorkerError
from overwinter.core.function import SETTINGS_BOUNDS
from overwinter.core.ids import RequestId, RunId, Seconds, WorkerId
from overwinter.core.profile import Configuration
from overwinter.core.tensor import TensorMeta, requests_of_run_max
from overwinter.model.program import Program
from overwinter.model.structure import BATCH
from overwinter.node.family_blocks import mapped_bytes
from overwinter.node.functions import DeployedFunction
from overwinter.node.processes import Processes
from overwinter.node.workers import WorkerProcess
from overwinter.worker.buffer import offsets
from overwinter.worker.messages import Answer, Failure, ForkWorker, Measure, Measured, PoolCall, Ready, RunBatch
from overwinter.worker.sandbox import uid_of

POLL_S = 0.02
GRACE_S = 0.25
"""How long a run may continue after it was disturbed."""
START_S = 120.0
"""How long a worker may take to become ready."""
GONE_S = 5.0
"""How long to wait for the end of a worker that was stopped."""
COLD_S = 0.05
"""A worker that was idle for longer first runs once without being measured."""
NO_REQUEST = RequestId(0)


class DisturbedError(Exception):
    """A request arrived, or an operation began, during a measurement that would have taken too long to end."""


def least_rows(program: Program) -> int:
    """Return the rows of a request with the sizes of the example: the smallest batch, or that of the author's example
    if the program's conditions refuse the smallest.
    """
    return max(1, program.example.get(BATCH, 1))


def batch_limit(program: Program) -> int:
    """Return the most requests of the example's sizes in one run; 1 for a program whose requests cannot share a run."""
    if program.batching_obstacle:
        return 1
    accepted, allowed = program.dimensions[BATCH][1] // least_rows(program), int(SETTINGS_BOUNDS["max_batch"].most)
    return max(1, min(accepted, allowed, requests_of_run_max((*program.inputs, *program.outputs))))


class MeasuredWorker:
    """A worker that is measured. This class receives the worker's messages in place of the node's `Runs`."""

    def __init__(
        self,
        processes: Processes,
        worker: WorkerId,
        function: DeployedFunction,
        program: Program,
        configuration: Configuration,
        now: Callable[[], Seconds],
    ) -> None:
        self.worker = worker
        self._processes = processes
        self._function = function
        self._configuration = configuration
        self._now = now
        self._rows = least_rows(program)
        self._metas = _metas(program)
        self._layers = len(program.layers)
        self._runs = 0
        self._request = Measure(function.id)
        self._begun: dict[RunId, Seconds] = {}
        self._took: list[float] = []
        self._last: Seconds | None = None
        self._result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process id, while the worker lives."""
        process = self._processes.process(self.worker)
        return None if process is None else process.pid

    async def start(self, fds: Sequence[int]) -> float:
        """Fork the worker, send it the descriptors of the program and the blocks, and close them. Returns the seconds
        until it was ready; raises WorkerError.
        """
        function, configuration = self._function, self._configuration
        memory_bytes = function.memory_bytes
        order = ForkWorker(
            self.worker, uid_of(self.worker), memory_bytes, mapped_bytes([function]), configuration.cores
        )
        begun = self._now()
        try:
            load = function.load_message(configuration.cores, configuration.concurrency, bare=True, measured=True)
            self._processes.fork(function, order, load, function.bind_message(bare=True), fds, self)
        finally:
            for fd in fds:
                os.close(fd)
        try:
            async with asyncio.timeout(START_S):
                ready: Seconds = await self._result
        except TimeoutError:
            raise WorkerError(f"a worker of {function.id} to be measured was not ready in {START_S:g} s") from None
        return ready - begun

    async def waves(self, seconds: float, disturbed: Callable[[], bool]) -> list[float]:
        """Run waves of concurrent runs for this time, or until disturbed; return the seconds of each run. A disturbed
        wave does not count; if it continues for more than GRACE_S, the worker is killed and DisturbedError is raised.
        Raises WorkerError if a run fails or the worker has ended.
        """
        if self._last is None or self._now() - self._last > COLD_S:
            await self._wave(disturbed)
        took: list[float] = []
        until = self._now() + seconds
        while not disturbed():
            wave = await self._wave(disturbed)
            took += [] if disturbed() else wave
            if self._now() >= until:
                break
        return took

    async def layers(self, batch: int, disturbed: Callable[[], bool]) -> tuple[float, ...]:
        """Return the seconds of each layer in one run of a batch. Raises the errors of `waves`."""
        measured = await self._measured(Measure(self._function.id, batch * self._rows), disturbed)
        return measured.layers_s

    async def private_bytes(self) -> int:
        """Return the peak of its private memory. Raises WorkerError."""
        measured = await self._measured(Measure(self._function.id), lambda: False)
        return measured.private_bytes

    async def end(self) -> None:
        """Kill it, and wait until it has ended, for at most GONE_S."""
        self._processes.stop(self.worker, kill=True)
        if self._processes.process(self.worker) is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), GONE_S)

    async def _wave(self, disturbed: Callable[[], bool]) -> list[float]:
        process, configuration = self._worker(), self._configuration
        *_, nbytes = offsets(self._metas * configuration.batch)
        if nbytes * configuration.concurrency > self._function.memory_bytes:
            raise WorkerError(
                f"{configuration.concurrency} runs of {configuration.batch} requests have inputs of {nbytes} bytes "
                f"each, together more than the memory of {self._function.id}: measure smaller batches, or raise "
                "memory_mib"
            )
        self._expect()
        self._took = []
        for _ in range(configuration.concurrency):
            self._begin(process, nbytes)
        await self._receive(disturbed)
        self._last = self._now()
        return self._took

    def _begin(self, process: WorkerProcess, nbytes: int) -> None:
        self._runs += 1
        run = RunId(self._runs)
        batch = self._configuration.batch
        slot = process.assign_slot(run, (NO_REQUEST,) * batch, (process.function,) * batch)
        buffer = process.slots[slot].inputs
        try:
            buffer.grow(nbytes)
        except OSError as error:
            raise WorkerError(f"a buffer cannot be made to hold {nbytes} bytes: {error}") from error
        self._begun[run] = self._now()
        self._processes.forks.send(process, RunBatch(run, (self._function.id,) * batch, slot, (self._metas,) * batch))

    async def _measured(self, request: Measure, disturbed: Callable[[], bool]) -> Measured:
        process = self._worker()
        self._expect()
        self._request = request
        self._processes.forks.send(process, request)
        measured: Measured = await self._receive(disturbed)
        return measured

    def _worker(self) -> WorkerProcess:
        process = self._processes.process(self.worker)
        if process is None:
            self._result.result()
            raise WorkerError("the worker to be measured has ended")
        return process

    def _expect(self) -> None:
        if self._result.done():
            self._result.result()
            self._result = asyncio.get_running_loop().create_future()

    async def _receive(self, disturbed: Callable[[], bool]) -> Any:
        disturbed_at: Seconds | None = None
        while not self._result.done():
            await asyncio.wait({self._result}, timeout=POLL_S)
            if disturbed_at is None and disturbed():
                disturbed_at = self._now()
            if disturbed_at is not None and not self._result.done() and self._now() - disturbed_at > GRACE_S:
                await self.end()
                raise DisturbedError
        return self._result.result()

    # Messages of the process

    def worker_ready(self, process: WorkerProcess, ready: Ready) -> None:
        """The worker is loaded."""
        self._complete(self._now())

    def worker_calls(self, process: WorkerProcess, call: PoolCall) -> None:
        """Refuse the message: programs are measured in workers."""
        raise ValueError("a worker that is measured runs the program itself")

    def worker_answered(self, process: WorkerProcess, answer: Answer) -> None:
        """The worker ran a batch."""
        now = self._now()
        process.free(process.complete_run(answer))
        self._took.append(now - self._begun.pop(answer.run))
        failed = next((outcome for outcome in answer.outcomes if isinstance(outcome, Failure)), None)
        if failed is not None:
            self._fail(f"a run of zeros failed: {failed.error}: {failed.message}")
        elif not self._begun:
            self._complete(None)

    def worker_measured(self, process: WorkerProcess, measured: Measured) -> None:
        """The worker sent its measurements."""
        layers = self._layers if self._request.batch is not None else 0
        possible = measured.private_bytes >= 0 and all(0 <= seconds < inf for seconds in measured.layers_s)
        if not possible or len(measured.layers_s) != layers:
            raise ValueError("its measurements are impossible")
        self._complete(measured)

    def worker_exited(self, process: WorkerProcess, error: str, reason: str) -> None:
        """The worker ended."""
        self._gone.set()
        self._fail(reason)

    def _complete(self, what: object) -> None:
        if self._result.done():
            raise ValueError("no message was expected")
        self._result.set_result(what)

    def _fail(self, reason: str) -> None:
        if self._result.done():
            self._result = asyncio.get_running_loop().create_future()
        self._result.set_exception(WorkerError(f"{self._function.id} cannot be measured: {reason}"))
        # Possibly no caller waits for it.
        self._result.exception()


def _metas(program: Program) -> tuple[TensorMeta, ...]:
    """Describe the inputs of one request of the example's sizes."""
    sizes = {**program.example, BATCH: least_rows(program)}
    metas = []
    for spec in program.inputs:
        shape = tuple(size if isinstance(size, int) else sizes[size] for size in spec.shape)
        metas.append(TensorMeta(spec.name, spec.datatype, shape, prod(shape) * DATATYPE_BYTES[spec.datatype]))
    return tuple(metas)
