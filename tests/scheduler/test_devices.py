"""Functions of the pool run on any device, whose executor is started on demand and replaced when it fails."""

import msgspec
import pytest

from overwinter.core.actions import Refuse, Reply, RunOnDevice, StartExecutor, StopWorker, Unbind
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import Removed, UnloadAsked
from overwinter.core.function import BlobSize
from overwinter.core.policies import Policy
from overwinter.scheduler import device_runs
from overwinter.scheduler.pool import UNPLACED_SWAPS
from overwinter.scheduler.published import Published
from tests.scheduler.world import World, spec


def device(number=0, memory_bytes=1 << 20, **links) -> DeviceConfig:
    return DeviceConfig(name=f"virtual:{number}", memory_bytes=memory_bytes, bytes_per_s=1e6, latency_s=0.0, **links)


def pooled(name="f", size=600_000, **settings):
    return spec(name, 1, [(f"{name}-weights", size)], device="pool", **settings)


def of(world, kind) -> list:
    return [action for action in world.log if isinstance(action, kind)]


def served(world, *names) -> None:
    """Send a request to each of these functions, and let all be answered."""
    for name in names:
        world.arrive(name)
        world.settle()


def test_a_request_starts_an_executor_and_later_ones_use_it():
    world = World(devices=(device(),))
    world.deploy(pooled())
    world.arrive()
    world.settle()
    world.arrive()
    world.settle()
    assert [type(each) for each in world.answers.values()] == [Reply] * 2
    assert [each.start for each in world.answers.values()] == ["disk", "warm"]
    assert len(of(world, StartExecutor)) == 1
    assert [run.missing_bytes for run in of(world, RunOnDevice)] == [600_000, 0]


def test_a_function_is_evicted_for_another_that_does_not_fit_beside_it():
    world = World(devices=(device(),))
    for name in "fg":
        world.deploy(pooled(name))
    served(world, "f", "g", "f")
    assert [run.evict for run in of(world, RunOnDevice)] == [(), ("f@1",), ("g@1",)]
    assert [each.start for each in world.answers.values()] == ["disk", "disk", "host"]


def test_functions_spread_over_idle_devices_before_any_is_evicted():
    world = World(devices=(device(0), device(1)))
    for name in "fgh":
        world.deploy(pooled(name, 400_000))
        world.arrive(name)
    world.settle()
    served(world, "f", "g", "h", "f", "g", "h")
    assert all(run.evict == () for run in of(world, RunOnDevice))
    assert len({run.device for run in of(world, RunOnDevice)}) == 2


def test_a_function_that_shares_blocks_with_another_brings_only_those_that_differ():
    world = World(devices=(device(),))
    for name in "fg":
        world.deploy(spec(name, 1, [("trunk", 500_000), (f"{name}-head", 10_000)], device="pool"))
    served(world, "f", "g")
    assert [run.missing_bytes for run in of(world, RunOnDevice)] == [510_000, 10_000]


def test_a_function_larger_than_every_device_is_refused_before_anything_is_loaded():
    world = World(devices=(device(0), device(1, 2 << 20)))
    world.deploy(pooled(size=3 << 20), on_trial=False)
    request = world.arrive()
    answer = world.answers[request]
    assert isinstance(answer, Refuse)
    assert answer.error == "NoSpaceError"
    assert all(part in answer.message for part in ("f@1", str(3 << 20), "virtual:1", str(2 << 20)))
    assert not world.loads


def test_a_function_whose_weights_fill_a_device_exactly_runs_there():
    world = World(devices=(device(0, 1 << 20),))
    function = pooled()
    filling = BlobSize("f-filling", (1 << 20) + 46, layout_bytes=46)
    world.deploy(msgspec.structs.replace(function, blobs=(BlobSize(function.program, 100), filling)))
    served(world, "f")
    assert [run.missing_bytes for run in of(world, RunOnDevice)] == [1 << 20]


def test_without_devices_a_function_of_the_pool_is_refused_with_the_remedy():
    world = World()
    world.deploy(pooled())
    answer = world.answers[world.arrive()]
    assert isinstance(answer, Refuse)
    assert "f@1" in answer.message
    assert "start the node with --devices" in answer.message


