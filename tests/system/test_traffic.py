"""Promotion, rollback and split of the traffic on real nodes, across a restart, and without a lost request."""

import json
from collections import Counter

import pytest
import torch

from overwinter.api.client import Client
from overwinter.core.errors import CallerError, ConflictError, ForbiddenError, NotFoundError
from overwinter.core.journal import read_journal
from overwinter.core.pipeline import Pipeline, Stage
from overwinter.scheduler.scheduler import Scheduler
from overwinter.store.tokens import TokenFile

from .nodes import NodeProcess, Scale, ask, asking, deploy, wait_until


class Two(torch.nn.Module):
    """A model with the inputs of Scale and another output."""

    def forward(self, x):
        return {"z": x + 1}


def versions(node: NodeProcess, name: str, *factors: float) -> None:
    for factor in factors:
        deploy(node, name, Scale(factor))


def traffic(node: NodeProcess, name: str) -> dict[int, int]:
    return {each["version"]: each["traffic"] for each in node.client.functions() if each["name"] == name}


def answered(node: NodeProcess, name: str, count: int) -> Counter[float]:
    return Counter(ask(node, name)[0] for _ in range(count))


def test_a_promotion_survives_a_deploy_and_a_restart(shared_node):
    node = shared_node()
    versions(node, "promoted", 2.0, 3.0)
    assert (ask(node, "promoted"), traffic(node, "promoted")) == ([4.0] * 4, {1: 0, 2: 100})
    node.client.set_traffic("promoted", {1: 100})
    made = deploy(node, "promoted", Scale(5.0))
    assert "promote" in made.warning
    assert (ask(node, "promoted"), traffic(node, "promoted")) == ([3.0] * 4, {1: 100, 2: 0, 3: 0})
    explained = [node.client.explain("promoted", version) for version in (1, 3)]
    assert [(each["traffic"], each["promoted"]) for each in explained] == [(100, True), (0, True)]
    node.stop()
    node.start()
    assert (ask(node, "promoted"), traffic(node, "promoted")) == ([3.0] * 4, {1: 100, 2: 0, 3: 0})
    node.client.set_traffic("promoted", {})
    assert ask(node, "promoted") == [6.0] * 4
    assert deploy(node, "promoted", Scale(7.0)).warning == ""
    assert ask(node, "promoted") == [8.0] * 4


def test_a_split_is_exact_reported_by_version_and_replayed(make_node):
    node = make_node()
    versions(node, "f", 2.0, 3.0)
    node.client.set_traffic("f", {1: 90, 2: 10})
    assert answered(node, "f", 100) == {3.0: 90, 4.0: 10}
    assert traffic(node, "f") == {1: 90, 2: 10}
    result = node.client.metrics()
    for version, count in ((1, 90), (2, 10)):
        labels = f'error="",function="f",outcome="answered",version="{version}"'
        assert f"overwinter_version_requests_total{{{labels}}} {count}.0" in result
        explained = node.client.explain("f", version)
        assert (explained["answered"], explained["refused"]) == (count, 0)
    node.client.set_traffic("f", {2: 100})
    assert answered(node, "f", 5) == {4.0: 5}
    node.stop()
    with node.journal.open("rb") as file:
        config, steps = read_journal(file)
        again = Scheduler(config)
        for step in steps:
            assert tuple(again.handle(step.event, step.now)) == step.actions


def test_a_promotion_loses_no_request(node: NodeProcess):
    versions(node, "traffic-moved", 2.0, 5.0)
    node.client.set_traffic("traffic-moved", {1: 100})
    with asking(node, "traffic-moved") as answers:
        for shares, value in (({2: 100}, 6.0), ({1: 50, 2: 50}, 3.0), ({1: 100}, 3.0)):
            node.client.set_traffic("traffic-moved", shares)
            seen = len(answers)
            wait_until(lambda seen=seen, value=value: value in answers[seen + 1 :])
    assert set(answers) == {3.0, 6.0}


