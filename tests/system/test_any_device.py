"""Functions with `device = "any"` on a real node: workers and devices give right answers or clear refusals."""

import concurrent.futures
import itertools
import os
import signal
from collections.abc import Callable

import pytest
import torch

from overwinter.api.client import Client
from overwinter.core.errors import NotFoundError, OverloadedError
from tests.replay.replayed import replayed

from .nodes import NodeProcess, ask, asked_while_killing, deploy, wait_until
from .test_pool import MODELS, executors, processes_named, right
from .test_pool_handlers import MORE, PLUS

COUNT = len(MODELS)


class Busy(torch.nn.Module):
    """A model whose run takes some milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(4, 384) / 4, requires_grad=False)
        self.weight = torch.nn.Parameter(torch.eye(384) + 0.01, requires_grad=False)

    def forward(self, x):
        x = x @ self.first
        for _ in range(40):
            x = torch.tanh(x @ self.weight)
        return {"y": x[:, :4]}


def put(node: NodeProcess, **settings) -> None:
    for name, model in MODELS.items():
        deploy(node, name, model, device="any", **settings)


def workers(node: NodeProcess) -> list[int]:
    return processes_named(node, "ow-worker")


def runs(node: NodeProcess) -> tuple[int, int]:
    """Return how many runs began in workers, and how many on devices."""
    seen = node.seen()
    return seen.count("Run"), seen.count("RunOnDevice")


def ask_until(holds: Callable[[], object], ask: Callable[[int], bool]) -> None:
    """Ask, once at least, until this is true. The first start of an executor may take longer than a few requests, which
    do not wait for it.
    """
    at = itertools.count()

    def is_reached() -> object:
        assert ask(next(at))
        return holds()

    wait_until(is_reached)


def served_while_stopped(node: NodeProcess, pids: list[int], ask: Callable[[int], bool]) -> list[int]:
    """Stop processes until three requests are answered without them, and then wait for all answers. Return the runs
    that began in workers, and on devices, while they were stopped.
    """
    assert pids
    before, answers = runs(node), list[concurrent.futures.Future[bool]]()

    def are_served() -> bool:
        answers.append(threads.submit(ask, len(answers)))
        return sum(each.done() for each in answers) >= 3

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait_until(are_served)
        during = [after - then for after, then in zip(runs(node), before, strict=True)]
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert all(each.result() for each in answers)
    return during


def test_workers_and_devices_are_both_tried_and_shown_as_one_function(make_node):
    node = make_node("--devices", "2", "--device-memory", "8MiB")
    put(node)
    assert all(right(node, name, float(at)) for at in range(3) for name in MODELS)
    in_workers, on_devices = runs(node)
    # The times of runs in workers are those of a family, of which there are two.
    assert in_workers >= 2
    assert on_devices >= COUNT
    assert [each["name"] for each in node.client.functions()] == list(MODELS)
    shown, explained = node.client.function("f1"), node.client.explain("f1")
    assert (shown["settings"]["device"], shown["state"], len(shown["devices"])) == ("any", "READY", 1)
    assert "workers" in explained["last_choice"]
    assert "virtual:" in explained["last_choice"]
    assert explained["answered"] == 3
    assert sum(explained["pool"]["runs"].values()) >= 1
    assert {each["tier"] for each in explained["tiers"]} == {"disk", "host", "private", *shown["devices"]}
    used = {each["function"]: each for each in node.client.usage()}
    assert set(used) == set(MODELS)
    assert (used["f1"]["requests"], used["f1"]["device"]["device_ms"] > 0, used["f1"]["core_ms"] > 0) == (3, True, True)
    seen = {each["name"]: each for each in node.client.activity()["functions"]}
    assert (seen["f1"]["requests"], seen["f1"]["device"]) == (3, "any")
    with pytest.raises(NotFoundError):
        ask(node, "f1:program")
    node.client.unload("f1")
    with pytest.raises(OverloadedError, match="f1@1 is unloaded"):
        right(node, "f1", 1.0)
    node.client.load("f1")
    assert right(node, "f1", 1.0)
    node.client.remove("f1")
    with pytest.raises(NotFoundError):
        right(node, "f1", 1.0)
    node.stop()
    assert replayed(node.journal)


def test_requests_avoid_workers_or_devices_that_do_not_answer(make_node):
    node = make_node("--devices", "1", "--device-memory", "8MiB")
    model = Busy()
    deploy(node, "f", model, device="any", max_workers=1)

    def asked(at: int) -> bool:
        x = torch.full((1, 4), float(at % 7))
        with Client(node.url) as client, torch.inference_mode():
            answer = torch.from_numpy(client.infer("f", {"x": x})["y"].copy())
            return torch.allclose(answer, model(x)["y"], atol=1e-6)

    ask_until(lambda: all(runs(node)), asked)
    assert served_while_stopped(node, workers(node), asked)[1] >= 3
    assert served_while_stopped(node, executors(node), asked)[0] >= 3
    # Without an executor, one starts.
    for executor in executors(node):
        os.kill(executor, signal.SIGKILL)
    wait_until(lambda: not executors(node))
    assert asked(0)
    assert served_while_stopped(node, workers(node), asked)[1] >= 3


def test_while_workers_and_executors_die_answers_are_right_or_refusals_clear(make_node):
    node = make_node("--devices", "2", "--device-memory", "4MiB")
    put(node)

    kinds = [workers, executors] * 3
    assert all(asked_while_killing(lambda at: right(node, f"f{at % COUNT}", float(at)), 300, kinds, node))
    assert all(right(node, name, 3.0) for name in MODELS)
    node.stop()
    assert replayed(node.journal)


def test_functions_are_served_after_restarts_with_and_without_devices(make_node):
    node = make_node("--devices", "1", "--device-memory", "4MiB")
    put(node)
    with_devices = node.options
    node.stop()
    node.options = with_devices[:2]
    node.start()
    assert all(right(node, name, float(at)) for at in range(2) for name in MODELS)
    assert not executors(node)
    assert node.client.function("f1")["devices"] == []
    warning = deploy(node, "g", MODELS["f1"], device="any").warning
    assert "it runs on CPU cores only: this node has no devices" in warning
    node.stop()
    node.options = with_devices
    node.start()
    assert all(right(node, name, float(at)) for at in range(2) for name in MODELS)
    assert len(executors(node)) == 1


def calls(node: NodeProcess) -> tuple[int, int]:
    """Return how many calls of a program were left to workers, and how many were answered by devices."""
    actions = [action for step in node.steps() for action in step[2]]
    ended = [each["type"] for each in actions if str(each.get("function")).startswith("h:program")]
    return ended.count("Refuse"), ended.count("Reply")


def test_calls_of_a_handler_run_in_its_worker_or_on_a_device(make_node):
    node = make_node("--devices", "2", "--device-memory", "4MiB")
    deploy(node, "cpu", MODELS["f1"], handler=PLUS + MORE)
    deploy(node, "h", MODELS["f1"], handler=PLUS + MORE, device="any")
    on_trial = calls(node)[0]

    def asked(name: str, at: int) -> torch.Tensor:
        with Client(node.url) as client:
            return torch.from_numpy(client.infer(name, {"x": torch.full((1, 4), float(at % 7))})["y"].copy())

    expected = [asked("cpu", at) for at in range(7)]

    def is_right(at: int) -> bool:
        return torch.equal(asked("h", at), expected[at % 7])

    ask_until(lambda: all(calls(node)), is_right)
    # The workers measured exactly the calls that they ran themselves.
    assert sum(step[1].get("program_s", 0.0) > 0 for step in node.steps()) == calls(node)[0] - on_trial
    assert all(asked_while_killing(is_right, 300, [workers, executors] * 3, node))
    assert all(map(is_right, range(5)))
    shown, explained = node.client.function("h"), node.client.explain("h")
    assert (shown["settings"]["device"], shown["state"]) == ("any", "READY")
    assert "workers" in explained["last_choice"]
    assert sum(explained["pool"]["runs"].values()) > 0
    node.client.unload("h")
    with pytest.raises(OverloadedError, match="h@1 is unloaded"):
        asked("h", 1)
    node.client.load("h")
    assert is_right(1)
    node.client.remove("h")
    with pytest.raises(NotFoundError):
        asked("h", 1)
    node.stop()
    assert replayed(node.journal)


def test_calls_of_a_handler_do_not_wait_for_a_device_that_does_not_answer(make_node):
    node = make_node("--devices", "1", "--device-memory", "8MiB")
    model = Busy()
    deploy(node, "h", model, handler=PLUS, device="any", concurrency=4)

    def asked(at: int) -> bool:
        x = torch.full((1, 4), float(at % 7))
        with Client(node.url) as client, torch.inference_mode():
            answer = torch.from_numpy(client.infer("h", {"x": x})["y"].copy())
            return torch.allclose(answer, model(x + 1)["y"], atol=1e-6)

    ask_until(lambda: all(calls(node)), asked)
    before = calls(node)[0]
    served_while_stopped(node, executors(node), asked)
    assert calls(node)[0] > before
