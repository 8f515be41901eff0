"""A compromised executor that forges messages is ended, and nothing else is."""

import asyncio
import ctypes
import os
import signal
import socket

import msgspec
import pytest

from .rig import until
from .test_executors import SMALL, pool, variant

__all__ = ["pool"]

PIDFD_GETFD = 438

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can send in the name of a contained process")

FORGED = {
    "a failure of another function": ["BindFailed", "another@1", "ProgramError", "forged"],
    "a failure of a function that ran": ["BindFailed", "{function}", "ProgramError", "forged"],
    "ready twice": ["Ready"],
    "not loaded": ["LoadFailed", "WorkerError", "forged"],
    "a call": ["PoolCall", 1, "{function}", 0, [["x", "FP32", [1, 4], 16]], 65536],
    "bound": ["Bound", "{function}"],
    "warmed up": ["WarmedUp", False],
    "measured": ["Measured", 1 << 62, []],
    "an answer to no run": ["Answer", 1 << 40, [], 0],
    "an answer to the last run": ["Answer", "{run}", [["Failure", "CallerError", "forged"]], 0],
}


def channel_of(process) -> socket.socket:
    """Return a duplicate of an executor's end of its channel."""
    for name in os.listdir(f"/proc/{process.pid}/fd"):
        if os.readlink(f"/proc/{process.pid}/fd/{name}").startswith("socket:"):
            fd = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process.pidfd, int(name), 0)
            assert fd >= 0, os.strerror(ctypes.get_errno())
            return socket.socket(fileno=fd)
    raise AssertionError("it has no channel")


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_message_ends_only_the_executor_that_sent_it(rig, pool, forged: str):
    function = variant("minilm", 0)
    pool.deploy(function)

    async def scene() -> None:
        executor = await pool.start()
        await pool.run(executor, function)
        wanted, process = pool.answers(), pool.effects.executors._executors[executor]
        given = {"{function}": function.deployed.id, "{run}": process.last_run}
        message = [given.get(part, part) if isinstance(part, str) else part for part in FORGED[forged]]
        lines = len(pool.effects.executors._log)
        with channel_of(process) as end:
            end.send(msgspec.msgpack.encode(message))
            await until(lambda: rig.exits(executor))
        [event] = rig.exits(executor)
        assert "it sent an invalid message" in event.reason
        assert not [line for line in pool.effects.executors._log[lines:] if "forged" in line]
        again = await pool.start()
        await pool.run(again, function)
        assert pool.answers() == wanted

    rig.run(scene())


MOVED = {"more than the blocks have": [1 << 62], "fewer than none": [-1], "more from a peer than in all": [0, 1]}


@pytest.mark.parametrize("moved", MOVED)
def test_an_executor_that_forges_the_number_of_moved_bytes_is_ended(rig, pool, moved: str):
    function = variant("minilm", 0)
    pool.deploy(function)

    async def scene() -> None:
        executor = await pool.start()
        await pool.run(executor, function)
        process = pool.effects.executors._executors[executor]
        # It does not answer the next run itself.
        os.kill(process.pid, signal.SIGSTOP)
        running = asyncio.create_task(pool.run(executor, function))
        await until(lambda: process._pending_runs)
        message = ["Answer", process.last_run, [["Failure", "CallerError", "forged"]], *MOVED[moved]]
        with channel_of(process) as end:
            end.send(msgspec.msgpack.encode(message))
            await until(lambda: rig.exits(executor) or running.done())
        assert rig.exits(executor)
        running.cancel()

    rig.run(scene())


NOISE = {
    "empty": b"",
    "a byte": b"\xdd",
    "much": b"\xdd" * 900_000,
    "nested": b"\x93\xa5Bound\xa1f" + b"\x91" * 3000 + b"\xc0",
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("noise", NOISE)
def test_noise_ends_only_the_executor_that_sent_it(rig, pool, noise: str):
    async def scene() -> None:
        executor, other = await pool.start(), await pool.start(SMALL)
        with channel_of(pool.effects.executors._executors[executor]) as end:
            end.send(NOISE[noise])
            await until(lambda: rig.exits(executor))
        assert not rig.exits(other)

    rig.run(scene())
