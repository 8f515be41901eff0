"""Steps run one after another in order; each is recorded before its actions are carried out, and read soon
afterwards.
"""

import asyncio
from pathlib import Path

from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Alarm, Arrived, Cancelled
from overwinter.core.journal import Journal
from overwinter.node.loop import Loop
from overwinter.node.quarantine import Quarantine
from overwinter.scheduler.published import Published
from overwinter.scheduler.scheduler import Scheduler


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


def loop_over(effects, read=lambda *step: None, journal=None) -> Loop:
    """A loop with its own scheduler and no function in quarantine."""
    scheduler = Scheduler(SchedulerConfig())
    journal = journal or Journal(SchedulerConfig(), 10)
    return Loop(scheduler, Published(scheduler.cycle), journal, effects, read, Quarantine(Path("nowhere")))


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


async def read_by(read):
    """Let `read` see three steps; return the number of actions done before, and the error that broke the loop."""
    effects = Quiet()
    loop = loop_over(effects, read)
    for event in (Arrived(1, "absent", None, None), Cancelled(1), Arrived(2, "absent", None, None)):
        loop.post(event)
    before = effects.done
    await asyncio.sleep(0)
    assert effects.closed == loop.broken.done()
    return before, loop.broken.exception() if loop.broken.done() else None


def test_readers_get_each_step_in_order_after_it_was_carried_out():
    seen = []
    before, failure = asyncio.run(read_by(lambda now, event, actions: seen.append((event, len(actions)))))
    assert (before, failure) == (2, None)
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


def test_a_failing_reader_ends_the_node():
    def fail(now, event, actions):
        raise KeyError(event.request)

    _, failure = asyncio.run(read_by(fail))
    assert failure.args == (1,)
