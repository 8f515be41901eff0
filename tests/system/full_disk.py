"""A real node on a full disk and with a full tmpfs. test_full_disk.py runs this file, as an ordinary user."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from overwinter.core.errors import NoSpaceError
from tests.store.family import fill_disk

from .nodes import NodeProcess, Scale, ask, deploy, wait_until


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """The tmpfs that test_full_disk.py mounted."""
    path = Path(os.environ["SMALL_DISK"])
    yield path
    for left in path.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.mark.parametrize("reserved", [True, False], ids=["reserve", "older"])
def test_a_node_starts_and_removes_functions_on_a_full_disk(small_disk, tmp_path, reserved):
    outside = ["--journal", str(tmp_path / "journal"), "--disk-free-min-bytes", "1MiB", "--unneeded-keep-s", "5"]
    node = NodeProcess(small_disk / "data", *outside, port_file=tmp_path / "port")
    try:
        deploy(node, "kept", Scale(2.0))
        deploy(node, "large", Scale(3.0, size=1 << 20))
        node.stop()
        if not reserved:
            (small_disk / "data" / "reserve").unlink()
        fill_disk(small_disk)
        node.start()
        assert ask(node, "kept") == [3.0] * 4
        with pytest.raises(NoSpaceError):
            deploy(node, "more", Scale(4.0))
        node.client.remove("large")
        assert ask(node, "kept") == [3.0] * 4
        wait_until(lambda: not _refusal(node))
        assert ask(node, "more") == [5.0] * 4
        node.kill()
        fill_disk(small_disk)
        node.start()
        node.client.remove("more")
        assert [function["name"] for function in node.client.functions()] == ["kept"]
    finally:
        node.clean()


def _refusal(node: NodeProcess) -> str:
    """Deploy a function; return why that is refused, or nothing."""
    try:
        deploy(node, "more", Scale(4.0))
    except NoSpaceError as error:
        return str(error)
    return ""


HELD_BYTES = 1 << 20
"""More than the functions of these tests need in a host store."""


def measured(node: NodeProcess) -> list[int]:
    """Return the capacities of the host stores that the node has measured since its start."""
    return [step[1]["nbytes"] for step in node.steps() if step[1]["type"] == "HostCapacityMeasured"]


def test_a_node_that_started_on_a_full_tmpfs_serves_when_there_is_space(small_disk, tmp_path):
    filler = fill_disk(small_disk)
    node = NodeProcess(tmp_path / "data", "--host-store", str(small_disk))
    try:
        with pytest.raises(NoSpaceError):
            deploy(node, "f", Scale(2.0))
        filler.unlink()
        wait_until(lambda: max(measured(node), default=0) > HELD_BYTES)
        deploy(node, "f", Scale(2.0))
        assert ask(node, "f") == [3.0] * 4
    finally:
        node.clean()
