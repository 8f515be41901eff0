"""Shows the progress of the demo on standard error, one line for each step."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")


class Steps:
    """Shows the current step as a line with a bar, and keeps the lines of finished ones."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def say(self, line: str) -> None:
        """Print a line above the current step."""
        self._console.print(line, style="dim", markup=False, soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show a step of unknown length."""
        with self._progress() as progress:
            task = progress.add_task(text, total=1, name="")
            yield
            progress.update(task, completed=1)

    def counting(self, text: str, items: Iterable[T], names: Sequence[str]) -> Iterator[T]:
        """Yield the items, one for each name, while a bar shows the current one."""
        with self._progress() as progress:
            task = progress.add_task(text, total=len(names), name=names[0] if names else "")
            for item, following in zip(items, [*names[1:], ""], strict=True):
                yield item
                progress.update(task, advance=1, name=following)

    def _progress(self) -> Progress:
        columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn())
        columns = (*columns, MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[name]}"))
        return Progress(*columns, console=self._console)
