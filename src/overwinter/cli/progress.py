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

from overwinter.core.profiling import Progress as Measuring

Counted = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and how many there are."""


@contextmanager
def turning(text: str) -> Iterator[None]:
    """A spinner beside `text` while the work goes on; gone with it."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield


@contextmanager
def counting(text: str) -> Iterator[Counted]:
    """A bar of bytes while the work goes on; gone with it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    shown = (*columns, TransferSpeedColumn())
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda _, done, total: progress.update(task, completed=done, total=total)


@contextmanager
def measuring(text: str) -> Iterator[Callable[[Measuring], None]]:
    """A bar of configurations while a node measures; gone with it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda told: progress.update(
            task, description=f"{text}: {told.what}", completed=told.done, total=told.total
        )
