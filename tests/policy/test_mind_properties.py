"""Whatever happens in whatever order: every request gets exactly one answer, and the tables agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from overwinter.core.actions import Prepare, Run
from overwinter.core.events import (
    Cancelled,
    Foretold,
    LoadAsked,
    Pressed,
    Profiled,
    Removed,
    StageFailed,
    UnloadAsked,
    ZygoteLost,
)
from overwinter.core.policies import POLICIES
from overwinter.core.profile import Point, Profile
from overwinter.policy.mind import Mind

from .world import World, spec

NAMES = ("f", "g", "h")
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
)


class AnyOrder(RuleBasedStateMachine):
    """Draws what happens next: good news, bad news, time."""

    def __init__(self):
        super().__init__()
        self.versions = dict.fromkeys(NAMES, 0)
        self.cancelled = set()

    @initialize(
        bodies=st.integers(1, 4),
        policy=st.sampled_from(sorted(POLICIES)),
        host=st.sampled_from([None, 12, 19, 30]),
        memory=st.sampled_from([None, 9]),
        window=st.sampled_from([None, 5.0]),
    )
    def begin(self, bodies, policy, host, memory, window):
        self.world = World(
            bodies_max=bodies,
            backoff_max_s=2.0,
            policy=policy,
            cores=2,
            host_bytes=host,
            memory_bytes=memory,
            host_keep_alive_s=window,
        )

    @rule(
        name=st.sampled_from(NAMES),
        on_trial=st.booleans(),
        batch=st.integers(1, 3),
        bodies=st.integers(1, 3),
        keep=st.sampled_from([0.0, 1.0, 60.0]),
        limit=st.integers(1, 4),
        slo=st.sampled_from([None, 50.0, 500.0]),
        late=st.sampled_from(["serve", "refuse"]),
        runs=st.integers(1, 2),
        own=st.sampled_from([{}, {"pinned": True}, {"dedicated": True}, {"sandboxed": True}]),
        profile=st.sampled_from(PROFILES),
    )
    def deploy(self, name, on_trial, batch, bodies, keep, limit, slo, late, runs, own, profile):
        self.versions[name] += 1
        blobs = (("shared", 5), (f"{name}{self.versions[name]}", 7))
        settings = {"max_batch": batch, "max_bodies": bodies, "keep_alive_s": keep, "queue_limit": limit}
        settings |= {"slo_ms": slo, "late": late, "concurrency": runs, "threads": 2, **own}
        function = spec(name, self.versions[name], blobs, profile=profile, timeout_s=20.0, **settings)
        self.world.deploy(function, on_trial)

    @rule(name=st.sampled_from(NAMES), wait=st.sampled_from([None, 0.5, 5.0]), priority=st.integers(0, 2))
    def arrive(self, name, wait, priority):
        self.world.arrive(name, deadline=None if wait is None else self.world.now + wait, priority=priority)

    @rule(name=st.sampled_from(NAMES), profile=st.sampled_from(PROFILES[1:]), rate=st.sampled_from([0.0, 3.0, 1e9]))
    def learn(self, name, profile, rate):
        function = f"{name}@{max(1, self.versions[name])}"
        self.world.send(Profiled(function, profile))
        self.world.send(Foretold(function, rate))

    @rule(nbytes=st.integers(1, 40))
    def pressed(self, nbytes):
        self.world.send(Pressed(nbytes))

    @rule(data=st.data())
    def cancel(self, data):
        open_ = sorted(set(range(1, self.world.next_request + 1)) - set(self.world.answers) - self.cancelled)
        if open_:
            request = data.draw(st.sampled_from(open_))
            self.cancelled.add(request)
            self.world.send(Cancelled(request))

    @precondition(lambda self: self.world.staging)
    @rule(fails=st.booleans(), added=st.sampled_from([0, 9]))
    def staged(self, fails, added):
        if fails:
            function = self.world.staging.pop(0)
            addresses = self.world.blobs[function]
            self.world.resident.add(addresses[0])
            self.world.send(StageFailed(function, "NoSpaceError", "full", addresses))
        else:
            self.world.stage(added)

    @precondition(lambda self: self.world.starting)
    @rule()
    def ready(self):
        self.world.ready()

    @precondition(lambda self: self.world.running)
    @rule(fails=st.booleans())
    def finish(self, fails):
        run = next(iter(self.world.running.values()))
        self.world.finish(run.requests[:1] if fails else ())

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), lost=st.booleans())
    def die(self, data, lost):
        self.world.die(data.draw(st.sampled_from(sorted(self.world.alive))), lost_blocks=lost)

    @precondition(lambda self: self.world.alarm is not None)
    @rule()
    def ring(self):
        self.world.ring()

    @rule(name=st.sampled_from(NAMES), event=st.sampled_from([LoadAsked, UnloadAsked, Removed]), data=st.data())
    def manage(self, name, event, data):
        version = data.draw(st.integers(1, max(1, self.versions[name])))
        self.world.send(event(f"{name}@{version}"))

    @rule()
    def zygote_lost(self):
        self.world.send(ZygoteLost())

    def teardown(self):
        """From any point on, if all goes well, every request is answered, everyone sleeps, and nothing is kept."""
        world = getattr(self, "world", None)
        if world is None:
            return
        for function in list(world.mind.state.functions):
            world.send(Foretold(function, 0.0))
        for _ in range(10_000):
            world.settle()
            if world.alarm is None:
                break
            world.ring()
        expected = set(range(1, world.next_request + 1)) - self.cancelled
        assert expected <= set(world.answers)
        assert not world.mind.state.requests
        assert not world.mind.state.bodies
        assert not world.mind.state.wants_room
        assert not world.mind.state.wants_more
        assert not world.mind.state.wants_core
        assert not world.mind.state.late
        assert not world.mind.state.wants_bytes
        needed = {blob.address for f in world.mind.state.functions.values() for blob in f.spec.blobs}
        assert world.resident <= needed, "blocks are kept that no function needs"
        assert {f.state for f in world.mind.state.functions.values()} <= {"asleep", "unloaded"}


AnyOrder.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_the_same_events_give_the_same_actions():
    def script():
        world = World()
        world.deploy(spec(max_batch=2, max_bodies=2))
        for _ in range(5):
            world.arrive()
        world.stage()
        world.ready()
        world.die()
        while world.alarm is not None:
            world.ring()
            world.settle()
        return world.log

    first = script()
    assert first == script()
    assert any(isinstance(action, Run) for action in first)
    assert any(isinstance(action, Prepare) for action in first)
    assert isinstance(World().mind, Mind)
