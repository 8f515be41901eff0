"""The soak test determines which version could have answered when, and which refusals have an explanation."""

import hashlib
from random import Random
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.fault_injection import Span
from benchmarks.nodes import running_node
from benchmarks.openloop import Outcome
from benchmarks.soak.__main__ import Soak, measure
from benchmarks.soak.members import BURST_SIZE, ROWS, arrivals
from benchmarks.soak.steps import JournalSteps
from benchmarks.soak.verdicts import NEAR, History, NodeEvents, Spans, Version, verdict
from overwinter.core.actions import SetAlarm
from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Alarm
from overwinter.core.journal import Journal
from tests.scheduler.world import World, spec

OLD, NEW = b"old", b"new"
"""Answers of two versions; those to the second input are twice as long."""


def version(answer, began, until):
    made = Version((answer, 2 * answer), exact=True)
    made.served.add(Span(began, until))
    return made


def updated():
    """Return the history of a function whose update began at 10 and was confirmed at 12."""
    history = History()
    history.versions = [version(OLD, 0, 12), version(NEW, 10, 100)]
    history.gone.add(Span(12, 13))
    return history


def answered(sent, until, answer):
    return Outcome(0, sent, 0.0, until - sent, 200, "warm", False, hashlib.sha256(answer).digest(), answer)


def verdict_of(outcome, began, row, history, events):
    return verdict(outcome, began, row, history, events)[0]


def refused(status, why="no", sent=20.0, until=21.0):
    return Outcome(0, sent, 0.0, until - sent, status, why, False)


@pytest.mark.parametrize(
    ("sent", "until", "answer", "wanted"),
    [
        (5, 6, OLD, "right"),
        (5, 6, NEW, "wrong"),
        (9, 11, NEW, "right"),
        (11, 20, OLD, "right"),
        (12.5, 13, OLD, "wrong"),
        (12.5, 13, NEW, "right"),
        (5, 6, b"other", "wrong"),
        (5, 6, 2 * OLD, "wrong"),
    ],
)
def test_an_answer_is_right_only_if_it_is_that_of_a_version_that_could_have_given_it(sent, until, answer, wanted):
    assert verdict_of(answered(sent, until, answer), 0.0, 0, updated(), NodeEvents()) == wanted


def test_an_answer_to_another_input_is_wrong():
    assert verdict_of(answered(5, 6, 2 * OLD), 0.0, 1, updated(), NodeEvents()) == "right"
    assert verdict_of(answered(5, 6, OLD), 0.0, 1, updated(), NodeEvents()) == "wrong"


def test_a_request_that_was_sent_late_counts_from_when_it_was_sent():
    late = Outcome(0, 11.0, 1.5, 2.0, 200, "warm", False, hashlib.sha256(OLD).digest())
    assert verdict_of(late, 0.0, 0, updated(), NodeEvents()) == "wrong"


@pytest.mark.parametrize(("off", "wanted"), [(0.0, "right"), (0.9 * NEAR, "right"), (1.1 * NEAR, "wrong")])
def test_an_answer_of_a_shared_run_is_right_if_it_is_near(off, wanted):
    right = np.array([1.0, -4.0], np.float32)
    history = History()
    history.versions = [Version((right.tobytes(), b""), exact=False)]
    history.versions[0].served.add(Span(0, 10))
    given = (right + np.array([4.0 * off, 0.0], np.float32)).astype(np.float32)
    assert verdict_of(answered(5, 6, given.tobytes()), 0.0, 0, history, NodeEvents()) == wanted
    assert verdict_of(answered(5, 6, given[:1].tobytes()), 0.0, 0, history, NodeEvents()) == "wrong"


