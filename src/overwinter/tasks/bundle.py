"""The options with which a task is requested, and the handler, assets and sample request that it makes from a
directory.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overwinter.core.errors import CallerError, ProgramError
from overwinter.model.pretrained import Axes
from overwinter.worker.values import Value


class Bundle(NamedTuple):
    """A handler with its assets, a sample request, and what the handler must make from it."""

    source: str
    assets: dict[str, bytes]
    sample: dict[str, Value]
    """A sample request of several items that differ in content and, except for audio, in size, as those of users do."""
    expected: list[dict[str, torch.Tensor]]
    """The inputs of the model that `transformers` computes from each item of the sample alone, by name."""
    axes: dict[str, Axes]
    """The meaning of each dimension of the model's inputs."""


class TaskRequest(NamedTuple):
    """A requested task: its directory and options."""

    task: str
    path: Path
    options: dict[str, Any]

    def choice(self, name: str, values: tuple[Any, ...]) -> Any:
        """Return the option's value, which must be one of `values`; the first is the default."""
        value = self.options.get(name, values[0])
        if value not in values:
            raise CallerError(f"{name} of {self.task} is {' or '.join(map(str, values))}, not {value!r}")
        return value

    def number(self, name: str) -> int | None:
        """Return an option that must be a whole number above 0; None: it is not given."""
        value = self.options.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CallerError(f"{name} of {self.task} must be a whole number above 0, not {value!r}")
        return value


def handler_source(*parts: str) -> str:
    """Join files of `handlers` to the source of one handler."""
    return "\n\n".join((files("overwinter.tasks") / "handlers" / f"{part}.py").read_text() for part in parts)


def labels(model: Any) -> list[str]:
    """Return the names of the model's classes; raise ProgramError if they are not numbered from 0 on."""
    names: Mapping[int, str] = model.config.id2label
    missing = [index for index in range(len(names)) if index not in names]
    if missing:
        raise ProgramError(
            f"id2label in config.json names {len(names)} classes, but not number {missing[0]}: number them from 0 on"
        )
    return [names[index] for index in range(len(names))]


def function_of_scores(model: Any) -> str:
    """Return the name of the activation that turns logits into scores, chosen as the pipelines of `transformers` do."""
    problem, classes = model.config.problem_type, model.config.num_labels
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or classes == 1 else "softmax"
