"""Requests for telemetry reach the node, and the answers have the right format."""

from pathlib import Path

import httpx
import msgspec
import pytest

from overwinter.core.errors import NotFoundError
from tests.api.fake_node import LIMITS, Served, serving


class Telemetry:
    """Returns its arguments, or constants."""

    async def metrics(self) -> bytes:
        return b"# TYPE a counter\na 1.0\n"

    async def usage(self, tenant):
        return [{"tenant": tenant}]

    async def activity(self):
        return {"functions": []}

    async def devices(self):
        return [{"name": "virtual:0"}]

    async def explain(self, name, version):
        if name == "none":
            raise NotFoundError("no function 'none' here")
        return {"name": name, "version": version}

    async def logs(self, name, version):
        return [{"name": name, "version": version}]


@pytest.fixture(autouse=True)
def telemetry(served: Served) -> None:
    served.node.telemetry = Telemetry()


def test_metrics_come_as_text_that_prometheus_reads(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text == "# TYPE a counter\na 1.0\n"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("activity", {"functions": []}),
        ("devices", [{"name": "virtual:0"}]),
        ("usage", [{"tenant": None}]),
        ("usage/some.one", [{"tenant": "some.one"}]),
        ("functions/f/explain", {"name": "f", "version": None}),
        ("functions/f/versions/3/explain", {"name": "f", "version": 3}),
        ("functions/add/logs", [{"name": "add", "version": None}]),
        ("functions/add/versions/2/logs", [{"name": "add", "version": 2}]),
    ],
)
def test_questions_reach_the_node(http: httpx.Client, path: str, expected: object) -> None:
    assert http.get(f"/overwinter/v1/{path}").json() == expected


class Long:
    """Answers with `nbytes` bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    async def metrics(self) -> bytes:
        return bytes(self.nbytes)

    def __getattr__(self, name):
        async def answer(*arguments):
            return "x" * self.nbytes

        return answer


def test_long_answers_count_toward_the_memory_of_requests(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, requests_bytes_max=1 << 20, caller_share=0.1)
    paths = [
        "/metrics",
        *(f"/overwinter/v1/{path}" for path in ("activity", "devices", "functions/f/explain", "functions/add/logs")),
    ]
    with serving(tmp_path, limits=limits) as served, httpx.Client(base_url=served.url, trust_env=False) as http:
        served.node.telemetry = Long(100_000)
        assert [http.get(path).status_code for path in paths] == [200] * len(paths)
        served.node.telemetry = Long(110_000)
        assert [http.get(path).status_code for path in paths] == [413] * len(paths)
        assert served.budget.held == 0


def test_an_unknown_function_or_method_is_refused(http: httpx.Client) -> None:
    answer = http.get("/overwinter/v1/functions/none/explain")
    assert (answer.status_code, answer.json()) == (404, {"error": "no function 'none' here"})
    assert http.post("/metrics").status_code == 405


def test_what_a_function_printed_is_for_its_tenant_only(http: httpx.Client) -> None:
    asked = "/overwinter/v1/functions/add/logs"
    assert http.get(asked, headers={"overwinter-tenant": "default"}).status_code == 200
    assert http.get(asked, headers={"overwinter-tenant": "other"}).status_code == 403
    assert http.get("/overwinter/v1/functions/none/logs").status_code == 404


def test_long_usage_counts_toward_the_memory_of_requests(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, requests_bytes_max=1 << 20, caller_share=0.1)
    with serving(tmp_path, limits=limits) as served, httpx.Client(base_url=served.url) as http:
        served.node.telemetry = Telemetry()
        used = [{"function": "f" * 50, "number": number} for number in range(100)]
        served.node.telemetry.usage = lambda tenant: answer(used)
        assert http.get("/overwinter/v1/usage").json() == used
        used *= 40
        assert http.get("/overwinter/v1/usage").status_code == 413
        assert served.budget.held == 0


async def answer(value):
    return value
