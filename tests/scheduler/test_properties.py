"""For any order of events, every request gets exactly one answer, in time."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import ClassVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from overwinter.core.actions import Explanation, Run
from overwinter.core.events import (
    Cancelled,
    Demoted,
    LoadAsked,
    MemoryMeasured,
    MemoryPressure,
    Profiled,
    RateForecast,
    Removed,
    TrafficSet,
    UnloadAsked,
    ZygoteLost,
)
from overwinter.core.policies import POLICIES, policy_named
from overwinter.core.profile import Point, Profile
from overwinter.core.versions import Share
from overwinter.scheduler import ahead
from tests.scheduler import replayed
from tests.scheduler.world import World, spec

NAMES = ("f", "g", "h")
TIMEOUT_S = 200.0
"""Longer than any request takes that goes well: a request that times out was forgotten."""
SOON_S = 50.0
FEW_STEPS = 160
"""The number of steps of a replay under every policy."""
PROFILES = (
    None,
    Profile(weight_bytes=12, macs=100),
    Profile(
        weight_bytes=12,
        macs=100,
        points=tuple(
            Point(cores, 3 + batch, batch, runs, 0.1 * batch * runs / cores)
            for cores in (1, 2)
            for batch in (1, 2)
            for runs in (1, 2)
        ),
    ),
    Profile(weight_bytes=12, macs=100, points=(Point(1, 10, 1, 1, 0.1),)),
)


class AnyOrder(RuleBasedStateMachine):
    """Draws the next event: success, failure, outdated events, time."""

    policy: str | None = None
    """Drawn, if it is None."""
    profiles: tuple[Profile | None, ...] = PROFILES
    bounds: ClassVar[dict] = {}
    """Further fields of the configuration."""
    families: tuple[str, ...] = ("",)
    """The families that a function may belong to."""
    kinds: tuple[str, ...] = ("cpu",)
    """Where a function may run."""
    tenants: ClassVar[dict[str, str]] = {}
    """The tenants of functions that do not belong to `t`."""
    soon_s = SOON_S
    """In the end no request expires whose deadline is further away than this."""
    reuses_ids = True
    """Whether a function may be deployed under an id that another one has."""

    def __init__(self):
        super().__init__()
        self.versions = dict.fromkeys(NAMES, 0)

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        workers=st.sampled_from([None, 1, 2, 3, 4]),
        host=st.sampled_from([None, 11, 12, 19, 30]),
        memory=st.sampled_from([None, 9, 20]),
        cores=st.sampled_from([None, 1, 2]),
        window=st.sampled_from([None, 5.0]),
    )
    def begin(self, policy, workers, host, memory, cores, window):
        self.world = World(
            workers_max=workers,
            backoff_max_s=2.0,
            policy=self.policy or policy,
            cores=cores,
            host_bytes=host,
            memory_bytes=memory,
            host_keep_alive_s=window,
            **self.bounds,
        )

    @rule(
        name=st.sampled_from(NAMES),
        on_trial=st.booleans(),
        again=st.sampled_from([False, False, False, True]),
        batch=st.integers(1, 3),
        workers=st.integers(1, 3),
        keep=st.sampled_from([None, 0.0, 1.0, 60.0]),
        limit=st.integers(1, 4),
        slo=st.sampled_from([None, 50.0, 500.0]),
        late=st.sampled_from(["serve", "refuse"]),
        runs=st.integers(1, 2),
        own=st.sampled_from([{}, {"pinned": True}, {"dedicated": True}, {"has_handler": True}]),
        profile=st.integers(0, len(PROFILES) - 1),
        family=st.integers(0, 7),
        kind=st.integers(0, 3),
    )
    def deploy(self, name, on_trial, again, batch, workers, keep, limit, slo, late, runs, own, profile, family, kind):
        known = self.world.deployed.keys() - self.world.loading
        if not (again and self.reuses_ids and f"{name}@{self.versions[name]}" in known):
            self.versions[name] += 1
        blobs = (("shared", 5), (f"{name}{self.versions[name]}", 7))
        settings = {"max_batch": batch, "max_workers": workers, "keep_alive_s": keep, "queue_limit": limit}
        settings |= {"slo_ms": slo, "late": late, "concurrency": runs, "threads": 2, "timeout_s": TIMEOUT_S, **own}
        whose = self.families[family % len(self.families)]
        if whose:
            # They have equal settings, because the settings of workers are part of what defines a family.
            blobs = ((f"shared-by-{whose}", 7), (f"{name}{self.versions[name]}", 5))
            settings |= {"max_batch": 2, "concurrency": runs, "dedicated": False}
            whose = f"{whose}{runs}{'s' if own.get('has_handler') else ''}"
        settings |= {"device": self.kinds[kind % len(self.kinds)], "tenant": self.tenants.get(name, "t")}
        made = spec(name, self.versions[name], blobs, profile=self.profiles[profile], family=whose, **settings)
        self.world.deploy(made, on_trial)

    @rule(name=st.sampled_from(NAMES), shares=st.sampled_from([(), ((1, 100),), ((1, 90), (2, 10)), ((2, 1), (3, 99))]))
    def set_traffic(self, name, shares):
        self.world.send(TrafficSet(name, tuple(Share(*share) for share in shares)))

    @rule(name=st.sampled_from(NAMES), wait=st.sampled_from([None, 0.5, 5.0]), priority=st.integers(0, 2))
    def arrive(self, name, wait, priority):
        self.world.arrive(name, deadline=None if wait is None else self.world.now + wait, priority=priority)

    @rule(name=st.sampled_from(NAMES), profile=st.integers(1, len(PROFILES) - 1), rate=st.sampled_from([0.0, 3.0, 1e9]))
    def learn(self, name, profile, rate):
        function = f"{name}@{max(1, self.versions[name])}"
        self.world.send(Profiled(function, self.profiles[profile]))
        self.world.send(RateForecast(function, rate))

    @rule(nbytes=st.integers(1, 40))
    def pressed(self, nbytes):
        self.world.send(MemoryPressure(nbytes))

    @rule(data=st.data())
    def measured(self, data):
        """Report the memory of workers, ended ones included: within their need, somewhat beyond it, far beyond it."""
        known = sorted({*self.world.alive, 1})
        taken = st.tuples(st.sampled_from(known), st.sampled_from([0, 2, 5, 14, 1 << 30]))
        self.world.send(MemoryMeasured(tuple(data.draw(st.lists(taken, max_size=3)))))

    @rule(data=st.data())
    def cancel(self, data):
        if self.world.open:
            request = data.draw(st.sampled_from(sorted(self.world.open)))
            del self.world.open[request]
            self.world.send(Cancelled(request))

    @precondition(lambda self: self.world.loads)
    @rule(fails=st.booleans(), added=st.sampled_from([0, 9]), last=st.booleans())
    def loaded(self, fails, added, last):
        at = -1 if last else 0
        if fails:
            self.world.fail_load(came=self.world.blobs[self.world.loads[at].function][:1], at=at)
        else:
            self.world.load_blocks(added, at)

    @precondition(lambda self: self.world.starting)
    @rule()
    def ready(self):
        self.world.ready()

    @precondition(lambda self: self.world.binding)
    @rule(fails=st.sampled_from([False, False, True]), lost=st.booleans(), last=st.booleans())
    def bind(self, fails, lost, last):
        if fails:
            self.world.fail_bind(-1 if last else 0, lost)
        else:
            self.world.bind(-1 if last else 0)

    @precondition(lambda self: self.world.running)
    @rule(fails=st.booleans())
    def finish(self, fails):
        run = next(iter(self.world.running.values()))
        self.world.finish(run.requests[:1] if fails else ())

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), lost=st.booleans())
    def die(self, data, lost):
        self.world.die(data.draw(st.sampled_from(sorted(self.world.alive))), lost_blocks=lost)

    @precondition(lambda self: self.world.alive - set(self.world.starting))
    @rule(data=st.data())
    def demoted(self, data):
        self.world.send(Demoted(data.draw(st.sampled_from(sorted(self.world.alive - set(self.world.starting))))))

    @precondition(lambda self: self.world.alarm is not None)
    @rule()
    def ring(self):
        self.world.ring()

    @rule(
        name=st.sampled_from(NAMES), event=st.sampled_from([LoadAsked, LoadAsked, UnloadAsked, Removed]), data=st.data()
    )
    def manage(self, name, event, data):
        version = data.draw(st.integers(1, max(1, self.versions[name])))
        self.world.manage(event(f"{name}@{version}"))

    @rule()
    def zygote_lost(self):
        self.world.send(ZygoteLost())

    def teardown(self):
        """From any state on, if everything succeeds, every request is answered, every function can be served, every
        worker becomes idle and can be evicted.
        """
        world = getattr(self, "world", None)
        if world is None or sys.exc_info()[0] is not None:
            return
        world.end_well(NAMES, self.soon_s)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_request_is_forgotten_in_any_order_of_events(policy):
    machine = type("AnyOrder", (AnyOrder,), {"policy": policy})
    examples = settings(max_examples=8, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=examples)


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.binds])
def test_no_request_is_forgotten_in_families(policy):
    machine = type("Families", (AnyOrder,), {"policy": policy, "families": ("one", "one", "two", "")})
    examples = settings(max_examples=15, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(machine, settings=examples)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_request_is_forgotten_with_workers_forked_ahead(policy, monkeypatch):
    # Smaller than every profiled worker, so that bounded memory suffices for a few.
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 3)
    bounds = {"bounds": {"workers_ahead": 2}, "families": ("", "one")}
    machine = type("Ahead", (AnyOrder,), {"policy": policy, **bounds})
    examples = settings(max_examples=8, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=examples)


class Seen(World):
    """Records the results of random events, by name."""

    def __init__(self, **config):
        super().__init__(**config)
        self.seen: set[str] = set()

    def send(self, event):
        actions = super().send(event)
        self.seen |= {type(action).__name__ for action in actions}
        self.seen |= {"shared Run" for action in actions if isinstance(action, Run) and action.functions}
        self.seen |= {action.what for action in actions if isinstance(action, Explanation)}
        self.seen |= {
            f"waits for {function.waits_in}" for function in self.state.functions.values() if function.waits_in
        }
        if self.resources.memory.free < replayed.LEAST_MEMORY:
            self.seen.add("memory is full")
        return actions


WAITS = {
    "nothing": set(),
    "memory": {"waits for capacity", "memory is full", "Evict"},
    "host bytes": {"waits for bytes", "Drop"},
    "workers": {"waits for capacity"},
    "cores": {"waits for cores"},
}
"""What must occur under each bound; otherwise the bound has no effect."""


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_request_is_forgotten_under_any_bound(policy):
    rules, seen = policy_named(policy), set()
    for bound, bounds in replayed.BOUNDS.items():
        world = Seen(policy=policy, **bounds)
        replayed.play(world, Random(f"{policy} {bound}"), 400 if rules.joins else 150)
        world.end_well(replayed.NAMES, SOON_S)
        assert WAITS.get(bound, set()) - ({"waits for cores"} if rules.order == "any" else set()) <= world.seen
        seen |= world.seen
    assert ("Bind" in seen, "Unbind" in seen, "shared Run" in seen) == (rules.binds, rules.binds, rules.joins)


@pytest.mark.parametrize("seed", [2716, 4088])
def test_no_request_is_forgotten_when_all_resources_are_scarce(seed):
    """In these runs, other workers of a tenant change whether one of its workers may be stopped for another tenant."""
    world = World(policy="overwinter", cores=2, workers_max=4, host_bytes=60, memory_bytes=40)
    replayed.play(world, Random(seed), 200)
    world.end_well(replayed.NAMES, SOON_S)


def journal_of(seed: str, steps: int, *policies: str) -> bytes:
    """Return the actions of a scheduler under each of these policies, in a separate process: within one, sets of
    strings keep their order.
    """
    return subprocess.run(
        [sys.executable, "-m", "tests.scheduler.replayed", str(steps), *policies],
        env=os.environ | {"PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(("policy", "binds"), [("overwinter", True), ("infless", False)])
def test_the_same_events_give_the_same_actions_whatever_the_hash_seed(policy, binds):
    [logs] = {journal_of(seed, replayed.STEPS, policy) for seed in ("0", "1", "2")}
    [actions] = msgspec.json.decode(logs)
    wanted = {"Run", "Drop", "Prepare", "LoadFinished", "Refuse", "Explanation"} | (
        {"Bind", "Unbind"} if binds else set()
    )
    assert wanted <= {action["type"] for action in actions}
    assert binds == any(action.get("functions") for action in actions)


def test_under_every_policy_the_same_events_give_the_same_actions_whatever_the_hash_seed():
    [logs] = {journal_of(seed, FEW_STEPS, *POLICIES) for seed in ("0", "1")}
    for actions in msgspec.json.decode(logs):
        assert {"Run", "StopWorker", "Drop", "Refuse"} <= {action["type"] for action in actions}
