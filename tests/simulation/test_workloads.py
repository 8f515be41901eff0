"""Streams ascend, keep their rates, depend on the seed only, and repeat recorded traces."""

import struct
from itertools import islice, pairwise, takewhile
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.errors import CallerError
from overwinter.simulation.workloads import Workload, arrivals

KINDS = [
    {"kind": "poisson", "rate": 5.0},
    {"kind": "map", "rates": [1.0, 20.0], "stays_s": [10.0, 2.5]},
    {"kind": "stable", "rate": 5.0},
    {"kind": "periodic", "low": 1.0, "high": 9.0, "period_s": 20.0},
    {"kind": "bursty", "rate": 3.0, "factor": 5.0, "every_s": 20.0, "length_s": 4.0},
    {"kind": "twitter-like", "mean": 7.0, "begin_s": 10.0},
]
RATES = [5.0, 4.8, 5.0, 5.0, 5.0]


def made(table: dict) -> Workload:
    return msgspec.convert(table, Workload)


def npy(path, rows: list[list[int]], kind="<i8"):
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({len(rows)}, {len(rows[0])}), }}".encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    flat = [count for row in rows for count in row]
    data = struct.pack(f"<{len(flat)}q", *flat)
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data)
    return path


@given(st.sampled_from(KINDS), st.integers(0, 1000))
def test_streams_ascend_and_are_the_same_for_the_same_seed(tmp_path_factory, table, seed):
    base = tmp_path_factory.getbasetemp()
    times = list(islice(arrivals(made(table), Random(seed), 0, base), 50))
    assert times == list(islice(arrivals(made(table), Random(seed), 0, base), 50))
    assert times[0] >= 0
    assert all(before <= after for before, after in pairwise(times))


@pytest.mark.parametrize(
    ("table", "rate"), list(zip(KINDS, RATES, strict=False)), ids=[kind["kind"] for kind in KINDS[:5]]
)
def test_streams_keep_their_rate(tmp_path, table, rate):
    seconds = 5000
    count = sum(1 for _ in takewhile(lambda at: at < seconds, arrivals(made(table), Random(1), 0, tmp_path)))
    assert count / seconds == pytest.approx(rate, rel=0.12)


def test_a_stable_rate_may_rise_first(tmp_path):
    workload = made({"kind": "stable", "rate": 10.0, "rise_s": 20.0})
    times = list(takewhile(lambda at: at < 40, arrivals(workload, Random(1), 0, tmp_path)))
    assert all(before <= after for before, after in pairwise(times))
    counts = [sum(1 for at in times if begin <= at < begin + 10) for begin in (0, 10, 20, 30)]
    assert counts == pytest.approx([25, 75, 100, 100], abs=2)


def test_recorded_counts_per_minute_are_rates(tmp_path):
    npy(tmp_path / "counts.npy", [[600, 0, 60], [30, 30, 30]])
    table = {"kind": "minute-counts", "path": "counts.npy", "scale": 2.0}
    times = list(takewhile(lambda at: at < 180, arrivals(made(table), Random(1), 0, tmp_path)))
    minutes = [sum(minute * 60 <= at < minute * 60 + 60 for at in times) for minute in range(3)]
    assert minutes[1] == 0
    assert minutes[0] == pytest.approx(1200, rel=0.15)
    assert minutes[2] == pytest.approx(120, rel=0.3)


def test_siblings_take_rows_in_turn_and_those_after_the_last_row_begin_at_a_random_minute(tmp_path):
    npy(tmp_path / "counts.npy", [[0, 6000], [6000, 0]])
    firsts = {
        copy: next(arrivals(made({"kind": "minute-counts", "path": "counts.npy"}), Random(1), copy, tmp_path))
        for copy in (0, 1)
    }
    assert firsts[0] > 60 > firsts[1]
    turned = {
        next(arrivals(made({"kind": "minute-counts", "path": "counts.npy"}), Random(seed), 2, tmp_path)) < 60
        for seed in range(8)
    }
    assert turned == {True, False}


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,Tokens\n2023-11-16 23:59:59.5000000,3\n2023-11-17 00:00:00.0000000,4\n2023-11-17 00:00:02,4\n",
        '{"timestamp": 1000}\n{"timestamp": 1500}\n{"timestamp": 3500}\n',
    ],
    ids=["csv", "json"],
)
def test_recorded_timestamps_are_repeated(tmp_path, text):
    (tmp_path / "trace").write_text(text)
    table = {"kind": "timestamps", "path": "trace", "speed": 2.0}
    times = list(islice(arrivals(made(table), Random(1), 0, tmp_path), 6))
    assert times[:3] == pytest.approx([0, 0.25, 1.25])
    gap = times[3]
    assert gap > times[2]
    assert times[3:] == pytest.approx([gap, gap + 0.25, gap + 1.25])


def test_a_random_share_of_a_trace_is_taken(tmp_path):
    (tmp_path / "trace").write_text("".join(f'{{"timestamp": {ms}}}\n' for ms in range(0, 10_000, 10)))
    table = {"kind": "timestamps", "path": "trace", "share": 0.25}
    times = list(takewhile(lambda at: at < 10, arrivals(made(table), Random(1), 0, tmp_path)))
    assert len(times) == pytest.approx(250, rel=0.2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"no,columns\n1,2\n", "TIMESTAMP"),
        (b"TIMESTAMP\nyesterday\n", "date"),
        (b"TIMESTAMP\n", "no arrival"),
        (b"A,TIMESTAMP\n1\n", "date"),
        (b"TIMESTAMP\n\xff\n", "utf-8"),
    ],
)
def test_the_error_for_a_file_that_is_no_trace_names_it(tmp_path, content, said):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(CallerError, match=said) as raised:
        next(arrivals(made({"kind": "timestamps", "path": "bad"}), Random(1), 0, tmp_path))
    assert "bad" in str(raised.value)


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        (lambda path: path.write_bytes(b"PK"), "not a .npy"),
        (lambda path: npy(path, [[1, 2]], kind="<f8"), "64-bit integers"),
        (lambda path: npy(path, [[1, -2]]), "negative"),
        (lambda path: npy(path, [[0, 0]]), "no request"),
        (lambda path: npy(path, [[]]), "64-bit integers"),
        (lambda path: path.write_bytes(npy(path, [[1, 2]]).read_bytes().replace(b"(1, 2)", b"(1e999, 2)")), "header"),
        (lambda path: path.write_bytes(npy(path, [[1, 2]]).read_bytes()[:-1]), "64-bit integers"),
    ],
)
def test_files_without_valid_counts_are_refused(tmp_path, fill, said):
    fill(tmp_path / "bad.npy")
    with pytest.raises(CallerError, match=said):
        next(arrivals(made({"kind": "minute-counts", "path": "bad.npy"}), Random(1), 0, tmp_path))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "poisson", "rate": 0.0}, "rate"),
        ({"kind": "map", "rates": [1.0, -1.0], "stays_s": [1.0, 1.0]}, "rates"),
        ({"kind": "stable", "rate": 1.0, "jitter": 2.0}, "jitter"),
        ({"kind": "poison", "rate": 1.0}, "poison"),
        ({"kind": "poisson", "speed": 1.0}, "speed"),
    ],
)
def test_invalid_workloads_are_refused(table, said):
    with pytest.raises(msgspec.ValidationError, match=said):
        made(table)
