"""The OpenAPI document and the pages refer to nothing that is missing, and the document has the methods that exist."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.fake_node import Served

METHODS = {"get", "put", "post", "delete"}


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    return http.get("/openapi.json").json()


def references(part: Any) -> Iterator[str]:
    """Yield every reference in the document."""
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from references(each)


def test_the_document_has_all_schemas_that_it_refers_to_and_describes_every_operation(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    found = set(references(document))
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert found <= known
    assert "#/components/schemas/InferRequest" in found
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] and operation["responses"] for operation in operations)


def test_every_path_of_the_document_says_which_methods_it_takes(http: httpx.Client, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        url = re.sub(r"{\w+}", "nothing-there", path)
        answer = http.request("PATCH", url)
        allowed = {method.lower() for method in answer.headers["allow"].split(", ")} - {"head"}
        # `/blocks/missing` is also a `/blocks/{address}`.
        matching = (each for each in document["paths"] if re.fullmatch(re.sub(r"{\w+}", "[^/]+", each), url))
        assert (answer.status_code, allowed) == (405, {m for each in matching for m in document["paths"][each]}), path
        assert {"error"} == set(answer.json())
        assert set(methods) <= METHODS


def test_bodies_that_are_not_json_are_described(document: dict[str, Any]) -> None:
    infer = document["paths"]["/v2/models/{name}/infer"]["post"]
    for content in (infer["requestBody"]["content"], infer["responses"]["200"]["content"]):
        assert set(content) == {"application/json", "application/octet-stream"}
        assert "Inference-Header-Content-Length" in content["application/octet-stream"]["schema"]["description"]
    blocks = document["paths"]["/overwinter/v1/blocks/{address}"]["put"]
    assert set(blocks["requestBody"]["content"]) == {"application/octet-stream"}


def test_patterns_are_those_of_json_schema(document: dict[str, Any]) -> None:
    def patterns(value: Any) -> Iterator[str]:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if key == "pattern" and isinstance(each, str):
                yield each
            elif isinstance(each, dict | list):
                yield from patterns(each)

    found = set(patterns(document))
    assert "^[0-9a-f]{64}$" in found
    assert [each for each in found if "\\A" in each or "\\Z" in each] == []


def test_tokens_are_described(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    for operation in (operation for operation in operations if operation["security"]):
        answers = operation["responses"]
        assert {"400", "401", "403", "429", "503"} <= set(answers)
        assert "WWW-Authenticate" in answers["401"]["headers"]
        assert all("Retry-After" in answers[status]["headers"] for status in ("429", "503"))
        assert "overwinter-tenant" in {each["name"] for each in operation["parameters"]}
    logs = document["paths"]["/overwinter/v1/functions/{name}/logs"]["get"]
    assert logs["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "array"


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_pages_need_nothing_from_elsewhere(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "Overwinter" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|src=|@import", answer.text)


def test_the_pages_link_only_to_paths_of_the_document(
    http: httpx.Client, served: Served, document: dict[str, Any]
) -> None:
    for path in ("/", "/docs"):
        links = set(re.findall(r'href="([^"#]+)"', http.get(path).text))
        assert links
        assert links <= set(document["paths"])
