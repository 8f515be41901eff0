"""A fork of a zygote that the node has given up writes nothing to the log, because it would look like a fault."""

import subprocess
import sys

CODE = """
import os
from types import SimpleNamespace
from overwinter.worker import zygote
from overwinter.worker.channel import Channel, pair
from overwinter.worker.messages import ForkWorker, ForkZygote, ToZygote

here, there = pair()
here.close()
sandbox = SimpleNamespace(enter_as_zygote=lambda uid, limits, keep: None)
resources = zygote.Resources(Channel(there, ToZygote), None, sandbox, None)

def worker():
    zygote._run_worker(ForkWorker(1, None, 1 << 30, 1 << 30), [], os.getppid(), resources)

def tenants_zygote():
    zygote._run_zygote(ForkZygote(1, None, 1 << 30, 1 << 30), [there.fileno()], os.getppid(), resources)

for main in (worker, tenants_zygote):
    pid = os.fork()
    if pid == 0:
        main()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_fork_whose_zygote_was_given_up_ends_and_writes_nothing():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (ran.stderr, ran.stdout) == ("", "1\n1\n")
