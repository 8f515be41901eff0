"""Calls of programs for workers: what is reserved for a request ends with it."""

import asyncio
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from overwinter.api.budget import Budget, Reservation
from overwinter.core.call import Call, Result
from overwinter.core.tensor import Tensor, TensorMeta
from overwinter.node.calls import Payload
from overwinter.node.pool_calls import PoolCalls, _Run
from overwinter.node.workers import WorkerProcess
from overwinter.worker.buffer import SharedBuffer, Slot
from overwinter.worker.messages import PoolCall

from .log_lines import LogLines, process_files
from .rig import AddOne, Function

NBYTES = 1 << 20


class Program:
    """Answers calls of a program with NBYTES bytes, after `meanwhile`."""

    def __init__(self, payloads, meanwhile) -> None:
        self.payloads = dict(enumerate(payloads))
        self._meanwhile = meanwhile

    async def infer(self, call: Call) -> Result:
        self._meanwhile()
        call.reserve(NBYTES)
        return Result(call.name, 1, [Tensor("y", "UINT8", (NBYTES,), bytes(NBYTES))], "warm")


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_nothing_stays_reserved_for_requests_that_ended_within_a_call(leaving: int):
    budget = Budget(64 * NBYTES, 1.0, 1.0)
    reservations = [Reservation(budget, "somebody") for _ in range(2)]
    function = Function(AddOne(), {"x": torch.zeros(2, 4)}).deployed

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        payloads = [
            Payload([], loop.create_future(), Call("f", 1, [], reserve=reservation.grow))
            for reservation in reservations
        ]

        def leave() -> None:
            for payload, reservation in list(zip(payloads, reservations, strict=True))[:leaving]:
                payload.result.cancel()
                reservation.close()

        pool_calls = PoolCalls(Program(payloads, leave), None, None, None, None)
        run = _Run({function.id: function}, dict.fromkeys(range(2), function.id))
        inputs = [Tensor("x", "UINT8", (NBYTES,), bytes(NBYTES))]
        await pool_calls._run(run, function, function, pool_calls._waiting(run, function), inputs)

    asyncio.run(scene())
    for reservation in reservations[leaving:]:
        reservation.close()
    assert budget.held == 0


def test_inputs_of_a_call_for_which_no_memory_can_be_reserved_are_not_copied():
    reservation = Reservation(Budget(2 * NBYTES, 0.25, 1.0), "somebody")
    function = Function(AddOne(), {"x": torch.zeros(2, 4)}).deployed
    sent = []

    async def scene() -> None:
        payload = Payload([], asyncio.get_running_loop().create_future(), Call("f", 1, [], reserve=reservation.grow))
        processes = SimpleNamespace(forks=SimpleNamespace(send=lambda _, message: sent.append(message)))
        # `copies` is None, so a copy would fail.
        pool_calls = PoolCalls(Program([payload], bool), None, processes, None, None)
        run = _Run({function.id: function}, {0: function.id})
        message = PoolCall(1, function.id, 0, (TensorMeta("x", "FP32", (NBYTES // 16, 4), NBYTES),))
        with closing(SharedBuffer.make("test")) as buffer:
            process = SimpleNamespace(slots=[Slot(None, buffer)], over=False)
            await pool_calls._answer(process, run, function, function, message)

    asyncio.run(scene())
    [computed] = sent
    assert (computed.outcome.error, reservation.nbytes) == ("TooLargeError", 0)


def test_calls_of_a_tenants_trials_take_turns():
    function, other = (Function(AddOne(), {"x": torch.zeros(2, 4)}, tenant=each).deployed for each in ("a", "b"))
    done = []

    async def scene() -> None:
        pool_calls = PoolCalls(Program([], bool), None, None, None, None)

        async def call(name: str, run: _Run, of) -> None:
            async with pool_calls._turn(run, of):
                done.append(f"{name} begins")
                await asyncio.sleep(0)
                done.append(f"{name} ends")

        served = _Run({function.id: function}, {0: function.id})
        async with asyncio.TaskGroup() as tasks:
            for name in ("first", "second"):
                tasks.create_task(call(name, _Run({function.id: function}, {}), function))
            tasks.create_task(call("another tenant's", _Run({other.id: other}, {}), other))
            tasks.create_task(call("a request's", served, function))

    asyncio.run(scene())
    assert done.index("first ends") < done.index("second begins")
    assert max(map(done.index, ("another tenant's begins", "a request's begins"))) < done.index("second begins")


def test_a_programming_error_in_a_call_ends_only_its_worker(monkeypatch):
    function = Function(AddOne(), {"x": torch.zeros(2, 4)}).deployed
    ended, lines = [], LogLines()

    async def mistaken(*of) -> None:
        raise KeyError(7)

    async def scene() -> None:
        processes = SimpleNamespace(forks=SimpleNamespace(give_up=lambda _, reason: ended.append(reason)))
        function.program, function.handler_only = function, True
        with closing(WorkerProcess(1, function, function.load_message(), None, process_files())) as worker:
            async with asyncio.TaskGroup() as tasks:
                pool_calls = PoolCalls(None, None, processes, tasks, lines)
                monkeypatch.setattr(pool_calls, "_answer", mistaken)
                pool_calls.begin(worker, 1, 0, [function], [1])
                pool_calls.call(worker, None, PoolCall(1, function.id, 0, ()))

    asyncio.run(scene())
    assert ["KeyError: 7" in text for text in (*ended, *lines)] == [True, True]
