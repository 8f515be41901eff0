"""A full disk needs a mount: it is made in a namespace, in which the node runs as an ordinary user."""

import subprocess
import sys
from pathlib import Path

import pytest

IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNTING = 'mount -t tmpfs -o size=24m,mode=777 tmpfs "$SMALL_DISK"'
AS_A_USER = 'exec unshare --user --map-user=1000 --map-group=1000 "$@"'
TESTS = Path(__file__).with_name("full_disk.py")


# It starts nodes seven times.
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_the_tests_with_a_full_disk_pass_on_a_small_tmpfs(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    environment = {"SMALL_DISK": str(disk), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    command = [*IN_A_NAMESPACE, f"{MOUNTING} && {AS_A_USER}", "sh"]
    tried = subprocess.run([*command, "true"], env=environment, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this system mounts no tmpfs in a user namespace: {tried.stderr.strip()}")
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(tmp_path / "within"),
        str(TESTS),
    ]
    ran = subprocess.run([*command, *tests], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout
