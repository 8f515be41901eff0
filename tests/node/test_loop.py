"""The loop's promise: one step after another, in order, each recorded before it is carried out."""

from overwinter.core.config import MindConfig
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
    recorder.journal = Journal(MindConfig(), 10)
    recorder.loop = Loop(Scheduler(MindConfig()), recorder.journal, recorder)
    recorder.loop.post(Arrived(1, "nobody", None, None))
    recorder.loop.post(Alarm())
    assert [steps for _, steps in recorder.done] == [1, 1]
    assert recorder.done[0][0].error == "NotFoundError"
    assert [type(entry.event) for entry in recorder.journal.recent] == [Arrived, Cancelled, Alarm]
    assert [entry.now for entry in recorder.journal.recent] == sorted(entry.now for entry in recorder.journal.recent)
