"""A tenant's zygote with processes that it did not report is ended, and no other."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overwinter.core.ids import WorkerId
from overwinter.node import unreported
from overwinter.node.unreported import CHECKS, CHECKS_OF_MANY, MANY, UnreportedProcesses
from overwinter.node.zygote_process import ForkLimits, ZygoteProcess

from .rig import AddOne, Function, Rig

X = {"x": torch.zeros(2, 4)}
REPORTED_LATER = WorkerId(9001)
FORKS = """
import os, sys, time

with open("/proc/self/comm", "wb") as name:
    name.write(b"\\xff\\xfe")

def replace_itself():
    while True:
        time.sleep(0.05)
        if os.fork():
            os._exit(0)

os.write(int(sys.argv[1]), b"0")
pid = os.fork()
if pid == 0 and sys.argv[2] == "a child":
    time.sleep(600)
elif pid == 0:
    if os.fork():
        os._exit(0)
    print("forked", flush=True)
    replace_itself()
elif sys.argv[2] == "a child":
    print("forked", flush=True)
time.sleep(600)
"""
"""Enters the tenant's control group, and forks one process that it does not report."""


@contextmanager
def double(rig: Rig, whose: str):
    """Start a process in the place of eve's zygote."""
    zygotes = rig.processes.zygotes
    with zygotes.groups.entry("eve") as group:
        if not group:
            pytest.skip("no control groups here")
        zygote = zygotes.tenants["eve"] = ZygoteProcess("eve", ForkLimits())
        command = [sys.executable, "-c", FORKS, str(group[0]), whose]
        process = subprocess.Popen(command, pass_fds=[*group, zygote.far_end.fileno()], stdout=subprocess.PIPE)
    zygotes.listen(zygote)
    [listing] = zygotes.groups.listings()["eve"]
    with process:
        try:
            assert process.stdout.readline() == b"forked\n"
            zygote.pid, zygote.pidfd = process.pid, os.pidfd_open(process.pid)
            yield zygote
        finally:
            zygotes.lose(zygote, "the test is over")
            process.kill()
            kill_all(listing)


def kill_all(listing: Path) -> None:
    """Kill the processes of a control group. The base zygote does not kill them, since it did not fork their zygote."""
    with suppress(FileNotFoundError):
        while left := listing.read_text().split():
            for pid in map(int, left):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("whose", "many", "checks"),
    [("a child", MANY, CHECKS), ("a child", 0, CHECKS_OF_MANY), ("orphans that replace themselves", MANY, CHECKS)],
)
def test_a_zygote_with_a_process_that_it_did_not_report_is_ended(rig, monkeypatch, whose, many, checks):
    monkeypatch.setattr(unreported, "MANY", many)
    watch = UnreportedProcesses(rig.processes.zygotes, rig.processes.forks)
    modest = Function(AddOne(), X, tenant="ada")
    # The node ends an idle zygote of a tenant without functions.
    rig.registry.add(Function(AddOne(), X, name="evil", tenant="eve").deployed)

    async def scene():
        worker = await rig.start_worker(modest)
        with double(rig, whose) as zygote:
            # They may still be reported: one that replaces itself is two for a while.
            zygote.pending |= {"up": 0, REPORTED_LATER: 0}
            zygote.workers[REPORTED_LATER] = SimpleNamespace(tenant="eve", is_ahead=False)
            for _ in range(CHECKS + 1):
                await watch.check()
            assert rig.processes.zygotes.tenants["eve"] is zygote
            zygote.pending.clear()
            zygote.workers.clear()
            for _ in range(checks - 1):
                await watch.check()
            assert rig.processes.zygotes.tenants["eve"] is zygote
            # A check does not see a process that replaces itself meanwhile.
            while "eve" in rig.processes.zygotes.tenants:
                await watch.check()
        assert rig.exits(worker.worker) == []
        run = rig.begin(worker, modest, **X)
        await rig.ended(run)
        assert rig.failures(run) == []

    rig.run(asyncio.wait_for(scene(), 60))
