"""The demo distinguishes equal and different answers, deploys its models unchanged, and removes everything at
the end.
"""

import mmap
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

for needed in ("numpy", "safetensors", "tokenizers", "PIL"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install -e .[demo]")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from examples import crepe, crepe_handler, demo_models, minilm, mtcnn, variants, variants_handler  # noqa: E402
from examples.demo_comparison import RecordingCall, Verdict, ask, difference  # noqa: E402
from examples.demo_models import Model, Siblings  # noqa: E402
from examples.demo_node import NodeError, own_bytes, running_node  # noqa: E402
from examples.demo_report import show_functions  # noqa: E402
from examples.weights import INSTALL, weights_missing  # noqa: E402
from overwinter import Client  # noqa: E402
from overwinter.api.deployer import Uploaded  # noqa: E402
from overwinter.model.export import export  # noqa: E402
from overwinter.model.program import encode_program  # noqa: E402

pytestmark = pytest.mark.skipif(
    bool(weights_missing()), reason=f"packages with weights are not installed: {weights_missing()}: {INSTALL}"
)

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def tiny() -> Model:
    return Model("crepe-tiny", *crepe.tiny(), crepe_handler, samples=[demo_models.SILENCE])


def processes_below(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found[1:]


def wait_until(holds, seconds: float = 60.0) -> None:
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize(
    ("given", "expected", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.5], [1.0, 2.0], 0.5),
        ([0.0], [-0.0], 0.0),
        ([1.0], [1.0, 2.0], float("inf")),
        ([float("nan")], [1.0], float("inf")),
        ([b"spam"], [b"spam"], None),
        ([b"spam"], [b"ham"], float("inf")),
        ([1.0], [b"spam"], float("inf")),
    ],
)
def test_difference_is_the_largest_or_none_for_equal_bits(given, expected, apart):
    def array(values):
        return np.array(values, object if isinstance(values[0], bytes) else np.float32)

    same = np.zeros(3, np.float32)
    assert difference([same, array(given)], [same, array(expected)]) == apart


def test_different_numbers_of_answers_differ():
    assert difference([np.zeros(1)], []) == float("inf")


def test_the_time_of_a_first_answer_is_in_the_column_of_the_wake_or_bind_that_it_needed(capsys):
    took = {"host": 0.1, "bound": 0.02, "disk": 0.3}
    verdicts = [Verdict(start, "yes", None, start, seconds, 0.01) for start, seconds in took.items()]
    show_functions(verdicts, dict.fromkeys(took, Uploaded("x", 1, 1, 1)))
    head, *lines = [line for line in capsys.readouterr().out.splitlines() if " ms" in line or "warm  " in line]
    for start, title, text in (
        ("host", "wakes", "100.0 ms"),
        ("bound", "binds", "20.0 ms"),
        ("disk", "wakes", "(disk)"),
    ):
        [line] = [line for line in lines if line.split()[0] == start]
        assert line[: head.index(title) + len(f"{title} in")].endswith(text)


def test_own_bytes_counts_memory_and_not_files(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(32 * MIB))
    before = own_bytes(os.getpid())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) == 0
        assert own_bytes(os.getpid()) - before < 8 * MIB
    held = b"\1" * (64 * MIB)
    assert own_bytes(os.getpid()) - before > 56 * MIB
    del held


def test_every_function_is_asked_and_plain_pytorch_answers_right():
    models = {model.name: model for model in demo_models.models()}
    names = demo_models.names()
    assert list(models) == names
    questions = demo_models.questions()
    assert sorted(name for question in questions for name in question.functions) == sorted(names)
    plain = RecordingCall(demo_models.plain(models), lambda: "plain")
    words = {
        name: word for question in questions for name, word in zip(question.functions, question.ask(plain), strict=True)
    }
    for name in ("crepe-tiny", "crepe-full"):
        heard = [float(hertz) for hertz in words[name].partition("heard as ")[2].split()]
        assert heard == pytest.approx(demo_models.NOTES, rel=5e-3)
    assert "1 face at [181, 62, 268, 172]" in words["mtcnn-onet"]
    assert words["minilm-spam"].startswith("spam: Winner!")
    assert {answer.function for answer in plain.answers} == set(names)


def test_siblings_share_one_program_and_bring_their_own_weights():
    body = minilm.load()
    siblings = Siblings()
    first, second = (
        Model("sibling", *variants.variant(index, body), variants_handler, variants.assets(index)) for index in (0, 1)
    )
    siblings.export(first)
    shared, own = siblings.export(second), export(second.module, second.inputs, second.dynamic)
    assert encode_program(shared.program) == encode_program(own.program)
    assert all(torch.equal(one, other) for one, other in zip(shared.weights, own.weights, strict=True))


def test_the_first_network_of_the_cascade_becomes_a_program_for_sides_of_13_to_4096_pixels():
    program = export(*mtcnn.pnet()).program
    assert program.dimensions["height"] == program.dimensions["width"] == (13, 4096)


def test_a_woken_function_answers_as_plain_pytorch_does_and_the_node_leaves_nothing_behind(tmp_path):
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    said: list[str] = []
    model = tiny()
    (question,) = [each for each in demo_models.questions() if each.functions == (model.name,)]
    with running_node(tmp_path / "data", "--port", "0", "--host-store", str(blocks), say=said.append) as node:
        url = node.ready()
        with Client(url) as client:
            upload = demo_models.deploy(model, url, keep_alive_s=0.1)
            assert upload.added_bytes == upload.nbytes > 1_900_000
            # The process of a worker ends a moment after the node has removed the worker.
            wait_until(lambda: not client.function(model.name)["workers"] and len(node.processes()) == 3)
            pids = node.processes()
            (verdict,) = ask(question, client, demo_models.plain({model.name: model}))
    assert verdict.agrees
    assert verdict.start == "host"
    assert list(blocks.iterdir()) == []
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_node_that_cannot_start_says_why(tmp_path):
    said: list[str] = []
    occupied = tmp_path / "occupied"
    occupied.touch()
    with pytest.raises(NodeError), running_node(occupied, "--port", "0", say=said.append) as node:
        node.ready()
    assert any("occupied" in line for line in said)


def test_an_interrupted_demo_stops_what_it_started(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "examples.demo"]
    # Whoever started the tests may ignore interrupts, which processes inherit.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, preexec_fn=heeds) as demo:
        wait_until(lambda: len(processes_below(demo.pid)) >= 3)
        pids = processes_below(demo.pid)
        options = Path(f"/proc/{pids[0]}/cmdline").read_text().split("\0")
        blocks = Path(options[options.index("--host-store") + 1])
        assert blocks.is_dir()
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert not blocks.exists()
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
