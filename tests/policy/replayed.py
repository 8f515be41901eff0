"""Prints every action of a mind over one long random sequence of events: for comparison between processes."""

import sys
from random import Random

import msgspec

from overwinter.core.events import LoadAsked, MemoryMeasured, Pressed, Removed, UnloadAsked
from overwinter.core.profile import Point, Profile
from tests.policy.world import World, spec

STEPS = 1500
NAMES = tuple("abcdefgh")
POINTS = tuple(Point(cores, 4 * batch, batch, 1, 0.1 * batch / cores) for cores in (1, 2) for batch in (1, 2, 4))


def deploy(world: World, chance: Random, number: int) -> None:
    name = chance.choice(NAMES)
    blobs = [(f"shared{chance.randrange(4)}", 5), (f"{name}-x", 7), (f"{name}-y", 3)]
    own: dict = dict(chance.choice([{}, {}, {"dedicated": True}, {"pinned": True}]))
    profile = chance.choice([None, Profile(weight_bytes=15, macs=100, points=POINTS)])
    slo_ms = chance.choice([None, 500.0])
    own["tenant"] = "t" if name in "abcde" else "u"
    world.deploy(spec(name, number, blobs, profile=profile, max_batch=4, max_bodies=2, slo_ms=slo_ms, **own))


def step(world: World, chance: Random, number: int) -> None:
    kind = chance.random()
    if kind < 0.02 or number < 4:
        deploy(world, chance, number)
    elif kind < 0.06:
        event = chance.choice([LoadAsked, UnloadAsked, LoadAsked, Removed])
        world.send(event(chance.choice(sorted(world.deployed))) if world.deployed else Pressed(5))
    elif kind < 0.5:
        world.arrive(chance.choice(NAMES))
    elif kind < 0.52:
        world.send(Pressed(chance.randrange(40)))
        world.send(MemoryMeasured(tuple((worker, chance.randrange(40)) for worker in sorted(world.alive))))
    elif world.running and kind < 0.65:
        world.finish()
    elif world.alive and kind < 0.67:
        world.die(chance.choice(sorted(world.alive)), lost_blocks=kind < 0.655)
    elif world.alarm is not None and kind < 0.8:
        world.ring()
    else:
        world.settle_processes()


def main(policy: str) -> None:
    world = World(policy=policy, cores=2, bodies_max=4, host_bytes=60, memory_bytes=40)
    chance = Random(1)
    for number in range(STEPS):
        step(world, chance, number)
    sys.stdout.buffer.write(msgspec.json.encode(world.log))


if __name__ == "__main__":
    main(sys.argv[1])
