"""A `.pt2` file is opened in a sandbox: what code from it could do there, and what becomes of its result."""

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overwinter.api import contained
from overwinter.api.contained import open_contained, open_here
from overwinter.core.errors import CallerError, ProgramError
from overwinter.model.agreement import agree
from overwinter.model.export import export_saved
from tests.tasks.directories import WEATHER, text_directory

UNCHECKED = (
    *("-P", "-c"),
    """if True:
    import overwinter.model.export
    overwinter.model.export.check_saved = lambda path: None
    from overwinter.api import contained
    contained.main()
    """,
)
"""Opens a file without the check that it is only data, as if the check had a gap."""

ATTEMPTS = """if True:
    import json, os, socket, sys
    def attempt(step):
        try:
            return f"did: {step()}"
        except OSError as error:
            return type(error).__name__
    attempts = {
        "read": lambda: open("/etc/passwd").read(1),
        "open for nothing": lambda: os.open("/etc/passwd", 3),
        "write": lambda: open(marker, "w"),
        "truncate": lambda: os.open(json.__file__, os.O_RDONLY | os.O_TRUNC),
        "list": lambda: os.listdir(os.path.dirname(marker)),
        "network": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "process": os.fork,
        "program": lambda: os.execv("/bin/true", ["true"]),
        "signal": lambda: os.kill(os.getppid(), 9),
        "trace": lambda: open(f"/proc/{os.getppid()}/mem", "r+b"),
    }
    did = {name: told for name, step in attempts.items() if (told := attempt(step)) != "PermissionError"}
    descriptors = sum(attempt(lambda: os.fstat(fd)).startswith("did") for fd in range(3, 4096))
    raise PermissionError(json.dumps({"did": did, "variables": sorted(os.environ), "descriptors": descriptors}))
"""


class Runs:
    """Its pickle runs code."""

    def __init__(self, code: str, marker: Path) -> None:
        self.code, self.marker = code, marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code, {"marker": str(self.marker)})


class Net(torch.nn.Module):
    """Weights of several data types and memory formats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("scale", torch.arange(8).to(torch.bfloat16).reshape(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conv(x) * self.scale).mean((2, 3))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    batch = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(Net().eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=batch)
    with warnings.catch_warnings():
        # PyTorch warns of a weight in the memory format channels_last.
        warnings.simplefilter("ignore", UserWarning)
        torch.export.save(exported, tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


@pytest.fixture
def hostile(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a file with code that runs when it is opened without the check."""
    monkeypatch.setattr(contained, "MODULE", UNCHECKED)

    def write(code: str) -> Path:
        samples = io.BytesIO()
        torch.save(Runs(code, saved.parent / "marker"), samples)
        path = saved.parent / "evil.pt2"
        with zipfile.ZipFile(saved) as plain, zipfile.ZipFile(path, "w") as evil:
            for name in plain.namelist():
                evil.writestr(name, samples.getvalue() if "sample_inputs" in name else plain.read(name))
        return path

    return write


def test_the_result_is_that_of_an_export_in_this_process(saved: Path) -> None:
    program, weights, agreement = open_contained(saved, 4).agreed
    wanted = agree(export_saved(saved), 4)
    assert program == wanted.program
    assert agreement == wanted.agreement
    assert [(each.dtype, each.stride()) for each in weights] == [(each.dtype, each.stride()) for each in wanted.weights]
    assert all(map(torch.equal, weights, wanted.weights))


def test_the_error_for_a_refused_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "x.pt2").write_bytes(b"not a program")
    with pytest.raises(ProgramError, match=r"x\.pt2"):
        open_contained(tmp_path / "x.pt2")


def test_code_in_a_file_reaches_nothing(
    hostile: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    path = hostile(ATTEMPTS)
    with pytest.raises(ProgramError) as caught:
        open_contained(path)
    found = json.loads(str(caught.value)[str(caught.value).index("{") : str(caught.value).rindex("}") + 1])
    assert not {"A_TOKEN", "HOME", "PATH"} & set(found["variables"])
    # The file itself, the two files of the result, and those that keep Python's directory reachable.
    assert found["descriptors"] <= 5
    assert found["did"] == {}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["evil.pt2", "net.pt2"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.write(2, b'x' * 100_000); os.kill(os.getpid(), 9)", "signal 9"),
        ("import os; os._exit(0)", "invalid result"),
    ],
)
def test_a_file_that_ends_its_process_or_forges_its_result_is_refused(
    hostile: Callable[[str], Path], code: str, words: str
) -> None:
    path = hostile(code)
    with pytest.raises(ProgramError, match=words) as caught:
        open_contained(path)
    assert "evil.pt2" in str(caught.value)


def test_nothing_is_imported_from_the_current_directory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "torch", "overwinter"):
        (saved.parent / f"{name}.py").write_text(f"open({str(saved.parent / 'ran')!r}, 'w')")
    monkeypatch.chdir(saved.parent)
    assert open_contained(Path("net.pt2")).agreed.program.calls
    assert not (saved.parent / "ran").exists()


def test_without_a_sandbox_the_file_is_not_opened(
    hostile: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hostile("open(marker, 'w')")
    lacking = "from overwinter.worker import sandbox; sandbox._restrict = lambda ruleset: ['no Landlock']"
    monkeypatch.setattr(contained, "MODULE", (*UNCHECKED[:2], f"{lacking}\n{UNCHECKED[2]}"))
    with pytest.raises(ProgramError, match=r"evil\.pt2 cannot be opened safely here \(no Landlock\)"):
        open_contained(path)
    assert not (tmp_path / "marker").exists()


def test_a_directory_is_opened_with_its_handler(tmp_path: Path) -> None:
    path = text_directory(tmp_path, "BertForSequenceClassification", WEATHER)
    opened, wanted = (
        open_contained(path, 1, "text-classification", {"top_k": 2}),
        open_here(path, 1, "text-classification", {"top_k": 2}, trusted=False),
    )
    assert opened.agreed.program == wanted.agreed.program
    assert all(map(torch.equal, opened.agreed.weights, wanted.agreed.weights))
    assert (opened.handler, opened.assets) == (wanted.handler, wanted.assets)
    assert [[each.name for each in sample] for sample in opened.samples] == [["text"]]


def test_another_handler_than_that_of_the_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_directory(tmp_path, "BertForSequenceClassification", WEATHER)
    forged = """if True:
    from overwinter.api import contained
    here = contained.open_here

    def forged(*order, **trust):
        opened = here(*order, **trust)
        return opened._replace(handler=opened.handler + "import os")

    contained.open_here = forged
    contained.main()
    """
    monkeypatch.setattr(contained, "MODULE", ("-P", "-c", forged))
    with pytest.raises(ProgramError, match="another handler"):
        open_contained(path, 1, "text-classification")


def test_a_wrong_task_is_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="no task 'translation'"):
        open_contained(tmp_path, 1, "translation")
