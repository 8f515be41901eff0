"""Output of activity, explanations and usage: what is omitted is counted, and unknown values are shown as unknown."""

from rich.console import Console

from overwinter.cli.device_tables import out_of_service
from overwinter.cli.telemetry_tables import activity_table, explained_tables, usage_table
from overwinter.scheduler.latency import SLOWDOWN_MAX

FUNCTION = {
    "name": "f0", "tenant": "t", "state": "awake", "running": 2, "queued": 3, "shared": 0.25, "rate": 4.25,
    "family": "f0@1", "members": 3, "workers": [3, 7],
    "p50_ms": 12.34, "p99_ms": 250.4, "attainment": 0.985, "slo_ms": 80, "host_bytes": 2048, "exclusive_bytes": 0,
    "private_bytes": 1 << 20, "wakes": 7, "requests": 9, "refused": 1,
}  # fmt: skip
ACTIVITY = {
    "cores": 4, "cores_running": 2, "worker_states": {"idle": 1}, "versions_deployed": 3, "running": 2, "queued": 3,
    "host_bytes": 2048, "host_budget": None, "private_bytes": 1 << 20, "private_budget": 1 << 30,
    "functions": [{**FUNCTION, "name": f"f{number}", "p50_ms": None} for number in range(3)], "workers": [],
}  # fmt: skip
EXPLAINED = {
    "name": "f", "version": 2, "tenant": "t", "traffic": 10, "promoted": True, "answered": 7, "refused": 1,
    "state": "backoff", "on_trial": False, "queued": 0,
    "settings": {"slo_ms": 80}, "slo_infeasible": True, "attainment": 0.5, "rate": 1.0, "expected_rate": 2.0,
    "run_s": None, "failures": 3, "backoff_s": 1.25, "workers": [], "refusals": [], "family": "f@2", "members": ["f@2"],
    "member_count": 1,
    "tiers": [
        {"tier": "host", "store": "t", "resident": 5, "missing": 7, "exclusive": 2, "shared": 3, "sharers": 9},
    ],
    "profile": {"points": [[1, 1024, 4, 2, 0.5], [2, 1024, 4, 2, 0.25]], "age_s": 120.0, "slowdown": 1.5},
    "decisions": [{"at": 0.0, "what": "evict", "why": "others needed space"}],
    "shared": {
        "runs": 0, "all_runs": 0, "requests": 0, "all_requests": 0, "charged_s": 0.0, "whole_s": 0.0,
        "separate_part": 0.0, "time_ratio": None, "shared_with": {},
    },
}  # fmt: skip
WORKER = {
    "worker": 9, "pid": 5, "state": "busy", "since_s": 1.0, "cores": 1, "batch": 1, "concurrency": 2, "runs": 1,
    "requests": 1, "private_bytes": None, "pss_bytes": None, "bound_count": 2,
    "bound": [
        {"function": "a@1", "doing": "running", "runs": 1, "requests": 3, "private_bytes": 2048},
        {"function": "f@2", "doing": "binding", "runs": 0, "requests": 0, "private_bytes": None},
    ],
}  # fmt: skip
USED = {
    "tenant": "t", "function": "f", "family": "a@1", "since": "2025-01-02", "requests": 3, "core_ms": 10.0,
    "idle_core_ms": 100.0,
    "billed_core_ms": 20.0, "disk_byte_s": 3600.0 * 1024, "host_byte_s": 0.0, "private_byte_s": 7200.0,
}  # fmt: skip


def text(*what: object, width: int = 300) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(*what)
    return captured.get()


def test_activity_shows_as_many_functions_as_requested_and_counts_the_others() -> None:
    shown = text(activity_table(ACTIVITY, 2))
    assert "cores in use: 2 of 4   workers: 1 idle   requests: 2 running, 3 waiting   versions: 3" in shown
    assert "host store 2.0 KiB   private memory of workers 1.0 MiB of 1.0 GiB" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("f")] == ["f0", "f1"]
    assert "and 1 more" in shown
    assert "more" not in text(activity_table(ACTIVITY, None))
    row = next(line.split() for line in shown.splitlines() if line.startswith("f0"))
    assert row[1:11] == ["awake", "f0@1", "(3)", "3,7", "2", "3", "25.0%", "4.2", "-", "250"]
    assert "98.5%" in row


