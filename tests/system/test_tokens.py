"""Two tenants with tokens on one real node: no attempt of one on the other's functions succeeds or reveals anything."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import msgspec
import numpy
import pytest
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from overwinter.api.client import Client
from overwinter.api.deployer import package
from overwinter.core.errors import CallerError, NoSpaceError
from overwinter.core.pipeline import Pipeline, Stage
from overwinter.core.profiling import ProfileOptions
from overwinter.model.agreement import agree
from overwinter.model.export import export
from overwinter.store.tokens import Quota, TokenFile
from tests.system.nodes import NodeProcess, Scale, torch

X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 1.0, 1.0, 1.0]}]}
ADDRESS = re.compile("[0-9a-f]{64}")


class Tenants(NamedTuple):
    """A node with a used function and a used pipeline of `alice`, and a function of `bob`."""

    node: NodeProcess
    alice: Client
    bob: Client
    tokens: dict[str, str]
    secret: list[str]
    """The addresses of blobs that only alice has sent."""


def made(name: str, factor: float):
    return package(name, *agree(export(Scale(factor), {"x": torch.zeros(2, 4)})))


def pipeline(name: str, function: str) -> Pipeline:
    stages = {"only": Stage(function=function, inputs={"x": "input:x"})}
    return Pipeline(name=name, inputs=("x",), stages=stages, outputs={"y": "only:y"})


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    node = NodeProcess(tmp_path_factory.mktemp("tokens"))
    file = TokenFile(node.data)
    tokens = {tenant: file.create(tenant, ("infer", "deploy"), "", 0.0)[1] for tenant in ("alice", "bob")}
    tokens["administrator"] = file.create("ops", ("admin",), "", 0.0)[1]
    alice, bob = (Client(node.url, token=tokens[tenant]) for tenant in ("alice", "bob"))
    packed = made("vault", 3.0)
    packed.upload(alice)
    alice.deploy_pipeline(pipeline("chain", "vault"))
    made("bobs", 2.0).upload(bob)
    for name in ("vault", "chain"):
        assert alice.infer(name, {"x": torch.ones(1, 4)})["y"].tolist() == [[4.0] * 4]
    secret = [blob.address for blob in packed.manifest.blobs() if blob not in made("x", 2.0).manifest.blobs()]
    yield Tenants(node, alice, bob, tokens, secret)
    alice.close()
    bob.close()
    node.clean()


def attempts(names: tuple[str, ...]) -> list[tuple[str, str, object]]:
    """Return bob's attempts on functions and pipelines of these names."""
    tried: list[tuple[str, str, object]] = []
    for name in names:
        model, mine = f"/v2/models/{name}", f"/overwinter/v1/functions/{name}"
        tried += [
            ("POST", f"{model}/infer", X),
            ("POST", f"{model}/versions/1/infer", X),
            ("POST", f"{model}/versions/99/infer", X),
            ("GET", model, None),
            ("HEAD", model, None),
            ("GET", f"{model}/versions/1", None),
            ("GET", f"{model}/ready", None),
            ("GET", f"{model}/config", None),
            ("GET", mine, None),
            ("GET", f"{mine}/versions/1", None),
            ("GET", f"{mine}/explain", None),
            ("GET", f"{mine}/versions/1/explain", None),
            ("GET", f"{mine}/logs", None),
            ("GET", f"{mine}/versions/1/logs", None),
            ("GET", f"{mine}/profile", None),
            ("POST", f"{mine}/profile", {}),
            ("POST", f"{mine}/versions/1/profile", {}),
            ("POST", f"/v2/repository/models/{name}/load", None),
            ("POST", f"/v2/repository/models/{name}/unload", None),
            ("PUT", f"{mine}/traffic", {"shares": [{"version": 1, "percent": 100}]}),
            ("DELETE", mine, None),
            ("DELETE", f"{mine}/versions/1", None),
        ]
    return tried


def tried(tenants: Tenants, calls: list[tuple[str, str, object]]) -> list[tuple[int, str]]:
    headers = {"authorization": f"Bearer {tenants.tokens['bob']}"}
    with httpx.Client(base_url=tenants.node.url, trust_env=False, headers=headers, timeout=30) as http:
        answers = [http.request(method, path, json=body) for method, path, body in calls]
    return [(answer.status_code, answer.text) for answer in answers]


