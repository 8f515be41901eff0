"""Checks whether this machine is fit for a node, and gives a remedy for each problem. The checks change nothing."""

import ast
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from overwinter.core.config import NodeConfig
from overwinter.node.cgroup_files import group_of
from overwinter.node.cgroups import CONTROLLERS, allows_tenant_groups
from overwinter.node.limits import workers_most
from overwinter.node.mounts import filesystem_of
from overwinter.node.pressure import available_bytes
from overwinter.store.disk import free_bytes
from overwinter.worker import namespaces
from overwinter.worker.python_paths import python_paths
from overwinter.worker.sandbox import Sandbox

Level = Literal["ok", "warning", "fatal"]
"""Whether a node runs on this machine: without restriction, with less protection or resources, or not at all."""

PYTHONS = ((3, 11), (3, 12))
TORCHES = ((2, 11), (2, 13))
"""The oldest and the newest tested PyTorch."""
WORKERS_ENOUGH = 256
"""A limit of the system that allows fewer workers gives a warning."""
GIB = 1 << 30
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TMPFS = ("tmpfs", "ramfs")

COMMAND = "https://pytorch.org/get-started gives the command for Linux and pip"
BUILD = f"before Overwinter, install the CPU build, or for --device-kind cuda a CUDA build: {COMMAND}"
REMEDIES = {
    "Landlock": "Linux 5.13 or newer, with landlock in its list of security modules (lsm= on the kernel command line)",
    "unshare": "allow namespaces: user.max_user_namespaces above 0 (sysctl), in a container the capability SYS_ADMIN",
    "cannot be mapped": "start the node as root, or allow user namespaces to ordinary users (on Ubuntu the sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0)",
    "separate user": "start the node as root: it then runs each worker as an unprivileged user",
    "names of other files": "Linux 5.12 or newer; in a container, mounts (Docker: --security-opt apparmor=unconfined)",
    "/proc shows": "in a container, an unmasked /proc; workers then see no other processes",
    "filtered": "a kernel with seccomp filters (CONFIG_SECCOMP_FILTER), on x86-64 or ARM64",
}
"""The remedies for missing protections, by words of their messages."""


class Check(msgspec.Struct, frozen=True):
    """The result of one check."""

    what: str
    level: Level
    found: str
    remedy: str = ""
    """The remedy; empty if there is no problem."""


def checks(config: NodeConfig) -> Iterator[Check]:
    """Everything that a node with this configuration needs of the machine."""
    yield _python()
    yield _torch()
    yield from _containment()
    yield _groups()
    yield _huge_pages()
    yield from _limits()
    yield _host_store(Path(config.host_store))
    yield _memory(config)
    yield _data(Path(config.data), config.disk_free_min_bytes)


def _python() -> Check:
    found = platform.python_version()
    if sys.version_info[:2] in PYTHONS:
        return Check("Python", "ok", found)
    tested = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    return Check("Python", "warning", f"{found} is not tested", f"use Python {tested}")


def _torch() -> Check:
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Check("PyTorch", "fatal", "it is not installed", BUILD)
    return torch_check(found, _accelerator())


def torch_check(found: str, accelerator: str | None) -> Check:
    """The result for a version of PyTorch, and for the accelerator for which it was built."""
    oldest, newest = TORCHES
    if not oldest <= tuple(int(part) for part in found.split(".")[:2]) <= newest:
        tested = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        return Check("PyTorch", "warning", f"{found} is not tested", f"install PyTorch {tested}; {BUILD}")
    if accelerator is not None:
        message = f"{found} is built for {accelerator} and takes gigabytes; only --device-kind cuda needs a CUDA build"
        remedy = f"unless the node is for --device-kind cuda, replace it by the CPU build: {COMMAND}"
        return Check("PyTorch", "warning", message, remedy)
    return Check("PyTorch", "ok", f"{found}, a CPU build")


def _accelerator() -> str | None:
    """The accelerator that PyTorch was built for, as its version file says: PyTorch is not imported."""
    found = find_spec("torch")
    directories = [] if found is None else list(found.submodule_search_locations or ())
    with suppress(OSError, SyntaxError):
        for node in ast.parse(Path(directories[0], "version.py").read_text()).body if directories else ():
            match node:
                case ast.AnnAssign(target=ast.Name(id="cuda" | "hip" | "xpu" as name), value=ast.Constant(str() as of)):
                    return f"{name} {of}"
                case ast.Assign(targets=[ast.Name(id="cuda" | "hip" | "xpu" as name)], value=ast.Constant(str() as of)):
                    return f"{name} {of}"
                case _:
                    pass
    return None


def _containment() -> Iterator[Check]:
    """The protections that workers would lack: a child process enters the sandbox to find out."""
    lacking = missing_protections()
    if not lacking:
        yield Check("sandbox", "ok", f"Linux {platform.release()}: Landlock, seccomp, namespaces")
    for each in lacking:
        remedy = next((text for word, text in REMEDIES.items() if word in each), "see docs/decisions/sandbox.md")
        yield Check("sandbox", "warning", each, remedy)


