"""Which files a worker may read, its limits, and what a tenant's zygote may do that a worker may not."""

import json
import os
import subprocess
import sys

from overwinter.worker.sandbox import uid_of

CODE = """
import sys
sys.path.append(sys.argv[1])
from overwinter.worker.sandbox import WorkerLimits, Sandbox
box = Sandbox()
box.enter(None, WorkerLimits(4 << 30, 1 << 30), [])
import package_of_a_user
print(package_of_a_user.answer)
"""


def test_packages_outside_of_pythons_directory_can_be_imported(tmp_path):
    place = tmp_path / "site-packages"
    place.mkdir()
    (place / "package_of_a_user.py").write_text("answer = 42")
    run = subprocess.run([sys.executable, "-c", CODE, str(place)], capture_output=True, text=True, check=False)
    assert run.stdout == "42\n", run.stderr


STAGES = """
import json, os, resource
from overwinter.worker.sandbox import WorkerLimits, Sandbox, uid_of

def attempt(step):
    try:
        return str(step())
    except Exception as error:
        return type(error).__name__

def forked():
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def tell():
    print(json.dumps({
        "fork": attempt(forked),
        "own smaps": attempt(lambda: bool(open("/proc/self/smaps").read(1))),
        "list processes": attempt(lambda: os.listdir("/proc")),
        "passwd": attempt(lambda: open("/etc/passwd").read(1)),
        "execute": attempt(lambda: os.execv("/bin/true", ["true"])),
        "more": attempt(lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 50, 1 << 50))),
        "data": resource.getrlimit(resource.RLIMIT_DATA)[0],
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "user": os.getuid(),
    }), flush=True)

box = Sandbox()
box.enter_as_zygote(uid_of(1), WorkerLimits(1 << 44, 1 << 30), [])
tell()
if os.fork() == 0:
    box.enter(None, WorkerLimits(1 << 30, 1 << 30), [])
    tell()
    os._exit(0)
os.wait()
"""


def test_a_tenants_zygote_may_fork_and_the_worker_that_it_forks_may_not_and_gets_less_memory():
    run = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, check=False)
    zygote, worker = (json.loads(line) for line in run.stdout.splitlines())
    assert (zygote["fork"], worker["fork"]) == ("7", "PermissionError")
    assert (zygote["own smaps"], worker["own smaps"]) == ("True", "PermissionError")
    assert zygote["user"] == worker["user"] == (uid_of(1) or os.getuid())
    # Never more than the machine has, however much was requested.
    assert worker["data"] < zygote["data"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for process in (zygote, worker):
        assert {process[what] for what in ("list processes", "passwd", "execute")} == {"PermissionError"}
        assert process["more"] in ("ValueError", "PermissionError")
        assert process["descriptors"] <= 4096