def test_functions_of_another_tenant_appear_not_to_exist(tenants: Tenants) -> None:
    theirs = tried(tenants, attempts(("vault", "chain", "alice..vault")))
    nobodys = tried(tenants, attempts(("empty", "other", "alice..empty")))
    assert len(theirs) == 66
    assert {status for status, _ in theirs} == {404}
    plain = [(status, re.sub("vault|chain|empty|other", "NAME", text)) for status, text in theirs]
    assert plain == [(status, re.sub("vault|chain|empty|other", "NAME", text)) for status, text in nobodys]
    assert tenants.alice.infer("vault", {"x": torch.ones(1, 4)})["y"].tolist() == [[4.0] * 4]
    assert {each["name"] for each in tenants.alice.functions()} == {"vault"}


@pytest.mark.parametrize("header", ["alice", "ops", "absent"])
def test_no_header_changes_the_tenant_of_a_token(tenants: Tenants, header: str) -> None:
    with httpx.Client(base_url=tenants.node.url, trust_env=False) as http:
        headers = {"authorization": f"Bearer {tenants.tokens['bob']}", "overwinter-tenant": header}
        answers = [
            http.request(method, path, json=body, headers=headers) for method, path, body in attempts(("vault",))
        ]
    assert {answer.status_code for answer in answers} == {403}


def test_no_answer_names_functions_of_another_tenant(tenants: Tenants) -> None:
    results = {
        "functions": tenants.bob.functions(),
        "pipelines": tenants.bob.pipelines(),
        "activity": tenants.bob.activity(),
        "usage": tenants.bob.usage(),
        "usage of the other": tenants.bob.usage("alice"),
        "usage of an absent tenant": tenants.bob.usage("absent"),
        "metrics": tenants.bob.metrics(),
    }
    for path in ("/v2/models", "/v2/repository/index"):
        method = "POST" if path.endswith("index") else "GET"
        results[path] = tried(tenants, [(method, path, None)])
    named = {
        what: [word for word in ("alice", "vault", "chain", "ops") if word in str(it)] for what, it in results.items()
    }
    assert named == {what: [] for what in results}
    assert results["usage of the other"] == results["usage of an absent tenant"] == []
    assert all("bobs" in str(results[what]) for what in ("functions", "activity", "usage", "metrics", "/v2/models"))
    assert "bob.." not in str(results)


def test_answers_do_not_depend_on_functions_of_other_tenants(tenants: Tenants) -> None:
    """Bytes that are reported as shared, or billed in part, would reveal which tenants have the same weights."""
    [used] = tenants.bob.usage()
    assert (used["disk_byte_s"], used["host_byte_s"]) == (None, None)
    activity = tenants.bob.activity()
    assert [each["exclusive_bytes"] for each in activity["functions"]] == [None]
    assert (activity["versions_deployed"], activity["cores_running"], activity["host_budget"]) == (1, None, None)
    assert "overwinter_function_bytes" not in tenants.bob.metrics()
    assert "overwinter_workers" not in tenants.bob.metrics()


