"""Where the system lets it, the node bounds all workers together, and leaves no group behind."""

import os
from pathlib import Path

import pytest

from overwinter.node.cgroups import NAME, Groups

from .rig import Rig


@pytest.fixture
def parents():
    groups = Groups()
    if groups.missing:
        pytest.skip(groups.missing[0])
    yield [Path(place).parent.parent for place in groups.make()]
    groups.close()


def test_what_the_zygote_forks_is_in_a_group_that_goes_with_the_node(parents):
    left = [parent / f"{NAME}killed" for parent in parents]
    for place in left:
        place.mkdir(exist_ok=True)
    rig = Rig()
    groups = [parent / f"{NAME}{os.getpid()}" for parent in parents]
    inside = [{int(pid) for pid in (place / "cgroup.procs").read_text().split()} for place in groups]
    bounds = [int((place / "pids.max").read_text()) for place in groups if (place / "pids.max").exists()]
    rig.close()
    assert all(len(pids) >= 2 and os.getpid() not in pids for pids in inside)
    assert len(bounds) == 1
    assert not any(place.exists() for place in [*groups, *left])


def test_what_cannot_be_bounded_is_told_once():
    rig = Rig()
    rig.close()
    told = [line for line in rig.said if "control group" in line]
    assert len(told) == len(set(told)) == len(Groups().missing)
