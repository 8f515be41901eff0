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


def reported_kib(code: str) -> int:
    """Run this code in a process, and return the number of KiB that it prints."""
    environment = {**os.environ, **ZYGOTE_ENVIRONMENT}
    result = subprocess.run(
        [sys.executable, "-c", COUNTS + code], capture_output=True, check=True, text=True, env=environment
    )
    return int(result.stdout)


def test_the_end_of_a_heap_of_huge_pages_is_given_back():
    given = reported_kib(END_OF_HEAP)
    if given < 0:
        pytest.skip("the system had no huge pages")
    assert given > 512


def test_buffers_for_products_of_matrices_are_given_back():
    # Everything else was released by the call before.
    assert reported_kib(BUFFERS) > 512
