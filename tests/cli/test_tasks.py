"""A directory of transformers is deployed for a task with one command, and called with another."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.tasks.directories import WEATHER, image_directory, text_directory


@pytest.fixture(scope="module")
def weather(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = text_directory(tmp_path_factory.mktemp("weather"), "BertForSequenceClassification", WEATHER)
    return str(path)


def test_a_function_for_a_task_is_deployed_and_called(run: Run, weather: str, tmp_path: Path) -> None:
    run("deploy", weather, "--name", "weather", "--task", "text-classification", "--option", "top_k=2")
    answer = json.loads(run("infer", "weather", "-i", "text=it works well", "--json").stdout)
    labels, scores = (output["data"] for output in answer["outputs"])
    assert len(labels[0]) == 2
    assert set(labels[0]) <= set(WEATHER.values())
    assert scores[0] == sorted(scores[0], reverse=True)


def test_a_picture_goes_in_as_a_file(run: Run, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (50, 40), "navy").save(tmp_path / "sky.jpg")
    run("deploy", str(image_directory(tmp_path / "vit")), "--name", "sky", "--task", "image-classification")
    shown = run("infer", "sky", "-i", f"image=@{tmp_path}/sky.jpg").stdout
    assert any(label in shown for label in WEATHER.values())


def test_an_unknown_size_is_refused(run: Run, weather: str) -> None:
    wrong = run("deploy", weather, "--name", "wrong", "--option", "samples=5", exit_code=1)
    assert "has no size 'samples'" in wrong.stderr


def test_a_task_takes_no_handler_and_needs_a_directory(run: Run, weather: str) -> None:
    order = ("deploy", weather, "--name", "twice", "--task", "text-classification", "--handler", "handler.py")
    assert "leave out --handler" in run(*order, exit_code=2).stderr
    assert "need a directory" in run("deploy", "cli_scale:model", "--name", "x", "--task", "y", exit_code=1).stderr
