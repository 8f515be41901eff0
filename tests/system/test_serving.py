"""A node from outside: wake, idle, answer, refusal, update and removal."""

import concurrent.futures
import os
import signal

import pytest
import torch

import overwinter
from overwinter.api.client import Client
from overwinter.api.deployer import package
from overwinter.core.errors import (
    CallerError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    OverloadedError,
    OverwinterError,
    ProgramError,
)
from overwinter.model.export import export

from .nodes import NodeProcess, Scale, ask, asking, deploy, let_continue, stopped_workers, wait_until

SLOW = """
import time

def preprocess(inputs, state):
    time.sleep(float(inputs["x"][0, 1]))
    return inputs
"""
STOPS = """
import os, signal

os.kill(os.getpid(), signal.SIGSTOP)
"""
"""The worker stops itself whenever it loads this handler."""


def test_a_function_sleeps_without_a_process_and_wakes_for_a_request(node: NodeProcess):
    deploy(node, "sleeper", keep_alive_s=0.05)
    for value in (1.0, 2.0):
        wait_until(lambda: not node.client.function("sleeper")["workers"])
        assert node.client.function("sleeper")["lifecycle"] == "asleep"
        assert ask(node, "sleeper", value) == [2.0 * value + 1.0] * 4


def test_idle_workers_stay_until_others_need_their_capacity(make_node):
    node = make_node("--workers-max", "2")

    def uses(*factors: int) -> None:
        for factor in factors:
            assert ask(node, f"f{factor}", 2.0) == [2.0 * factor + 1.0] * 4

    for factor in range(2):
        deploy(node, f"f{factor}", Scale(float(factor)), isolation="function")
    uses(0)
    # Its trial needs the capacity of a worker. Only that of the unused function is worth nothing, however long each
    # start took.
    deploy(node, "f2", Scale(2.0), isolation="function")
    uses(2, 0, 2)
    assert [len(node.client.function(f"f{factor}")["workers"]) for factor in range(3)] == [1, 0, 1]
    [results] = [each for each in node.client.explain("f1")["decisions"][-1:] if each["what"] == "evict-worker"]
    assert "capacity" in results["why"]
    uses(1, 2, 0)
    # Full worker capacity is normal, and is not logged.
    assert not any("others need" in line for line in node.said)


def test_answers_equal_plain_pytorch_at_several_batch_sizes(node: NodeProcess):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 256), torch.nn.GELU(), torch.nn.Linear(256, 3)).eval()
    exported = export(module, {"input": torch.zeros(2, 4)})
    package("mlp", exported.program, exported.weights).upload(node.client)
    for batch in (1, 3, 8):
        x = torch.randn(batch, 4)
        with torch.inference_mode():
            expected = module(x)
        [answer] = node.client.infer("mlp", {"input": x}).values()
        assert torch.equal(torch.from_numpy(answer.copy()), expected)


def test_concurrent_requests_of_a_function_with_batches_get_their_own_answers(node: NodeProcess):
    deploy(node, "batched", max_batch=8, handler=None)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: ask(node, "batched", float(n)), range(64)))
    assert answers == [[2.0 * n + 1.0] * 4 for n in range(64)]


def test_a_deploy_from_python_warns_of_a_narrowed_size(node: NodeProcess):
    class Paired(torch.nn.Module):
        def forward(self, x):
            return x if x.shape[0] > 1 else -x

    with pytest.warns(UserWarning, match="batch is at least 2"):
        overwinter.deploy(Paired(), (torch.zeros(2, 3),), name="paired", url=node.url)
    assert node.client.function("paired")["agreement"]["notes"]
    x = torch.randn(2, 3)
    [answer] = node.client.infer("paired", {"x": x}).values()
    assert torch.equal(torch.from_numpy(answer.copy()), x)
    with pytest.raises(CallerError, match="2 to 1024"):
        node.client.infer("paired", {"x": x[:1]})


def test_a_second_deploy_sends_only_new_blocks(node: NodeProcess):
    first = deploy(node, "variant-a", Scale(13.0))
    again = deploy(node, "variant-b", Scale(13.0))
    sibling = deploy(node, "variant-c", Scale(14.0))
    assert first.added_bytes > 65536
    assert again.added_bytes == 0
    assert 65536 <= sibling.added_bytes < first.nbytes
    assert ask(node, "variant-b") == [14.0] * 4
    assert ask(node, "variant-c") == [15.0] * 4


def test_a_new_version_takes_over_without_a_lost_request_and_the_old_one_answers_by_number(node: NodeProcess):
    deploy(node, "versions", Scale(2.0), max_workers=2)
    with asking(node, "versions") as answers:
        wait_until(lambda: 3.0 in answers)
        made = deploy(node, "versions", Scale(5.0))
        wait_until(lambda: 6.0 in answers)
    assert made.version == 2
    assert answers == sorted(answers)
    assert set(answers) == {3.0, 6.0}
    assert ask(node, "versions", version=1) == [3.0] * 4


def test_a_version_that_cannot_run_is_refused_and_the_old_one_stays(node: NodeProcess):
    deploy(node, "proven", Scale(2.0))
    with pytest.raises(CallerError, match="setup failed on purpose"):
        deploy(node, "proven", Scale(3.0), handler="raise ValueError('setup failed on purpose')")
    assert ask(node, "proven") == [3.0] * 4
    with pytest.raises(NotFoundError):
        ask(node, "proven", version=2)


def test_a_handler_converts_inputs_and_outputs_and_its_errors_name_the_line(node: NodeProcess):
    handler = (
        'INPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]\n'
        'OUTPUTS = [{"name": "answer", "datatype": "BYTES", "shape": ["batch"]}]\n'
        "import torch\n"
        "def setup(assets):\n"
        '    return assets["greeting.txt"]\n'
        "def preprocess(inputs, state):\n"
        '    return {"x": torch.tensor([[float(text)] * 4 for text in inputs["text"]])}\n'
        "def postprocess(outputs, inputs, state):\n"
        '    return {"answer": [state + b"%d" % int(row[0]) for row in outputs["y"]]}\n'
    )
    deploy(node, "texts", handler=handler, assets={"greeting.txt": b"it is "})
    answer = node.client.infer("texts", {"text": ["1", "20"]})["answer"]
    assert [bytes(item) for item in answer] == [b"it is 3", b"it is 41"]
    with pytest.raises(OverwinterError, match="could not convert string to float.*line 7"):
        node.client.infer("texts", {"text": ["no number"]})


def test_a_handler_makes_the_inputs_of_a_function_without_inputs(node: NodeProcess):
    handler = "INPUTS = []\nimport torch\ndef preprocess(inputs, state): return {'x': torch.ones(1, 4)}"
    deploy(node, "constant", handler=handler)
    assert node.client.function("constant")["inputs"] == []
    assert node.client.infer("constant", {})["y"].tolist() == [[3.0] * 4]


def test_a_full_queue_and_a_passed_deadline_give_clear_refusals(node: NodeProcess):
    deploy(node, "slow", handler=SLOW, queue_limit=1, max_workers=1)
    [worker] = node.client.explain("slow")["workers"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        os.kill(worker["pid"], signal.SIGSTOP)
        running = pool.submit(wait_for_answer, node, "slow", 0.0)
        wait_until(lambda: arrived(node, "slow") == 1)
        waiting = pool.submit(wait_for_answer, node, "slow", 0.0)
        wait_until(lambda: node.client.function("slow")["waiting"] == 1)
        with pytest.raises(OverloadedError, match="1 requests waiting") as refusal:
            wait_for_answer(node, "slow", 0.0)
        os.kill(worker["pid"], signal.SIGCONT)
        assert refusal.value.retry_after_s >= 1
        assert running.result() == waiting.result() == 3.0
    os.kill(worker["pid"], signal.SIGSTOP)
    with pytest.raises(DeadlineError, match="slow@1"):
        wait_for_answer(node, "slow", 0.0, timeout_s=0.1, wait_s=60.0)
    os.kill(worker["pid"], signal.SIGCONT)


def test_unload_releases_memory_and_load_makes_the_function_ready(node: NodeProcess):
    deploy(node, "loaded", Scale(77.0))
    before = node.stored_bytes()
    node.client.unload("loaded")
    wait_until(lambda: node.stored_bytes() <= before - 65536)
    with pytest.raises(OverloadedError, match="unloaded"):
        ask(node, "loaded")
    node.client.load("loaded")
    assert node.client.function("loaded")["lifecycle"] == "awake"
    assert ask(node, "loaded") == [78.0] * 4


def test_an_unload_ends_a_load_in_progress(node: NodeProcess):
    with Client(node.url) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        let_continue(node, pool.submit(deploy, node, "slow-to-wake", handler=f"{STOPS}{SLOW}"))
        node.client.unload("slow-to-wake")
        loading = pool.submit(client.load, "slow-to-wake")
        wait_until(lambda: stopped_workers(node))
        assert node.client.function("slow-to-wake")["lifecycle"] == "waking"
        node.client.unload("slow-to-wake")
        with pytest.raises(ConflictError, match="slow-to-wake"):
            loading.result(60)
        let_continue(node, pool.submit(client.load, "slow-to-wake"))
    assert ask(node, "slow-to-wake", 0.0) == [1.0] * 4


def test_a_removed_function_is_not_found_and_its_version_number_is_not_used_again(node: NodeProcess):
    deploy(node, "gone", Scale(99.0))
    node.client.remove("gone")
    with pytest.raises(NotFoundError, match="'gone'"):
        ask(node, "gone")
    deploy(node, "gone", Scale(98.0))
    assert node.client.function("gone")["version"] == 2


def test_an_input_that_a_program_cannot_run_is_the_callers_error_and_affects_no_other_request(node: NodeProcess):
    table = torch.nn.Embedding(10, 4).requires_grad_(False).eval()
    exported = export(table, {"input": torch.zeros(2, 3, dtype=torch.int64)})
    package("embedding", exported.program, exported.weights).upload(node.client)
    [worker] = node.client.function("embedding")["workers"]
    with pytest.raises(CallerError, match="embedding@1 cannot run"):
        node.client.infer("embedding", {"input": torch.full((1, 3), 11)})
    assert node.client.infer("embedding", {"input": torch.ones((1, 3), dtype=torch.int64)})
    assert node.client.function("embedding")["workers"] == [worker]


def test_a_program_with_an_unknown_operator_is_refused_with_the_name_of_the_operator(node: NodeProcess):
    exported = export(Scale(2.0), {"x": torch.zeros(2, 4)})
    call = exported.program.calls[0]
    calls = (type(call)("aten.from_file.default", *list_fields(call)[1:]), *exported.program.calls[1:])
    hostile = replace(exported.program, calls=calls)
    with pytest.raises((ProgramError, CallerError), match="aten.from_file.default"):
        package("hostile", hostile, exported.weights).upload(node.client)


def test_a_stopped_node_leaves_nothing_behind(make_node):
    node = make_node()
    deploy(node, "f")
    place = node.store()
    ask(node, "f")
    # The tenant's zygote starts when its first program has run.
    wait_until(lambda: len(node.zygotes()) == 2)
    assert len(node.worker_pids()) == 1
    node.stop()
    assert node.process.returncode == 0
    assert not place.exists()


# Helpers


def arrived(node: NodeProcess, name: str) -> int:
    return sum(step[1]["type"] == "Arrived" and step[1]["name"] == name for step in node.steps())


def wait_for_answer(node: NodeProcess, name: str, seconds: float, **options) -> float:
    with Client(node.url) as client:
        return client.infer(name, {"x": [[1.0, seconds, 1.0, 1.0]]}, **options)["y"].tolist()[0][0]


def list_fields(struct) -> list:
    return [getattr(struct, field) for field in struct.__struct_fields__]


def replace(struct, **changes):
    fields = {field: getattr(struct, field) for field in struct.__struct_fields__}
    return type(struct)(**{**fields, **changes})
