"""The path of a mount point may contain any bytes, and the kernel escapes some of them."""

from pathlib import Path

import pytest

from overwinter.node.cgroup_files import group_of
from overwinter.node.mounts import filesystem_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a b", "tmpfs"), ("a b/c", "tmpfs"), ("a", "ext4"), ("tab\tbackslash\\", "xfs"), ("other", "overlay")],
)
def test_the_filesystem_of_a_directory_is_that_of_the_mount_that_contains_it(tmp_path, name, kind):
    root = str(tmp_path)
    (tmp_path / "mounts").write_bytes(
        f"none / overlay rw 0 0\nnone {root}/a ext4 rw 0 0\nnone {root}/a\\040b tmpfs rw 0 0\n".encode()
        + f"none {root}/tab\\011backslash\\134 xfs rw 0 0\nnone {root}/Ger\xe4t ext4 rw 0 0\n".encode("latin-1")
    )
    assert filesystem_of(tmp_path / name, tmp_path / "mounts") == kind
    assert filesystem_of(tmp_path / name, tmp_path / "absent") == "filesystem"


def test_control_groups_are_found_beside_a_mount_whose_name_is_not_utf_8(tmp_path):
    (tmp_path / "cgroup").write_text("4:pids:/node\n")
    (tmp_path / "mountinfo").write_bytes(
        b"1 0 0:1 / /Ger\xe4t rw - ext4 /dev/sda rw\n2 1 0:2 / /my\\040groups rw shared:9 - cgroup cgroup rw,pids\n"
    )
    assert group_of("pids", tmp_path) == Path("/my groups/node")
