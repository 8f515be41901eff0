"""Steps run one after another in order; each is recorded before its actions are carried out, and read soon
afterwards.
"""

import asyncio
from pathlib import Path

from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Alarm, Arrived, Cancelled
from overwinter.core.journal import Journal
from overwinter.node.faults import Faults
from overwinter.node.loop import Loop
from overwinter.node.quarantine import Quarantine
from overwinter.scheduler.published import Published
from overwinter.scheduler.scheduler import Scheduler
from tests.node.log_lines import LogLines


class Recorder:
    """Carries out actions by recording them, and posts a further event meanwhile."""

    def __init__(self):
        self.done = []
        self.loop = None
        self.journal = None

    def close(self):
        pass

    def carry_out(self, action):
        self.done.append((action, len(self.journal.recent)))
        if len(self.done) == 1:
            self.loop.post(Cancelled(99))
            self.done.append(("still in the first step", len(self.journal.recent)))


def loop_over(effects, read=lambda *step: None, journal=None, log=None) -> Loop:
    """A loop with its own scheduler and no function in quarantine."""
    scheduler = Scheduler(SchedulerConfig())
    journal = journal or Journal(SchedulerConfig(), 10)
    published, quarantine, faults = (
        Published(scheduler.cycle),
        Quarantine(Path("nowhere")),
        Faults(LogLines() if log is None else log),
    )
    return Loop(scheduler, published, journal, effects, read, quarantine, faults)


def test_an_event_posted_during_a_step_waits_for_its_turn():
    async def scene(recorder):
        recorder.journal = Journal(SchedulerConfig(), 10)
        recorder.loop = loop_over(recorder, journal=recorder.journal)
        recorder.loop.post(Arrived(1, "absent", None, None))
        recorder.loop.post(Alarm())

    recorder = Recorder()
    asyncio.run(scene(recorder))
    assert [steps for _, steps in recorder.done] == [1, 1]
    assert recorder.done[0][0].error == "NotFoundError"
    assert [type(entry.event) for entry in recorder.journal.recent] == [Arrived, Cancelled, Alarm]
    assert [entry.now for entry in recorder.journal.recent] == sorted(entry.now for entry in recorder.journal.recent)


class Quiet:
    def __init__(self):
        self.done, self.closed = 0, False

    def carry_out(self, action):
        self.done += 1

    def close(self):
        self.closed = True


async def read_by(read, log=None):
    """Let `read` see three steps; return the number of actions done before it sees the first. The loop continues."""
    effects = Quiet()
    loop = loop_over(effects, read, log=log)
    for event in (Arrived(1, "absent", None, None), Cancelled(1), Arrived(2, "absent", None, None)):
        loop.post(event)
    before = effects.done
    await asyncio.sleep(0)
    assert not effects.closed
    assert not loop.broken.done()
    return before


def test_readers_get_each_step_in_order_after_it_was_carried_out():
    seen = []
    assert asyncio.run(read_by(lambda now, event, actions: seen.append((event, len(actions))))) == 2
    assert seen == [(Arrived(1, "absent", None, None), 1), (Cancelled(1), 0), (Arrived(2, "absent", None, None), 1)]


class Answering:
    """Answers whoever waits."""

    def __init__(self):
        self.answer = asyncio.get_running_loop().create_future()

    def carry_out(self, action):
        self.answer.set_result(None)


async def answered_and_read():
    """What happens after a step that answers a caller, in order."""
    effects, order = Answering(), []
    loop = loop_over(effects, lambda *_: order.append("read"))

    async def call():
        await effects.answer
        order.append("answered")

    calling = asyncio.create_task(call())
    await asyncio.sleep(0)
    loop.post(Arrived(1, "absent", None, None))
    await calling
    await asyncio.sleep(0)
    return order


def test_a_step_is_read_after_the_caller_that_it_answers_continued():
    assert asyncio.run(answered_and_read()) == ["answered", "read"]


def test_a_reader_that_fails_at_a_step_gets_the_next_ones(mistakes):
    seen, log = [], LogLines()

    def fail(now, event, actions):
        seen.append(event.request)
        raise KeyError(event.request)

    asyncio.run(read_by(fail, log))
    assert seen == [1, 1, 2]
    assert ["KeyError: 1" in line and "in fail" in line for line in log] == [True]
    assert [error.args for error in mistakes] == [(1,), (1,), (2,)]
    mistakes.clear()
