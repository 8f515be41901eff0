"""The node can measure its processes, whichever user they run as, as long as they live."""

import os
import signal

import torch

from overwinter.node.memory import process_memory
from overwinter.telemetry.accounts import ProcessMemory

from .rig import AddOne, Function, until

HOLDS = """
import torch

def setup(assets):
    return torch.ones(16 << 20)
"""


def memory_of(rig, worker) -> ProcessMemory | None:
    """Return the worker's memory as the node measures it."""
    with open(os.dup(rig.processes.worker_smaps()[worker.worker]), "rb", buffering=0) as smaps:
        return process_memory(smaps)


def test_the_node_measures_a_workers_memory_and_closes_the_file_when_it_is_killed(rig):
    async def scene():
        small = await rig.start_worker(Function(AddOne(), {"x": torch.zeros(2, 4)}))
        large = await rig.start_worker(Function(AddOne(), {"x": torch.zeros(2, 4)}, HOLDS))
        seen = memory_of(rig, small), memory_of(rig, large)
        for worker in (small, large):
            os.kill(worker.pid, signal.SIGKILL)
            await until(lambda worker=worker: rig.exits(worker.worker))
        return seen

    before = len(os.listdir("/proc/self/fd"))
    small, large = rig.run(scene())
    assert 0 < small.private < small.pss
    assert 64 << 20 <= large.private - small.private < 72 << 20
    assert rig.processes.worker_smaps() == {}
    # Buffers are closed in a thread.
    rig.run(until(lambda: len(os.listdir("/proc/self/fd")) <= before))


def test_the_node_measures_the_memory_of_its_zygotes(rig):
    for smaps in rig.processes.zygote_smaps():
        with open(os.dup(smaps), "rb", buffering=0) as file:
            assert process_memory(file).pss > 1 << 20
    assert len(rig.processes.zygote_smaps()) == 1
