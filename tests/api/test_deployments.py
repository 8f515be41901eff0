import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from overwinter.api import deployments
from overwinter.api.app import DISK_THREADS
from overwinter.core.errors import TooLargeError
from overwinter.core.ids import Address
from overwinter.core.tensor import TENSORS_MAX
from overwinter.core.versions import Share
from overwinter.store.blocks import address_of
from overwinter.store.uploads import DiskBounds
from tests.api.fake_node import BLOCK_BYTES_MAX, LIMITS, Served, manifest_of, serving, spec

BLOCKS = "/overwinter/v1/blocks"
FUNCTIONS = "/overwinter/v1/functions"
TAKES = (spec("x", "FP32", "batch", 2),)
GIVES = (spec("y", "FP32", "batch", 2),)
MANY = tuple(spec(f"{number:0100}", "FP32", "batch", 2) for number in range(TENSORS_MAX))


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a node with a short timeout of bodies and few concurrent uploads."""
    limits = msgspec.structs.replace(LIMITS, stall_s=0.2, uploads_max=4)
    with serving(tmp_path_factory.mktemp("repository"), limits=limits) as served:
        yield served


def files_of(served: Served) -> set[Path]:
    root = served.node.repository.root
    return {path for path in root.rglob("*") if path.is_file() and "catalog" not in path.name}


def test_a_block_is_stored_once(http: httpx.Client, served: Served) -> None:
    block = b"weights" * 50_000
    address = address_of(block)
    assert http.post(f"{BLOCKS}/missing", json={"addresses": [address]}).json() == {"missing": [address]}
    first = http.put(f"{BLOCKS}/{address}", content=block)
    assert (first.status_code, first.json()) == (201, {"address": address, "new": True})
    again = http.put(f"{BLOCKS}/{address}", content=iter([block[:9], block[9:]]))
    assert (again.status_code, again.json()["new"]) == (200, False)
    assert http.post(f"{BLOCKS}/missing", json={"addresses": [address]}).json() == {"missing": []}
    assert served.node.repository.read(address) == block


def test_free_disk_space_is_logged_and_not_shown_to_tenants(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bounds = DiskBounds(free_min_bytes=1 << 60)
    monkeypatch.setattr(served.node.repository, "_bounds", bounds)
    with caplog.at_level(logging.WARNING, "overwinter.api"):
        for block in (b"no room", b"none either", b"no room"):
            answer = http.put(f"{BLOCKS}/{address_of(block)}", content=block)
            assert (answer.status_code, str(1 << 60) in answer.text) == (507, False)
    assert caplog.text.count(str(1 << 60)) == 1, "one line for all of a kind"


def test_a_block_whose_content_does_not_match_its_address_is_refused(http: httpx.Client, served: Served) -> None:
    before = files_of(served)
    answer = http.put(f"{BLOCKS}/{address_of(b'right')}", content=b"wrong")
    assert answer.status_code == 400
    assert files_of(served) == before


@pytest.mark.parametrize("address", ["x", "A" * 64, "0" * 63, "..%2F..%2Fetc", "0" * 64 + "%0A"])
def test_an_invalid_address_is_refused(http: httpx.Client, address: str) -> None:
    assert http.put(f"{BLOCKS}/{address}", content=b"x").status_code in (400, 404)
    assert http.post(f"{BLOCKS}/missing", json={"addresses": [address]}).status_code == 400


def test_a_block_past_the_bound_is_refused(http: httpx.Client, served: Served) -> None:
    before = files_of(served)
    block = bytes(BLOCK_BYTES_MAX + 1)
    for content in (block, iter([block[: 1 << 20], block[1 << 20 :]])):
        assert http.put(f"{BLOCKS}/{address_of(block)}", content=content).status_code == 413
    assert files_of(served) == before


def test_a_compressed_block_is_refused(http: httpx.Client) -> None:
    answer = http.put(f"{BLOCKS}/{address_of(b'x')}", content=b"x", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415


def put_head(nbytes: int, address: bytes = b"0" * 64) -> bytes:
    return b"PUT %s/%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (BLOCKS.encode(), address, nbytes)


def test_an_upload_that_stands_still_is_given_up(impatient: Served) -> None:
    before = files_of(impatient)
    with socket.create_connection(("127.0.0.1", impatient.port)) as slow:
        slow.settimeout(20)
        slow.sendall(put_head(9) + b"abc")
        assert slow.recv(65536).startswith(b"HTTP/1.1 408")
    while files_of(impatient) != before:
        pass


def test_uploads_that_drip_hold_no_thread(served: Served, http: httpx.Client) -> None:
    before = files_of(served)
    with ExitStack() as open_:
        for _ in range(2 * DISK_THREADS):
            dripping = open_.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            dripping.sendall(put_head(1 << 20) + bytes(1 << 10))
        while len(files_of(served) - before) < 2 * DISK_THREADS:
            pass
        block = b"a block of another tenant"
        assert http.put(f"{BLOCKS}/{address_of(block)}", content=block).status_code == 201
    while len(files_of(served) - before) > 1:
        pass


def test_queries_for_missing_blocks_hold_no_thread_of_uploads(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    missing = served.node.repository.missing

    def waiting(*arguments: Any) -> list[Address]:
        begun.set()
        assert go_on.wait(20)
        return missing(*arguments)

    monkeypatch.setattr(served.node.repository, "missing", waiting)
    asked = json.dumps({"addresses": [address_of(b"absent")]}).encode()
    query = b"POST %s/missing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        BLOCKS.encode(),
        len(asked),
        asked,
    )
    with ExitStack() as open_:
        asking = []
        for _ in range(2 * DISK_THREADS):
            asking.append(open_.enter_context(socket.create_connection(("127.0.0.1", served.port))))
            asking[-1].sendall(query)
        assert begun.wait(20)
        block = b"a block that is sent meanwhile"
        assert http.put(f"{BLOCKS}/{address_of(block)}", content=block).status_code == 201
        go_on.set()
        for each in asking:
            assert each.recv(65536).startswith(b"HTTP/1.1 200")


def test_long_queries_for_missing_blocks_are_read_in_the_thread_of_queries(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    decode = deployments.decode_json

    def decoded(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode(*arguments)

    monkeypatch.setattr(deployments, "decode_json", decoded)
    addresses = [address_of(b"%d" % number) for number in range(1000)]
    assert http.post(f"{BLOCKS}/missing", json={"addresses": addresses}).json() == {"missing": addresses}
    assert http.post(f"{BLOCKS}/missing", content=b"[").status_code == 400
    assert len(threads) == 2
    assert all(name.startswith("api-queries") for name in threads)


def test_an_upload_beyond_the_share_of_its_caller_is_refused(impatient: Served) -> None:
    with ExitStack() as open_:
        answers = []
        for _ in range(3):
            dripping = open_.enter_context(socket.create_connection(("127.0.0.1", impatient.port)))
            dripping.settimeout(20)
            dripping.sendall(put_head(1 << 20) + bytes(1 << 10))
            answers.append(dripping)
        refused = answers[-1].recv(65536)
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"uploads-max" in refused


def test_shares_of_the_traffic_reach_the_node(http: httpx.Client, served: Served) -> None:
    result = {"shares": [{"version": 1, "percent": 90}, {"version": 2, "percent": 10}]}
    answer = http.put(f"{FUNCTIONS}/add/traffic", json=result)
    assert (answer.status_code, answer.json()) == (200, result)
    assert http.put(f"{FUNCTIONS}/add/traffic", json={"shares": []}).status_code == 200
    assert served.node.traffic_set == [("add", (Share(1, 90), Share(2, 10))), ("add", ())]


@pytest.mark.parametrize(
    ("shares", "status", "said"),
    [
        ([{"version": 1, "percent": 90}], 400, "90 per cent"),
        ([{"version": 1, "percent": 50}] * 2, 400, "two shares"),
        ([{"version": 1, "percent": 101}], 400, "percent"),
        ([{"version": 0, "percent": 100}], 400, "version"),
        ([{"version": number, "percent": 10} for number in range(1, 11)], 400, "shares"),
        ([{"version": 9, "percent": 100}], 404, "version 9"),
    ],
)
def test_invalid_shares_are_refused(http: httpx.Client, shares: object, status: int, said: str) -> None:
    answer = http.put(f"{FUNCTIONS}/add/traffic", json={"shares": shares})
    assert (answer.status_code, said in answer.json()["error"]) == (status, True)


def test_the_traffic_of_another_tenant_s_function_cannot_be_set(http: httpx.Client) -> None:
    headers = {"Overwinter-Tenant": "other"}
    shares = {"shares": [{"version": 1, "percent": 100}]}
    assert http.put(f"{FUNCTIONS}/add/traffic", json=shares, headers=headers).status_code == 403


def test_a_function_can_be_registered_described_listed_and_removed(http: httpx.Client) -> None:
    program = b"a program"
    http.put(f"{BLOCKS}/{address_of(program)}", content=program)
    manifest = manifest_of("passing", program, TAKES, GIVES)
    as_json = http.post(FUNCTIONS, content=msgspec.json.encode(manifest))
    assert (as_json.status_code, as_json.json()) == (201, {"name": "passing", "version": 1, "warning": ""})
    packed = {"Content-Type": "application/msgpack"}
    as_msgpack = http.post(FUNCTIONS, content=msgspec.msgpack.encode(manifest), headers=packed)
    assert as_msgpack.json() == {"name": "passing", "version": 2, "warning": ""}

    described = http.get(f"{FUNCTIONS}/passing").json()
    assert (described["version"], described["traffic"], described["state"]) == (2, 100, "READY")
    assert described["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["batch", 2]}]
    assert described["settings"]["slo_ms"] == 80
    assert http.get(f"{FUNCTIONS}/passing/versions/1").json()["traffic"] == 0
    listed = [(each["name"], each["version"]) for each in http.get(FUNCTIONS).json()]
    assert [entry for entry in listed if entry[0] == "passing"] == [("passing", 1), ("passing", 2)]

    assert http.delete(f"{FUNCTIONS}/passing/versions/1").json() == {"name": "passing", "version": 1}
    assert http.get(f"{FUNCTIONS}/passing/versions/1").status_code == 404
    assert http.delete(f"{FUNCTIONS}/passing").json() == {"name": "passing", "version": None}
    assert http.delete(f"{FUNCTIONS}/passing").status_code == 404


def test_a_function_whose_blocks_are_missing_is_refused(http: httpx.Client) -> None:
    answer = http.post(FUNCTIONS, content=msgspec.json.encode(manifest_of("early", b"not there", TAKES, GIVES)))
    assert answer.status_code == 409
    assert http.get(f"{FUNCTIONS}/early").status_code == 404


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 400),
        ("application/json", b"\xff", 400),
        ("application/msgpack", b"\xc1", 400),
        ("application/msgpack", b"", 400),
        ("application/msgpack", msgspec.msgpack.encode({1: msgspec.msgpack.Ext(1, b"x")}), 400),
        ("application/msgpack", msgspec.msgpack.encode({b"key": 1}), 400),
        ("text/plain; charset=utf-8", b"{}", 415),
        ("application/json", b"[" * 200_000, 413),
        ("application/msgpack", bytes(300 << 10), 413),
        ("application/json", b"[" * 40_000, 413),
        ("application/json", b" " * (9 << 20), 413),
        ("application/json", b'{"agreement":{"sizes":[' + b"{}," * 10_000 + b"{}]}}", 413),
        ("application/json", b'{"settings":{' + b'"slo_ms" :1,' * 20_000 + b'"slo_ms":1}}', 413),
        ("application/json", b'{"agreement":{"notes":[' + b'"",' * 300_000 + b'""]}}', 413),
        ("application/json", msgspec.json.encode(manifest_of("wide", b"", TAKES, MANY)), 413),
    ],
)
def test_an_invalid_or_too_large_manifest_is_refused(http: httpx.Client, kind: str, body: bytes, status: int) -> None:
    answer = http.post(FUNCTIONS, content=body, headers={"Content-Type": kind})
    assert (answer.status_code, list(answer.json())) == (status, ["error"])


@pytest.mark.parametrize("key", ["inputs", "outputs", "settings", "agreement", "handler", "samples"])
@pytest.mark.parametrize("repeated", [False, True])
def test_thousands_of_names_are_not_decoded(monkeypatch: pytest.MonkeyPatch, key: str, repeated: bool) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(deployments, "decode_manifest", lambda text: decoded.append(len(text)))
    small = msgspec.json.encode(manifest_of("small", b"", TAKES, GIVES))
    names = b'"%s":[%s]' % (key.encode(), b",".join([b'"name name"'] * 200_000))
    if repeated:
        # The last value of a key counts, and the names are not decoded.
        deployments.read_manifest(None, b"{" + names + b"," + small[1:])
        assert decoded == [len(small)]
    else:
        with pytest.raises(TooLargeError, match=f"{key}.* of the manifest are 2[0-9]* bytes of JSON"):
            deployments.read_manifest(None, small[:-1] + b"," + names + b"}")
        assert not decoded
