"""Tracks the devices from a scheduler's steps: their executors, the functions there, and what ran.

A run counts as a hit if all blocks of its functions were on the device, and otherwise as a miss. A shared run that is a
miss counts as one for its first function only, and as a hit for the others. A function is charged for the time of its
runs, and for the time that it is in the host store without a run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Generic, TypeVar

import msgspec

from overwinter.core.actions import PrepareOnDevice, RunOnDevice, StartExecutor, StopWorker, Unbind
from overwinter.core.events import PreparedOnDevice, RunEnded
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import (
    Address,
    DeviceId,
    FunctionId,
    OperationId,
    RequestId,
    RunId,
    Seconds,
    WorkerId,
    whole_id,
)
from overwinter.store.shared_blocks import SharedBlocks
from overwinter.telemetry.tally import DeviceCounts, Tally

T = TypeVar("T", bound=Tally)


class DevicePart(msgspec.Struct, Generic[T], frozen=True):
    """The requests of one function in a run."""

    spec: FunctionSpec
    tally: T
    requests: tuple[RequestId, ...]


class DeviceRun(msgspec.Struct, Generic[T], eq=False):
    """A run on a device that has not ended."""

    id: RunId
    begun: Seconds
    parts: tuple[DevicePart[T], ...]
    """One for each function, in the order of the requests."""
    missing_bytes: int

    @property
    def function(self) -> FunctionId:
        """The function of the first part."""
        return self.parts[0].spec.id

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """All its requests."""
        return tuple(id_ for part in self.parts for id_ in part.requests)

    def shares_s(self, now: Seconds) -> Iterator[tuple[T, float]]:
        """Yield the seconds up to now for which each function is charged, by its requests; nothing for a run that only
        brings blocks.
        """
        seconds, count = now - self.begun, len(self.requests)
        for part in self.parts:
            if part.requests:
                yield part.tally, seconds * len(part.requests) / count


class LiveExecutor(msgspec.Struct, Generic[T], eq=False):
    """An executor, from its start to its end."""

    device: "TrackedDevice[T]"
    run: DeviceRun[T] | None = None
    preparing: OperationId | None = None
    stopping: bool = False


class TrackedDevice(Generic[T]):
    """One device: the counts of its runs and executors, and the functions with blocks there."""

    def __init__(self, name: DeviceId) -> None:
        self.name = name
        self.counts = DeviceCounts()
        self.starts = self.crashes = 0
        """The started executors, and those that died, whose device failed, or that were killed in a start or run."""
        self.prepared = 0
        """The begun preparations of functions before a request."""
        self.prefetches = 0
        """The functions and slices that were brought before a request."""
        self.unplaced = 0
        """The attempts of a run whose blocks did not fit, because the free memory was not contiguous."""
        self.blocks: SharedBlocks[FunctionId] = SharedBlocks()
        self.residents: dict[FunctionId, T] = {}

    def hold(self, function: FunctionId, tally: T, sizes: Mapping[Address, int], now: Seconds) -> None:
        """A run brings the function's missing blocks."""
        if function not in self.residents:
            self.residents[function] = tally
            tally.devices_with_blocks += 1
            self.blocks.hold(function, sizes, now)

    def forget(self, function: FunctionId, now: Seconds) -> None:
        """The function is no longer on the device."""
        tally = self.residents.pop(function, None)
        if tally is not None:
            tally.device_byte_s += self.blocks.release(function, now)
            tally.devices_with_blocks -= 1

    def forget_all(self, now: Seconds) -> None:
        """The device is empty."""
        for function, owed in self.blocks.release_all(now).items():
            tally = self.residents.pop(function)
            tally.device_byte_s += owed
            tally.devices_with_blocks -= 1


