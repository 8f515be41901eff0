"""The pictures of the docs are up to date."""

import html
import io
import re

from rich.console import Console

from docs.pictures import architecture, top
from overwinter.cli.telemetry_tables import activity_table, rows_for


def test_the_architecture_is_drawn_by_its_script() -> None:
    assert architecture.FILE.read_text() == architecture.draw()


def test_each_box_holds_its_text_and_lies_within_the_picture() -> None:
    for box in architecture.BOXES:
        assert 0 < box.x < box.x + box.width < architecture.WIDTH
        assert 0 < box.y < box.y + box.height < architecture.HEIGHT
        assert 22 + (box.text.count("\n")) * architecture.LINE < box.height


def words_of(svg: str) -> str:
    """Return all text in the picture of a terminal, without the spaces and the title."""
    written = re.findall(r'<text class="top-r\d+"[^>]*>([^<]*)</text>', svg)
    return "".join("".join(map(html.unescape, written)).split())


def test_the_picture_of_top_shows_what_top_shows_of_the_recording() -> None:
    """Other versions of rich may draw it differently; the text must be the same."""
    console = Console(width=top.COLUMNS, height=top.LINES, file=io.StringIO(), markup=False)
    activity = top.recorded()
    with console.capture() as captured:
        console.print(activity_table(activity, rows_for(activity, console)))
    shown = captured.get()
    assert "".join(shown.split()) == words_of(top.FILE.read_text()) == words_of(top.draw(activity))
    assert sum(each["name"] in shown for each in activity["functions"]) >= 10


def test_the_picture_of_top_fetches_nothing() -> None:
    assert re.findall(r"(?:url\(|href=)[\"']?(?!#)[^)\"']+", top.FILE.read_text()) == []
