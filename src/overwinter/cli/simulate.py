"""The command that runs the scheduler on a simulated machine."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from overwinter.cli.options import as_json, print_json, size_text
from overwinter.core.errors import CallerError

if TYPE_CHECKING:
    from rich.table import Table

    from overwinter.cli.fitting import FittedTable
    from overwinter.simulation.capacity import Attempt, Capacity
    from overwinter.simulation.scenario import Scenario
    from overwinter.telemetry.report import Figures, Report, RequestFigures

ROWS = 20
"""The functions in the printed table; the JSON contains all."""
TARGET = 0.98
"""The attainment that the figure marks when --capacity is not given."""
REQUEST_TITLES = ("REQUESTS", "ANSWERED", "REFUSED", "LOST", "IN SLO", "P50", "P99")

_existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_directory = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("scenario", type=_existing_file)
@click.option(
    "--capacity", type=click.FloatRange(0, 1, min_open=True), help="Find the most copies that reach this attainment."
)
@click.option("--traces", type=_directory, help="Directory of the recorded traces. [default: the scenario's]")
@click.option("--out", type=_directory, help="Directory for results. [default: simulated/SCENARIO]")
@click.option("--figures/--no-figures", default=True, help="Draw PNG figures.")
@click.option("--journal", type=click.Path(dir_okay=False, path_type=Path), help="Write the journal to this file.")
@click.option("--seed", type=int, help="Replaces the scenario's seed.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Replaces the scenario's duration_s.")
@click.option("--check", is_flag=True, help="Check the scheduler's invariants meanwhile, for a new policy; slower.")
@as_json
def simulate(  # noqa: PLR0913 - one parameter for each option
    scenario: Path,
    capacity: float | None,
    traces: Path | None,
    out: Path | None,
    figures: bool,
    journal: Path | None,
    seed: int | None,
    seconds: float | None,
    check: bool,
    as_json: bool,
) -> None:
    """Simulate a scenario: the scheduler of a node on a modelled machine.

    SCENARIO is a TOML file that describes a machine, functions with their blocks, times and workloads, and faults. The
    same seed gives the same journal. --capacity finds how many copies of the functions the machine can serve.
    """
    from overwinter.simulation.scenario import read_scenario

    if figures and find_spec("matplotlib") is None:
        raise click.UsageError("figures need matplotlib: pip install matplotlib, or add --no-figures")
    if capacity is not None and (journal is not None or check):
        option = "--check" if journal is None else "--journal"
        raise click.UsageError(f"--capacity runs many simulations, and {option} is for one: leave one of them out")
    read = _with_changes(read_scenario(scenario), seed, seconds)
    base = scenario.parent if traces is None else traces
    directory = out or Path("simulated") / scenario.stem
    # Before the simulation, which may take long.
    directory.mkdir(parents=True, exist_ok=True)
    found: Capacity | Report
    found = _run_once(read, base, journal, check) if capacity is None else _find_capacity(read, base, capacity)
    written = _write(found, directory, figures)
    if as_json:
        print_json(found)
        return
    _print(found)
    click.echo(f"\nwritten: {', '.join(str(path) for path in written)}")


def _with_changes(scenario: "Scenario", seed: int | None, seconds: float | None) -> "Scenario":
    changes = {"seed": seed, "duration_s": seconds}
    try:
        return msgspec.structs.replace(scenario, **{key: value for key, value in changes.items() if value is not None})
    except ValueError as error:
        raise click.UsageError(f"--seconds: {error}") from None


def _run_once(scenario: "Scenario", base: Path, journal: Path | None, check: bool) -> "Report":
    from overwinter.simulation.world import World

    with ExitStack() as stack:
        file = None if journal is None else stack.enter_context(journal.open("wb"))
        report_progress = stack.enter_context(_progress("simulating", scenario.duration_s))
        with _missing_trace_as_error(), _violation_as_error() if check else nullcontext():
            return World(scenario, base, file, check).run(report_progress)


def _find_capacity(scenario: "Scenario", base: Path, target: float) -> "Capacity":
    from overwinter.simulation.capacity import capacity

    def print_attempt(attempt: "Attempt") -> None:
        fits = "fits" if attempt.fits else "does not fit"
        click.echo(
            f"{attempt.copies} copies, {attempt.functions} functions: {attempt.attainment:.4f}, {fits}", err=True
        )

    with _missing_trace_as_error():
        return capacity(scenario, target, base, print_attempt)


@contextmanager
def _missing_trace_as_error() -> Iterator[None]:
    """Turn a missing trace file into a CallerError that names --traces."""
    try:
        yield
    except FileNotFoundError as error:
        raise CallerError(
            f"there is no trace {error.filename}: give the directory of the recorded traces with --traces DIR "
            "(docs/benchmarks.md says where to get them)"
        ) from error


@contextmanager
def _violation_as_error() -> Iterator[None]:
    """Turn a violated invariant into an error of one line."""
    try:
        yield
    except AssertionError as error:
        [place] = traceback.extract_tb(error.__traceback__)[-1:]
        what = f"{str(error) or place.line} ({Path(place.filename).name}:{place.lineno})"
        raise click.ClickException(f"an invariant of the scheduler is violated: {what}") from error


@contextmanager
def _progress(text: str, seconds: float) -> Iterator[Callable[[float], None]]:
    """Show a progress bar of simulated seconds if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=seconds)
        yield lambda done: progress.update(task, completed=done)


