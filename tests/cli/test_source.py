"""SOURCE of a deploy names a model, or the error says why it does not."""

from pathlib import Path

import pytest

from overwinter.cli.source import Opened, open_source
from overwinter.core.errors import AuthorError, CallerError, OverwinterError
from overwinter.model.export import export
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def _own_path(local: Run) -> None:
    """Restore Python's search path after each test."""


def test_a_callable_is_opened_with_or_without_dynamic_sizes(deployer_dir: Path) -> None:
    opened = open_source("cli_scale:model", deployer_dir)
    assert isinstance(opened, Opened)
    assert opened.dynamic is None
    assert export(*opened).program.inputs[0].shape == ("batch", 2)
    fixed = open_source("cli_scale:fixed", deployer_dir)
    assert isinstance(fixed, Opened)
    assert export(*fixed).program.inputs[0].shape == (1, 2)


def test_files_and_directories_are_not_opened_yet(tmp_path: Path) -> None:
    (tmp_path / "scale.pt2").write_bytes(b"")
    assert open_source("scale.pt2", tmp_path) == tmp_path / "scale.pt2"
    assert open_source(".", tmp_path, "text-classification") == tmp_path


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("nowhere:model", CallerError, "there is no module 'nowhere'"),
        ("cli_scale.py:model", CallerError, "write cli_scale:model"),
        ("./cli_scale.py:model", CallerError, "write cli_scale:model"),
        ("models/vision.py:small", CallerError, r"write models\.vision:small"),
        ("../cli_scale.py:model", CallerError, "outside of"),
        ("cli_scale.py", CallerError, "write cli_scale:CALLABLE"),
        ("../cli_scale.py", CallerError, "of a pipeline$"),
        ("cli_scale:missing", CallerError, "cli_scale has no 'missing'"),
        ("cli_scale:answer", CallerError, "is of type int, not a function"),
        ("cli_scale", CallerError, "neither module:callable"),
        (":", CallerError, "neither module:callable"),
        ("none.pt2", CallerError, "there is no file"),
        ("cli_scale:failing", AuthorError, r"failed: ValueError: no weights \(.*cli_scale.py:\d+\)"),
        ("cli_scale:wrong", AuthorError, "it returned Scale"),
    ],
)
def test_what_is_not_a_source_is_refused_in_one_line(
    deployer_dir: Path, source: str, kind: type[OverwinterError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        open_source(source, deployer_dir)
    assert "\n" not in str(caught.value)


def test_a_task_for_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match=f"there is no directory {tmp_path}/none"):
        open_source("none", tmp_path, "text-classification")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_package_at_all", "cannot be imported: No module named 'no_such_package_at_all'"),
        ("def", "cannot be imported: SyntaxError"),
        ("[].model", r"cannot be imported: AttributeError: 'list' object has no attribute 'model' \(.*:1\)"),
        ("1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*:1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_of_its_author(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "cli_broken.py").write_text(code)
    with pytest.raises(AuthorError, match=words):
        open_source("cli_broken:model", tmp_path)
