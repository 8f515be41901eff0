"""The number of workers and the memory that this machine has for a node."""

import resource
from contextlib import nullcontext

import pytest

from overwinter.core.config import WORKERS_MOST
from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import ConflictError
from overwinter.core.ids import DeviceId
from overwinter.node import limits
from overwinter.node.cgroups import PIDS_SHARE, TASKS_USUAL
from overwinter.node.limits import group_tasks, memory_bytes, workers_ahead, workers_most
from overwinter.node.pressure import total_bytes

SYSTEM = ("PID_MAX", "THREADS_MAX")


def test_workers_get_no_more_than_half_of_the_memory():
    assert 0 < memory_bytes([].append) <= total_bytes() // 2


def test_workers_get_a_minimum_of_memory_if_none_is_available(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(limits, "available_bytes", lambda: 0)
    assert memory_bytes(said.append) == limits.BYTES_LEAST
    assert len(said) == 1


def test_the_scarcest_resource_limits_the_workers():
    plenty, said = 1 << 30, list[str]()
    assert workers_most(said.append, descriptors=1 << 16, tasks=plenty) == 1 << 12
    assert workers_most(said.append, descriptors=plenty, tasks=32768) == 8192
    assert workers_most(said.append, descriptors=resource.RLIM_INFINITY, tasks=32768) == 8192
    assert workers_most(said.append, descriptors=plenty, tasks=plenty) == WORKERS_MOST
    assert workers_most(said.append, descriptors=1, tasks=1) == 1
    assert said == []


def test_processes_forked_ahead_use_a_small_part_of_the_memory():
    assert [workers_ahead(mib << 20) for mib in (32, 128, 1024, 65536)] == [0, 2, 8, 8]


def test_this_system_allows_workers():
    assert 1 < workers_most([].append) <= WORKERS_MOST


@pytest.mark.parametrize("result", [None, "", "many", "0", "-1", b"\xff\xfe"])
def test_an_invalid_file_of_the_system_is_logged_and_defaults_apply(tmp_path, monkeypatch, result):
    for name in SYSTEM:
        monkeypatch.setattr(limits, name, tmp_path / name)
        if result is not None:
            (tmp_path / name).write_bytes(result if isinstance(result, bytes) else result.encode())
    monkeypatch.setattr(limits, "limiting_group", lambda controller: None)
    said: list[str] = []
    most = workers_most(said.append, descriptors=1 << 30)
    assert 1 < most <= TASKS_USUAL * PIDS_SHARE / limits.TASKS_PER_WORKER
    assert [name in line for name, line in zip(SYSTEM, said, strict=True)] == [True, True]


def test_the_limits_of_all_parent_control_groups_count(tmp_path):
    inner = tmp_path / "outer" / "middle" / "inner"
    inner.mkdir(parents=True)
    said: list[str] = []
    for place, most in ((inner, "max"), (inner.parent, "300"), (inner.parent.parent, "700")):
        (place / "pids.max").write_text(most + "\n")
    assert sorted(group_tasks(inner, said.append)) == [300, 700]
    assert list(group_tasks(None, said.append)) == []
    assert said == []
    (inner / "pids.max").write_text("some\n")
    assert sorted(group_tasks(inner, said.append)) == [300, 700]
    assert [str(inner) in line for line in said] == [True]


@pytest.mark.parametrize("lacking", [[], ["/dev/nvidia-uvm"]])
def test_a_gpu_without_the_files_of_its_driver_is_refused(monkeypatch, lacking):
    monkeypatch.setattr(limits, "version", lambda package: "2.13.0")
    monkeypatch.setattr(limits, "gpus", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(limits, "lacking_files", lambda: lacking)
    gpu = DeviceConfig(name=DeviceId("cuda:0"), kind="cuda", memory_bytes=1 << 20)
    limits.check_gpus([DeviceConfig(name=DeviceId("virtual:0"), memory_bytes=1 << 20)])
    with pytest.raises(ConflictError, match="nvidia-uvm.*nvidia-modprobe") if lacking else nullcontext():
        limits.check_gpus([gpu])
