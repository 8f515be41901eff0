"""Workers that are forked before a function needs them, with real processes and the node's real effects."""

import asyncio
import os
import signal

import pytest
import torch

from benchmarks.nodes import parents_of_all
from overwinter.api.deployer import package
from overwinter.bootstrap import running
from overwinter.core.actions import ForkAhead, Prepare, StopWorker
from overwinter.core.call import Call
from overwinter.core.config import NodeConfig, SchedulerConfig
from overwinter.core.events import WorkerReady
from overwinter.core.function import Settings
from overwinter.core.ids import WorkerId
from overwinter.core.tensor import Tensor
from overwinter.model.export import export
from overwinter.node import footprints as node_footprints
from overwinter.node import overuse as node_overuse
from overwinter.node.core_shares import CoreShares
from overwinter.node.footprints import Footprints
from overwinter.node.overuse import OveruseCheck
from overwinter.node.process_identity import wait_until_ended
from overwinter.node.threads import Threads
from overwinter.node.zygote_process import ZygoteProcess
from overwinter.server import ZYGOTE_ENVIRONMENT
from overwinter.store.repository import Repository
from overwinter.telemetry.statistics import Statistics

from .log_lines import LogLines
from .rig import AddOne, Function, Rig, until

MIB = 1 << 20
HANDLER = "def preprocess(inputs, state):\n    print('handled', flush=True)\n    return inputs\n"


def function(name: str, handler: str | None = None, tenant="ada", memory_mib=512) -> Function:
    return Function(AddOne(), {"x": torch.zeros(2, 4)}, handler, memory_mib, name=name, tenant=tenant)


async def check_answer(rig: Rig, process) -> None:
    run = rig.begin(process, x=torch.ones(1, 4))
    await rig.ended(run)
    assert rig.failures(run) == []
    assert rig.output(run).tolist() == [[2.0] * 4]


async def zygote_of(rig: Rig, which: Function) -> ZygoteProcess:
    """Deploy the function, order its preparation, and return the zygote of its tenant."""
    tenant = which.deployed.manifest.tenant
    rig.deploy(which)
    rig.effects.carry_out(Prepare(which.deployed.id))
    await until(lambda: tenant in rig.processes.zygotes.tenants)
    return rig.processes.zygotes.tenants[tenant]


async def fork_one_ahead(rig: Rig, which: Function) -> WorkerId:
    """Fork a worker ahead and return its id."""
    worker = WorkerId(rig.number())
    rig.effects.carry_out(ForkAhead(worker, which.deployed.id))
    await until(lambda: WorkerReady(worker) in rig.events or rig.exits(worker))
    assert not rig.exits(worker), rig.exits(worker)
    return worker


def data_limit(pid: int) -> int:
    with open(f"/proc/{pid}/limits") as limits:
        [line] = [line for line in limits if line.startswith("Max data size")]
    return int(line.split()[3])


@pytest.mark.parametrize("handler", [None, HANDLER])
def test_a_worker_starts_in_a_process_forked_ahead_with_the_same_limits_as_others(rig, handler):
    asked = function("f", handler)

    async def scene():
        # It is forked after the program is prepared, although both are requested one right after the other.
        zygote = await zygote_of(rig, asked)
        worker = await fork_one_ahead(rig, asked)
        pid = rig.processes.ahead.workers[worker].pid
        before = data_limit(pid)
        assert parents_of_all()[pid] == zygote.pid
        process, other = await rig.start_worker(asked, ahead=worker), await rig.start_worker(asked)
        assert process.pid == pid
        assert process.worker != worker
        assert other.pid != pid
        for each in (process, other):
            await check_answer(rig, each)
        assert abs(data_limit(process.pid) - data_limit(other.pid)) < MIB
        assert data_limit(process.pid) < before
        assert rig.processes.ahead.workers == {}
        os.kill(pid, signal.SIGKILL)
        await until(lambda: rig.exits(process.worker))
        assert not rig.exits(worker)
        rig.processes.stop(other.worker, kill=True)
        await until(lambda: rig.exits(other.worker))

    rig.run(scene())
    assert ("worker f@1: handled" in rig.said) == (handler is not None)
    rig.said.clear()


def test_a_killed_process_forked_ahead_is_reported_and_a_start_forks_another(rig):
    asked = function("f")

    async def scene():
        await zygote_of(rig, asked)
        worker = await fork_one_ahead(rig, asked)
        waiting = rig.processes.ahead.workers[worker]
        os.kill(waiting.pid, signal.SIGKILL)
        # The start is sent before the exit is noticed.
        wait_until_ended([os.dup(waiting.pidfd)], 10.0)
        process = await rig.start_worker(asked, ahead=worker)
        await check_answer(rig, process)
        await until(lambda: rig.exits(worker))
        assert rig.processes.ahead.workers == {}
        rig.processes.stop(process.worker, kill=True)
        await until(lambda: rig.exits(process.worker))

    rig.run(scene())


