"""Figures are drawn from any report, full or empty."""

import pytest

from overwinter.simulation.world import World
from tests.simulation.scenes import function, scene

figures = pytest.importorskip("overwinter.simulation.figures")


@pytest.mark.slow
@pytest.mark.parametrize("rate", [4.0, 1e-6])
def test_figures_are_png_files(tmp_path, rate):
    report = World(scene(function(rate=rate, variants=3), duration_s=10)).run()
    paths = figures.draw(report, tmp_path)
    assert sorted(path.name for path in paths) == ["attainment.png", "latency.png", "memory.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths)