def test_requests_share_a_run_up_to_the_largest_batch():
    world = World(devices=(device(),))
    world.deploy(pooled(max_batch=4))
    for _ in range(6):
        world.arrive()
    world.settle()
    assert [len(run.requests) for run in of(world, RunOnDevice)] == [4, 2]


def test_an_executor_that_dies_costs_its_requests_one_retry_on_another_device():
    world = World(devices=(device(0), device(1)))
    world.deploy(pooled())
    request = world.arrive()
    world.settle_processes()
    world.die(of(world, StartExecutor)[0].executor)
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert [each.device for each in of(world, RunOnDevice)] == ["virtual:0", "virtual:1"]


def test_a_request_that_kills_two_executors_is_refused():
    world = World(devices=(device(0), device(1)))
    world.deploy(pooled())
    request = world.arrive()
    for number in range(2):
        world.settle_processes()
        world.die(of(world, StartExecutor)[number].executor)
    assert world.answers[request].error == "WorkerError"


def test_a_device_whose_executor_never_starts_is_out_of_service_and_tried_again():
    world = World(devices=(device(),))
    world.deploy(pooled(timeout_s=1000.0))
    world.arrive()
    world.load_blocks()
    for _ in range(3):
        while not world.starting:
            world.ring()
        world.die(next(iter(world.starting)), reason="no memory")
    assert world.state.pool.devices["virtual:0"].state(world.now) == "out"
    assert Published(world.scheduler.cycle).detail("f@1", world.now).pool.out_of_service == ["virtual:0"]
    refused = world.answers[world.arrive()]
    assert refused.error == "WorkerError"
    assert "virtual:0" in refused.message
    assert "no memory" in refused.message
    world.now += refused.retry_after_s
    request = world.arrive()
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert world.state.pool.devices["virtual:0"].state(world.now) == "idle"
    assert Published(world.scheduler.cycle).detail("f@1", world.now).pool.out_of_service == []


@pytest.mark.parametrize(("others", "expected"), [(False, [1, 1, 2, 2]), (True, [1, 1, 1, 1])])
def test_one_tenant_takes_no_device_out_of_service_for_another(others, expected):
    world = World(devices=(device(),))
    for name in "abcd":
        world.deploy(pooled(name, 1000, timeout_s=1000.0))
    # What runs in workers needs no device.
    world.deploy(pooled("g", 1000, tenant="u") if others else spec("g", 1, tenant="u"))
    for name in "abcd":
        world.arrive(name)
    pooled_device, failures = world.state.pool.devices["virtual:0"], []
    for _ in range(4):
        while not world.devices.running:
            world.settle_processes()
            if not world.devices.running:
                world.ring()
        world.die(next(iter(world.devices.running.values())).executor)
        failures.append(pooled_device.failures)
    assert failures == expected
    if others:
        request = world.arrive("g")
        while request not in world.answers:
            world.settle()
            if request not in world.answers:
                world.ring()
        assert isinstance(world.answers[request], Reply)
        assert pooled_device.blamed == {}


def test_a_run_that_hangs_is_killed_and_its_request_is_refused():
    world = World(devices=(device(),))
    world.deploy(pooled(timeout_s=2.0))
    request = world.arrive()
    world.settle_processes()
    while request not in world.answers or not of(world, StopWorker):
        world.ring()
    assert world.answers[request].error == "DeadlineError"
    assert of(world, StopWorker)[0].kill


@pytest.mark.parametrize("event", [UnloadAsked, Removed])
def test_a_function_that_leaves_the_host_store_leaves_its_device_after_its_run(event):
    world = World(devices=(device(),))
    world.deploy(pooled())
    served(world, "f")
    world.arrive()
    world.send(event("f@1"))
    assert not of(world, Unbind)
    world.finish_on_device()
    assert len(of(world, Unbind)) == 1
    assert not world.devices.resident["virtual:0"]


def test_blocks_that_do_not_fit_in_adjacent_memory_cost_one_more_eviction_each_time():
    world = World(devices=(device(),))
    for name in "abcf":
        world.deploy(pooled(name, 300_000))
    served(world, "a", "b")
    request = world.arrive("f")
    world.load_blocks()
    assert of(world, RunOnDevice)[-1].evict == ()
    world.finish_on_device(unplaced=True)
    assert of(world, RunOnDevice)[-1].evict == ("a@1",)
    world.finish_on_device(unplaced=True)
    assert of(world, RunOnDevice)[-1].evict == ("b@1",)
    world.finish_on_device(unplaced=True)
    assert "f@1" in world.answers[request].message
    assert world.answers[request].error == "NoSpaceError"


