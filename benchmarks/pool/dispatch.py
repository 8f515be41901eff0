"""Measures what a run through an executor adds to the same program in this process, in turns with it.

It counts from the scheduler's order to the end of the run, with the request's copy into the buffer and the answer's out
of it, but without HTTP and the scheduler. The model takes about 1 ms on one core, and its blocks are on the device. The
same request to a worker, by turns too, shows what belongs to every process that runs programs. All give the same bits.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median

import torch
import uvloop

from benchmarks.measure import quantile
from overwinter.api.arrays import to_tensor
from overwinter.api.deployer import Package, package
from overwinter.core.actions import Action, Run, RunOnDevice, StartExecutor, StartWorker
from overwinter.core.config import SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import Event, RunEnded, WorkerExited, WorkerReady
from overwinter.core.function import Settings
from overwinter.core.ids import Address, DeviceId, RequestId, RunId, WorkerId
from overwinter.model.compile import compile_program
from overwinter.model.export import Exported, export
from overwinter.node.calls import Calls, Payload
from overwinter.node.effects import NodeEffects
from overwinter.node.functions import DeployedFunction
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Deployment
from overwinter.wiring import ZYGOTE_ENVIRONMENT

DEVICE = DeviceConfig(name=DeviceId("virtual:0"), memory_bytes=64 << 20)
HERE, THERE = "in this process", "through an executor"
EXECUTOR, WORKER = WorkerId(1), WorkerId(2)
WIDTH, ROWS = 128, 16
MODEL_S = 1e-3
ROUNDS, WARM = 2000, 200
SHOWN = (0.1, 0.5, 0.99)


class Layers(torch.nn.Module):
    """Two layers that are used so many times: their weights stay in the processor's cache while other processes run."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.count = count
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(self.count):
            for layer in self.layers:
                x = torch.nn.functional.relu(layer(x))
        return {"y": x}


class Contents:
    """The contents of a package, as the repository of a host store."""

    def __init__(self, packaged: Package) -> None:
        self._packaged = packaged

    def open(self, address: Address) -> int:
        fd = os.memfd_create("block")
        os.write(fd, self._packaged.contents[address]())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


class Dispatch:
    """An executor and a worker with one function."""

    def __init__(self, hosts: HostStores, function: DeployedFunction) -> None:
        self._function = function
        self._numbers = count()
        self._wanted: dict[RunId, asyncio.Future[RunEnded]] = {}
        self._started: dict[WorkerId, asyncio.Future[Event]] = {}
        registry = Registry(hosts, None, self._post, _log)  # type: ignore[arg-type]
        registry.functions[function.id] = function
        self.processes = Processes(registry, ZYGOTE_ENVIRONMENT, _log)
        self._calls = Calls(self._post, None, None)  # type: ignore[arg-type]
        config = SchedulerConfig(devices=(DEVICE,))
        tasks = asyncio.TaskGroup()
        self._effects = NodeEffects(registry, self.processes, self._calls, hosts, config, tasks, self._post, _log)

    def _post(self, event: Event) -> None:
        match event:
            case RunEnded(run=run):
                self._wanted.pop(run).set_result(event)
            case WorkerReady(worker) | WorkerExited(worker) if worker in self._started:
                self._started.pop(worker).set_result(event)

    async def start(self) -> None:
        """Start both."""
        self.processes.start()
        for action in (StartExecutor(EXECUTOR, DEVICE.name), StartWorker(WORKER, self._function.id)):
            worker = action.executor if isinstance(action, StartExecutor) else action.worker
            started = self._started[worker] = asyncio.get_running_loop().create_future()
            self._effects.carry_out(action)
            event = await started
            if isinstance(event, WorkerExited):
                raise RuntimeError(event.reason)

    async def on_device(self, x: torch.Tensor) -> tuple[float, bytes]:
        """Run one request in the executor; return its time and its output."""
        return await self._run(
            lambda run, request: RunOnDevice(EXECUTOR, DEVICE.name, run, self._function.id, request), x
        )

    async def in_worker(self, x: torch.Tensor) -> tuple[float, bytes]:
        """Run one request in the worker; return its time and its output."""
        return await self._run(lambda run, request: Run(WORKER, run, request), x)

    async def _run(
        self, action: Callable[[RunId, tuple[RequestId, ...]], Action], x: torch.Tensor
    ) -> tuple[float, bytes]:
        number = next(self._numbers)
        run, request = RunId(number), RequestId(number)
        loop = asyncio.get_running_loop()
        payload = self._calls.payloads[request] = Payload([to_tensor("x", x, None)], loop.create_future())
        ended = self._wanted[run] = loop.create_future()
        began = time.perf_counter()
        self._effects.carry_out(action(run, (request,)))
        failures = (await ended).failures
        took = time.perf_counter() - began
        if failures:
            raise RuntimeError(failures[0].message)
        del self._calls.payloads[request]
        return took, bytes(payload.outputs[0].data)


def _log(message: str, **_: object) -> None:
    print(message)


def made_for(seconds: float) -> Exported:
    """Return a program that takes about so long."""
    x, tried = torch.randn(1, ROWS, WIDTH), 50
    program = _exported(tried)
    run = compile_program(program.program)
    times = []
    with torch.inference_mode():
        for _ in range(100):
            began = time.perf_counter()
            run(program.weights, [x])
            times.append(time.perf_counter() - began)
    return _exported(max(1, round(tried * seconds / median(times))))


def _exported(count: int) -> Exported:
    return export(Layers(count), {"x": torch.zeros(2, ROWS, WIDTH)}, {"x": {0: "batch"}})


async def dispatch(rounds: int, root: Path) -> dict[str, list[float]]:
    """Return the seconds of runs in this process, through a worker, and through an executor."""
    made = made_for(MODEL_S)
    packaged = package("layers", made.program, made.weights, settings=Settings(device="pool"))
    function = DeployedFunction(Deployment(packaged.manifest.name, 1, packaged.manifest, 0.0))
    hosts = HostStores(root, Contents(packaged))  # type: ignore[arg-type]
    hosts.store(function.store).load(function.blobs)
    program = compile_program(made.program)
    bench = Dispatch(hosts, function)

    async def here(x: torch.Tensor) -> tuple[float, bytes]:
        with torch.inference_mode():
            began = time.perf_counter()
            (answer,) = program(made.weights, [x])
            took = time.perf_counter() - began
        return took, answer.numpy().tobytes()

    ways = {HERE: here, "through a worker": bench.in_worker, THERE: bench.on_device}
    times: dict[str, list[float]] = {name: [] for name in ways}
    try:
        await bench.start()
        for number in range(rounds + WARM):
            x = torch.randn(1, ROWS, WIDTH)
            outputs = set()
            for name, run in ways.items():
                took, output = await run(x)
                outputs.add(output)
                if number >= WARM:
                    times[name].append(took)
            if len(outputs) > 1:
                raise RuntimeError("a process answers otherwise than the program here")
    finally:
        await bench.processes.close()
    return times


def measure(rounds: int) -> float:
    """Print the quantiles of each; return what an executor adds at the median, in milliseconds."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        times = uvloop.run(dispatch(rounds, Path(root)))
    for name, each in times.items():
        shown = "  ".join(f"p{round(100 * share)} {1e3 * quantile(each, share):.3f} ms" for share in SHOWN)
        print(f"{name:20} {shown}")
    return 1e3 * (median(times[THERE]) - median(times[HERE]))
