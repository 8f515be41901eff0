"""A node with tokens: who has access, to which operations, and for which tenant."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from overwinter.api import audit
from overwinter.api.access import Access
from overwinter.api.client import Client
from overwinter.core.errors import ForbiddenError, NotFoundError, RateError, StoreError, UnauthorizedError
from overwinter.store.blocks import address_of
from overwinter.store.tokens import FILE, Quota, TokenFile
from tests.api.fake_node import Served, manifest_of, serving, spec

TAKES = (spec("x", "FP32", "batch", 2),)
GIVES = (spec("y", "FP32", "batch", 2),)
Connect = Callable[..., Client]
X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path)


@pytest.fixture
def served(tmp_path: Path, tokens: TokenFile) -> Iterator[Served]:
    with serving(tmp_path, tokens=tokens) as served:
        yield served


def made(tokens: TokenFile, tenant: str, *scopes: str) -> str:
    return tokens.create(tenant, scopes or ("infer", "deploy"), "", 0.0)[1]


@pytest.fixture
def client() -> Iterator[Connect]:
    """Yield a function that creates clients, and close them at the end."""
    with ExitStack() as opened:

        def connect(served: Served, token: str | None = None, tenant: str = "default") -> Client:
            return opened.enter_context(Client(served.url, 20, tenant, token))

        yield connect


def deploy(client: Client, name: str, program: bytes, tenant: str = "default") -> int:
    client.put_block(address_of(program), program)
    manifest = msgspec.structs.replace(manifest_of(name, program, TAKES, GIVES), tenant=tenant)
    return client.register(manifest).version


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_once_there_is_a_token_requests_without_one_are_refused_also_on_open_connections(
    served: Served, tokens: TokenFile, http: httpx.Client
) -> None:
    assert http.get("/v2/models/add").status_code == 200
    made(tokens, "acme")
    assert http.get("/v2/models/add").status_code == 401


@pytest.mark.parametrize(
    "said",
    [
        None,
        "",
        "Bearer",
        "Bearer ow_0_0",
        "Basic {}",
        "{}",
        "Bearer {}x",
        "Bearer x {}",
        "Bearer\xff",
        f"Bearer{300 * ' '}{{}}",
    ],
)
def test_a_request_without_a_valid_token_gets_the_same_401_on_any_path_but_health(
    served: Served, tokens: TokenFile, http: httpx.Client, said: str | None
) -> None:
    token = made(tokens, "default")
    headers = [] if said is None else [(b"authorization", said.format(token).encode("latin-1"))]
    answers = [http.request(*each, headers=headers) for each in (("GET", "/v2/models/add"), ("PUT", "/nowhere"))]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert answers[0].headers["www-authenticate"].startswith("Bearer")
    assert answers[0].text == answers[1].text
    assert [http.get(f"/v2/health/{each}", headers=headers).status_code for each in ("live", "ready")] == [200, 200]


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_the_scheme_of_a_token_may_be_in_any_case_and_several_spaces_may_follow(
    served: Served, tokens: TokenFile, http: httpx.Client, scheme: str
) -> None:
    token = made(tokens, "default")
    assert http.get("/v2/models/add", headers={"authorization": scheme + token}).status_code == 200


def test_a_revoked_token_is_refused_immediately_even_on_an_open_connection(
    served: Served, tokens: TokenFile, http: httpx.Client
) -> None:
    gone, text = tokens.create("default", ("infer",), "", 0.0)
    other = made(tokens, "default")
    assert http.get("/v2/models/add", headers=bearer(text)).status_code == 200
    tokens.revoke(gone.id)
    assert http.get("/v2/models/add", headers=bearer(text)).status_code == 401
    assert http.get("/v2/models/add", headers=bearer(other)).status_code == 200


def test_tokens_outlive_a_node_and_when_all_are_revoked_requests_without_one_are_still_refused(
    client: Connect, tmp_path: Path, tokens: TokenFile
) -> None:
    token, text = tokens.create("default", ("infer",), "", 0.0)
    with serving(tmp_path, tokens=TokenFile(tmp_path)) as served:
        assert client(served, text).function("add")["version"] == 2
        tokens.revoke(token.id)
    with serving(tmp_path, tokens=TokenFile(tmp_path)) as served:
        for known in (None, text):
            with pytest.raises(UnauthorizedError):
                client(served, known).function("add")


READS = [
    ("GET", "/v2"),
    ("GET", "/v2/models"),
    ("GET", "/v2/models/mine"),
    ("GET", "/v2/models/mine/config"),
    ("POST", "/v2/repository/index"),
    ("GET", "/overwinter/v1/functions"),
    ("GET", "/overwinter/v1/functions/mine"),
    ("GET", "/overwinter/v1/pipelines"),
]
RUNS = [("POST", "/v2/models/mine/infer"), ("POST", "/v2/models/mine/versions/1/infer")]
CHANGES = [
    ("POST", "/overwinter/v1/blocks/missing"),
    ("PUT", f"/overwinter/v1/blocks/{'0' * 64}"),
    ("POST", "/overwinter/v1/functions"),
    ("POST", "/overwinter/v1/pipelines"),
    ("POST", "/overwinter/v1/functions/absent/profile"),
    ("POST", "/v2/repository/models/mine/load"),
    ("POST", "/v2/repository/models/mine/unload"),
    ("POST", "/v2/repository/models/mine/versions/1/load"),
    ("POST", "/v2/repository/models/mine/versions/1/unload"),
    ("DELETE", "/overwinter/v1/functions/mine/versions/9"),
    ("DELETE", "/overwinter/v1/functions/absent"),
]


@pytest.mark.parametrize(
    ("scopes", "runs", "changes"),
    [
        (("infer",), True, False),
        (("deploy",), False, True),
        (("infer", "deploy"), True, True),
        (("admin",), True, True),
    ],
)
def test_a_token_does_what_its_scopes_say(
    client: Connect,
    served: Served,
    tokens: TokenFile,
    http: httpx.Client,
    scopes: tuple[str, ...],
    runs: bool,
    changes: bool,
) -> None:
    deploy(client(served, made(tokens, "acme")), "mine", b"a program")
    headers = bearer(made(tokens, "acme", *scopes))

    def refused(calls: list[tuple[str, str]]) -> set[bool]:
        return {http.request(*call, headers=headers, json=X).status_code == 403 for call in calls}

    assert (refused(READS), refused(RUNS), refused(CHANGES)) == ({False}, {not runs}, {not changes})


def test_every_operation_requires_the_scopes_that_the_openapi_document_names(
    served: Served, tokens: TokenFile, http: httpx.Client
) -> None:
    headers = bearer(made(tokens, "acme", "infer"))
    results: list[tuple[str, bool, bool]] = []
    found: list[tuple[str, bool, bool]] = []
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            what, url = f"{method} {path}", re.sub(r"{\w+}", "1", path)
            named = {scope for each in operation["security"] for scopes in each.values() for scope in scopes}
            results.append((what, operation["security"] == [], named <= {"infer"}))
            answers = [http.request(method, url, headers=each).status_code for each in ({}, headers)]
            found.append((what, answers[0] != 401, answers[1] != 403))
    assert found == results
    assert {what for what, is_open, _ in results if is_open} == {
        "get /", "get /docs", "get /openapi.json", "get /v2/health/live", "get /v2/health/ready",
    }  # fmt: skip
    assert sum(not may for *_, may in results) == 13


def test_two_tenants_use_one_name_and_neither_learns_of_the_other(
    client: Connect, served: Served, tokens: TokenFile
) -> None:
    a, b = (client(served, made(tokens, tenant)) for tenant in ("a", "b"))
    assert [deploy(a, "same", b"one"), deploy(a, "same", b"one"), deploy(b, "same", b"other")] == [1, 2, 1]
    assert [each["name"] for each in a.functions()] == ["same", "same"]
    assert b.function("same")["tenant"] == "b"
    assert a.infer("same", {"x": [[1.0, 2.0]]})["y"].tolist() == [[1.0, 2.0]]
    b.remove("same")
    with pytest.raises(NotFoundError, match="'same'") as refused:
        b.function("same")
    assert "b.." not in str(refused.value)
    assert len(a.functions()) == 2


def test_what_was_deployed_before_there_were_tokens_stays_its_tenant_s(
    client: Connect, served: Served, tokens: TokenFile
) -> None:
    deploy(client(served, tenant="acme"), "old", b"a program", tenant="acme")
    acme, default = client(served, made(tokens, "acme")), client(served, made(tokens, "default"))
    assert [each["name"] for each in acme.functions()] == ["old"]
    assert deploy(acme, "old", b"a program") == 2
    with pytest.raises(NotFoundError):
        default.function("old")
    assert deploy(default, "old", b"another") == 1
    acme.remove("old")
    assert default.function("old")["version"] == 1


@pytest.mark.parametrize("name", ["default", "acme"])
def test_a_token_acts_for_its_tenant_whatever_a_header_says(
    client: Connect, served: Served, tokens: TokenFile, http: httpx.Client, name: str
) -> None:
    acme = client(served, made(tokens, "acme"), tenant=name)
    deploy(acme, "mine", b"a program", tenant=name)
    assert acme.function("mine")["tenant"] == "acme"
    for other in ("someone", "default", "Not A Tenant"):
        headers = {**bearer(made(tokens, "else")), "overwinter-tenant": other}
        refused = http.get("/overwinter/v1/functions/mine", headers=headers)
        assert refused.status_code == (404 if other == "default" else 403)
    with pytest.raises(ForbiddenError):
        deploy(acme, "mine", b"a program", tenant="else")


def test_the_administrator_s_token_acts_for_any_tenant(client: Connect, served: Served, tokens: TokenFile) -> None:
    deploy(client(served, made(tokens, "acme")), "mine", b"a program")
    admin = made(tokens, "ops", "admin")
    with pytest.raises(NotFoundError):
        client(served, admin).function("mine")
    assert client(served, admin, "acme").function("mine")["tenant"] == "acme"
    client(served, admin, "acme").remove("mine")
    assert client(served, admin, "acme").functions() == []


def test_requests_beyond_a_tenant_s_rate_are_refused_with_retry_after(
    client: Connect, served: Served, tokens: TokenFile, http: httpx.Client
) -> None:
    tokens.limit("acme", Quota(requests_per_s=0.01))
    first, second, other = made(tokens, "acme"), made(tokens, "acme"), made(tokens, "else")
    assert http.get("/v2", headers=bearer(first)).status_code == 200
    refused = http.get("/v2", headers=bearer(second))
    assert refused.status_code == 429
    assert 90 <= int(refused.headers["retry-after"]) <= 100
    # A change of the token file does not reset a tenant's rate.
    made(tokens, "more")
    with pytest.raises(RateError) as result:
        client(served, first).functions()
    assert result.value.retry_after_s is not None
    assert client(served, other).functions() == []
    tokens.limit("acme", Quota())
    assert client(served, first).functions() == []


def test_the_client_waits_while_the_rate_is_exceeded_but_not_with_an_inference_request(
    client: Connect, served: Served, tokens: TokenFile
) -> None:
    tokens.limit("acme", Quota(requests_per_s=1))
    acme = client(served, made(tokens, "acme"))
    content = bytes(3 << 19)
    assert acme.functions() == []
    # The content of the first attempt, which was refused, is sent again.
    assert acme.put_block(address_of(content), content)
    with pytest.raises(RateError):
        acme.infer("any", {})


def test_a_tenant_stores_no_more_than_its_quota(served: Served, tokens: TokenFile, http: httpx.Client) -> None:
    tokens.limit("acme", Quota(nbytes=8192))
    acme, other = made(tokens, "acme"), made(tokens, "else")

    def put(token: str, content: bytes) -> int:
        path = f"/overwinter/v1/blocks/{address_of(content)}"
        return http.put(path, content=content, headers=bearer(token)).status_code

    assert [put(acme, b"1"), put(acme, b"2"), put(acme, b"3"), put(other, b"3")] == [201, 201, 507, 201]


def test_changes_are_written_to_the_audit_log(
    client: Connect, served: Served, tokens: TokenFile, tmp_path: Path, http: httpx.Client
) -> None:
    token, text = tokens.create("acme", ("infer", "deploy"), "ci", 0.0)
    acme = client(served, text)
    deploy(acme, "mine", b"a program")
    acme.infer("mine", {"x": [[1.0, 2.0]]})
    acme.remove("mine")
    infers = bearer(made(tokens, "acme", "infer"))
    acme.missing([])
    for method in ("DELETE", "GET", "PATCH"):
        http.request(method, "/overwinter/v1/functions/mine", headers=infers)
    http.delete("/overwinter/v1/nothing/here", headers=infers)
    http.delete("/overwinter/v1/functions/mine")
    lines = [json.loads(line) for line in (tmp_path / audit.FILE).read_text().splitlines()]
    block = f"/overwinter/v1/blocks/{address_of(b'a program')}"
    assert [(each["method"], each["path"], each["status"]) for each in lines] == [
        ("PUT", block, 201),
        ("POST", "/overwinter/v1/functions", 201),
        ("DELETE", "/overwinter/v1/functions/mine", 200),
        ("DELETE", "/overwinter/v1/functions/mine", 403),
    ]
    assert {(each["by"], each["label"], each["tenant"], each["address"]) for each in lines[:3]} == {
        (token.id, "ci", "acme", "127.0.0.1")
    }
    assert text not in (tmp_path / audit.FILE).read_text()


def test_a_token_file_that_cannot_be_read_admits_no_request(
    served: Served, tokens: TokenFile, tmp_path: Path, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    headers = bearer(made(tokens, "default"))
    kept = (tmp_path / FILE).read_bytes()
    assert http.get("/v2", headers=headers).status_code == 200
    (tmp_path / FILE).write_text("{")
    answers = [http.get("/v2", headers=each) for each in (headers, headers, {})]
    assert [answer.status_code for answer in answers] == [500] * 3
    assert str(tmp_path) not in answers[0].text
    assert "the node's log says why" in answers[0].text
    [record] = caplog.records
    assert str(tmp_path / FILE) in record.message
    (tmp_path / FILE).write_bytes(kept)
    assert http.get("/v2", headers=headers).status_code == 200
    (tmp_path / FILE).unlink()
    assert [http.get("/v2", headers=each).status_code for each in (headers, {})] == [401, 401]


def test_tokens_are_valid_again_when_the_earlier_file_is_moved_back(
    served: Served, tokens: TokenFile, tmp_path: Path, http: httpx.Client
) -> None:
    """An editor's backup that is moved back has the same inode, time and size as before."""
    headers = bearer(made(tokens, "default"))
    assert http.get("/v2", headers=headers).status_code == 200
    kept = (tmp_path / FILE).rename(tmp_path / "kept")
    (tmp_path / FILE).write_text("{")
    assert http.get("/v2", headers=headers).status_code == 500
    kept.rename(tmp_path / FILE)
    assert [http.get("/v2", headers=headers).status_code for _ in range(2)] == [200, 200]


def test_a_token_file_whose_state_cannot_be_read_admits_no_request_and_only_the_log_says_why(
    served: Served, tokens: TokenFile, tmp_path: Path, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    headers = bearer(made(tokens, "default"))
    assert http.get("/v2", headers=headers).status_code == 200
    kept = (tmp_path / FILE).rename(tmp_path / "kept")
    (tmp_path / FILE).symlink_to(FILE)
    answers = [http.get("/v2", headers=each) for each in (headers, {})]
    assert [answer.status_code for answer in answers] == [500] * 2
    assert not [answer.text for answer in answers if str(tmp_path) in answer.text]
    [record] = caplog.records
    assert f"cannot check {tmp_path / FILE}" in record.message
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).write_text("{")
    assert http.get("/v2", headers=headers).status_code == 500
    assert ["damaged" in record.message for record in caplog.records] == [False, True]
    kept.rename(tmp_path / FILE)
    assert http.get("/v2", headers=headers).status_code == 200


def test_the_start_of_a_node_fails_with_the_reason_why_its_tokens_cannot_be_read(tmp_path, tokens):
    (tmp_path / FILE).mkdir()
    with pytest.raises(StoreError, match="Is a directory"):
        Access(None, tokens)
