"""Malicious code of a function affects only that function."""

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch

from overwinter.api.client import Client
from overwinter.api.deployer import package
from overwinter.core.errors import CallerError, MachineError, OverwinterError, TooLargeError
from overwinter.model.export import export
from overwinter.node.deploys import PROGRAM_BYTES_MAX
from overwinter.store.blocks import address_of
from overwinter.store.manifest import Blob, Manifest
from overwinter.worker.channel import PACKET_BYTES_MAX

from .nodes import NodeProcess, Scale, ask, deploy, wait_until

SOCKET = """
import os, socket, msgspec

def channel():
    for fd in range(3, 100):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                return socket.socket(fileno=os.dup(fd))
        except OSError:
            pass

"""
FORGED = {
    "ready twice": "msgspec.msgpack.encode(['Ready'])",
    "load failed late": "msgspec.msgpack.encode(['LoadFailed', 'x', 'y'])",
    "unexpected answer": "msgspec.msgpack.encode(['Answer', 99, [], 0])",
    "no message": "b'\\xc1'",
}


@pytest.mark.parametrize("message", FORGED.values(), ids=FORGED.keys())
def test_forged_messages_cost_only_the_worker_that_sent_them(node: NodeProcess, message):
    # Not at its trial, which is on zeros.
    handler = (
        "def preprocess(inputs, state):\n"
        "    if inputs['x'].any():\n"
        f"        channel().send({message})\n"
        "    return inputs\n"
    )
    deploy(node, "forger", handler=SOCKET + handler)
    deploy(node, "healthy")
    base = node.zygotes()[0]
    with pytest.raises(MachineError, match="failed in every attempt"):
        ask(node, "forger")
    assert ask(node, "healthy") == [3.0] * 4
    # It may be slow to answer for some time.
    wait_until(node.client.ready)
    assert node.zygotes()[0] == base


def test_a_worker_whose_handler_closes_its_channel_is_ended_with_this_reason(shared_node):
    node = shared_node()
    handler = (
        "import os, time\n"
        "def preprocess(inputs, state):\n"
        "    for fd in range(3, 100) if inputs['x'].any() else []:\n"
        "        try:\n"
        "            if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'):\n"
        "                os.close(fd)\n"
        "        except OSError:\n"
        "            pass\n"
        "    time.sleep(600 * int(inputs['x'].any()))\n"
        "    return inputs\n"
    )
    deploy(node, "silent", handler=handler)
    with pytest.raises(MachineError, match="failed in every attempt.*closed its channel"):
        ask(node, "silent")


def test_a_handler_cannot_make_the_node_keep_descriptors(shared_node):
    node = shared_node()
    handler = SOCKET + (
        "import time\n"
        "def preprocess(inputs, state):\n"
        "    end = channel()\n"
        "    for _ in range(20 * int(inputs['x'].any())):\n"
        "        socket.send_fds(end, [b'+'], [end.fileno()] * 200)\n"
        "    return inputs\n"
    )
    deploy(node, "giver", handler=handler)
    before = repeated_sockets(node.process.pid)
    # Where system calls are filtered, the handler cannot send them.
    with pytest.raises(MachineError, match="PermissionError|failed in every attempt.*invalid"):
        ask(node, "giver")
    assert repeated_sockets(node.process.pid) <= before


def repeated_sockets(pid: int) -> set[str]:
    """The sockets for which a process has several descriptors. How many it has in all depends on the processes that are
    forked ahead.
    """
    links = Counter[str]()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            links[os.readlink(each)] += 1
    return {link for link, count in links.items() if link.startswith("socket:") and count > 1}


def test_a_handler_can_start_no_process_and_its_memory_is_limited(node: NodeProcess):
    handler = (
        "import mmap, os, subprocess, torch\n"
        "OUTPUTS = [{'name': 'did', 'datatype': 'BYTES', 'shape': [4]}]\n"
        "def attempt(step):\n"
        "    try:\n"
        "        return f'did {step()}'.encode()\n"
        "    except (OSError, MemoryError) as error:\n"
        "        return f'could not: {type(error).__name__}'.encode()\n"
        "def postprocess(outputs, inputs, state):\n"
        "    return {'did': [attempt(os.fork), attempt(lambda: subprocess.run(['/bin/true'])),\n"
        "        attempt(lambda: mmap.mmap(-1, 3 << 30)), attempt(lambda: os.memfd_create('x'))]}\n"
    )
    deploy(node, "forker", handler=handler, memory_mib=256)
    did = node.client.infer("forker", {"x": torch.zeros(1, 4)})["did"]
    if any("system calls are not filtered" in line for line in node.said):
        pytest.skip("this system does not filter system calls")
    assert [bytes(item).split(b":")[0] for item in did] == [b"could not"] * 4


