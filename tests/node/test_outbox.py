"""Messages that a process does not read immediately reach it in order, with their descriptors, or it is ended with a
reason.
"""

import os
import signal
from contextlib import closing

import pytest
import torch

from overwinter.node import outbox
from overwinter.node.outbox import Outbox
from overwinter.worker.channel import FDS_A_PACKET, Channel, close_all, connected
from overwinter.worker.executor_messages import ToExecutor, WarmUp
from overwinter.worker.messages import FromWorker, RunBatch, Unbind

from .rig import AddOne, Function, until
from .test_executors import pool, variant

__all__ = ["pool"]

MANY = 3000
"""More messages than a socket has room for."""


@pytest.fixture
def ends():
    """The node's channel to a process, and the process's channel."""
    ours, end = connected(FromWorker, fds_max=0)
    end.setblocking(False)
    with closing(ours), closing(Channel(end, ToExecutor)) as theirs:
        yield ours, theirs


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def drained(sender: Outbox, theirs: Channel) -> list:
    """Read all messages, and send those that were kept, by turns."""
    found = []
    while True:
        try:
            found.append(theirs.receive())
        except BlockingIOError:
            if sender.is_empty:
                return found
            sender.send_kept()


def test_messages_that_are_read_late_arrive_in_order(ends):
    ours, theirs = ends
    sender = Outbox(ours, 1 << 20)
    messages = [*(Unbind(f"f{number}@1") for number in range(MANY)), RunBatch(1, ("f@1",), 0, ())]
    for message in messages:
        sender.send(message)
    assert not sender.is_empty
    assert [message for message, _ in drained(sender, theirs)] == messages


def test_the_descriptors_of_a_message_that_is_kept_may_be_closed_and_arrive_in_order(ends, tmp_path):
    ours, theirs = ends
    sender, before = Outbox(ours, 1 << 20), descriptors()
    for number in range(MANY):
        sender.send(Unbind(f"f{number}@1"))
    contents = [str(number) for number in range(2 * FDS_A_PACKET + 1)]
    fds = []
    for content in contents:
        (tmp_path / content).write_text(content)
        fds.append(os.open(tmp_path / content, os.O_RDONLY))
    sender.send(WarmUp("f@1"), fds)
    close_all(fds)
    sender.send(Unbind("last@1"))
    *_, (message, taken), last = drained(sender, theirs)
    assert message == WarmUp("f@1")
    assert [os.read(fd, 10).decode() for fd in taken] == contents
    assert last == (Unbind("last@1"), [])
    close_all(taken)
    assert descriptors() == before


@pytest.mark.parametrize("most", [{"kept_bytes_max": 1000}, {"fds": 3}])
def test_what_is_kept_is_bounded(ends, monkeypatch, most):
    ours, _ = ends
    monkeypatch.setattr(outbox, "KEPT_FDS_MAX", most.get("fds", 1 << 14))
    sender, before = Outbox(ours, most.get("kept_bytes_max", 1 << 20)), descriptors()

    def fill(fd: int) -> None:
        for number in range(2 * MANY):
            sender.send(Unbind(f"f{number}@1"), [fd])

    with open(os.devnull) as file, pytest.raises(BlockingIOError, match="does not read its messages"):
        fill(file.fileno())
    assert not sender.is_empty
    sender.clear()
    assert sender.is_empty
    assert descriptors() == before


def test_an_executor_that_reads_late_gets_every_message(rig, pool):
    function = variant("minilm", 0)
    pool.deploy(function)

    async def scene() -> None:
        executor = await pool.start()
        await pool.run(executor, function)
        wanted, process = pool.answers(), pool.effects.executors._executors[executor]
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(MANY):
            rig.processes.forks.send(process, Unbind(f"f{number}@1"))
        assert not process.outbox.is_empty
        os.kill(process.pid, signal.SIGCONT)
        assert (await pool.run(executor, function)).moved_bytes == 0
        assert pool.answers() == wanted
        assert process.outbox.is_empty

    rig.run(scene())


def test_a_worker_that_reads_nothing_is_ended_with_the_reason(rig):
    function = Function(AddOne(), {"x": torch.zeros(2, 4)})

    async def scene() -> None:
        process = await rig.start_worker(function)
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(MANY):
            rig.processes.forks.send(process, Unbind(f"f{number}@1"))
        await until(lambda: rig.exits(process.worker))
        [event] = rig.exits(process.worker)
        assert event.reason == "a message could not be sent: it does not read its messages"

    rig.run(scene())


def test_an_executor_is_ended_when_too_much_is_kept_for_it_and_the_reason_is_logged(rig, pool, monkeypatch):
    async def scene() -> None:
        executor = await pool.start()
        process = pool.effects.executors._executors[executor]
        monkeypatch.setattr(process.outbox, "_kept_bytes_max", 1000)
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(MANY):
            rig.processes.forks.send(process, Unbind(f"f{number}@1"))
        await until(lambda: rig.exits(executor))
        reason = "a message could not be sent: it does not read its messages"
        assert rig.exits(executor)[0].reason == reason
        assert [line for line in pool.effects.executors._log if reason in line]

    rig.run(scene())
