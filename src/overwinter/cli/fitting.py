"""Fits a table to the width of a terminal: the least important columns are dropped first, and names are wrapped; no
value is cut.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult

from overwinter.cli.tables import plain_table

FOLDED = 20
"""Columns of the terminal that a name has at least; a longer one goes on in the next line where there are no more."""
BETWEEN = 3
"""Columns of the terminal between two of the table."""

Kind = Literal["name", "word", "number"]


class Column(NamedTuple):
    """One column of a table."""

    title: str
    kind: Kind = "number"
    leaves: int = 0
    """When it is left out: 1 is the first to go; 0 stays."""


class Fitted:
    """A table with as many of its columns as there is room for."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Each row has a text for each column."""
        self._columns = columns
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As rich asks for it."""
        table = plain_table()
        widths = self._widths(options.max_width)
        for at, width in widths.items():
            column = self._columns[at]
            if column.kind == "name":
                table.add_column(column.title, overflow="fold", width=width)
            else:
                table.add_column(column.title, no_wrap=True, justify="right" if column.kind == "number" else "left")
        for row in self._rows:
            table.add_row(*(row[at] for at in widths))
        yield table

    def _widths(self, width: int) -> dict[int, int]:
        """The columns that there is room for, by their places, and how wide each is."""
        whole = [
            max(cell_len(text) for text in (column.title, *(row[at] for row in self._rows)))
            for at, column in enumerate(self._columns)
        ]
        widths = {
            at: min(whole[at], FOLDED) if column.kind == "name" else whole[at]
            for at, column in enumerate(self._columns)
        }
        for _, at in sorted((column.leaves, at) for at, column in enumerate(self._columns) if column.leaves):
            if _sum(widths) <= width:
                break
            del widths[at]
        # What is left is for names, the shortest first.
        for at in sorted(widths, key=whole.__getitem__):
            widths[at] += max(0, min(whole[at] - widths[at], width - _sum(widths)))
        return widths


def _sum(widths: Mapping[int, int]) -> int:
    return sum(each + BETWEEN for each in widths.values()) - BETWEEN
