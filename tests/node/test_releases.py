"""The memory of large buffers is released in threads: one process of a tenant at a time, and never during a run."""

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from overwinter.core.ids import RunId, TenantId
from overwinter.node import releases
from overwinter.node.releases import Releases
from overwinter.worker.buffer import KEPT_BYTES, SharedBuffer, Slot

from .rig import until

RUN = RunId(1)


class Process:
    """The part of a process that a release uses, with real buffers, whose memory can be withheld."""

    def __init__(self, tenant: str) -> None:
        self.tenant = TenantId(tenant)
        self.slots = [Slot(SharedBuffer.make("test", 16 * KEPT_BYTES), SharedBuffer.make("test"))]
        self.last_run = RUN
        self.over = False
        self.threads = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        large = self.slots[0].inputs
        large.view[:] = b"x" * large.nbytes
        release = large.release

        def withheld() -> Iterator[None]:
            for piece in release():
                self.may_go_on.wait()
                yield piece

        large.release = withheld

    def is_idle_since(self, run: RunId) -> bool:
        return self.last_run == run

    def is_large(self) -> bool:
        return True

    def thread_begins(self) -> None:
        self.threads += 1

    def thread_ended(self) -> None:
        self.threads -= 1

    @property
    def nbytes(self) -> int:
        return os.fstat(self.slots[0].inputs.fd).st_blocks * 512

    def close(self) -> None:
        self.may_go_on.set()
        for buffer in self.slots[0]:
            buffer.close()


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(releases, "IDLE_S", 0.01)
    made = [Process("a"), Process("a"), Process("b")]
    yield made
    for process in made:
        process.close()


def test_a_release_that_is_delayed_delays_no_other_tenant_and_the_same_tenants_come_later(processes):
    first, second, other = processes
    first.may_go_on.clear()

    async def scene():
        under_test = Releases()
        for process in processes:
            under_test.run_ended(process, RUN)
        await until(lambda: other.nbytes == KEPT_BYTES)
        assert first.threads == 1
        assert second.threads == 0
        assert second.nbytes == 16 * KEPT_BYTES
        first.may_go_on.set()
        await until(lambda: first.nbytes == second.nbytes == KEPT_BYTES)
        await until(lambda: not any(process.threads for process in processes))

    asyncio.run(scene())


def test_a_run_waits_until_the_release_of_its_process_has_stopped_and_others_do_not(processes):
    first, _, other = processes

    async def scene():
        under_test, began = await withheld(first), []
        under_test.when_stopped(other, lambda: began.append(other))
        under_test.when_stopped(first, lambda: began.append(first))
        assert began == [other]
        first.may_go_on.set()
        await until(lambda: not first.threads)
        assert began == [other, first]
        # One piece at most was released after that.
        assert first.nbytes > KEPT_BYTES

    asyncio.run(scene())


def test_a_run_of_a_process_that_ends_meanwhile_does_not_begin(processes):
    first, *_ = processes

    async def scene():
        under_test, began = await withheld(first), []
        under_test.when_stopped(first, lambda: began.append(first))
        first.over = True
        first.may_go_on.set()
        await until(lambda: not first.threads)
        assert not began

    asyncio.run(scene())


async def withheld(process: Process) -> Releases:
    """Return the releases of a node, of which that of the process does not go on."""
    process.may_go_on.clear()
    under_test = Releases()
    under_test.run_ended(process, RUN)
    await until(lambda: process.threads == 1)
    return under_test


def test_nothing_is_released_after_another_run(processes):
    first, _, other = processes

    async def scene():
        under_test = Releases()
        under_test.run_ended(first, RUN)
        first.last_run = RunId(2)
        under_test.run_ended(other, RUN)
        await until(lambda: other.nbytes == KEPT_BYTES)

    asyncio.run(scene())
    assert first.nbytes == 16 * KEPT_BYTES
