"""Recorded steps can be read again, and the ring is bounded."""

import errno
import io

import pytest

from overwinter.core.actions import Refuse, Reply, Run, SetAlarm
from overwinter.core.config import SchedulerConfig
from overwinter.core.errors import CallerError
from overwinter.core.events import Alarm, Arrived, RunEnded, RunFailure
from overwinter.core.journal import Entry, Journal, read_journal

STEPS = [
    (1.5, Arrived(1, "f", None, 2.25), [Run(1, 1, (1,)), SetAlarm(2.25)]),
    (1.75, RunEnded(1, 1, (RunFailure(1, "HandlerError", "bad"),)), [Refuse(1, "HandlerError", "bad", 0.1)]),
    (2.0, Alarm(), [Reply(2, "f@1", "disk")]),
]


def test_a_file_gives_back_what_was_recorded():
    file = io.BytesIO()
    journal = Journal(SchedulerConfig(workers_max=3), 10, file)
    for now, event, actions in STEPS:
        journal.record(now, event, actions)
    file.seek(0)
    config, entries = read_journal(file)
    assert config == SchedulerConfig(workers_max=3)
    assert list(entries) == [Entry(now, event, tuple(actions)) for now, event, actions in STEPS]


def test_the_ring_keeps_the_last_steps():
    journal = Journal(SchedulerConfig(), 2)
    for now, event, actions in STEPS:
        journal.record(now, event, actions)
    assert [entry.now for entry in journal.recent] == [1.75, 2.0]


@pytest.mark.parametrize(
    "config", [b'{"policy":"overwinter","bodies_max":64,"rehearsal_max_s":0.5}', b"", b"[1]", b"\xff"]
)
def test_a_journal_of_another_version_is_refused(config):
    with pytest.raises(CallerError, match="not a journal of this version"):
        read_journal(io.BytesIO(config + b"\n"))


def test_a_step_of_another_version_is_refused():
    file = io.BytesIO()
    Journal(SchedulerConfig(), 1, file)
    file.write(b'[0.0,{"type":"BodyExited","worker":1,"error":"","reason":""},[]]\n')
    file.seek(0)
    _, entries = read_journal(file)
    with pytest.raises(CallerError, match="not a journal of this version.*BodyExited"):
        list(entries)


class Small(io.BytesIO):
    """A raw file that takes at most 40 bytes at a time, and has space for `room` bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data) -> int:
        taken = min(len(data), 40, self.room - self.tell())
        if not taken:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(bytes(data[:taken]))


def test_a_file_without_space_ends_with_a_whole_line():
    def filled(file: io.BytesIO, lost=None) -> list[Entry]:
        journal = Journal(SchedulerConfig(), 9, file, lost)
        for step in STEPS:
            journal.record(*step)
        file.seek(0)
        return list(read_journal(file)[1])

    whole = io.BytesIO()
    entries = filled(whole)
    for room in range(len(whole.getvalue()) - 60, len(whole.getvalue())):
        small, errors = Small(room), []
        assert filled(small, errors.append) == entries[:2]
        assert len(errors) == 1
