"""Every client that repeats its requests is answered again and again, however scarce resources are, and whatever fails
at times.
"""

from heapq import heappop, heappush
from math import inf
from random import Random

import pytest

from overwinter.core.actions import Reply
from overwinter.core.events import Cancelled, RunEnded, WorkerReady
from overwinter.core.policies import POLICIES
from overwinter.core.profile import Point, Profile
from tests.scheduler.world import World, spec

LOAD_S, WAKE_S, BIND_S, RUN_S, EXIT_S = 0.02, 0.03, 0.002, 0.01, 0.005
LASTS_S = 20.0
FAILING = 0.02
"""The share of operations that fail."""
TIME_SLICE_S = 3.5
"""The longest time without an answer to a waiting client, per function: a hundred wakes, and half a second to change
workers.
"""
SMALL = Profile(weight_bytes=10, macs=1, points=(Point(1, 5, 1, 1, RUN_S),), wake_s=WAKE_S)
MANY = Profile(
    weight_bytes=10,
    macs=1,
    points=tuple(
        Point(cores, 4 * batch + runs, batch, runs, RUN_S * batch * runs / cores)
        for cores in (1, 2)
        for batch in (1, 2, 4)
        for runs in (1, 2)
    ),
    wake_s=WAKE_S,
)
BOUNDS: dict[str, dict[str, list[int]]] = {
    "nothing": {},
    "memory": {"memory_bytes": [20]},
    "workers": {"workers_max": [1, 2]},
    "host bytes": {"host_bytes": [10, 20]},
    "cores": {"cores": [1, 2]},
    "all": {"memory_bytes": [20], "workers_max": [1, 2, 8], "host_bytes": [10, 20, 30], "cores": [1, 2]},
}
"""The possible values of each limit, of which one is drawn."""
SETTINGS = {
    "keep_alive_s": [None, 1.0, 60.0],
    "slo_ms": [None, 50, 200],
    "max_workers": [1, 2],
    "max_batch": [1, 4],
    "concurrency": [1, 2],
    "threads": [1, 2],
    "has_handler": [False, False, False, False, True],
    "profile": [None, SMALL, MANY],
}


class Clients:
    """Each client sends a request to one function, waits for the answer or gives up, pauses, and repeats."""

    def __init__(self, world: World, chance: Random, failing: float) -> None:
        self.world = world
        self.chance = chance
        self.failing = failing
        self.heap: list = []
        self.said = 0
        self.planned: set = set()
        self.asked: dict[int, tuple[str, float]] = {}
        self.answered: dict[str, float] = {}
        self.longest = 0.0

    def after(self, seconds: float, deed, *about) -> None:
        self.said += 1
        heappush(self.heap, (self.world.now + seconds, self.said, deed, about))

    def ask(self, name: str, think_s: float) -> None:
        id_ = self.world.arrive(name)
        self.asked[id_] = (name, think_s)
        if self.chance.random() < 0.05:
            self.after(self.chance.random() * 0.3, self.give_up, id_)

    def give_up(self, id_: int) -> None:
        if id_ in self.asked and id_ not in self.world.answers:
            self.world.send(Cancelled(id_))
            self.after(0.01, self.ask, *self.asked.pop(id_))

    def ready(self, worker: int) -> None:
        if self.world.starting.pop(worker, None):
            self.world.send(WorkerReady(worker))

    def end(self, number: int) -> None:
        run = self.world.running.pop(number, None)
        if run is not None:
            self.world.send(RunEnded(run.worker, run.run))

    def bind(self, operation: int) -> None:
        at = [bind.operation for bind in self.world.binding]
        if operation in at:
            self.world.bind(at.index(operation))

    def load_blocks(self) -> None:
        if self.fails():
            self.world.fail_load()
        else:
            self.world.load_blocks()

    def fails(self) -> bool:
        return self.chance.random() < self.failing

    def exit(self, worker: int) -> None:
        if worker in self.world.alive:
            self.world.die(worker)

    def plan(self) -> None:
        """Plan the ends of the operations in progress, and read the answers."""
        world = self.world
        for kind, seconds, deed, workers in (
            ("start", WAKE_S, self.ready, {worker: worker for worker in world.starting}),
            ("bind", BIND_S, self.bind, {bind.operation: bind.worker for bind in world.binding}),
            ("run", RUN_S, self.end, {number: run.worker for number, run in world.running.items()}),
            ("stop", EXIT_S, self.exit, {worker: worker for worker in world.stopping}),
        ):
            for number in [number for number in workers if (kind, number) not in self.planned]:
                self.planned.add((kind, number))
                self.after(seconds, deed, number)
                if self.fails():
                    self.after(seconds / 2, self.exit, workers[number])
        for _ in range(len(world.loads) - sum(deed == self.load_blocks for _, _, deed, _ in self.heap)):
            self.after(LOAD_S, self.load_blocks)
        for id_ in [id_ for id_ in self.asked if id_ in world.answers]:
            name, think_s = self.asked.pop(id_)
            if isinstance(world.answers[id_], Reply):
                self.longest = max(self.longest, world.now - self.answered[name])
                self.answered[name] = world.now
            self.after(think_s, self.ask, name, think_s)

    def run(self) -> None:
        while self.world.now < LASTS_S:
            self.plan()
            at = self.heap[0][0] if self.heap else inf
            if self.world.alarm is not None and self.world.alarm <= at:
                self.world.ring()
                continue
            _, _, deed, about = heappop(self.heap)
            self.world.now = max(self.world.now, at)
            deed(*about)
        self.longest = max(self.longest, *(self.world.now - at for at in self.answered.values()))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_function_with_repeated_requests_starves(policy, bound):
    chance = Random(f"{policy} {bound}")
    functions = chance.randint(2, 3)
    family, failing = chance.choice(["", "one"]), chance.choice([0.0, FAILING])
    world = World(policy=policy, **{limit: chance.choice(choices) for limit, choices in BOUNDS[bound].items()})
    clients = Clients(world, chance, failing)
    for name in "abc"[:functions]:
        drawn = {setting: chance.choice(choices) for setting, choices in SETTINGS.items()}
        # Functions with equal settings form a family.
        whose = family and f"{family}-{drawn['max_batch']}-{drawn['concurrency']}-{drawn['threads']}"
        whose = whose and f"{whose}{'-s' if drawn['has_handler'] else ''}"
        world.deploy(spec(name, blobs=((name, 10),), timeout_s=60.0, family=whose, **drawn))
        clients.answered[name] = 0.0
        think_s = chance.choice([0.001, 0.02, 0.2])
        for _ in range(chance.choice([1, 1, 2])):
            clients.after(chance.random(), clients.ask, name, think_s)
    clients.run()
    # A load that fails costs its function a time slice: others come before it again.
    turns = 2 if failing else 1
    assert clients.longest < turns * TIME_SLICE_S * functions
