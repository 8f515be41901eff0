"""Functions of one family share runs: which requests join, in what order, and what a failure affects."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.actions import Bind, Explanation, Refuse, Reply, Run
from overwinter.core.events import Cancelled, Removed, UnloadAsked
from overwinter.core.policies import Policy
from overwinter.core.profile import Point, Profile
from overwinter.scheduler import admission, shared_runs
from overwinter.scheduler.sharing_costs import TRY_OTHER_LAST
from tests.scheduler.world import World, spec


def member(name, blobs=None, **settings):
    settings.setdefault("max_batch", 4)
    return spec(name, 1, blobs or (("trunk", 20), (f"head-of-{name}", 5)), family="one", **settings)


def family(*members, world=World, **config) -> World:
    """Return a world with functions of one family that are bound in one worker."""
    world = world(**config)
    for each in members:
        world.deploy(each)
    for each in members:
        world.arrive(each.name)
        world.settle()
    return world


def running(world) -> list[tuple[str, ...]]:
    """Return the functions of the requests of each run."""
    return [
        run.functions or (run.function or world.forked_for[run.worker],) * len(run.requests)
        for run in world.running.values()
    ]


def busy(world, name="f"):
    """Start a run in the function's worker, so that the next requests wait."""
    world.arrive(name)
    assert len(world.running) == 1


def test_requests_of_siblings_that_wait_share_a_run_and_each_gets_its_answer():
    world = family(member("f"), member("g"), member("h"))
    busy(world)
    requests = {world.arrive(name): f"{name}@1" for name in ("g", "h", "f")}
    world.finish()
    assert running(world) == [("g@1", "h@1", "f@1")]
    assert [list(run.requests) for run in world.running.values()] == [list(requests)]
    world.finish()
    assert {id_: world.answers[id_].function for id_ in requests} == requests


def test_the_requests_that_are_due_next_join_up_to_the_batch():
    world = family(member("f", slo_ms=400.0), member("g", slo_ms=100.0), member("h"), workers_max=1)
    busy(world)
    for name in ("h", "f", "g", "f", "g", "g"):
        world.now += 0.001
        world.arrive(name)
    world.finish()
    assert running(world) == [("g@1", "g@1", "g@1", "f@1")]
    world.finish()
    assert running(world) == [("f@1", "h@1")]


def test_a_failure_of_one_request_refuses_no_other():
    world = family(member("f"), member("g"))
    busy(world)
    f, g = world.arrive("f"), world.arrive("g")
    world.finish()
    world.finish(failures=[g])
    assert isinstance(world.answers[f], Reply)
    assert (world.answers[g].error, world.answers[g].message) == ("HandlerError", "bad")


def test_the_time_of_a_shared_run_in_which_a_request_failed_does_not_count():
    world = family(member("f"), member("g"))
    for _ in range(5):
        busy(world)
        world.now += 0.1
        world.finish()
    for _ in range(3):
        busy(world)
        f, g = world.arrive("f"), world.arrive("g")
        world.now += 0.1
        world.finish()
        assert running(world) == [("f@1", "g@1")]
        world.now += 60
        world.finish(failures=[g])
        assert isinstance(world.answers[f], Reply)


@pytest.mark.parametrize("alone", [{"max_batch": 1}, {"config": {"policy": "separate"}}, {"blobs": (("other", 20),)}])
def test_functions_without_batches_common_weights_or_a_policy_that_joins_run_separately(alone):
    settings = {key: value for key, value in alone.items() if key == "max_batch"}
    own = alone.get("blobs")
    world = family(member("f", **settings), member("g", own, **settings), **alone.get("config", {}))
    busy(world)
    for name in ("g", "f", "g"):
        world.arrive(name)
    world.finish()
    while world.running:
        assert all(len(set(functions)) == 1 for functions in running(world))
        world.finish()
    assert len(world.open) == 0


def test_a_sibling_that_is_not_bound_in_the_worker_joins_no_run_and_is_bound():
    world = World()
    for name in ("f", "g"):
        world.deploy(member(name))
    world.arrive("f")
    world.settle()
    busy(world)
    f, g = world.arrive("f"), world.arrive("g")
    world.load_blocks()
    world.finish()
    assert running(world) == [("f@1",)]
    world.settle()
    assert [bind.function for bind in world.log if isinstance(bind, Bind)] == ["g@1"]
    assert isinstance(world.answers[f], Reply)
    assert isinstance(world.answers[g], Reply)


