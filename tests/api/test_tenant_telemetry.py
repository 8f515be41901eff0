"""A tenant sees the metrics of its own functions, and nothing that depends on other tenants."""

import asyncio
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec

from overwinter.api.tenancy import TenantNames
from overwinter.api.tenant_telemetry import HIDDEN_METRICS, TenantTelemetry, own_activity, own_metrics
from overwinter.node.single_flight import SingleFlights
from overwinter.scheduler.snapshot import FamilyWorker
from overwinter.store.host import VerificationCounts
from overwinter.telemetry.accounts import Accounts
from overwinter.telemetry.activity import FunctionActivity, NodeActivity
from overwinter.telemetry.devices import DeviceActivity, devices_activity, of_tenant
from overwinter.telemetry.metering import DeviceUsage, Usage
from overwinter.telemetry.sources import Sources
from tests.scheduler.test_devices import device
from tests.scheduler.test_snapshot import taken
from tests.scheduler.world import spec
from tests.telemetry.test_pool import Watched

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


class NodeTelemetry:
    """A node's telemetry with prepared answers; records the requests for them, and counts conversions in threads."""

    def __init__(self, metrics=b"", activity=None, usage=()):
        self._answers = {"metrics": metrics, "activity": activity, "usage": usage}
        self._flights = SingleFlights()
        self.asked = []
        self.converted = 0

    async def _answer(self, kind, tenant):
        self.asked.append((kind, tenant))
        return self._answers[kind]

    def metrics(self, tenant=None):
        return self._answer("metrics", tenant)

    def activity(self, tenant=None):
        return self._answer("activity", tenant)

    def usage(self, tenant):
        return self._answer("usage", tenant)

    def shared(self, key, make):
        return self._flights.get(key, make)

    def in_thread(self, work, *args):
        self.converted += 1
        return asyncio.to_thread(work, *args)


def test_answers_are_computed_for_the_tenant_and_once_for_all_that_wait() -> None:
    mine = SimpleNamespace(functions=[SimpleNamespace(name="me..mine")])
    telemetry = NodeTelemetry(TEXT.replace(b"mine", b"me..mine"), mine)
    node = SimpleNamespace(telemetry=telemetry, pipelines=lambda tenant: [])

    def own() -> TenantTelemetry:
        return TenantTelemetry(node, "me", TenantNames("me"), lambda name: name, is_admin=False)

    async def scene() -> list[bytes]:
        return await asyncio.gather(*(own().metrics() for _ in range(100)))

    assert set(asyncio.run(scene())) == {own_metrics(TEXT, {b"mine"})}
    # The first one has begun when the others ask, and they share the second.
    assert telemetry.converted <= 2
    assert set(telemetry.asked) == {("metrics", "me"), ("activity", "me")}
    assert len(telemetry.asked) <= 4


def test_names_in_metrics_are_converted_line_by_line_in_a_thread() -> None:
    told: list[tuple[bytes, int]] = []

    class Names(TenantNames):
        def translated_bytes(self, text: bytes) -> bytes:
            told.append((text, threading.get_ident()))
            return super().translated_bytes(text)

    text = TEXT.replace(b"mine", b"me..mine").replace(b"chain", b"me..chain")
    chain, mine = SimpleNamespace(name="me..chain"), SimpleNamespace(name="me..mine")
    telemetry = NodeTelemetry(text, SimpleNamespace(functions=[mine]))
    node = SimpleNamespace(telemetry=telemetry, pipelines=lambda tenant: [chain])
    own = TenantTelemetry(node, "me", Names("me"), lambda name: name, is_admin=False)
    assert asyncio.run(own.metrics()) == own_metrics(TEXT, {b"mine", b"chain"})
    assert {text.count(b"\n") for text, _ in told} == {1}
    assert threading.get_ident() not in {thread for _, thread in told}


def test_metrics_that_depend_on_others_are_documented_and_left_out() -> None:
    documented = METRICS.read_text()
    assert [name for name in HIDDEN_METRICS if f"`{name.decode()}" not in documented] == []
    text = b"".join(b'# TYPE %b gauge\n%b{function="mine"} 9.0\n' % (name, name) for name in HIDDEN_METRICS)
    assert own_metrics(text, {b"mine"}) == b""


TOTALS = dict.fromkeys(("running", "queued", "host_bytes", "private_bytes"), 99)
TOTALS |= {"cores": 2, "cores_running": 1, "host_budget": 99, "private_budget": 99, "versions_deployed": 2}


def function_activity(name: str) -> FunctionActivity:
    numbers = dict.fromkeys(("running", "queued", "host_bytes", "private_bytes", "wakes", "requests", "refused"), 3)
    numbers |= {"members": 1, "rate": 1.0, "shared": None, "p50_ms": None, "p99_ms": None, "attainment": None}
    result = {"tenant": "me", "state": "awake", "family": f"{name}@1", "workers": (1,), "slo_ms": None}
    result |= {"device": "cpu", "devices": ()}
    return FunctionActivity(**result, **numbers, name=name, exclusive_bytes=3)


