"""A kind of attack, and the loop that runs its tries for a share of the time."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import NamedTuple, Protocol

from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.canaries import canary_in
from benchmarks.hostile.exchange import HungError, Reply
from overwinter.core.errors import MachineError, OverwinterError


class Kind(Protocol):
    """Attacks of one kind; each case is a variant."""

    name: str
    cases: Sequence[str]

    def prepare(self) -> None:
        """Deploy what it needs; also after the node was restarted with an empty data directory."""
        ...

    def run(self, case: str, rng: Random) -> None:
        """Run one try. A HungError counts as a failure; an OSError or OverwinterError is only noted."""
        ...


class Try(NamedTuple):
    """A try that has ended: its start and end on the system's monotonic clock, and what it was."""

    began: float
    ended: float
    kind: str
    case: str
    number: int


class Attacker:
    """Runs kinds of attacks against a node, one try after the other."""

    def __init__(self, attacked: AttackedNode, seed: int) -> None:
        self.attacked = attacked
        self.seed = seed
        self.past_tries: list[Try] = []

    def run_tries(self, kind: Kind, seconds: float, first: int = 0, tries: int | None = None) -> None:
        """Run tries for this long, at most `tries` and at least one; each case comes once before one is repeated."""
        self._attempt(kind, "prepare", first, kind.prepare)
        self.attacked.on_empty.append(kind.prepare)
        until = time.monotonic() + seconds
        number = first
        while (tries is None or number < first + tries) and (time.monotonic() < until or number == first):
            case = case_of(kind, self.seed, number)
            rng = Random(f"{self.seed}/{kind.name}/{number}")
            self._attempt(kind, case, number, lambda case=case, rng=rng: kind.run(case, rng))
            number += 1
        self.attacked.on_empty.remove(kind.prepare)

    def _attempt(self, kind: Kind, case: str, number: int, step: Callable[[], None]) -> None:
        tally = self.attacked.tally
        tally.begin(kind.name, case, number)
        began = time.monotonic()
        try:
            step()
        except HungError as error:
            tally.add("hung", str(error))
            self.attacked.answers()
        except MachineError as error:
            tally.note(type(error).__name__)
            self.attacked.answers()
        except OverwinterError as error:
            tally.note(f"{type(error).__name__}: {str(error)[:60]}")
        except OSError as error:
            tally.note(type(error).__name__)
        finally:
            self.past_tries.append(Try(began, time.monotonic(), kind.name, case, number))
        self.attacked.examine()
        self.attacked.expects_death = False


def case_of(kind: Kind, seed: int, number: int) -> str:
    """Return the case of a try: each round has every case once, the first in the listed order, later ones in random
    order.
    """
    cases = list(kind.cases)
    if number >= len(cases):
        Random(f"{seed}/{kind.name}/round {number // len(cases)}").shuffle(cases)
    return cases[number % len(cases)]


def judged(attacked: AttackedNode, reply: Reply | None) -> Reply | None:
    """Count the answer if it is an unforeseen 5xx or contains data of another tenant, and return it."""
    attacked.tally.judge(reply)
    found = None if reply is None else canary_in(reply.body)
    if found:
        attacked.tally.add("outside_reads", f"an answer has data of another tenant: {found}")
    return reply


def ignoring_errors(step: Callable[[], object]) -> None:
    """Run a cleanup step that may fail because its object no longer exists."""
    with suppress(OverwinterError, OSError, HungError):
        step()
