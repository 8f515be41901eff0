"""Short kernel time slices, which forked processes inherit."""

import os
import threading
from pathlib import Path

import pytest

from overwinter.node.kernel_time_slice import SLICE_NS, shorten_kernel_time_slice


def slice_ns():
    """Return the slice of the calling thread, as the kernel reports it; None where it does not."""
    try:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text()
    except FileNotFoundError:
        return None
    return next((int(line.split(":")[1]) for line in text.splitlines() if line.startswith("se.slice ")), None)


def test_a_thread_and_what_it_forks_have_the_shortest_slice():
    found = []

    def shorten():
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        found.append(shorten_kernel_time_slice())
        found.append(slice_ns())
        pid = os.fork()
        if not pid:
            os._exit(slice_ns() == SLICE_NS)
        found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == nice)

    before = slice_ns()
    if before is None:
        pytest.skip("this kernel has no slices of processes")
    thread = threading.Thread(target=shorten)
    thread.start()
    thread.join()
    assert found == [True, SLICE_NS, 1, True]
    assert slice_ns() == before
