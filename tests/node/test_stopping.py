"""A node that stops forks no further process, and closes the descriptors of all that were requested."""

import asyncio
import os
from types import SimpleNamespace

import torch

from overwinter.core.actions import ForkAhead, StartExecutor, StartWorker, StopWorker
from overwinter.core.config import SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import WorkerExited
from overwinter.core.ids import DeviceId, WorkerId
from overwinter.node.calls import Calls
from overwinter.node.effects import NodeEffects
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.store.hosts import HostStores
from tests.store.source import Source

from .log_lines import LogLines
from .rig import AddOne, Function

DEVICE = DeviceConfig(name=DeviceId("virtual:0"), memory_bytes=1 << 20)
ENDED = "it was stopped before it was forked"


class Scene:
    """The effects of a node without a base zygote, so that each requested process waits until the end."""

    def __init__(self, root, tasks: asyncio.TaskGroup) -> None:
        self.events, said = [], LogLines()
        function = Function(AddOne(), {"x": torch.zeros(2, 4)})
        self.function, self.tenant = function.deployed.id, function.deployed.manifest.tenant
        hosts = HostStores(root, Source(function.files))
        hosts.store("").load(function.deployed.blobs)
        registry = Registry(hosts, None, self.events.append, said)
        registry.add(function.deployed)
        self.processes = Processes(registry, {}, said)
        calls, config = Calls(self.events.append, None, None), SchedulerConfig(devices=(DEVICE,))
        self.effects = NodeEffects(registry, self.processes, calls, hosts, config, tasks, self.events.append, said)

    def start(self, worker: int) -> None:
        self.effects.carry_out(StartWorker(WorkerId(worker), self.function, False))

    def order_all(self) -> None:
        """Order a process of each kind."""
        self.start(11)
        self.effects.carry_out(StartExecutor(WorkerId(12), DEVICE.name))
        self.processes.zygotes.tenants[self.tenant] = SimpleNamespace()
        self.effects.carry_out(ForkAhead(WorkerId(13), self.function))
        del self.processes.zygotes.tenants[self.tenant]

    def ends(self) -> dict[int, str]:
        """Return why each process ended."""
        return {event.worker: event.reason for event in self.events if isinstance(event, WorkerExited)}


REFUSED = {
    11: "a worker could not be forked: the node is stopping",
    12: f"the executor of {DEVICE.name} could not be forked: the node is stopping",
    13: "no process can be forked ahead: default has no zygote, or the node is stopping",
}


def descriptors() -> list[str]:
    """Return the open sockets and buffers of this process."""
    names = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return sorted(name for name in names if name.startswith(("socket:", "/memfd:overwinter")))


def play(root, scene) -> None:
    """Run a scene, at whose end the processes are closed; none of their descriptors stays open."""

    async def played() -> None:
        before = descriptors()
        async with asyncio.TaskGroup() as tasks:
            await scene(Scene(root, tasks))
        assert descriptors() == before

    asyncio.run(played())


def test_no_process_is_forked_after_all_processes_were_ended(tmp_path):
    async def scene(of: Scene) -> None:
        of.start(1)
        await of.processes.close()
        of.order_all()
        assert of.ends() == REFUSED

    play(tmp_path, scene)


def test_no_process_is_forked_while_processes_are_being_ended_and_a_requested_one_may_be_stopped(tmp_path, monkeypatch):
    async def scene(of: Scene) -> None:
        close = of.processes.zygotes.close

        async def act_and_close() -> None:
            of.order_all()
            of.effects.carry_out(StopWorker(WorkerId(1), kill=True))
            await close()

        monkeypatch.setattr(of.processes.zygotes, "close", act_and_close)
        of.start(1)
        of.start(2)
        await of.processes.close()
        assert of.ends() == REFUSED | {1: ENDED}

    play(tmp_path, scene)
