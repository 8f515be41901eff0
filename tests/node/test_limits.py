"""How many workers, and how much memory, this machine has for a node."""

import resource

from overwinter.core.config import WORKERS_MOST
from overwinter.node.limits import group_tasks, memory_bytes, workers_ahead, workers_most
from overwinter.node.pressure import total_bytes


def test_workers_take_no_more_than_half_of_the_machine():
    assert 0 < memory_bytes() <= total_bytes() // 2


def test_what_is_scarcest_bounds_the_workers():
    plenty = 1 << 30
    assert workers_most(descriptors=1 << 16, tasks=plenty) == 1 << 12
    assert workers_most(descriptors=plenty, tasks=32768) == 8192
    assert workers_most(descriptors=resource.RLIM_INFINITY, tasks=32768) == 8192
    assert workers_most(descriptors=plenty, tasks=plenty) == WORKERS_MOST
    assert workers_most(descriptors=1, tasks=1) == 1


def test_what_is_forked_ahead_takes_a_small_part_of_the_memory():
    assert [workers_ahead(mib << 20) for mib in (32, 128, 1024, 65536)] == [0, 2, 8, 8]


def test_this_system_allows_some():
    assert 1 < workers_most() <= WORKERS_MOST


def test_every_control_group_above_counts(tmp_path):
    inner = tmp_path / "outer" / "middle" / "inner"
    inner.mkdir(parents=True)
    for place, most in ((inner, "max"), (inner.parent, "300"), (inner.parent.parent, "700")):
        (place / "pids.max").write_text(most + "\n")
    assert sorted(group_tasks(inner)) == [300, 700]
    assert list(group_tasks(None)) == []
