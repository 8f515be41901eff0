"""The format of values for people."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.cli.fitting import Column, FittedTable
from overwinter.cli.list_tables import functions_table
from overwinter.cli.options import echo
from overwinter.cli.tables import (
    age_text,
    agreement_facts,
    facts_table,
    function_table,
    outputs_table,
    short_text,
    show,
    slo_text,
    spec_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s ago"), (59.4, "59 s ago"), (60, "1 min ago"), (7199, "1 h ago"), (86400 * 3.5, "3 d ago")],
)
def test_an_age_is_formatted_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_an_slo_is_formatted_in_milliseconds() -> None:
    assert (slo_text(None), slo_text(80.0), slo_text(0.5)) == ("-", "80 ms", "0.5 ms")


def test_short_lists_are_whole_and_long_ones_are_cut_in_the_middle() -> None:
    assert short_text(list(range(8))) == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert short_text(list(range(9))) == "[0, 1, 2, 3, …, 5, 6, 7, 8]"
    assert short_text([[0.123456, True], [1e-9, float("nan")]]) == "[[0.1235, True], [1e-09, nan]]"
    assert short_text([]) == "[]"
    assert short_text("word") == '"word"'
    assert short_text(b"\\xff") == r"b'\\xff'"


@given(st.recursive(st.floats(), lambda inner: st.lists(inner, max_size=30), max_leaves=40))
def test_a_list_at_any_level_never_shows_more_than_its_ends(value: object) -> None:
    text = short_text(value)
    assert text.count("[") == text.count("]")
    if isinstance(value, list) and not any(isinstance(item, list) for item in value):
        assert text.count(",") <= 8


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = spec_text({"name": "x", "datatype": "FP32", "shape": ["batch", 3]})
    show(text)
    assert capsys.readouterr().out == "FP32 [batch, 3]\n"


def test_control_characters_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """They could change the title of the terminal, or what it shows."""
    hostile = "a\x1b]0;title\x07\x1b[2Jb\x9b"
    show(facts_table({f"agreement {hostile}": hostile}))
    show(outputs_table([({"name": hostile, "datatype": "BYTES"}, [1], [hostile])]))
    show(FittedTable([Column("NAME", "name")], [[hostile]]))
    echo(hostile)
    printed = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in printed)
    assert printed.count("title") == 6


def test_nothing_is_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show("word " * 60)
    assert capsys.readouterr().out.splitlines() == ["word " * 60]


def agreement(obstacle: str, **closeness: tuple[bool, float]) -> dict:
    outputs = {name: {"exact": exact, "difference": difference} for name, (exact, difference) in closeness.items()}
    batching = {"obstacle": obstacle, "rows": [], "outputs": outputs}
    return {"sizes": [{}] * 6, "bound": 1e-3, "outputs": outputs, "batching": batching, "notes": ["a note"]}


def test_a_comparison_is_described_by_its_agreement_and_batching() -> None:
    exact = agreement_facts(agreement("", a=(True, 0.0), b=(True, 0.0)))
    assert exact["agreement"] == "equal bit for bit, at 6 sizes"
    assert exact["batching"] == "requests may share a run: equal bit for bit"
    assert "a note" in exact.values()
    near = agreement_facts(agreement("output 'b' mixes", a=(True, 0.0), b=(False, 3e-7)))
    assert "3e-07" in near["agreement"]
    assert "'b'" in near["agreement"]
    assert near["batching"] == "one request per run: output 'b' mixes"
    assert list(agreement_facts(None)) == ["agreement"]


FUNCTION = {
    "name": "b", "version": 1, "traffic": 100, "promoted": False, "tenant": "t", "state": "READY", "reason": "",
    "lifecycle": "awake", "family": "a@1", "members": 2, "workers": [3, 5], "waiting": 4, "nbytes": 2048, "blocks": 1,
    "missing_bytes": 0, "handler": False, "agreement": None, "inputs": [], "outputs": [], "settings": {"slo_ms": None},
    "created": 0.0, "sharing": None,
}  # fmt: skip


def printed(table: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show(table)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_list_names_the_family_of_each_function_and_the_workers_that_have_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = {**FUNCTION, "name": "c", "family": "c@1", "members": 1, "workers": []}
    lines = printed(functions_table([FUNCTION, alone], 60.0), capsys)
    assert "b 1 READY awake a@1 (2) 3,5 4 2.0 KiB 0 B - 1 min ago" in lines
    assert "c 1 READY awake - - 4 2.0 KiB 0 B - 1 min ago" in lines


def test_a_function_shows_its_family_and_what_each_worker_has(capsys: pytest.CaptureFixture[str]) -> None:
    workers = [
        {"worker": 3, "family": "a@1", "state": "idle", "bound": ["b@1"], "bound_count": 1},
        {"worker": 5, "family": "a@1", "state": "busy", "bound": ["a@1", "b@1"], "bound_count": 2},
    ]
    sharing = {"name": "a@1", "members": ["a@1", "b@1"], "member_count": 2, "workers": workers}
    lines = printed(function_table({**FUNCTION, "sharing": sharing}, 60.0), capsys)
    assert "family a@1, b@1" in lines
    assert "worker 3 idle, has b@1" in lines
    assert "worker 5 busy, has a@1, b@1" in lines
    many = {**sharing, "members": [f"m{number}@1" for number in range(30)], "member_count": 300, "workers": []}
    assert "and 280 more" in "".join(printed(function_table({**FUNCTION, "sharing": many}, 60.0), capsys))


def test_a_function_of_the_pool_shows_its_devices(capsys: pytest.CaptureFixture[str]) -> None:
    pooled = {**FUNCTION, "workers": [], "settings": {"slo_ms": None, "device": "pool", "max_workers": 8}}
    for devices, listed, shown in (
        ([], "pool", "resident on no device"),
        (["virtual:0", "virtual:1"], "pool: virtual:0, virtual:1", "resident on virtual:0, virtual:1"),
    ):
        function = {**pooled, "devices": devices}
        assert f"b 1 READY awake a@1 (2) {listed} 4" in "".join(printed(functions_table([function], 0.0), capsys))
        assert shown in printed(function_table(function, 0.0), capsys)


def test_a_function_for_workers_and_devices_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"slo_ms": None, "device": "any", "max_workers": 8}
    function = {**FUNCTION, "workers": [3], "settings": settings, "devices": ["virtual:0"]}
    assert "any: virtual:0; 3" in "".join(printed(functions_table([function], 0.0), capsys))
    lines = printed(function_table(function, 0.0), capsys)
    assert {"resident on virtual:0", "workers 3", "max_workers 8"} <= set(lines)
