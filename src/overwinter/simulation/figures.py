"""Draws the figures of a report as PNG files. Only this module needs matplotlib."""

from math import floor
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from overwinter.telemetry.report import Report

MIB = 1 << 20
BARS = 40
"""The most functions and applications (pipelines) that are drawn by name; of more, the worst are drawn."""
SLOS = 6
"""The most SLOs that are marked one by one; of more, the range is marked."""
STEP = 0.05
"""The axis of attainment begins at a multiple of this, below the lowest bar and the target, or at 0."""


def draw(report: Report, directory: Path, target: float) -> list[Path]:
    """Write all figures of a report into an existing directory, and return their paths. `target`: the attainment to
    mark.
    """
    paths = []
    for name, figure in figures_of(report, target).items():
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths


def figures_of(report: Report, target: float) -> dict[str, Figure]:
    """Return all figures of a report by name; `target`: the attainment to mark."""
    figures = {name: Figure(figsize=(8, 4.5), layout="constrained") for name in ("latency", "memory", "attainment")}
    for figure in figures.values():
        FigureCanvasAgg(figure)
    _latency(report, figures["latency"])
    _memory(report, figures["memory"])
    _attainment(report, figures["attainment"], target)
    return figures


def _latency(report: Report, figure: Figure) -> None:
    axes = figure.add_subplot()
    latencies = [(seconds * 1000, share) for seconds, share in report.latencies]
    axes.plot([ms for ms, _ in latencies], [share for _, share in latencies], label="answers")
    if latencies:
        axes.set_xscale("log")
    _mark_slos(sorted({each.slo_ms for each in report.functions.values() if each.slo_ms is not None}), axes)
    axes.set(xlabel="latency, ms", ylabel="share of the answers", title="Latency", ylim=(0, 1.01))
    axes.grid(alpha=0.3)
    _legend(figure)


def _mark_slos(slos_ms: list[float], axes: Axes) -> None:
    if len(slos_ms) > SLOS:
        label = f"SLOs, {slos_ms[0]:g} to {slos_ms[-1]:g} ms"
        axes.axvspan(slos_ms[0], slos_ms[-1], color="tab:red", alpha=0.15, label=label)
        return
    for number, slo_ms in enumerate(slos_ms):
        axes.axvline(slo_ms, color=f"C{1 + number}", linewidth=1, linestyle="--", label=f"SLO {slo_ms:g} ms")


def _memory(report: Report, figure: Figure) -> None:
    axes = figure.add_subplot()
    times = [sample.at_s for sample in report.samples]
    blocks = [sample.blocks_bytes / MIB for sample in report.samples]
    workers = [sample.workers_bytes / MIB for sample in report.samples]
    axes.stackplot(times, blocks, workers, labels=["blocks, each once", "workers"], alpha=0.7)
    axes.set(xlabel="time, s", ylabel="MiB", title="Memory and workers")
    count = axes.twinx()
    count.plot(
        times, [sample.workers for sample in report.samples], color="black", linewidth=0.8, label="workers alive"
    )
    count.set(ylabel="workers")
    count.set_ylim(bottom=0)
    count.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure)


def _attainment(report: Report, figure: Figure, target: float) -> None:
    axes = figure.add_subplot()
    every = {**report.functions, **report.applications}
    with_slo = [(outcome.attainment, name) for name, outcome in every.items() if outcome.attainment is not None]
    worst = sorted(with_slo)[:BARS]
    lowest = min([target, *(share for share, _ in worst)])
    # A bar that ends where the axis begins would be invisible.
    least = max(0.0, (floor(lowest / STEP) - 1) * STEP)
    # Between two dollar signs, matplotlib would expect a formula.
    names = [name.replace("$", r"\$") for _, name in worst]
    axes.bar(names, [share - least for share, _ in worst], bottom=least, label="attainment")
    axes.axhline(target, color="tab:red", linewidth=1, linestyle="--", label=f"target, {target:.4g}")
    axes.tick_params(axis="x", labelrotation=90)
    selection = "" if len(worst) == len(with_slo) else f", the worst {len(worst)} of {len(with_slo)}"
    top = 1 + (1 - least) / 100
    axes.set(ylabel="requests within the SLO", title=f"SLO attainment{selection}", ylim=(least, top))
    axes.grid(alpha=0.3, axis="y")
    _legend(figure)


def _legend(figure: Figure) -> None:
    """Put the legend below the axes, where it covers no data."""
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
