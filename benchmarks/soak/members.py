"""The functions: members of eight families of real models, and what their authors do to them."""

import hashlib
from random import Random
from typing import Literal

from benchmarks.families import Family, as_tensors
from benchmarks.openloop import Target
from benchmarks.soak.verdicts import History, Version
from benchmarks.wire import END, binary_request
from overwinter.api.client import Client

MODELS = ("mlp", "textcnn", "dssm", "lstm", "mobilenet-v2", "minilm", "distilbert", "resnet50")
HANDLED = ("textcnn", "lstm", "minilm")
TENANTS = ("north", "south")
TOKENS = 16
ROWS = 2
"""Different inputs of each function, so that an answer to another request is seen."""
KEEP_ALIVE_S = (0.0, 2.0, 60.0)
TIMEOUT_S = 30.0
STEEPNESS = 3
"""The share of a function among the requests is a random number to this power."""
WHILE_S = 20.0
HANDLER = """
def setup(assets):
    return int(assets["factor"])

def preprocess(inputs, state):
    return dict(inputs)

def postprocess(outputs, inputs, state):
    return {name: tensor * state for name, tensor in outputs.items()}
"""
"""Its answer is wrong with another member's state."""
CHANGES: dict[str, tuple[str, ...]] = {
    "absent": ("deploy",),
    "unloaded": ("load", "load", "deploy", "remove"),
    "present": ("deploy", "deploy", "remove", "unload"),
}
"""What may be done to a function that is so; a deploy of one that is there is an update."""


class Member:
    """One function, whose versions have different heads, and one with a handler a factor of its own."""

    def __init__(self, family: Family, number: int, tenant: str) -> None:
        self.name = f"{family.name}-{number:03}"
        self.tenant = tenant
        self.state: Literal["absent", "present", "unloaded"] = "absent"
        self.history = History()
        self.history.gone.begin()
        self._family = family
        self._handler = HANDLER if family.name in HANDLED else None
        self._factor = number + 2 if self._handler else None
        self._keep_alive_s = KEEP_ALIVE_S[number % len(KEEP_ALIVE_S)]
        self._version = 0

    def targets(self, payload: int) -> list[Target]:
        """How to ask it, with each input; that of the first row is the plan's payload of this number."""
        request = binary_request(self.name, as_tensors(self._family.one()))
        return [Target(request.partition(END)[0] + END, payload + row, b"") for row in range(ROWS)]

    def change(self, what: str, client: Client, variant: int) -> None:
        """Do one of CHANGES; OverwinterError when the node refuses."""
        client = client.speaking_for(self.tenant)
        if what == "deploy":
            self._deploy(client, variant)
        elif what == "remove":
            self._remove(client)
        elif what == "unload":
            self.history.unloaded.begin()
            client.unload(self.name)
            self.state = "unloaded"
        else:
            client.load(self.name)
            self._loaded()

    def _deploy(self, client: Client, variant: int) -> None:
        """Deploy a new version; the one before is removed once it answers."""
        family = self._family
        family.vary(family.head(), variant)
        assets = None if self._factor is None else {"factor": str(self._factor).encode()}
        settings = {"keep_alive_s": self._keep_alive_s, "timeout_s": TIMEOUT_S}
        made = family.packaged(self.name, self._handler, assets=assets, tenant=self.tenant, **settings)
        answers = [family.answer(row, self._factor) for row in range(ROWS)]
        version = Version(tuple(hashlib.sha256(answer).digest() for answer in answers))
        older = list(self.history.versions)
        self.history.versions.append(version)
        version.served.begin()
        try:
            uploaded = made.upload(client)
        except BaseException:
            # It never answers for its name.
            self.history.versions.remove(version)
            raise
        for each in older:
            each.served.end()
        before, self._version = self._version, uploaded.version
        self.state = "present"
        self._loaded()
        if before:
            self.history.gone.begin()
            client.remove(self.name, before)
        self.history.gone.end()

    def _remove(self, client: Client) -> None:
        self.history.gone.begin()
        client.remove(self.name)
        for each in self.history.versions:
            each.served.end()
        self._version = 0
        self.state = "absent"
        self._loaded()

    def _loaded(self) -> None:
        self.state = "present" if self.state == "unloaded" else self.state
        self.history.unloaded.end()


def made(count: int, models: tuple[str, ...], small: bool) -> tuple[list[Member], list[Target], list[bytes]]:
    """The members, of each family as many, and what a plan needs to ask them: ROWS targets each, and the payloads."""
    members: list[Member] = []
    targets: list[Target] = []
    payloads: list[bytes] = []
    for place, model in enumerate(models):
        family = Family(model, tokens=TOKENS, small=small)
        for number in range(place, count, len(models)):
            member = Member(family, number, TENANTS[place % len(TENANTS)])
            members.append(member)
            targets += member.targets(len(payloads))
        requests = [binary_request(model, as_tensors(family.one(row))) for row in range(ROWS)]
        payloads += [request.partition(END)[2] for request in requests]
    return members, targets, payloads


def arrivals(seconds: float, rate: float, members: int, random: Random) -> list[tuple[float, int]]:
    """When which target is asked: `rate` a second altogether, each function at a rate that is drawn anew every while.

    Some are asked often, most seldom, so that some sleep.
    """
    found: list[tuple[float, int]] = []
    at, redraw, weights = random.expovariate(rate), 0.0, [1.0]
    while at < seconds:
        if at >= redraw:
            weights = [random.expovariate(1.0) ** STEEPNESS for _ in range(members)]
            redraw = at + WHILE_S
        member = random.choices(range(members), weights)[0]
        found.append((at, ROWS * member + random.randrange(ROWS)))
        at += random.expovariate(rate)
    return found
