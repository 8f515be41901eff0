"""Measuring from the command line, against a real node."""

import json

from overwinter.cli.profile_tables import count_text, latency_text
from tests.cli.conftest import Run


def test_a_function_is_measured_shown_and_known_afterwards(run: Run) -> None:
    run("deploy", "cli_scale:model", "--name", "paced", "--set", "max_batch=2")
    refused = run("profile", "paced", "--known", exit_code=1)
    assert refused.stderr == "error: 'paced' was not measured on this machine: `overwinter profile paced`\n"
    shown = run("profile", "paced")
    assert shown.stderr == ""
    summary, head, *_ = lines = shown.stdout.splitlines()
    assert summary.startswith("16 B of weights, 4 MACs a request, wakes in ")
    assert head.split() == ["CORES", "CONCURRENCY", "BATCH", "PRIVATE", "MEMORY", "LATENCY", "REQUESTS/S"]
    assert [line.split()[:3] for line in lines[3:5]] == [["1", "1", "1"], ["1", "1", "2"]]
    assert lines[6].split() == ["LAYER", "MACS", "WEIGHTS", "OUTPUT", "BATCH", "1", "BATCH", "2"]
    profile = json.loads(run("profile", "paced", "--known", "--json").stdout)
    assert [point[:1] + point[2:4] for point in profile["points"]] == [[1, 1, 1], [1, 2, 1]]
    assert (
        run("profile", "paced", "--json", "--no-layers").stdout == run("profile", "paced", "--known", "--json").stdout
    )


def test_wrong_calls_say_what_is_wrong(run: Run) -> None:
    run("deploy", "cli_scale:model", "--name", "unpaced")
    assert "must be whole numbers" in run("profile", "unpaced", "--cores", "1,two", exit_code=2).stderr
    assert "cores must be from 1 to" in run("profile", "unpaced", "--cores", "4096", exit_code=1).stderr
    assert "no function 'absent' here" in run("profile", "absent", exit_code=1).stderr


def test_numbers_are_short() -> None:
    latencies = {2.5: "2.5 s", 0.0123: "12.3 ms", 0.00045: "450 us", 0.9999: "1 s", 0.9994: "999 ms", 1234.0: "1234 s"}
    assert {seconds: latency_text(seconds) for seconds in latencies} == latencies
    counts = {7: "7", 4_100: "4.1 k", 17_891_328: "17.9 M", 4.1e9: "4.1 G", 999_999: "1 M", 2e15: "2000 T"}
    assert {count: count_text(count) for count in counts} == counts
