"""Real deaths of a worker, of a zygote, and of the daemon: each request is answered or clearly refused."""

import concurrent.futures
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from overwinter.core.errors import MachineError
from overwinter.store.blocks import address_of
from tests.store.family import flip_bit

from .nodes import KILLED, NodeProcess, Scale, ask, deploy, wait_gone, wait_until
from .test_serving import SLOW, wait_for_answer


def running(node: NodeProcess) -> list[int]:
    """Return the workers that run a request of `slow`."""
    return [each["pid"] for each in node.client.explain("slow")["workers"] if each["runs"]]


def start_stopped_request(pool, node: NodeProcess, seconds: float):
    """Start a request in a worker that is stopped, so that it cannot answer; return its future and the worker."""
    node.client.load("slow")
    [worker] = [each["pid"] for each in node.client.explain("slow")["workers"]]
    os.kill(worker, signal.SIGSTOP)
    future = pool.submit(wait_for_answer, node, "slow", seconds)
    wait_until(lambda: running(node) == [worker])
    return future, worker


def test_a_request_survives_the_death_of_its_worker_once_and_is_refused_the_second_time(shared_node):
    node = shared_node()
    deploy(node, "slow", handler=SLOW, max_workers=1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer, worker = start_stopped_request(pool, node, 0.0)
        os.kill(worker, signal.SIGKILL)
        assert answer.result() == 3.0
        # Its worker is killed twice. The request does not end before that, however slow the machine is.
        answer, first = start_stopped_request(pool, node, 50.0)
        os.kill(first, signal.SIGKILL)
        [second] = wait_until(lambda: [pid for pid in running(node) if pid != first])
        os.kill(second, signal.SIGKILL)
        with pytest.raises(MachineError, match=f"failed in every attempt.*({KILLED})"):
            answer.result()
    assert wait_for_answer(node, "slow", 0.0) == 3.0


@pytest.mark.parametrize("which", [0, 1])
def test_a_request_survives_the_death_of_either_zygote(shared_node, which):
    node = shared_node()
    deploy(node, "plain", keep_alive_s=0.0)
    deploy(node, "slow", handler=SLOW, max_workers=1)
    assert ask(node, "plain") == [3.0] * 4
    zygotes = wait_until(lambda: len(found := node.zygotes()) == 2 and found)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer, _ = start_stopped_request(pool, node, 0.0) if which == 0 else (None, None)
        os.kill(zygotes[which], signal.SIGKILL)
        assert ask(node, "plain") == [3.0] * 4
        assert wait_for_answer(node, "slow", 0.0) == 3.0
        assert answer is None or answer.result() == 3.0
    wait_until(node.client.ready)
    wait_gone([zygotes[which]])


def test_a_killed_daemon_loses_no_function_and_leaks_no_memory(shared_node):
    node = shared_node()
    first = deploy(node, "plain", Scale(2.0), keep_alive_s=0.0).version
    deploy(node, "plain", Scale(4.0), keep_alive_s=0.0)
    deploy(node, "slow", handler=SLOW, max_workers=1)
    held, inodes = node.stored_bytes(), {path.stat().st_ino for path in node.store().iterdir()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer, worker = start_stopped_request(pool, node, 50.0)
        below = node.children()
        node.kill()
        with pytest.raises(MachineError):
            answer.result()
    assert worker in below
    (node.store() / "half-written.draft").write_bytes(b"left by a crash")
    node.start()
    assert ask(node, "plain") == [5.0] * 4
    assert ask(node, "plain", version=first) == [3.0] * 4
    assert wait_for_answer(node, "slow", 0.0) == 3.0
    assert node.stored_bytes() == held
    assert {path.stat().st_ino for path in node.store().iterdir()} == inodes
    starts = [action["start"] for step in node.steps() for action in step[2] if action["type"] == "Reply"]
    assert starts[-3:] == ["host"] * 3


def test_blocks_lost_from_memory_are_loaded_again(shared_node):
    node = shared_node()
    deploy(node, "f", keep_alive_s=0.0)
    wait_until(lambda: not node.client.function("f")["workers"])
    for path in node.store().iterdir():
        path.unlink()
    assert ask(node, "f") == [3.0] * 4
    assert node.stored_bytes() > 65536


def test_a_damaged_block_on_disk_is_found_by_a_request_and_repaired_by_a_deploy(shared_node):
    node = shared_node()
    version = deploy(node, "f", Scale(3.0), keep_alive_s=0.0).version
    [block] = (node.data / "blocks").rglob(large_block(node).name)
    node.stop()
    content = bytearray(block.read_bytes())
    content[100] ^= 1
    block.chmod(0o600)
    block.write_bytes(content)
    node.start()
    with pytest.raises(MachineError, match=rf"function f@{version}: a block is damaged on disk.*deploy") as refused:
        ask(node, "f")
    # Addresses are written to the log only.
    assert block.name not in str(refused.value)
    wait_until(lambda: any(block.name in line for line in node.said))
    assert block.name not in json.dumps(node.client.explain("f"))
    made = deploy(node, "f", Scale(3.0))
    assert made.added_bytes == len(content)
    assert ask(node, "f") == [4.0] * 4


def large_block(node: NodeProcess) -> Path:
    """Return the weight that is a separate block, in memory."""
    [block] = [path for path in node.store().iterdir() if path.stat().st_size > 65536]
    return block


def test_a_bit_that_flips_in_memory_is_found_while_the_function_serves(make_node):
    node = make_node("--verify-share", "1")
    deploy(node, "f", Scale(3.0), keep_alive_s=600)
    [worker] = node.worker_pids()
    assert ask(node, "f") == [4.0] * 4
    block = large_block(node)
    # The exponent of the first factor.
    flip_bit(block, 3)
    wait_until(lambda: any("changed in memory" in line for line in node.said))
    assert ask(node, "f") == [4.0] * 4
    wait_gone([worker])
    [said] = [line for line in node.said if "changed in memory" in line]
    assert block.name in said
    assert "of f@1" in said
    assert 'overwinter_blocks_damaged_total{tier="host"} 1.0' in node.client.metrics()


def answer_of(node: NodeProcess) -> list[float] | None:
    with suppress(MachineError):
        return ask(node, "f")
    return None


class Plus(torch.nn.Module):
    def forward(self, x):
        return {"y": x + 1.0}


def test_a_program_with_a_flipped_bit_is_never_compiled(make_node):
    node = make_node()
    deploy(node, "f", Plus(), keep_alive_s=600)
    assert ask(node, "f") == [2.0] * 4
    [_, zygote] = wait_until(lambda: len(found := node.zygotes()) == 2 and found)
    constant = b"\xcb\x3f\xf0" + bytes(6)
    found = [(path, path.read_bytes().find(constant)) for path in node.store().iterdir()]
    [(block, at)] = [(path, at) for path, at in found if at > 0]
    for pid in (zygote, *node.worker_pids()):
        # A worker ends with its zygote.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    flip_bit(block, at + 2)
    # With the changed constant the answer would be 2.0625. Until the node finds the change, requests may be refused.
    while not any("changed in memory and is read" in line for line in node.said):
        assert answer_of(node) in (None, [2.0] * 4)
    assert wait_until(lambda: answer_of(node)) == [2.0] * 4


def test_a_bit_that_flipped_while_no_node_ran_is_found_before_the_block_is_used(make_node):
    node = make_node("--verify-share", "0")
    deploy(node, "f", Scale(3.0))
    block = large_block(node)
    node.kill()
    flip_bit(block, 3)
    node.start()
    assert ask(node, "f") == [4.0] * 4
    wait_until(lambda: any(block.name in line for line in node.said))


def test_a_deploy_loads_blocks_that_were_lost_from_memory(shared_node):
    node = shared_node()
    first = deploy(node, "f", Scale(3.0))
    large_block(node).unlink()
    assert deploy(node, "f", Scale(3.0)).version == first.version + 1
    assert ask(node, "f") == [4.0] * 4


def test_blocks_that_no_function_needs_are_removed_from_disk(make_node):
    node = make_node("--unneeded-keep-s", "1.5")
    block = b"needed by none"
    # It may be removed before this test looks for it.
    assert node.client.put_block(address_of(block), block)
    wait_until(lambda: not list((node.data / "blocks").rglob(address_of(block))))
    assert node.client.missing([address_of(block)]) == [address_of(block)]


def test_an_upload_left_by_a_crash_is_removed(shared_node):
    node = shared_node()
    node.stop()
    draft = node.data / "incoming" / f"{'0' * 64}.half"
    draft.write_bytes(b"half")
    node.start()
    assert not draft.exists()


def test_a_full_host_store_refuses_a_load_and_affects_no_other_function(make_node):
    node = make_node("--host-bytes", "200KiB")
    deploy(node, "small", Scale(2.0))
    with pytest.raises(MachineError, match="needs? .*bytes"):
        deploy(node, "large", Scale(2.5, size=100_000))
    assert ask(node, "small") == [3.0] * 4
    assert [function["name"] for function in node.client.functions()] == ["small"]


def test_a_crash_in_native_code_is_reported_by_its_signal_and_affects_no_other_function(node: NodeProcess):
    # A trial runs it on zeros, which it passes on.
    handler = (
        "import ctypes\n"
        "def preprocess(inputs, state):\n"
        "    return ctypes.string_at(0) if inputs['x'].any() else inputs\n"
    )
    deploy(node, "crashing", handler=handler)
    deploy(node, "healthy")

    def refusal() -> str:
        with pytest.raises(MachineError, match="failed in every attempt") as refused:
            ask(node, "crashing")
        return str(refused.value)

    # A zygote that is slow to report the signal is not waited for.
    wait_until(lambda: "signal 11" in refusal())
    assert ask(node, "healthy") == [3.0] * 4


def test_two_nodes_cannot_share_a_data_directory(make_node, shared_node):
    node = shared_node()
    deploy(node, "f")
    with pytest.raises(AssertionError, match="another node already serves"):
        make_node(data=node.data)
    assert ask(node, "f") == [3.0] * 4
