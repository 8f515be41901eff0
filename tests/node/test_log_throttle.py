"""Repeated messages are logged only from time to time, with their count."""

from overwinter.node import log_throttle
from overwinter.node.log_throttle import LogThrottle


def test_a_subject_is_logged_once_per_period_with_the_number_of_skipped_lines(monkeypatch):
    lines: list[str] = []
    throttle = LogThrottle(lines.append)
    for number in range(1000):
        throttle.log("ada", f"worker {number} of ada was stopped")
    throttle.log("bob", "worker 1 of bob was stopped")
    assert lines == ["worker 0 of ada was stopped", "worker 1 of bob was stopped"]
    monkeypatch.setattr(log_throttle, "EVERY_S", 0.0)
    throttle.log("ada", "worker 1000 of ada was stopped")
    assert lines[2].startswith("worker 1000 of ada was stopped")
    assert "999" in lines[2]


def test_a_line_that_is_not_logged_is_not_formatted():
    lines: list[str] = []
    made = iter(["the first line"])
    throttle = LogThrottle(lines.append)
    for _ in range(2):
        throttle.log("ada", lambda: next(made))
    assert lines == ["the first line"]


def test_a_subject_without_recent_lines_is_forgotten(monkeypatch):
    throttle = LogThrottle([].append)
    monkeypatch.setattr(log_throttle, "FORGOTTEN_S", 0.0)
    for number in range(100):
        throttle.log(number, "it happened")
    assert len(throttle._logged) == 1
