"""A tenant sees the metrics of its own functions, and nothing that depends on other tenants."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

from overwinter.api.tenancy import TenantNames
from overwinter.api.tenant_telemetry import SHARED_METRICS, TenantTelemetry, own_activity, own_metrics
from overwinter.scheduler.snapshot import FamilyWorker
from overwinter.telemetry.activity import FunctionActivity, NodeActivity

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"

TEXT = b"""\
# HELP overwinter_workers Worker processes.
# TYPE overwinter_workers gauge
overwinter_workers{state="idle"} 3.0
# HELP overwinter_requests_total Requests that ended.
# TYPE overwinter_requests_total counter
overwinter_requests_total{error="",function="mine",outcome="answered"} 5.0
overwinter_requests_total{error="",function="mine2",outcome="answered"} 6.0
overwinter_requests_total{error="",function="",outcome="answered"} 7.0
# HELP overwinter_pipeline_duration_seconds From arrival to answer.
# TYPE overwinter_pipeline_duration_seconds histogram
overwinter_pipeline_duration_seconds_bucket{le="1.0",pipeline="theirs"} 1.0
overwinter_pipeline_duration_seconds_bucket{le="1.0",pipeline="chain"} 2.0
# HELP overwinter_function_bytes Bytes that a version holds.
# TYPE overwinter_function_bytes gauge
overwinter_function_bytes{function="mine",sharing="shared",tier="disk",version="1"} 9.0
# HELP process_open_fds Open descriptors.
# TYPE process_open_fds gauge
process_open_fds 12.0
"""


def test_only_samples_of_own_functions_and_pipelines_are_shown() -> None:
    assert own_metrics(TEXT, {b"mine", b"chain"}).decode().splitlines() == [
        "# HELP overwinter_requests_total Requests that ended.",
        "# TYPE overwinter_requests_total counter",
        'overwinter_requests_total{error="",function="mine",outcome="answered"} 5.0',
        "# HELP overwinter_pipeline_duration_seconds From arrival to answer.",
        "# TYPE overwinter_pipeline_duration_seconds histogram",
        'overwinter_pipeline_duration_seconds_bucket{le="1.0",pipeline="chain"} 2.0',
    ]
    assert own_metrics(TEXT, set()) == b""


def test_names_in_metrics_are_converted_line_by_line_beside_the_loop() -> None:
    told: list[tuple[bytes, int]] = []

    class Names(TenantNames):
        def translated_bytes(self, text: bytes) -> bytes:
            told.append((text, threading.get_ident()))
            return super().translated_bytes(text)

    async def metrics() -> bytes:
        return TEXT.replace(b"mine", b"me..mine").replace(b"chain", b"me..chain")

    chain = SimpleNamespace(name="me..chain")
    node = SimpleNamespace(telemetry=SimpleNamespace(metrics=metrics), pipelines=lambda tenant: [chain])
    own = TenantTelemetry(node, "me", Names("me"), lambda name: name, operator=False)
    own._activity = lambda: asyncio.sleep(0, SimpleNamespace(functions=[SimpleNamespace(name="me..mine")]))
    assert asyncio.run(own.metrics()) == own_metrics(TEXT, {b"mine", b"chain"})
    assert {text.count(b"\n") for text, _ in told} == {1}
    assert threading.get_ident() not in {thread for _, thread in told}


def test_what_depends_on_others_is_left_out_under_the_name_that_it_has() -> None:
    documented = METRICS.read_text()
    assert [name for name in SHARED_METRICS if f"`{name.decode()}" not in documented] == []
    text = b"".join(b'# TYPE %b gauge\n%b{function="mine"} 9.0\n' % (name, name) for name in SHARED_METRICS)
    assert own_metrics(text, {b"mine"}) == b""


def test_of_the_activity_a_tenants_own_alone_is_converted() -> None:
    numbers = dict.fromkeys(("running", "queued", "host_bytes", "private_bytes", "wakes", "requests", "refused"), 3)
    numbers |= {"members": 1, "rate": 1.0, "shared": None, "p50_ms": None, "p99_ms": None, "attainment": None}
    result = {"name": "mine", "tenant": "me", "state": "awake", "family": "mine@1", "workers": (1,), "slo_ms": None}
    mine = FunctionActivity(**result, **numbers, exclusive_bytes=3)
    # Only its tenant is read, so that no other conversion is possible.
    theirs = SimpleNamespace(tenant="them", workers=(2,))
    workers = [FamilyWorker(worker=id_, family="mine@1", state="idle", bound=("mine@1",)) for id_ in (1, 2)]
    totals = dict.fromkeys(("running", "queued", "host_bytes", "private_bytes"), 99)
    totals |= {"cores": 2, "cores_running": 1, "host_budget": 99, "private_budget": 99, "functions_deployed": 99}
    node = NodeActivity(**totals, worker_states={"idle": 2}, functions=[theirs, mine], workers=workers)
    own = own_activity(node, "me")
    assert (own.running, own.queued, own.host_bytes, own.private_bytes, own.functions_deployed) == (3, 3, 3, 3, 1)
    assert (own.cores_running, own.host_budget, own.private_budget) == (None, None, None)
    assert [(each.name, each.exclusive_bytes) for each in own.functions] == [("mine", None)]
    assert ([each.worker for each in own.workers], own.worker_states) == ([1], {"idle": 1})
