"""What a process keeps of memory that it needs no more. In processes that hold nothing else."""

import os
import subprocess
import sys

import pytest

from overwinter.wiring import ZYGOTE_ENVIRONMENT

COUNTS = """
import torch
from overwinter.worker.heap import give_back_heap

def own_kib():
    with open("/proc/self/smaps_rollup") as rows:
        return sum(int(row.split()[1]) for row in rows if row.startswith("Private_Dirty:"))

torch.set_num_threads(1)
give_back_heap()
before = own_kib()
"""
FREED = {
    "small blocks at the end of the heap": """
kept = []
most = 0
for _ in range(5):
    # Wherever between two huge pages the end lies.
    kept += [torch.empty(10_000) for _ in range(10)]
    blocks = [torch.ones(10_000) for _ in range(48)]
    del blocks
    give_back_heap()
    most = max(most, own_kib())
print(most - before)
""",
    "buffers for products of matrices": """
with torch.inference_mode():
    for size in (64, 256, 768):
        torch.nn.functional.linear(torch.ones(128, size), torch.ones(size, size), torch.ones(size))
give_back_heap()
print(own_kib() - before)
""",
}


def left_kib(freed: str) -> int:
    """What a process keeps of this."""
    environment = {**os.environ, **ZYGOTE_ENVIRONMENT}
    told = subprocess.run(
        [sys.executable, "-c", COUNTS + freed], capture_output=True, check=True, text=True, env=environment
    )
    return int(told.stdout)


@pytest.mark.parametrize("freed", FREED.values(), ids=FREED.keys())
def test_a_heap_of_huge_pages_is_given_back(freed):
    assert left_kib(freed) < 1024
