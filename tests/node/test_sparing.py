"""Repeated messages are logged only from time to time, with their count."""

from overwinter.node import sparing
from overwinter.node.sparing import Sparing


def test_each_thing_is_told_of_once_in_a_while_and_then_how_often_it_was(monkeypatch):
    said: list[str] = []
    told = Sparing(said.append)
    for number in range(1000):
        told.say("ada", f"worker {number} of ada was stopped")
    told.say("bob", "worker 1 of bob was stopped")
    assert said == ["worker 0 of ada was stopped", "worker 1 of bob was stopped"]
    monkeypatch.setattr(sparing, "EVERY_S", 0.0)
    told.say("ada", "worker 1000 of ada was stopped")
    assert said[2].startswith("worker 1000 of ada was stopped")
    assert "999" in said[2]


def test_what_has_not_happened_for_long_is_forgotten(monkeypatch):
    told = Sparing([].append)
    monkeypatch.setattr(sparing, "FORGOTTEN_S", 0.0)
    for number in range(100):
        told.say(number, "it happened")
    assert len(told._told) == 1