@pytest.mark.parametrize("beyond", ["memory", "time"])
def test_a_process_forked_ahead_that_does_more_than_wait_is_ended(rig, monkeypatch, beyond):
    asked = function("f", tenant=beyond)
    footprints = Footprints(dict, rig.processes, 1 << 40, [].append)
    overuse = OveruseCheck(Statistics(), rig.processes, Threads(1, "upkeep"), [].append, [].append)

    def check():
        footprints.check(0.0)
        overuse.check(0.0)

    async def scene():
        await zygote_of(rig, asked)
        worker = await fork_one_ahead(rig, asked)
        check()
        assert not rig.processes.ahead.workers[worker].dismissed
        if beyond == "memory":
            # Perhaps it has not yet written to any memory that it shares with its zygote.
            monkeypatch.setattr(node_footprints, "AHEAD_BYTES_MAX", -1)
        else:
            monkeypatch.setattr(node_overuse, "AHEAD_S", 0.0)
        check()
        await until(lambda: rig.exits(worker))
        assert rig.processes.ahead.workers == {}

    rig.run(scene())
    assert any(f"forked ahead for {beyond}" in line for line in rig.said)
    rig.said.clear()


def test_the_cpu_time_of_a_process_forked_ahead_counts_for_its_tenant(rig):
    asked, shares = function("f"), CoreShares(rig.processes, 2)

    async def scene():
        await zygote_of(rig, asked)
        worker = await fork_one_ahead(rig, asked)
        shares._spent(rig.processes)
        # As if it had computed for a second since then.
        shares._seen[rig.processes.ahead.workers[worker].pid] -= 1.0
        spent, _ = shares._spent(rig.processes)
        assert spent["ada"] >= 1.0

    rig.run(scene())


@pytest.mark.parametrize("more", [{"concurrency": 2}, {"memory_mib": 6 << 10}])
def test_a_process_forked_ahead_with_too_low_limits_ends_and_another_is_forked_for_the_worker(rig, more):
    small = function("f")
    large = function("g", memory_mib=more.get("memory_mib", 512))

    async def scene():
        await zygote_of(rig, small)
        worker = await fork_one_ahead(rig, small)
        process = await rig.start_worker(large, concurrency=more.get("concurrency", 1), ahead=worker)
        await check_answer(rig, process)
        await until(lambda: rig.exits(worker))
        rig.processes.stop(process.worker, kill=True)
        await until(lambda: rig.exits(process.worker))

    rig.run(scene())


def test_a_process_forked_ahead_ends_when_it_is_stopped_or_its_zygote_ends(rig):
    asked = function("f", tenant="eve")

    async def scene():
        zygote = await zygote_of(rig, asked)
        first, second = await fork_one_ahead(rig, asked), await fork_one_ahead(rig, asked)
        pid = rig.processes.ahead.workers[first].pid
        rig.effects.carry_out(StopWorker(first, kill=True))
        await until(lambda: rig.exits(first))
        assert pid not in parents_of_all()
        await until(lambda: zygote.is_idle)
        rig.processes.zygotes.end(zygote)
        await until(lambda: rig.exits(second))
        # No zygote can fork one now.
        third = WorkerId(rig.number())
        rig.effects.carry_out(ForkAhead(third, asked.deployed.id))
        assert rig.exits(third)
        assert rig.processes.ahead.workers == {}

    rig.run(scene())


def test_a_process_is_forked_ahead_when_its_zygote_answers_again_and_never_by_a_zygote_that_cannot_fork(rig):
    asked = function("f")

    async def scene():
        zygote = await zygote_of(rig, asked)
        await until(lambda: zygote.can_fork and not zygote.pending)
        first, second = WorkerId(rig.number()), WorkerId(rig.number())
        zygote.pending["pong"] = 2
        rig.effects.carry_out(ForkAhead(first, asked.deployed.id))
        assert first not in zygote.workers
        del zygote.pending["pong"]
        rig.processes.checked()
        await until(lambda: WorkerReady(first) in rig.events)
        zygote.fork_failed = True
        rig.effects.carry_out(ForkAhead(second, asked.deployed.id))
        assert rig.exits(second)

    rig.run(scene())


def test_a_node_wakes_a_function_in_a_process_forked_ahead_and_explains_it(tmp_path):
    one = torch.ones(1, 4)
    made = export(AddOne(), {"x": one}, {})
    packed = package("f", made.program, made.weights, settings=Settings(keep_alive_s=0.01))
    repository = Repository(tmp_path / "data")
    for address, content in packed.contents.items():
        repository.put(packed.manifest.tenant, address, bytes(content()), 0.0)
    repository.register(packed.manifest, 0.0)
    repository.close()
    scheduler = SchedulerConfig(workers_ahead=1)
    config = NodeConfig(
        data=str(tmp_path / "data"), host_store=str(tmp_path), profile_on_deploy=False, scheduler=scheduler
    )

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, LogLines()) as node:
            ahead = node.parts.processes.ahead.workers
            asked = [Tensor("x", "FP32", (1, 4), one.numpy().tobytes())]
            starts = []
            for _ in range(3):
                reply = await node.infer(Call("f", None, asked))
                assert reply.outputs[0].data == (one + 1).numpy().tobytes()
                starts.append(reply.start)
                await until(lambda: ahead and not node.parts.published.expected_bytes())
                await until(lambda: all(each.waits for each in ahead.values()))
            assert starts[1:] == ["host", "host"]
            explained = await node.telemetry.explain("f", None)
            assert "ahead" in [decision.what for decision in explained.decisions]
            await node.unload("f", None)

    asyncio.run(scene())