def test_an_invalid_split_is_refused_and_changes_nothing(node: NodeProcess):
    versions(node, "traffic-split", 2.0, 3.0)
    deploy(node, "traffic-split", Two())
    node.client.set_traffic("traffic-split", {1: 90, 2: 10})
    for shares, error, said in (
        ({1: 50, 9: 50}, NotFoundError, "9"),
        ({1: 50, 3: 50}, ConflictError, "inputs or outputs"),
        ({1: 50}, CallerError, "50 per cent"),
    ):
        with pytest.raises(error, match=said):
            node.client.set_traffic("traffic-split", shares)
    with pytest.raises(NotFoundError):
        node.client.set_traffic("absent", {1: 100})
    with pytest.raises(ConflictError, match="promote another version first"):
        node.client.remove("traffic-split", 2)
    assert traffic(node, "traffic-split") == {1: 90, 2: 10, 3: 0}
    node.client.set_traffic("traffic-split", {1: 100})
    node.client.remove("traffic-split", 2)
    node.client.remove("traffic-split")
    versions(node, "traffic-split", 7.0)
    assert (ask(node, "traffic-split"), traffic(node, "traffic-split")) == ([8.0] * 4, {4: 100})


def test_a_split_cannot_break_a_pipeline(node: NodeProcess):
    versions(node, "traffic-stage", 2.0)
    stages = {"only": Stage(function="traffic-stage", inputs={"x": "input:x"})}
    node.client.deploy_pipeline(Pipeline(name="traffic-passes", inputs=("x",), stages=stages, outputs={"y": "only:y"}))
    node.client.set_traffic("traffic-stage", {1: 100})
    # This version does not serve the name, so it breaks no pipeline.
    deploy(node, "traffic-stage", Two())
    assert ask(node, "traffic-passes") == [3.0] * 4
    for shares in ({2: 100}, {}):
        with pytest.raises(ConflictError, match="traffic-passes"):
            node.client.set_traffic("traffic-stage", shares)
    with pytest.raises(ConflictError, match="is a pipeline"):
        node.client.set_traffic("traffic-passes", {1: 100})
    assert ask(node, "traffic-passes") == [3.0] * 4
    node.client.remove("traffic-passes")


def test_load_loads_all_versions_that_have_a_share(node: NodeProcess):
    versions(node, "traffic-loaded", 2.0, 3.0)
    node.client.set_traffic("traffic-loaded", {1: 50, 2: 50})
    node.client.unload("traffic-loaded")
    assert not node.client.ready("traffic-loaded", 1)
    node.client.load("traffic-loaded")
    assert answered(node, "traffic-loaded", 4) == {3.0: 2, 4.0: 2}


def test_an_unloaded_version_gets_requests_only_after_it_is_loaded(node: NodeProcess):
    versions(node, "traffic-unloaded", 2.0, 3.0)
    node.client.unload("traffic-unloaded", 1)
    assert [node.client.ready("traffic-unloaded", version) for version in (1, 2)] == [False, True]
    for shares in ({1: 100}, {1: 50, 2: 50}):
        with pytest.raises(ConflictError, match="load traffic-unloaded@1"):
            node.client.set_traffic("traffic-unloaded", shares)
    assert answered(node, "traffic-unloaded", 2) == {4.0: 2}
    node.client.load("traffic-unloaded", 1)
    node.client.set_traffic("traffic-unloaded", {1: 100})
    assert answered(node, "traffic-unloaded", 2) == {3.0: 2}
    node.client.unload("traffic-unloaded", 2)
    with pytest.raises(ConflictError, match="load traffic-unloaded@2"):
        node.client.set_traffic("traffic-unloaded", {})
    assert answered(node, "traffic-unloaded", 2) == {3.0: 2}


def test_a_split_needs_the_scope_deploy_and_is_in_the_audit_log(make_node):
    node = make_node()
    versions(node, "f", 2.0, 3.0)
    file = TokenFile(node.data)
    tokens = [file.create("default", (scope,), "", 0.0)[1] for scope in ("infer", "deploy")]
    other = file.create("other", ("deploy",), "", 0.0)[1]
    for token, error in ((tokens[0], ForbiddenError), (other, NotFoundError)):
        with Client(node.url, token=token) as client, pytest.raises(error):
            client.set_traffic("f", {1: 100})
    with Client(node.url, token=tokens[1]) as client:
        client.set_traffic("f", {1: 100})
        assert client.function("f")["version"] == 1
    lines = [json.loads(line) for line in (node.data / "audit.jsonl").read_text().splitlines()]
    path = "/overwinter/v1/functions/f/traffic"
    assert [(line["status"], line["method"]) for line in lines if line["path"] == path] == [
        (403, "PUT"),
        (404, "PUT"),
        (200, "PUT"),
    ]
