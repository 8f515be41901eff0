"""Carries out the actions on executors: forks them, hands functions over to them, and sends them runs.

A function is handed over before its first run in an executor. It stays until it is unbound, or until its blocks have to
be unmapped for those of others. The scheduler decides what is on the device, but not which blocks of the host store an
executor has mapped.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from overwinter.core.actions import PrepareOnDevice, RunOnDevice, StartExecutor
from overwinter.core.config import SchedulerConfig
from overwinter.core.errors import StoreError
from overwinter.core.events import Event, PreparedOnDevice, WorkerExited, WorkerReady
from overwinter.core.ids import Address, DeviceId, FunctionId, StoreName, WorkerId
from overwinter.core.profile import Profile
from overwinter.node.answers import reportable
from overwinter.node.contained import ContainedProcess
from overwinter.node.executor_process import ExecutorProcess
from overwinter.node.forks import REQUEST_ERRORS
from overwinter.node.functions import BUFFERS_BYTES, DeployedFunction
from overwinter.node.log import Log
from overwinter.node.peers import SharedDevices
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.node.runs import Runs
from overwinter.node.worker_actions import lacks_blocks
from overwinter.store.host import HostStore
from overwinter.store.hosts import HostStores
from overwinter.worker.channel import ChannelClosedError, close_all
from overwinter.worker.executor_messages import BringFrom, Evict, HandOver, Learn, PeerEnded, Unmap, WarmUp
from overwinter.worker.messages import (
    Answer,
    Bind,
    BindFailed,
    ForkWorker,
    FromWorker,
    LoadFailed,
    Ready,
    Unbind,
    WarmedUp,
)
from overwinter.worker.sandbox import uid_of

WhenVerified = Callable[[ContainedProcess, DeployedFunction, HostStore, Callable[[], None]], None]
"""Calls back once the files of a deployed function are verified; if that fails, kills the process that this is for."""

OTHER_BYTES = 1 << 30
"""The private memory of an executor besides its device and what its runs compute: programs, stacks, and freed memory
that the heap cannot use again (up to 190 MiB, benchmarks.activations).
"""
MAPPED_MAX = 32_000
"""The most blocks that an executor has mapped. By default a process may have about twice as many mappings."""
WEIGHTS_MAX = 200_000
"""The most weights of all functions that an executor has. Each takes up to 3 KiB of its private memory, even where
functions share a block: together they take a part of OTHER_BYTES.
"""


class Executors:
    """The executors of a node's devices."""

    def __init__(
        self,
        registry: Registry,
        processes: Processes,
        runs: Runs,
        hosts: HostStores,
        when_verified: WhenVerified,
        config: SchedulerConfig,
        post: Callable[[Event], None],
        log: Log,
    ) -> None:
        self._registry = registry
        self._processes = processes
        self._runs = runs
        self._hosts = hosts
        self._when_verified = when_verified
        self._devices = {device.name: device for device in config.devices}
        self._isolation = config.device_isolation
        self._shared_devices = SharedDevices(config)
        self._host_bytes = config.host_bytes or 0
        self._post = post
        self._log = log
        self._executors: dict[WorkerId, ExecutorProcess] = {}

    def has(self, executor: WorkerId) -> bool:
        """Whether a process is an executor."""
        return executor in self._executors

    def process(self, device: DeviceId) -> ExecutorProcess | None:
        """Return the executor of a device, if it has one."""
        return next((each for each in self._executors.values() if each.device == device), None)

    def start(self, action: StartExecutor) -> None:
        """Fork the executor of a device."""
        config = self._devices[action.device]
        # It may map the blocks of any function.
        mapped_bytes = self._host_bytes + BUFFERS_BYTES + self._shared_devices.mapped_bytes(config)
        memory_bytes = self._shared_devices.private_bytes(config) + config.activation_bytes + OTHER_BYTES
        order = ForkWorker(action.executor, uid_of(action.executor), memory_bytes, mapped_bytes, device=config)
        process = None
        try:
            if self._processes.forks.closing:
                raise ChannelClosedError("the node is stopping")
            process = ExecutorProcess(action, self._processes.files)
            self._executors[action.executor] = process
            self._processes.forks.listen(process, partial(self._handle, process), partial(self._ended, process))
            process.memory = self._shared_devices.create_memory(config)
            process.channel.send(*self._shared_devices.reserve_message(config, process.memory))
            self._processes.forks.request(process, order)
        except REQUEST_ERRORS as error:
            reason = f"the executor of {action.device} could not be forked: {error}"
            if process is None:
                self._post(WorkerExited(action.executor, "WorkerError", reason))
            else:
                self._processes.forks.end(process, reason)

    def stop(self, executor: WorkerId, kill: bool) -> None:
        """Stop an executor; its end is reported when it has ended."""
        self._processes.forks.stop(self._executors[executor], kill)

    def run(self, action: RunOnDevice) -> None:
        """Begin a run that the scheduler ordered."""
        process = self._executors.get(action.executor)
        if process is None:
            # The executor's exit is about to reach the scheduler.
            return
        if process.preparing is not None and not process.warms_up:
            # It waits for a hash, and the warm-up that a run would interrupt was not sent yet.
            self._prepared(process, interrupted=True)
        if action.evict or process.warms_up:
            # Any message interrupts a warm-up. The run's other messages may have to wait for a hash.
            self._processes.forks.send(process, Evict(action.evict))
        functions = [self._registry.functions[id_] for id_ in dict.fromkeys(action.functions or (action.function,))]
        if action.peer is not None:
            self._bring_from(process, action.peer, action.function)
        self._once_handed_over(process, functions, partial(self._begin, process, functions, action))

    def _begin(self, process: ExecutorProcess, functions: Sequence[DeployedFunction], action: RunOnDevice) -> None:
        process.runs_next(functions)
        whose = action.functions or (action.function,) * max(1, len(action.requests))
        self._runs.run(process, whose, action.run, action.requests)

    def prepare(self, action: PrepareOnDevice) -> None:
        """Hand a function over, and have it warmed up."""
        process, function = self._executors.get(action.executor), self._registry.functions[action.function]
        if process is not None:
            process.preparing = action
            begin = partial(self._warm_up, process, function)
            self._once_handed_over(process, (function,), begin, lambda: process.preparing is not action)

    def _warm_up(self, process: ExecutorProcess, function: DeployedFunction) -> None:
        process.warms_up = True
        process.record_use(function)
        self._processes.forks.send(process, WarmUp(function.id))

    def _prepared(self, process: ExecutorProcess, interrupted: bool) -> None:
        action = process.preparing
        assert action is not None
        process.preparing, process.warms_up = None, False
        self._post(PreparedOnDevice(process.worker, action.operation, interrupted))

    def _once_handed_over(
        self,
        process: ExecutorProcess,
        functions: Sequence[DeployedFunction],
        then: Callable[[], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hand over the functions that the executor lacks, and then call `then`; do nothing once `is_over` is true."""
        if process.over or is_over():
            return
        function = next((each for each in functions if not process.bindings.has(each.id)), None)
        if function is None:
            for each in functions:
                self._send_figures(process, each)
            then()
            return
        host = self._hosts.store(function.store)
        again = partial(self._once_handed_over, process, functions, then, is_over)
        hand_over = partial(self._hand_over, process, function, host, again, is_over)
        self._when_verified(process, function, host, hand_over)

    def _send_figures(self, process: ExecutorProcess, function: DeployedFunction) -> None:
        """Send the figures of a profile that was measured since the executor last got some."""
        if process.profiles[function.id] is not function.profile:
            process.profiles[function.id] = function.profile
            self._processes.forks.send(process, Learn(function.id, *_figures(function)))

    def _bring_from(self, process: ExecutorProcess, device: DeviceId, function: FunctionId) -> None:
        """Let the next run copy blocks from another device, if that has a ready executor that shares its memory, the
        isolation of devices allows it, and the system has a descriptor left; otherwise all blocks come from the host.
        """
        peer = self.process(device)
        if peer is None or not peer.ready or peer.memory is None or peer.tenant != process.tenant:
            return
        if self._isolation == "function" and (peer.known | process.known) - {function}:
            return
        has_it = process.mapped.get(device) == peer.worker
        try:
            fds = [] if has_it else [peer.memory.open_read_only()]
        except OSError:
            return
        process.mapped[device] = peer.worker
        try:
            self._processes.forks.send(process, BringFrom(device), fds)
        finally:
            close_all(fds)

    def _hand_over(
        self,
        process: ExecutorProcess,
        function: DeployedFunction,
        host: HostStore,
        then: Callable[[], None],
        is_over: Callable[[], bool],
    ) -> None:
        """Send the executor the program and the blocks that it lacks, unless it got them meanwhile."""
        if process.over or is_over() or process.bindings.has(function.id):
            then()
            return
        bind = function.bind_message(bare=True)
        self._unmap(process, bind)
        lacking = tuple(process.bindings.lacking(bind, function.store))
        try:
            fds = host.open([function.manifest.program.address, *(bind.blocks[place][0] for place in lacking)])
        except StoreError as error:
            # The end of an executor can report lost blocks, and the end of a run cannot.
            process.lost_blocks = lacks_blocks(function, host)
            self._processes.forks.give_up(process, self._registry.error_text(function, error), "StoreError")
            return
        try:
            handed = msgspec.structs.replace(bind, handed=lacking)
            part = function.slice
            sizes = () if part is None else tuple(part.sizes[block] for block, _ in bind.blocks)
            tenant, load = function.manifest.tenant, function.load_message(bare=True)
            message = HandOver(tenant, load, handed, *_figures(function), sizes, function.store)
            process.bindings.add(function, bind)
            process.profiles[function.id] = function.profile
            process.unconfirmed.append(function.id)
            self._processes.forks.send(process, message, fds)
        finally:
            close_all(fds)
        then()

    def _unmap(self, process: ExecutorProcess, bind: Bind) -> None:
        """Let an executor forget the least recently used functions, if it would otherwise have too many blocks or
        weights with those of a further function.
        """
        bindings, blocks, weights = process.bindings, len(bind.blocks), len(bind.pieces)
        for function in list(process.used):
            if bindings.block_count + blocks <= MAPPED_MAX and bindings.weight_count + weights <= WEIGHTS_MAX:
                return
            self._forget(process, function)
            self._processes.forks.send(process, Unmap(function))

    def _forget(self, process: ExecutorProcess, function: FunctionId) -> None:
        process.bindings.end(function)
        process.used.pop(function, None)
        process.profiles.pop(function, None)

    def unbind(self, executor: WorkerId, function: FunctionId) -> None:
        """Let an executor forget a function, if it has it."""
        process = self._executors[executor]
        has_it = process.bindings.has(function)
        if has_it:
            self._forget(process, function)
        if has_it or function in process.known:
            process.known.discard(function)
            self._processes.forks.send(process, Unbind(function))
        if process.preparing is not None and process.preparing.function == function and not process.warms_up:
            self._prepared(process, interrupted=True)

    def mark_dropped(self, store: StoreName, addresses: frozenset[Address]) -> None:
        """Record that the files of these blocks were dropped from a host store."""
        blocks = frozenset((store, address) for address in addresses)
        for process in self._executors.values():
            process.bindings.mark_dropped(blocks)

    def kill_block_readers(self, address: Address) -> list[str]:
        """Kill the executors that may have mapped or copied a damaged block, which was dropped from a host store, and
        return their names. A device holds a block once, from whichever store it came.
        """
        killed = []
        functions = self._registry.functions
        for process in list(self._executors.values()):
            # A device keeps the blocks of functions that its executor does not map any more.
            kept = [functions[id_] for id_ in process.known if id_ in functions]
            if any(address in each.files() for each in (*process.bindings.functions(), *kept)):
                process.lost_blocks = True
                self._processes.forks.give_up(process, "one of its blocks had changed in memory")
                killed.append(f"the executor of {process.device}")
        return killed

    def _handle(self, process: ExecutorProcess, message: FromWorker) -> None:
        """Handle a message; raise ValueError for an impossible one."""
        match message:
            case Answer():
                self._runs.worker_answered(process, message)
            case WarmedUp(interrupted) if process.warms_up:
                self._prepared(process, interrupted)
            case Ready() if not process.ready:
                process.ready = True
                self._post(WorkerReady(process.worker))
            case BindFailed(function) if function in process.unconfirmed:
                process.unconfirmed.remove(function)
                self._log(f"{reportable(message).message}", function=FunctionId(function))
                # The next run hands it over again.
                self.unbind(process.worker, FunctionId(function))
            case LoadFailed() if not process.ready:
                failure = reportable(message)
                process.fail(failure.error, failure.message)
            case _:
                raise ValueError(f"an executor cannot send {type(message).__name__} now")

    def _ended(self, process: ExecutorProcess, how: str) -> None:
        del self._executors[process.worker]
        if process.memory is not None:
            process.memory.close()
        for other in self._executors.values():
            if other.mapped.get(process.device) == process.worker:
                del other.mapped[process.device]
                self._processes.forks.send(other, PeerEnded(process.device))
        failure = process.failure or process.end_failure(how)
        if not process.dismissed or process.failure is not None:
            self._log(f"the executor of {process.device} has ended: {failure.message}", level="warning")
        self._runs.worker_exited(process, failure.error, failure.message)


def _figures(function: DeployedFunction) -> tuple[dict[int, int], dict[int, float]]:
    """Return what an executor learns from the profile of a function: see `HandOver`."""
    profile = function.profile or Profile(weight_bytes=0, macs=0)
    # The memory of a whole program says nothing about a slice.
    memory = {} if function.slice is not None else profile.worker_bytes(cores=1, concurrency=1)
    return memory, profile.run_s(cores=1, concurrency=1)
