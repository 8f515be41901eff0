"""Links of the docs point to existing files and headings, commands name existing modules, and tables are complete."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples" / "README.md"])
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"python -m ((?:benchmarks|examples|docs)(?:\.[a-z]\w*)+)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """Return a text without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def headings(path: Path) -> set[str]:
    """Return the anchors of the headings of a text, as code hosts create them."""
    found = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def broken(path: Path) -> list[str]:
    """Return the links of a text to missing targets."""
    lost = []
    for link in LINK.findall(prose(path)):
        if "://" in link:
            continue
        file, _, heading = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (heading and heading not in headings(target)):
            lost.append(link)
    return lost


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert broken(path) == []


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_module_that_a_command_names_exists(path: Path) -> None:
    names = set(MODULE.findall(path.read_text()))
    assert [name for name in sorted(names) if importlib.util.find_spec(name) is None] == []


def uneven(text: str) -> list[str]:
    """Return the rows of tables that have another number of cells than the row above."""
    lines = [line if line.startswith("|") else "" for line in text.splitlines()]
    cells = [len(re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) for line in lines]
    pairs = zip(lines, lines[1:], cells, cells[1:], strict=False)
    return [line for above, line, before, here in pairs if above and line and before != here]


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_row_of_a_table_has_all_cells(path: Path) -> None:
    assert uneven(prose(path)) == []


def test_a_row_that_lacks_a_cell_is_found() -> None:
    assert uneven("| a | b |\n| --- | --- |\n| `x|y` | 1 |\n| 2 |\n\n| alone |\n") == ["| 2 |"]


def test_links_to_missing_targets_are_found(tmp_path: Path) -> None:
    text = tmp_path / "text.md"
    text.write_text("# One heading\n[a](text.md#one-heading) [b](#no-heading) [c](none.md) [d](https://example.org)\n")
    assert broken(text) == ["#no-heading", "none.md"]
