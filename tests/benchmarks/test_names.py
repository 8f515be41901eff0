"""Each name that a benchmark or an example imports from the project exists. The type checker does not check these
files.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = {"overwinter": ROOT / "src", "benchmarks": ROOT, "examples": ROOT}
FILES = [path for place in ("benchmarks", "examples") for path in sorted((ROOT / place).rglob("*.py"))]


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Return what can be imported from a module of the project; None if there is no such module."""
    package, *_ = module.split(".")
    place = ROOTS[package].joinpath(*module.split("."))
    found: set[str] = set()
    if place.is_dir():
        found |= {path.stem for path in place.iterdir() if path.is_dir() or path.suffix == ".py"}
        place /= "__init__"
    elif not place.with_suffix(".py").is_file():
        return None
    file = place.with_suffix(".py")
    if file.is_file():
        found |= set(_defined(ast.parse(file.read_text()).body))
    return frozenset(found)


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    unread: list[ast.AST] = [*body]
    while unread:
        match unread.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name
            case node:
                unread += ast.iter_child_nodes(node)


def test_every_imported_name_exists() -> None:
    missing = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in ROOTS:
                    there = names_of(module)
                    absent = [each.name for each in names if there is None or each.name not in there]
                    missing += [f"{path.relative_to(ROOT)}: {module}.{name}" for name in absent]
                case ast.Import(names=names):
                    absent = [each.name for each in names if each.name.split(".")[0] in ROOTS]
                    missing += [f"{path.relative_to(ROOT)}: {name}" for name in absent if names_of(name) is None]
    assert not missing


@pytest.mark.parametrize(
    ("module", "name"),
    [("overwinter.core.function", "NOT_THERE"), ("benchmarks", "not_there"), ("benchmarks.nodes", "said")],
)
def test_names_that_do_not_exist_are_detected(module: str, name: str) -> None:
    assert name not in (names_of(module) or ())