def test_after_blocks_found_no_place_runs_with_as_many_missing_bytes_evict_first_for_a_while():
    world = World(devices=(device(),))
    names = [f"f{number}" for number in range(UNPLACED_SWAPS + 4)]
    for name in names:
        world.deploy(pooled(name, 300_000))
    world.deploy(pooled("small", 1000))
    served(world, *names[:2])
    world.arrive(names[2])
    world.load_blocks()
    world.finish_on_device(unplaced=True)
    world.settle()
    served(world, "small")
    assert of(world, RunOnDevice)[-1].evict == ()
    counts = []
    for name in names[3:]:
        served(world, name)
        counts.append(len(of(world, RunOnDevice)[-1].evict))
    # Two runs had brought blocks before these.
    assert [number for number, count in enumerate(counts) if not count] == [UNPLACED_SWAPS - 2]
    assert set(counts) == {0, 1}


def test_tenants_take_turns_on_a_device_and_share_no_executor():
    world = World(devices=(device(),))
    for name, tenant in (("f", "t"), ("g", "u")):
        world.deploy(pooled(name, 1000, tenant=tenant))
    served(world, "f", "g", "f")
    assert [each.tenant for each in of(world, StartExecutor)] == ["t", "u", "t"]
    assert all(run.missing_bytes for run in of(world, RunOnDevice))


def test_without_isolation_tenants_share_an_executor():
    world = World(devices=(device(),), device_isolation="none")
    for name, tenant in (("f", "t"), ("g", "u")):
        world.deploy(pooled(name, 1000, tenant=tenant))
    served(world, "f", "g", "f")
    assert [each.tenant for each in of(world, StartExecutor)] == [None]


def test_the_trial_of_a_new_version_passes_when_its_blocks_are_loaded():
    world = World(devices=(device(),))
    world.deploy(pooled(), on_trial=True)
    assert world.loading
    world.load_blocks()
    assert not world.loading
    request = world.arrive()
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_readers_see_the_devices_and_why_a_function_was_bound_there():
    world = World(devices=(device(0), device(1)))
    world.deploy(pooled("f", 1000))
    world.deploy(spec("g", 1, [("f-weights", 1000), ("head", 10)], device="pool"))
    served(world, "f", "g")
    published = Published(world.scheduler.cycle)
    first, second = published.devices(world.now)
    assert (first.state, first.tenant, first.taken_bytes, first.total_bytes) == ("idle", "t", 1010, 1 << 20)
    assert [(each.function, each.nbytes, each.exclusive_bytes) for each in first.residents] == [
        ("f@1", 1000, 0),
        ("g@1", 1010, 10),
    ]
    assert (second.state, second.residents) == ("empty", ())
    assert published.function("g@1", world.now).devices == ("virtual:0",)
    assert "10 bytes were missing there" in published.detail("g@1", world.now).pool.last_device


def test_native_binding_reserves_memory_and_refuses_a_function_for_which_none_is_left():
    world = World(devices=(device(),), policy=Policy(device_binding="native"))
    for name in "fg":
        world.deploy(pooled(name))
    served(world, "f", "g")
    assert isinstance(world.answers[1], Reply)
    assert world.answers[2].error == "NoSpaceError"
    assert "g@1" in world.answers[2].message
    assert all(run.evict == () for run in of(world, RunOnDevice))


def test_native_binding_ends_when_the_function_is_unloaded():
    world = World(devices=(device(),), policy=Policy(device_binding="native"))
    for name in "fg":
        world.deploy(pooled(name))
    served(world, "f", "g")
    assert world.answers[2].error == "NoSpaceError"
    world.send(UnloadAsked("f@1"))
    served(world, "g")
    assert isinstance(world.answers[3], Reply)
    assert [run.function for run in of(world, RunOnDevice) if run.requests] == ["f@1", "g@1"]


