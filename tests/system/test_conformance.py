"""A live node gets requests generated from its own OpenAPI document, and every answer conforms to that document."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from overwinter.api.client import Client
from overwinter.store.blocks import address_of
from overwinter.store.tokens import Quota, TokenFile

from .nodes import NodeProcess, deploy, torch

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    allow_header_conformance,
]
KEPT, DOOMED = "kept", "doomed"
EXPECTED = (503, 504, 507)
"""Statuses from 500 on that are no errors of the node."""

TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
INFER = msgspec.json.encode({"inputs": [TENSOR | {"data": [1, 2, 3, 4]}]})
PIPELINE = {
    "name": DOOMED,
    "inputs": ["x"],
    "stages": {"only": {"function": KEPT, "inputs": {"x": "input:x"}}},
    "outputs": {"y": "only:y"},
}
BLOCK = b"a block of the test"
FITTING = {
    ("POST", "infer"): (INFER, {"Content-Type": "application/json"}),
    ("POST", "profile"): (b'{"cores":[1],"batches":[1],"concurrency":[1],"layers":false}', {}),
    ("POST", "pipelines"): (msgspec.json.encode(PIPELINE), {}),
    ("POST", "missing"): (msgspec.json.encode({"addresses": [address_of(BLOCK)]}), {}),
    ("PUT", "{address}"): (BLOCK, {}),
    ("PUT", "traffic"): (b'{"shares":[{"version":1,"percent":100}]}', {}),
}
"""Bodies that are right for what is deployed, by method and the end of the path: a generator would not find them."""


def send(case, token: str, named: bool, fits: bool) -> object:
    """Send a generated case. With `named` it is sent to what is deployed; with `fits` its body is right for that. If
    `token` is not empty, it replaces a generated token.
    """
    body, headers = None, {}
    if fits:
        body, headers = FITTING.get((case.method, case.path.rpartition("/")[2]), (None, {}))
    if token:
        headers = headers | {"Authorization": f"Bearer {token}"}
    if named:
        own = {"name": DOOMED if case.method == "DELETE" else KEPT, "version": 1, "address": address_of(BLOCK)}
        case.path_parameters.update({name: value for name, value in own.items() if name in case.path_parameters})
        # What is deployed belongs to the default tenant.
        case.headers.pop("Overwinter-Tenant", None)
    if body is not None:
        case.headers.pop("Inference-Header-Content-Length", None)
        return case.call(headers=headers, timeout=60, data=body)
    return case.call(headers=headers, timeout=60)


def check_conformance(node: NodeProcess, examples: int, tokens: Sequence[str] = ("",)) -> Counter[int]:
    """Try each operation with `examples` cases, right and wrong ones; return how often each status came."""
    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{node.url}/openapi.json")
    statuses: Counter[int] = Counter()
    for operation in (result.ok() for result in schema.get_all_operations()):
        strategies = [operation.as_strategy(generation_mode=GenerationMode.POSITIVE)]
        if operation.body or operation.path_parameters or operation.headers:
            strategies.append(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))

        @seed(11)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=st.one_of(strategies), token=st.sampled_from(tokens), named=st.booleans(), fits=st.booleans())
        def attempt(case, token, named, fits):
            response = send(case, token, named, fits)
            statuses[response.status_code] += 1
            assert response.status_code < 500 or response.status_code in EXPECTED, response.text
            case.validate_response(response, checks=CHECKS)

        attempt()
    return statuses


@pytest.fixture
def conforming(make_node):
    node = make_node()
    deploy(node, KEPT)
    yield node
    assert not any("failed unexpectedly" in line or "Traceback" in line for line in node.said)
    # Whatever was sent, the function still works; the last request may have unloaded it.
    node.client.load(KEPT)
    assert node.client.infer(KEPT, {"x": torch.ones(1, 4)})["y"].tolist() == [[3.0] * 4]


def test_every_answer_conforms_to_the_document(conforming: NodeProcess):
    assert {200, 400, 404} <= check_conformance(conforming, 2).keys()


def test_every_answer_to_requests_with_and_without_a_token_conforms_to_the_document(conforming: NodeProcess):
    file = TokenFile(conforming.data)
    made = [file.create("default", (scope,), "", 0.0)[1] for scope in ("infer", "deploy", "admin")]
    slow = file.create("slow", ("infer", "deploy"), "", 0.0)[1]
    file.limit("slow", Quota(requests_per_s=0.1))
    statuses = check_conformance(conforming, 8, ("", *made, slow))
    assert {200, 400, 401, 403, 404, 429} <= statuses.keys()
    conforming.client.close()
    conforming.client = Client(conforming.url, token=made[-1])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_answer_conforms_to_the_document_in_thousands_of_cases(conforming: NodeProcess):
    statuses = check_conformance(conforming, 240)
    assert statuses.total() >= 5000
    assert {200, 201, 400, 403, 404, 409} <= statuses.keys()
