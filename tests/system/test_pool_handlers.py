"""Functions with a handler whose programs run on the pool: the answers of the CPU, or clear refusals."""

import concurrent.futures
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from benchmarks import zoo
from examples import minilm_handler
from overwinter.api.client import Client
from overwinter.api.deployer import package, settings_of
from overwinter.core.errors import (
    CallerError,
    DeadlineError,
    MachineError,
    NotFoundError,
    OverwinterError,
)
from overwinter.model.agreement import agree
from overwinter.model.export import export
from tests.replay.replayed import replayed
from tests.tasks.directories import tokenizer

from .nodes import NodeProcess, Scale, ask, deploy, wait_until
from .test_hostile import SOCKET
from .test_pool import executors, processes_named

TEXTS = [b"the quick fox came slowly to winter", b"it works well", b"snow", b"the fox & the snow !"]
PLUS = "def preprocess(inputs, state):\n    return {'x': inputs['x'] + 1}\n"
MORE = "def postprocess(outputs, inputs, state):\n    return {'y': outputs['y'] * 2 + inputs['x']}\n"
SLOW = "64KiB"
"""The bandwidth at which the small function takes a second to reach a device."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[NodeProcess]:
    """A node with two devices that take everything."""
    node = NodeProcess(tmp_path_factory.mktemp("pool"), "--devices", "2", "--device-memory", "64MiB")
    yield node
    node.clean()


@pytest.fixture(scope="module")
def slow_node(tmp_path_factory) -> Iterator[NodeProcess]:
    """A node with one device that blocks reach slowly."""
    node = NodeProcess(
        tmp_path_factory.mktemp("slow"), "--devices", "1", "--device-memory", "4MiB", "--device-bandwidth", SLOW
    )
    yield node
    node.clean()


@pytest.fixture
def slow(slow_node: NodeProcess) -> NodeProcess:
    """`slow_node`, with a function `f` that is not on the device."""
    if not slow_node.client.functions():
        deploy(slow_node, "f", handler=PLUS + MORE, device="pool")
    empty(slow_node)
    return slow_node


def empty(node: NodeProcess) -> None:
    """Kill the executors, so that nothing is on the devices."""
    pids, ended = executors(node), node.seen().count("WorkerExited")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    # Until then a run might be sent to one of them, which would use up one of its two tries.
    node.wait_for("WorkerExited", ended + len(pids))


def stopped_executor(node: NodeProcess) -> int:
    """Stop the executor of the node's only device, so that what it runs next does not end before it continues."""
    [executor] = executors(node)
    os.kill(executor, signal.SIGSTOP)
    return executor


def runs(node: NodeProcess) -> int:
    """Return how many runs on devices have begun."""
    return node.seen().count("RunOnDevice")


def workers(node: NodeProcess) -> list[int]:
    """Return the workers of functions, without executors and processes that are forked ahead."""
    return processes_named(node, "ow-worker")


@pytest.fixture
def together():
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        yield threads


def test_a_text_function_answers_as_on_the_cpu(pool: NodeProcess, together):
    model = zoo.build("minilm", small=True)
    agreed = agree(export(model.module, model.example_inputs, model.dynamic), 4)
    [output] = agreed.program.outputs
    source = Path(minilm_handler.__file__).read_text()
    shape = ", ".join(map(repr, output.shape))
    source = source.replace('"embedding"', f'"{output.name}"').replace('"batch", 384', shape)
    assets = {"tokenizer.json": tokenizer().backend_tokenizer.to_str().encode()}
    for device, batch in (("cpu", 1), ("pool", 1), ("pool", 4)):
        settings = settings_of(None, {"device": device, "max_batch": batch, "concurrency": 2})
        samples = [{"text": TEXTS[:2]}]
        packed = package(f"{device}{batch}", *agreed, handler=source, assets=assets, settings=settings, samples=samples)
        packed.upload(pool.client)

    def asked(name: str, texts: list[bytes]) -> torch.Tensor:
        with Client(pool.url) as client:
            [answer] = client.infer(name, {"text": texts}).values()
        return torch.from_numpy(answer.copy())

    requests = [TEXTS, *([text] for text in TEXTS), TEXTS[1:3]]
    for texts in requests:
        assert torch.equal(asked("pool1", texts), asked("cpu1", texts))
    same = 3 * requests
    given = list(together.map(lambda texts: asked("pool4", texts), same))
    # A batch is within the bound of the export, on a device as in a worker.
    assert all(torch.allclose(one, asked("cpu1", texts), atol=1e-5) for one, texts in zip(given, same, strict=True))
    assert runs(pool) > len(requests)


