"""Variants of one model share a worker: each answers as plain PyTorch does, and failures affect only their own
function.
"""

import concurrent.futures
import functools
import os
import signal
from contextlib import suppress

import pytest
import torch
from click.testing import CliRunner

from overwinter.cli.main import main
from overwinter.core.errors import OverwinterError

from .nodes import NodeProcess, deploy, wait_gone, wait_until
from .test_serving import SLOW


class Variant(torch.nn.Module):
    """A trunk that all variants share, and a head that differs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(4, 4096)
        torch.manual_seed(number)
        self.head = torch.nn.Linear(4096, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.head(torch.relu(self.trunk(x)))}


@functools.cache
def variant(number: int) -> Variant:
    """Create each once, because threads that create several at the same time share the seed."""
    return Variant(number).eval()


def put(node: NodeProcess, number: int, name: str = "", **options) -> None:
    deploy(node, name or f"v{number}", variant(number), **options)


def right(node: NodeProcess, number: int, name: str = "", wait_s: float = 0.0) -> bool:
    x = torch.tensor([[1.0, wait_s, 2.0, 3.0]])
    with torch.inference_mode():
        expected = variant(number)(x)["y"]
    return torch.equal(torch.from_numpy(node.client.infer(name or f"v{number}", {"x": x})["y"].copy()), expected)


def kill_trial_workers(node: NodeProcess) -> None:
    """Kill the workers of the trials, and wait until the scheduler knows that they have ended."""
    wait_until(lambda: node.worker_pids())
    for pid in node.worker_pids():
        # Processes that were forked ahead may end at any time.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: workers(actions(node, "StartWorker")) <= workers(events(node, "WorkerExited")))


def workers(steps: list[dict]) -> set[int]:
    return {each["worker"] for each in steps}


def events(node: NodeProcess, kind: str) -> list[dict]:
    return [event for event in (step[1] for step in node.steps()) if event["type"] == kind]


def actions(node: NodeProcess, kind: str) -> list[dict]:
    return [action for step in node.steps() for action in step[2] if action["type"] == kind]


def test_variants_share_a_worker_while_one_is_removed_and_one_updated(shared_node):
    node = shared_node()
    for number in (1, 2, 3):
        put(node, number, keep_alive_s=30.0)
    kill_trial_workers(node)
    assert all(right(node, number) for number in (1, 2, 3, 1, 2, 3))
    assert len(node.worker_pids()) == 1
    bound = actions(node, "Bind")
    assert {action["function"] for action in bound} == {"v2@1", "v3@1"}
    assert [a["start"] for a in actions(node, "Reply")] == ["host", "bound", "bound", "warm", "warm", "warm"]
    [process] = node.worker_pids()
    node.client.remove("v3")
    wait_until(lambda: "v3@1" in {action["function"] for action in actions(node, "Unbind")})
    assert right(node, 1)
    assert right(node, 2)
    put(node, 7, "v2", keep_alive_s=30.0)
    assert right(node, 7, "v2")
    assert right(node, 1)
    assert process in node.worker_pids()


def test_a_killed_worker_loses_no_request(shared_node):
    node = shared_node()
    for number in (11, 12):
        put(node, number, concurrency=2, keep_alive_s=30.0, max_workers=1)
    kill_trial_workers(node)
    assert right(node, 11)
    assert right(node, 12)
    [process] = node.worker_pids()
    before = len(events(node, "Arrived"))
    os.kill(process, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = [pool.submit(right, node, number) for number in (11, 12)]
        wait_until(lambda: len(events(node, "Arrived")) == before + 2)
        os.kill(process, signal.SIGKILL)
        assert all(answer.result() for answer in answers)


def test_a_variant_whose_runs_hang_twice_gets_a_worker_of_its_own(shared_node):
    node = shared_node()
    put(node, 21, handler=SLOW)
    put(node, 22, handler=SLOW, timeout_s=4.0)
    kill_trial_workers(node)
    for _ in range(2):
        assert right(node, 21)
        # A bind or a wake need not end within its timeout.
        node.client.load("v22")
        assert right(node, 22)
        [process] = node.worker_pids()
        # The request may also be refused at its deadline, which is at the same time.
        with pytest.raises(OverwinterError, match="v22@1 (hung|was not answered)"):
            right(node, 22, wait_s=60.0)
        wait_gone([process])
    assert [each["function"] for each in actions(node, "Explanation") if each["what"] == "isolate"] == ["v22@1"]
    binds = actions(node, "Bind")
    assert [each["function"] for each in binds] == ["v22@1"] * 2
    node.client.load("v22")
    for number in (22, 21, 22, 21):
        assert right(node, number)
    assert actions(node, "Bind") == binds
    assert len(node.worker_pids()) == 2


@pytest.mark.parametrize("apart", ["isolation", "tenant"])
def test_isolated_functions_and_other_tenants_never_share_a_worker(shared_node, apart):
    node = shared_node()
    for number in (31, 32):
        own = {"isolation": "function"} if apart == "isolation" else {"tenant": f"t{number}"}
        put(node, number, keep_alive_s=30.0, **own)
    for _ in range(2):
        assert right(node, 31)
        assert right(node, 32)
    assert len(node.worker_pids()) == 2
    assert actions(node, "Bind") == []


def test_the_cli_shows_shared_workers_their_bindings_and_the_reasons(shared_node):
    node = shared_node()
    for number in (41, 42):
        put(node, number, keep_alive_s=30.0)
    put(node, 43, "alone", isolation="function")
    kill_trial_workers(node)
    assert all(right(node, number) for number in (41, 42))
    client = node.client
    listed = {each["name"]: each for each in client.functions()}
    assert [(each["family"], each["members"]) for each in listed.values()] == [
        ("alone@1", 1),
        ("v41@1", 2),
        ("v41@1", 2),
    ]
    [worker] = listed["v42"]["workers"]
    assert (listed["v41"]["workers"], listed["alone"]["workers"]) == ([worker], [])

    sharing = client.function("v42")["sharing"]
    assert (sharing["name"], sharing["members"]) == ("v41@1", ["v41@1", "v42@1"])
    assert [(each["worker"], each["bound"]) for each in sharing["workers"]] == [(worker, ["v41@1", "v42@1"])]

    def seen_twice() -> tuple[dict, dict] | None:
        before, explained, after = client.activity(), client.explain("v42"), client.activity()
        return (before, explained) if before["private_bytes"] == after["private_bytes"] else None

    # The memory of the worker may be measured at any time.
    activity, explained = wait_until(seen_twice)
    busy = {each["name"]: each for each in activity["functions"]}
    assert [busy[name]["workers"] for name in ("v41", "v42", "alone")] == [[worker], [worker], []]
    assert busy["v41"]["private_bytes"] == busy["v42"]["private_bytes"] > 0
    assert activity["private_bytes"] == busy["v41"]["private_bytes"] + busy["v42"]["private_bytes"]
    assert [(each["family"], each["bound"]) for each in activity["workers"]] == [("v41@1", ["v41@1", "v42@1"])]

    [process] = explained["workers"]
    assert (explained["family"], explained["members"]) == ("v41@1", ["v41@1", "v42@1"])
    assert [(each["function"], each["doing"]) for each in process["bound"]] == [("v41@1", "idle"), ("v42@1", "idle")]
    assert [each["private_bytes"] for each in process["bound"]] == [busy["v42"]["private_bytes"]] * 2
    [why] = [each["why"] for each in explained["decisions"] if each["what"] == "bind"]
    assert f"worker {worker}" in why

    assert {each["function"]: each["family"] for each in client.usage() if each["function"] in listed} == {
        "v41": "v41@1",
        "v42": "v41@1",
        "alone": "alone@1",
    }
    for command in (["ps"], ["show", "v42"], ["top", "--once"], ["explain", "v42"], ["usage"]):
        shown = CliRunner().invoke(main, [*command, "--url", node.url])
        assert shown.exit_code == 0, shown.output
        assert "v41@1" in shown.stdout, command