def test_a_request_whose_deadline_has_come_joins_no_run():
    world = family(member("f"), member("g"))
    busy(world)
    late, f = world.arrive("g", deadline=world.now + 1.0), world.arrive("f")
    world.now += 2.0
    world.finish()
    assert running(world) == [("f@1",)]
    assert world.answers[late].error == "DeadlineError"
    world.finish()
    assert isinstance(world.answers[f], Reply)


def test_the_requests_of_a_shared_run_whose_worker_dies_are_retried_in_separate_runs():
    world = family(member("f"), member("g"), backoff_first_s=0.1)
    busy(world)
    requests = [world.arrive("f"), world.arrive("g")]
    world.finish()
    assert running(world) == [("f@1", "g@1")]
    world.die()
    while world.open:
        assert all(len(set(functions)) == 1 for functions in running(world))
        if world.running or world.loads or world.starting or world.binding:
            world.settle()
        else:
            world.ring()
    assert all(isinstance(world.answers[request], Reply) for request in requests)
    assert not [each for each in world.log if isinstance(each, Explanation) and each.what == "isolate"]


def test_only_the_function_that_kills_shared_runs_is_isolated():
    world = family(member("f"), member("g"), member("bad"), backoff_first_s=0.1)
    busy(world)
    requests = [world.arrive(name) for name in ("f", "g", "bad")]
    world.finish()
    while world.open:
        if any("bad@1" in functions for functions in running(world)):
            world.die(next(run.worker for run in world.running.values() if "bad@1" in world.whose(run)))
        elif world.running:
            world.finish()
        elif world.loads or world.starting or world.binding or world.stopping:
            world.settle_processes()
        else:
            world.ring()
    assert [isinstance(world.answers[request], Reply) for request in requests] == [True, True, False]
    assert [each.function for each in world.log if isinstance(each, Explanation) and each.what == "isolate"] == [
        "bad@1"
    ]


def test_a_member_that_is_removed_unloaded_or_cancelled_during_a_shared_run_affects_no_other():
    for event in (Removed("g@1"), UnloadAsked("g@1"), None):
        world = family(member("f"), member("g"))
        busy(world)
        f, g = world.arrive("f"), world.arrive("g")
        world.finish()
        assert running(world) == [("f@1", "g@1")]
        if event is None:
            del world.open[g]
        world.send(event or Cancelled(g))
        world.finish()
        assert isinstance(world.answers[f], Reply)
        world.arrive("f")
        world.settle()
        assert not world.open


@pytest.mark.parametrize("order", list(permutations("fgh")))
def test_a_shared_run_that_hangs_is_stopped_in_time_to_run_each_function_separately(order):
    world = family(member("f", timeout_s=6.0), member("g", timeout_s=9.0), member("h"), backoff_first_s=0.1)
    busy(world)
    requests = {name: world.arrive(name) for name in order}
    world.finish()
    run = next(iter(world.running.values()))
    while run.worker not in world.stopping:
        world.ring()
    assert world.now <= 3.0 + 1e-6
    world.settle_processes()
    # `f` hangs again, and the others need not wait for it.
    while not all(request in world.answers for request in requests.values()):
        assert all(len(set(functions)) == 1 for functions in running(world))
        healthy = [each for each in world.running.values() if "f@1" not in world.whose(each)]
        if healthy:
            world.now += 0.01
            world.finish_run(healthy[0])
        elif world.starting or world.loads or world.binding or world.stopping:
            world.settle_processes()
        else:
            world.ring()
            waiting = {name for name, request in requests.items() if request not in world.answers}
            assert waiting <= {"f"} or world.now < 3.5
    assert all(isinstance(world.answers[requests[name]], Reply) for name in "gh")
    assert isinstance(world.answers[requests["f"]], Refuse)
    assert "f@1" in world.answers[requests["f"]].message


def asked_again(world, names, count, cost):
    """Let clients repeat their requests after each answer; return which of this many runs were shared. A shared run
    takes `cost` times as long as its requests separately.
    """
    for name in names:
        world.arrive(name)
    joined = []
    while len(joined) < count:
        [functions] = running(world)
        whose = [name.partition("@")[0] for name in functions]
        joined.append(len(whose) > 1)
        world.now += 0.1 * len(whose) * (cost if joined[-1] else 1.0)
        world.finish()
        for name in whose:
            world.arrive(name)
    return joined


