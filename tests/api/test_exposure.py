"""Of a node's metrics a tenant sees the samples of its own functions, and nothing that depends on others."""

from pathlib import Path

from overwinter.api.exposure import SHARED_FAMILIES, own_metrics

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


def test_only_samples_of_own_functions_and_pipelines_are_told() -> None:
    assert own_metrics(TEXT, {b"mine", b"chain"}).decode().splitlines() == [
        "# HELP overwinter_requests_total Requests that ended.",
        "# TYPE overwinter_requests_total counter",
        'overwinter_requests_total{error="",function="mine",outcome="answered"} 5.0',
        "# HELP overwinter_pipeline_duration_seconds From arrival to answer.",
        "# TYPE overwinter_pipeline_duration_seconds histogram",
        'overwinter_pipeline_duration_seconds_bucket{le="1.0",pipeline="chain"} 2.0',
    ]
    assert own_metrics(TEXT, set()) == b""


def test_what_depends_on_others_is_left_out_under_the_name_that_it_has() -> None:
    documented = METRICS.read_text()
    assert [name for name in SHARED_FAMILIES if f"`{name.decode()}" not in documented] == []
    text = b"".join(b'# TYPE %b gauge\n%b{function="mine"} 9.0\n' % (name, name) for name in SHARED_FAMILIES)
    assert own_metrics(text, {b"mine"}) == b""
