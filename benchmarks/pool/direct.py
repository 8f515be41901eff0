"""Controls executors and workers directly, without HTTP and the scheduler, over a host store of its own."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from overwinter.api.arrays import to_tensor
from overwinter.api.deployer import Package
from overwinter.core.actions import Action, PrepareOnDevice, Run, RunOnDevice, StartExecutor, StartWorker, StopWorker
from overwinter.core.config import SchedulerConfig
from overwinter.core.devices import DeviceConfig, gpus_of
from overwinter.core.events import Event, PreparedOnDevice, RunEnded, WorkerExited, WorkerReady
from overwinter.core.ids import Address, FunctionId, OperationId, RequestId, RunId, WorkerId
from overwinter.node.calls import Calls, Payload
from overwinter.node.effects import NodeEffects
from overwinter.node.functions import DeployedFunction
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.node.zygote_process import ZygoteSettings
from overwinter.server import zygote_environment
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Deployment


class TimedAnswer(NamedTuple):
    """The time from the order of a run to its end, and the outputs."""

    seconds: float
    outputs: tuple[bytes, ...]


class _Contents:
    """The contents of packages, as the repository of a host store."""

    def __init__(self, packages: Sequence[Package]) -> None:
        self._contents = {address: content for each in packages for address, content in each.contents.items()}

    def open(self, address: Address) -> int:
        fd = os.memfd_create("block")
        with open(os.dup(fd), "wb") as file:
            file.write(self._contents[address]())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


class DirectProcesses:
    """Starts executors and workers and orders their runs, as a node would by its scheduler's actions."""

    def __init__(self, device: DeviceConfig, packages: Sequence[Package], root: Path) -> None:
        self._device = device
        self._runs: dict[RunId, asyncio.Future[RunEnded]] = {}
        self._changes: dict[WorkerId, asyncio.Future[Event]] = {}
        self._numbers = count(1)
        hosts = HostStores(root, _Contents(packages))  # type: ignore[arg-type]
        self._registry = Registry(hosts, None, self._post, _log)  # type: ignore[arg-type]
        self.functions: list[FunctionId] = []
        for each in packages:
            function = DeployedFunction(Deployment(each.manifest.name, 1, each.manifest, 0.0))
            hosts.store(function.store).load(function.blobs)
            self._registry.add(function)
            self.functions.append(function.id)
        settings = ZygoteSettings(uses_gpus=bool(gpus_of([device])))
        self._processes = Processes(self._registry, zygote_environment([device]), _log, settings)
        self._processes.start()
        self._calls = Calls(self._post, None, None)  # type: ignore[arg-type]
        config, tasks = SchedulerConfig(devices=(device,)), asyncio.TaskGroup()
        self._effects = NodeEffects(
            self._registry, self._processes, self._calls, hosts, config, tasks, self._post, _log
        )

    def _post(self, event: Event) -> None:
        match event:
            case RunEnded(run=run):
                self._runs.pop(run).set_result(event)
            case WorkerReady(worker) | WorkerExited(worker) | PreparedOnDevice(worker) if worker in self._changes:
                self._changes.pop(worker).set_result(event)

    async def start_executor(self) -> WorkerId:
        """Start the device's executor."""
        number = WorkerId(next(self._numbers))
        await self._started(number, StartExecutor(number, self._device.name))
        return number

    async def start_worker(self, function: FunctionId) -> WorkerId:
        """Start a worker of a function."""
        number = WorkerId(next(self._numbers))
        await self._started(number, StartWorker(number, function))
        return number

    async def stop(self, number: WorkerId) -> None:
        """Stop an executor or a worker, and wait for its end."""
        await self._changed(number, StopWorker(number))

    async def prepare(self, executor: WorkerId, function: FunctionId) -> None:
        """Prepare a function in an executor."""
        number = OperationId(next(self._numbers))
        await self._changed(executor, PrepareOnDevice(executor, self._device.name, function, number))

    async def on_device(
        self,
        executor: WorkerId,
        function: FunctionId,
        inputs: Mapping[str, torch.Tensor],
        evict: tuple[FunctionId, ...] = (),
    ) -> TimedAnswer:
        """Run one request in an executor."""
        name = self._device.name
        return await self._run(lambda run, ids: RunOnDevice(executor, name, run, function, ids, evict=evict), inputs)

    async def in_worker(self, worker: WorkerId, inputs: Mapping[str, torch.Tensor]) -> TimedAnswer:
        """Run one request in a worker."""
        return await self._run(lambda run, ids: Run(worker, run, ids), inputs)

    async def _started(self, number: WorkerId, action: Action) -> None:
        event = await self._changed(number, action)
        if isinstance(event, WorkerExited):
            raise RuntimeError(event.reason)

    async def _changed(self, number: WorkerId, action: Action) -> Event:
        changed = self._changes[number] = asyncio.get_running_loop().create_future()
        self._effects.carry_out(action)
        return await changed

    async def _run(
        self, action: Callable[[RunId, tuple[RequestId, ...]], Action], inputs: Mapping[str, torch.Tensor]
    ) -> TimedAnswer:
        number = next(self._numbers)
        run, request = RunId(number), RequestId(number)
        loop = asyncio.get_running_loop()
        tensors = [to_tensor(name, value, None) for name, value in inputs.items()]
        payload = self._calls.payloads[request] = Payload(tensors, loop.create_future())
        ended = self._runs[run] = loop.create_future()
        began = time.perf_counter()
        self._effects.carry_out(action(run, (request,)))
        event = await ended
        took = time.perf_counter() - began
        if event.failures or event.unplaced:
            raise RuntimeError(event.failures[0].message if event.failures else "the blocks do not fit")
        del self._calls.payloads[request]
        return TimedAnswer(took, tuple(bytes(output.data) for output in payload.outputs))

    async def close(self) -> None:
        """End all processes."""
        await self._processes.close()


@asynccontextmanager
async def direct_processes(device: DeviceConfig, *packages: Package) -> AsyncIterator[DirectProcesses]:
    """Start a zygote, with these functions in the host store, and end its processes at the end."""
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-", dir="/dev/shm") as root:
        made = DirectProcesses(device, packages, Path(root))
        try:
            yield made
        finally:
            await made.close()


def _log(message: str, *, level: str = "warning", **_: object) -> None:
    if level != "info":
        print(message)
