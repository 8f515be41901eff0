"""Functions of the pool on a real node with virtual devices: right answers or clear refusals, whatever happens."""

import concurrent.futures
import os
import signal

import pytest
import torch

from overwinter.api.client import Client
from overwinter.core.errors import ConflictError, NoSpaceError, OverwinterError

from . import test_families
from .nodes import NodeProcess, ask, asked_while_killing, deploy, name_of
from .test_shared_runs import near

COUNT = 6
SIZE = 64 << 10


class Sibling(torch.nn.Module):
    """A model with a weight that all its variants share, and one of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.linspace(0.0, 1.0, SIZE), requires_grad=False)
        self.own = torch.nn.Parameter(torch.full((SIZE,), float(number)), requires_grad=False)

    def forward(self, x):
        return {"y": x * self.own[:4] + self.base[-4:]}


class Stranger(torch.nn.Module):
    """Another program."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.full((4 * SIZE,), float(number)), requires_grad=False)

    def forward(self, x):
        return {"y": x - self.own[:4] * 2}


MODELS = {f"f{number}": (Sibling if number % 2 else Stranger)(number) for number in range(COUNT)}


def put(node: NodeProcess, tenant: str = "default") -> None:
    for name, model in MODELS.items():
        deploy(node, name, model, tenant=tenant, device="pool")


