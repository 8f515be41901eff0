"""Measures what a run through an executor adds to the same program in this process, in turns with it.

It counts from the scheduler's order to the end of the run, with the request's copy into the buffer and the answer's out
of it. The model takes about 1 ms on one core, and its blocks are on the device. Both give the same bits.
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import uvloop

from benchmarks.measure import quantile
from overwinter.api.arrays import to_tensor
from overwinter.api.deployer import Package, package
from overwinter.core.actions import RunOnDevice, StartExecutor
from overwinter.core.config import SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import Event, RunEnded, WorkerExited
from overwinter.core.function import Settings
from overwinter.core.ids import Address, DeviceId, RequestId, RunId, WorkerId
from overwinter.model.compile import compile_program
from overwinter.model.export import export
from overwinter.node.calls import Calls, Payload
from overwinter.node.effects import NodeEffects
from overwinter.node.functions import DeployedFunction
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Deployment
from overwinter.wiring import ZYGOTE_ENVIRONMENT

DEVICE = DeviceConfig(name=DeviceId("virtual:0"), memory_bytes=64 << 20)
EXECUTOR = WorkerId(1)
WIDTH = 256
MODEL_S = 1e-3
ROUNDS, WARM = 2000, 200
SHOWN = (0.1, 0.5, 0.99)


class Layers(torch.nn.Module):
    """Layers whose weights fit in the processor's cache."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
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
    """An executor with one function, and the same program in this process."""

    def __init__(self, hosts: HostStores, function: DeployedFunction) -> None:
        self._function = function
        self._wanted: dict[RunId, asyncio.Future[RunEnded]] = {}
        self._started: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        registry = Registry(hosts, None, self._post, _log)  # type: ignore[arg-type]
        registry.functions[function.id] = function
        self.processes = Processes(registry, ZYGOTE_ENVIRONMENT, _log)
        self._calls = Calls(self._post, None, None)  # type: ignore[arg-type]
        config = SchedulerConfig(devices=(DEVICE,))
        tasks = asyncio.TaskGroup()
        self._effects = NodeEffects(registry, self.processes, self._calls, hosts, config, tasks, self._post, _log)

    def _post(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self._wanted.pop(event.run).set_result(event)
        elif not self._started.done():
            self._started.set_result(event)

    async def start(self) -> None:
        self.processes.start()
        self._effects.carry_out(StartExecutor(EXECUTOR, DEVICE.name))
        event = await self._started
        if isinstance(event, WorkerExited):
            raise RuntimeError(event.reason)

    async def run(self, number: int, x: torch.Tensor) -> tuple[float, bytes]:
        """Run one request; return its time and its output."""
        run, request = RunId(number), RequestId(number)
        loop = asyncio.get_running_loop()
        payload = self._calls.payloads[request] = Payload([to_tensor("x", x, None)], loop.create_future())
        ended = self._wanted[run] = loop.create_future()
        began = time.perf_counter()
        self._effects.carry_out(RunOnDevice(EXECUTOR, DEVICE.name, run, self._function.id, (request,)))
        failures = (await ended).failures
        took = time.perf_counter() - began
        if failures:
            raise RuntimeError(failures[0].message)
        return took, bytes(payload.outputs[0].data)


def _log(message: str, **_: object) -> None:
    print(message)


def layers_for(seconds: float) -> int:
    """Return how many layers take about so long."""
    x, few = torch.randn(1, WIDTH), Layers(40)
    times = []
    with torch.inference_mode():
        for _ in range(50):
            began = time.perf_counter()
            few(x)
            times.append(time.perf_counter() - began)
    return max(1, round(40 * seconds / min(times)))


async def dispatch(rounds: int, root: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of runs in this process, and through an executor."""
    made = export(Layers(layers_for(MODEL_S)).eval(), {"x": torch.zeros(2, WIDTH)}, {"x": {0: "batch"}})
    packaged = package("layers", made.program, made.weights, settings=Settings(device="pool"))
    function = DeployedFunction(Deployment(packaged.manifest.name, 1, packaged.manifest, 0.0))
    hosts = HostStores(root, Contents(packaged))  # type: ignore[arg-type]
    hosts.store(function.store).load(function.blobs)
    program = compile_program(made.program)
    bench = Dispatch(hosts, function)
    here, there = [], []
    try:
        await bench.start()
        for number in range(rounds + WARM):
            x = torch.randn(1, WIDTH)
            with torch.inference_mode():
                began = time.perf_counter()
                (answer,) = program(made.weights, [x])
                took = time.perf_counter() - began
            through, output = await bench.run(number, x)
            if answer.numpy().tobytes() != output:
                raise RuntimeError("the executor answers otherwise than the program here")
            if number >= WARM:
                here.append(took)
                there.append(through)
    finally:
        await bench.processes.close()
    return here, there


def measure(rounds: int) -> float:
    """Print the quantiles of both; return the difference of their medians in milliseconds."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        here, there = uvloop.run(dispatch(rounds, Path(root)))
    for name, times in (("in this process", here), ("through an executor", there)):
        shown = "  ".join(f"p{round(100 * share)} {1e3 * quantile(times, share):.3f} ms" for share in SHOWN)
        print(f"{name:20} {shown}")
    return 1e3 * (median(there) - median(here))