def missing_protections() -> list[str]:
    """The protections that a worker would lack on this system."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.write(writer, "\n".join(_missing_here()).encode())
        except BaseException as error:  # noqa: BLE001 - the boundary of the child: every error is reported
            os.write(writer, f"workers cannot be contained: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as report:
        lacking = [line for line in report.read().split("\n") if line]
    if os.waitpid(pid, 0)[1]:
        lacking.append("workers cannot be contained: the test of the sandbox did not end")
    return lacking


def _missing_here() -> list[str]:
    """Enter the namespaces and test the sandbox, as a node's base zygote does; return what is missing. For a child
    process only: it continues in a child of its own and exits after it.
    """
    lacking = namespaces.enter()
    if not lacking:
        # Only children are in the new PID namespace, whose /proc replaces the other one.
        if os.fork():
            os._exit(int(os.wait()[1] != 0))
        lacking = namespaces.show_only(python_paths())
    return [*lacking, *Sandbox().test()]


def _groups() -> Check:
    parents = {controller: group_of(controller) for controller in CONTROLLERS}
    usable = {each: parent for each, parent in parents.items() if parent is not None and os.access(parent, os.W_OK)}
    lacking = [meaning for controller, meaning in CONTROLLERS.items() if controller not in usable]
    if not lacking:
        found = "threads are bounded, and cores are shared among tenants"
        if not allows_tenant_groups(usable["memory"]):
            # No remedy: the system chooses the version.
            found += f"; with version 2, {CONTROLLERS['memory']}"
        return Check("control groups", "ok", found)
    remedy = (
        "start the node as root, or with version 1 as a systemd unit with Delegate=yes, and with version 2 in a group "
        "that passes cpu and pids on (cgroup.subtree_control); in a container, a writable /sys/fs/cgroup"
    )
    return Check("control groups", "warning", "; ".join(lacking), remedy)


def _huge_pages() -> Check:
    try:
        chosen = HUGE_PAGES.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        chosen = "never"
    if chosen == "never":
        return Check("huge pages", "warning", "off: forks take longer", f"echo madvise > {HUGE_PAGES}")
    return Check("huge pages", "ok", chosen)


def _limits() -> Iterator[Check]:
    unbounded = WORKERS_ENOUGH * 1024
    unclear: list[str] = []
    bounds = {
        "descriptors": (
            workers_most(unclear.append, tasks=unbounded),
            "raise the hard limit: ulimit -Hn, LimitNOFILE= in a systemd unit",
        ),
        "processes": (
            workers_most(unclear.append, descriptors=unbounded),
            "raise kernel.pid_max, pids.max of the control group (TasksMax=), or ulimit -u",
        ),
    }
    for what, (most, remedy) in bounds.items():
        enough = most >= WORKERS_ENOUGH
        yield Check(what, "ok" if enough else "warning", f"enough for {most} workers", "" if enough else remedy)
    for each in unclear:
        yield Check("processes", "warning", each, "mount /proc and the control groups as Linux has them")


def _host_store(directory: Path) -> Check:
    """The directory of the blocks of loaded functions."""
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return Check("tmpfs", "fatal", f"{directory} cannot be written", "mount a tmpfs there, or choose --host-store")
    free = free_bytes(directory)
    remedy = f"mount -o remount,size=50% {directory}; in a container, --shm-size"
    if kind := kind_if_not_memory(directory):
        return Check("tmpfs", "warning", f"{directory} is on a {kind}, not in memory", "choose a tmpfs: --host-store")
    if free < GIB:
        return Check("tmpfs", "warning", f"{directory} has space for {free >> 20} MiB of models", remedy)
    return Check("tmpfs", "ok", f"{directory} has space for {free >> 20} MiB of models")


def kind_if_not_memory(directory: Path) -> str:
    """Return the type of a directory's filesystem, unless that is in memory."""
    kind = filesystem_of(directory)
    return "" if kind in TMPFS else kind


def _memory(config: NodeConfig) -> Check:
    free = available_bytes()
    if free is None:
        return Check("memory", "warning", "the system does not report the free memory", "give --memory-bytes")
    least = max(GIB, 2 * config.memory_free_min_bytes)
    remedy = "" if free >= least else "stop other programs: workers may use half of the free memory"
    return Check("memory", "warning" if remedy else "ok", f"{free >> 20} MiB are free", remedy)


def _data(directory: Path, least_bytes: int) -> Check:
    """The data directory, which may not exist yet."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Check("disk", "fatal", f"no directory can be made in {existing}", "choose another directory with --data")
    free = free_bytes(directory)
    remedy = "" if free > 2 * least_bytes else "free disk space, or choose another directory with --data"
    return Check("disk", "warning" if remedy else "ok", f"{existing} has {free >> 20} MiB free", remedy)


def worst(found: Sequence[Check]) -> Level:
    """The worst result."""
    order: tuple[Level, ...] = ("ok", "warning", "fatal")
    return max((each.level for each in found), key=order.index, default="ok")
