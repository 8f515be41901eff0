"""A full disk needs a mount, which an ordinary user may make in a namespace."""

import subprocess
import sys
from pathlib import Path

import pytest

IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
TESTS = Path(__file__).with_name("full_disk.py")


def test_the_tests_of_a_full_disk_pass_in_a_namespace(tmp_path):
    mounting = [*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    tried = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this system mounts no tmpfs in a user namespace: {tried.stderr.strip()}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "within")]
    ran = subprocess.run([*IN_A_NAMESPACE, *command, str(TESTS)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout
