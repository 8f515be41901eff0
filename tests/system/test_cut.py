"""Functions of the pool that no device can hold: their programs run in slices, and answer as the whole program does."""

import concurrent.futures
from contextlib import suppress
from functools import cache

import pytest
import torch

from benchmarks.architectures.huggingface import TextModel
from overwinter.api.client import Client
from overwinter.api.deployer import package, settings_of
from overwinter.core.errors import ConflictError, DeadlineError, NoSpaceError, NotFoundError, OverwinterError
from overwinter.core.profiling import ProfileOptions
from overwinter.model.agreement import agree
from overwinter.model.export import export
from tests.replay.replayed import replayed

from .nodes import NodeProcess, asked_while_killing, deploy, wait_until
from .test_any_device import workers
from .test_pool import MODELS, executors, right
from .test_pool_handlers import empty, runs

SMALL = "--devices", "2", "--device-memory", "2MiB"
"""Each device holds less than half of the model."""


@cache
def bert(seed: int = 0) -> TextModel:
    """Build a network of 5 MiB."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertModel(BertConfig(num_hidden_layers=6, num_attention_heads=4, **sizes)).eval()
    return TextModel(model, "last_hidden_state", "pooler_output")


def request(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).view(rows, length) * 7 % 1000
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[-1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


DYNAMIC = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "sequence"}}


@cache
def exported(seed: int = 0, batch: int = 1):
    return agree(export(bert(seed), request(2, 8), DYNAMIC), batch)


def put(node: NodeProcess, name: str, seed: int = 0, handler: str | None = None, **settings):
    agreed = exported(seed, settings.get("max_batch", 1))
    return package(name, *agreed, handler=handler, settings=settings_of(None, settings)).upload(node.client)


def asked(node: NodeProcess, name: str, rows: int = 1, length: int = 8, **options) -> list[torch.Tensor]:
    with Client(node.url) as client:
        answer = client.infer(name, request(rows, length), **options)
    return [torch.from_numpy(each.copy()) for each in answer.values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def near(given: list[torch.Tensor], rows: int, length: int, seed: int = 0) -> bool:
    with torch.inference_mode():
        expected = bert(seed)(**request(rows, length))
    return all(torch.allclose(one, each, atol=1e-5) for one, each in zip(given, expected, strict=True))


SIZES = [(1, 8), (3, 5), (2, 16), (1, 1), (4, 31)]


def test_a_cut_program_gives_the_answers_of_the_whole_while_others_compete_and_executors_die(make_node):
    node = make_node(*SMALL)
    assert "its program is cut into 3 slices" in put(node, "cut", device="pool").warning
    put(node, "whole")
    put(node, "batched", device="pool", max_batch=4)
    for name, model in MODELS.items():
        deploy(node, name, model, device="pool")
    expected = {each: asked(node, "whole", *each) for each in SIZES}
    for each, answer in expected.items():
        assert same(asked(node, "cut", *each), answer)
        assert near(answer, *each)

    def ask(at: int) -> bool:
        sizes, name = SIZES[at % len(SIZES)], ("cut", "batched", f"f{at % 6}")[at % 3]
        if name == "batched":
            return near(asked(node, name, *sizes), *sizes)
        return same(asked(node, name, *sizes), expected[sizes]) if name == "cut" else right(node, name, float(at))

    assert all(asked_while_killing(ask, 150, [executors] * 3, node))
    assert same(asked(node, "cut"), expected[1, 8])
    batches = [action["requests"] for step in node.steps() for action in step[2] if action["type"] == "RunOnDevice"]
    assert max(map(len, batches)) > 1
    node.stop()
    for journal in (node.journal.with_name("journal.jsonl.1"), node.journal):
        assert not journal.exists() or replayed(journal)


@pytest.mark.slow
def test_a_cut_function_for_any_device_runs_in_workers_and_in_slices_whatever_dies(make_node):
    node = make_node(*SMALL)
    put(node, "whole")
    assert "its program is cut into 3 slices" in put(node, "cut", device="any").warning
    expected = {each: asked(node, "whole", *each) for each in SIZES}

    def ask(at: int) -> bool:
        sizes = SIZES[at % len(SIZES)]
        return same(asked(node, "cut", *sizes), expected[sizes])

    assert all(map(ask, range(3)))
    assert all(asked_while_killing(ask, 300, [workers, executors] * 3, node))
    assert all(map(ask, range(3)))
    assert "virtual:" in node.client.explain("cut")["last_choice"]
    assert len(node.client.explain("cut")["pool"]["slices"]) == 3
    actions = [action for step in node.steps() for action in step[2]]
    on_devices = {each["function"] for each in actions if each["type"] == "RunOnDevice"}
    in_workers = {each["function"] for each in actions if each["type"] == "StartWorker"}
    assert {"cut:program@1", "cut:2@1", "cut:3@1"} <= on_devices
    assert "cut@1" in in_workers
    node.stop()
    assert replayed(node.journal)
    node.options = [*node.options[:2], "--devices", "2", "--device-memory", "16MiB"]
    node.start()
    assert all(map(ask, range(3)))
    assert not node.client.explain("cut")["pool"]["slices"]


def test_the_slices_of_a_function_are_shown_as_one_function(make_node):
    node = make_node(*SMALL)
    put(node, "cut", device="pool", slo_ms=60_000)
    for _ in range(4):
        asked(node, "cut")
    assert [each["name"] for each in node.client.functions()] == ["cut"]
    shown = node.client.function("cut")
    assert set(shown["devices"]) == {"virtual:0", "virtual:1"}
    assert [spec["name"] for spec in shown["inputs"]] == ["input_ids", "attention_mask"]
    explained = node.client.explain("cut")
    slices = explained["pool"]["slices"]
    assert len(slices) == 3
    assert all(each["nbytes"] <= 2 << 20 and each["last_device"] for each in slices)
    assert sum(each["nbytes"] for each in slices) >= explained["pool"]["nbytes"] > 5 << 20
    [used] = node.client.usage()
    assert (used["function"], used["requests"]) == ("cut", 4)
    assert used["device"]["moved_bytes"] > 5 << 20
    seen = node.client.activity()
    assert [(each["name"], each["requests"], each["attainment"]) for each in seen["functions"]] == [("cut", 4, 1.0)]
    on_devices = [each for device in node.client.devices() for each in device["functions"]]
    assert {each["function"] for each in on_devices} == {"cut@1"}
    assert {each["slice"] for each in on_devices} <= {None, 2, 3}
    for call in (node.client.function, node.client.remove, node.client.load, lambda name: asked(node, name)):
        with pytest.raises(OverwinterError):
            call("cut:2")
    with pytest.raises(ConflictError, match="cut into slices"):
        node.client.profile("cut")


HANDLER = "def postprocess(outputs, inputs, state):\n    return {name: value * 2 for name, value in outputs.items()}\n"


@pytest.mark.parametrize("device", ["pool", "any"])
def test_a_handler_calls_a_cut_program(make_node, device):
    node = make_node(*SMALL)
    put(node, "cut", handler=HANDLER, device=device)
    put(node, "whole")
    for rows, length in SIZES:
        assert same(asked(node, "cut", rows, length), [each * 2 for each in asked(node, "whole", rows, length)])
    node.client.unload("cut")
    node.client.load("cut")
    assert len(asked(node, "cut")) == 2
    node.client.remove("cut")
    wait_until(lambda: not node.client.devices()[0]["functions"] and not node.client.devices()[1]["functions"])


@pytest.mark.slow
def test_versions_of_a_cut_function_are_unloaded_loaded_and_served_after_restarts_with_other_devices(make_node):
    node = make_node(*SMALL)
    put(node, "f", device="pool")
    put(node, "f", seed=1, device="pool")
    assert near(asked(node, "f"), 1, 8, seed=1)
    assert near(asked(node, "f", version=1), 1, 8)
    node.client.unload("f")
    with pytest.raises(OverwinterError, match="f@2 is unloaded; load it first"):
        asked(node, "f")
    wait_until(lambda: node.stored_bytes() == 0)
    node.client.load("f")
    assert near(asked(node, "f"), 1, 8, seed=1)
    assert len(node.client.explain("f")["pool"]["slices"]) == 3
    data = node.options[:2]
    for memory, slices in (("4MiB", 2), ("16MiB", 0), ("1MiB", 8)):
        node.stop()
        node.options = [*data, "--devices", "2", "--device-memory", memory]
        node.start()
        assert near(asked(node, "f"), 1, 8, seed=1)
        found = len(node.client.explain("f")["pool"]["slices"])
        assert found == slices if memory != "1MiB" else found > 4
    node.client.remove("f", 2)
    assert near(asked(node, "f"), 1, 8)
    node.client.remove("f")
    with pytest.raises(NotFoundError):
        asked(node, "f")
    wait_until(lambda: node.stored_bytes() == 0)


def is_cancelled_in_a_later_slice(node: NodeProcess) -> bool:
    """Cancel a request in a later slice than the first; return False if it was answered before that."""
    empty(node)
    before, client = runs(node), Client(node.url)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        cancelled = threads.submit(client.infer, "f", request(1, 8))
        wait_until(lambda: runs(node) > before + 1)
        client.close()
        with suppress(OverwinterError, OSError, ValueError, RuntimeError):
            cancelled.result(60)
            return False
    return True


def test_a_request_may_expire_or_be_cancelled_in_any_slice(make_node):
    node = make_node(*SMALL, "--device-bandwidth", "4MiB")
    put(node, "f", device="pool")
    # All slices together are brought in more than a second.
    for timeout_s in (0.2, 0.6, 0.9):
        with pytest.raises(DeadlineError, match="function f@1 was not answered within"):
            asked(node, "f", timeout_s=timeout_s)
        empty(node)
    # It may be answered before it is cancelled.
    wait_until(lambda: is_cancelled_in_a_later_slice(node))
    wait_until(lambda: node.client.activity()["running"] == 0)
    assert near(asked(node, "f"), 1, 8)


def test_a_refusal_names_the_call_whose_weights_fit_on_no_device(make_node):
    node = make_node("--devices", "1", "--device-memory", "1MiB")
    model = torch.nn.Embedding(1 << 16, 8)
    made = export(model, {"input": torch.zeros(2, 4, dtype=torch.int64)})
    with pytest.raises(NoSpaceError, match=r"the 2097152 bytes .* call of 'f' .*aten.embedding.* device of 1048576"):
        package("f", made.program, made.weights, settings=settings_of(None, {"device": "pool"})).upload(node.client)
    assert node.client.functions() == []


@pytest.mark.slow
def test_slices_on_null_devices_share_the_profiled_latency_of_the_whole_program(make_node):
    node = make_node("--devices", "3", "--device-memory", "2MiB", "--device-kind", "null")
    assert "its program is cut into 3 slices" in put(node, "cut", device="pool").warning
    with pytest.raises(OverwinterError, match="from a profile: use `overwinter profile`"):
        asked(node, "cut")
    with pytest.raises(ConflictError, match="another name"):
        node.client.profile("cut")
    put(node, "whole")
    measured = node.client.profile("whole", options=ProfileOptions(cores=(1,), batches=(1,), concurrency=(1,)))
    assert node.client.known_profile("cut").points == measured.points
    answer = asked(node, "cut", 2, 16)
    assert [each.shape for each in answer] == [each.shape for each in asked(node, "whole", 2, 16)]
    put(node, "again", seed=1, device="pool")
    assert asked(node, "again")
    steps = [step[1] for step in node.steps()]
    told = {each["function"]: each["profile"] for each in steps if each["type"] == "Profiled"}
    later = [each["function"] for each in steps if each["type"] == "Deployed" and "again" in each["function"]["id"]]
    told |= {spec["id"]: spec["profile"] for spec in later}
    for name in ("cut", "again"):
        parts = [told[f"{name}{part}@1"]["points"][0][-1] for part in ("", ":2", ":3")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(measured.points[0].latency_s)
