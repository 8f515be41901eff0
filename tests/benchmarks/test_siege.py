"""The siege attributes each request to its phase, and counts each that is not answered right as the maximum latency."""

import os
import time
from types import SimpleNamespace

from benchmarks.openloop import Outcome
from benchmarks.siege.__main__ import PATIENCE_S, slowness, wrong
from benchmarks.siege.attacks import ATTACKS, slow_program
from benchmarks.siege.peak_memory import estimated_private_bytes, process_bytes
from benchmarks.siege.recovery import Recovery
from benchmarks.siege.well_behaved import phase_of
from overwinter.model.program import validate

ANSWERED = Outcome(0, 1.0, 0.0, 0.02, 200, "warm", True)
WRONG = Outcome(0, 1.0, 0.0, 0.02, 200, "warm", False)
REFUSED = Outcome(0, 1.0, 0.0, 0.01, 503, "full", False)
LOST = Outcome(0, 1.0, 0.0, 3.0, 0, "", False)


def test_a_request_that_is_not_answered_right_counts_as_the_maximum_latency():
    assert slowness([ANSWERED, WRONG, REFUSED, LOST]) == [0.02, PATIENCE_S, PATIENCE_S, PATIENCE_S]


def test_wrong_and_lost_answers_are_distinguished():
    assert wrong([ANSWERED, WRONG, REFUSED, LOST]) == 1


def test_a_moment_belongs_to_the_phase_in_which_it_lies():
    phases = [("calm", 0.0, 5.0), ("heap", 6.0, 9.0)]
    assert [phase_of(at, phases) for at in (0.0, 4.9, 5.0, 6.0, 9.0)] == ["calm", "calm", "", "heap", ""]


def test_an_attack_is_not_over_while_something_of_it_is_left(tmp_path):
    looks = iter([["mine", "hog-1"], ["mine", "hog-1"], ["mine"]])
    seen = []

    def functions():
        seen.append(next(looks))
        return [{"name": name} for name in seen[-1]]

    def work():
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass

    client = SimpleNamespace(functions=functions)
    node = SimpleNamespace(pids=lambda: [os.getpid()], process=None, host_store=tmp_path, client=client)
    recovery = Recovery(node, ["mine"])
    recovery.learn(work)
    recovery.wait(lambda seconds: time.sleep(0.05))
    assert seen[-1] == ["mine"]
    assert len(seen) == 3


def test_the_slow_program_is_valid():
    validate(slow_program(20))


def test_every_attack_says_what_it_does():
    assert all(attack.__doc__ for attack in ATTACKS.values())


def test_memory_of_a_process_is_counted():
    assert 1 << 20 < estimated_private_bytes([os.getpid()]) <= process_bytes([os.getpid()]) + (1 << 30)
