"""Memory for the outputs of a run is reserved for each of its requests before they are copied."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from overwinter.api.budget import Budget, Reservation
from overwinter.core.actions import StartExecutor
from overwinter.core.call import Call
from overwinter.core.events import RunEnded
from overwinter.core.tensor import BYTES, ELEMENTS_OF_STEP, Tensor, TensorMeta, TensorSpec
from overwinter.node.answers import AnswerCheck
from overwinter.node.calls import Payload
from overwinter.node.copying import Copies
from overwinter.node.executors import ExecutorProcess
from overwinter.node.fair_queue import FairQueue
from overwinter.node.runs import Runs
from overwinter.node.workers import WorkerProcess
from overwinter.worker.buffer import LARGE_BYTES, SharedBuffer
from overwinter.worker.messages import Answer, Failure, Outputs

from .log_lines import process_files
from .rig import AddOne, Function, until

NBYTES = 4 * LARGE_BYTES
RUN = 1


class Worker:
    """A worker that answers a run of requests with one message, and the node's side of this run."""

    def __init__(self, function: Function, budget: Budget, count: int, process: ExecutorProcess | None = None) -> None:
        """`process`: an executor that answers instead of a worker."""
        load = function.deployed.load_message()
        self.process = process or WorkerProcess(1, function.deployed, load, None, process_files())
        self.process.answer_check = AnswerCheck([TensorSpec("y", "UINT8", ("n",))])
        self.events: list[RunEnded] = []
        loop = asyncio.get_running_loop()
        self.reservations = [Reservation(budget, "somebody") for _ in range(count)]
        self.payloads = {
            number: Payload([], loop.create_future(), Call("f", 1, [], reserve=reservation.grow))
            for number, reservation in enumerate(self.reservations)
        }
        pool_calls = SimpleNamespace(end=lambda *_: ())
        self.functions: dict[str, SimpleNamespace] = {}
        copies = Copies(FairQueue())
        self.runs = Runs(None, self.functions, self.payloads, pool_calls, copies, self.events.append)
        self.process.assign_slot(RUN, tuple(range(count)), (function.deployed.id,) * count)

    def answer(self, *sizes: int) -> None:
        """Announce outputs of these sizes, and a failure for 0; the worker's file is sparse and takes no memory."""
        outcomes = tuple(
            Outputs((TensorMeta("y", "UINT8", (size,), size),)) if size else Failure("HandlerError", "none")
            for size in sizes
        )
        self.runs.worker_answered(self.process, Answer(RUN, outcomes))

    def failed(self) -> dict[int, str]:
        [event] = self.events
        return {failure.request: failure.error for failure in event.failures}


