"""A node with little memory for all workers: the worker that takes all of it is stopped, and others are not
affected.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.measure import memory_file_bytes
from benchmarks.siege.peak_memory import estimated_private_bytes
from overwinter.api.client import Client
from overwinter.core.errors import NoSpaceError

from .nodes import NodeProcess, Scale, ask, deploy, wait_until

BOUND = 400 << 20
GREEDY = """
import mmap, os, time
import torch

INPUTS = [{"name": "what", "datatype": "BYTES", "shape": [1]}]
OUTPUTS = [{"name": "found", "datatype": "BYTES", "shape": [1]}]
PART = 4 << 20
part = b"x" * PART
kept = []


def heap():
    held = []
    try:
        while True:
            held.append(bytearray(b"x") * PART)
    except MemoryError:
        # It may reach its own limit before the node's.
        buffers()


def buffers():
    for fd in range(3, 64):
        try:
            if os.fstat(fd).st_size > 1 << 32:
                kept.append(fd)
        except OSError:
            pass
    at = 0
    while True:
        for fd in kept:
            try:
                with mmap.mmap(fd, len(part), offset=at) as window:
                    window[:] = part
            except OSError:
                time.sleep(0.01)
        at += len(part)


def preprocess(inputs, state):
    if inputs["what"][0] in (b"heap", b"buffers"):
        globals()[inputs["what"][0].decode()]()
    return {"x": torch.zeros(1, 4)}


def postprocess(outputs, inputs, state):
    return {"found": [b"done"]}
"""


def taken(node: NodeProcess) -> int:
    """Return the memory of zygotes and workers that belongs to no file, shared pages counted once, and the buffers."""
    return estimated_private_bytes(node.children()) + memory_file_bytes(node.process.pid)


def attempt(node: NodeProcess, name: str, what: str) -> Exception | None:
    try:
        with Client(node.url) as client:
            client.infer(name, {"what": [what]})
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


@pytest.mark.parametrize("way", ["heap", "buffers"])
def test_a_worker_that_takes_all_memory_is_stopped_without_effect_on_others(make_node, way):
    node = make_node("--memory-bytes", str(BOUND))
    honest = {f"honest-{factor}": [2.0 * factor + 1.0] * 4 for factor in range(3)}
    for factor, name in enumerate(honest):
        deploy(node, name, Scale(float(factor)), keep_alive_s=600)
        assert ask(node, name, 2.0) == honest[name]
    workers = [node.client.explain(name)["workers"][0]["pid"] for name in honest]
    made = deploy(node, "greedy", handler=GREEDY, tenant="other", memory_mib=2048, timeout_s=60.0)
    assert "memory_mib 2048 is limited to 400" in made.warning
    bound = taken(node) + BOUND
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(attempt, node, "greedy", way)
        while not asked.done():
            assert [ask(node, name, 2.0) for name in honest] == list(honest.values())
    error = asked.result()
    assert isinstance(error, NoSpaceError), error
    assert all(word in str(error) for word in ("greedy@1", "memory_mib", "--memory-bytes"))
    wait_until(lambda: any("a worker of function greedy@1 took" in line for line in node.said))
    assert "stop" in [each["what"] for each in node.client.for_tenant("other").explain("greedy")["decisions"]]
    while taken(node) > bound:
        assert [ask(node, name, 2.0) for name in honest] == list(honest.values())
    assert [node.client.explain(name)["workers"][0]["pid"] for name in honest] == workers
