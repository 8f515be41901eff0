"""What a request may do for the tenant that it names, and what it learns of other tenants."""

import httpx
import msgspec
import pytest

from overwinter.api.client import Client
from overwinter.core.errors import CallerError, ForbiddenError
from overwinter.store.blocks import address_of
from tests.api.fake_node import Served, manifest_of, spec

BLOCKS = "/overwinter/v1/blocks"
FUNCTIONS = "/overwinter/v1/functions"
TAKES = (spec("x", "FP32", "batch", 2),)
GIVES = (spec("y", "FP32", "batch", 2),)
STRANGER = {"Overwinter-Tenant": "stranger"}


def test_no_answer_tells_a_tenant_what_another_has_sent(http: httpx.Client) -> None:
    theirs, absent = b"their program", b"an absent program"
    assert http.put(f"{BLOCKS}/{address_of(theirs)}", content=theirs).status_code == 201

    def seen(program: bytes) -> list[object]:
        address = address_of(program)
        manifest = msgspec.structs.replace(manifest_of("copied", program, TAKES, GIVES), tenant="stranger")
        answers = [
            http.post(f"{BLOCKS}/missing", json={"addresses": [address]}, headers=STRANGER),
            http.post(FUNCTIONS, content=msgspec.json.encode(manifest), headers=STRANGER),
            http.put(f"{BLOCKS}/{address}", content=program, headers=STRANGER),
            http.put(f"{BLOCKS}/{address}", content=program, headers=STRANGER),
            http.post(f"{BLOCKS}/missing", json={"addresses": [address]}, headers=STRANGER),
        ]
        return [(answer.status_code, answer.text.replace(address, "ADDRESS")) for answer in answers]

    assert seen(theirs) == seen(absent)
    assert http.post(f"{BLOCKS}/missing", json={"addresses": [address_of(theirs)]}).json() == {"missing": []}


def test_only_the_tenant_of_a_function_may_change_it(http: httpx.Client) -> None:
    program = b"one program"
    for headers in ({}, STRANGER):
        http.put(f"{BLOCKS}/{address_of(program)}", content=program, headers=headers)
    manifest = manifest_of("mine", program, TAKES, GIVES)
    stolen = msgspec.structs.replace(manifest, tenant="stranger")
    assert http.post(FUNCTIONS, content=msgspec.json.encode(manifest), headers=STRANGER).status_code == 403
    assert http.post(FUNCTIONS, content=msgspec.json.encode(stolen)).status_code == 403
    assert http.post(FUNCTIONS, content=msgspec.json.encode(manifest)).status_code == 201
    assert http.post(FUNCTIONS, content=msgspec.json.encode(stolen), headers=STRANGER).status_code == 403

    tried = [
        http.delete(f"{FUNCTIONS}/mine", headers=STRANGER),
        http.delete(f"{FUNCTIONS}/mine/versions/1", headers=STRANGER),
        http.post("/v2/repository/models/mine/load", headers=STRANGER),
        http.post("/v2/repository/models/mine/unload", headers=STRANGER),
        http.post(f"{FUNCTIONS}/mine/profile", headers=STRANGER),
    ]
    assert [answer.status_code for answer in tried] == [403] * 5
    assert all("'mine' does not belong to tenant" in answer.json()["error"] for answer in tried)
    assert http.get(f"{FUNCTIONS}/mine").json()["state"] == "READY"
    assert http.post("/v2/repository/models/mine/unload").status_code == 200
    assert http.delete(f"{FUNCTIONS}/mine").status_code == 200


@pytest.mark.parametrize("name", ["", "Not A Name", "\xff"])
def test_an_invalid_tenant_name_is_refused(http: httpx.Client, name: str) -> None:
    headers = [(b"overwinter-tenant", name.encode("latin-1"))]
    assert http.put(f"{BLOCKS}/{address_of(b'x')}", content=b"x", headers=headers).status_code == 400


def test_a_client_acts_for_one_tenant(served: Served) -> None:
    program = b"a client's program"
    manifest = msgspec.structs.replace(manifest_of("ours", program, TAKES, GIVES), tenant="us")
    with Client(served.url, tenant="us") as us, Client(served.url) as others:
        us.put_block(address_of(program), program)
        us.register(manifest)
        with pytest.raises(ForbiddenError, match="'ours'"):
            others.remove("ours")
        us.remove("ours")
        with pytest.raises(CallerError):
            others.register(manifest)