def test_output_of_a_handler_is_in_the_nodes_log_with_its_source(node: NodeProcess):
    deploy(
        node, "talker", handler="def preprocess(inputs, state):\n    print('hello', flush=True)\n    return inputs\n"
    )
    ask(node, "talker")
    assert wait_until(lambda: any("worker talker@1: hello" in line for line in node.said))


def test_settings_out_of_range_are_refused_and_leave_nothing(node: NodeProcess):
    with pytest.raises(CallerError, match="memory_mib must be from 256 to"):
        deploy(node, "greedy", memory_mib=1 << 60)
    deploy(node, "greedy")
    assert node.client.function("greedy")["version"] == 1


class Turning(torch.nn.Module):
    """Computes something else for short inputs: a program exported for long ones must not answer them."""

    def forward(self, x):
        return {"y": x * 2.0 if x.shape[1] > 4 else x * 3.0}


def test_sizes_outside_the_programs_range_are_refused_not_answered_wrongly(node: NodeProcess):
    made = export(Turning(), {"x": torch.ones(2, 8)}, {"x": {0: "batch", 1: "n"}})
    package("turning", made.program, made.weights).upload(node.client)
    assert node.client.infer("turning", {"x": torch.ones(1, 6)})["y"].tolist() == [[2.0] * 6]
    with pytest.raises(CallerError, match="must be 5 to"):
        node.client.infer("turning", {"x": torch.ones(1, 4)})


def test_an_output_of_another_datatype_than_its_handler_declares_is_refused(node: NodeProcess):
    handler = (
        "import torch\n"
        "OUTPUTS = [{'name': 'y', 'datatype': 'FP32', 'shape': ['batch', 4]}]\n"
        "def postprocess(outputs, inputs, state):\n"
        "    return {'y': outputs['y'].double()}\n"
    )
    deploy(node, "liar", handler=handler)
    with pytest.raises(OverwinterError, match="FP64.*OUTPUTS.*has FP32"):
        ask(node, "liar")


def register_in_vain(url, manifest) -> None:
    with Client(url) as client, contextlib.suppress(OverwinterError):
        client.register(manifest)


def test_a_version_that_was_on_trial_when_the_daemon_died_is_not_kept(shared_node):
    node = shared_node()
    proven = deploy(node, "f", Scale(2.0)).version
    made = export(Scale(5.0), {"x": torch.zeros(2, 4)})
    stuck = package("f", made.program, made.weights, handler="import time\ntime.sleep(60)\n")
    for blob in stuck.manifest.blobs():
        node.client.put_block(blob.address, stuck.contents[blob.address]())
    asking = threading.Thread(target=register_in_vain, args=(node.url, stuck.manifest))
    asking.start()
    wait_until(lambda: any(f["version"] == proven + 1 for f in node.client.functions()))
    node.kill()
    asking.join()
    node.start()
    assert [f["version"] for f in node.client.functions()] == [proven]
    assert ask(node, "f") == [3.0] * 4


def test_a_restarted_node_releases_all_memory_of_removed_functions(shared_node):
    node = shared_node()
    deploy(node, "f", Scale(2.0))
    node.kill()
    node.start()
    assert node.stored_bytes() > 0
    node.client.remove("f")
    assert wait_until(lambda: node.stored_bytes() == 0)


def test_a_block_too_large_for_a_program_is_not_read_as_one(node: NodeProcess):
    data = bytes(PROGRAM_BYTES_MAX + 1)
    blob = Blob(address_of(data), len(data))
    assert node.client.put_block(blob.address, data)
    manifest = Manifest(name="large", tenant="default", program=blob, blocks=(), inputs=(), outputs=())
    with pytest.raises(TooLargeError, match=str(PROGRAM_BYTES_MAX)):
        node.client.register(manifest)


def test_a_function_with_too_many_assets_is_refused(node: NodeProcess):
    assets = {f"{number:06}{'a' * 120}": b"same" for number in range(PACKET_BYTES_MAX // 120)}
    with pytest.raises(TooLargeError, match="fewer assets"):
        deploy(node, "many", handler="def preprocess(inputs, state):\n    return inputs\n", assets=assets)
    assert "many" not in {function["name"] for function in node.client.functions()}


@pytest.mark.parametrize(
    "fields", [{"Host": "evil.example"}, {"Origin": "http://evil.example", "Content-Type": "text/plain"}]
)
def test_a_web_page_of_another_site_commands_nothing(node: NodeProcess, fields):
    deploy(node, "browsed")
    url = f"{node.url}/v2/repository/models/browsed/unload"
    assert httpx.post(url, headers=fields, trust_env=False).status_code == 403
    assert httpx.get(f"{node.url}/v2/health/live", headers=fields, trust_env=False).status_code == 200
    assert ask(node, "browsed") == [3.0] * 4
    assert httpx.post(url, headers={"Origin": node.url}, trust_env=False).status_code == 200
