"""Figures are drawn from any report, full or empty."""

import msgspec
import pytest

from overwinter.simulation.world import World
from tests.simulation.scenes import function, scene

figures = pytest.importorskip("overwinter.simulation.figures")


@pytest.fixture(scope="module")
def report():
    return World(scene(function(rate=4.0, variants=3, settings={"slo_ms": 80.0}), duration_s=10)).run()


@pytest.mark.parametrize("rate", [4.0, 1e-6])
def test_figures_are_png_files(tmp_path, rate):
    report = World(scene(function(rate=rate, variants=3), duration_s=10)).run()
    paths = figures.draw(report, tmp_path, 0.98)
    assert sorted(path.name for path in paths) == ["attainment.png", "latency.png", "memory.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths)


def attained(report, *shares):
    """Return the report with these attainments."""
    each = next(iter(report.functions.values()))
    functions = {f"f{number}": msgspec.structs.replace(each, attainment=share) for number, share in enumerate(shares)}
    return msgspec.structs.replace(report, functions=functions)


@pytest.mark.parametrize(
    ("shares", "target", "least"), [((0.97, 1.0), 0.98, 0.9), ((0.31, 1.0), 0.98, 0.25), ((0.0,), 0.9, 0.0)]
)
def test_the_axis_of_attainment_begins_below_all_bars_or_at_0_and_the_target_is_marked(report, shares, target, least):
    [axes] = figures.figures_of(attained(report, *shares), target)["attainment"].axes
    low, high = axes.get_ylim()
    assert low == pytest.approx(least)
    assert high > 1
    assert [bar.get_y() + bar.get_height() for bar in axes.patches] == pytest.approx(sorted(shares))
    [line] = axes.lines
    assert list(line.get_ydata()) == [target, target]


def test_the_slo_is_marked_on_the_latencies(report):
    [axes] = figures.figures_of(report, 0.98)["latency"].axes
    assert [list(line.get_xdata()) for line in axes.lines[1:]] == [[80.0, 80.0]]
    each = next(iter(report.functions.values()))
    many = {f"f{slo}": msgspec.structs.replace(each, slo_ms=float(slo)) for slo in range(10, 30)}
    [axes] = figures.figures_of(msgspec.structs.replace(report, functions=many), 0.98)["latency"].axes
    [span] = axes.patches
    assert (span.get_x(), span.get_width()) == (10.0, 19.0)


def test_legends_cover_no_data(report):
    for figure in figures.figures_of(report, 0.98).values():
        figure.canvas.draw()
        [legend] = figure.legends
        box = legend.get_window_extent()
        assert legend.get_texts()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_a_name_with_dollar_signs_is_drawn_as_it_is(tmp_path):
    report = World(scene(function("$_$"), function("a$b"), duration_s=10)).run()
    figure = figures.figures_of(report, 0.98)["attainment"]
    figure.savefig(tmp_path / "attainment.png")
    [axes] = figure.axes
    assert {label.get_text().replace("\\$", "$") for label in axes.get_xticklabels()} == {"$_$", "a$b"}
