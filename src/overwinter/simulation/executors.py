"""Carries out the actions for the devices of a simulated pool: executors start, run, swap and end.

A run takes the longer of its execution and its transfer, plus the time of the first group, before which it cannot
begin, plus the model's swap time. A run without missing blocks takes its execution time.
The pool has its own tables of the blocks on each device, and raises RuntimeError or OverflowError if the scheduler's
tables differ.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from overwinter.core.actions import PrepareOnDevice, RunOnDevice, StartExecutor
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import Event, PreparedOnDevice, RunEnded, WorkerExited, WorkerReady
from overwinter.core.ids import Address, DeviceId, FunctionId, OperationId, TenantId, WorkerId
from overwinter.simulation.copies import SimulatedFunction
from overwinter.simulation.devices import SimulatedDevice, simulated_devices
from overwinter.simulation.links import SharedLink, Transfer
from overwinter.simulation.timeline import Timeline


class DeviceRun(msgspec.Struct, eq=False):
    """A run in progress."""

    action: RunOnDevice
    began: float
    moved_bytes: int
    ends: float
    """When it ends if its blocks arrive in time."""
    after_s: float
    """The time from the end of a transfer that was too late to the end of the run."""
    transfer: tuple[SharedLink, Transfer] | None = None
    """The transfer in progress."""


class Executor:
    """The process of a device."""

    def __init__(self, id_: WorkerId, device: SimulatedDevice, tenant: TenantId | None) -> None:
        self.id = id_
        self.device = device
        self.tenant = tenant
        self.ready = False
        self.run: DeviceRun | None = None
        self.preparing: OperationId | None = None


class Executors:
    """The executors of all devices. `handle` gets the events."""

    def __init__(self, configs: Collection[DeviceConfig], timeline: Timeline, handle: Callable[[Event], None]) -> None:
        self._devices: Mapping[DeviceId, SimulatedDevice] = simulated_devices(configs, timeline)
        self._timeline = timeline
        self._handle = handle
        self._executors: dict[WorkerId, Executor] = {}
        self.busy_s = dict.fromkeys(self._devices, 0.0)
        """The time of all runs that were completed on each device."""
        self.moved_bytes = 0

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._executors

    @property
    def ids(self) -> list[WorkerId]:
        """The executors that have not ended."""
        return list(self._executors)

    def start(self, action: StartExecutor, seconds: float, crash: float | None, life_s: float | None) -> None:
        """Fork the executor of a device. If `crash` is given, the executor dies after this share of its start; if
        `life_s` is given, after this time.
        """
        device = self._devices[action.device]
        if any(each.device is device for each in self._executors.values()):
            raise RuntimeError(f"device {action.device} has an executor already")
        self._executors[action.executor] = Executor(action.executor, device, action.tenant)
        if crash is None:
            self._timeline.after(seconds, partial(self._ready, action.executor))
        else:
            self._timeline.after(seconds * crash, partial(self.exit, action.executor, "crashed by a fault"))
        if life_s is not None:
            self._timeline.after(life_s, partial(self.exit, action.executor, "killed by a fault"))

    def _ready(self, id_: WorkerId) -> None:
        executor = self._executors.get(id_)
        if executor is not None:
            executor.ready = True
            self._handle(WorkerReady(id_))

    def exit(self, id_: WorkerId, reason: str, seconds: float = 0.0) -> None:
        """End an executor with its run, and empty its device. A process ends only once."""
        executor = self._executors.pop(id_, None)
        if executor is None:
            return
        if executor.run is not None and executor.run.transfer is not None:
            link, transfer = executor.run.transfer
            link.cancel(transfer)
        executor.run = None
        executor.device.memory.clear()
        self._timeline.after(seconds, partial(self._handle, WorkerExited(id_, "WorkerError", reason)))

    def prepare(self, action: PrepareOnDevice, seconds: float) -> None:
        """Prepare a function. Runs do not wait for it, and their times do not depend on it."""
        executor = self._executors.get(action.executor)
        if executor is not None:
            if not executor.ready or executor.preparing is not None:
                raise RuntimeError(f"{action.function} is prepared on {action.device}, which cannot prepare it now")
            executor.preparing = action.operation
            self._timeline.after(seconds, partial(self._prepared, executor, action.operation))

    def _prepared(self, executor: Executor, operation: OperationId, interrupted: bool = False) -> None:
        if executor.id in self._executors and executor.preparing == operation:
            executor.preparing = None
            self._handle(PreparedOnDevice(executor.id, operation, interrupted))

    def unbind(self, id_: WorkerId, function: FunctionId) -> None:
        """Forget a function. Nothing is to be done for a worker, or for an executor that has ended."""
        executor = self._executors.get(id_)
        if executor is None:
            return
        run = executor.run
        if run is not None and function in (run.action.function, *run.action.functions):
            raise RuntimeError(f"{function} is unbound during its run on device {executor.device.config.name}")
        executor.device.memory.forget(function)

    def run(
        self,
        action: RunOnDevice,
        functions: Sequence[SimulatedFunction],
        seconds: float,
        crash: float | None,
        unplaced: bool,
    ) -> None:
        """Run requests of these functions, whose execution takes this many seconds. `unplaced`: the free memory is not
        contiguous; on a device without other functions it always is.
        """
        executor = self._executors.get(action.executor)
        if executor is None:
            # Its exit is about to reach the scheduler.
            return
        if executor.preparing is not None:
            # As on a node, a run that is ordered ends the preparation.
            self._timeline.after(0.0, partial(self._prepared, executor, executor.preparing, interrupted=True))
        missing = self._place(executor, action, functions)
        if unplaced and missing and len(executor.device.memory.functions) > len(functions):
            for each in functions:
                executor.device.memory.forget(each.spec.id)
            self._timeline.after(0.0, partial(self._handle, RunEnded(action.executor, action.run, unplaced=True)))
            return
        now, device = self._timeline.now, executor.device
        moved, after_s = sum(missing.values()), 0.0
        if moved:
            after_s = device.first_group_s(moved, device.config.bytes_per_s) + functions[0].model.swap_ms / 1000
        run = executor.run = DeviceRun(action, now, moved, now + seconds + after_s, after_s)
        if crash is not None:
            self._timeline.after(seconds * crash, partial(self._crash, executor, run))
        self._bring(executor, run, missing)

    def _place(
        self, executor: Executor, action: RunOnDevice, functions: Sequence[SimulatedFunction]
    ) -> dict[Address, int]:
        """Evict, and place the functions' blocks; return those to be brought."""
        device, missing = executor.device, dict[Address, int]()
        if device.config.name != action.device or not executor.ready or executor.run is not None:
            raise RuntimeError(f"run {action.run} was sent to an executor that is not free on device {action.device}")
        tenants = {each.spec.tenant for each in functions}
        if executor.tenant is not None and tenants != {executor.tenant}:
            raise RuntimeError(f"run {action.run} of {sorted(tenants)} was sent to {executor.tenant}'s executor")
        for each in action.evict:
            device.memory.forget(each)
        for function in functions:
            blocks = function.spec.weights
            missing |= device.memory.missing(blocks)
            device.memory.hold(function.spec.id, blocks)
        if sum(missing.values()) != action.missing_bytes:
            said = f"{action.missing_bytes} bytes for run {action.run} were said to be missing"
            raise RuntimeError(f"{said} on device {action.device}, and {sum(missing.values())} are")
        return missing

    def _bring(self, executor: Executor, run: DeviceRun, missing: Mapping[Address, int]) -> None:
        """Bring from the chosen peer the blocks that it has, then the others from the host."""
        device, peer = executor.device, run.action.peer
        there = () if peer is None else [each for each in missing if self._devices[peer].memory.has(each)]
        near = sum(missing[address] for address in there)
        paths = [(device.host_link, device.config.bytes_per_s, run.moved_bytes - near)]
        if peer is not None:
            paths.append((device.peer_links[peer], device.config.peers[peer], near))
        device.memory.coming = missing.keys()
        self._transfer(executor, run, [path for path in paths if path[2]])

    def _transfer(self, executor: Executor, run: DeviceRun, paths: list[tuple[SharedLink, float, int]]) -> None:
        """Transfer over the last of these paths, and then over the others."""
        run.transfer = None
        if not paths:
            executor.device.memory.coming = ()
            late = self._timeline.now + run.after_s
            self._timeline.at(max(run.ends, late), partial(self._ended, executor, run))
            return
        link, bytes_per_s, nbytes = paths.pop()
        alone_s = executor.device.transfer_s(nbytes, bytes_per_s)
        transfer = Transfer(nbytes, nbytes / alone_s, partial(self._transfer, executor, run, paths))
        run.transfer = link, transfer
        link.begin(transfer)

    def _crash(self, executor: Executor, run: DeviceRun) -> None:
        if executor.run is run:
            self.exit(executor.id, "crashed by a fault")

    def _ended(self, executor: Executor, run: DeviceRun) -> None:
        if executor.run is run:
            executor.run = None
            self.busy_s[run.action.device] += self._timeline.now - run.began
            self.moved_bytes += run.moved_bytes
            self._handle(RunEnded(executor.id, run.action.run, moved_bytes=run.moved_bytes))