def test_an_explanation_tells_the_state_the_profile_the_tiers_and_the_decisions() -> None:
    shown = text(*explained_tables(EXPLAINED))
    assert "10% of the requests that name no version (as promoted or split); 7 answered, 1 refused" in " ".join(
        shown.split()
    )
    assert "backoff for 1.2 s after 3 failures, bound in 0 workers" in shown
    assert "80 ms, met by 50.0%; no configuration meets it on this machine" in shown
    assert "2 configurations, known for 2 min; in service the latency is 1.50 times the profile's" in shown
    assert "the fastest takes 250 ms with cores 2, batch 4, concurrency 2, 1.0 KiB" in shown
    assert next(line.split() for line in shown.splitlines() if line.startswith("host")) == [
        "host", "(t)", "5", "B", "7", "B", "2", "B", "3", "B", "9",
    ]  # fmt: skip
    assert "others needed space" in shown
    limit = {**EXPLAINED["profile"], "slowdown": SLOWDOWN_MAX}
    assert "at least 8.00 times" in " ".join(text(*explained_tables({**EXPLAINED, "profile": limit})).split())
    assert "REFUSED" not in shown
    assert "shares workers with no function" in shown
    assert "PRIVATE" not in shown


def test_an_explanation_does_not_take_a_backoff_for_the_duration_of_another_state() -> None:
    for changes, words in (
        ({}, "state backoff for 1.2 s after 3 failures"),
        ({"failures": 1}, "state backoff for 1.2 s after 1 failure, "),
        ({"state": "awake"}, "state awake, in backoff for 1.2 s after 3 failures"),
        ({"on_trial": True}, "state backoff for 1.2 s after 3 failures, on trial, bound"),
        ({"state": "awake", "backoff_s": 0.0}, "state awake, bound"),
    ):
        assert words in " ".join(text(*explained_tables({**EXPLAINED, **changes})).split())


def test_an_explanation_offers_a_measurement_only_where_one_is_possible() -> None:
    pool = {
        "devices": [], "run_s": 0.0, "runs": {}, "hit_ratio": None, "moved_bytes": 0, "answers": 0, "last_device": "",
        "no_device_reason": "", "slices": [{"nbytes": 9, "devices": [], "last_device": ""}] * 2,
    }  # fmt: skip
    on_pool, on_either = {"slo_ms": 80, "device": "pool"}, {"slo_ms": 80, "device": "any"}
    possible, refused = "none: `overwinter profile` measures it", "none: only whole programs are measured"
    for changes, words in (
        ({}, possible),
        ({"pool": {**pool, "slices": []}, "settings": on_pool}, possible),
        ({"pool": pool, "settings": on_either}, possible),
        ({"pool": pool, "settings": on_pool}, refused),
    ):
        shown = text(*explained_tables({**EXPLAINED, **changes, "profile": None}))
        assert f"profile {words}" in " ".join(shown.split())


def test_an_explanation_tells_what_each_worker_of_the_family_has() -> None:
    elsewhere = {**WORKER, "worker": 8, "bound": WORKER["bound"][:1], "bound_count": 301}
    family = {"family": "a@1", "members": ["a@1", "f@2"], "member_count": 1002, "workers": [WORKER, elsewhere]}
    shown = text(*explained_tables({**EXPLAINED, **family}))
    assert "a@1, f@2 and 1000 more" in shown
    assert "bound in 1 worker," in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["9", "a@1", "running", "1", "3", "2.0", "KiB"] in lines
    assert ["9", "f@2", "binding", "0", "0", "-"] in lines
    assert ["8", "a@1", "running", "1", "3", "2.0", "KiB"] in lines
    assert ["8", "and", "300", "more"] in lines
    measured = {**WORKER, "pid": 1234567, "since_s": 123456.7, "private_bytes": 1020 << 20, "pss_bytes": 1019 << 20}
    narrow = text(*explained_tables({**EXPLAINED, **family, "workers": [measured]}), width=80).splitlines()
    assert next(line.split() for line in narrow if "IN STATE" in line)[-3:] == ["RUNS", "NOW", "PRIVATE"]
    assert next(line.split() for line in narrow if "123456.7" in line)[-3:] == ["1", "1020.0", "MiB"]


def test_an_explanation_tells_with_whom_runs_are_shared_and_what_was_charged() -> None:
    assert "runs shared none" in " ".join(text(*explained_tables(EXPLAINED)).split())
    shared = {
        "runs": 4, "all_runs": 10, "requests": 5, "all_requests": 20, "charged_s": 0.5, "whole_s": 2.0,
        "separate_part": 0.25, "time_ratio": None, "shared_with": {f"g{number}": 7 - number for number in range(7)},
    }  # fmt: skip
    shown = " ".join(text(*explained_tables({**EXPLAINED, "shared": shared})).split())
    assert "4 of 10, 5 of 20 requests; charged 0.5 of their 2 core seconds; 25.0%" in shown
    assert "with g0, g1, g2, g3, g4 and 2 more" in shown
    assert "they took" not in shown
    result = explained_tables({**EXPLAINED, "shared": {**shared, "time_ratio": 0.625}})
    assert "they took 62.5% of the time of separate runs" in " ".join(text(*result).split())