@pytest.mark.parametrize("profile", [None, "measured"])
@pytest.mark.parametrize("cost", [0.5, 1.2])
def test_runs_are_shared_where_that_pays_and_else_only_to_see_whether_it_does_now(cost, profile):
    """This follows from observed times: a profile does not know the cost of sharing."""
    result = {} if profile is None else {"profile": measured(batches=(1, 2, 4), base=0.08, each=0.02)}
    names = "abcdfghk"
    world = family(*(member(name, **result) for name in names), workers_max=1)
    joined = asked_again(world, names, 400, cost)
    assert joined[-200:].count(cost < 1) >= 195
    assert len(set(joined[-TRY_OTHER_LAST - 8 :])) == 2
    # When the times change, so does the decision.
    joined = asked_again(world, "", 2 * TRY_OTHER_LAST, 1.7 - cost)
    assert joined[-100:].count(cost > 1) >= 95


def test_requests_that_wait_for_a_full_batch_count_those_of_their_siblings():
    profile = Profile(
        weight_bytes=20, macs=1, points=tuple(Point(1, 9, batch, 1, 0.1 + 0.01 * batch) for batch in (1, 2, 4))
    )
    policy = Policy(batching="adaptive")
    settings = {"slo_ms": 5000.0, "profile": profile}
    world = family(*(member(name, **settings) for name in "fghk"), policy=policy)
    now = world.now
    while world.open:
        world.ring()
        world.settle()
    batch = next(worker for worker in world.state.workers.values()).point.batch
    assert batch > 1
    world.now = max(now, world.now)
    for name in "fghk"[:batch]:
        assert not world.running
        world.arrive(name)
    assert [len(functions) for functions in running(world)] == [batch]


def measured(batches=(1, 2, 4, 8), base=0.02, each=0.01):
    points = tuple(Point(1, 9, batch, 1, base + each * batch) for batch in batches)
    return Profile(weight_bytes=20, macs=1, points=points)


def half_own(name, **settings):
    """Return a function of which half of a run is not shared."""
    settings = {"max_batch": 8, "slo_ms": 1000.0, "profile": measured(base=0.08)} | settings
    return member(name, (("trunk", 20), (f"own-of-{name}", 20)), **settings)


def operation_of(world, run):
    return world.state.workers[run.worker].runs[run.run]


def test_a_shared_run_is_expected_to_run_its_separate_part_function_by_function():
    world = family(half_own("f"), half_own("g"))
    busy(world)
    for name in ("f", "g", "g"):
        world.arrive(name)
    world.finish()
    [run] = world.running.values()
    slowdown = world.state.families["one"].latency.slowdown
    operation = operation_of(world, run)
    together, apart = 0.11, 0.09 + 0.10
    assert sorted(running(world)) == [("f@1", "g@1", "g@1")]
    assert operation.ends - world.now == pytest.approx(slowdown * (together + apart) / 2)


def hurried(*waited_s):
    """Let requests of `f`, which refuses late ones, wait this long, and then one of each other function arrive; a run
    ends. Return the world, the next run, the requests of `f`, and the others.
    """
    first = half_own("f", slo_ms=200.0, late="refuse", profile=measured())
    world = family(first, *(half_own(name, profile=measured()) for name in "ghk"))
    busy(world, "g")
    began, requests = world.now, []
    for seconds in waited_s:
        world.now = began + max(waited_s) - seconds
        requests.append(world.arrive("f"))
    others = [world.arrive(name) for name in "ghk"]
    world.now = began + max(waited_s)
    latency, [trunk] = world.state.families["one"].latency, world.state.families["one"].trunks.values()
    # The slowdown becomes 1 when the run that ends is counted.
    latency.slowdown, trunk.separate_part = 1.25 - 0.25 * max(waited_s) / 0.03, 0.5
    run = next(each for each in world.finish() if isinstance(each, Run))
    assert latency.slowdown == pytest.approx(1.0)
    return world, run, requests, others


