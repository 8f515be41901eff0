"""Twenty fine-tuned variants of MiniLM: one for each task of tasks.toml, with a head that is trained here in
milliseconds.
"""

import tomllib
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from examples import minilm, minilm_handler

PENALTY = 0.1
"""The weight of the heads' squared length in the fit."""

TASKS = Path(__file__).with_name("tasks.toml")


class LabelledSentence(msgspec.Struct, frozen=True):
    """A sentence that no head was trained on, and its class."""

    text: str
    label: str


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A classification task: sentences by class, and a sentence to classify."""

    classes: dict[str, list[str]]
    held_out: LabelledSentence


class Classifier(nn.Module):
    """MiniLM and a linear head: one score per class, FP32 [batch, classes]; the highest wins."""

    def __init__(self, body: minilm.MiniLM, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"scores": self.head(self.body.embed(input_ids, attention_mask))}


def tasks() -> dict[str, Task]:
    """Return all tasks by name, in the order of tasks.toml."""
    return msgspec.convert(tomllib.loads(TASKS.read_text()), dict[str, Task])


def variant(index: int = 0, body: minilm.MiniLM | None = None) -> minilm.Example:
    """Train the classifier of task number `index`; `body` is a loaded MiniLM to reuse."""
    body = minilm.load() if body is None else body
    task = list(tasks().values())[index]
    return (Classifier(body, train(body, task)).eval().requires_grad_(False), *minilm.inputs())


def train(body: minilm.MiniLM, task: Task) -> nn.Linear:
    """Fit a head on the sentences of `task` by ridge regression, towards 1 for the right class and -1 for others."""
    sentences = [(text, number) for number, texts in enumerate(task.classes.values()) for text in texts]
    numbers = torch.tensor([number for _, number in sentences])
    with torch.inference_mode():
        embeddings = body.embed(**tokens([text for text, _ in sentences])).double()
    targets = nn.functional.one_hot(numbers, len(task.classes)).double() * 2 - 1
    centre, level = embeddings.mean(0), targets.mean(0)
    points = embeddings - centre
    # Solve one equation per sentence rather than per embedding dimension: the same solution, from a 16 times smaller
    # system.
    kernel = points @ points.T + PENALTY * torch.eye(len(points), dtype=torch.float64)
    weight = (points.T @ torch.linalg.solve(kernel, targets - level)).T
    head = nn.Linear(weight.shape[1], weight.shape[0])
    head.load_state_dict({"weight": weight.float(), "bias": (level - weight @ centre).float()})
    return head


def tokens(texts: list[str]) -> dict[str, Tensor]:
    """Tokenize sentences with the handler that later serves the model."""
    assets = {name: minilm_handler.read_asset(name, data) for name, data in minilm.assets().items()}
    return minilm_handler.preprocess({"text": [text.encode() for text in texts]}, minilm_handler.setup(assets))


def assets(index: int) -> dict[str, bytes]:
    """Return the assets of examples/variants_handler.py for task number `index`."""
    labels = list(list(tasks().values())[index].classes)
    return {**minilm.assets(), "labels.txt": "\n".join(labels).encode()}