def test_infless_binding_ends_when_a_function_was_idle_for_its_keep_alive():
    world = World(devices=(device(),), policy=Policy(device_binding="infless", keep_alive_s=5.0))
    for name in "fg":
        world.deploy(pooled(name))
    served(world, "f", "g")
    assert 2 not in world.answers
    world.calm()
    assert isinstance(world.answers[2], Reply)
    assert [each.function for each in of(world, Unbind)] == ["f@1", "g@1"]


def test_a_busy_device_provides_blocks_to_its_peer():
    one, two = device(0, peers={"virtual:1": 1e9}), device(1, peers={"virtual:0": 1e9})
    world = World(devices=(one, two))
    world.deploy(pooled(max_batch=1))
    served(world, "f")
    world.arrive()
    world.arrive()
    world.settle()
    assert [(run.device, run.peer) for run in of(world, RunOnDevice)][1:] == [
        ("virtual:0", None),
        ("virtual:1", "virtual:0"),
    ]


def test_old_answers_are_forgotten_and_alpha_is_halved_when_fewer_functions_meet_their_slo():
    world = World(devices=(device(),), policy=Policy(device_order="rrc"))
    world.deploy(pooled("f", 1000, slo_ms=500.0))
    pool = world.state.pool

    def answer_after(seconds) -> None:
        request = world.arrive()
        world.settle_processes()
        world.now += seconds
        world.finish_on_device()
        assert isinstance(world.answers[request], Reply)

    answer_after(0.1)
    while pool.ratio is None:
        world.ring()
    assert (pool.ratio, pool.alpha) == (1.0, 1.0)
    answer_after(0.6)
    while pool.ratio == 1.0:
        world.ring()
    assert (pool.ratio, pool.alpha) == (0.0, 0.5)
    world.calm()
    assert pool.ratio is None
    assert not pool.with_answers


def test_a_tenant_gets_a_device_although_another_tenant_always_has_requests():
    world = World(devices=(device(),))
    for name, tenant in (("f", "t"), ("g", "u")):
        world.deploy(pooled(name, 1000, tenant=tenant, timeout_s=1000.0))
    served(world, "f")
    world.arrive("f")
    other = world.arrive("g")
    for _ in range(1000):
        if other in world.answers:
            break
        world.arrive("f")
        world.now += 0.1
        world.settle_processes()
        if world.devices.running:
            world.finish_on_device()
    assert isinstance(world.answers[other], Reply)
    assert [each.tenant for each in of(world, StartExecutor)][:2] == ["t", "u"]


def test_two_devices_of_one_name_and_unknown_peers_are_refused():
    with pytest.raises(ValueError, match="virtual:0"):
        World(devices=(device(), device()))
    with pytest.raises(ValueError, match="virtual:7"):
        World(devices=(device(peers={"virtual:7": 1e9}),))


def test_a_link_from_a_peer_without_bandwidth_is_refused():
    with pytest.raises(ValueError, match="the link from 'virtual:1'"):
        device(peers={"virtual:1": 0.0})


@pytest.mark.parametrize(("slo_ms", "due", "answered"), [(None, None, [1, 2]), (4000.0, None, [1]), (None, 4.0, [1])])
def test_late_requests_are_refused_only_if_their_function_or_pipeline_has_an_slo(slo_ms, due, answered):
    world = World(devices=(device(),))
    world.deploy(pooled(late="refuse", slo_ms=slo_ms))
    for _ in range(2):
        world.arrive(due=due)
    world.settle_processes()
    world.now += 5.0
    world.settle()
    assert [id_ for id_, answer in world.answers.items() if isinstance(answer, Reply)] == answered


@pytest.mark.parametrize("where", ["cpu", "pool"])
def test_a_full_queue_tells_refused_requests_how_long_the_waiting_runs_take(where):
    world = World(devices=(device(0), device(1)), cores=2)
    world.deploy(spec(device=where, queue_limit=6, max_workers=2, timeout_s=1000.0))
    for _ in range(2):
        world.arrive()
        world.settle_processes()
        world.now += 10.0
        world.settle()
    requests = [world.arrive() for _ in range(7)]
    world.settle_processes()
    # Two run now, in two workers or on two devices.
    requests += [world.arrive() for _ in range(3)]
    refused = [world.answers[each].retry_after_s for each in requests if each in world.answers]
    assert refused == [6 * 10.0 / 2] * 2