def _write(found: "Capacity | Report", directory: Path, figures: bool) -> list[Path]:
    from overwinter.telemetry.report import Report

    path = directory / "report.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    report = found if isinstance(found, Report) else found.report
    if not figures or report is None:
        return [path]
    from overwinter.simulation.figures import draw

    return [path, *draw(report, directory, TARGET if isinstance(found, Report) else found.target)]


def _print(found: "Capacity | Report") -> None:
    from overwinter.cli.tables import show
    from overwinter.telemetry.report import Report

    report = found if isinstance(found, Report) else found.report
    if not isinstance(found, Report):
        click.echo(f"{found.copies} copies of the functions, {found.functions} in all, fit at {found.target:.2%}\n")
    if report is None:
        return
    worst = sorted(report.functions.items(), key=lambda item: (_served_share(item[1]), item[0]))
    show(_figures_table([*worst[:ROWS], ("total", report.total)]))
    if len(worst) > ROWS:
        click.echo(f"the worst {ROWS} of {len(worst)} functions; report.json has all")
    if report.applications:
        click.echo()
        show(_applications_table(report))
    if report.devices:
        click.echo()
        show(_devices_table(report))
    memory = report.memory
    click.echo(
        f"\nmemory: {size_text(memory.mean)} on average, {size_text(memory.peak)} at peak; blocks "
        f"{size_text(memory.blocks_mean)} and {size_text(memory.blocks_peak)}, "
        f"workers {size_text(memory.workers_mean)} and {size_text(memory.workers_peak)}"
    )


def _figures_table(rows: "list[tuple[str, Figures]]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("FUNCTION", no_wrap=True)
    for title in (*REQUEST_TITLES, "WAKES", "FROM DISK", "WORKER S"):
        table.add_column(title, no_wrap=True, justify="right")
    for name, each in rows:
        table.add_row(
            name,
            *_request_cells(each),
            str(sum(each.wakes.values())),
            str(each.wakes.get("disk", 0)),
            f"{each.worker_seconds:.0f}",
        )
    return table


def _applications_table(report: "Report") -> "FittedTable":
    from overwinter.cli.fitting import Column, FittedTable

    rows = [(name, *_request_cells(each)) for name, each in sorted(report.applications.items())]
    return FittedTable((Column("APPLICATION", "word"), *map(Column, REQUEST_TITLES)), rows)


def _request_cells(figures: "RequestFigures") -> list[str]:
    """Return the cells below REQUEST_TITLES."""
    return [
        str(figures.requests),
        str(figures.answered),
        str(sum(figures.refused.values())),
        str(figures.lost),
        "" if figures.attainment is None else f"{figures.attainment:.2%}",
        _ms_text(figures.p50_ms),
        _ms_text(figures.p99_ms),
    ]


def _devices_table(report: "Report") -> "FittedTable":
    from overwinter.cli.fitting import Column, FittedTable

    columns = (Column("DEVICE", "word"), *map(Column, ("RUNS", "BUSY", "HITS", "MOVED", "STARTS", "CRASHES")))
    rows = [
        (
            name,
            str(each.runs),
            f"{each.busy_share:.1%}",
            "" if each.hit_ratio is None else f"{each.hit_ratio:.1%}",
            size_text(each.moved_bytes),
            str(each.executors),
            str(each.crashes),
        )
        for name, each in sorted(report.devices.items())
    ]
    return FittedTable(columns, rows)


def _served_share(figures: "Figures") -> float:
    """Return the attainment, or without an SLO the share of requests answered."""
    if figures.attainment is not None:
        return figures.attainment
    return figures.answered / figures.requests if figures.requests else 1.0


def _ms_text(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"
