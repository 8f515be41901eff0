"""What a tenant's zygote leaves is killed, also processes that replace themselves, and nothing else is."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.nodes import parents_of_all
from overwinter.worker import orphans

UID = 0x7FFF0000
CHECKS_MAX = 200
CODE = """
import ctypes, json, os, sys, time
from overwinter.worker.orphans import kill_orphans

uid = int(sys.argv[1]) or None
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
known = os.fork()
if known == 0:
    time.sleep(600)
there, here = os.pipe()
zygote = os.fork()
if zygote == 0:
    if uid:
        os.setresuid(uid, uid, uid)
    for _ in range(3):
        if os.fork() == 0:
            # Without a separate user, processes that replace themselves may survive.
            for generation in range(1_000_000):
                if generation == 3:
                    os.write(here, b"x")
                if uid is None:
                    time.sleep(600)
                time.sleep(0.001)
                if os.fork():
                    os._exit(0)
    if uid is None:
        os.write(here, b"xxx")
    time.sleep(600)
for _ in range(3):
    os.read(there, 1)
os.kill(zygote, 9)
os.waitpid(zygote, 0)
kill_orphans({known}, uid)
print(json.dumps([os.getpid(), known]), flush=True)
sys.stdin.readline()
os.kill(known, 9)
"""
"""Kills the orphans of a process that forked three others; prints the processes that should be left."""


@pytest.mark.parametrize("uid", [0, UID])
def test_orphans_are_killed_and_known_children_are_not(uid):
    if uid and os.geteuid() != 0:
        pytest.skip("only root gives processes a user of their own")
    command = [sys.executable, "-c", CODE, str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        parent, known = json.loads(process.stdout.readline())
        # Killed processes may take a while to end; those that replace themselves would never be gone.
        for _ in range(CHECKS_MAX):
            children = children_of(parent)
            if children == [known]:
                break
            time.sleep(0.05)
        assert children == [known]
        process.communicate("\n")


def children_of(parent: int) -> list[int]:
    return [pid for pid, its_parent in parents_of_all().items() if its_parent == parent]


def test_the_processes_of_a_user_are_killed_as_soon_as_a_process_can_be_forked(monkeypatch):
    forks, killed = iter([OSError(), OSError(), 7]), []

    def fork():
        found = next(forks)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(orphans, "_children", lambda: [1, 2])
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(os, "waitpid", lambda pid, options: killed.append(-pid))
    orphans.kill_orphans({1}, UID)
    assert killed == [2, 2, -7, 2]