def test_blocks_of_another_tenant_are_reported_as_missing_and_cannot_be_used(tenants: Tenants) -> None:
    assert tenants.secret
    wanted = ["ab" * 32, *tenants.secret]
    assert tenants.bob.missing(wanted) == wanted
    assert tenants.alice.missing(tenants.secret) == []
    stolen = made("stolen", 3.0).manifest
    absent = made("stolen", 5.0).manifest
    calls = [("POST", "/overwinter/v1/functions", msgspec.to_builtins(each)) for each in (stolen, absent)]
    answers = [(status, ADDRESS.sub("ADDRESS", text)) for status, text in tried(tenants, calls)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 409
    claimed = msgspec.structs.replace(stolen, tenant="alice")
    assert tried(tenants, [("POST", "/overwinter/v1/functions", msgspec.to_builtins(claimed))])[0][0] == 403


def test_a_pipeline_calls_no_function_of_another_tenant(tenants: Tenants) -> None:
    calls = [
        ("POST", "/overwinter/v1/pipelines", msgspec.to_builtins(pipeline("steal", name))) for name in ("vault", "no")
    ]
    answers = tried(tenants, calls)
    assert [status for status, _ in answers] == [404, 404]
    assert answers[0][1].replace("vault", "no") == answers[1][1]
    qualified = msgspec.to_builtins(pipeline("steal", "alice..vault"))
    assert tried(tenants, [("POST", "/overwinter/v1/pipelines", qualified)])[0][0] == 404


def test_both_tenants_may_have_a_function_of_the_same_name(tenants: Tenants) -> None:
    made("vault", 5.0).upload(tenants.bob)
    try:
        for client, value in ((tenants.alice, 4.0), (tenants.bob, 6.0)):
            assert client.infer("vault", {"x": torch.ones(1, 4)})["y"].tolist() == [[value] * 4]
            assert client.explain("vault")["name"] == "vault"
        tenants.bob.deploy_pipeline(pipeline("chain", "vault"))
        assert tenants.bob.infer("chain", {"x": torch.ones(1, 4)})["y"].tolist() == [[6.0] * 4]
        assert tenants.bob.function("chain")["stages"]["only"]["function"] == "vault"
        tenants.bob.remove("chain")
    finally:
        tenants.bob.remove("vault")
    assert tenants.alice.infer("chain", {"x": torch.ones(1, 4)})["y"].tolist() == [[4.0] * 4]


def test_a_tenant_manages_its_own_functions(tenants: Tenants) -> None:
    profile = tenants.bob.profile("bobs", options=ProfileOptions(cores=(1,), batches=(1,), layers=False))
    assert tenants.bob.known_profile("bobs").points == profile.points
    tenants.bob.unload("bobs")
    assert not tenants.bob.ready("bobs")
    with pytest.raises(CallerError, match="'bobs' is unloaded"):
        tenants.bob.profile("bobs")
    tenants.bob.load("bobs")
    assert tenants.bob.ready("bobs", 1)


def test_the_administrator_sees_the_whole_node(tenants: Tenants) -> None:
    with Client(tenants.node.url, token=tenants.tokens["administrator"]) as administrator:
        assert {each["tenant"] for each in administrator.usage()} >= {"alice", "bob"}
        assert {each["name"] for each in administrator.activity()["functions"]} >= {"alice..vault", "bob..bobs"}
        assert 'overwinter_workers{state="' in administrator.metrics()
        assert [each["name"] for each in administrator.for_tenant("alice").functions()] == ["vault"]


def test_a_tenant_deploys_no_more_functions_than_its_quota(tenants: Tenants) -> None:
    file = TokenFile(tenants.node.data)
    file.limit("bob", Quota(functions=1))
    try:
        with pytest.raises(NoSpaceError, match="may have 1"):
            made("more", 2.0).upload(tenants.bob)
    finally:
        file.limit("bob", Quota())


def test_the_reference_client_works_with_a_token(tenants: Tenants) -> None:
    x = numpy.ones((1, 4), dtype=numpy.float32)
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    with triton.InferenceServerClient(tenants.node.url.removeprefix("http://")) as client:
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="token"):
            client.infer("bobs", [tensor])
        headers = {"Authorization": f"Bearer {tenants.tokens['bob']}"}
        assert client.infer("bobs", [tensor], headers=headers).as_numpy("y").tolist() == [[3.0] * 4]
        assert client.get_model_metadata("bobs", headers=headers)["name"] == "bobs"


def test_changes_are_in_the_audit_log(tenants: Tenants) -> None:
    tried(tenants, [("DELETE", "/overwinter/v1/functions/vault", None)])
    lines = [json.loads(line) for line in (tenants.node.data / "audit.jsonl").read_text().splitlines()]
    seen = {(line["tenant"], line["method"], line["path"], line["status"]) for line in lines}
    assert ("alice", "POST", "/overwinter/v1/functions", 201) in seen
    assert ("alice", "POST", "/overwinter/v1/pipelines", 201) in seen
    assert ("bob", "DELETE", "/overwinter/v1/functions/vault", 404) in seen
