"""Whatever happens in whatever order: every request gets exactly one answer, and the tables agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from overwinter.core.actions import Prepare, Run
from overwinter.core.events import Cancelled, LoadAsked, Removed, StageFailed, UnloadAsked, ZygoteLost
from overwinter.policy.mind import Mind

from .world import World, spec

NAMES = ("f", "g", "h")


class AnyOrder(RuleBasedStateMachine):
    """Draws what happens next: good news, bad news, time."""

    def __init__(self):
        super().__init__()
        self.versions = dict.fromkeys(NAMES, 0)
        self.cancelled = set()

    @initialize(bodies=st.integers(1, 4))
    def begin(self, bodies):
        self.world = World(bodies_max=bodies, backoff_max_s=2.0)

    @rule(
        name=st.sampled_from(NAMES),
        on_trial=st.booleans(),
        batch=st.integers(1, 3),
        bodies=st.integers(1, 3),
        keep=st.sampled_from([0.0, 1.0, 60.0]),
        limit=st.integers(1, 4),
    )
    def deploy(self, name, on_trial, batch, bodies, keep, limit):
        self.versions[name] += 1
        blobs = (("shared", 5), (f"{name}{self.versions[name]}", 7))
        settings = {"max_batch": batch, "max_bodies": bodies, "keep_alive_s": keep, "queue_limit": limit}
        self.world.deploy(spec(name, self.versions[name], blobs, timeout_s=20.0, **settings), on_trial)

    @rule(name=st.sampled_from(NAMES), wait=st.sampled_from([None, 0.5, 5.0]))
    def arrive(self, name, wait):
        self.world.arrive(name, deadline=None if wait is None else self.world.now + wait)

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