def test_a_handler_and_its_program_on_the_pool_are_shown_as_one_function(shared_node):
    pool = shared_node("--devices", "1", "--device-memory", "8MiB")
    deploy(pool, "seen", handler=PLUS + MORE, device="pool", slo_ms=5000)
    assert [ask(pool, "seen")[0] for _ in range(4)] == [11.0] * 4
    assert [each["name"] for each in pool.client.functions()] == ["seen"]
    shown = pool.client.function("seen")
    assert (shown["settings"]["device"], shown["handler"], len(shown["workers"])) == ("pool", True, 1)
    assert len(shown["devices"]) == 1
    assert shown["nbytes"] > 4 * 16384
    explained = pool.client.explain("seen")
    assert sum(explained["pool"]["runs"].values()) == 5
    assert {each["tier"] for each in explained["tiers"]} == {"disk", "host", "private", *shown["devices"]}
    assert all(each["missing"] == 0 for each in explained["tiers"])
    [used] = [each for each in pool.client.usage() if each["function"] == "seen"]
    assert (used["function"], used["requests"]) == ("seen", 4)
    assert used["device"]["moved_bytes"] >= 4 * 16384
    assert used["core_ms"] > 0
    seen = pool.client.activity()
    assert [(each["name"], each["requests"], each["device"]) for each in seen["functions"]] == [("seen", 4, "pool")]
    assert (seen["versions_deployed"], seen["functions"][0]["attainment"]) == (1, 1.0)
    assert {each["function"] for device in seen["devices"] for each in device["functions"]} == {"seen@1"}
    for ask_for in (pool.client.function, pool.client.remove, pool.client.load, lambda name: ask(pool, name)):
        with pytest.raises(OverwinterError):
            ask_for("seen:program")


def test_batches_in_two_slots_of_one_worker_get_right_answers(pool: NodeProcess, together):
    deploy(pool, "several", handler=PLUS + MORE, device="pool", max_batch=4, concurrency=2, max_workers=1)
    answers = together.map(lambda value: ask(pool, "several", value), [float(number) for number in range(32)])
    assert [answer[0] for answer in answers] == [2 * (2 * (number + 1) + 1) + number for number in range(32)]
    actions = [action for step in pool.steps() for action in step[2]]
    assert [action["function"] for action in actions if action["type"] == "StartWorker"].count("several@1") == 1
    assert max(len(action["requests"]) for action in actions if action["type"] == "Run") > 1


@pytest.mark.parametrize("broken", ["preprocess", "postprocess"])
def test_a_handler_that_fails_harms_no_other_request(pool: NodeProcess, together, broken: str):
    arguments = {"preprocess": "inputs, state", "postprocess": "outputs, inputs, state"}[broken]
    given = {"preprocess": "inputs", "postprocess": "outputs"}[broken]
    handler = f"def {broken}({arguments}):\n    assert inputs['x'].max() < 5, 'too large'\n    return {given}\n"
    deploy(pool, broken, handler=handler, device="pool", max_batch=4)

    def asked(value: float) -> float | None:
        try:
            return ask(pool, broken, value)[0]
        except MachineError as error:
            return None if "too large" in str(error) else 0.0

    values = [float(number % 8) for number in range(24)]
    expected = [2 * value + 1 if value < 5 else None for value in values]
    assert list(together.map(asked, values)) == expected


