"""Metrics report the counts of the statistics under the documented names, with a bounded number of series."""

import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from overwinter.api.tenant_telemetry import own_metrics
from overwinter.core.actions import Bind, Explanation, Refuse, Reply, Run, StartWorker
from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Arrived, Bound, Deployed, RunEnded, TrafficSet, WorkerReady
from overwinter.core.versions import Share
from overwinter.scheduler.scheduler import Scheduler
from overwinter.store.host import VerificationCounts
from overwinter.telemetry.accounts import Accounts
from overwinter.telemetry.histogram import BATCHES, SECONDS, Histogram
from overwinter.telemetry.metrics import render
from overwinter.telemetry.pipelines import PipelineRequests, PipelineStatistics
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import Statistics
from tests.scheduler.test_devices import device
from tests.scheduler.test_snapshot import taken
from tests.scheduler.world import spec
from tests.telemetry.test_pool import Watched

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(overwinter_\w+)` \| (\w+) \| (.*) \| (.+) \|$", re.MULTILINE)


def rendered(*steps, pipelines=()) -> bytes:
    scheduler, statistics = Scheduler(SchedulerConfig()), Statistics()
    for now, event, *actions in steps:
        statistics.observe(now, event, actions)
        if isinstance(event, Deployed):
            scheduler.handle(event, now)
    sources = Sources(
        SchedulerConfig(cores=4, memory_bytes=1 << 30),
        statistics,
        Accounts(),
        VerificationCounts(),
        Counter(),
    )
    now = steps[-1][0]
    return render(sources, taken(scheduler, now), pipelines, now)


STEPS = (
    (0.0, Deployed(spec("f", slo_ms=2000), resident=True)),
    (0.0, Deployed(spec("g", blobs=(("a", 10),)), resident=True)),
    (0.0, Arrived(1, "f", None, None), StartWorker(1, "f@1", False, 2, 1)),
    (0.0, Arrived(2, "f", None, None)),
    (1.5, WorkerReady(1), Run(1, 1, (1, 2)), Explanation("f@1", "scale-out", "one more")),
    (1.75, RunEnded(1, 1), Reply(1, "f@1", "host"), Refuse(2, "HandlerError", "bad")),
    (1.75, Arrived(3, "none", None, None), Refuse(3, "NotFoundError", "no")),
    (2.0, Arrived(4, "g", None, None), Bind(1, "g@1", 1)),
    (2.25, Bound(1, "g@1", 1)),
)
SPLIT = (
    *STEPS,
    (2.25, Deployed(spec("f", 2))),
    (2.25, TrafficSet("f", (Share(1, 90), Share(2, 10)))),
    (2.5, Arrived(5, "f", None, None), Refuse(5, "OverloadedError", "full", 1.0, "f@2")),
)


def passed() -> PipelineStatistics:
    durations = Histogram(SECONDS)
    durations.add(0.3)
    return PipelineStatistics("p", 500, PipelineRequests(running=2, answered=3, in_slo=1, failed=4), durations)


@pytest.fixture
def seen() -> dict:
    return samples_of(rendered(*STEPS, pipelines=[passed()]))


def samples_of(text: bytes) -> dict:
    return {
        (
            sample.name.removeprefix("overwinter_"),
            *(f"{key}={value}" for key, value in sorted(sample.labels.items())),
        ): (sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_metrics_count_what_happened(seen):
    assert seen["requests_total", "error=", "function=f", "outcome=answered"] == 1
    assert seen["requests_total", "error=HandlerError", "function=f", "outcome=refused"] == 1
    assert seen["requests_total", "error=NotFoundError", "function=", "outcome=refused"] == 1
    assert (seen["slo_requests_total", "function=f"], seen["slo_met_total", "function=f"]) == (2, 1)
    assert ("slo_requests_total", "function=g") not in seen
    assert (seen["run_requests_total", "function=f"], seen["run_core_seconds_total", "function=f"]) == (2, 0.5)
    assert seen["wake_seconds_total", "function=f", "start=host"] == 1.5
    assert seen["decisions_total", "decision=scale-out"] == 1
    assert seen["functions", "state=asleep"] == seen["families",] == 2
    assert (seen["binds_total", "function=g"], seen["bind_seconds_total", "function=g"]) == (1, 0.25)
    assert seen["function_bound", "function=f"] == seen["function_bound", "function=g"] == 1
    assert ("function_workers", "function=g") not in seen
    assert [seen["functions_waiting", f"wants={wants}"] for wants in ("core", "worker", "store")] == [0, 0, 0]
    assert seen["function_bytes", "function=f", "sharing=shared", "tier=host", "version=1"] == 10
    assert seen["function_bytes", "function=f", "sharing=exclusive", "tier=host", "version=1"] == 20
    assert seen["function_bytes", "function=g", "sharing=shared", "tier=disk", "version=1"] == 10
    assert (seen["tier_bytes", "tier=host"], seen["tier_bytes", "tier=disk"]) == (30, 30)
    assert (seen["cores",], seen["budget_bytes", "tier=private"]) == (4, 1 << 30)
    assert ("budget_bytes", "tier=host") not in seen


def test_several_versions_have_separate_series(seen):
    assert not [name for name, *_ in seen if name.startswith("version_")]
    seen = samples_of(rendered(*SPLIT))
    result = {
        (labels[-1], *labels[:-1]): value for (name, *labels), value in seen.items() if name == "version_requests_total"
    }
    assert result == {
        ("version=1", "error=", "function=f", "outcome=answered"): 1,
        ("version=2", "error=OverloadedError", "function=f", "outcome=refused"): 1,
    }
    assert seen["version_request_duration_seconds_sum", "function=f", "version=1"] == 1.75
    assert ("version_request_duration_seconds_count", "function=f", "version=2") not in seen


def test_a_pipeline_is_reported_as_a_whole(seen):
    assert seen["pipeline_requests_total", "outcome=answered", "pipeline=p"] == 3
    assert seen["pipeline_requests_total", "outcome=failed", "pipeline=p"] == 4
    assert (seen["pipeline_slo_seconds", "pipeline=p"], seen["pipeline_slo_met_total", "pipeline=p"]) == (0.5, 1)
    assert seen["pipeline_requests_running", "pipeline=p"] == 2
    assert seen["pipeline_duration_seconds_bucket", "le=0.25", "pipeline=p"] == 0
    assert seen["pipeline_duration_seconds_bucket", "le=0.5", "pipeline=p"] == 1


def test_histograms_are_cumulative_and_end_with_their_count(seen):
    for name, labels, bounds in (
        ("request_duration_seconds", ("function=f", "start=host"), SECONDS),
        ("queue_wait_seconds", (), SECONDS),
        ("batch_size", (), BATCHES),
    ):
        buckets = {
            float(place.removeprefix("le=")): value
            for (its, *rest), value in seen.items()
            if its == f"{name}_bucket" and set(labels) <= set(rest)
            for place in rest
            if place.startswith("le=")
        }
        counts = [buckets[bound] for bound in sorted(buckets)]
        assert sorted(buckets) == [*bounds, float("inf")]
        assert counts == sorted(counts)
        assert counts[-1] == seen[(f"{name}_count", *labels)] > 0
    assert seen["request_duration_seconds_sum", "function=f", "start=host"] == 1.75
    assert seen["request_duration_seconds_bucket", "function=f", "le=1.0", "start=host"] == 0
    assert seen["request_duration_seconds_bucket", "function=f", "le=2.5", "start=host"] == 1


def on_devices() -> bytes:
    """The metrics of a node with two devices, of which one is used."""
    world = Watched(devices=(device(0), device(1)))
    for name in "fg":
        world.deploy(spec(name, 1, [("trunk", 500_000), (f"{name}-head", 10_000)], device="pool", slo_ms=9000))
    for name in "ffg":
        world.serve(name)
    world.arrive("f")
    sources = Sources(world.scheduler.cycle.config, world.statistics, Accounts(), VerificationCounts(), Counter())
    return render(sources, taken(world.scheduler, world.now), (), world.now)


def test_there_are_metrics_for_each_device():
    seen = samples_of(on_devices())
    states = {labels[-1]: value for (name, *labels), value in seen.items() if name == "device_state"}
    assert seen["device_state", "device=virtual:0", "state=busy"] == 1
    assert seen["device_state", "device=virtual:1", "state=empty"] == 1
    assert len(states) == 7
    assert (seen["device_bytes", "device=virtual:0"], seen["device_bytes", "device=virtual:1"]) == (520_000, 0)
    assert seen["device_budget_bytes", "device=virtual:1"] == 1 << 20
    assert (seen["device_functions", "device=virtual:0"], seen["executor_starts_total", "device=virtual:0"]) == (2, 1)
    assert seen["executor_starts_total", "device=virtual:1"] == 0
    names = ("runs", "hits", "misses", "run_seconds", "moved_bytes", "peer_bytes")
    counts = {
        name: [seen[f"device_{each}_total", "device=virtual:0", f"function={name}"] for each in names] for name in "fg"
    }
    assert counts == {"f": [2, 1, 1, 2.0, 510_000, 0], "g": [1, 0, 1, 1.0, 10_000, 0]}
    assert (seen["runs_total", "function=f"], seen["run_core_seconds_total", "function=f"]) == (2, 0)
    assert (seen["slo_met_total", "function=f"], seen["requests_running", "function=f"]) == (2, 1)
    assert seen["run_duration_seconds_count",] == 3


def test_without_devices_there_are_none_of_their_metrics():
    assert b"overwinter_device" not in rendered(*STEPS)
    assert b"overwinter_executor" not in rendered(*STEPS)


def test_the_docs_list_every_metric_with_its_kind_its_meaning_and_its_labels():
    text = rendered(*SPLIT, pipelines=[passed()]).decode()
    families = {family.name: family for family in text_string_to_metric_families(on_devices().decode())}
    families |= {family.name: family for family in text_string_to_metric_families(text)}
    result = {
        name.removesuffix("_total"): (kind, set(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in ROW.findall(DOCS.read_text())
    }
    assert set(result) == {name for name in families if name.startswith("overwinter_")}
    for name, (kind, labels, meaning) in result.items():
        assert (families[name].type, families[name].documentation) == (kind, meaning)
        for sample in families[name].samples:
            assert set(sample.labels) - {"le"} == labels


def test_callers_cannot_make_series():
    invented = [(0.0, Arrived(n, f"name-{n}", None, None), Refuse(n, "NotFoundError", "no")) for n in range(200)]
    assert b"name-" not in rendered(*STEPS[:2], *invented)
    lines = [len(rendered(*STEPS[:2], *some).splitlines()) for some in (invented[:1], invented)]
    assert lines[0] == lines[1]


def test_an_unused_function_has_few_series():
    few, many = (
        len(rendered(*((0.0, Deployed(spec(f"f{n}", slo_ms=9))) for n in range(count))).splitlines())
        for count in (10, 20)
    )
    assert (many - few) / 10 <= 10


def of_tenant(tenant, *steps) -> bytes:
    scheduler, statistics = Scheduler(SchedulerConfig()), Statistics()
    for now, event, *actions in steps:
        statistics.observe(now, event, actions)
        if isinstance(event, Deployed):
            scheduler.handle(event, now)
    sources = Sources(SchedulerConfig(cores=4), statistics, Accounts(), VerificationCounts(), Counter())
    return render(sources, taken(scheduler, 9.0, tenant=tenant), (), 9.0, tenant)


def test_a_tenants_metrics_are_rendered_without_the_functions_of_others():
    others = [(2.5, Deployed(spec(f"other{number}", tenant="others", slo_ms=9))) for number in range(50)]
    others += [(2.5, Deployed(spec(f"other{number}", 2, tenant="others"))) for number in range(50)]
    others += [
        (2.6, Arrived(100 + n, f"other{n}", None, None), Refuse(100 + n, "TimeoutError", "no")) for n in range(50)
    ]
    others += [(2.7, Arrived(200, "other0", None, None), StartWorker(2, "other0@1", False, 2, 1))]
    others += [(2.8, WorkerReady(2), Run(2, 2, (200,)))]
    every, own = of_tenant(None, *SPLIT, *others), of_tenant("t", *SPLIT, *others)
    assert (every.count(b'"other') > 500, own.count(b'"other')) == (True, 0)
    assert own_metrics(own, {b"f", b"g"}) == own_metrics(every, {b"f", b"g"}) != b""
