"""A function's own code tries to reach what is not its own, and cannot."""

import json
import sys

import pytest

from .nodes import NodeProcess, Scale, deploy

SPY = """
import ctypes, glob, json, os, resource, socket
import torch

INPUTS = [{"name": "what", "datatype": "BYTES", "shape": [1]}]
OUTPUTS = [{"name": "found", "datatype": "BYTES", "shape": [1]}]


def attempt(step):
    try:
        return f"did: {step()!r}"
    except BaseException as error:
        return f"could not: {type(error).__name__}: {error}"


def connect(address, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as end:
        end.settimeout(2)
        end.connect(address)
        return "connected"


def descriptors():
    found = []
    for fd in range(3, 4096):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return found


def preprocess(inputs, state):
    asked = json.loads(inputs["what"][0])
    found = {
        "list store": attempt(lambda: os.listdir(asked["store"])),
        "read block": attempt(lambda: open(asked["block"], "rb").read(8)),
        "list data": attempt(lambda: os.listdir(asked["data"])),
        "read catalog": attempt(lambda: open(asked["data"] + "/catalog.sqlite", "rb").read(8)),
        "network": attempt(lambda: connect(("127.0.0.1", asked["port"]))),
        "write file": attempt(lambda: open("/tmp/overwinter-was-here", "w")),
        "write home": attempt(lambda: open(os.path.dirname(torch.__file__) + "/was-here", "w")),
        "read passwd": attempt(lambda: open("/etc/passwd").read()),
        "see data": attempt(lambda: os.stat(asked["data"])),
        "see passwd": attempt(lambda: os.stat("/etc/passwd")),
        "limit daemon": attempt(lambda: resource.prlimit(asked["daemon"], resource.RLIMIT_CPU, (9999, 9999))),
        "kill daemon": attempt(lambda: os.kill(asked["daemon"], 9)),
        "kill zygote": attempt(lambda: os.kill(os.getppid(), 9)),
        "read daemon": attempt(lambda: open(f"/proc/{asked['daemon']}/mem", "rb").read(1)),
        "other worker": attempt(lambda: open(f"/proc/{asked['other']}/mem", "rb").read(1)),
        "become root": attempt(lambda: os.setuid(0)),
        "memory": attempt(lambda: len(bytearray(asked["memory"]))),
        "import": attempt(lambda: __import__("wave").__name__),
    }
    found["descriptors"] = descriptors()
    found["processes"] = [pid for pid in range(1, 4096) if os.path.exists(f"/proc/{pid}")]
    found["process"] = os.getpid()
    found["uid"] = os.getuid()
    state.update(found)
    return {"x": torch.zeros(1, 4)}


def setup(assets):
    return {}


def postprocess(outputs, inputs, state):
    return {"found": [json.dumps(state).encode()]}
"""


@pytest.fixture(scope="module")
def lacking(node: NodeProcess) -> list[str]:
    """What the node said at its start that it cannot apply on this system."""
    return [line for line in node.said if "not fully contained" in line]


@pytest.fixture(scope="module")
def found(node: NodeProcess, lacking):
    deploy(node, "victim", Scale(41.0), tenant="other", keep_alive_s=600)
    deploy(node, "spy", handler=SPY, tenant="spy", memory_mib=1024)
    blocks = sorted(node.store().iterdir(), key=lambda path: path.stat().st_size)
    asked = {
        "store": str(node.store()),
        "block": str(blocks[-1]),
        "data": str(node.data),
        "port": int(node.url.rpartition(":")[2]),
        "daemon": node.process.pid,
        "other": node.worker_pids()[0],
        "memory": 2 << 30,
    }
    [result] = node.client.infer("spy", {"what": [json.dumps(asked)]})["found"]
    return json.loads(result)


FILES = ["list store", "read block", "list data", "read catalog", "write file", "write home", "read passwd"]


@pytest.mark.parametrize("what", FILES)
def test_a_handler_opens_no_files_except_pythons(found, lacking, what):
    need(lacking, "Landlock")
    assert found[what].startswith("could not: ")


def test_a_handler_has_no_network(found, lacking):
    need(lacking, "network")
    assert found["network"].startswith("could not")


@pytest.mark.parametrize("what", ["see data", "see passwd"])
def test_a_handler_sees_no_files_outside_its_sandbox(found, lacking, what):
    need(lacking, "files")
    assert found[what].startswith("could not: FileNotFoundError")


@pytest.mark.parametrize(
    "what", ["limit daemon", "kill daemon", "kill zygote", "read daemon", "other worker", "become root"]
)
def test_a_handler_affects_no_other_process(found, lacking, what):
    need(lacking, "not filtered")
    assert found[what].startswith("could not")


def test_a_handler_runs_as_a_separate_user(found, lacking):
    need(lacking, "user")
    assert found["uid"] >= 0x70000000


def test_a_handler_gets_no_more_memory_than_its_limit(found):
    assert found["memory"].startswith("could not: MemoryError")


def test_a_handler_has_no_inherited_descriptors(found):
    own = ("/memfd:overwinter-in-", "/memfd:overwinter-out-", "socket:", sys.base_prefix, sys.prefix)
    assert [link for link in found["descriptors"] if not link.startswith(own)] == []
    assert sum(link.startswith("socket:") for link in found["descriptors"]) == 1


def test_a_handler_can_import_pythons_modules(found):
    assert found["import"] == "did: 'wave'"


def need(lacking: list[str], word: str) -> None:
    for reason in lacking:
        if word in reason:
            pytest.skip(reason)
