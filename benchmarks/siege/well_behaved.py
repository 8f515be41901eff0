"""The well-behaved tenant: twenty functions of real models, some with handlers, with known answers."""

import hashlib
from collections.abc import Sequence
from functools import partial
from random import Random

from benchmarks.churn import HANDLER
from benchmarks.families import Family, as_tensors
from benchmarks.openloop import Target
from benchmarks.thousand import slo_ms
from benchmarks.wire import END, binary_request
from overwinter.api.client import Client
from overwinter.api.deployer import Package

MODELS = ("mlp", "textcnn", "minilm")
COUNT = 20
HANDLED_EVERY = 4
TOKENS = 16
TIMEOUT_S = 20.0
"""The timeout of every function: a request is refused after it."""


class WellBehavedTenant:
    """The functions, made once and deployed whenever the node is new."""

    def __init__(self) -> None:
        families = [Family(name, tokens=TOKENS) for name in MODELS]
        self.payloads = [binary_request("x", as_tensors(family.one())).partition(END)[2] for family in families]
        self.targets: list[Target] = []
        self.slo_s: list[float] = []
        self.names: list[str] = []
        self._packages: list[Package] = []
        for number in range(COUNT):
            place = number % len(families)
            self._add(families[place], place, number)

    def _add(self, family: Family, place: int, number: int) -> None:
        name = f"{family.name}-{number:02}"
        family.vary(family.head(), number + 1)
        handler = HANDLER if number % HANDLED_EVERY == 0 else None
        slo = slo_ms(family.name)
        made = family.packaged(name, handler, slo_ms=slo, timeout_s=TIMEOUT_S)
        # The weights belong to the family, and change with the next variant, so copy them.
        made.contents = {address: partial(bytes, bytes(make())) for address, make in made.contents.items()}
        self._packages.append(made)
        head = binary_request(name, as_tensors(family.one())).partition(END)[0] + END
        self.targets.append(Target(head, place, hashlib.sha256(family.answer()).digest()))
        self.slo_s.append(slo / 1e3)
        self.names.append(name)

    def deploy(self, client: Client) -> None:
        """Deploy all functions."""
        for made in self._packages:
            made.upload(client)

    def arrivals(self, seconds: float, rate: float, seed: int) -> list[tuple[float, int]]:
        """Return random arrivals, distributed equally among the functions."""
        rng = Random(seed)
        at = rng.expovariate(rate)
        found = []
        while at < seconds:
            found.append((at, rng.randrange(COUNT)))
            at += rng.expovariate(rate)
        return found


def phase_of(at: float, phases: Sequence[tuple[str, float, float]]) -> str:
    """Return the phase, of (name, begin, end), in which a moment is; empty between two."""
    return next((name for name, begin, end in phases if begin <= at < end), "")
