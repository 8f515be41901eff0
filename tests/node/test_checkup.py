"""The requirements of a node are checked, and each missing one is reported with a remedy."""

import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from overwinter.core.config import NodeConfig
from overwinter.node import checkup, limits
from overwinter.node.cgroups import CONTROLLERS
from overwinter.node.checkup import TORCHES, Check, checks, missing_protections, torch_check, worst
from overwinter.worker import namespaces


def found(tmp_path, **changes) -> dict[str, Check]:
    config = NodeConfig(**{"data": str(tmp_path / "data"), **changes})
    return {check.what: check for check in checks(config)}


def test_everything_is_checked_and_each_failed_check_has_a_remedy(tmp_path) -> None:
    seen = found(tmp_path)
    expected = {"Python", "PyTorch", "sandbox", "control groups", "huge pages", "descriptors", "processes", "tmpfs"}
    assert set(seen) == expected | {"memory", "disk"}
    assert [each for each in seen.values() if (each.level == "ok") != (each.remedy == "")] == []
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("version", "accelerator", "level", "word"),
    [
        ("2.11.0", None, "ok", "2.11.0"),
        ("2.13.1+cpu", None, "ok", "CPU"),
        ("2.13.0", "cuda 13.0", "warning", "--device-kind cuda"),
        ("2.10.1+cpu", None, "warning", "2.10.1"),
        ("2.14.0", None, "warning", "2.14.0"),
    ],
)
def test_untested_builds_of_pytorch_are_reported_with_a_remedy(version, accelerator, level, word) -> None:
    check = torch_check(version, accelerator)
    assert check.level == level
    assert word in check.found
    assert ("CPU build" in check.remedy) == (level != "ok")


def test_the_tested_versions_of_pytorch_are_those_that_the_project_allows() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (low, high), (oldest, newest) = (
        TORCHES,
        next(each for each in project["dependencies"] if "torch" in each).split(","),
    )
    assert (oldest, newest) == (f"torch>={low[0]}.{low[1]}", f"<{high[0]}.{high[1] + 1}")


def test_unsuitable_directories_are_reported_with_the_option_that_changes_them(tmp_path) -> None:
    (tmp_path / "file").touch()
    seen = found(tmp_path, host_store=str(tmp_path / "none"), data=str(tmp_path / "file" / "data"))
    assert worst([*seen.values()]) == seen["tmpfs"].level == seen["disk"].level == "fatal"
    assert "--host-store" in seen["tmpfs"].remedy
    assert "--data" in seen["disk"].remedy
    assert found(tmp_path, host_store="/sys/kernel")["tmpfs"].level != "ok"


@pytest.mark.parametrize("version_1", [True, False])
def test_without_a_memory_group_for_each_tenant_doctor_says_what_is_not_found(tmp_path, monkeypatch, version_1) -> None:
    if version_1:
        (tmp_path / "memory.usage_in_bytes").touch()
    monkeypatch.setattr(checkup, "group_of", lambda controller: tmp_path)
    check = found(tmp_path)["control groups"]
    assert check.level == "ok"
    assert (CONTROLLERS["memory"] in check.found) != version_1


def test_too_few_descriptors_are_reported_with_the_limit_to_raise(tmp_path) -> None:
    code = (
        "from overwinter.core.config import NodeConfig\n"
        "from overwinter.node.checkup import checks\n"
        f"for check in checks(NodeConfig(data={str(tmp_path)!r})):\n"
        "    print(check.what, check.level, check.remedy)\n"
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=limited)
    [result] = [line for line in done.stdout.splitlines() if line.startswith("descriptors")]
    assert "warning" in result
    assert "ulimit -Hn" in result


def test_the_sandbox_is_tested_in_a_child_process() -> None:
    """The checking process itself does not change."""

    def own() -> tuple:
        status = Path("/proc/self/status").read_text().splitlines()
        kept = [line for line in status if line.startswith(("Seccomp", "NoNewPrivs", "Cap", "Uid"))]
        namespaces = [os.readlink(f"/proc/self/ns/{each}") for each in ("mnt", "net", "ipc", "user")]
        return kept, namespaces, resource.getrlimit(resource.RLIMIT_NOFILE)

    before = own()
    first = missing_protections()
    assert own() == before
    assert missing_protections() == first


@pytest.mark.parametrize(
    ("refused", "found", "remedy"),
    [
        ("proc", "/proc shows other processes: Operation not permitted", "an unmasked /proc"),
        ("tmpfs", "the names of other files are visible: Operation not permitted", "mounts"),
    ],
)
def test_a_system_that_refuses_mounts_is_reported_as_in_the_log_of_a_node(
    tmp_path, monkeypatch, refused, found, remedy
) -> None:
    if any("no namespaces" in each or "names of other files" in each for each in missing_protections()):
        pytest.skip("this system gives no namespaces, or refuses mounts")
    mount = namespaces._mount

    def limited(source, target, kind, *options) -> None:
        if kind == refused:
            raise PermissionError("Operation not permitted")
        mount(source, target, kind, *options)

    monkeypatch.setattr(namespaces, "_mount", limited)
    [check] = [each for each in checks(NodeConfig(data=str(tmp_path))) if each.found == found]
    assert (check.what, check.level) == ("sandbox", "warning")
    assert remedy in check.remedy


def test_a_test_of_the_sandbox_that_ends_early_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(checkup.Sandbox, "test", lambda self: os._exit(3))
    assert any("cannot be contained" in each for each in missing_protections())


def test_an_unknown_limit_of_the_system_is_reported_with_a_remedy(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "PID_MAX", tmp_path / "absent")
    said = [each for each in checks(NodeConfig(data=str(tmp_path))) if str(tmp_path / "absent") in each.found]
    assert [(each.level, bool(each.remedy)) for each in said] == [("warning", True)]