@pytest.fixture(scope="module")
def function() -> Function:
    return Function(AddOne(), {"x": torch.zeros(2, 4)})


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the tensors that are copied out of buffers."""
    sizes: list[int] = []
    take = SharedBuffer.take
    monkeypatch.setattr(SharedBuffer, "take", lambda self, at, nbytes: sizes.append(nbytes) or take(self, at, nbytes))
    return sizes


def play(function: Function, budget: Budget, count: int, scene: Callable[[Worker], object]) -> Worker:
    """Let a worker with `count` requests answer, and wait for the end of its run."""

    async def played() -> Worker:
        worker = Worker(function, budget, count)
        with closing(worker.process):
            scene(worker)
            if not worker.process.over:
                await until(lambda: worker.events)
        return worker

    return asyncio.run(played())


def test_outputs_are_copied_only_for_requests_that_may_hold_them(function: Function, copied: list[int]) -> None:
    budget = Budget(5 * NBYTES, 0.5, 1.0)
    worker = play(function, budget, 18, lambda worker: worker.answer(NBYTES, 0, *[NBYTES] * 16))
    assert copied == [NBYTES, NBYTES]
    assert budget.held == sum(copied)
    failures = worker.failed()
    assert failures.pop(1) == "HandlerError"
    assert failures == dict.fromkeys(range(3, 18), "OverloadedError")
    assert [len(worker.payloads[request].outputs[0].data) for request in (0, 2)] == copied
    for reservation in worker.reservations:
        reservation.close()
    assert budget.held == 0


def test_outputs_that_no_caller_may_hold_are_refused(function: Function, copied: list[int]) -> None:
    worker = play(function, Budget(NBYTES, 0.5, 1.0), 1, lambda worker: worker.answer(NBYTES))
    assert (worker.failed(), copied) == ({0: "TooLargeError"}, [])


def test_outputs_of_requests_that_have_ended_are_not_copied(function: Function, copied: list[int]) -> None:
    def scene(worker: Worker) -> None:
        del worker.payloads[0]
        worker.answer(NBYTES, NBYTES)

    worker = play(function, Budget(16 * NBYTES, 0.5, 1.0), 2, scene)
    assert (worker.failed(), copied, worker.reservations[0].nbytes) == ({}, [NBYTES], 0)


@pytest.mark.parametrize(("nbytes", "is_copied"), [(LARGE_BYTES, True), (NBYTES, False)])
def test_a_large_last_answer_of_a_worker_that_has_ended_is_lost(
    function: Function, copied: list[int], nbytes: int, is_copied: bool
) -> None:
    def scene(worker: Worker) -> None:
        worker.process.over = True
        worker.answer(nbytes)

    worker = play(function, Budget(16 * NBYTES, 0.5, 1.0), 1, scene)
    assert (copied, len(worker.events)) == (([nbytes], 1) if is_copied else ([], 0))


@pytest.mark.parametrize("is_killed", [True, False])
def test_an_answer_that_is_copied_after_the_kill_of_its_executor_leaves_the_inputs_for_the_next_attempt(
    function: Function, is_killed: bool
) -> None:
    async def scene() -> tuple[list[str], list[str], int]:
        process = ExecutorProcess(StartExecutor(1, "virtual:0", None), process_files())
        with closing(process):
            worker = Worker(function, Budget(16 * NBYTES, 0.5, 1.0), 1, process)
            # The first of two slices: the second one takes what it returns.
            settings = SimpleNamespace(device="pool")
            worker.functions[function.deployed.id] = SimpleNamespace(
                later_slices=(None,),
                later_inputs_among=lambda tensors: [each for each in tensors if each.name == "y"],
                manifest=SimpleNamespace(settings=settings),
            )
            payload = worker.payloads[0]
            payload.inputs = [Tensor("x", "INT8", (1,), bytes(1))]
            worker.answer(NBYTES)
            # The copy continues in a thread.
            process.dismissed = is_killed
            await until(lambda: process.is_idle_after(RUN))
            return [each.name for each in payload.inputs], [each.name for each in payload.values], len(worker.events)

    assert asyncio.run(scene()) == ((["x"], [], 0) if is_killed else ([], ["y"], 1))


@pytest.mark.parametrize(("steps", "ends"), [(1, False), (10, False), (1, True), (10, True)])
def test_the_elements_of_an_answer_are_checked_in_several_iterations(
    function: Function, steps: int, ends: bool
) -> None:
    count = steps * ELEMENTS_OF_STEP - 1

    def scene(worker: Worker) -> None:
        worker.process.answer_check = AnswerCheck([TensorSpec("y", BYTES, ("n",))])
        worker.process.over = ends
        outputs = Outputs((TensorMeta("y", BYTES, (count,), 4 * count),))
        worker.runs.worker_answered(worker.process, Answer(RUN, (outputs,)))
        assert len(worker.events) == (1 if steps == 1 else 0)

    worker = play(function, Budget(16 * NBYTES, 0.5, 1.0), 1, scene)
    # A long last answer of a worker that has ended is lost.
    assert len(worker.events) == (0 if ends and steps > 1 else 1)


def test_memory_for_a_repeated_request_is_reserved_only_once(function: Function, copied: list[int]) -> None:
    def scene(worker: Worker) -> None:
        # An earlier worker ended while its answer was copied.
        worker.payloads[0].reserve(NBYTES // 2)
        worker.answer(NBYTES)

    worker = play(function, Budget(16 * NBYTES, 0.5, 1.0), 1, scene)
    assert (worker.failed(), worker.reservations[0].nbytes) == ({}, NBYTES)


def test_an_impossible_answer_reserves_nothing(function: Function, copied: list[int]) -> None:
    def scene(worker: Worker) -> None:
        with pytest.raises(ValueError, match="declared"):
            worker.answer(NBYTES, -NBYTES)
        worker.process.over = True

    budget = Budget(16 * NBYTES, 0.5, 1.0)
    play(function, budget, 2, scene)
    assert (budget.held, copied) == (0, [])


def test_a_copy_of_inputs_ends_with_its_process(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> bytes:
        put = SharedBuffer.put

        def ends(buffer: SharedBuffer, at: int, data: bytes) -> None:
            put(buffer, at, data)
            process.over = at == 64

        made = WorkerProcess(1, function.deployed, function.deployed.load_message(), None, process_files())
        with closing(made) as process:
            monkeypatch.setattr(SharedBuffer, "put", ends)
            process.copy_inputs(0, [Tensor("x", "INT8", (64,), bytes([number]) * 64) for number in (1, 2, 3)])
            return bytes(process.slots[0].inputs.view[:192])

    assert asyncio.run(scene()) == bytes([1]) * 64 + bytes([2]) * 64 + bytes(64)
