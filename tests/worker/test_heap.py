"""Memory that a process no longer needs is given back to the system, as measured in separate processes."""

import os
import subprocess
import sys

import pytest

from overwinter.server import ZYGOTE_ENVIRONMENT

COUNTS = """
import torch
from overwinter.worker.heap import release_heap

def own_kib(kind="Private_Dirty:"):
    with open("/proc/self/smaps_rollup") as rows:
        return sum(int(row.split()[1]) for row in rows if row.startswith(kind))

torch.set_num_threads(1)
release_heap()
"""
END_OF_HEAP = """
import ctypes

kept = []
given = huge = 0
for _ in range(20):
    # Move the end of the heap: in each round it lies at another place between two huge pages.
    kept += [torch.empty(10_000) for _ in range(10)]
    blocks = [torch.ones(10_000) for _ in range(48)]
    huge = max(huge, own_kib("AnonHugePages:"))
    del blocks
    ctypes.CDLL(None).malloc_trim(0)
    trimmed = own_kib()
    release_heap()
    given = max(given, trimmed - own_kib())
# Memory in small pages was given back before.
print(given if huge else -1)
"""
BUFFERS = """
from overwinter.worker import heap

free_buffers, given = heap._free_buffers, 0
for _ in range(5):
    with torch.inference_mode():
        for size in range(64, 1024, 64):
            torch.nn.functional.linear(torch.ones(128, size), torch.ones(size, size), torch.ones(size))
    heap._free_buffers = lambda: None
    release_heap()
    heap._free_buffers = free_buffers
    kept = own_kib()
    release_heap()
    # One measurement varies by some megabytes.
    given = max(given, kept - own_kib())
print(given)
"""

POPULATED = """
import ctypes, resource, threading
from overwinter.worker import heap
from overwinter.worker.programs import _tensors_outside_heap

def faults_of_a_run(nbytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run = torch.zeros(nbytes, dtype=torch.uint8)
    found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert not run.any()
    return found

with _tensors_outside_heap():
    pass
nbytes = 8 << 20
without, fewer = 0, -1
# In some attempts the memory of the run before is not at the end of the heap, and stays.
for _ in range(20):
    release_heap()
    without = max(without, faults_of_a_run(nbytes))
    release_heap()
    # A tensor is aligned, so its allocation is larger.
    heap.populate_heap(nbytes + 4096)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    if without > 1000:
        fewer = max(fewer, without - faults_of_a_run(nbytes))
print(fewer)
"""


def reported(code: str, **options: str) -> int:
    """Run this code in a process with these environment variables, and return the number that it prints."""
    environment = {**os.environ, **ZYGOTE_ENVIRONMENT, **options}
    result = subprocess.run(
        [sys.executable, "-c", COUNTS + code], capture_output=True, check=True, text=True, env=environment
    )
    return int(result.stdout)


def test_the_end_of_a_heap_of_huge_pages_is_given_back():
    given = reported(END_OF_HEAP)
    if given < 0:
        pytest.skip("the system had no huge pages")
    assert given > 512


def test_buffers_for_products_of_matrices_are_given_back():
    # Everything else was released by the call before.
    assert reported(BUFFERS) > 512


def test_a_run_takes_few_page_faults_after_its_memory_was_populated():
    # A worker gets no huge pages on request (seccomp.py), so this process does not request them.
    fewer = reported(POPULATED, GLIBC_TUNABLES="")
    if fewer < 0:
        pytest.skip("the system gives huge pages unasked")
    assert fewer > 1000
