"""The devices of a test's world: what is there, and a check that the actions of the scheduler agree with it."""

from collections.abc import Sequence

from overwinter.core.actions import PrepareOnDevice, RunOnDevice, StartExecutor, Unbind
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import PreparedOnDevice, RunEnded, RunFailure
from overwinter.core.function import FunctionSpec


class Devices:
    """The executors of the devices, and what lies there."""

    def __init__(self, configs: Sequence[DeviceConfig]) -> None:
        self.configs = {each.name: each for each in configs}
        self.executors: dict[int, StartExecutor] = {}
        self.resident: dict[str, dict[str, dict[str, int]]] = {name: {} for name in self.configs}
        """The weights of each function on each device."""
        self.running: dict[int, RunOnDevice] = {}
        self.preparing: dict[int, PrepareOnDevice] = {}
        """What each executor prepares."""
        self.handed_over: dict[int, set[str]] = {}
        """The functions that each executor has from the host store."""

    def blocks(self, device: str) -> dict[str, int]:
        return {address: size for sizes in self.resident[device].values() for address, size in sizes.items()}

    def start(self, action: StartExecutor) -> None:
        assert action.device not in {each.device for each in self.executors.values()}, "a device has two executors"
        assert not self.resident[action.device]
        self.executors[action.executor] = action
        self.handed_over[action.executor] = set()

    def run(self, action: RunOnDevice, functions: Sequence[FunctionSpec]) -> None:
        """The functions are those of the run, without repetition."""
        executor, there = self.executors[action.executor], self.resident[action.device]
        assert executor.device == action.device
        assert all(executor.tenant in (None, function.tenant) for function in functions), "of another tenant"
        assert all(each.device != action.device for each in self.running.values()), "two runs at once on a device"
        assert action.requests or action.missing_bytes, "a run for nothing"
        for evicted in action.evict:
            assert evicted not in {function.id for function in functions}
            del there[evicted]
        before = self.blocks(action.device)
        for function in functions:
            there[function.id] = function.weights
        new = {address: size for address, size in self.blocks(action.device).items() if address not in before}
        assert action.missing_bytes == sum(new.values()), "the missing bytes are wrong"
        assert len(functions) == 1 or not action.evict, "something is evicted for a function that joins"
        assert sum(self.blocks(action.device).values()) <= self.configs[action.device].memory_bytes, "too many bytes"
        assert action.peer is None or action.peer in self.configs[action.device].peers
        self.running[action.run] = action
        self.handed_over[action.executor] |= {function.id for function in functions}

    def prepare(self, action: PrepareOnDevice, function: FunctionSpec) -> None:
        executor = self.executors[action.executor]
        assert executor.device == action.device
        assert executor.tenant in (None, function.tenant), "of another tenant"
        assert not self.preparing, "two preparations at once"
        assert all(each.device != action.device for each in self.running.values()), "a device is not idle"
        self.preparing[action.executor] = action
        self.handed_over[action.executor].add(function.id)

    def end_preparation(self, interrupted: bool) -> PreparedOnDevice:
        executor, action = self.preparing.popitem()
        return PreparedOnDevice(executor, action.operation, interrupted)

    def unbind(self, action: Unbind) -> None:
        device = self.executors[action.worker].device
        running = {
            id_ for each in self.running.values() if each.device == device for id_ in (each.function, *each.functions)
        }
        assert action.function not in running, "a running function is unbound"
        self.handed_over[action.worker].remove(action.function)
        self.resident[device].pop(action.function, None)

    def end(self, run: RunOnDevice, failures: tuple[RunFailure, ...], unplaced: bool, fault: str = "") -> RunEnded:
        del self.running[run.run]
        if unplaced:
            for id_ in {run.function, *run.functions}:
                del self.resident[run.device][id_]
        moved = 0 if unplaced else run.missing_bytes
        return RunEnded(run.executor, run.run, () if unplaced else failures, moved, unplaced, fault=fault)

    def exit(self, executor: int) -> None:
        action = self.executors.pop(executor, None)
        if action is not None:
            self.resident[action.device] = {}
            del self.handed_over[executor]
            self.preparing.pop(executor, None)
            self.running = {run: each for run, each in self.running.items() if each.executor != executor}
