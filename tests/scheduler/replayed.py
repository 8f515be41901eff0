"""One long random sequence of events, the same for the same seed; as a program it prints every action of a scheduler.

For comparison between processes, and between schedulers (benchmarks/decisions.py).
"""

import sys
from random import Random

import msgspec

from overwinter.core.events import Cancelled, LoadAsked, MemoryMeasured, Pressed, Profiled, Removed, UnloadAsked
from overwinter.core.profile import Point, Profile
from tests.scheduler.world import World, spec

STEPS = 1500
NAMES = tuple("abcdefgh")
POINTS = tuple(Point(cores, 4 * batch, batch, 1, 0.1 * batch / cores) for cores in (1, 2) for batch in (1, 2, 4))


def deploy(world: World, chance: Random, number: int) -> None:
    name = NAMES[number] if number < len(NAMES) else chance.choice(NAMES)
    blobs = [(f"shared{chance.randrange(4)}", 5), (f"{name}-x", 7), (f"{name}-y", 3)]
    own: dict = dict(chance.choice([{}, {}, {"dedicated": True}, {"pinned": True}]))
    profile = chance.choice([None, Profile(weight_bytes=15, macs=100, points=POINTS)])
    slo_ms = chance.choice([None, 500.0])
    own["tenant"] = "t" if name in "abcde" else "u"
    world.deploy(spec(name, number, blobs, profile=profile, max_batch=4, max_bodies=2, slo_ms=slo_ms, **own))


def manage(world: World, chance: Random, kind: float) -> None:
    """What happens seldom: somebody changes what is there, goes away, or something fails."""
    if kind < 0.06 or not world.deployed:
        event = chance.choice([LoadAsked, UnloadAsked, LoadAsked, Removed])
        world.send(event(chance.choice(sorted(world.deployed))) if world.deployed else Pressed(5))
    elif kind < 0.08 and world.open:
        request = chance.choice(sorted(world.open))
        del world.open[request]
        world.send(Cancelled(request))
    elif kind < 0.09 and world.staging:
        world.fail_stage(came=world.blobs[world.staging[0].function][:1])
    else:
        world.send(Profiled(chance.choice(sorted(world.deployed)), Profile(weight_bytes=15, macs=100, points=POINTS)))


def step(world: World, chance: Random, number: int) -> None:
    kind = chance.random()
    if kind < 0.02 or number < len(NAMES):
        deploy(world, chance, number)
    elif kind < 0.1:
        manage(world, chance, kind)
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


def play(world: World, chance: Random, steps: int) -> None:
    """So many random steps."""
    for number in range(steps):
        step(world, chance, number)


def main(policy: str) -> None:
    world = World(policy=policy, cores=2, bodies_max=4, host_bytes=60, memory_bytes=40)
    play(world, Random(1), STEPS)
    sys.stdout.buffer.write(msgspec.json.encode(world.log))


if __name__ == "__main__":
    main(sys.argv[1])
