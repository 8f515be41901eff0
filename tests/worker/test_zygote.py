"""A fork of a zygote that the node has given up writes nothing to the log, because it would look like a fault."""

import subprocess
import sys

import pytest

ALONE = """
import os
from types import SimpleNamespace
from overwinter.worker import zygote
from overwinter.worker.channel import Channel, pair
from overwinter.worker.messages import ForkWorker, ForkZygote, ToZygote

here, there = pair()
here.close()
box = SimpleNamespace(enter_as_zygote=lambda uid, limits, keep: None)
means = zygote.Resources(Channel(there, ToZygote), None, box, None)
"""
FORKS = {
    "worker": "zygote._run_worker(ForkWorker(1, None, 1 << 30, 1 << 30), [], os.getppid(), means)",
    "zygote": "zygote._run_zygote(ForkZygote(1, None, 1 << 30, 1 << 30), [there.fileno()], os.getppid(), means)",
}


@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS.keys())
def test_a_fork_whose_zygote_was_given_up_ends_without_a_word(fork):
    ran = subprocess.run([sys.executable, "-c", ALONE + fork], capture_output=True, text=True, check=False)
    assert (ran.stderr, ran.returncode) == ("", 1)
