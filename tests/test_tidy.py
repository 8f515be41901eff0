"""Limits on the size of files and functions and on nesting, and rules for docstrings, file names and texts."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "overwinter"
SOURCES = sorted(PACKAGE.rglob("*.py"))
EVERY = sorted(
    path for folder in ("src", "tests", "benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py")
)

FILE_LINES = 400
TEST_FILE_LINES = 700
FUNCTION_LINES = 60
NESTING = 3
VAGUE = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "base"}
NESTED = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def depth(node: ast.AST, level: int = 0) -> int:
    """Return the nesting depth of control blocks; an elif is as deep as its if."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        elif_ = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        inner = level + 1 if isinstance(child, NESTED) and not elif_ else level
        deepest = max(deepest, depth(child, inner))
    return deepest


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def too_long(path: Path) -> list[str]:
    return [f.name for f in functions(tree_of(path)) if (f.end_lineno or 0) - f.lineno + 1 > FUNCTION_LINES]


def too_deep(path: Path) -> list[str]:
    return [f.name for f in functions(tree_of(path)) if depth(f) > NESTING]


def test_files_stay_short():
    limits = {path: TEST_FILE_LINES if "tests" in path.parts else FILE_LINES for path in EVERY}
    assert [name_of(path) for path in EVERY if path.read_text().count("\n") > limits[path]] == []


def test_functions_stay_short():
    assert {name_of(path): found for path in EVERY if (found := too_long(path))} == {}


def test_functions_stay_flat():
    assert {name_of(path): found for path in SOURCES if (found := too_deep(path))} == {}


def test_every_module_has_a_docstring():
    filled = [path for path in SOURCES if path.stat().st_size]
    assert [name_of(path) for path in filled if not ast.get_docstring(tree_of(path))] == []


def test_names_say_something():
    assert [name_of(path) for path in SOURCES if path.stem in VAGUE or path.parent.name in VAGUE] == []


def test_tests_mirror_the_packages():
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}


def test_no_text_contains_a_private_path():
    private = re.compile(r"(?<![\w.])/(?:work|root)/\w")
    texts = [*EVERY, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", *ROOT.glob(".ci/*")]
    named = [name_of(path) for path in texts if path != Path(__file__) and private.search(path.read_text())]
    assert named == []


def test_the_version_is_in_the_changelog():
    [version] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
