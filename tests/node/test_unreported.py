"""Processes that a tenant's zygote forked and did not report are ended, and no others."""

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from benchmarks.nodes import parents_of_all
from overwinter.node.unreported import UNKNOWN_CHECKS, UnreportedProcesses
from overwinter.node.zygote_process import ForkLimits, ZygoteProcess

from .rig import Function, Rig, Same, until

X = {"x": torch.zeros(2, 4)}
FORKS = """
import os, sys, threading, time

os.write(int(sys.argv[1]), b"0")
pid = os.fork()
if pid and sys.argv[2] == "an orphan":
    os.waitpid(pid, 0)
if pid == 0:
    if sys.argv[2] == "an orphan" and os.fork():
        os._exit(0)
    threading.Thread(target=time.sleep, args=(600,)).start()
print("forked", flush=True)
time.sleep(600)
"""
"""Enters the tenant's control group, and forks one process that it does not report."""


@contextmanager
def double(rig: Rig, whose: str):
    """Start a process in the place of eve's zygote."""
    zygote = ZygoteProcess("eve", ForkLimits())
    with rig.processes.zygotes.groups.entry("eve") as group:
        if not group:
            pytest.skip("no control groups here")
        command = [sys.executable, "-c", FORKS, str(group[0]), whose]
        process = subprocess.Popen(command, pass_fds=[*group, zygote.far_end.fileno()], stdout=subprocess.PIPE)
    rig.processes.zygotes.tenants["eve"] = zygote
    rig.processes.zygotes.listen(zygote)
    assert process.stdout is not None
    with process, process.stdout:
        for _ in range(2):
            assert process.stdout.readline() == b"forked\n"
        zygote.pid, zygote.pidfd = process.pid, os.pidfd_open(process.pid)
        yield zygote
        rig.processes.zygotes.lose(zygote, "the test is over")
        process.kill()


@pytest.mark.parametrize(("whose", "loses"), [("a child", True), ("an orphan", False)])
def test_a_process_that_a_zygote_did_not_report_is_ended(rig, whose, loses):
    watch = UnreportedProcesses(rig.processes.zygotes, rig.processes.forks)
    modest = Function(Same(), X, tenant="ada")

    async def scene():
        worker = await rig.start_worker(modest)
        with double(rig, whose) as zygote:
            [listing] = [rig.processes.zygotes.groups.listings()["eve"]]
            [hidden] = {int(pid) for pid in listing.read_text().split()} - {zygote.pid}
            assert hidden in parents_of_all()
            # It may still be reported.
            zygote.pending[7] = 0
            for _ in range(UNKNOWN_CHECKS + 1):
                await watch.check()
            assert hidden in parents_of_all()
            zygote.pending.clear()
            await watch.check()
            assert ("eve" not in rig.processes.zygotes.tenants) == loses
            await until(lambda: hidden not in parents_of_all() or not listing.exists() or not listing.read_text())
        assert worker.pid in parents_of_all()
        run = rig.begin(worker, modest, **X)
        await rig.ended(run)
        assert rig.failures(run) == []

    rig.run(asyncio.wait_for(scene(), 60))
