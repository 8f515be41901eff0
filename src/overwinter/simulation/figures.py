"""How does a report look? PNG files, drawn by matplotlib, which only this file needs."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from overwinter.simulation.report import Report

MIB = 1 << 20
BARS = 40
"""Functions drawn by name; beyond that the worst are drawn."""


def draw(report: Report, directory: Path) -> list[Path]:
    """Write all figures of a report into a directory that exists; their paths."""
    figures = {"latency": _latency, "memory": _memory, "attainment": _attainment}
    paths = []
    for name, fill in figures.items():
        path = directory / f"{name}.png"
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        fill(report, figure.add_subplot())
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths


def _latency(report: Report, axes: Axes) -> None:
    axes.plot([seconds * 1000 for seconds, _ in report.latencies], [share for _, share in report.latencies])
    if report.latencies:
        axes.set_xscale("log")
    axes.set(xlabel="latency, ms", ylabel="share of the answers", title="Latency", ylim=(0, 1.01))
    axes.grid(alpha=0.3)


def _memory(report: Report, axes: Axes) -> None:
    times = [sample.at_s for sample in report.samples]
    blocks = [sample.blocks_bytes / MIB for sample in report.samples]
    bodies = [sample.bodies_bytes / MIB for sample in report.samples]
    axes.stackplot(times, blocks, bodies, labels=["blocks, each once", "bodies"], alpha=0.7)
    axes.set(xlabel="time, s", ylabel="MiB", title="Memory and bodies")
    count = axes.twinx()
    count.plot(times, [sample.bodies for sample in report.samples], color="black", linewidth=0.8, label="bodies alive")
    count.set(ylabel="bodies")
    count.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    count.legend(loc="upper right")


def _attainment(report: Report, axes: Axes) -> None:
    promised = [
        (figures.attainment, name) for name, figures in report.functions.items() if figures.attainment is not None
    ]
    worst = sorted(promised)[:BARS]
    axes.bar([name for _, name in worst], [share for share, _ in worst])
    axes.tick_params(axis="x", labelrotation=90)
    named = "" if len(worst) == len(promised) else f", the worst {len(worst)} of {len(promised)} functions"
    axes.set(ylabel="requests within the SLO", title=f"SLO attainment{named}", ylim=(0, 1.01))
    axes.grid(alpha=0.3, axis="y")
