"""Carries out the actions on workers: forks them, binds functions in them, and stops them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from overwinter.core.actions import Bind, StartWorker
from overwinter.core.errors import StoreError, WorkerError
from overwinter.core.events import BindFailed, Bound, Event, WorkerExited
from overwinter.core.ids import Address, FunctionId, StoreName, WorkerId
from overwinter.node.contained import ContainedProcess, new_buffer
from overwinter.node.faults import MACHINE, contain
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.node.threads import SharedThreads
from overwinter.node.verifying import StoppedError
from overwinter.node.workers import WorkerListener, WorkerProcess
from overwinter.store.host import HostStore
from overwinter.store.hosts import HostStores
from overwinter.worker.channel import close_all
from overwinter.worker.messages import Failure, ForkWorker
from overwinter.worker.sandbox import uid_of

HASHED_AT_ONCE = 2
"""The blocks of one function that are verified concurrently; the other threads are for other tenants."""


class WorkerActions:
    """Forks and stops workers, and binds functions in them."""

    def __init__(
        self,
        registry: Registry,
        processes: Processes,
        listener: WorkerListener,
        hosts: HostStores,
        threads: SharedThreads,
        tasks: asyncio.TaskGroup,
        post: Callable[[Event], None],
        log: Log,
    ) -> None:
        """`listener` receives the events of the forked workers."""
        self._registry = registry
        self._processes = processes
        self._listener = listener
        self._hosts = hosts
        self._threads = threads
        self._tasks = tasks
        self._post = post
        self._log = log
        self._unverified_starts: dict[WorkerId, StartWorker] = {}
        """Starts of workers that are forked as soon as the program and the handler's source are verified."""
        self._closing = False

    def close(self) -> None:
        """Stop: no further block is copied or hashed, and no fork or bind begins that waits for a hash."""
        self._closing = True

    def start_worker(self, action: StartWorker) -> None:
        """Fork a worker for a function's family, and bind the function in it first."""
        function = self._registry.functions[action.function]
        host = self._hosts.store(function.store)
        if host.unverified(function.files()):
            self._unverified_starts[action.worker] = action
            work = self._verify_and_fork(action, function, host)
            self._tasks.create_task(contain(work, partial(self._start_failed, action, function)))
        else:
            self._fork(action, function, host)

    def fork_ahead(self, worker: WorkerId, function: DeployedFunction | None) -> None:
        """Fork a process ahead for the tenant of a function; it waits for a start."""
        try:
            if function is None:
                raise WorkerError("the function that it was to be forked for was removed meanwhile")
            self._processes.ahead.fork(function, worker, self._listener)
        except WorkerError as error:
            self._post(WorkerExited(worker, "WorkerError", str(error)))

    def when_verified(
        self, process: ContainedProcess, function: DeployedFunction, host: HostStore, then: Callable[[], None]
    ) -> None:
        """Call `then`, which is for this process, once the function's files are verified; never if the node stops
        meanwhile. If the verification, or `then` after it, raises an error, the process is killed.
        """
        if host.unverified(function.files()):
            work = self._verify_first(function, host, then)
            self._tasks.create_task(contain(work, partial(self._give_up_process, process, function)))
        else:
            then()

    async def _verify_first(self, function: DeployedFunction, host: HostStore, then: Callable[[], None]) -> None:
        if await self._verify(function, host, function.files()):
            then()

    async def _verify(self, function: DeployedFunction, host: HostStore, files: Sequence[Address]) -> bool:
        """Verify the files that an earlier run of the node left in memory, before they are used, the largest first.
        Returns False if the node stops meanwhile.
        """
        sizes = {blob.address: blob.nbytes for blob in function.blobs}
        left = iter(sorted(host.unverified(files), key=sizes.__getitem__, reverse=True))
        await asyncio.gather(*(self._verify_some(function, host, left) for _ in range(HASHED_AT_ONCE)))
        return not self._closing

    async def _verify_some(self, function: DeployedFunction, host: HostStore, left: Iterator[Address]) -> None:
        for address in left:
            try:
                verify = partial(host.verify, address, self.check_closing)
                if not await self._threads.run(function.manifest.tenant, verify):
                    message = f"block {address} of {function.id} changed in memory, and is read from disk again"
                    self._log(message, function=function.id)
            except MACHINE:
                # The block was evicted meanwhile, or cannot be read: opening it will report the error.
                continue
            except StoppedError:
                return

    def check_closing(self) -> None:
        """Raise StoppedError when the node stops; called in a thread between two steps of slow work on blocks."""
        if self._closing:
            raise StoppedError

    async def _verify_and_fork(self, action: StartWorker, function: DeployedFunction, host: HostStore) -> None:
        """Fork a worker, which compiles while the function's blocks are hashed; then send it the blocks."""
        if await self._verify(function, host, function.load_files()) and action.worker in self._unverified_starts:
            del self._unverified_starts[action.worker]
            self._fork(action, function, host, whole=False)
            if await self._verify(function, host, function.files()):
                self._send_blocks(action, function, host)

    def _start_failed(self, action: StartWorker, function: DeployedFunction, error: Exception) -> None:
        process = self._processes.process(action.worker)
        if process is not None:
            self._give_up_process(process, function, error)
        else:
            self._unverified_starts.pop(action.worker, None)
            self._fail_start(action, "WorkerError", self._registry.error_text(function, error))

    def _give_up_process(self, process: ContainedProcess, function: DeployedFunction, error: Exception) -> None:
        text = self._registry.error_text(function, error)
        if not process.over:
            self._processes.forks.give_up(process, text)

    def stop_worker(self, worker: WorkerId, kill: bool) -> None:
        """Stop a worker, whether it is forked or not."""
        action = self._unverified_starts.pop(worker, None)
        if action is not None:
            self._fail_start(action, "WorkerError", "it was stopped before it was forked")
        else:
            self._processes.stop(worker, kill)

    def _fail_start(self, action: StartWorker, error: str, reason: str, lost_blocks: bool = False) -> None:
        """Report that the worker will not start, and stop the process forked ahead that it would have used."""
        if action.ahead is not None:
            self._processes.stop(action.ahead, kill=True)
        self._post(WorkerExited(action.worker, error, reason, lost_blocks))

    def kill_block_readers(self, store: StoreName, address: Address) -> list[str]:
        """Kill the workers that may have mapped a damaged block, which was dropped from a host store."""
        lost = []
        for process in self._processes.workers():
            functions = process.bindings.functions()
            if process.family.store == store and any(address in function.files() for function in functions):
                process.lost_blocks = True
                self._processes.forks.give_up(process, "one of its blocks had changed in memory")
                lost.append(f"worker {process.worker} of {process.function}")
        return lost

    def _fork(self, action: StartWorker, function: DeployedFunction, host: HostStore, *, whole: bool = True) -> None:
        """Fork a worker. `whole`: send it all of the function's files; otherwise only the program and the handler's
        source, and `_send_blocks` then sends the rest.
        """
        try:
            fds = host.open(function.files() if whole else function.load_files())
        except StoreError as error:
            # `open` drops blocks whose file is missing or has another size; any other error does not lose blocks.
            self._fail_start(
                action, "StoreError", self._registry.error_text(function, error), lacks_blocks(function, host)
            )
            return
        try:
            mapped = self._registry.mapped_bytes(function)
            order = ForkWorker(action.worker, uid_of(action.worker), function.memory_bytes, mapped)
            load = function.load_message(action.cores, action.concurrency)
            bind = None
            if whole:
                bind = function.bind_message(action.warm_up)
                fds += _samples(function)
            self._processes.fork(function, order, load, bind, fds, self._listener, action.ahead)
        except (WorkerError, OSError) as error:
            self._fail_start(action, "WorkerError", str(error))
        finally:
            close_all(fds)

    def _send_blocks(self, action: StartWorker, function: DeployedFunction, host: HostStore) -> None:
        """Send a worker the descriptors that it was forked without."""
        process = self._processes.process(action.worker)
        if process is None or process.over:
            # The worker has ended, or the node stops.
            return
        try:
            fds = host.open(function.files())
        except StoreError as error:
            process.lost_blocks = lacks_blocks(function, host)
            process.failure = Failure("StoreError", self._registry.error_text(function, error))
            self._processes.forks.kill(process)
            return
        try:
            fds += _samples(function)
            bind = function.bind_message(action.warm_up)
            sent = fds[len(function.load_files()) :]
            process.bindings.begin_first(function, bind, sent)
            self._processes.forks.send(process, bind, sent)
        except OSError as error:
            self._processes.forks.give_up(process, f"the function to bind could not be sent: {error}")
        finally:
            close_all(fds)

    def bind(self, action: Bind) -> None:
        """Bind a further function in a worker."""
        function, process = self._registry.functions[action.function], self._processes.process(action.worker)
        if process is not None:
            host = self._hosts.store(function.store)
            self.when_verified(process, function, host, partial(self._bind_now, action, process, function, host))

    def _bind_now(self, action: Bind, process: WorkerProcess, function: DeployedFunction, host: HostStore) -> None:
        if process.over:
            # The worker's exit is about to reach the scheduler.
            return
        message = process.bind_message(function)
        try:
            fds = host.open([*(message.blocks[index][0] for index in message.handed), *function.assets()])
        except StoreError as error:
            lost = lacks_blocks(function, host)
            text = self._registry.error_text(function, error)
            self._post(BindFailed(action.worker, action.function, action.operation, "StoreError", text, lost))
            return
        try:
            self._processes.bind(process, function, message, fds, partial(self._bind_ended, action))
        finally:
            close_all(fds)

    def _bind_ended(self, action: Bind, failure: Failure | None) -> None:
        worker, function, operation = action.worker, action.function, action.operation
        if failure is None:
            self._post(Bound(worker, function, operation))
        else:
            message = f"function {function} could not be bound in worker {worker}: {failure.message}"
            self._log(message, function=function)
            self._post(BindFailed(worker, function, operation, failure.error, failure.message))

    def unbind(self, worker: WorkerId, function: FunctionId) -> None:
        """Let a worker unbind a function; a worker that has ended needs no message."""
        process = self._processes.process(worker)
        if process is not None:
            self._processes.unbind(process, function)


def lacks_blocks(function: DeployedFunction, host: HostStore) -> bool:
    """Whether blocks of the function are missing from memory."""
    return not all(host.holds(blob.address) for blob in function.blobs)


def _samples(function: DeployedFunction) -> list[int]:
    """Return a descriptor of the trial's requests, if there are any. Raises OSError."""
    samples = function.samples()
    return [] if samples is None else [new_buffer(samples)]