class Wide(torch.nn.Module):
    """Takes rows of 128 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.linspace(0.0, 1.0, 1 << 15), requires_grad=False)

    def forward(self, x):
        return {"y": x * 2 + self.shift}


def test_large_tensors_reach_the_pool_up_to_a_limit(pool: NodeProcess):
    model, settings = Wide(), settings_of(None, {"device": "pool"})
    made = export(model, {"x": torch.zeros(2, 1 << 15)})
    handler = "def preprocess(inputs, state):\n    return {'x': inputs['x'].repeat(int(inputs['x'][0, 0]) or 1, 1)}\n"
    package("large", made.program, made.weights, handler=handler, settings=settings).upload(pool.client)
    x = torch.full((64, 1 << 15), 2.0)
    answer = torch.from_numpy(pool.client.infer("large", {"x": x})["y"].copy())
    assert torch.equal(answer, model(x.repeat(2, 1))["y"])
    with pytest.raises(MachineError, match="would get 83886080 bytes, and at most 67108864 reach the pool"):
        pool.client.infer("large", {"x": x * 5})
    assert len(pool.client.infer("large", {"x": x[:1]})["y"]) == 2


def test_the_error_names_the_input_on_which_the_program_fails(pool: NodeProcess):
    handler = "def preprocess(inputs, state):\n    return {'x': inputs['x'][:, :int(inputs['x'][0, 0]) or 4]}\n"
    deploy(pool, "narrow", handler=handler, device="pool")
    with pytest.raises(CallerError, match="input 'x' of narrow@1: a fixed size must be 4, not 2"):
        ask(pool, "narrow", 2.0)
    assert ask(pool, "narrow", 4.0) == [9.0] * 4


class Repeating(torch.nn.Module):
    """Computes far more values than it returns."""

    def forward(self, x):
        return {"y": torch.cat([x] * 500, dim=1).relu()[:, :4]}


def test_a_refusal_of_the_pool_names_the_function(make_node):
    node = make_node("--devices", "1", "--device-memory", "1MiB", "--device-activations", "1MiB")
    handler = "def preprocess(inputs, state):\n    return {'x': inputs['x'].repeat(int(inputs['x'][0, 0]), 1)}\n"
    deploy(node, "f", Repeating(), handler=handler, device="pool")
    with pytest.raises(CallerError, match="^f@1 needs .* serve with more --device-activations"):
        ask(node, "f", 1000.0)


def test_an_executor_that_dies_within_a_call_costs_no_answer(slow: NodeProcess, together):
    assert ask(slow, "f") == [11.0] * 4
    before, executor = runs(slow), stopped_executor(slow)
    answer = together.submit(ask, slow, "f")
    wait_until(lambda: runs(slow) > before)
    os.kill(executor, signal.SIGKILL)
    assert answer.result(60) == [11.0] * 4
    assert runs(slow) == before + 2


def test_a_worker_that_dies_within_a_call_costs_no_answer(slow: NodeProcess, together):
    before = runs(slow)
    answer = together.submit(ask, slow, "f")
    wait_until(lambda: runs(slow) > before)
    os.kill(*workers(slow), signal.SIGKILL)
    assert answer.result(60) == [11.0] * 4
    assert ask(slow, "f") == [11.0] * 4


def test_a_request_expires_within_a_call(slow: NodeProcess):
    assert ask(slow, "f") == [11.0] * 4
    before, executor = workers(slow), stopped_executor(slow)
    with pytest.raises(DeadlineError, match="f@1"):
        ask(slow, "f", timeout_s=0.2, wait_s=60.0)
    os.kill(executor, signal.SIGCONT)
    assert ask(slow, "f") == [11.0] * 4
    # Another worker may have started, if this one did not know yet that the request had ended.
    assert set(before) <= set(workers(slow))


def test_a_busy_device_costs_no_worker(make_node, together):
    node = make_node("--devices", "1", "--device-memory", "4MiB")
    deploy(node, "f", handler=PLUS + MORE, device="pool", timeout_s=5.0)
    deploy(node, "long", Scale(3.0), device="pool")
    # A function is not prepared on a device after its first run there.
    assert (ask(node, "f"), ask(node, "long")) == ([11.0] * 4, [4.0] * 4)
    first, before, executor = workers(node), runs(node), stopped_executor(node)
    busy = together.submit(ask, node, "long")
    wait_until(lambda: runs(node) > before)
    with pytest.raises(DeadlineError):
        ask(node, "f")
    os.kill(executor, signal.SIGCONT)
    assert busy.result(60) == [4.0] * 4
    assert ask(node, "f") == [11.0] * 4
    assert workers(node) == first


HANGS = "import time\ndef {}:\n    if inputs['x'].max() > 50:\n        time.sleep(86400)\n    return {}\n"


@pytest.mark.parametrize(
    "handler",
    [
        HANGS.format("preprocess(inputs, state)", "inputs"),
        HANGS.format("postprocess(outputs, inputs, state)", "outputs"),
    ],
)
def test_a_handler_that_hangs_ends_with_its_request(pool: NodeProcess, together, handler: str):
    name = f"hangs{handler.count('outputs')}"
    deploy(pool, name, handler=handler, device="pool", timeout_s=4.0, max_workers=1)
    [first] = pool.client.function(name)["workers"]
    with pytest.raises(DeadlineError):
        ask(pool, name, 99.0)
    others = [together.submit(ask, pool, name) for _ in range(4)]
    assert [each.result(60) for each in others] == [[3.0] * 4] * 4
    [second] = pool.client.function(name)["workers"]
    assert first != second


def test_a_request_cancelled_within_its_call_affects_no_other(slow: NodeProcess, together):
    deploy(slow, "g", Scale(3.0), handler=PLUS + MORE, device="pool")
    # A function is not prepared on a device after its first run there.
    assert (ask(slow, "f"), ask(slow, "g")) == ([11.0] * 4, [15.0] * 4)
    # The device is busy, so the call of the second request waits.
    begun, executor = runs(slow), stopped_executor(slow)
    first = together.submit(ask, slow, "f")
    wait_until(lambda: runs(slow) > begun)
    caller, before, cancelled = HTTPConnection(slow.url.removeprefix("http://")), calls(slow), slow.seen()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4}
    caller.request("POST", "/v2/models/g/infer", json.dumps({"inputs": [tensor]}))
    wait_until(lambda: calls(slow) > before)
    # This disconnects immediately, not at the garbage collection.
    caller.sock.shutdown(socket.SHUT_RDWR)
    caller.close()
    # The request, and the call that its run has made.
    slow.wait_for("Cancelled", cancelled.count("Cancelled") + 2)
    os.kill(executor, signal.SIGCONT)
    assert first.result(60) == [11.0] * 4
    wait_until(lambda: slow.client.activity()["running"] == 0)
    assert ask(slow, "g") == [15.0] * 4
    slow.client.remove("g")


def calls(node: NodeProcess) -> int:
    """Return how many calls of programs were made."""
    return sum(step[1]["type"] == "Arrived" and step[1]["name"].endswith(":program") for step in node.steps())


FORGED = {
    "another function": "['PoolCall', 1, 'several@1', 0, [['x', 'FP32', [1, 4], 16]]]",
    "another slot": "['PoolCall', 1, 'forger@1', 7, [['x', 'FP32', [1, 4], 16]]]",
    "a negative slot": "['PoolCall', 1, 'forger@1', -1, [['x', 'FP32', [1, 4], 16]]]",
    "another input": "['PoolCall', 1, 'forger@1', 0, [['z', 'FP32', [1, 4], 16]]]",
    "too little": "['PoolCall', 1, 'forger@1', 0, [['x', 'FP32', [1, 4], 8]]]",
    "more than the buffer": "['PoolCall', 1, 'forger@1', 0, [['x', 'FP32', [1 << 20, 4], 16 << 20]]]",
    "a negative size": "['PoolCall', 1, 'forger@1', 0, [['x', 'FP32', [1, 4], -16]]]",
    "two at once": "['PoolCall', 1, 'forger@1', 0, [['x', 'FP32', [1, 4], 16]]]",
    "after its run": "['PoolCall', 1, 'forger@1', 0, [['x', 'FP32', [1, 4], 16]]]",
}
AFTER_ANSWER = """
        from overwinter.worker.channel import Channel
        send = Channel.send
        def send_both(own, sent, fds=()):
            send(own, sent, fds)
            if type(sent).__name__ == "Answer":
                {}
        Channel.send = send_both
