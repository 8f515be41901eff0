"""One step after another, in order, each recorded before it is carried out, and read soon after that."""

import asyncio

from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Alarm, Arrived, Cancelled
from overwinter.core.journal import Journal
from overwinter.node.loop import Loop
from overwinter.scheduler.scheduler import Scheduler


class Recorder:
    """Carries out by writing down, and posts a further event while it is at it."""

    def __init__(self):
        self.done = []
        self.loop = None
        self.journal = None

    def carry_out(self, action):
        self.done.append((action, len(self.journal.recent)))
        if len(self.done) == 1:
            self.loop.post(Cancelled(99))
            self.done.append(("still in the first step", len(self.journal.recent)))


def test_an_event_posted_during_a_step_waits_for_its_turn():
    recorder = Recorder()
    recorder.journal = Journal(SchedulerConfig(), 10)
    recorder.loop = Loop(Scheduler(SchedulerConfig()), recorder.journal, recorder)
    recorder.loop.post(Arrived(1, "nobody", None, None))
    recorder.loop.post(Alarm())
    assert [steps for _, steps in recorder.done] == [1, 1]
    assert recorder.done[0][0].error == "NotFoundError"
    assert [type(entry.event) for entry in recorder.journal.recent] == [Arrived, Cancelled, Alarm]
    assert [entry.now for entry in recorder.journal.recent] == sorted(entry.now for entry in recorder.journal.recent)


class Quiet:
    def __init__(self):
        self.done = 0

    def carry_out(self, action):
        self.done += 1


async def read_by(*readers):
    """The events and failures that these readers of three steps leave, and what was carried out before."""
    effects, failures = Quiet(), []
    loop = Loop(Scheduler(SchedulerConfig()), Journal(SchedulerConfig(), 10), effects, readers, failures.append)
    for event in (Arrived(1, "nobody", None, None), Cancelled(1), Arrived(2, "nobody", None, None)):
        loop.post(event)
    before = effects.done
    await asyncio.sleep(0)
    return before, failures


def test_readers_see_each_step_in_order_once_it_is_carried_out():
    seen = []
    before, failures = asyncio.run(read_by(lambda now, event, actions: seen.append((event, len(actions)))))
    assert (before, failures) == (2, [])
    assert seen == [(Arrived(1, "nobody", None, None), 1), (Cancelled(1), 0), (Arrived(2, "nobody", None, None), 1)]


def test_a_reader_that_fails_is_told():
    def fail(now, event, actions):
        raise KeyError(event.request)

    _, failures = asyncio.run(read_by(fail))
    assert [error.args for error in failures] == [(1,)]