class Full(torch.nn.Module):
    """A model with one weight of exactly a MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.full((1 << 18,), 3.0), requires_grad=False)

    def forward(self, x):
        return {"y": x * self.own[:4]}


class Weightless(torch.nn.Module):
    """A program without weights."""

    def forward(self, x):
        return {"y": x * x}


def executors(node: NodeProcess) -> list[int]:
    return processes_named(node, "ow-executor")


def processes_named(node: NodeProcess, wanted: str) -> list[int]:
    """Return the processes of a node with this name."""
    return [pid for pid in node.children() if name_of(pid) == wanted]


def right(node: NodeProcess, name: str, value: float) -> bool:
    x = torch.full((1, 4), value)
    with Client(node.url) as client, torch.inference_mode():
        return torch.equal(torch.from_numpy(client.infer(name, {"x": x})["y"].copy()), MODELS[name](x)["y"])


def ended_runs(node: NodeProcess) -> list[dict]:
    """Return the events of runs that ended."""
    return [step[1] for step in node.steps() if step[1]["type"] == "RunEnded"]


@pytest.mark.parametrize("links", [(), ("--device-peer-bandwidth", "50GB", "--devices-per-switch", "2")])
def test_functions_run_on_devices_that_hold_some_of_them(shared_node, links):
    # A device takes at most four of the models, which have 0.5 and 1 MiB.
    node = shared_node("--devices", "2", "--device-memory", "2MiB", *links)
    put(node)
    names = [f"f{number % COUNT}" for number in range(60)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda at: right(node, names[at], float(at)), range(len(names))))
    assert all(answers)
    assert 1 <= len(executors(node)) <= 2
    assert processes_named(node, "ow-worker") == []
    moved = [run.get("moved_bytes", 0) for run in ended_runs(node)]
    assert sum(moved) > 0
    assert 0 in moved


def test_a_variant_brings_only_the_weight_that_it_does_not_share(shared_node):
    node = shared_node("--devices", "1", "--device-memory", "8MiB")
    put(node)
    assert all(right(node, name, 1.0) for name in ("f1", "f3", "f5", "f1"))
    assert [run.get("moved_bytes", 0) for run in ended_runs(node)] == [8 * SIZE, 4 * SIZE, 4 * SIZE, 0]


def test_variants_share_runs_on_a_device_and_get_their_own_answers(shared_node):
    node = shared_node("--devices", "1", "--device-memory", "8MiB")
    for number in (1, 2, 3):
        test_families.put(node, number, device="pool", max_batch=8)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda at: near(node, at % 3 + 1, float(at)), range(240)))
    assert all(answers)
    runs = test_families.actions(node, "RunOnDevice")
    assert [run for run in runs if len(set(run.get("functions", ()))) > 1]
    assert max(len(run["requests"]) for run in runs) <= 8


def test_while_executors_die_answers_are_right_or_refusals_clear(shared_node):
    node = shared_node("--devices", "2", "--device-memory", "2MiB")
    put(node)

    assert all(asked_while_killing(lambda at: right(node, f"f{at % COUNT}", float(at)), 200, [executors] * 4, node))
    assert all(right(node, name, 3.0) for name in MODELS)


def test_blocks_that_are_lost_are_loaded_again(shared_node):
    node = shared_node("--devices", "2", "--device-memory", "4MiB")
    put(node)
    assert all(right(node, name, 1.0) for name in MODELS)
    for block in node.store().iterdir():
        block.unlink()
    pids, ended = executors(node), node.seen().count("WorkerExited")
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    # A request is tried again once, and the first try is to find that the blocks are lost.
    node.wait_for("WorkerExited", ended + len(pids))
    assert all(right(node, name, 2.0) for name in MODELS)


def test_tenants_take_turns_on_a_device(shared_node):
    node = shared_node("--devices", "1", "--device-memory", "4MiB")
    for tenant in ("ada", "bob"):
        deploy(node, f"{tenant}-f", MODELS["f1"], tenant=tenant, device="pool")
    x = torch.ones(1, 4)
    with torch.inference_mode():
        expected = MODELS["f1"](x)["y"]
    for _ in range(3):
        for tenant in ("ada", "bob"):
            answer = node.client.infer(f"{tenant}-f", {"x": x})["y"]
            assert torch.equal(torch.from_numpy(answer.copy()), expected)
    assert len(executors(node)) == 1
    assert {run.get("moved_bytes", 0) for run in ended_runs(node)} == {8 * SIZE}


def test_a_deploy_to_the_pool_is_refused_on_a_node_without_devices(node):
    with pytest.raises(ConflictError, match="no devices for 'f'.*--devices"):
        deploy(node, "f", MODELS["f1"], device="pool")


def test_a_function_says_why_it_is_not_served_after_a_restart_without_devices(make_node):
    node = make_node("--devices", "1", "--device-memory", "2MiB")
    deploy(node, "f", MODELS["f1"], device="pool")
    assert node.client.function("f")["state"] == "READY"
    node.stop()
    node.options = node.options[:2]
    node.start()
    said = node.client.function("f")
    assert said["state"] == "UNAVAILABLE"
    assert "this node has no devices: start the node with --devices, or deploy it with device" in said["reason"]
    with pytest.raises(OverwinterError, match="this node has no devices"):
        node.client.infer("f", {"x": torch.ones(1, 4)})


def test_a_deploy_is_refused_if_its_blocks_do_not_fit_on_any_device(shared_node):
    node = shared_node("--devices", "1", "--device-memory", "1MiB")
    model = Stranger(1)
    model.own = torch.nn.Parameter(torch.zeros(8 * SIZE), requires_grad=False)
    with pytest.raises(NoSpaceError, match="call of 'f' .* do not fit .*--device-memory"):
        deploy(node, "f", model, device="pool")
    assert node.client.functions() == []


def test_weights_that_fill_a_device_exactly_are_served(shared_node):
    node = shared_node("--devices", "1", "--device-memory", "1MiB")
    deploy(node, "f", Full(), device="pool")
    assert [ask(node, "f", float(number)) for number in range(3)] == [[3.0 * number] * 4 for number in range(3)]
    explained = node.client.explain("f")
    [tier] = [each for each in explained["tiers"] if each["tier"] == "virtual:0"]
    assert (tier["resident"], tier["missing"], explained["pool"]["nbytes"]) == (1 << 20, 0, 1 << 20)
    [seen] = node.client.devices()
    assert (seen["taken_bytes"], [each["nbytes"] for each in seen["functions"]]) == (1 << 20, [1 << 20])


def test_a_program_without_weights_runs_on_a_device(shared_node):
    node = shared_node("--devices", "2", "--device-memory", "2MiB")
    deploy(node, "weightless", Weightless(), device="pool")
    with Client(node.url) as client:
        for value in (1.0, 2.0, 3.0):
            assert (client.infer("weightless", {"x": torch.full((1, 4), value)})["y"] == value * value).all()