"""


@pytest.mark.parametrize("forged", FORGED)
def test_forged_calls_cost_only_the_worker_that_sent_them(pool: NodeProcess, forged: str):
    name, before = f"forger{list(FORGED).index(forged)}", workers(pool)
    message = f"channel().send(msgspec.msgpack.encode({FORGED[forged].replace('forger', name)}))"
    sends = f"        {message}\n"
    if forged == "two at once":
        # One may be answered before the next arrives, so the worker sends until it is ended.
        sends = f"        while True:\n    {sends}"
    if forged != "more than the buffer":
        # The worker's own call would be a second one at the same time, and be refused for that.
        sends += "        import time\n        time.sleep(600)\n"
    if forged == "after its run":
        # Directly behind the answer, on the same channel.
        sends = AFTER_ANSWER.format(message)
    handler = SOCKET + f"def preprocess(inputs, state):\n    if inputs['x'].any():\n{sends}    return inputs\n"
    deploy(pool, name, handler=handler, device="pool")
    [worker] = set(workers(pool)) - set(before)
    if forged == "after its run":
        assert ask(pool, name) == [3.0] * 4
        wait_until(lambda: worker not in workers(pool))
    else:
        refusals = "failed in every attempt.*(may not run|impossible inputs)|batch must be 1 to 1024"
        try:
            said = str(ask(pool, name))
        except (MachineError, CallerError) as error:
            said = str(error)
        # The worker may take the refusal of a forged call as the answer to its own. A call that only has too many rows
        # is refused like any other. If that is done before the worker's own call arrives, the own call is answered;
        # otherwise the worker has sent two at once.
        is_answered = forged == "more than the buffer" and said == str([3.0] * 4)
        assert is_answered or re.search(refusals, said)
    deploy(pool, f"healthy{name}", handler=PLUS + MORE, device="pool")
    assert ask(pool, f"healthy{name}") == [11.0] * 4
    assert pool.client.ready()


def test_versions_are_unloaded_loaded_served_after_a_restart_and_removed(make_node):
    pool = make_node("--devices", "1", "--device-memory", "8MiB")
    deploy(pool, "f", handler=PLUS + MORE, device="pool")
    deploy(pool, "f", Scale(3.0), handler=PLUS + MORE, device="pool")
    assert (ask(pool, "f")[0], ask(pool, "f", version=1)[0]) == (15.0, 11.0)
    pool.client.unload("f")
    with pytest.raises(OverwinterError, match="unloaded; load it first"):
        ask(pool, "f")
    wait_until(lambda: pool.stored_bytes() == 0)
    pool.client.load("f")
    assert ask(pool, "f")[0] == 15.0
    pool.stop()
    pool.start()
    assert (ask(pool, "f")[0], ask(pool, "f", version=1)[0]) == (15.0, 11.0)
    pool.client.remove("f", 2)
    assert ask(pool, "f")[0] == 11.0
    pool.client.remove("f")
    with pytest.raises(NotFoundError):
        ask(pool, "f")
    wait_until(lambda: pool.stored_bytes() == 0 and not workers(pool))
    pool.stop()
    for journal in (pool.journal.with_name("journal.jsonl.1"), pool.journal):
        assert replayed(journal)


@pytest.mark.parametrize("end", ["remove", "unload"])
def test_a_run_in_progress_is_completed_although_its_function_is_removed_or_unloaded(
    slow: NodeProcess, together, end: str
):
    before = runs(slow)
    answer = together.submit(ask, slow, "f")
    wait_until(lambda: runs(slow) > before)
    getattr(slow.client, end)("f")
    assert answer.result(60) == [11.0] * 4
    wait_until(lambda: slow.stored_bytes() == 0 and not workers(slow))


def test_a_version_whose_sample_fails_on_the_pool_is_refused(pool: NodeProcess):
    made = export(Scale(2.0), {"x": torch.zeros(2, 4)})
    handler = "def postprocess(outputs, inputs, state):\n    return {'y': outputs['z']}\n"
    settings = settings_of(None, {"device": "pool"})
    samples = [{"x": torch.ones(1, 4)}]
    packed = package("wrong", made.program, made.weights, handler=handler, settings=settings, samples=samples)
    with pytest.raises(OverwinterError, match="does not answer sample 1.*'z'"):
        packed.upload(pool.client)
    assert "wrong" not in {each["name"] for each in pool.client.functions()}


def test_a_program_that_fits_on_no_device_is_refused_at_the_deploy(shared_node):
    node = shared_node("--devices", "1", "--device-memory", "1MiB")
    with pytest.raises(MachineError, match="do not fit"):
        deploy(node, "f", Scale(2.0, 1 << 20), handler=PLUS, device="pool")
    assert node.client.functions() == []


def test_tenants_take_turns(shared_node):
    node = shared_node("--devices", "1", "--device-memory", "4MiB")
    for tenant in ("ada", "bob"):
        deploy(node, f"{tenant}-f", handler=PLUS + MORE, tenant=tenant, device="pool")
    for _ in range(3):
        for tenant in ("ada", "bob"):
            assert ask(node, f"{tenant}-f") == [11.0] * 4
    assert len(executors(node)) == 1