def test_as_many_join_as_keep_the_leader_in_time():
    world, run, [request], others = hurried(0.12)
    # All four would take 90 ms, but only 80 are left.
    assert run.requests[0] == request
    assert len(run.requests) == 3
    latency = world.state.families["one"].latency
    latency.slowdown = 1.0
    world.calm()
    assert all(isinstance(world.answers[each], Reply) for each in (request, *others))


def test_no_request_is_refused_that_would_be_late_only_because_others_join():
    world, run, [late, hurries], _ = hurried(0.195, 0.145)
    # A separate run takes 40 ms, and a run of all at least 60.
    assert world.answers[late].error == "OverloadedError"
    assert hurries in run.requests


class Watched(World):
    """Checks each shared run when it begins."""

    shared_runs = 0

    def send(self, event):
        state = self.state
        waited = {id_: len(function.queue) + 1 for id_, function in state.functions.items()}
        actions = super().send(event)
        for run in actions:
            if isinstance(run, Run) and run.functions and run.run in self.running:
                self.check(operation_of(self, run), waited)
        return actions

    def check(self, operation, waited):
        self.shared_runs += 1
        function, state = operation.function, self.state
        slo_ms, point = function.spec.settings.slo_ms, function.latency.default_point
        if slo_ms is None:
            return
        most = min(point.batch, waited[function.spec.id])
        alone_s = function.latency.latency_s(point, most)
        for id_ in operation.of(function):
            due = state.requests[id_].arrived + slo_ms / 1000
            assert self.now + alone_s > due or operation.ends <= due + 1e-9, "those who joined made it late"


@settings(max_examples=150, deadline=None)
@given(
    orders=st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "arrive", "urgent", "finish", "go on", "wait", "cancel"]),
            st.sampled_from("fghk"),
        ),
        min_size=20,
        max_size=60,
    ),
    slos=st.lists(st.sampled_from([None, 200.0, 250.0, 500.0]), min_size=4, max_size=4),
    late=st.sampled_from(["serve", "refuse"]),
    rule=st.sampled_from(["overwinter", "greedy", "adaptive", "timeout"]),
)
def test_the_leader_of_a_run_is_not_made_late_by_those_that_join_it(orders, slos, late, rule):
    members = [
        half_own(name, slo_ms=slo, late=late, profile=measured()) for name, slo in zip("fghk", slos, strict=True)
    ]
    world = family(*members, world=Watched, policy=Policy(batching=rule), workers_max=1)
    world.state.families["one"].latency.slowdown = 1.0
    for order, name in orders:
        happens(world, order, name)
    world.calm()
    assert not world.open


def test_a_wait_for_a_full_batch_is_computed_again_when_requests_of_siblings_are_cancelled():
    settings = {"slo_ms": 1000.0, "profile": measured(base=0.08)}
    world = family(*(member(name, max_batch=8, **settings) for name in "fghk"), policy=Policy(batching="adaptive"))
    world.calm()
    f = world.arrive("f")
    alone = world.state.functions["f@1"].batch_at
    others = [world.arrive(name) for name in "ghk"]
    assert not world.running
    assert world.state.functions["f@1"].batch_at > alone
    for request in others:
        world.send(Cancelled(request))
    assert world.state.functions["f@1"].batch_at == alone
    world.calm()
    assert isinstance(world.answers[f], Reply)


NAMES = ("f", "g", "h", "k")
ORDERS = st.sampled_from(
    (
        "arrive",
        "arrive",
        "arrive",
        "urgent",
        "brief",
        "finish",
        "finish",
        "fail",
        "die",
        "go on",
        "ring",
        "cancel",
        "away",
    )
)


@settings(max_examples=150, deadline=None)
@given(
    orders=st.lists(st.tuples(ORDERS, st.sampled_from(NAMES)), min_size=10, max_size=60),
    slos=st.lists(st.sampled_from([None, 50.0, 500.0]), min_size=4, max_size=4),
    late=st.sampled_from(["serve", "refuse"]),
    rule=st.sampled_from(["overwinter", "greedy", "adaptive", "timeout"]),
    runs=st.integers(1, 2),
    cores=st.sampled_from([None, 1, 2]),
    workers=st.integers(1, 3),
    batches=st.sampled_from([(), (4,), (1, 2, 4)]),
)
def test_whatever_happens_to_functions_that_share_runs_every_request_has_one_answer(
    orders, slos, late, rule, runs, cores, workers, batches
):
    """After each step the world checks that the tables are consistent, that no function waits without reason,
    and more.
    """
    points = tuple(Point(1, 9, batch, runs, 0.02 + 0.01 * batch) for batch in batches)
    own = {"late": late, "concurrency": runs, "profile": Profile(weight_bytes=20, macs=1, points=points)}
    members = [member(name, slo_ms=slo, **own) for name, slo in zip(NAMES, slos, strict=True)]
    policy = Policy(batching=rule, order="any" if rule == "greedy" else "due-time")
    world = family(*members, policy=policy, cores=cores, workers_max=workers, backoff_first_s=0.1)
    for order, name in orders:
        happens(world, order, name)
    world.calm()
    assert not world.open


