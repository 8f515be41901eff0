"""The demo's pool: the variants of MiniLM again, as programs that share virtual devices."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import torch

from examples import variants
from examples.demo_comparison import difference
from examples.demo_models import Model, Siblings
from examples.demo_progress import Steps
from examples.mtcnn_cascade import Array
from examples.variants import Classifier
from overwinter import Client

DEVICES = 2
MEMORY_BYTES = 128 << 20
"""Enough for all variants of MiniLM, or for the large CREPE, but not for both."""
OPTIONS = ("--devices", str(DEVICES), "--device-memory", str(MEMORY_BYTES))
"""The options of `overwinter serve`."""
OTHER = "crepe-full"
LATER_REQUESTS = 3
"""The requests after the first one, while the function is resident."""
CLIENTS = 4
ROUNDS = 3
"""How often each function is called while several clients call functions."""

Arrays = Mapping[str, Array]
Infer = Callable[[str, Arrays], Arrays]


class CalledAlone(NamedTuple):
    """A function of the pool that was called while no other was."""

    model: Model
    nbytes: int
    """Its program and weights."""
    moved_bytes: int
    """The bytes that were brought to devices for all its requests."""
    first_seconds: float
    next_seconds: float
    """The latency of the first answer, and the median of the next ones."""
    agrees: bool
    """Whether all answers are plain PyTorch's, bit for bit."""


class CalledTogether(NamedTuple):
    """All functions of the pool, called by several clients at once."""

    requests: int
    devices: int
    moved_bytes: int
    """The number of devices that ran some of them, and the bytes that were brought there."""
    agrees: bool


class PoolResult(NamedTuple):
    """The results of the functions of the pool, called alone and together."""

    functions: Sequence[CalledAlone]
    together: CalledTogether

    @property
    def agrees(self) -> bool:
        """Whether all answers are plain PyTorch's, bit for bit."""
        return self.together.agrees and all(each.agrees for each in self.functions)


def pooled(models: Iterable[Model]) -> list[Model]:
    """Return the variants among the models, and another one, without their handlers; the example inputs of a variant
    are the tokens of its task's held-out sentence.
    """
    models = list(models)
    family = [model for model in models if isinstance(model.module, Classifier)]
    texts = [task.held_out.text for task in variants.tasks().values()]
    chosen = [model._replace(inputs=variants.tokens([text])) for model, text in zip(family, texts, strict=False)]
    chosen += [model for model in models if model.name == OTHER]
    return [model._replace(name=f"pool-{model.name}", handler=None, assets={}, samples=()) for model in chosen]


def try_pool(steps: Steps, client: Client, models: Sequence[Model], siblings: Siblings) -> PoolResult:
    """Deploy models for the pool, call each alone, then all at once, and compare with plain PyTorch."""
    names = [model.name for model in models]
    uploads = [
        siblings.deploy(each, client, device="pool") for each in steps.counting("deploying for the pool", models, names)
    ]
    expected = {model.name: plain(model) for model in models}
    functions = []
    for model, upload in steps.counting("calling the pool", zip(models, uploads, strict=True), names):
        took, agrees = call_alone(model, client.infer, expected[model.name])
        moved = client.explain(model.name)["pool"]["moved_bytes"]
        functions.append(CalledAlone(model, upload.nbytes, moved, took[0], median(took[1:]), agrees))
    with steps.working("calling all functions of the pool at once"):
        together = call_together(client, models, expected)
    return PoolResult(functions, together)


def plain(model: Model) -> Arrays:
    """Return the answer of plain PyTorch in this process."""
    with torch.inference_mode():
        return {name: value.numpy() for name, value in model.module(**model.inputs).items()}


def call_alone(model: Model, infer: Infer, expected: Arrays) -> tuple[list[float], bool]:
    """Call a function several times; return the latencies, and whether all answers are as expected."""
    took, agrees = [], True
    for _ in range(1 + LATER_REQUESTS):
        began = time.perf_counter()
        answer = infer(model.name, arrays(model))
        took.append(time.perf_counter() - began)
        agrees = agrees and equal(answer, expected)
    return took, agrees


def call_together(client: Client, models: Sequence[Model], expected: Mapping[str, Arrays]) -> CalledTogether:
    """Call all functions several times, from several threads."""

    def agrees(model: Model) -> bool:
        return equal(client.infer(model.name, arrays(model)), expected[model.name])

    before = histories(client)
    with ThreadPoolExecutor(CLIENTS) as threads:
        agree = list(threads.map(agrees, ROUNDS * list(models)))
    after = histories(client)
    ran = [name for name, (runs, _) in after.items() if runs > before[name][0]]
    moved = sum(moved - before[name][1] for name, (_, moved) in after.items())
    return CalledTogether(len(agree), len(ran), moved, all(agree))


def histories(client: Client) -> dict[str, tuple[int, int]]:
    """Return the number of runs of each device, and the bytes that were brought to it."""
    found = {device["name"]: device["history"] or {"runs": 0, "moved_bytes": 0} for device in client.devices()}
    return {name: (history["runs"], history["moved_bytes"]) for name, history in found.items()}


def arrays(model: Model) -> Arrays:
    """Return the example inputs as arrays."""
    return {name: value.numpy() for name, value in model.inputs.items()}


def equal(given: Arrays, expected: Arrays) -> bool:
    """Whether two answers have the same bits."""
    return given.keys() == expected.keys() and difference(given.values(), map(expected.get, given)) is None
