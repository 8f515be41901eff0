"""Demotion affects no process that got the pid or the descriptor of an ended one."""

import os
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from overwinter.node.cgroups import IDLE_SUFFIX, Groups
from overwinter.node.demotion import demote

from .rig import AddOne, Function, Rig, until
from .test_cgroups import cpu_group_of


def child():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def is_closed(fd):
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "no groups"])
def test_a_process_is_demoted_and_not_another_that_got_its_pid(grouped):
    groups = Groups()
    if grouped:
        if groups.missing:
            pytest.skip(groups.missing[0])
        groups.make()

    def gets_only_idle_cores(pid):
        return IDLE_SUFFIX in cpu_group_of(pid) if grouped else os.sched_getscheduler(pid) == os.SCHED_IDLE

    lives, over = child(), child()
    try:
        pidfd, own = os.pidfd_open(over.pid), os.pidfd_open(lives.pid)
        over.communicate()
        assert demote(groups, lives.pid, pidfd, None) is None
        assert not gets_only_idle_cores(lives.pid)
        assert is_closed(pidfd)
        restore = demote(groups, lives.pid, own, None)
        assert gets_only_idle_cores(lives.pid)
        assert is_closed(own)
        assert (restore is not None) == grouped
    finally:
        lives.communicate()
        groups.close()


def test_the_demotion_of_an_ended_worker_does_not_reach_a_process_with_its_descriptor():
    with closing(Rig()) as rig:

        async def ended():
            worker = await rig.start_worker(Function(AddOne(), {"x": torch.zeros(2, 4)}))
            worker.kill()
            await until(lambda: worker.over)
            return worker

        worker, other = rig.run(ended()), child()
        try:
            found = os.pidfd_open(other.pid)
            os.dup2(found, worker.pidfd)
            try:
                worker.demoted(None)
                assert other.poll() is None
            finally:
                os.close(worker.pidfd)
                os.close(found)
        finally:
            other.communicate()
        assert other.returncode == 1
