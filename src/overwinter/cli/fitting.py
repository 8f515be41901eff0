"""Fits a table to the width of a terminal: the least important columns are dropped first, and names are wrapped. Other
values are cut only if the columns that are never dropped do not fit.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult

from overwinter.cli.tables import plain_table

NAME_WIDTH_MIN = 20
"""The width to which a column of longer names may shrink, in terminal columns. Such a name continues on the next line.
"""
GAP = 3
"""The terminal columns between two columns of the table."""

Kind = Literal["name", "word", "number"]


class Column(NamedTuple):
    """One column of a table."""

    title: str
    kind: Kind = "number"
    drop_order: int = 0
    """The order in which columns are dropped: 1 is dropped first; 0 is never dropped."""


class FittedTable:
    """A table that shows as many of its columns as fit."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Create the table; each row has one text per column."""
        self._columns = columns
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table at the width that rich offers."""
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
        """Return the width of each column that fits, by its index."""
        whole = [
            max(cell_len(text) for text in (column.title, *(row[at] for row in self._rows)))
            for at, column in enumerate(self._columns)
        ]
        widths = {
            at: min(whole[at], NAME_WIDTH_MIN) if column.kind == "name" else whole[at]
            for at, column in enumerate(self._columns)
        }
        for _, at in sorted((column.drop_order, at) for at, column in enumerate(self._columns) if column.drop_order):
            if _total_width(widths) <= width:
                break
            del widths[at]
        # Distribute the width that is left among the name columns, the shortest first.
        for at in sorted(widths, key=whole.__getitem__):
            widths[at] += max(0, min(whole[at] - widths[at], width - _total_width(widths)))
        return widths


def _total_width(widths: Mapping[int, int]) -> int:
    return sum(each + GAP for each in widths.values()) - GAP
