"""The API as an HTTP client sees it: statuses, headers, bounds, and the consequences of a disconnect."""

import gc
import gzip
import logging
import socket
import threading
import weakref
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import msgspec
import pytest

from overwinter.core.call import Call, Result
from overwinter.core.errors import OverloadedError
from overwinter.core.tensor import Tensor
from tests.api.fake_node import FUNCTIONS, LIMITS, REQUEST_BYTES_MAX, Served, serving

ADD = {
    "inputs": [
        {"name": "a", "datatype": "INT32", "shape": [1, 3], "data": [[1, 2, 3]]},
        {"name": "b", "datatype": "INT32", "shape": [1, 3], "data": [10, 20, 30]},
    ]
}
ECHO = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0.5]}]}


HEAD = "Inference-Header-Content-Length"


def test_the_server_reports_its_name_and_extensions(http: httpx.Client) -> None:
    answer = http.get("/v2").json()
    assert answer["name"] == "overwinter"
    assert {"binary_tensor_data", "model_repository", "schedule_policy"} <= set(answer["extensions"])


def test_health(http: httpx.Client) -> None:
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}


def test_models(http: httpx.Client) -> None:
    assert {"add", "reverse"} <= set(http.get("/v2/models").json()["models"])


def test_metadata_of_a_model(http: httpx.Client) -> None:
    expected = {
        "name": "add",
        "versions": ["1", "2"],
        "platform": "overwinter_program",
        "inputs": [{"name": name, "datatype": "INT32", "shape": [-1, 3]} for name in ("a", "b")],
        "outputs": [{"name": name, "datatype": "INT32", "shape": [-1, 3]} for name in ("sum", "difference")],
    }
    assert http.get("/v2/models/add").json() == expected
    assert http.get("/v2/models/add/versions/1").json() == expected


def test_configuration_of_a_model(http: httpx.Client) -> None:
    answer = http.get("/v2/models/reverse/versions/1/config").json()
    assert answer["max_batch_size"] == 0
    assert answer["input"] == [{"name": "text", "data_type": "TYPE_STRING", "dims": [-1]}]
    assert answer["parameters"]["slo_ms"] == {"string_value": "80"}


def test_inference_in_json(http: httpx.Client) -> None:
    answer = http.post("/v2/models/add/infer", json=ADD | {"id": "x7"})
    assert answer.headers["overwinter-start"] == "host"
    assert answer.json() == {
        "model_name": "add",
        "model_version": "2",
        "id": "x7",
        "outputs": [
            {"name": "sum", "datatype": "INT32", "shape": [1, 3], "data": [11, 22, 33]},
            {"name": "difference", "datatype": "INT32", "shape": [1, 3], "data": [-9, -18, -27]},
        ],
    }


def test_a_version_is_called_by_number(http: httpx.Client) -> None:
    assert http.post("/v2/models/add/versions/1/infer", json=ADD).json()["model_version"] == "1"


def test_only_the_requested_outputs_are_returned(http: httpx.Client) -> None:
    answer = http.post("/v2/models/add/infer", json=ADD | {"outputs": [{"name": "difference"}]}).json()
    assert [output["name"] for output in answer["outputs"]] == ["difference"]


def test_timeout_and_priority_reach_the_node(http: httpx.Client, served: Served) -> None:
    http.post("/v2/models/add/infer", json=ADD | {"parameters": {"timeout": 250_000, "priority": 2}})
    assert served.node.calls[-1] == ("add", None, 0.25, 2)


def test_a_raw_body_gets_a_binary_answer(http: httpx.Client) -> None:
    body = bytes(range(16))
    answer = http.post("/v2/models/echo-fp32/infer", content=body, headers={"Inference-Header-Content-Length": "0"})
    head = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert msgspec.json.decode(answer.content[:head])["outputs"][0]["shape"] == [1, 4]
    assert answer.content[head:] == body