def test_an_explanation_tells_where_a_function_of_the_pool_runs_and_why_there() -> None:
    pool = {
        "devices": ["virtual:0"], "no_device_reason": "",
        "last_device": "virtual:0: 5 bytes were missing there", "answers": 9, "in_time": 8,
        "required": 4.2, "runs": {"virtual:0": 7, "virtual:1": 2}, "hit_ratio": 0.5,
        "moved_bytes": 2048, "nbytes": 4096, "run_s": 0.1,
    }  # fmt: skip
    shown = " ".join(text(*explained_tables({**EXPLAINED, "pool": pool})).split())
    assert "after 3 failures, on virtual:0, 0 waiting" in shown
    assert "runs on devices 7 on virtual:0, 2 on virtual:1; 50.0% found all blocks; 2.0 KiB moved" in shown
    assert "last device virtual:0: 5 bytes were missing there" in shown
    assert "8 of the last 9 answers were in time; 4 more in time are required to meet the SLO" in shown
    assert "runs take 100 ms" in shown
    assert "cannot run" not in shown
    assert "out of service" not in shown
    assert "shares workers" not in shown
    out = {**pool, "out_of_service": ["virtual:1", "virtual:2"]}
    shown = " ".join(text(*explained_tables({**EXPLAINED, "pool": out})).split())
    assert "out of service virtual:1, virtual:2" in shown
    unused = {**pool, "devices": [], "runs": {}, "hit_ratio": None, "moved_bytes": None, "required": -2.0}
    unused |= {"last_device": "", "no_device_reason": "no"}
    shown = " ".join(text(*explained_tables({**EXPLAINED, "pool": unused})).split())
    assert all(each in shown for each in ("on no device", "runs on devices none", "last device none", "cannot run no"))
    assert "required" not in shown
    slices = [
        {"nbytes": 2048, "devices": ["virtual:1"], "last_device": "it was there"},
        {"nbytes": 1, "devices": [], "last_device": ""},
    ]
    shown = " ".join(text(*explained_tables({**EXPLAINED, "pool": {**pool, "slices": slices}})).split())
    assert "slice 1 2.0 KiB, on virtual:1; last device: it was there" in shown
    assert "slice 2 1 B, on no device; last device: none" in shown


def test_a_device_that_is_out_of_service_is_named_with_its_failures_and_the_next_attempt() -> None:
    good = {"name": "virtual:0", "state": "idle", "failures": 1, "fault": "a run hung", "backoff_s": 0.0}
    out = {"name": "virtual:1", "state": "out", "failures": 3, "fault": "a run hung", "backoff_s": 12.5}
    assert out_of_service([good, out]) == [
        "device virtual:1 is out of service; it failed 3 times in a row: a run hung; next attempt in 12.5 s"
    ]


def test_an_explanation_of_a_function_for_workers_and_devices_tells_both_expected_times() -> None:
    pool = {
        "devices": ["virtual:0"], "no_device_reason": "", "last_device": "", "answers": 0, "in_time": 0,
        "required": 0.0, "runs": {}, "hit_ratio": None, "moved_bytes": None, "nbytes": 4096, "run_s": 0.1,
    }  # fmt: skip
    settings, choice = {"slo_ms": None, "device": "any"}, "virtual:0 9.0 ms (4.0 until it runs); workers 10.0 ms"
    explained = {**EXPLAINED, "settings": settings, "pool": pool, "last_choice": choice, "run_s": 0.01}
    shown = " ".join(text(*explained_tables(explained)).split())
    assert f"last choice {choice}" in shown
    assert "bound in 0 workers, on virtual:0" in shown
    assert "shares workers" in shown
    assert "runs take 10 ms" in shown


def test_usage_of_devices_is_shown_when_there_is_some() -> None:
    used = {"device_ms": 30.0, "idle_ms": 100.0, "billed_ms": 40.0, "moved_bytes": 1024, "device_byte_s": 3600.0}
    lines = text(usage_table([{**USED, "device": used}, {**USED, "function": "g", "device": None}])).splitlines()
    assert lines[0].split()[-8:] == ["DEVICE", "IDLE", "DEVICE", "DEVICE", "BILLED", "MOVED", "ON", "DEVICE"]
    assert " ".join(lines[-2].split()).endswith("30 ms 100 ms 40 ms 1.0 KiB 1 B h")
    assert lines[-1].split()[-5:] == ["-"] * 5
    assert "DEVICE" not in text(usage_table([USED]))
    assert "(removed)" in text(usage_table([{**USED, "function": ""}]))


def test_usage_is_printed_in_readable_units() -> None:
    row = text(usage_table([USED])).splitlines()[-1]
    assert " ".join(row.split()) == "t f a@1 2025-01-02 3 10 ms 100 ms 20 ms 1.0 KiB h 0 B h 2 B h"
