"""A long random sequence of events, equal for equal seeds.

As a program it prints every action of a scheduler under each named policy, so that a test can compare processes.
"""

import sys
from random import Random

import msgspec

from overwinter.core.devices import DeviceConfig
from overwinter.core.events import (
    Cancelled,
    Demoted,
    LoadAsked,
    MemoryMeasured,
    MemoryPressure,
    Profiled,
    Removed,
    UnloadAsked,
    ZygoteLost,
)
from overwinter.core.profile import Point, Profile
from tests.scheduler.world import World, spec

STEPS = 800
NAMES = tuple("abcdefgh")
FAMILIES = {"a": "one", "b": "one", "c": "one", "f": "two", "g": "two"}
"""The other functions share workers with no function."""
IN_WORKERS = "ae"
"""The functions that run only in workers if there are devices."""
EITHER = "bd"
"""Those that run in workers or on devices."""
CUT = "dh"
"""Those whose programs run on devices in slices."""
TOGETHER = "abcabc"
"""Functions that sometimes get requests at the same time."""
TIMEOUT_S = 500.0
POINTS = tuple(
    Point(cores, 4 + batch, batch, 1, 0.1 * (1 + 0.1 * batch) / cores) for cores in (1, 2) for batch in (1, 2, 4)
)
PROFILE = Profile(weight_bytes=15, macs=100, points=POINTS)
LEAST_MEMORY = 5
"""The memory of the smallest profiled worker."""
BOUNDS: dict[str, dict[str, int]] = {
    "nothing": {},
    "memory": {"memory_bytes": 40},
    "host bytes": {"host_bytes": 40},
    "workers": {"workers_max": 4},
    "cores": {"cores": 2},
}
BOUNDS["all"] = {name: value for bounds in BOUNDS.values() for name, value in bounds.items()}


def deploy(world: World, chance: Random, number: int) -> None:
    name = NAMES[number] if number < len(NAMES) else chance.choice(NAMES)
    family = FAMILIES.get(name, "")
    blobs = [(f"shared{chance.randrange(4)}", 5), (f"{name}-x", 7), (f"{name}-y", 3)]
    own: dict = dict(chance.choice([{}, {}, {"dedicated": True}, {"pinned": True}]))
    profile, most = chance.choice([None, PROFILE]), 2
    if family:
        # Functions with retrained heads of one trunk and equal settings of workers.
        blobs, own, profile, most = [(f"trunk-of-{family}", 12), (f"{name}{number}", 3)], {}, PROFILE, 1
    own |= {"slo_ms": chance.choice([None, 500.0]), "late": chance.choice(["serve", "serve", "refuse"])}
    own["keep_alive_s"] = chance.choice([None, None, 0.0, 5.0])
    own["tenant"] = "t" if name in "abcde" else "u"
    if world.devices.configs and name not in IN_WORKERS:
        own["device"] = "any" if name in EITHER else "pool"
    made = spec(
        name, number, blobs, profile=profile, family=family, max_batch=4, max_workers=most, timeout_s=TIMEOUT_S, **own
    )
    on_trial = chance.random() < 0.2
    world.deploy(made, on_trial, cut=bool(world.devices.configs) and name in CUT)


def manage(world: World, chance: Random, kind: float) -> None:
    """Send a rare event, such as a removal, a cancellation, a failure or a profile."""
    if kind < 0.04 or not world.deployed:
        event = chance.choice([LoadAsked, UnloadAsked, LoadAsked, Removed])
        if world.deployed:
            world.manage(event(chance.choice(sorted(world.deployed))))
        else:
            world.send(MemoryPressure(5))
    elif kind < 0.06 and world.open:
        request = chance.choice(sorted(world.open))
        del world.open[request]
        world.send(Cancelled(request))
    elif kind < 0.08 and world.loads:
        world.fail_load(came=world.blobs[world.loads[0].function][:1])
    elif kind < 0.085 and world.binding:
        world.fail_bind(lost_blocks=chance.random() < 0.5)
    elif kind < 0.09 and (awake := sorted(world.alive - set(world.starting))):
        world.send(Demoted(chance.choice(awake)))
    elif kind < 0.092:
        world.send(ZygoteLost())
    else:
        world.send(Profiled(chance.choice(sorted(world.deployed)), PROFILE))


def step(world: World, chance: Random, number: int) -> None:  # noqa: C901
    kind = chance.random()
    if kind < 0.015 or number < len(NAMES):
        deploy(world, chance, number)
    elif kind < 0.1:
        manage(world, chance, kind)
    elif kind < 0.4:
        world.arrive(chance.choice(NAMES), priority=chance.choice([0, 0, 0, 1]))
    elif kind < 0.45:
        for name in TOGETHER:
            world.arrive(name)
    elif kind < 0.47:
        world.send(MemoryPressure(chance.randrange(40)))
        world.send(MemoryMeasured(tuple((worker, chance.randrange(40)) for worker in sorted(world.alive))))
    elif world.running and kind < 0.65:
        world.finish(() if chance.random() < 0.95 else next(iter(world.running.values())).requests[:1])
    elif world.alive and kind < 0.656:
        world.die(chance.choice(sorted(world.alive)), lost_blocks=kind < 0.652)
    elif world.devices.executors and kind < 0.75:
        on_devices(world, chance, kind)
    elif world.alarm is not None and kind < 0.8:
        world.ring()
    else:
        advance(world, chance)


def on_devices(world: World, chance: Random, kind: float) -> None:
    if kind < 0.66:
        world.die(chance.choice(sorted(world.devices.executors)), lost_blocks=kind < 0.657)
    elif world.devices.preparing and kind < 0.68:
        world.end_preparation(interrupted=kind < 0.665)
    elif world.devices.running:
        world.finish_on_device(unplaced=kind < 0.67)
    else:
        advance(world, chance)


def advance(world: World, chance: Random) -> None:
    """Complete one of the operations in progress, or all of them."""
    ways = [
        *([world.load_blocks] if world.loads else []),
        *([world.ready] if world.starting else []),
        *([world.bind] if world.binding else []),
        *([lambda: world.die(min(world.stopping))] if world.stopping else []),
        world.settle_processes,
    ]
    chance.choice(ways)()


def play(world: World, chance: Random, steps: int, first: int = 0) -> None:
    """Play this many random steps; `first` is the number of steps before, because no version is deployed twice."""
    for number in range(first, first + steps):
        step(world, chance, number)


def actions(policy: str, steps: int) -> list:
    """Return the actions under a policy with all resources scarce, then with few workers; "devices": on two devices."""
    if policy == "devices":
        world = World(devices=tuple(DeviceConfig(name=f"virtual:{n}", memory_bytes=1 << 20) for n in range(2)))
        play(world, Random(1), steps)
        return world.log
    log = []
    for bound in ("all", "workers"):
        world = World(policy=policy, **BOUNDS[bound])
        play(world, Random(1), steps // 2)
        log += world.log
    return log


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode([actions(policy, int(sys.argv[1])) for policy in sys.argv[2:]]))
