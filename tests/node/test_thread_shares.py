"""When most threads are in use, the workers and zygotes with the most threads are ended, and no others."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from overwinter.node.thread_shares import USUAL, ThreadShares, to_end

from .rig import AddOne, Function, until

X = {"x": torch.zeros(2, 4)}
THREADS = 200
SLEEPS = f"""
import threading, time

def setup(assets):
    for _ in range({THREADS}):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""

STARTS = f"""
for _ in range({USUAL}):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("started", flush=True)
"""


@pytest.mark.parametrize(
    ("excess", "ended"), [(0, []), (100, [2]), (850, [2, 3]), (1400, [2, 3, 5]), (10_000, [2, 3, 5, 1, 4])]
)
def test_the_largest_workers_of_the_tenant_with_the_most_threads_are_ended_first(excess, ended):
    counts = {1: 300, 2: 400, 3: 800, 4: 100, 5: 350, 6: USUAL}
    tenants = {1: "a", 2: "a", 3: "b", 4: "b", 5: "a", 6: "a"}
    assert to_end(counts, tenants.get, excess) == ended


def test_a_zygote_with_many_threads_is_ended_before_any_worker(rig):
    lost = []
    threads = f"import threading, time\n{STARTS}time.sleep(600)"
    with (
        subprocess.Popen([sys.executable, "-c", threads], stdout=subprocess.PIPE) as double,
        subprocess.Popen(["sleep", "600"]) as honest,
    ):
        try:
            assert double.stdout.readline() == b"started\n"
            zygotes = {name: SimpleNamespace(pid=process.pid) for name, process in (("eve", double), ("ada", honest))}
            processes = SimpleNamespace(
                workers=lambda: pytest.fail("no worker is looked at"),
                zygotes=SimpleNamespace(tenants=zygotes, lose=lambda zygote, why: lost.append(zygote)),
            )
            watch = ThreadShares(processes, SimpleNamespace(threads=lambda: (4 * THREADS - 1, 4 * THREADS)), print)
            rig.run(watch.check())
        finally:
            double.kill()
            honest.kill()
    assert lost == [zygotes["eve"]]


def test_a_worker_with_many_threads_is_ended_when_most_threads_of_the_node_are_in_use(rig):
    said: list[str] = []
    taken = 1
    shares = ThreadShares(rig.processes, SimpleNamespace(threads=lambda: (taken, 4 * THREADS)), said.append)
    greedy, modest = Function(AddOne(), X, SLEEPS), Function(AddOne(), X)

    async def scene():
        nonlocal taken
        one, other = await rig.start_worker(greedy), await rig.start_worker(modest)
        await shares.check()
        assert not rig.exits(one.worker)
        taken = 4 * THREADS - 1
        await shares.check()
        await until(lambda: rig.exits(one.worker))
        [end] = rig.exits(one.worker)
        assert "threads" in end.reason
        run = rig.begin(other, modest, **X)
        await rig.ended(run)
        assert rig.failures(run) == []
        assert not rig.exits(other.worker)
        assert len(said) == 1

    rig.run(scene())
