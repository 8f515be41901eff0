"""Retired words are not used in code, docs and the help of the command line."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from overwinter.cli.main import main

ROOT = Path(__file__).parent.parent
KINDS = {".py", ".md", ".toml", ".txt", ".html", ".json", ".svg", ".service", ".dockerignore"}
NAMES = {"Dockerfile", "Makefile", "as-user", "run"}
"""The files without a suffix that are read."""
PLACES = ("src", "tests", "benchmarks", "examples", "docs", "scenarios", "packaging", ".ci")
TEXTS = sorted(
    path
    for path in (*ROOT.glob("*"), *(path for place in PLACES for path in (ROOT / place).rglob("*")))
    if (path.suffix in KINDS or path.name in NAMES) and path.parent.suffix != ".egg-info" and path != Path(__file__)
)

RETIRED = {
    "body": "worker",
    "bodies": "worker",
    "mind": "scheduler",
    "minds": "scheduler",
    "promise": "SLO",
    "promises": "SLO",
    "promised": "SLO",
    "tray": "buffer",
    "trays": "buffer",
    "rehearse": "warm-up",
    "rehearses": "warm-up",
    "rehearsed": "warm-up",
    "rehearsing": "warm-up",
    "rehearsal": "warm-up",
    "rehearsals": "warm-up",
    "insight": "telemetry",
    "insights": "telemetry",
    "foretold": "rate forecast",
    "resting": "backoff",
    "staged": "loaded",
    "staging": "load",
    "give way": "is stopped for",
    "gives way": "is stopped for",
    "sparing": "throttle",
    "shelter": "sandbox",
    "foreseen": "expected",
    "foresaw": "expected",
    "anybody": "everyone, any process",
    "pace": "slowdown, speed",
    "under way": "in progress",
    "reclaim": "evict",
    "retires": "drains",
    "retiring": "draining",
    "hands of": "effects of",
    "gave way": "was stopped for",
    "giving way": "being stopped for",
}
"""The replacement of each retired word."""

HTTP = {"body", "bodies"}
"""HTTP requests and answers have a body."""
RIGHT = {
    "src/overwinter/api/": HTTP,
    "src/overwinter/cli/": HTTP,
    "src/overwinter/core/config.py": HTTP,
    "src/overwinter/core/errors.py": HTTP,
    "src/overwinter/store/blocks.py": HTTP,
    "src/overwinter/store/repository.py": HTTP,
    "tests/api/": HTTP,
    "tests/store/": HTTP,
    "tests/system/test_conformance.py": HTTP,
    "tests/profiling/test_on_nodes.py": HTTP,
    "tests/system/test_tokens.py": HTTP,
    "tests/benchmarks/": HTTP,
    "benchmarks/faults.py": HTTP,
    "benchmarks/fuzz/": HTTP,
    "benchmarks/hostile/": HTTP,
    "benchmarks/openloop.py": HTTP,
    "benchmarks/siege/": HTTP,
    "benchmarks/wire.py": HTTP,
    "docs/decisions/requests.md": HTTP,
    "docs/security.md": HTTP,
    # `ast` has this name for the statements of a block.
    "src/overwinter/model/checks.py": {"body"},
    "src/overwinter/node/checkup.py": {"body"},
    # A model without its head, and another author's name.
    "examples/": {"body"},
    "tests/examples/": {"body"},
    "tests/model/test_layers.py": {"body"},
    # A name that an older version wrote.
    "src/overwinter/store/compatibility.py": {"bodies"},
    "tests/system/test_compatibility.py": {"bodies"},
    "tests/core/test_journal.py": {"body", "bodies", "rehearsal"},
    "CHANGELOG.md": {"body", "bodies", "mind", "promise", "tray", "rehearsal"},
}
"""Where a word is allowed, by the beginning of the path."""

PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""The words of identifiers, as in `max_bodies`, `BodyExited` and `BODIES_MAX`."""
PHRASES = [word for word in RETIRED if " " in word]


def retired_in(text: str) -> set[str]:
    """Return the retired words of a text."""
    flat = " ".join(text.lower().replace("_", " ").split())
    return RETIRED.keys() & {part.lower() for part in PARTS.findall(text)} | {each for each in PHRASES if each in flat}


def right_in(path: str) -> set[str]:
    """Return the words that are allowed in a file."""
    return set().union(*(words for beginning, words in RIGHT.items() if path.startswith(beginning)))


def helps(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Yield the help of each command, with its name."""
    # Without the settings click would cache other help options for the tests that follow.
    context = click.Context(command, parent, name, **command.context_settings)
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from helps(found, f"{name} {below}", context)


@pytest.mark.parametrize("word", RETIRED)
def test_each_word_is_found(word):
    assert word in retired_in(f"# of the {word}, which")
    assert word in retired_in(f"The {word.capitalize()}.")
    if " " in word:
        assert word in retired_in(word.replace(" ", "\n    "))
        return
    for identifier in (f"max_{word}", f"{word}_max", f"{word.capitalize()}Exited", f"Start{word.capitalize()}"):
        assert word in retired_in(identifier)
    assert word in retired_in(f"{word.upper()}_MAX")
    assert retired_in(f"any{word}x") == set()


def test_no_text_has_a_retired_word():
    found = {str(path.relative_to(ROOT)): retired_in(path.read_text()) for path in TEXTS}
    assert {path: wrong for path, words in found.items() if (wrong := words - right_in(path))} == {}


def test_every_exception_is_needed():
    found = {str(path.relative_to(ROOT)): retired_in(path.read_text()) for path in TEXTS}
    needed = {
        beginning: set().union(*(words for path, words in found.items() if path.startswith(beginning)))
        for beginning in RIGHT
    }
    assert [beginning for beginning, words in RIGHT.items() if not words & needed[beginning]] == []


def test_no_file_name_has_a_retired_word():
    names = [str(path.relative_to(ROOT)) for path in TEXTS]
    assert [name for name in names if retired_in(name) - right_in(name)] == []


def test_no_help_has_a_retired_word():
    wrong = {name: retired_in(text) - HTTP for name, text in helps(main, "overwinter")}
    assert len(wrong) > 10
    assert {name: words for name, words in wrong.items() if words} == {}