@pytest.mark.parametrize("first_s", [0.2, 2.0])
def test_requests_that_no_run_can_answer_in_time_run_all_the_same_while_their_due_time_has_not_passed(first_s):
    """A transfer takes 600 ms, and only runs can bring the blocks or show that the function is fast."""
    world = World(devices=(device(),))
    world.deploy(pooled(late="refuse", slo_ms=500.0))
    for run_s in (first_s, 1.0, *[0.01] * 20):
        request = world.arrive()
        world.settle_processes()
        world.now += run_s
        world.finish_on_device()
        assert isinstance(world.answers[request], Reply)
    assert world.state.functions["f@1"].pool.times.measured_s(1) < 0.1
    waits = [world.arrive() for _ in range(2)]
    world.now += 0.6
    world.settle()
    assert [type(world.answers[each]) for each in waits] == [Reply, Refuse]


def test_of_requests_that_no_run_can_answer_in_time_the_newest_batch_of_the_first_priority_is_answered():
    world = World(devices=(device(),))
    world.deploy(pooled(late="refuse", slo_ms=500.0, max_batch=2))
    world.arrive()
    world.settle_processes()
    past_due, waits = world.arrive(priority=1), []
    world.now += 2.0
    for priority in (1, 1, 1, 200):
        waits.append(world.arrive(priority=priority))
        world.now += 0.01
    world.settle()
    assert isinstance(world.answers[past_due], Refuse)
    assert [type(world.answers[each]) for each in waits] == [Refuse, Reply, Reply, Refuse]


def test_the_last_binding_names_evicted_functions_of_the_same_tenant_only():
    world = World(devices=(device(),), device_isolation="none")
    for name, tenant, size in (("f", "t", 400_000), ("g", "u", 400_000), ("h", "t", 900_000)):
        world.deploy(spec(name, 1, [(f"{name}-weights", size)], tenant=tenant, device="pool"))
    served(world, "f", "g", "h")
    last = Published(world.scheduler.cycle).detail("h@1", world.now).pool.last_device
    assert last.endswith("evicted f@1, 1 of other tenants")


def bound_until_idle(**config) -> World:
    """A world with one device, to which `f` is bound until it was idle for 100 s; `g` has no room beside it."""
    policy = Policy(device_binding="infless", keep_alive_s=100.0)
    world = World(devices=(device(),), policy=policy, **config)
    # The timer of a family is that of its first member, which is not used.
    for name, family in (("e", "one"), ("f", "one"), ("g", "two")):
        world.deploy(pooled(name, timeout_s=500.0, family=family))
    served(world, "f")
    return world


def test_a_function_leaves_its_device_as_soon_as_its_keep_alive_ends():
    world = bound_until_idle()
    request = world.arrive("g")
    while request not in world.answers:
        world.ring()
        world.settle()
    assert isinstance(world.answers[request], Reply)
    assert world.now < 200.0


def test_a_function_that_waits_for_a_device_does_not_keep_it_from_the_function_that_is_bound_to_it():
    world = bound_until_idle(device_isolation="function")
    requests = [world.arrive("g")]
    world.settle_processes()
    requests.append(world.arrive("f"))
    while not world.answers.keys() >= set(requests):
        world.settle()
        if not world.answers.keys() >= set(requests):
            world.ring()
    assert {type(world.answers[each]) for each in requests} == {Reply}


def test_a_device_with_many_blocks_of_functions_evicts_the_least_recently_used_function(monkeypatch):
    monkeypatch.setattr(device_runs, "REFERENCES_MAX", 6)
    world = World(devices=(device(),))
    shared = [("a", 100), ("b", 100)]
    for name in "fghk":
        world.deploy(spec(name, blobs=shared, device="pool"))
    served(world, "f", "g", "h", "f", "k")
    runs = of(world, RunOnDevice)
    assert [run.evict for run in runs] == [(), (), (), (), ("g@1",)]
    # The blocks stay there, because the other functions have them too.
    assert [run.missing_bytes for run in runs] == [200, 0, 0, 0, 0]
    assert list(world.state.pool.devices["virtual:0"].residents) == ["h@1", "f@1", "k@1"]
