"""Shows the progress of long work on standard error, if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from overwinter.core.profiling import Progress as MeasurementProgress

ReportBytes = Callable[[str, int, int], None]
"""Receives the name of the current step, the bytes done and the bytes in total."""


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner beside `text` until the `with` statement ends."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield


@contextmanager
def byte_bar(text: str) -> Iterator[ReportBytes]:
    """Show a progress bar of bytes until the `with` statement ends."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    shown = (*columns, TransferSpeedColumn())
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda _, done, total: progress.update(task, completed=done, total=total)


@contextmanager
def configuration_bar(text: str) -> Iterator[Callable[[MeasurementProgress], None]]:
    """Show a progress bar of measured configurations until the `with` statement ends."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda step: progress.update(
            task, description=f"{text}: {step.what}", completed=step.done, total=step.total
        )
