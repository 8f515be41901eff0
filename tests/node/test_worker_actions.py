"""A function whose blocks an earlier run of the node left in memory: real processes, host store and effects."""

import asyncio
import os
import signal
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch

from overwinter.core.actions import ForkAhead, Prepare, RunOnDevice, StartWorker, StopWorker
from overwinter.core.events import PreparedOnDevice, RunEnded, WorkerReady
from overwinter.core.ids import RequestId, RunId, WorkerId
from overwinter.store.hosts import HostStores
from tests.store.source import Source

from .rig import Function, Rig, until
from .test_executors import LARGE, Pool, pool, variant

__all__ = ["pool"]


class Wide(torch.nn.Module):
    """A model with a weight that is a separate block."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((1 << 16,), 3.0))

    def forward(self, x):
        return {"y": x * self.factor}


class Left:
    """A function whose blocks an earlier node left in memory, and the effects of another node, which hash the
    function's weights only after `may_hash` is set.
    """

    def __init__(self, rig: Rig, root) -> None:
        self.rig = rig
        self.function = Function(Wide(), {"x": torch.zeros(2, 1 << 16)}, memory_mib=512)
        self.deployed = self.function.deployed
        source = Source(self.function.files)
        HostStores(root, source).store("").load(self.deployed.blobs)
        self.hosts = HostStores(root, source)
        self.hosts.sweep({"": self.deployed.blobs})
        self.host = self.hosts.store("")
        self.worker = WorkerId(rig.number())
        self.may_hash = threading.Event()
        self._verify, self.host.verify = self.host.verify, self._when_allowed

    def _when_allowed(self, address, pause):
        if address not in self.deployed.load_files():
            assert self.may_hash.wait(60.0)
        return self._verify(address, pause)

    async def fork_one_ahead(self) -> WorkerId:
        """Fork a worker ahead and return its id."""
        ahead, rig = WorkerId(self.rig.number()), self.rig
        rig.effects.carry_out(Prepare(self.deployed.id))
        await until(lambda: rig.processes.zygotes.tenants)
        rig.effects.carry_out(ForkAhead(ahead, self.deployed.id))
        await until(lambda: WorkerReady(ahead) in rig.events)
        return ahead

    def run(self, scene, is_ahead: bool = False) -> None:
        """Start a worker, and run the scene once it is forked."""

        async def whole() -> None:
            self.rig.deploy(self.function)
            effects = self.rig.effects
            async with asyncio.TaskGroup() as tasks:
                try:
                    self.rig.effects = self.rig.effects_over(self.hosts, tasks)
                    ahead = await self.fork_one_ahead() if is_ahead else None
                    self.rig.effects.carry_out(StartWorker(self.worker, self.deployed.id, False, ahead=ahead))
                    await until(lambda: self.worker in self.rig.processes.worker_pids())
                    assert self.host.unverified()
                    await scene()
                finally:
                    self.may_hash.set()
                    self.rig.effects = effects

        self.rig.run(whole())

    async def end(self) -> None:
        self.rig.effects.carry_out(StopWorker(self.worker, kill=True))
        await until(lambda: self.rig.exits(self.worker))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_worker_is_forked_while_its_blocks_are_verified_and_gets_them_afterwards(rig, tmp_path, is_ahead):
    left = Left(rig, tmp_path / "store")

    async def scene():
        worker = rig.processes.process(left.worker)
        await asyncio.sleep(0.05)
        assert not worker.ready
        left.may_hash.set()
        await until(lambda: WorkerReady(left.worker) in rig.events)
        assert left.host.unverified() == []
        run = rig.begin(worker, x=torch.ones(1, 1 << 16))
        await rig.ended(run)
        assert (rig.output(run) == 3.0).all()
        await left.end()

    left.run(scene, is_ahead)


def test_a_worker_never_gets_a_changed_block_and_the_block_is_reported_lost(rig, tmp_path):
    left = Left(rig, tmp_path / "store")
    victim = max(left.host.root.iterdir(), key=lambda path: path.stat().st_size)
    victim.chmod(0o600)
    with victim.open("r+b") as file:
        file.write(b"x")

    async def scene():
        left.may_hash.set()
        await until(lambda: rig.exits(left.worker))
        assert WorkerReady(left.worker) not in rig.events
        [exited] = rig.exits(left.worker)
        assert (exited.error, exited.lost_blocks) == ("StoreError", True)
        assert not left.host.holds(victim.name)

    left.run(scene)


def test_a_worker_can_be_stopped_while_its_blocks_are_verified(rig, tmp_path):
    left = Left(rig, tmp_path / "store")

    async def scene():
        rig.effects.carry_out(StopWorker(left.worker))
        await until(lambda: rig.exits(left.worker))
        assert WorkerReady(left.worker) not in rig.events

    left.run(scene)


def test_a_stopping_node_does_not_finish_the_verification_of_blocks(rig, tmp_path):
    left = Left(rig, tmp_path / "store")

    async def scene():
        rig.effects.close()
        left.may_hash.set()

    left.run(scene)
    assert left.host.unverified()
    assert WorkerReady(left.worker) not in rig.events


@pytest.mark.parametrize(
    ("stop", "error"),
    [
        (None, "ProgramError"),
        (StopWorker(WorkerId(0), kill=False), "WorkerError"),
        (StopWorker(WorkerId(0), kill=True), "WorkerError"),
    ],
    ids=["by itself", "stopped", "killed"],
)
def test_a_process_that_ends_before_its_first_bind_is_a_failure_of_its_program_unless_the_node_ended_it(
    rig, tmp_path, stop, error
):
    left = Left(rig, tmp_path / "store")
    left.deployed.on_trial = True

    async def scene():
        await until(lambda: rig.processes.process(left.worker).trial_began)
        if stop is None:
            os.kill(rig.processes.worker_pids()[left.worker], signal.SIGKILL)
        else:
            rig.effects.carry_out(msgspec.structs.replace(stop, worker=left.worker))
        await until(lambda: rig.exits(left.worker))
        [exited] = rig.exits(left.worker)
        assert exited.error == error
        assert (left.deployed.id in exited.reason) == ("program" in exited.reason) == (stop is None)

    left.run(scene)


class Reopened:
    """A pool with two functions whose blocks an earlier node left in memory. The node hashes them once `may_hash` is
    set.
    """

    def __init__(self, rig: Rig, pool: Pool) -> None:
        self.rig, self.pool = rig, pool
        self.functions = [variant("minilm", number) for number in (0, 1)]
        self.whose = tuple(each.deployed.id for each in self.functions)
        self.may_hash = threading.Event()
        pool.deploy(*self.functions)
        host = HostStores(pool.root, Source(pool.contents)).store("")
        host.sweep([blob for each in self.functions for blob in each.deployed.blobs])
        verify = host.verify
        host.verify = lambda *of: self.may_hash.wait(60.0) and verify(*of)
        self.hosts = SimpleNamespace(store=lambda name: host)

    def run(self, scene) -> None:
        async def whole() -> None:
            async with asyncio.TaskGroup() as tasks:
                self.pool.effects = self.rig.effects_over(self.hosts, tasks, self.pool.devices)
                try:
                    await scene(await self.pool.start())
                finally:
                    self.may_hash.set()

        self.rig.run(whole())

    def begin(self, executor: WorkerId) -> RunId:
        """Order a run of one request of each function."""
        run = RunId(self.rig.number())
        self.pool.last = ids = [RequestId(self.rig.number()) for _ in self.functions]
        for id_ in ids:
            self.rig._ask(id_, {key: value[:1] for key, value in self.functions[0].inputs.items()})
        order = RunOnDevice(executor, LARGE, run, self.whose[0], tuple(ids), functions=self.whose)
        self.pool.effects.carry_out(order)
        return run


@pytest.mark.parametrize("leaving", [[], [0], [1], [0, 1]])
def test_requests_that_end_while_blocks_are_verified_are_left_out_of_the_run(rig, pool, leaving):
    reopened = Reopened(rig, pool)
    left = [each for number, each in enumerate(reopened.functions) if number not in leaving]
    moved = {address: nbytes for each in left or reopened.functions for address, nbytes in each.block_bytes.items()}

    async def scene(executor):
        run, asked = reopened.begin(executor), pool.last
        pool.last = [id_ for number, id_ in enumerate(asked) if number not in leaving]
        for number in leaving:
            del rig.calls.payloads[asked[number]]
        reopened.may_hash.set()
        await rig.ended(run)
        [ended] = [event for event in rig.events if isinstance(event, RunEnded)]
        assert ended == RunEnded(executor, run, (), sum(moved.values()))
        assert len(pool.answers()) == len(left)
        assert all(pool.answers())
        await rig.ended(reopened.begin(executor))
        assert all(pool.answers())

    reopened.run(scene)


def test_a_programming_error_in_a_run_that_waited_ends_only_its_executor(rig, pool, monkeypatch):
    reopened = Reopened(rig, pool)

    def mistaken(*of):
        raise KeyError(7)

    async def scene(executor):
        monkeypatch.setattr(pool.effects.runs, "run", mistaken)
        reopened.begin(executor)
        reopened.may_hash.set()
        await until(lambda: rig.exits(executor))
        [exited] = rig.exits(executor)
        assert (exited.error, "KeyError: 7" in exited.reason) == ("WorkerError", True)
        monkeypatch.undo()
        await rig.ended(reopened.begin(await pool.start()))
        assert all(pool.answers())

    reopened.run(scene)


def test_a_run_ends_a_preparation_that_waits_for_a_verification(rig, pool):
    reopened = Reopened(rig, pool)

    async def scene(executor):
        operation = pool.order(executor, reopened.functions[0])
        assert pool.prepared(operation) == []
        run = reopened.begin(executor)
        assert pool.prepared(operation) == [PreparedOnDevice(executor, operation, interrupted=True)]
        reopened.may_hash.set()
        await rig.ended(run)
        assert all(pool.answers())
        assert not (await pool.prepare(executor, reopened.functions[1])).interrupted
        assert len(pool.prepared(operation)) == 1

    reopened.run(scene)
