"""The soak knows which version could answer when, and which refusal something explains."""

from random import Random
from time import monotonic
from types import SimpleNamespace

import pytest

from benchmarks.harm import Span
from benchmarks.nodes import running_node
from benchmarks.openloop import Outcome
from benchmarks.soak.__main__ import Soak, measure
from benchmarks.soak.members import ROWS, arrivals
from benchmarks.soak.verdicts import History, Spans, Version, Weather, verdict

OLD, NEW = b"old", b"new"
"""Digests of the answers of two versions; those to the second input are twice as long."""


def version(digest, began, until):
    made = Version((digest, 2 * digest))
    made.served.add(Span(began, until))
    return made


def updated():
    """A function whose update began at 10 and was confirmed at 12."""
    history = History()
    history.versions = [version(OLD, 0, 12), version(NEW, 10, 100)]
    history.gone.add(Span(12, 13))
    return history


def answered(sent, until, digest):
    return Outcome(0, sent, 0.0, until - sent, 200, "warm", False, digest)


def refused(status, sent=20.0, until=21.0, why="no"):
    return Outcome(0, sent, 0.0, until - sent, status, why, False)


@pytest.mark.parametrize(
    ("sent", "until", "digest", "wanted"),
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
def test_an_answer_is_that_of_a_version_that_could_have_given_it(sent, until, digest, wanted):
    assert verdict(answered(sent, until, digest), 0.0, 0, updated(), Weather()) == wanted


def test_an_answer_to_another_input_is_wrong():
    assert verdict(answered(5, 6, 2 * OLD), 0.0, 1, updated(), Weather()) == "right"
    assert verdict(answered(5, 6, OLD), 0.0, 1, updated(), Weather()) == "wrong"


def test_a_request_that_was_sent_late_counts_from_when_it_was_sent():
    late = Outcome(0, 11.0, 1.5, 2.0, 200, "warm", False, OLD)
    assert verdict(late, 0.0, 0, updated(), Weather()) == "wrong"


@pytest.mark.parametrize(
    ("reason", "statuses"),
    [("gone", {404}), ("unloaded", {503}), ("kills", {500, 503, 504}), ("overload", {503, 504})],
)
def test_a_refusal_is_explained_by_what_was_under_way_and_by_nothing_else(reason, statuses):
    for begin, until, there in ((20.5, 30.0, True), (1.0, 19.0, False), (22.0, 30.0, False)):
        history, weather = History(), Weather()
        getattr(history if hasattr(history, reason) else weather, reason).add(Span(begin, until))
        found = {
            status: verdict(refused(status), 0.0, 0, history, weather) for status in (400, 404, 500, 503, 504, 507)
        }
        assert {status for status, said in found.items() if said == "refused"} == (statuses if there else set())
        assert set(found.values()) <= {"refused", "lost"}


def test_a_refusal_without_a_word_and_no_answer_are_lost():
    weather = Weather()
    weather.kills.add(Span(0, 100))
    assert verdict(refused(500), 0.0, 0, History(), weather) == "refused"
    assert verdict(refused(500, why=""), 0.0, 0, History(), weather) == "lost"
    assert verdict(refused(0, why=""), 0.0, 0, History(), weather) == "lost"


def test_what_is_under_way_lasts_until_it_is_ended():
    spans, before = Spans(), monotonic()
    spans.begin()
    later = Span(before + 1000, before + 1001)
    assert spans.meet(later)
    spans.end()
    assert not spans.meet(later)
    assert spans.meet(Span(before, before + 1))


def test_requests_are_the_same_again_with_a_seed_and_reach_every_function():
    plan = arrivals(200.0, 50.0, 20, Random(3))
    assert plan == arrivals(200.0, 50.0, 20, Random(3)) == sorted(plan)
    assert {target for _, target in plan} == set(range(20 * ROWS))
    assert 8000 < len(plan) < 12000


def test_a_short_soak_finds_nothing_wrong_lost_or_left():
    options = SimpleNamespace(functions=4, models=["mlp", "textcnn"], small=True, rate=20.0, seed=1)
    with running_node() as node:
        soak = Soak(node, options)
        figures = measure(soak, 4.0, 1)
    assert figures["requests"] > 50
    assert [figures[key] for key in ("wrong", "lost", "descriptors", "processes", "shm_files")] == [0] * 5
    assert soak.done["deploy"] >= 8