def happens(world, order, name):
    """Let one more event happen, if it is possible."""
    known = f"{name}@1" in world.deployed
    if order in ("arrive", "urgent", "brief") and known:
        pass_time(world, 0.001)
        deadline = world.now + 0.05 if order == "brief" else None
        world.arrive(name, deadline=deadline, priority=1 if order == "urgent" else 0)
    elif order in ("finish", "fail") and world.running:
        run = next(iter(world.running.values()))
        world.finish(run.requests[:1] if order == "fail" else ())
    elif order == "die" and world.alive:
        world.die()
    elif order == "go on":
        pass_time(world, 0.01)
        world.settle_processes()
    elif order == "wait":
        pass_time(world, 0.06)
    elif order == "ring" and world.alarm is not None:
        world.ring()
    elif order == "cancel" and world.open:
        request = min(world.open)
        del world.open[request]
        world.send(Cancelled(request))
    elif order == "away" and known and len(world.deployed) > 2:
        world.send(Removed(f"{name}@1"))


def pass_time(world, seconds):
    until = world.now + seconds
    while world.alarm is not None and world.alarm <= until:
        world.ring()
    world.now = until


@pytest.mark.parametrize("alike", [True, False])
def test_when_a_request_arrives_few_of_many_waiting_functions_are_looked_at(monkeypatch, alike):
    names = [f"f{number}" for number in range(shared_runs.CANDIDATES_MAX + 8)]
    members = [member(name, None if alike else ((name, 25),), max_batch=1000, slo_ms=1e6) for name in names]
    world = family(*members, policy=Policy(batching="adaptive"), workers_max=1)
    for name in names:
        world.arrive(name)
    assert not world.running
    served, serve = [], admission.serve

    def counted(cycle, function, *rest):
        served.append(function)
        serve(cycle, function, *rest)

    monkeypatch.setattr(admission, "serve", counted)
    world.arrive(names[-1])
    assert 0 < len(served) <= (shared_runs.CANDIDATES_MAX + 1 if alike else 1)


class Counted(dict):
    """Counts look-ups."""

    looked_up = 0

    def __getitem__(self, key):
        self.looked_up += 1
        return super().__getitem__(key)


def test_when_a_run_ends_each_of_many_waiting_functions_looks_at_few_of_the_others():
    names = [f"f{number}" for number in range(200)]
    world = family(*(member(name) for name in names), cores=2, workers_max=1)
    one = world.state.families["one"]
    one.latency.run_s = 0.1
    for name in names:
        world.arrive(name)
    one.members = members = Counted(one.members)
    world.now += 0.4
    world.finish()
    assert len(one.waiting) > 190
    assert 0 < members.looked_up < 20 * len(names)


def test_as_many_joining_requests_are_counted_as_leave_the_first_one_in_time():
    profile = Profile(weight_bytes=1, macs=1, points=(Point(1, 1, 1, 1, 0.1), Point(1, 1, 32, 1, 3.2)))
    world = family(*(member(name, max_batch=32, slo_ms=8000.0, profile=profile) for name in "fgh"), workers_max=1)
    busy(world, "h")
    for name in "gggggggggggf":
        world.arrive(name)
    cycle, function, [worker] = world.scheduler.cycle, world.state.functions["f@1"], world.state.workers.values()
    worker.point = function.latency.points[-1]
    for left in (0, 1, 3, 7, 11):
        took_s = shared_runs.expected_shared_run_s(cycle, function, worker, 1 + left)
        assert shared_runs.count_joining(cycle, function, [worker], 0.0, took_s + 1e-6) == left
