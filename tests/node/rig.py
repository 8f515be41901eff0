"""Real zygotes and workers with the node's effects, without a scheduler: a test decides what runs, and receives every
event.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

import torch

from overwinter.api.arrays import to_tensor
from overwinter.api.deployer import package
from overwinter.core.actions import Run
from overwinter.core.config import SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import Event, RunEnded, WorkerExited, WorkerReady
from overwinter.core.function import Settings
from overwinter.core.ids import Address, RequestId, RunId, WorkerId
from overwinter.model.export import export
from overwinter.node.calls import Calls, Payload
from overwinter.node.effects import NodeEffects
from overwinter.node.family_blocks import mapped_bytes
from overwinter.node.functions import DeployedFunction
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.node.workers import WorkerProcess
from overwinter.node.zygote_process import ZygoteSettings
from overwinter.server import ZYGOTE_ENVIRONMENT
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Deployment
from overwinter.worker.channel import close_all
from overwinter.worker.messages import Failure, ForkWorker
from overwinter.worker.sandbox import uid_of
from tests.node.log_lines import LogLines

START_S = 60.0


class AddOne(torch.nn.Module):
    """A small program: it adds one to its input."""

    def forward(self, x):
        return {"y": x + 1.0}


class Function:
    """A packaged module, with descriptors of its files as from a host store."""

    def __init__(
        self,
        module,
        inputs,
        handler: str | None = None,
        memory_mib: int = 4096,
        name="f",
        tenant="default",
        assets: Mapping[str, bytes] | None = None,
        slo_ms: float | None = None,
    ) -> None:
        made = export(module.eval(), inputs, {name: {0: "batch"} for name in inputs})
        settings = Settings(memory_mib=memory_mib, slo_ms=slo_ms)
        packed = package(
            name, made.program, made.weights, assets=assets, handler=handler, tenant=tenant, settings=settings
        )
        self.deployed = DeployedFunction(Deployment(packed.manifest.name, 1, packed.manifest, 0.0))
        self.program = made.program
        self.files = {address: bytes(content()) for address, content in packed.contents.items()}

    def open(self, bare: bool = False) -> list[int]:
        return [self.open_blob(address) for address in self.deployed.files(bare=bare)]

    def open_blob(self, address: Address) -> int:
        fd = os.memfd_create("test")
        os.write(fd, self.files[address])
        return fd


class Rig:
    """One node's processes. `run` drives its loop until a coroutine is done."""

    def __init__(self, settings: ZygoteSettings | None = None) -> None:
        self._settings = settings
        self._runner = asyncio.Runner()
        self.events: list[Event] = []
        self.said = LogLines()
        self._last = 0
        try:
            self._runner.run(self._start())
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        self.registry = Registry(None, None, self.events.append, LogLines())
        self.processes = Processes(self.registry, ZYGOTE_ENVIRONMENT, self.said, self._settings)
        self.calls = Calls(self.events.append, None, None)
        self.effects = self.effects_over(None, asyncio.TaskGroup())
        self.processes.start()
        await until(self.processes.is_up)

    def effects_over(
        self, hosts: HostStores | None, tasks: asyncio.TaskGroup, devices: Sequence[DeviceConfig] = ()
    ) -> NodeEffects:
        config = SchedulerConfig(devices=tuple(devices))
        return NodeEffects(
            self.registry, self.processes, self.calls, hosts, config, tasks, self.events.append, LogLines()
        )

    def run(self, coroutine):
        return self._runner.run(coroutine)

    def close(self) -> None:
        with self._runner:
            self._runner.run(self.processes.close())

    async def clear(self) -> None:
        """Remove everything that ran, because some of it would compute forever."""
        await until(self.processes.is_up)
        for zygote in list(self.processes.zygotes.tenants.values()):
            self.processes.zygotes.end(zygote)
        # Also those that are not forked yet: they would be forked during the next test.
        for worker in [*(process.worker for process in self.processes.workers()), *self.processes.ahead.workers]:
            self.processes.stop(worker, kill=True)
        await until(lambda: not (self.processes.workers() or self.processes.ahead.workers))
        for id_ in list(self.registry.functions):
            self.registry.remove(id_)
        self.events.clear()

    def number(self) -> int:
        self._last += 1
        return self._last

    def deploy(self, *functions: Function) -> None:
        """Register the functions with the node, as if their blocks lay in a host store."""
        self.registry.add(*(function.deployed for function in functions))
        known = {function.deployed.id: function for function in functions}
        self.registry.preparation_of = lambda id_: (
            _preparation(known[id_]) if known[id_].deployed.failed_preparations_left else None
        )

    async def start_worker(
        self,
        function: Function,
        cores: int = 1,
        concurrency: int = 1,
        members: Sequence[Function] = (),
        warm_up: bool = False,
        ahead: WorkerId | None = None,
    ) -> WorkerProcess:
        """Start a worker with address space for `members`, which it may bind later; optionally in a process forked
        ahead.
        """
        worker = WorkerId(self.number())
        deployed, fds = function.deployed, function.open()
        room = mapped_bytes([deployed, *(member.deployed for member in members)])
        order = ForkWorker(worker, uid_of(worker), deployed.manifest.settings.memory_mib << 20, room)
        load, bind = deployed.load_message(cores, concurrency), deployed.bind_message(warm_up)
        self.processes.fork(deployed, order, load, bind, fds, self.effects.runs, ahead)
        close_all(fds)
        await until(lambda: WorkerReady(worker) in self.events or self.exits(worker))
        assert not self.exits(worker), self.exits(worker)
        return self.processes.process(worker)

    def begin_bind(self, process: WorkerProcess, function: Function) -> list[Failure | None]:
        """Tell the worker to bind a function; the returned object gets the result when it is known."""
        deployed, result = function.deployed, []
        bind = process.bind_message(deployed)
        blocks = [bind.blocks[number][0] for number in bind.handed]
        fds = [function.open_blob(address) for address in (*blocks, *deployed.assets())]
        self.processes.bind(process, deployed, bind, fds, result.append)
        close_all(fds)
        return result

    async def bind(self, process: WorkerProcess, function: Function) -> Failure | None:
        """Return why the worker cannot bind the function; None if it has bound it."""
        results = self.begin_bind(process, function)
        await until(lambda: results)
        return results[0]

    def unbind(self, process: WorkerProcess, function: Function) -> None:
        self.processes.unbind(process, function.deployed.id)

    def begin(self, process: WorkerProcess, of: Function | None = None, **inputs: torch.Tensor) -> RunId:
        """Send the worker a run of one request, which has the run's number; by default of the worker's first
        function.
        """
        run = RunId(self.number())
        self._ask(RequestId(run), inputs)
        if of is None:
            self.effects.carry_out(Run(process.worker, run, (RequestId(run),)))
        else:
            self.effects.runs.run(process, (of.deployed.id,), run, (RequestId(run),))
        return run

    def begin_together(
        self, process: WorkerProcess, *asked: tuple[Function, torch.Tensor]
    ) -> tuple[RunId, list[RequestId]]:
        """Send the worker a run of requests of several functions, each with an input `x`."""
        run, requests = RunId(self.number()), [RequestId(self.number()) for _ in asked]
        for request, (_, x) in zip(requests, asked, strict=True):
            self._ask(request, {"x": x})
        whose = tuple(function.deployed.id for function, _ in asked)
        self.effects.carry_out(Run(process.worker, run, tuple(requests), None, whose))
        return run, requests

    def _ask(self, request: RequestId, inputs: Mapping[str, torch.Tensor]) -> None:
        tensors = [to_tensor(name, value.contiguous(), None) for name, value in inputs.items()]
        self.calls.payloads[request] = Payload(tensors, asyncio.get_running_loop().create_future())

    async def ended(self, *runs: RunId) -> None:
        await until(lambda: set(runs) <= set(self.ends()))

    def ends(self) -> list[RunId]:
        """Return the runs that ended, in order."""
        return [event.run for event in self.events if isinstance(event, RunEnded)]

    def failures(self, run: RunId) -> list[str]:
        [event] = [event for event in self.events if isinstance(event, RunEnded) and event.run == run]
        return [failure.message for failure in event.failures]

    def exits(self, worker: WorkerId) -> list[WorkerExited]:
        return [event for event in self.events if isinstance(event, WorkerExited) and event.worker == worker]

    def output(self, run: RunId, name: str = "y") -> torch.Tensor:
        [tensor] = [t for t in self.calls.payloads[RequestId(run)].outputs if t.name == name]
        return torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(tensor.shape)


def _preparation(function: Function):
    deployed = function.deployed
    return deployed.load_message(bare=True), deployed.bind_message(bare=True), function.open(bare=True)


async def until(truth: Callable[[], object], seconds: float = START_S) -> None:
    """Run the loop until the condition is true."""
    async with asyncio.timeout(seconds):
        while not truth():  # noqa: ASYNC110 - there is no event for what is waited for
            await asyncio.sleep(0.002)