@pytest.mark.parametrize(("coding", "press"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies_are_accepted_and_damaged_ones_are_refused(
    http: httpx.Client, coding: str, press: object
) -> None:
    body = press(msgspec.json.encode(ADD))
    answer = http.post("/v2/models/add/infer", content=body, headers={"Content-Encoding": coding})
    assert answer.json()["outputs"][0]["data"] == [11, 22, 33]
    cut = http.post("/v2/models/add/infer", content=body[:-6], headers={"Content-Encoding": coding})
    assert (cut.status_code, "truncated" in cut.json()["error"]) == (400, True)
    not_compressed = http.post("/v2/models/add/infer", json=ADD, headers={"Content-Encoding": coding})
    assert (not_compressed.status_code, "not valid" in not_compressed.json()["error"]) == (400, True)


def test_a_body_that_swells_past_the_bound_is_refused(http: httpx.Client) -> None:
    bomb = gzip.compress(bytes(REQUEST_BYTES_MAX + 1))
    assert len(bomb) < REQUEST_BYTES_MAX // 100
    answer = http.post("/v2/models/add/infer", content=bomb, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 413


def test_an_unknown_coding_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v2/models/add/infer", content=b"x", headers={"Content-Encoding": "br"})
    assert (answer.status_code, answer.json()["error"].split(";")[0]) == (415, "content-encoding 'br' is not supported")


def test_a_body_past_the_bound_is_refused_whether_its_length_is_announced_or_not(http: httpx.Client) -> None:
    too_much = bytes(REQUEST_BYTES_MAX + 1)
    for content in (too_much, iter([too_much[: 1 << 19], too_much[1 << 19 :]])):
        answer = http.post("/v2/models/add/infer", content=content)
        assert (answer.status_code, str(REQUEST_BYTES_MAX) in answer.json()["error"]) == (413, True)


def test_a_body_may_come_in_several_chunks(http: httpx.Client) -> None:
    body = msgspec.json.encode(ADD)
    answer = http.post("/v2/models/add/infer", content=iter([body[:20], body[20:21], body[21:]]))
    assert answer.json()["outputs"][0]["data"] == [11, 22, 33]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/v2/models/absent", 404, "unknown function 'absent'"),
        ("/v2/models/add/versions/9", 404, "version 9"),
        ("/v2/models/add/versions/two", 404, "whole numbers"),
        ("/v2/models/add/versions/-1", 404, "whole numbers"),
        ("/v2/models/absent/ready", 404, "unknown function 'absent'"),
        ("/v2/models/add/stats", 404, "nothing at"),
        ("/v2/models/", 404, "nothing at"),
        ("/v3", 404, "nothing at"),
        ("/v2/", 404, "nothing at"),
        ("/v2/models/add/infer", 405, "does not take GET; it takes POST"),
    ],
)
def test_an_unknown_path_or_method_gets_an_error(http: httpx.Client, path: str, status: int, words: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert words in answer.json()["error"]


def test_a_head_request_has_no_body(http: httpx.Client) -> None:
    answer = http.head("/v2/health/live")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("length", ["x", "-1", "99999999999999999999"])
def test_a_head_length_that_is_no_number_is_refused(http: httpx.Client, length: str) -> None:
    answer = http.post("/v2/models/add/infer", json=ADD, headers={"Inference-Header-Content-Length": length})
    assert (answer.status_code, "not a number" in answer.json()["error"]) == (400, True)


def test_the_error_for_an_invalid_body_says_where_it_is_invalid(http: httpx.Client) -> None:
    answer = http.post("/v2/models/add/infer", json={"inputs": [{"name": "a", "datatype": "INT32", "shape": "all"}]})
    assert (answer.status_code, "$.inputs[0].shape" in answer.json()["error"]) == (400, True)


def test_a_full_node_says_when_to_come_back(http: httpx.Client) -> None:
    answer = http.post("/v2/models/busy/infer", json=ECHO)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert "512 requests waiting" in answer.json()["error"]


def test_an_unexpected_error_is_logged_and_not_shown(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "overwinter.api"):
        answer = http.post("/v2/models/broken/infer", json=ECHO, headers={"X-Request-Id": "x7"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "secret" in caplog.text
    assert [(record.function, record.request) for record in caplog.records] == [("broken", "x7")]


INFER = b"POST /v2/models/echo-fp32/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 0\r\n"


def test_small_requests_go_through_while_large_ones_hold_all_memory(tmp_path: Path) -> None:
    """Announced bodies stall while they hold all memory that is not reserved: a further large request is refused, and
    small ones are answered.
    """
    limits = msgspec.structs.replace(LIMITS, requests_bytes_max=8 * REQUEST_BYTES_MAX, caller_share=1.0)
    with serving(tmp_path, limits=limits) as served, ExitStack() as stalled:
        for _ in range(6):
            client = stalled.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            client.sendall(INFER + b"Content-Length: %d\r\n\r\n" % REQUEST_BYTES_MAX)
        while served.budget.held < 6 * REQUEST_BYTES_MAX:
            pass
        url = f"{served.url}/v2/models/echo-fp32/infer"
        late = httpx.post(url, content=bytes(REQUEST_BYTES_MAX), headers={HEAD: "0"}, timeout=20, trust_env=False)
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert httpx.post(url.replace("echo-fp32", "add"), json=ADD, trust_env=False).status_code == 200
        stalled.close()
        while served.budget.held:
            pass
        again = httpx.post(url, content=bytes(REQUEST_BYTES_MAX), headers={HEAD: "0"}, timeout=20, trust_env=False)
        assert again.status_code == 200


def test_the_data_of_a_refused_request_is_freed_when_it_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector is off: it does not know how much memory the objects hold, so it must not be needed."""
    sent: list[weakref.ref[memoryview]] = []

    def refuse(inputs: dict[str, Tensor]) -> list[Tensor]:
        data = inputs["x"].data
        assert isinstance(data, memoryview)
        sent.append(weakref.ref(data))
        raise OverloadedError("later")

    monkeypatch.setitem(FUNCTIONS, "busy", (refuse, *FUNCTIONS["busy"][1:]))
    url, body = f"{served.url}/v2/models/busy/infer", bytes(1 << 18)
    gc.disable()
    try:
        assert httpx.post(url, content=body, headers={HEAD: "0"}, trust_env=False).status_code == 503
        # The server may end the first request's task only after its answer.
        assert httpx.get(f"{served.url}/v2/health/live", trust_env=False).status_code == 200
        assert [each() for each in sent] == [None]
    finally:
        gc.enable()


def test_an_unread_answer_holds_memory_until_its_client_is_cut_off(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(
        LIMITS, request_bytes_max=24 << 20, requests_bytes_max=256 << 20, stall_s=0.1, rate_min_bytes=1 << 30
    )
    with serving(tmp_path, limits=limits) as served, socket.create_connection(("127.0.0.1", served.port)) as lazy:
        body = bytes(16 << 20)
        lazy.sendall(INFER + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert lazy.recv(1).startswith(b"H")
        # The sockets hold some megabytes; the rest waits for a client that does not read.
        assert served.budget.held >= 2 * len(body)
        while served.budget.held:
            pass
        got = 1
        with suppress(ConnectionError):
            while more := lazy.recv(1 << 20):
                got += len(more)
        assert got < len(body)


def test_json_has_a_separate_bound(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, json_bytes_max=1 << 16)
    with serving(tmp_path, limits=limits) as served:
        url = f"{served.url}/v2/models/echo-fp32/infer"
        text = msgspec.json.encode({"inputs": [], "id": " " * (1 << 16)})
        for headers in ({}, {HEAD: str(len(text))}):
            refused = httpx.post(url, content=text, headers=headers, trust_env=False)
            assert (refused.status_code, "binary" in refused.json()["error"]) == (413, True)
        head = msgspec.json.encode(
            {
                "inputs": [
                    {
                        "name": "x",
                        "datatype": "FP32",
                        "shape": [1, 1 << 15],
                        "parameters": {"binary_data_size": 1 << 17},
                    }
                ]
            }
        )
        answers = {}
        for binary in (b"true", b"false"):
            asked = head[:-1] + b',"parameters":{"binary_data_output":%s}}' % binary
            answers[binary] = httpx.post(
                url, content=asked + bytes(1 << 17), headers={HEAD: str(len(asked))}, trust_env=False
            )
        assert answers[b"true"].content.endswith(bytes(1 << 17))
        assert (answers[b"false"].status_code, "binary_data" in answers[b"false"].json()["error"]) == (413, True)


def test_memory_that_the_node_reserves_for_a_request_counts_toward_its_caller_s_share(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(call: Call) -> Result:
        assert call.reserve is not None
        call.reserve(1000)
        call.reserve(served.budget.bytes_max)
        raise AssertionError

    monkeypatch.setattr(served.node, "infer", keep)
    answer = http.post("/v2/models/echo-fp32/infer", json={"inputs": [ECHO["inputs"][0] | {"shape": [1, 1]}]})
    assert (answer.status_code, "one caller may hold" in answer.json()["error"]) == (413, True)


def test_a_caller_cannot_say_that_it_is_another(served: Served) -> None:
    body = b"{}"
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(INFER + b"X-Forwarded-For: 10.9.8.7\r\nContent-Length: 1000\r\n\r\n" + body)
        while not served.budget.held:
            pass
        assert list(served.budget.held_by) == ["127.0.0.1"]


def test_the_request_id_comes_back_also_with_an_error(http: httpx.Client) -> None:
    for path in ("/v2", "/v3"):
        assert http.get(path, headers={"X-Request-Id": "r-81"}).headers["x-request-id"] == "r-81"
    assert "x-request-id" not in http.get("/v2").headers


def test_load_unload_and_index(http: httpx.Client) -> None:
    assert http.post("/v2/repository/models/echo-int8/unload").status_code == 200
    not_ready = http.get("/v2/models/echo-int8/ready")
    assert (not_ready.status_code, not_ready.json()) == (400, {"name": "echo-int8", "ready": False})
    index = {entry["name"]: entry for entry in http.post("/v2/repository/index").json()}
    assert index["echo-int8"] == {
        "name": "echo-int8",
        "version": "1",
        "state": "UNAVAILABLE",
        "reason": "unloaded",
    }
    ready = http.post("/v2/repository/index", json={"ready": True}).json()
    assert {"add", "echo-bool"} <= {entry["name"] for entry in ready}
    assert "echo-int8" not in {entry["name"] for entry in ready}
    assert http.post("/v2/repository/models/echo-int8/load", json={}).status_code == 200
    assert http.get("/v2/models/echo-int8/ready").json() == {"name": "echo-int8", "ready": True}


def test_load_with_a_configuration_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v2/repository/models/add/load", json={"parameters": {"config": "{}"}})
    assert (answer.status_code, "deploy" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("nbytes", [0, 262_144, 400_000, 602_278])
def test_the_request_of_a_client_that_disconnects_is_cancelled(served: Served, nbytes: int) -> None:
    """Also after a large body: its last piece may pause reading."""
    served.node.slow_started.clear()
    served.node.slow_cancelled.clear()
    body = msgspec.json.encode(ECHO) + b" " * nbytes
    with socket.create_connection(("127.0.0.1", served.port)) as leaving:
        leaving.sendall(
            b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert served.node.slow_started.wait(20)
    assert served.node.slow_cancelled.wait(20)


def test_a_client_that_disconnects_within_its_body_affects_no_other(served: Served, http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as leaving:
        leaving.sendall(b"POST /v2/models/add/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    assert http.post("/v2/models/add/infer", json=ADD).status_code == 200


def test_a_stop_lets_the_answer_in_progress_finish(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    with serving(tmp_path) as served:

        def ask() -> None:
            answers.append(httpx.post(f"{served.url}/v2/models/slow/infer", json=ECHO, timeout=20, trust_env=False))

        asking = threading.Thread(target=ask)
        asking.start()
        assert served.node.slow_started.wait(20)
        with httpx.Client(base_url=served.url, timeout=20, trust_env=False) as http:
            assert http.get("/v2/models").status_code == 200
            served.stop()
            while http.get("/v2/health/ready").json()["ready"]:
                pass
            refused = [http.post("/v2/models/add/infer", json=ADD), http.get("/nowhere")]
            healths = [http.get(f"/v2/health/{what}").status_code for what in ("live", "ready")]
        assert not answers
        served.loop.call_soon_threadsafe(served.node.slow_go.set)
        asking.join()
    assert answers[0].json()["outputs"][0]["data"] == [0.5]
    assert [(each.status_code, each.headers["retry-after"], each.headers["connection"]) for each in refused] == [
        (503, "1", "close")
    ] * 2
    assert all("stopping" in each.json()["error"] for each in refused)
    assert healths == [200, 400]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/v2", trust_env=False)


def test_a_request_in_progress_is_refused_when_a_stop_cannot_wait_for_it(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    with serving(tmp_path, drain_s=0) as served:

        def ask() -> None:
            answers.append(httpx.post(f"{served.url}/v2/models/slow/infer", json=ECHO, timeout=20, trust_env=False))

        asking = threading.Thread(target=ask)
        asking.start()
        assert served.node.slow_started.wait(20)
        served.stop()
        asking.join()
    assert (answers[0].status_code, answers[0].headers["retry-after"]) == (503, "1")
    assert "stopped" in answers[0].json()["error"]
