"""Carries out the scheduler's actions. The results of slow actions return as events."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import ceil
from typing import assert_never

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
    PrepareOnDevice,
    Refuse,
    Reply,
    Run,
    RunOnDevice,
    SetAlarm,
    StartExecutor,
    StartWorker,
    StopWorker,
    Unbind,
)
from overwinter.core.config import SchedulerConfig
from overwinter.core.errors import ConflictError, MachineError, NoSpaceError
from overwinter.core.events import Alarm, BlocksLoaded, Event, LoadFailed
from overwinter.core.ids import Address, FunctionId, OperationId, Seconds, StoreName
from overwinter.node import clock
from overwinter.node.calls import Calls
from overwinter.node.copying import Copies
from overwinter.node.executors import Executors
from overwinter.node.faults import MACHINE, contain
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.log_throttle import LogThrottle
from overwinter.node.pool_calls import PoolCalls
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.node.runs import Runs
from overwinter.node.threads import SharedThreads
from overwinter.node.verifying import StoppedError
from overwinter.node.worker_actions import WorkerActions
from overwinter.store.host import HostStore
from overwinter.store.hosts import HostStores

LOAD_THREADS = 4
"""The threads for what a wake waits for. Deploys use other threads, which wait for each other and for the repository's
lock.
"""


class NodeEffects:
    """Carries out the actions of a node's scheduler."""

    def __init__(
        self,
        registry: Registry,
        processes: Processes,
        calls: Calls,
        hosts: HostStores,
        config: SchedulerConfig,
        tasks: asyncio.TaskGroup,
        post: Callable[[Event], None],
        log: Log,
    ) -> None:
        self._registry = registry
        self._functions = registry.functions
        self._processes = processes
        self._calls = calls
        self._hosts = hosts
        self._tasks = tasks
        self._post = post
        self._throttle = LogThrottle(log)
        self._loop = asyncio.get_running_loop()
        self._threads = SharedThreads(LOAD_THREADS, "load")
        self._alarm: asyncio.TimerHandle | None = None
        copies = Copies(processes.queue)
        self.pool_calls = PoolCalls(calls, copies, processes, tasks, log)
        self.runs = Runs(processes, registry.functions, calls.payloads, self.pool_calls, copies, post)
        self.worker_actions = WorkerActions(registry, processes, self.runs, hosts, self._threads, tasks, post, log)
        when_verified = self.worker_actions.when_verified
        self.executors = Executors(registry, processes, self.runs, hosts, when_verified, config, post, log)

    def carry_out(self, action: Action) -> None:  # noqa: C901, PLR0912
        """Begin an action."""
        match action:
            case Run():
                self.runs.begin(action)
            case Reply():
                self._calls.reply(action)
            case Refuse():
                self._calls.refuse(action)
                self._log_totals(action.function, action.error, action.message)
            case SetAlarm(at):
                self._set_alarm(at)
            case LoadBlocks(function, operation):
                self._load_blocks(self._functions[function], operation)
            case Drop(addresses, store):
                self._drop(frozenset(addresses), store)
            case StartWorker():
                self.worker_actions.start_worker(action)
            case ForkAhead(worker, function):
                self.worker_actions.fork_ahead(worker, self._functions.get(function))
            case Bind():
                self.worker_actions.bind(action)
            case StartExecutor():
                self.executors.start(action)
            case PrepareOnDevice():
                self.executors.prepare(action)
            case RunOnDevice():
                self.executors.run(action)
            case Unbind(worker, function) if self.executors.has(worker):
                self.executors.unbind(worker, function)
            case Unbind(worker, function):
                self.worker_actions.unbind(worker, function)
            case Prepare(function, forget):
                self._prepare(function, forget)
            case StopWorker(worker, kill) if self.executors.has(worker):
                self.executors.stop(worker, kill)
            case StopWorker(worker, kill):
                self.worker_actions.stop_worker(worker, kill)
            case LoadFinished():
                self._calls.load_finished(action)
                self._log_totals(action.function, action.error, action.reason)
            case Evict():
                # For the readers of the journal; Drop removes the blocks that no other function needs.
                pass
            case Explanation():
                self._log_stop(action)
            case _:
                assert_never(action)

    def kill_block_readers(self, store: StoreName, address: Address) -> list[str]:
        """Kill the processes that may use a damaged block, which was dropped from a host store; return their names."""
        return [
            *self.worker_actions.kill_block_readers(store, address),
            *self.executors.kill_block_readers(address),
        ]

    def _drop(self, addresses: frozenset[Address], store: StoreName) -> None:
        """Drop blocks from a host store. A process that has one of them gets the new file of the block when it
        binds the next function that uses the block.
        """
        host = self._hosts.every().get(store)
        if host is None:
            # Its directory could not be made, so the load failed that would have brought blocks.
            return
        host.begin_drop(addresses)
        self._processes.mark_dropped(store, addresses)
        self.executors.mark_dropped(store, addresses)
        if not self._processes.forks.closing:
            # A host store that is closed removes its files itself.
            work = self._processes.files.closing.run(self._hosts.removals.remove)
            work.add_done_callback(self._removed)

    def _removed(self, work: asyncio.Future[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._throttle.log(("removal",), f"the file of a dropped block could not be removed from memory: {error}")

    def _load_blocks(self, function: DeployedFunction, operation: OperationId) -> None:
        try:
            # The first load of a tenant's own host store creates its directory.
            host = self._hosts.store(function.store)
        except MachineError as error:
            self._load_failed(function, operation, error)
            return
        if all(host.holds(blob.address) for blob in function.blobs):
            self._loaded(function, operation, 0, ())
        else:
            work = self._copy_blocks(function, operation, host)
            self._tasks.create_task(contain(work, partial(self._load_failed, function, operation)))

    async def _copy_blocks(self, function: DeployedFunction, operation: OperationId, host: HostStore) -> None:
        check_closing = self.worker_actions.check_closing
        # If the node stops, `close` has already failed the requests and loads that wait for these blocks.
        with suppress(StoppedError):
            added = await self._threads.run(function.manifest.tenant, partial(host.load, function.blobs, check_closing))
            self._loaded(function, operation, added, tuple(blob.address for blob in function.blobs))
            # No request waits for this; it makes later wakes cheaper.
            with suppress(*MACHINE):
                await asyncio.to_thread(host.collapse_pages, function.blobs, check_closing)

    def _load_failed(self, function: DeployedFunction, operation: OperationId, error: Exception) -> None:
        name, message = type(error).__name__, self._registry.error_text(function, error)
        addresses = tuple(blob.address for blob in function.blobs)
        self._post(LoadFailed(function.id, operation, name, message, addresses, function.store))

    def _loaded(
        self, function: DeployedFunction, operation: OperationId, added: int, addresses: tuple[Address, ...]
    ) -> None:
        """Report that all blocks are in memory. A version on trial that itself runs on the pool is then published,
        unless a pipeline would break.
        """
        try:
            if function.on_trial and function.check_publish is not None and function.on_pool:
                function.check_publish()
        except ConflictError as error:
            name, message = ConflictError.__name__, str(error)
            self._post(LoadFailed(function.id, operation, name, message, addresses, function.store))
        else:
            self._post(BlocksLoaded(function.id, operation, added, addresses, function.store))

    def _prepare(self, id_: FunctionId, forget: Address | None) -> None:
        function = self._functions.get(id_)
        if function is not None:
            self._processes.prepare(function.manifest.tenant, id_, forget)

    def _log_totals(self, id_: FunctionId | None, error: str | None, refused: str) -> None:
        if error == NoSpaceError.__name__ and id_ is not None:
            self._registry.log_totals(id_, refused)

    def _log_stop(self, action: Explanation) -> None:
        # Explanations of other decisions are only for readers of the journal.
        if action.what == "stop":
            function = self._functions.get(action.function)
            self._throttle.log(action.function if function is None else function.manifest.tenant, action.why)

    def _set_alarm(self, at: Seconds) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        # The loop rounds to milliseconds, up or down.
        delay_ms = ceil(1e3 * max(0.0, at - clock.now()))
        self._alarm = self._loop.call_later(delay_ms / 1e3, self._fire, at)

    def _fire(self, at: Seconds) -> None:
        """Report the alarm; never too early, because the scheduler would find nothing to do and ask for it again."""
        self._alarm = None
        if clock.now() < at:
            self._set_alarm(at)
        else:
            self._post(Alarm())

    def close(self) -> None:
        """Cancel the alarm, and fail all requests and loads, because the node stops."""
        self.worker_actions.close()
        self.pool_calls.close()
        if self._alarm is not None:
            self._alarm.cancel()
        self._calls.close()
