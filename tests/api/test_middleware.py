"""A request that is refused before the routes is answered as by a route. Changes that failed or were cancelled are in
the audit log too. No caller takes all slots.
"""

import asyncio
import json
import socket
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from overwinter.api import audit
from overwinter.api.access import Access
from overwinter.api.app import create_app
from overwinter.api.audit import Audit
from overwinter.api.budget import budget_of
from overwinter.api.draining import Drain
from overwinter.api.uploads import PIECE_BYTES
from overwinter.store.blocks import address_of
from overwinter.store.tokens import TokenFile
from tests.api.fake_node import LIMITS, FakeNode, serving

BLOCK = b"weights"
REMOVE = "/overwinter/v1/functions/mine"


class Failing(FakeNode):
    """A node whose operations fail or never end."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.waits = asyncio.Event()
        """Set when an operation that never ends has begun."""

    def owner(self, name: str) -> str:
        return "acme"

    async def remove(self, name: str, version: int | None) -> None:
        if version is None:
            raise ZeroDivisionError
        self.waits.set()
        await asyncio.sleep(60)


async def call(root: Path, *requests: tuple[str, str, dict[str, str]]) -> list[httpx.Response]:
    """Send requests to a node with a token; those that wait are cancelled, as at the end of a drain."""
    node = Failing(root)
    app = create_app(Access(node, TokenFile(root), Audit(root, print)), LIMITS, budget_of(LIMITS, None), Drain(0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as http:
        answers = [
            await cancelled_if_it_waits(node, http.request(method, path, headers=headers))
            for method, path, headers in requests
        ]
    node.repository.close()
    return answers


async def cancelled_if_it_waits(node: Failing, answer: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    asking, waits = asyncio.create_task(answer), asyncio.create_task(node.waits.wait())
    await asyncio.wait([asking, waits], return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    node.waits.clear()
    waits.cancel()
    return await asking


def test_a_refusal_is_an_answer_like_any_other(tmp_path: Path) -> None:
    TokenFile(tmp_path).create("acme", ("infer",), "", 0.0)
    answers = asyncio.run(call(tmp_path, *(("GET", path, {"X-Request-Id": "7"}) for path in ("/v2", "/nowhere"))))
    assert [answer.status_code for answer in answers] == [401, 401]
    assert all("error" in answer.json() and answer.headers["x-request-id"] == "7" for answer in answers)


def test_changes_that_failed_or_were_cancelled_are_in_the_audit_log(tmp_path: Path) -> None:
    token = {"Authorization": f"Bearer {TokenFile(tmp_path).create('acme', ('deploy',), '', 0.0)[1]}"}
    calls = [("DELETE", path, token) for path in (REMOVE, f"{REMOVE}/versions/1", f"{REMOVE}/versions/no")]
    answers = asyncio.run(call(tmp_path, *calls))
    assert [answer.status_code for answer in answers] == [500, 503, 404]
    lines = [json.loads(line) for line in (tmp_path / audit.FILE).read_text().splitlines()]
    assert [(each["path"], each["status"]) for each in lines] == [
        (path, answer.status_code) for (_, path, _), answer in zip(calls, answers, strict=True)
    ]


@pytest.mark.parametrize("by_tenant", [False, True])
@pytest.mark.parametrize(("bound", "named"), [("connections_max", "connections-max"), ("uploads_max", "uploads-max")])
def test_one_caller_leaves_slots_for_others(tmp_path: Path, bound: str, named: str, by_tenant: bool) -> None:
    """With tokens all addresses of a tenant count together, and tenants at one address do not."""
    limits = msgspec.structs.replace(LIMITS, **{bound: 8})
    file = TokenFile(tmp_path)
    greedy, other = [("127.0.0.2", "")] * 2, ("127.0.0.3", "")
    if by_tenant:
        secrets = [file.create(tenant, ("infer", "deploy"), "", 0.0)[1] for tenant in ("acme", "other")]
        fields = [f"authorization: Bearer {secret}\r\n" for secret in secrets]
        greedy, other = [("127.0.0.2", fields[0]), ("127.0.0.3", fields[0])], ("127.0.0.2", fields[1])

    with serving(tmp_path, limits=limits, tokens=file) as served, ExitStack() as kept:

        def upload(caller: tuple[str, str], sent: bytes) -> socket.socket:
            address, fields = caller
            client = kept.enter_context(socket.create_connection(("127.0.0.1", served.port), 20, (address, 0)))
            path = f"/overwinter/v1/blocks/{address_of(BLOCK)}"
            client.sendall(f"PUT {path} HTTP/1.1\r\n{fields}content-length: {len(BLOCK)}\r\n\r\n".encode() + sent)
            return client

        slow = [upload(each, b"") for each in greedy * 2]
        while served.budget.held < 4 * 2 * PIECE_BYTES:
            pass
        refused = upload(greedy[0], BLOCK).recv(1 << 16)
        assert (refused.split(b" ", 2)[1], named.encode() in refused) == (b"503", True)
        # Without more descriptors, a higher --connections-max has no effect.
        assert (b"4 descriptors (ulimit -Hn) for each" in refused) == (bound == "connections_max")
        assert upload(other, BLOCK).recv(1 << 16).startswith(b"HTTP/1.1 201")
        with socket.create_connection(("127.0.0.1", served.port), 20, ("127.0.0.2", 0)) as supervisor:
            supervisor.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
            assert supervisor.recv(1 << 16).startswith(b"HTTP/1.1 200")
        for each in slow:
            each.sendall(BLOCK)
            assert each.recv(1 << 16).startswith(b"HTTP/1.1 20")
        assert upload(greedy[0], BLOCK).recv(1 << 16).startswith(b"HTTP/1.1 200")
