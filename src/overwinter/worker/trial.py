"""Tries a new version in its worker before it may answer requests.

If its author gave sample requests, any failure refuses the version. Otherwise a function with a handler is tried on a
generated request: in the sizes of the export, with the smallest batch if they allow it, and with zeros for numbers and
a few words for BYTES. A correct handler need not accept such a request, so a failure is then only a warning.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import FrameType

import torch

from overwinter.core.errors import HandlerError, OverwinterError, ProgramError, error_named
from overwinter.core.tensor import ANSWER_BYTES_MAX, BYTES, TensorSpec
from overwinter.model.operators import FAIL_FOR_SOME_VALUES
from overwinter.model.structure import BATCH
from overwinter.worker.messages import Failure
from overwinter.worker.runner import OPERATOR_ERRORS, NamedValues, Runner
from overwinter.worker.shortage import lacks_memory
from overwinter.worker.values import TORCH_DTYPES, Value, encode_outputs

GENERATED_S = 20
"""The time limit of a generated request: some handlers wait for data that it does not contain."""
SAMPLES_S = 60
"""The time limit of all samples together. A client with the default timeout (75 s) must still learn the reason.
"""
TEXT = b"a few words"


def run_on_zeros(runner: Runner) -> tuple[int, str]:
    """Run the program once on zeros. Returns the bytes of its outputs, or a warning for the author if it fails and has
    operators that fail for some values, because it may still answer real requests. Raises any other error.
    """
    try:
        return runner.warm_up(), ""
    except OPERATOR_ERRORS as error:
        if lacks_memory(error) or not any(call.operator in FAIL_FOR_SOME_VALUES for call in runner.program.calls):
            raise
        why = f"{type(error).__name__}: {error}".rstrip(".")
        return 0, (
            f"the program of {runner.function} fails on zeros: {why}. It may still answer real requests: to be sure, "
            "give one with --sample NAME=VALUE, or samples=[{...}] in Python"
        )


def check_size(runner: Runner, output_bytes: int) -> None:
    """For a program without a handler: raise HandlerError if it can answer no request, because its smallest answer has
    this many bytes. A program with another dynamic size than the batch may have smaller answers than on its example.
    """
    if output_bytes > ANSWER_BYTES_MAX and not runner.program.example.keys() - {BATCH}:
        raise HandlerError(
            f"the program of {runner.function} returns {output_bytes} bytes for one request, and an answer may have "
            f"{ANSWER_BYTES_MAX}: return less, or let a handler reduce it"
        )


def check_samples(runner: Runner, samples: list[NamedValues]) -> None:
    """Answer every sample; if one cannot be answered, raise an error that says why."""
    with _interrupted_after(SAMPLES_S):
        for number, sample in enumerate(samples, 1):
            failure = _failure(runner, sample)
            if failure is not None:
                message = f"{runner.function} does not answer sample {number}: {failure.message}"
                raise error_named(failure.error)(message)


def generated_warning(runner: Runner, inputs: tuple[TensorSpec, ...]) -> str:
    """Return why a generated request with `inputs` fails, as a text for the author; empty if it is answered."""
    try:
        with _interrupted_after(GENERATED_S):
            failure = _failure(runner, _generated(runner, inputs))
    except Exception as error:  # noqa: BLE001 - the boundary to an untested handler
        failure = Failure(type(error).__name__, f"{type(error).__name__}: {error}")
    if failure is None:
        return ""
    return (
        f"{runner.function} failed on a generated request of zeros and words: {failure.message}. "
        "It may still answer real requests: to be sure, give one with --sample NAME=VALUE, or samples=[{...}] in Python"
    )


def _failure(runner: Runner, request: NamedValues) -> Failure | None:
    try:
        [outcome] = runner.answer([request])
        if isinstance(outcome, Failure):
            return outcome
        # Encode the answer as a worker does, but without a buffer.
        for encoded in encode_outputs(outcome):
            encoded.write(bytearray(encoded.meta.nbytes), 0)
    except OverwinterError as error:
        return Failure(type(error).__name__, str(error))
    except TimeoutError as error:
        # A timeout inside the handler becomes HandlerError, so this one occurred in the program.
        return Failure(ProgramError.__name__, str(error))
    return None


def _generated(runner: Runner, inputs: tuple[TensorSpec, ...]) -> NamedValues:
    sizes = runner.example_sizes()
    request: dict[str, Value] = {}
    for spec in inputs:
        shape = [size if isinstance(size, int) else sizes.get(size, 1) for size in spec.shape]
        text = spec.datatype == BYTES
        request[spec.name] = [TEXT] * prod(shape) if text else torch.zeros(shape, dtype=TORCH_DTYPES[spec.datatype])
    return request


@contextmanager
def _interrupted_after(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the context after `seconds`, as soon as Python code runs. Works only in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
