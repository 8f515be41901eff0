"""The kernel counts the memory of a tenant's processes, whatever they show of it."""

import os
import subprocess
import sys

import pytest

from overwinter.node.cgroups import Groups

MIB = 1 << 20
HELD = 96 * MIB
HOLD = f"""
import os, sys
os.write(int(sys.argv[1]), b"0")
heap = bytearray(b"x") * {HELD // 2}
file = os.memfd_create("buffer")
os.write(file, heap)
print(flush=True)
input()
"""


@pytest.fixture
def groups():
    groups = Groups()
    groups.make()
    if groups.memory is None:
        groups.close()
        pytest.skip("no control groups count the memory of tenants")
    yield groups
    groups.close()


def test_heap_and_buffers_of_a_tenants_process_are_counted_until_it_has_ended(groups):
    with groups.entry("ada", counts_memory=False) as without, groups.entry("ada") as entered:
        assert len(entered) == len(without) + 1
        fd = entered[-1]
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(fd)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd]
        )
    with child:
        child.stdout.readline()
        assert HELD <= groups.memory.charged_bytes("ada") < HELD + 32 * MIB
        assert groups.memory.charged_bytes("bob") == 0
        groups.keep(())
        groups.make()
        # A group with a process stays, also when the base zygote is started again.
        assert groups.memory.charged_bytes("ada") >= HELD
        child.stdin.close()
    groups.keep(())
    assert groups.memory.charged_bytes("ada") == 0


def test_a_group_of_a_tenant_is_made_again_after_it_was_removed(groups):
    for _ in range(2):
        os.close(groups.memory.open("ada"))
        groups.keep(())
    with groups.entry("ada", counts_memory=False) as without, groups.entry("ada") as entered:
        assert len(entered) == len(without) + 1
