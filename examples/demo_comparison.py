"""Compares the answers and latencies of a node with plain PyTorch."""

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from examples.demo_models import Question
from examples.mtcnn_cascade import Array, Call
from overwinter import Client

TOLERANCE = 1e-5
"""The largest difference between two answers that agree."""
WARM_ROUNDS = 5


class Answer(NamedTuple):
    """An answer of a function, the kind of its start, and the latency."""

    function: str
    outputs: Mapping[str, Array]
    start: str
    seconds: float


class RecordingCall:
    """A Call that records every answer."""

    def __init__(self, call: Call, start: Callable[[], str]) -> None:
        self._call = call
        self._start = start
        self.answers: list[Answer] = []

    def __call__(self, name: str, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        began = time.perf_counter()
        outputs = self._call(name, arrays)
        self.answers.append(Answer(name, outputs, self._start(), time.perf_counter() - began))
        return outputs

    def first(self, function: str) -> Answer:
        """Return the first answer of a function."""
        return next(answer for answer in self.answers if answer.function == function)


class Verdict(NamedTuple):
    """The result of a question to one function."""

    function: str
    answer: str
    difference: float | None
    """The largest difference from plain PyTorch; None if all bits are equal."""
    start: str
    """The kind of the first request's start: "host" if it woke the function, "bound" if a worker of a sibling bound it.
    """
    first_seconds: float
    """The latency of that request."""
    warm_seconds: float
    """The median latency of the requests while the function is awake."""

    @property
    def agrees(self) -> bool:
        """Whether the node's answers agree with plain PyTorch."""
        return self.difference is None or self.difference <= TOLERANCE


def ask(question: Question, client: Client, plain: Call) -> list[Verdict]:
    """Call functions that sleep, call them again while they are awake, then run plain PyTorch."""

    def infer(name: str, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return client.infer(name, arrays)

    rounds = [RecordingCall(infer, lambda: client.last_answer.start) for _ in range(1 + WARM_ROUNDS)]
    words, *_ = [question.ask(call) for call in rounds]
    woken, *warm = rounds
    expected = RecordingCall(plain, lambda: "plain")
    question.ask(expected)
    return [
        Verdict(
            function,
            word,
            difference(_outputs(rounds, function), len(rounds) * _outputs([expected], function)),
            woken.first(function).start,
            woken.first(function).seconds,
            median(call.first(function).seconds for call in warm),
        )
        for function, word in zip(question.functions, words, strict=True)
    ]


def difference(given: Iterable[Array], expected: Iterable[Array]) -> float | None:
    """Return the largest difference between two lists of arrays: None for equal bits, infinity if they cannot be
    compared.
    """
    given, expected = list(given), list(expected)
    if len(given) != len(expected):
        return float("inf")
    largest = [_difference(one, other) for one, other in zip(given, expected, strict=True)]
    return max((each for each in largest if each is not None), default=None)


def _difference(given: Array, expected: Array) -> float | None:
    if given.shape != expected.shape or given.dtype != expected.dtype:
        return float("inf")
    if given.dtype == object:
        return None if (given == expected).all() else float("inf")
    if given.tobytes() == expected.tobytes():
        return None
    apart = np.abs(given.astype(np.float64) - expected.astype(np.float64)).max()
    return float("inf") if np.isnan(apart) else float(apart)


def _outputs(rounds: Iterable[RecordingCall], function: str) -> list[Array]:
    """Return the output arrays of all answers of a function: answers in order, the arrays of each by name."""
    answers = [answer for recorded in rounds for answer in recorded.answers if answer.function == function]
    return [array for answer in answers for _, array in sorted(answer.outputs.items())]
