"""What a real node with devices tells of them."""

import json
import urllib.request
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from overwinter.cli.main import main

from .nodes import NodeProcess, wait_until
from .test_pool import MODELS, SIZE, put, right


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[NodeProcess]:
    """A node with one used device and one unused, after each model ran once and one of them twice."""
    node = NodeProcess(tmp_path_factory.mktemp("seen"), "--devices", "2", "--device-memory", "8MiB")
    try:
        put(node)
        for name in ("f1", "f3", "f1", "f0", "f2", "f4", "f5"):
            assert right(node, name, 1.0)
        yield node
    finally:
        node.clean()


def told(node: NodeProcess, *command: str) -> str:
    shown = CliRunner().invoke(main, [*command, "--url", node.url])
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def test_every_view_says_the_same_of_the_devices(pool: NodeProcess):
    # All three siblings share a weight.
    moved = 3 * 4 * 4 * SIZE + (1 + 3) * 4 * SIZE
    devices = wait_until(lambda: (seen := pool.client.devices()) and seen[0]["history"]["runs"] == 7 and seen)
    assert sum(each["history"]["moved_bytes"] for each in devices) == moved
    used = devices[0]
    assert (used["state"], used["tenant"], used["failures"], used["history"]["hits"]) == ("idle", "default", 0, 1)
    assert (used["taken_bytes"], used["shared_bytes"]) == (moved, 4 * SIZE)
    assert {each["function"] for each in used["functions"]} == {f"{name}@1" for name in MODELS}
    assert pool.client.activity()["devices"][0] == used
    assert pool.client.function("f1")["devices"] == [used["name"]]

    explained = pool.client.explain("f1")
    assert (explained["pool"]["runs"], explained["pool"]["hit_ratio"]) == ({used["name"]: 2}, 0.5)
    assert explained["pool"]["last_device"].startswith(f"{used['name']}: all its blocks were there")
    [on_device] = [each for each in explained["tiers"] if each["tier"] == used["name"]]
    assert (on_device["missing"], on_device["shared"]) == (0, 4 * SIZE)

    usage = {each["function"]: each["device"] for each in pool.client.usage()}
    assert (usage["f1"]["moved_bytes"], usage["f3"]["moved_bytes"]) == (8 * SIZE, 4 * SIZE)
    for each in usage.values():
        assert each["billed_ms"] == pytest.approx(each["device_ms"] + 0.1 * each["idle_ms"])
        assert min(each["device_ms"], each["idle_ms"], each["device_byte_s"]) > 0

    with urllib.request.urlopen(f"{pool.url}/metrics") as answer:
        text = answer.read().decode()
    assert f'overwinter_device_functions{{device="{used["name"]}"}} 6.0' in text
    assert f'overwinter_device_hits_total{{device="{used["name"]}",function="f1"}} 1.0' in text


def test_the_commands_show_the_devices(pool: NodeProcess):
    assert len(json.loads(told(pool, "devices", "--json"))) == 2
    shown = told(pool, "devices")
    assert all(f"{name}@1" in shown for name in MODELS)
    assert "from the host, latency" in shown
    assert "RUNNING" in told(pool, "top", "--once")
    assert "pool: " in told(pool, "ps")
    assert "last device" in told(pool, "explain", "f1")
    assert "DEVICE BILLED" in told(pool, "usage")