def test_only_a_tenants_own_activity_is_converted() -> None:
    mine = function_activity("mine")
    # It lacks the other fields, so that a conversion would fail.
    theirs = SimpleNamespace(tenant="them", workers=(2,))
    workers = [
        FamilyWorker(worker=id_, family="mine@1", state="idle", bound=("mine@1",), bound_count=1) for id_ in (1, 2)
    ]
    node = NodeActivity(**TOTALS, worker_states={"idle": 2}, functions=[theirs, mine], workers=workers)
    own = own_activity(node, "me")
    assert (own.running, own.queued, own.host_bytes, own.private_bytes, own.versions_deployed) == (3, 3, 3, 3, 2)
    assert (own.cores_running, own.host_budget, own.private_budget) == (None, None, None)
    assert [(each.name, each.exclusive_bytes) for each in own.functions] == [("mine", None)]
    assert ([each.worker for each in own.workers], own.worker_states) == ([1], {"idle": 1})


def test_long_activity_and_usage_are_converted_one_by_one_in_a_thread() -> None:
    told: list[tuple[bytes, int]] = []

    class Names(TenantNames):
        def translated_bytes(self, text: bytes) -> bytes:
            told.append((text, threading.get_ident()))
            return super().translated_bytes(text)

    functions = [function_activity(f"me..f{number}") for number in range(3)]
    workers = [FamilyWorker(worker=1, family="me..f0@1", state="idle", bound=("me..f0@1",), bound_count=1)]
    node = NodeActivity(**TOTALS, worker_states={"idle": 1}, functions=functions, workers=workers)
    amounts = dict.fromkeys(("core_ms", "idle_core_ms", "billed_core_ms", "private_byte_s"), 1.0)
    amounts |= {"disk_byte_s": 9.0, "host_byte_s": 9.0}
    used = [
        Usage(tenant="me", function=f"me..f{number}", since="2025-01-02", requests=1, **amounts) for number in range(3)
    ]
    telemetry = NodeTelemetry(activity=node, usage=used)
    own = TenantTelemetry(SimpleNamespace(telemetry=telemetry), "me", Names("me"), lambda name: name, is_admin=False)
    for answer, key in ((own.activity, "name"), (lambda: own.usage(None), "function")):
        told.clear()
        found = msgspec.json.decode(msgspec.json.encode(asyncio.run(answer())))
        listed = found["functions"] if key == "name" else found
        assert [each[key] for each in listed] == ["f0", "f1", "f2"]
        assert max(text.count(b'"me..f') for text, _ in told) <= 2
        assert threading.get_ident() not in {thread for _, thread in told}


def pool(isolation: str) -> list[DeviceActivity]:
    """Return three devices: with isolation by tenant one for `them`, one for `me`, one unused; else one for both."""
    world = Watched(devices=tuple(map(device, range(3))), device_isolation=isolation)
    for name, tenant in (("theirs", "them"), ("mine", "me"), ("mine2", "me")):
        world.deploy(spec(name, 1, [("trunk", 500_000), (f"{name}-head", 10_000)], device="pool", tenant=tenant))
    for name in ("theirs", "mine", "mine2"):
        world.serve(name)
    world.arrive("theirs")
    config = world.scheduler.cycle.config
    sources = Sources(config, world.statistics, Accounts(), VerificationCounts(), Counter())
    return devices_activity(sources, taken(world.scheduler, world.now).devices, world.now)


def test_a_tenant_sees_only_its_own_functions_on_a_device_that_all_tenants_share() -> None:
    every = pool("none")
    assert len(every) == 3
    assert (every[0].shared_bytes, every[0].run.function, every[0].history.runs) == (500_000, "theirs@1", 3)
    assert {each.tenant for each in every[0].functions} == {"me", "them"}
    [own] = of_tenant(every, "me")
    assert [each.function for each in own.functions] == ["mine2@1", "mine@1"]
    assert {each.exclusive_bytes for each in own.functions} == {None}
    hidden = (own.state, own.run, own.taken_bytes, own.shared_bytes, own.failures, own.fault, own.history)
    assert hidden == (None,) * 7
    assert b"theirs" not in msgspec.json.encode(own)
    assert of_tenant(every, "nobody") == []


def test_a_tenant_sees_the_devices_that_serve_no_other_tenant() -> None:
    every = pool("tenant")
    [own] = of_tenant(every, "me")
    assert (own.tenant, own.state, len(own.functions)) == ("me", "idle", 2)
    [other] = of_tenant(every, "them")
    assert (other.name != own.name, other.state, other.run.function) == (True, "busy", "theirs@1")


def test_the_bytes_that_a_tenants_functions_moved_are_left_out() -> None:
    used = DeviceUsage(device_ms=1.0, idle_ms=2.0, billed_ms=1.2, moved_bytes=9, device_byte_s=9.0)
    numbers = dict.fromkeys(("core_ms", "idle_core_ms", "billed_core_ms", "private_byte_s"), 1.0)
    numbers |= {"disk_byte_s": 9.0, "host_byte_s": 9.0}
    usage = [
        Usage(tenant="me", function=f"me..{name}", since="2025-01-02", requests=1, **numbers, device=device_)
        for name, device_ in (("f", used), ("g", None))
    ]
    node = SimpleNamespace(telemetry=NodeTelemetry(usage=usage))
    own = TenantTelemetry(node, "me", TenantNames("me"), lambda name: name, is_admin=False)
    f, g = msgspec.json.decode(msgspec.json.encode(asyncio.run(own.usage(None))))
    assert (f["function"], g["device"]) == ("f", None)
    assert f["device"] == {
        "device_ms": 1.0, "idle_ms": 2.0, "billed_ms": 1.2, "moved_bytes": None, "device_byte_s": None,
    }  # fmt: skip
