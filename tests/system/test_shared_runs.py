"""Requests of variants of a model share runs: each gets its own answer, whatever another does in the same run."""

import concurrent.futures
import http.client
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from click.testing import CliRunner

from overwinter.cli.main import main
from overwinter.core.errors import OverwinterError

from .nodes import NodeProcess, let_continue, stopped_workers, wait_until
from .test_families import actions, kill_trial_workers, put, variant

MOODY = """
import os, signal, time

def preprocess(inputs, state):
    mood = float(inputs["x"][0, 1])
    if mood == -1:
        raise ValueError("moody")
    if mood == -2:
        os._exit(7)
    if mood == -4:
        os.kill(os.getpid(), signal.SIGSTOP)
        mood = 0.5
    time.sleep(60 if mood == -3 else mood)
    return inputs
"""
FAILS, KILLS, HANGS, STOPS = -1.0, -2.0, -3.0, -4.0

Answers = Mapping[int, concurrent.futures.Future[bool]]


def given(mood: float) -> torch.Tensor:
    return torch.tensor([[1.0, mood, 2.0, 3.0]])


def near(node: NodeProcess, number: int, mood: float = 0.0) -> bool:
    x = given(mood)
    with torch.inference_mode():
        expected = variant(number)(x)["y"]
    return torch.allclose(torch.from_numpy(node.client.infer(f"v{number}", {"x": x})["y"].copy()), expected, atol=1e-5)


def state(node: NodeProcess, key: str) -> int:
    return sum(each[key] for each in node.client.activity()["functions"])


@pytest.fixture
def node(shared_node, request) -> NodeProcess:
    """Return a node with three variants, awake in one worker; another worker starts only if that one hangs or ends.
    The parameter is the timeout of the requests to the second variant.
    """
    timeouts = {2: getattr(request, "param", 60.0)}
    node = shared_node("--workers-max", "2", "--cores", "1")
    for number in (1, 2, 3):
        timeout_s = timeouts.get(number, 60.0)
        put(node, number, handler=MOODY, keep_alive_s=30.0, max_batch=8, timeout_s=timeout_s)
    kill_trial_workers(node)
    assert all(near(node, number) for number in (1, 2, 3))
    # A worker of the trials may still be ending.
    wait_until(lambda: len(node.worker_pids()) == 1)
    return node


@contextmanager
def together(node: NodeProcess, moods: Mapping[int, float], *others: Callable[[], None]) -> Iterator[Answers]:
    """Send requests while the worker is stopped in a run, so that they share its next run; `others` send one each."""
    # A worker of an earlier test may not have ended yet.
    wait_until(lambda: len(node.worker_pids()) == 1)
    [worker] = node.worker_pids()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        os.kill(worker, signal.SIGSTOP)
        first = pool.submit(near, node, 1)
        wait_until(lambda: state(node, "running") == 1)
        answers = {number: pool.submit(near, node, number, mood) for number, mood in moods.items()}
        for send in others:
            send()
        wait_until(lambda: state(node, "queued") == len(moods) + len(others))
        os.kill(worker, signal.SIGCONT)
        yield answers
        concurrent.futures.wait(answers.values())
        assert first.result()


def name_in(function: str) -> str:
    """Return the name without the version."""
    return function.partition("@")[0]


def shared(node: NodeProcess) -> list[dict]:
    return [run for run in actions(node, "Run") if len(set(run.get("functions", ()))) > 1]


def test_the_cli_shows_shared_runs_and_their_costs(node):
    with together(node, {1: 0.0, 2: STOPS, 3: 0.0}) as answers:
        wait_until(lambda: stopped_workers(node) and state(node, "running") == 3)
        [worker] = [each for each in node.client.explain("v3")["workers"] if each["runs"]]
        doing = {name_in(each["function"]): (each["doing"], each["runs"], each["requests"]) for each in worker["bound"]}
        assert doing == {f"v{number}": ("running", 1, 1) for number in (1, 2, 3)}
        assert (worker["runs"], worker["requests"]) == (1, 3)
        let_continue(node, answers[2])
    assert all(answer.result() for answer in answers.values())
    results = {number: node.client.explain(f"v{number}")["shared"] for number in (1, 2, 3)}
    assert [(each["runs"], each["requests"]) for each in results.values()] == [(1, 1)] * 3
    assert [each["all_runs"] for each in results.values()] == [3, 2, 2]
    assert results[2]["shared_with"] == {"v1": 1, "v3": 1}
    assert results[1]["whole_s"] > 0.5
    assert sum(each["charged_s"] for each in results.values()) == pytest.approx(results[1]["whole_s"])
    assert results[1]["charged_s"] == pytest.approx(results[2]["charged_s"])
    busy = {each["name"]: each["shared"] for each in node.client.activity()["functions"]}
    assert busy == {"v1": pytest.approx(1 / 3), "v2": 0.5, "v3": 0.5}
    assert 'overwinter_shared_runs_total{function="v2"} 1.0' in node.client.metrics()
    shown = CliRunner().invoke(main, ["explain", "v2", "--url", node.url])
    assert "1 of 2, 1 of 2 requests" in shown.stdout
    # The usage of a function includes its charge for a shared run, whichever function led the run.
    used = {each["function"]: each["core_ms"] for each in node.client.usage()}
    assert used["v2"] >= results[2]["charged_s"] * 1000 * 0.99


@pytest.mark.parametrize(("node", "moods"), [(60.0, (FAILS, KILLS)), (6.0, (HANGS,))], indirect=["node"])
def test_a_failure_death_or_hang_in_a_shared_run_costs_others_at_most_one_retry(node, moods):
    for number, mood in enumerate(moods, 1):
        with together(node, {2: mood, 1: 0.0, 3: 0.0}) as answers:
            pass
        assert (answers[1].result(), answers[3].result()) == (True, True)
        assert isinstance(answers[2].exception(), OverwinterError)
        assert len([run for run in shared(node) if "v2" in map(name_in, run["functions"])]) == number
        assert len(actions(node, "Refuse")) == number
    tries = Counter(id_ for run in actions(node, "Run") for id_ in run["requests"])
    assert max(tries.values()) <= 2
    assert near(node, 1)
    assert near(node, 3)


def test_a_removal_an_update_or_a_disconnect_during_a_shared_run_affects_no_other_request(node):
    """One function is removed, one updated, and the caller of one disconnects: the others get their answers."""
    caller = http.client.HTTPConnection(node.url.removeprefix("http://"))
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 0.0, 2.0, 3.0]}
    ask = partial(caller.request, "POST", "/v2/models/v1/infer", json.dumps({"inputs": [tensor]}))
    with together(node, {1: STOPS, 3: 0.0, 2: 0.0}, ask) as answers:
        wait_until(lambda: shared(node) and stopped_workers(node) and state(node, "running") == 4)
        # This disconnects immediately, not at the garbage collection.
        caller.sock.shutdown(socket.SHUT_RDWR)
        caller.close()
        node.client.remove("v3")
        put(node, 7, "v2", handler=MOODY, keep_alive_s=30.0, max_batch=8)
        let_continue(node, answers[1])
    assert answers[1].result()
    assert answers[2].result()
    failure = answers[3].exception()
    assert answers[3].result() if failure is None else "removed" in str(failure)
    wait_until(lambda: state(node, "running") == 0)
    x = given(0.0)
    with torch.inference_mode():
        expected = variant(7)(x)["y"]
    assert torch.allclose(torch.from_numpy(node.client.infer("v2", {"x": x})["y"].copy()), expected, atol=1e-5)
    assert near(node, 1)
