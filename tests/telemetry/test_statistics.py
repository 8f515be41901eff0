"""A reader derives the content of the scheduler's tables from the steps alone, for any order of events."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from overwinter.core.actions import (
    Bind,
    Evict,
    Explanation,
    LoadBlocks,
    Refuse,
    Reply,
    Run,
    RunOnDevice,
    StartExecutor,
    StartWorker,
    StopWorker,
)
from overwinter.core.events import (
    Arrived,
    BindFailed,
    BlocksLoaded,
    Bound,
    Cancelled,
    Deployed,
    LoadAsked,
    MemoryMeasured,
    MemoryPressure,
    Removed,
    RunEnded,
    WorkerExited,
    WorkerReady,
    ZygoteLost,
)
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.latency import WORKER_BYTES
from overwinter.telemetry.statistics import ANSWERS_KEPT, RECORDS_KEPT, Statistics
from tests.scheduler.test_properties import AnyOrder
from tests.scheduler.world import World, spec


class Watched(AnyOrder):
    """The scheduler with random events, read by the statistics after each step."""

    # A node gives each version a new id, and the readers rely on it.
    reuses_ids = False

    @property
    def world(self) -> World:
        return self._world

    @world.setter
    def world(self, world: World) -> None:
        self._world, self.statistics, send = world, Statistics(), world.send

        def watched(event):
            actions = send(event)
            self.statistics.observe(world.now, event, actions)
            self.agree()
            return actions

        world.send = watched

    def agree(self) -> None:
        state, seen = self.world.state, self.statistics
        assert seen.specs.keys() == state.functions.keys()
        assert seen.open_requests == len(state.requests)
        assert seen.workers.keys() == state.workers.keys()
        for id_, worker in state.workers.items():
            # The scheduler gives up a run that hangs; the reader counts it until the killed worker has ended.
            assert set(worker.runs) <= set(seen.workers[id_].runs)
            assert worker.stopping or set(worker.runs) == set(seen.workers[id_].runs)
        assert {worker for worker, process in seen.workers.items() if process.stopping} == {
            id_ for id_, worker in state.workers.items() if worker.stopping
        }
        for id_, function in state.functions.items():
            held = seen.store(function.spec.store).held(id_)
            assert held == (sum(function.sizes.values()) if function.loaded else 0)
            assert seen.tallies[function.spec.name].name == function.spec.name
        for name, versions in state.versions.items():
            default = state.functions[f"{name}@{versions.default}"].spec
            assert seen.tallies[name].slo_s == (default.settings.slo_ms and default.settings.slo_ms / 1000)
        assert seen.versions.keys() == state.functions.keys()
        assert set(seen.tallies) == {function.spec.name for function in state.functions.values()}

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "_world"):
            return
        seen, answers = self.statistics, list(self.world.answers.values())
        tallies = [seen.unknown, *seen.tallies.values(), *seen.removed_tallies]
        assert sum(tally.requests for tally in tallies) == self.world.next_request
        assert sum(tally.answered for tally in tallies) == sum(isinstance(answer, Reply) for answer in answers)
        assert sum(tally.refused.total() for tally in tallies) == sum(isinstance(each, Refuse) for each in answers)
        assert all(tally.workers == 0 for tally in tallies)
        assert all(tally.busy_s <= tally.worker_s + 1e-9 for tally in tallies)


def test_the_reader_agrees_with_the_scheduler():
    run_state_machine_as_test(Watched, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))


def read(*steps) -> Statistics:
    statistics = Statistics()
    for now, event, *actions in steps:
        statistics.observe(now, event, actions)
    return statistics


def test_a_request_is_followed_to_its_answer():
    seen = read(
        (0.0, Deployed(spec("f", slo_ms=2000))),
        (1.0, Arrived(1, "f", None, None), LoadBlocks("f@1", 1)),
        (1.5, Arrived(2, "f", None, None)),
        (2.0, BlocksLoaded("f@1", 1, 30), StartWorker(1, "f@1", False, 4, 2)),
        (2.5, WorkerReady(1), Run(1, 1, (1, 2))),
        (3.5, RunEnded(1, 1), Reply(1, "f@1", "disk"), Refuse(2, "HandlerError", "bad")),
    )
    tally = seen.tallies["f"]
    assert (tally.requests, tally.answered, tally.slo_requests, tally.in_slo, tally.attainment) == (2, 1, 2, 0, 0.0)
    assert (tally.wakes, tally.woken, tally.wake_s["disk"]) == ({"disk": 1}, {"disk": 1}, 1.5)
    assert (tally.wait_s, tally.runs, tally.run_requests, tally.run_s, tally.core_s) == (2.5, 1, 2, 1.0, 2.0)
    assert (tally.loaded_bytes, tally.answered_by_start, tally.refused) == (30, {"disk": 1}, {"HandlerError": 1})
    assert list(tally.recent) == [(3.5, 2.5)]
    assert [(result.what, result.why) for result in tally.refusals] == [("HandlerError", "bad")]
    [histogram] = tally.durations.values()
    assert (sum(histogram.counts), histogram.total, histogram.counts[histogram.bounds.index(2.5)]) == (1, 2.5, 1)
    assert (sum(seen.waits.counts), sum(seen.batches.counts), seen.batches.total) == (2, 1, 2.0)


def test_during_concurrent_runs_a_worker_is_busy_once_and_each_run_pays_for_its_cores():
    seen = read(
        (0.0, Deployed(spec("f"), resident=True)),
        (0.0, Arrived(1, "f", None, None), StartWorker(1, "f@1", False, 4, 2)),
        (1.0, WorkerReady(1), Run(1, 1, (1,))),
        (2.0, Arrived(2, "f", None, None), Run(1, 2, (2,))),
        (3.0, RunEnded(1, 1), Reply(1, "f@1", "host")),
        (5.0, RunEnded(1, 2), Reply(2, "f@1", "warm")),
        (9.0, Cancelled(99), StopWorker(1)),
        (10.0, WorkerExited(1, "WorkerError", "stopped")),
    )
    tally = seen.tallies["f"]
    assert (tally.run_s, tally.core_s, tally.busy_s, tally.worker_s) == (5.0, 10.0, 4.0, 10.0)
    assert (tally.idle_core_s, tally.crashes, tally.private_byte_s) == (24.0, 0, 10.0 * WORKER_BYTES)


def test_functions_that_share_a_run_pay_for_it_by_their_requests():
    seen = read(
        (0.0, Deployed(spec("f", family="one"), resident=True)),
        (0.0, Deployed(spec("g", family="one"), resident=True)),
        (0.0, Arrived(1, "f", None, None), StartWorker(1, "f@1", False, 2, 1)),
        (1.0, WorkerReady(1), Bind(1, "g@1", 1)),
        (1.0, Bound(1, "g@1", 1)),
        (1.0, Arrived(2, "g", None, None)),
        (1.0, Arrived(3, "g", None, None)),
        (1.0, Arrived(4, "g", None, None), Run(1, 1, (1, 2, 3, 4), None, ("f@1", "g@1", "g@1", "g@1"))),
        (5.0, RunEnded(1, 1), *(Reply(id_, "f@1" if id_ == 1 else "g@1", "warm") for id_ in (1, 2, 3, 4))),
    )
    paid = {name: (tally.runs, tally.run_requests, tally.run_s, tally.core_s) for name, tally in seen.tallies.items()}
    assert paid == {"f": (1, 1, 4.0, 2.0), "g": (1, 3, 4.0, 6.0)}
    shared = {
        name: (tally.shared_runs, tally.shared_run_requests, tally.shared_charged_s, tally.shared_whole_s)
        for name, tally in seen.tallies.items()
    }
    assert shared == {"f": (1, 1, 2.0, 8.0), "g": (1, 3, 6.0, 8.0)}
    assert {name: list(tally.shared_with) for name, tally in seen.tallies.items()} == {"f": [("g",)], "g": [("f",)]}
    # The usual time of a run in a worker is reported for each of its functions, whichever led the run.
    assert [tally.usual_run_s for tally in seen.tallies.values()] == [4.0, 4.0]
    assert [tally.usual_request_s for tally in seen.tallies.values()] == [1.0, 1.0]
    assert sum(tally.busy_s for tally in seen.tallies.values()) == 4.0
    assert (seen.batches.total, sum(seen.batches.counts)) == (4.0, 1)


def test_functions_that_share_a_run_on_a_device_pay_for_it_by_their_requests():
    functions, ids = ("f@1", "g@1", "g@1", "g@1"), (1, 2, 3, 4)
    seen = read(
        (0.0, Deployed(spec("f", family="one", device="pool"), resident=True)),
        (0.0, Deployed(spec("g", family="one", device="pool"), resident=True)),
        (0.0, Arrived(1, "f", None, None), StartExecutor(1, "virtual:0")),
        *((0.0, Arrived(id_, "g", None, None)) for id_ in ids[1:]),
        (1.0, WorkerReady(1), RunOnDevice(1, "virtual:0", 1, "f@1", ids, 9, (), "virtual:1", functions)),
        (5.0, RunEnded(1, 1, (), 9, False, 6), *(Reply(*each, "warm") for each in zip(ids, functions, strict=True))),
    )
    shared = {
        name: (tally.shared_runs, tally.shared_run_requests, tally.shared_charged_s, tally.shared_whole_s)
        for name, tally in seen.tallies.items()
    }
    assert shared == {"f": (1, 1, 1.0, 4.0), "g": (1, 3, 3.0, 4.0)}
    assert {name: list(tally.shared_with) for name, tally in seen.tallies.items()} == {"f": [("g",)], "g": [("f",)]}
    moved = {name: (tally.on_devices.moved_bytes, tally.on_devices.peer_bytes) for name, tally in seen.tallies.items()}
    assert moved == {"f": (9, 6), "g": (0, 0)}


def test_a_call_of_a_program_that_was_removed_meanwhile_leaves_no_open_request():
    program = spec("f:program", device="any")
    seen = read(
        (0.0, Deployed(program, resident=True), StartExecutor(1, "virtual:0")),
        (0.0, Arrived(1, "f:program", 1, None, caller=(90, 91))),
        (1.0, WorkerReady(1), RunOnDevice(1, "virtual:0", 1, program.id, (1,), 9, (), None)),
        (2.0, Removed(program.id)),
        (3.0, RunEnded(1, 1), Reply(1, program.id, "warm")),
    )
    assert seen._requests == {}


def test_a_run_without_requests_whose_executor_died_is_no_prefetch():
    prefetch = (1.0, WorkerReady(1), RunOnDevice(1, "virtual:0", 1, "f@1", (), 9, (), None))
    begun = [(0.0, Deployed(spec("f", device="pool"), resident=True), StartExecutor(1, "virtual:0")), prefetch]
    ended = read(*begun, (2.0, RunEnded(1, 1, (), 9)))
    died = read(*begun, (2.0, WorkerExited(1, "WorkerError", "signal 9")))
    assert [each.pool.devices["virtual:0"].prefetches for each in (ended, died)] == [1, 0]


def test_a_death_during_a_run_is_a_crash_and_its_request_a_retry():
    seen = read(
        (0.0, Deployed(spec("f"), resident=True)),
        (0.0, Arrived(1, "f", None, None), StartWorker(1, "f@1")),
        (1.0, WorkerReady(1), Run(1, 1, (1,))),
        (3.0, WorkerExited(1, "WorkerError", "signal 9"), StartWorker(2, "f@1")),
        (4.0, WorkerReady(2), Run(2, 2, (1,))),
        (5.0, RunEnded(2, 2), Reply(1, "f@1", "host")),
    )
    tally = seen.tallies["f"]
    assert (tally.crashes, tally.retries, tally.answered, tally.wait_s, tally.run_s) == (1, 1, 1, 1.0, 3.0)
    assert tally.wakes == {"host": 2}


def test_unknown_names_get_no_tally_of_their_own():
    seen = read(*((0.0, Arrived(n, f"invented-{n}", None, None), Refuse(n, "NotFoundError", "no")) for n in range(50)))
    assert seen.tallies == {}
    assert (seen.unknown.requests, seen.unknown.refused, len(seen.unknown.refusals)) == (
        50,
        {"NotFoundError": 50},
        RECORDS_KEPT,
    )


def test_what_is_remembered_is_bounded():
    seen = read((0.0, Deployed(spec("f"), resident=True)), (0.0, MemoryPressure(9)), (0.0, ZygoteLost()))
    for n in range(2 * ANSWERS_KEPT):
        actions = [Explanation("f@1", "wait", str(n)), Reply(n, "f@1", "warm")]
        seen.observe(float(n), Arrived(n, "f", None, None), actions)
    tally = seen.tallies["f"]
    assert (len(tally.recent), len(tally.decisions), tally.decisions[-1].why) == (
        ANSWERS_KEPT,
        RECORDS_KEPT,
        str(2 * ANSWERS_KEPT - 1),
    )
    assert (seen.pressure_events, seen.zygotes_lost, seen.decision_counts) == (1, 1, {"wait": 2 * ANSWERS_KEPT})


def test_a_worker_has_the_memory_of_its_profile_until_it_is_measured():
    profile = Profile(weight_bytes=1, macs=1, points=(Point(2, 500, 1, 1, 0.1),))
    seen = read(
        (0.0, Deployed(spec("f", profile=profile))),
        (0.0, BlocksLoaded("f@1", 1, 0), StartWorker(1, "f@1", False, 2, 1)),
    )
    # A quick measurement counts if it is larger: it may miss what the full measurement finds.
    seen.observe(2.0, MemoryMeasured(((1, 700), (2, 900))), [])
    seen.observe(3.0, MemoryMeasured(((1, 100),)), [])
    seen.observe(5.0, WorkerExited(1, "WorkerError", "gone"), [])
    assert seen.tallies["f"].private_byte_s == 2 * 500 + 3 * 700


def test_an_eviction_is_counted_and_explained():
    seen = read((0.0, Deployed(spec("f"), resident=True)), (4.0, ZygoteLost(), Evict("f@1", "room")))
    tally = seen.tallies["f"]
    assert (tally.evictions, [(result.what, result.why) for result in tally.decisions]) == (1, [("evict", "room")])
    assert seen.decision_counts == {"evict": 1}


@pytest.mark.parametrize("gone", [Removed("f@1"), Evict("f@1", "room")])
def test_shared_blocks_are_charged_in_equal_parts_to_the_functions_that_hold_them(gone):
    steps = [
        (0.0, Deployed(spec("f"), resident=True)),
        (0.0, Deployed(spec("g", blobs=(("a", 10),)), resident=True)),
        (4.0, gone) if isinstance(gone, Removed) else (4.0, ZygoteLost(), gone),
    ]
    seen = read(*steps)
    [tally] = seen.removed_tallies or [seen.tallies["f"]]
    assert tally.host_byte_s == 4 * (10 / 2 + 20)
    assert seen.store("").uncharged("g@1", 5.0) == 4 * 5 + 10
    assert seen.released_bytes[""] == 20
    assert seen.disk.nbytes == (10 if isinstance(gone, Removed) else 30)


def observed(**config) -> tuple[World, Statistics]:
    """Return a world, and statistics that read each of its steps."""
    world, statistics = World(**config), Statistics()
    send = world.send

    def watched(event):
        actions = send(event)
        statistics.observe(world.now, event, actions)
        return actions

    world.send = watched
    return world, statistics


@pytest.mark.parametrize("leaves", [False, True])
def test_a_wake_contains_a_load_from_disk_only_if_somebody_waited_for_it(leaves):
    world, seen = observed(cores=4)
    world.deploy(spec("f"))
    request = world.arrive("f")
    world.now = 1.0
    if leaves:
        world.send(Cancelled(request))
    world.load_blocks(added=30)
    if leaves:
        world.now = 3601.0
        world.arrive("f")
    world.now += 0.5
    world.settle()
    tally = seen.tallies["f"]
    assert tally.wakes == ({"host": 1} if leaves else {"disk": 1})
    assert sum(tally.wake_s.values()) == pytest.approx(0.5 if leaves else 1.5)


def test_requests_before_a_function_had_an_slo_do_not_count_in_its_attainment():
    world, seen = observed(cores=4)
    world.deploy(spec("f"))
    for _ in range(5):
        world.arrive("f")
        world.settle()
    assert seen.tallies["f"].attainment is None
    world.deploy(spec("f", version=2, slo_ms=1000.0))
    world.arrive("f")
    world.settle()
    tally = seen.tallies["f"]
    assert (tally.answered, tally.slo_requests, tally.in_slo, tally.attainment) == (6, 1, 1, 1.0)


def test_blocks_that_are_lost_again_are_not_held():
    world, seen = observed(cores=4)
    for name in "fg":
        world.deploy(spec(name, blobs=(("shared", 10), (name, 5)), family="one"))
    world.arrive("f")
    world.settle()
    world.arrive("g")
    for _ in range(2):
        world.load_blocks(added=5)
        world.fail_bind(lost_blocks=True)
        assert (world.state.functions["g@1"].loaded, seen.store("").held("g@1")) == (False, 0)
    world.calm()
    assert seen.store("").held("g@1") == (15 if world.state.functions["g@1"].loaded else 0)


def test_a_load_continues_when_a_second_worker_lacks_the_same_blocks():
    world, seen = observed(cores=4)
    world.deploy(spec("f", blobs=(("f", 30),), max_workers=2))
    for _ in range(3):
        world.arrive("f")
        world.settle_processes()
    first, second = sorted(world.alive)
    world.die(first, lost_blocks=True)
    [load] = world.loads
    world.die(second, lost_blocks=True)
    world.send(BindFailed(first, load.function, 1, "StoreError", "changed", lost_blocks=True))
    assert seen.store("").held("f@1") == 0
    world.load_blocks(added=30)
    assert (world.state.functions["f@1"].loaded, seen.store("").held("f@1")) == (True, 30)


def test_a_quarantined_function_holds_no_blocks_until_it_is_loaded():
    world, seen = observed(cores=4)
    world.resident = {("", "f")}
    world.deploy(spec("f", blobs=(("f", 30),)), quarantined="the scheduler failed on it")
    store = seen.store("")
    assert (world.state.functions["f@1"].loaded, store.nbytes) == (False, 0)
    world.send(LoadAsked("f@1"))
    world.settle()
    assert store.nbytes == 30
    world.send(Removed("f@1"))
    world.settle()
    assert store.nbytes == 0
