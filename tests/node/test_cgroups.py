"""Where the system allows it, the node shares the cores among tenants, and leaves no control group behind."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from overwinter.node.cgroup_files import group_of, limiting_group
from overwinter.node.cgroups import IDLE_SUFFIX, NAME_PREFIX, NODE_DIVISOR, Groups, _remove_left
from overwinter.worker.launch import SESSION_NICE
from tests.system.nodes import wait_until

from .rig import AddOne, Function, Rig, until

X = {"x": torch.zeros(2, 4)}


@pytest.fixture
def parents():
    groups = Groups()
    if groups.missing:
        pytest.skip(groups.missing[0])
    yield [Path(place).parent.parent for place in groups.make()]
    groups.close()


def cpu_group_of(pid: int) -> str:
    """Return the path of the process's control group for cores, beginning with the name of a node's group."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "cpu" or (not controllers and NAME_PREFIX in path):
            return path[path.rindex(NAME_PREFIX) :] if NAME_PREFIX in path else ""
    return ""


def weight_of(place: Path) -> int:
    """The CPU weight of a control group."""
    return next(int((place / name).read_text()) for name in ("cpu.weight", "cpu.shares") if (place / name).exists())


def is_idle(place: Path) -> bool:
    """Whether the processes of a control group get only idle cores."""
    return (place / "cpu.idle").exists() and int((place / "cpu.idle").read_text()) == 1


def places(parents, name: str) -> list[Path]:
    return [place for parent in parents for place in parent.glob(f"{name}*")]


def test_forked_processes_are_in_a_group_that_is_removed_with_the_node(parents):
    left = [parent / f"{NAME_PREFIX}killed" for parent in parents]
    for place in left:
        (place / "1").mkdir(parents=True, exist_ok=True)
    with closing(Rig()) as rig:
        groups = [parent / rig.processes.zygotes.groups.name for parent in parents]
        inside = [{int(pid) for pid in (place / "cgroup.procs").read_text().split()} for place in groups]
        bounds = [int((place / "pids.max").read_text()) for place in groups if (place / "pids.max").exists()]
        cores = len(os.sched_getaffinity(0))
        usual = {"cpu.shares": 1024 * cores, "cpu.weight": 100 * cores}
        parts = [
            int((place / each).read_text()) / usual[each]
            for place in groups
            for each in usual
            if (place / each).exists()
        ]
    assert len(parts) == 1
    assert parts[0] <= 1 / NODE_DIVISOR
    assert all(len(pids) >= 2 and os.getpid() not in pids for pids in inside)
    assert len(bounds) == 1
    assert not any(place.exists() for place in [*groups, *left])


def test_the_threads_of_all_groups_are_counted(parents):
    with closing(Rig()) as rig:
        groups = rig.processes.zygotes.groups
        before, most = groups.threads()

        async def scene():
            worker = await rig.start_worker(Function(AddOne(), X))
            await until(lambda: groups.threads()[0] > before)
            groups.demote(worker.pid, None)
            assert groups.threads()[0] > before

        rig.run(scene())
        assert 2 <= before < most


def test_the_session_of_the_workers_has_a_lower_weight():
    with closing(Rig()) as rig:
        session = Path(f"/proc/{rig.processes.zygotes.base.pid}/autogroup")
        if not session.exists():
            pytest.skip("this kernel has no groups of sessions")
        assert session.read_text().endswith(f" nice {SESSION_NICE}\n")


def test_each_tenants_workers_are_in_its_group_whichever_zygote_forks_them(parents):
    ada, bob = (Function(AddOne(), X, name=name, tenant=name) for name in ("ada", "bob"))

    async def scene(rig):
        rig.deploy(ada, bob)
        from_base = [await rig.start_worker(function) for function in (ada, bob)]
        rig.processes.prepare("ada", ada.deployed.id)
        await until(lambda: "ada" in rig.processes.zygotes.tenants and rig.processes.zygotes.tenants["ada"].is_idle)
        own = rig.processes.zygotes.tenants["ada"]
        from_own = await rig.start_worker(ada)
        assert from_own.worker in own.workers
        base = rig.processes.zygotes.base
        found = [cpu_group_of(process.pid) for process in (*from_base, own, from_own, base)]
        shares = {(place / "cpu.shares").read_text() for place in groups(rig) if (place / "cpu.shares").exists()}
        assert len(shares) <= 1
        return found

    def groups(rig):
        return [place for parent in parents for place in (parent / rig.processes.zygotes.groups.name).glob("*/")]

    async def empty(rig):
        """Kill bob's workers, and wait until only one tenant has a group."""
        for worker in rig.processes.workers():
            if worker.family.tenant == "bob":
                worker.kill()
        await until(lambda: len(groups(rig)) == len({place.parent for place in groups(rig)}))

    with closing(Rig()) as rig:
        node = rig.processes.zygotes.groups.name
        ada_base, bob_base, ada_zygote, ada_own, base = rig.run(scene(rig))
        rig.run(empty(rig))
    assert ada_base == ada_zygote == ada_own
    assert len({ada_base, bob_base, base}) == 3
    assert base == node
    assert ada_base.startswith(f"{node}/")
    assert not places(parents, node)


