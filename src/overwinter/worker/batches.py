"""Runs the requests of a message: reads their inputs from one buffer, and writes their outputs into another."""

from collections.abc import Sequence

from overwinter.core.errors import MESSAGE_MAX, OverwinterError
from overwinter.core.ids import RunId
from overwinter.worker.buffer import SharedBuffer, Slot, offsets
from overwinter.worker.messages import Answer, Failure, Outputs, RunBatch
from overwinter.worker.runner import Outcome, Runner, answer
from overwinter.worker.values import encode_outputs, read_requests

MESSAGES_MAX = 64 << 10
"""The most characters of all errors in an answer. With up to four bytes each they fit in a packet of most systems."""


def run_batch(message: RunBatch, slot: Slot, runners: Sequence[Runner | Failure]) -> Answer:
    """Run each request by its runner. The requests of a function that cannot run fail alone."""
    try:
        requests = read_requests(slot.inputs, message.requests)
        able = [(each, request) for each, request in zip(runners, requests, strict=True) if isinstance(each, Runner)]
        answered = iter(answer(able))
        outcomes = [each if isinstance(each, Failure) else next(answered) for each in runners]
        return _packed(message.run, outcomes, slot.outputs)
    except Exception as error:  # noqa: BLE001 - the boundary to the function's own code: the process continues
        failure = Failure("WorkerError", f"{type(error).__name__}: {error}")
        return Answer(message.run, shortened((failure,) * len(message.requests)))


def unbound_failure(function: str) -> Failure:
    """Return the failure of requests to a function that this process does not have."""
    return Failure("WorkerError", f"{function} is not bound in this process")


def _packed(run: RunId, outcomes: list[Outcome], buffer: SharedBuffer) -> Answer:
    """Return the answer, with the outputs written into the buffer."""
    packed: list[Outputs | Failure] = []
    filled = 0
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            packed.append(outcome)
            continue
        try:
            sent = encode_outputs(outcome)
            *places, nbytes = offsets(encoded.meta for encoded in sent)
            buffer.grow(filled + nbytes)
            for encoded, at in zip(sent, places, strict=True):
                encoded.write(buffer.map, filled + at)
        except OverwinterError as error:
            packed.append(Failure(type(error).__name__, str(error)))
            continue
        except OSError as error:
            packed.append(Failure("HandlerError", f"the outputs of its run are too large: {error}; lower max_batch"))
            continue
        filled += nbytes
        packed.append(Outputs(tuple(encoded.meta for encoded in sent)))
    return Answer(run, shortened(packed))


def shortened(outcomes: Sequence[Outputs | Failure]) -> tuple[Outputs | Failure, ...]:
    """Return the outcomes of a run, with errors that fit together in one message."""
    lengths = [min(MESSAGE_MAX, len(each.message)) for each in outcomes if isinstance(each, Failure)]
    most = MESSAGE_MAX if sum(lengths) <= MESSAGES_MAX else MESSAGES_MAX // len(lengths)
    return tuple(Failure(each.error, each.message[:most]) if isinstance(each, Failure) else each for each in outcomes)