class TrackedPool(Generic[T]):
    """All devices. Other threads may read while steps are observed."""

    def __init__(self) -> None:
        self.devices: dict[DeviceId, TrackedDevice[T]] = {}
        """The devices that ever had an executor."""
        self.executors: dict[WorkerId, LiveExecutor[T]] = {}
        self.idle: dict[FunctionId, tuple[T, Seconds]] = {}
        """The functions in the host store that do not run, and since when."""
        self._in_host: dict[FunctionId, set[FunctionId]] = {}
        """The parts of each version that the host store has; the slices of a program count as one in `idle`."""
        self._running: Counter[FunctionId] = Counter()

    # Executors

    def start(self, action: StartExecutor, now: Seconds) -> None:
        """The executor of a device is forked."""
        device = self.devices.get(action.device)
        if device is None:
            device = self.devices[action.device] = TrackedDevice(action.device)
        device.starts += 1
        self.executors[action.executor] = LiveExecutor(device)

    def prepare(self, action: PrepareOnDevice, now: Seconds) -> None:
        """An executor prepares a function. No function is charged for the time, because any run interrupts it."""
        executor = self.executors[action.executor]
        executor.device.prepared += 1
        executor.preparing = action.operation

    def end_preparation(self, event: PreparedOnDevice, now: Seconds) -> None:
        """A preparation ended."""
        executor = self.executors.get(event.worker)
        if executor is not None and executor.preparing == event.operation:
            executor.preparing = None

    def stop(self, action: StopWorker, now: Seconds) -> None:
        """An executor is stopped; its device is empty from now on. It is killed at once if a start or run hangs, if a
        run exceeds the drain timeout, or if it is preparing a function. The last of these is no crash.
        """
        executor = self.executors[action.worker]
        if action.kill and not executor.stopping and executor.preparing is None:
            executor.device.crashes += 1
        executor.stopping = True
        executor.device.forget_all(now)

    def exit(self, id_: WorkerId, now: Seconds) -> None:
        """An executor ended."""
        executor = self.executors.pop(id_, None)
        if executor is not None and not executor.stopping:
            executor.device.crashes += 1
            executor.device.forget_all(now)

    # Runs

    def run(
        self,
        action: RunOnDevice,
        specs: Mapping[FunctionId, FunctionSpec],
        tally_of: Callable[[FunctionSpec], T],
        now: Seconds,
    ) -> None:
        """A run begins."""
        requests: dict[FunctionId, list[RequestId]] = {}
        if not action.requests:
            requests[action.function] = []
        for function_id, request in zip(action.functions or repeat(action.function), action.requests, strict=False):
            requests.setdefault(function_id, []).append(request)
        parts = tuple(DevicePart(specs[id_], tally_of(specs[id_]), tuple(ids)) for id_, ids in requests.items())
        executor = self.executors[action.executor]
        for function in action.evict:
            executor.device.forget(function, now)
        executor.run = DeviceRun(action.run, now, parts, action.missing_bytes)
        for part in parts:
            spec = part.spec
            executor.device.hold(spec.id, part.tally, spec.weights, now)
            whole = whole_id(spec.id)
            self._end_idle(whole, now)
            self._running[whole] += 1

    def end_run(self, id_: WorkerId, event: RunEnded | None, now: Seconds) -> DeviceRun[T] | None:
        """The run in progress of an executor ended; without an event the executor died or is stopped. Return the run;
        None if there was none, or if it had no requests or its blocks found no place.
        """
        executor = self.executors.get(id_)
        run = None if executor is None else executor.run
        if executor is None or run is None or (event is not None and event.run != run.id):
            return None
        executor.run, device = None, executor.device
        if event is not None and event.fault:
            # Its device failed, and the executor ends by itself. The stop that follows is no kill and counts no crash.
            device.crashes += 1
        functions = [part.spec.id for part in run.parts]
        for part in run.parts:
            whole = whole_id(part.spec.id)
            self._running[whole] -= 1
            if not self._running[whole]:
                del self._running[whole]
                self._begin_idle(whole, part.tally, now)
        if event is not None and event.unplaced:
            device.unplaced += 1
            for function in functions:
                device.forget(function, now)
            return None
        moved = (0, 0) if event is None else (event.moved_bytes, event.peer_bytes)
        if not run.requests:
            device.prefetches += event is not None
            device.counts.moved_bytes += moved[0]
            device.counts.peer_bytes += moved[1]
            return None
        self._count(device, run, *moved, now)
        return run

    def _count(
        self, device: TrackedDevice[T], run: DeviceRun[T], moved_bytes: int, peer_bytes: int, now: Seconds
    ) -> None:
        missing_bytes = run.missing_bytes
        device.counts.add(missing_bytes, moved_bytes, peer_bytes, now - run.begun)
        # Two versions of one function may share the run.
        shares: dict[T, float] = {}
        for tally, seconds in run.shares_s(now):
            shares[tally] = shares.get(tally, 0.0) + seconds
        for tally, seconds in shares.items():
            own = tally.by_device.get(device.name)
            if own is None:
                own = tally.by_device[device.name] = DeviceCounts()
            # The transfer counts for the function of the first part.
            own.add(missing_bytes, moved_bytes, peer_bytes, seconds)
            missing_bytes = moved_bytes = peer_bytes = 0

    def unbind(self, action: Unbind, now: Seconds) -> None:
        """A device forgets a function."""
        executor = self.executors.get(action.worker)
        if executor is not None:
            executor.device.forget(action.function, now)

    # The host store

    def held(self, function: FunctionId, tally: T, now: Seconds) -> None:
        """The host store has all blocks of a function of the pool."""
        whole = whole_id(function)
        self._in_host.setdefault(whole, set()).add(function)
        self._begin_idle(whole, tally, now)

    def released(self, function: FunctionId, now: Seconds) -> None:
        """The function's blocks have left the host store."""
        whole = whole_id(function)
        parts = self._in_host.get(whole, set())
        parts.discard(function)
        if not parts:
            self._end_idle(whole, now)
            self._in_host.pop(whole, None)

    def charge_all(self, now: Seconds) -> None:
        """Charge the functions for the time up to now in which they were in the host store and did not run."""
        for function, (tally, _) in list(self.idle.items()):
            self._end_idle(function, now)
            self._begin_idle(function, tally, now)

    def _begin_idle(self, function: FunctionId, tally: T, now: Seconds) -> None:
        if function in self._in_host and function not in self._running:
            self.idle.setdefault(function, (tally, now))

    def _end_idle(self, function: FunctionId, now: Seconds) -> None:
        idle = self.idle.pop(function, None)
        if idle is not None:
            tally, since = idle
            tally.idle_device_s += now - since