REASONS = {
    "gone": (404, "no function 'f' here: `overwinter ps` lists the functions"),
    "kills": (500, "function f@1 failed in every attempt: killed"),
    "unloaded": (503, "function f@1 is unloaded; load it first"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_refusal_is_explained_only_by_the_reason_that_it_gives_and_only_if_that_was_true(reason):
    for begin, until, there in ((20.5, 30.0, True), (1.0, 19.0, False), (22.0, 30.0, False)):
        history, events = History(), NodeEvents()
        getattr(history if hasattr(history, reason) else events, reason).add(Span(begin, until))
        found = {why: verdict_of(refused(*why), 0.0, 0, history, events) for why in REASONS.values()}
        assert {why for why, said in found.items() if said == "refused"} == ({REASONS[reason]} if there else set())
        assert set(found.values()) <= {"refused", "lost"}


def test_late_requests_may_be_refused_only_for_functions_that_do_not_serve_them():
    late = refused(503, "function f@1 can no longer answer this request within 50 ms")
    assert verdict_of(late, 0.0, 0, History(may_be_late=False), NodeEvents()) == "refused"
    assert verdict_of(late, 0.0, 0, History(), NodeEvents()) == "lost"


@pytest.mark.parametrize("status", [0, 400, 404, 500, 503, 504, 507])
def test_no_answer_and_a_refusal_without_a_known_reason_count_as_lost_whatever_happened(status):
    history, events = History(may_be_late=False), NodeEvents()
    for spans in (history.unloaded, events.kills):
        spans.add(Span(0, 100))
    for why in ("", "no"):
        assert verdict_of(refused(status, why), 0.0, 0, history, events) == "lost"


class Recorded(World):
    """A node whose steps are in a journal."""

    def __init__(self, journal, **config):
        super().__init__(**config)
        self.journal = journal

    def send(self, event):
        actions = super().send(event)
        self.journal.record(self.now, event, actions)
        return actions


def test_a_request_that_timed_out_is_judged_by_whether_the_node_had_a_core_to_give(tmp_path):
    late = refused(504, "the request for function f@1 was not answered within 1.000 s")
    assert verdict(late, 100.0, 0, History(), NodeEvents()) == ("expired", Span(120.0, 121.0))
    path = tmp_path / "journal"
    with path.open("wb") as file:
        world = Recorded(Journal(SchedulerConfig(cores=1), 1, file), cores=1)
        world.deploy(spec())
        world.arrive()
        world.settle_processes()
        world.now = 9.0
        world.finish()
    steps = JournalSteps(path)
    assert steps.counts["runs"] == 1
    assert steps.overloaded(Span(0.0, 9.0))
    assert steps.overloaded(Span(0.0, 9.5))
    assert not steps.overloaded(Span(0.0, 11.0))
    assert not steps.overloaded(Span(20.0, 50.0))


def test_a_journal_that_does_not_replay_is_reported(tmp_path):
    journal = tmp_path / "journal"
    with journal.open("wb") as file:
        Journal(SchedulerConfig(), 1, file).record(1.0, Alarm(), [SetAlarm(2.0)])
    with pytest.raises(RuntimeError, match="Alarm"):
        JournalSteps(journal)


def test_a_span_in_progress_lasts_until_it_is_ended():
    spans, before = Spans(), monotonic()
    spans.begin()
    later = Span(before + 1000, before + 1001)
    assert spans.overlaps(later)
    spans.end()
    assert not spans.overlaps(later)
    assert spans.overlaps(Span(before, before + 1))


def test_requests_are_the_same_again_with_a_seed_and_reach_every_function():
    families = [12, 8]
    plan = arrivals(200.0, 50.0, families, Random(3))
    assert plan == arrivals(200.0, 50.0, families, Random(3)) == sorted(plan, key=lambda each: each[0])
    assert {target for _, target in plan} == set(range(20 * ROWS))
    assert 8000 < len(plan) < 12000


def test_now_and_then_several_requests_for_one_family_arrive_at_the_same_time():
    at_once: dict[float, list[int]] = {}
    for at, target in arrivals(50.0, 50.0, [12, 8], Random(3)):
        at_once.setdefault(at, []).append(target // ROWS)
    bursts = [members for members in at_once.values() if len(members) > 1]
    assert bursts
    for members in bursts:
        assert len(members) == BURST_SIZE
        assert len({member < 12 for member in members}) == 1


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_short_soak_finds_no_wrong_or_lost_answers_and_nothing_left_behind(tmp_path):
    options = SimpleNamespace(functions=8, models=["mlp", "minilm"], small=True, rate=40.0, seed=1)
    with running_node("--journal", str(tmp_path / "journal")) as node:
        soak = Soak(node, options)
        figures = measure(soak, 4.0, 1, tmp_path / "journal")
    assert figures["requests"] > 50
    assert [figures[key] for key in ("wrong", "lost", "descriptors", "processes", "shm_files")] == [0] * 5
    assert soak.done["deploy"] >= 16
