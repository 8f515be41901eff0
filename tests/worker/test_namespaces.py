"""What a zygote and its forks see of the system, and how they end."""

import json
import os
import subprocess
import sys

import pytest

BEGIN = """
import ctypes, json, os, sys, time
from overwinter.worker import launch, namespaces, python_paths
missing = namespaces.enter()
if missing:
    print(json.dumps({"missing": missing}))
    sys.exit()
launch._fork(os.open("/dev/null", os.O_RDONLY))
"""
SEE = (
    BEGIN
    + """
missing = namespaces.show_only(python_paths.python_paths())
namespaces.drop_privileges()

def attempt(step):
    try:
        return step()
    except OSError as error:
        return type(error).__name__

here, there = os.pipe()
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps({
    "missing": missing,
    "process": os.getpid(),
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "root": sorted(os.listdir("/")),
    "passwd": attempt(lambda: str(os.stat("/etc/passwd"))),
    "outside": attempt(lambda: str(os.stat(sys.argv[1]))),
    "write": attempt(lambda: open(sys.prefix + "/was-here", "w").name),
    "make": attempt(lambda: os.mkdir("/was-here")),
    "python": os.path.exists(json.__file__) and os.path.exists(sys.executable),
    "null": attempt(lambda: open("/dev/null", "w").write("x")),
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line],
    "user": os.getuid(),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapPrm"))],
    "mount": libc.mount(b"none", b"/", b"tmpfs", 0, None),
    "packets": attempt(lambda: str(__import__("socket").socket(17, 3))),
}), flush=True)
"""
)
FALL_BACK = (
    BEGIN
    + """
mount = namespaces._mount

def without_proc(source, target, kind, flags, options=None):
    if kind == "proc":
        raise OSError("no new /proc")
    mount(source, target, kind, flags, options)

namespaces._mount = without_proc
missing = namespaces.show_only(python_paths.python_paths(), writable_proc=True)
try:
    written = open("/proc/self/comm", "w").write("changed")
except OSError as error:
    written = type(error).__name__
print(json.dumps({"missing": missing, "root": sorted(os.listdir("/")), "written": written}), flush=True)
"""
)
STAY = (
    BEGIN
    + """
if os.fork() == 0:
    time.sleep(600)
os.write(1, b"up")
time.sleep(600)
"""
)


def started(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    [result, _] = started(SEE, str(tmp_path_factory.mktemp("outside"))).communicate()
    found = json.loads(result)
    if "process" not in found:
        pytest.skip(found["missing"][0])
    return found


def test_only_the_given_files_can_be_seen_and_no_file_can_be_created(seen):
    assert seen["missing"] == []
    assert {"home", "tmp", "var"}.isdisjoint({name for name in seen["root"] if not sys.prefix.startswith(f"/{name}/")})
    assert (seen["passwd"], seen["outside"]) == ("FileNotFoundError", "FileNotFoundError")
    assert (seen["write"], seen["make"]) == ("OSError", "OSError")
    assert seen["python"]
    assert seen["null"] == 1


def test_without_a_new_proc_the_old_one_is_shown_and_cannot_be_written(seen):
    with started(FALL_BACK) as process:
        found = json.loads(process.stdout.read())
    assert found["missing"] == ["/proc shows other processes: no new /proc"]
    assert found["root"] == seen["root"]
    assert found["written"] == "OSError"


UNMAPPED = """
import json, os
from overwinter.worker import namespaces

def refused(path, mode="r"):
    if isinstance(path, str) and path.startswith("/proc/self/"):
        raise PermissionError("refused")
    return open(path, mode)

if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
namespaces.open = refused
before = [os.readlink(f"/proc/self/ns/{each}") for each in ("user", "mnt", "net")]
missing = namespaces.enter()
print(json.dumps({
    "missing": missing,
    "unchanged": before == [os.readlink(f"/proc/self/ns/{each}") for each in ("user", "mnt", "net")],
}))
"""


def test_a_user_whom_the_system_does_not_map_stays_outside_the_namespaces_and_a_message_says_so():
    with started(UNMAPPED) as process:
        found = json.loads(process.stdout.read())
    [missing] = found["missing"]
    if "unshare" in missing:
        pytest.skip("this system gives no namespaces to ordinary users")
    assert missing == "no namespaces for network, processes and files: the user cannot be mapped: refused"
    assert found["unchanged"]


def test_the_first_process_of_a_namespace_sees_only_itself(seen):
    assert seen["process"] == 1
    assert seen["processes"] == [1]


def test_a_process_of_a_namespace_has_no_network_and_no_capabilities(seen):
    assert seen["interfaces"] == ["lo"]
    assert seen["user"] == os.getuid()
    assert {int(each, 16) for each in seen["capabilities"]} == {0}
    assert seen["mount"] == -1
    assert seen["packets"] == "PermissionError"


def test_all_processes_of_a_namespace_end_with_the_process_that_started_them():
    with started(STAY) as outer:
        begun = outer.stdout.read(2)
        if begun == b'{"':
            pytest.skip("this system gives no namespaces")
        assert begun == b"up"
        outer.kill()
        # A process that still ran would hold the other end of the pipe.
        assert outer.stdout.read() == b""