def test_demoted_processes_compete_as_one_and_get_only_idle_cores_or_less_weight_until_they_are_restored(parents):
    groups = Groups()
    groups.make()
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        place, other = (groups.demote(child.pid, "ada") for child in children)
        listed = [int(pid) for listing in groups.listings()["ada"] for pid in listing.read_text().split()]
        assert listed == [child.pid for child in children]
        every = place.parent
        assert other.parent == every
        assert other != place
        assert every.name == groups.name + IDLE_SUFFIX
        assert cpu_group_of(children[0].pid) == f"{every.name}/{place.name}"
        usual = weight_of(every.with_name(groups.name))
        assert all(is_idle(each) or weight_of(each) < usual for each in (every, place, other))
        groups.restore(place)
        assert not is_idle(every)
        assert weight_of(every) == usual
        assert not is_idle(place)
        assert is_idle(other) or weight_of(other) < weight_of(place)
        groups.keep([])
        assert place.exists(), "it has a process"
        children[0].communicate()
        groups.ended(place)
        assert is_idle(every) or weight_of(every) < usual
        groups.keep([])
        assert not place.exists()
        assert other.exists()
    finally:
        for child in children:
            child.kill()
            child.communicate()
        groups.close()
    assert not places(parents, groups.name)


NODE = """
import sys
from overwinter.node.cgroups import Groups
groups = Groups()
groups.make()
with groups.entry("ada"):
    print("made", flush=True)
    input()
"""


def test_the_next_start_removes_groups_of_a_killed_node_but_not_of_a_running_one(parents):
    nodes = [
        subprocess.Popen([sys.executable, "-c", NODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for node in nodes:
            assert node.stdout.readline()
        killed, lives = nodes
        assert places(parents, f"{NAME_PREFIX}{killed.pid}-")
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        before = len(places(parents, f"{NAME_PREFIX}{lives.pid}-"))
        Groups()
        # Another node that starts now may be removing them.
        wait_until(lambda: not places(parents, f"{NAME_PREFIX}{killed.pid}-"))
        assert len(places(parents, f"{NAME_PREFIX}{lives.pid}-")) == before > 0
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
        # The next start also removes what they left.
        Groups()
    wait_until(lambda: not places(parents, f"{NAME_PREFIX}{lives.pid}-"))


def test_a_group_that_another_node_removes_before_it_is_locked_is_created_again(tmp_path):
    groups, place = Groups(), tmp_path / NAME_PREFIX
    place.mkdir()
    other = os.open(place, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    claiming = threading.Thread(target=groups._claim, args=(place,))
    claiming.start()
    try:
        waits = f":{place.stat().st_ino} "
        while not any("->" in line and waits in line for line in Path("/proc/locks").read_text().splitlines()):
            assert claiming.is_alive()
        place.rmdir()
    finally:
        os.close(other)
        claiming.join()
    _remove_left(place)
    assert place.exists()
    groups.close()
    _remove_left(place)
    assert not place.exists()


def test_new_groups_stay_while_other_nodes_remove_old_ones(tmp_path):
    groups, places = Groups(), [tmp_path / f"{NAME_PREFIX}{number}" for number in range(300)]
    made = threading.Event()

    def remove():
        while not made.is_set():
            for place in tmp_path.iterdir():
                _remove_left(place)

    removing = threading.Thread(target=remove)
    removing.start()
    try:
        for place in places:
            groups._claim(place)
        made.set()
        removing.join()
        assert all(place.exists() for place in places)
    finally:
        made.set()
        groups.close()


@pytest.mark.parametrize("membership", ["4:pids:/outer/node\n", "no table\n4:pids:\n::\n4:pids:/outer/node\n"])
def test_invalid_lines_of_the_kernels_tables_are_skipped(tmp_path, membership):
    (tmp_path / "cgroup").write_text(membership)
    (tmp_path / "mountinfo").write_text(
        "1 0 0:1 / /no-source rw - tmpfs  rw\n\ngarbage\n2 1 - cgroup cgroup rw,pids\n"
        "3 1 0:2 /outer /groups/pids rw - cgroup cgroup rw,pids\n"
    )
    assert group_of("pids", tmp_path) == Path("/groups/pids/node")
    assert group_of("pids", tmp_path / "nowhere") is None


def test_a_limit_that_cannot_be_set_is_reported_once(ungrouped):
    result = [line for line in ungrouped.said if "control group" in line]
    assert len(result) == len(set(result)) == len(ungrouped.processes.zygotes.groups.missing) > 0


def test_workers_are_forked_where_the_system_gives_no_control_groups(ungrouped):
    async def scene():
        worker = await ungrouped.start_worker(Function(AddOne(), X))
        run = ungrouped.begin(worker, **X)
        await ungrouped.ended(run)
        return ungrouped.output(run)

    assert torch.equal(ungrouped.run(scene()), X["x"] + 1.0)
    assert any("cores are not shared among tenants" in line for line in ungrouped.said)


def test_a_group_of_version_2_limits_a_process_although_it_passes_no_controllers_on(tmp_path):
    own = tmp_path / "groups" / "node.service"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("\n")
    (own / "cgroup.controllers").write_text("cpu io memory pids\n")
    (tmp_path / "cgroup").write_text("0::/node.service\n")
    (tmp_path / "mountinfo").write_text(f"29 23 0:26 / {own.parent} rw - cgroup2 cgroup2 rw\n")
    assert (group_of("pids", tmp_path), limiting_group("pids", tmp_path)) == (None, own)
    assert limiting_group("rdma", tmp_path) is None
    (own / "cgroup.subtree_control").write_text("cpu pids\n")
    assert group_of("pids", tmp_path) == own
