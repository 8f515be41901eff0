"""A node whose workers may have little together: who takes it all is stopped, and nobody else feels it."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overwinter.api.client import Client
from overwinter.core.errors import NoSpaceError

from .nodes import NodeProcess, Scale, ask, deploy

BOUND = 400 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
GREEDY = """
import mmap, os, time
import torch

INPUTS = [{"name": "what", "datatype": "BYTES", "shape": [1]}]
OUTPUTS = [{"name": "found", "datatype": "BYTES", "shape": [1]}]
PART = 4 << 20
kept = []


def heap():
    while True:
        kept.append(bytearray(os.urandom(1 << 12) * (PART >> 12)))


def trays():
    for fd in range(3, 64):
        try:
            if "overwinter-" in os.readlink(f"/proc/self/fd/{fd}"):
                kept.append(fd)
        except OSError:
            pass
    while True:
        for fd in kept:
            try:
                os.pwrite(fd, b"x" * PART, os.fstat(fd).st_size)
            except OSError:
                time.sleep(0.01)


def preprocess(inputs, state):
    if inputs["what"][0] in (b"heap", b"trays"):
        globals()[inputs["what"][0].decode()]()
    return {"x": torch.zeros(1, 4)}


def postprocess(outputs, inputs, state):
    return {"found": [b"done"]}
"""


def taken(node: NodeProcess) -> int:
    """What all workers have that is of no file, what they share with their zygotes counted in each, and their trays."""
    total = 0
    for pid in node.body_pids():
        try:
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += (resident - shared) * PAGE
    for entry in os.scandir(f"/proc/{node.process.pid}/fd"):
        try:
            if "memfd:overwinter-" in os.readlink(entry.path):
                total += os.stat(entry.path).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def attempt(node: NodeProcess, name: str, what: str) -> Exception | None:
    try:
        with Client(node.url) as client:
            client.infer(name, {"what": [what]})
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


@pytest.mark.parametrize("way", ["heap", "trays"])
def test_greedy_workers_are_stopped_and_an_honest_one_never_feels_it(make_node, way):
    node = make_node("--memory-bytes", str(BOUND))
    deploy(node, "honest", Scale(3.0), keep_alive_s=600)
    names = ("greedy", "glutton")
    for name in names:
        made = deploy(node, name, handler=GREEDY, tenant=name, memory_mib=2048, timeout_s=60.0)
        assert "memory_mib 2048 counts as 400" in made.warning
    assert ask(node, "honest", 2.0) == [7.0] * 4
    [worker] = node.client.explain("honest")["bodies"]
    with ThreadPoolExecutor() as pool:
        attempts = [pool.submit(attempt, node, name, way) for name in names]
        while not all(each.done() for each in attempts):
            assert ask(node, "honest", 2.0) == [7.0] * 4
    errors = [each.result() for each in attempts]
    stopped = [(name, error) for name, error in zip(names, errors, strict=True) if isinstance(error, NoSpaceError)]
    assert stopped, errors
    for name, error in stopped:
        assert all(word in str(error) for word in (f"{name}@1", "memory_mib", "--memory-bytes"))
        assert any(f"a worker of function {name}@1 took" in line for line in node.said)
        assert "stop" in [each["what"] for each in node.client.speaking_for(name).explain(name)["decisions"]]
    while taken(node) > BOUND:
        assert ask(node, "honest", 2.0) == [7.0] * 4
    [same] = node.client.explain("honest")["bodies"]
    assert same["pid"] == worker["pid"]
