"""The tables of a profile."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from overwinter.cli.options import size_text
from overwinter.core.profile import LayerPoint, Point, Profile

ROUNDS_TO_ONE = 0.9995
"""The least number that three digits show as 1."""


def summary(profile: Profile) -> str:
    """Format in one line what does not depend on a configuration."""
    wake = "" if profile.wake_s is None else f", wakes in {latency_text(profile.wake_s)}"
    return f"{size_text(profile.weight_bytes)} of weights, {count_text(profile.macs)} MACs a request{wake}"


def points_table(points: Sequence[Point]) -> Table:
    """Build a table with one row for each configuration."""
    table = _table("CORES", "CONCURRENCY", "BATCH", "PRIVATE MEMORY", "LATENCY", "REQUESTS/S")
    for point in points:
        table.add_row(
            str(point.cores),
            str(point.concurrency),
            str(point.batch),
            size_text(point.memory_bytes),
            latency_text(point.latency_s),
            f"{point.throughput:.1f}",
        )
    return table


def layers_table(layers: Sequence[LayerPoint]) -> Table:
    """Build a table with one row for each layer and one column for each batch size."""
    batches = sorted({batch for layer in layers for batch in layer.latency_s})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("LAYER", no_wrap=True)
    for title in ("MACS", "WEIGHTS", "OUTPUT", *(f"BATCH {batch}" for batch in batches)):
        table.add_column(title, no_wrap=True, justify="right")
    for layer in layers:
        latencies_s = (layer.latency_s.get(batch) for batch in batches)
        table.add_row(
            layer.path or "(model)",
            count_text(layer.macs),
            size_text(layer.weight_bytes),
            size_text(layer.output_bytes),
            *("" if seconds is None else latency_text(seconds) for seconds in latencies_s),
        )
    return table


def latency_text(seconds: float) -> str:
    """Format seconds with three digits in a fitting unit."""
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds / unit_s >= ROUNDS_TO_ONE:
            return f"{_digits(seconds / unit_s)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def count_text(count: float) -> str:
    """Format a count with three digits and a decimal prefix."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count / factor >= ROUNDS_TO_ONE:
            return f"{_digits(count / factor)} {unit}"
    return f"{count:.0f}"


def _digits(value: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=True, justify="right")
    return table
