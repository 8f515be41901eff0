"""Which blocks are evicted from the host store, when, and which never are."""

from itertools import pairwise

import pytest

from overwinter.core.actions import Drop, Evict, LoadBlocks, Refuse, Reply
from overwinter.core.events import Demoted, HostCapacityMeasured, LoadAsked, MemoryPressure, Removed, UnloadAsked
from overwinter.core.profile import Point, Profile
from overwinter.scheduler import victims
from overwinter.scheduler.victims import BYTES_TIME_SLICE_WAKES
from tests.scheduler.test_devices import device
from tests.scheduler.world import World, spec


def own(name: str, **settings):
    """Return a function of 10 shared bytes and 10 of its own."""
    return spec(name, blobs=(("base", 10), (f"{name}-head", 10)), keep_alive_s=0.0, **settings)


def use(world: World, name: str) -> None:
    world.arrive(name)
    world.settle()
    world.ring()
    world.settle()
    assert not world.state.workers


def full(**config) -> World:
    """Return a world in which f, g and h were used in this order and fill 40 bytes."""
    world = World(host_bytes=40, **config)
    for name in "fgh":
        world.deploy(own(name))
        world.now += 10
        use(world, name)
    world.log.clear()
    return world


def dropped(world: World) -> list[str]:
    return [address for action in world.log if isinstance(action, Drop) for address in action.addresses]


def test_the_function_used_longest_ago_is_evicted_and_what_it_shares_stays():
    world = full(policy="lru")
    use(world, "f")
    world.deploy(own("i"))
    use(world, "i")
    assert dropped(world) == ["g-head"]
    assert world.resources.host.taken == 40
    assert [action.function for action in world.log if isinstance(action, Evict)] == ["g@1"]


def test_an_eviction_keeps_what_is_needed_by_the_function_for_which_it_makes_space():
    """Only f holds `base`, which i needs too: without it, i would need more space than was made."""
    world = World(host_bytes=40, policy="lru")
    world.deploy(own("f"))
    world.deploy(spec("g", blobs=(("g-block", 15),), keep_alive_s=0.0))
    world.deploy(spec("i", blobs=(("base", 10), ("i-head", 20)), keep_alive_s=0.0))
    for name in "fgi":
        world.now += 10
        use(world, name)
    assert dropped(world) == ["f-head", "g-block"]
    assert world.resources.host.taken == 30


def test_blocks_kept_for_a_function_are_dropped_if_the_function_must_wait():
    world = World(host_bytes=40, policy="lru")
    world.deploy(own("f"))
    world.deploy(spec("g", blobs=(("g-block", 15),), keep_alive_s=0.0))
    world.deploy(spec("i", blobs=(("base", 10), ("i-head", 20))))
    use(world, "f")
    world.arrive("g")
    world.arrive("i")
    assert sorted(dropped(world)) == ["base", "f-head"]
    assert world.resources.host.taken == 15
    world.settle()
    world.ring()
    world.settle()
    assert isinstance(world.answers[3], Reply)


def test_a_decision_tells_a_tenant_nothing_of_what_others_share_with_it():
    def evicted_for(block: str) -> list[Evict]:
        world = World(host_bytes=40, policy="lru")
        world.deploy(own("f", tenant="mine"))
        world.deploy(spec("g", tenant="theirs", blobs=((block, 10), ("g-head", 10)), keep_alive_s=0.0))
        for name in "fg":
            world.now += 10
            use(world, name)
        world.log.clear()
        world.deploy(spec("i", tenant="theirs", blobs=(("i-head", 20),), keep_alive_s=0.0))
        use(world, "i")
        return [each for each in world.log if isinstance(each, Evict)]

    shared, apart = evicted_for("base"), evicted_for("else")
    assert [each.function for each in shared] == ["f@1"]
    assert shared == apart


def test_a_function_used_again_is_evicted_later():
    world = full(policy="lru")
    for name in ("f", "g"):
        use(world, name)
    world.deploy(own("i"))
    use(world, "i")
    assert dropped(world) == ["h-head"]


def test_cost_aware_eviction_evicts_many_bytes_before_few_that_were_used_longer_ago():
    world = World(host_bytes=6 << 10)
    for name, own_bytes in (("f", 5 << 10), ("g", 60)):
        world.deploy(spec(name, blobs=(("base", 10), (f"{name}-head", own_bytes)), keep_alive_s=0.0))
        world.now += 10
        use(world, name)
    world.deploy(spec("h", blobs=(("base", 10), ("h-head", 2 << 10)), keep_alive_s=0.0))
    use(world, "f")
    use(world, "g")
    use(world, "f")
    world.log.clear()
    use(world, "h")
    assert dropped(world) == ["f-head"], "g was used longer ago, and gives back next to nothing"


def test_what_is_pinned_is_not_evicted():
    world = World(host_bytes=30, policy="lru")
    world.deploy(own("f", pinned=True))
    use(world, "f")
    for name in "gh":
        world.now += 10
        world.deploy(own(name))
        use(world, name)
    assert dropped(world) == ["g-head"]


def test_unused_blocks_are_evicted_when_the_keep_alive_of_blocks_ends():
    world = World(host_keep_alive_s=60.0)
    world.deploy(own("f"))
    use(world, "f")
    assert not dropped(world)
    while not dropped(world):
        world.ring()
    assert world.now == 60.0
    assert world.resources.host.taken == 0
    use(world, "f")
    assert [type(action).__name__ for action in world.log].count("LoadBlocks") == 2
    assert isinstance(world.answers[2], Reply)


def test_a_function_waits_while_the_blocks_that_must_leave_are_in_use_and_is_then_served():
    world = World(host_bytes=20)
    world.deploy(own("f"))
    world.deploy(spec("g", blobs=(("x", 20),), keep_alive_s=0.0))
    world.arrive("f")
    world.load_blocks()
    world.ready()
    world.arrive("g")
    assert not world.loads, "f runs: nothing may leave"
    world.finish()
    assert not world.loads, "f has just come"
    world.ring()
    assert world.now < 1.0
    world.settle()
    assert all(isinstance(answer, Reply) for answer in world.answers.values())
    assert len(world.answers) == 2
    assert set(dropped(world)) == {"base", "f-head"}


def test_an_idle_worker_is_stopped_for_a_function_that_needs_its_bytes():
    world = World(host_bytes=20)
    world.deploy(spec("f", keep_alive_s=1000.0, blobs=(("x", 20),)))
    world.arrive("f")
    world.settle()
    world.deploy(spec("g", blobs=(("y", 20),)))
    world.now = 1.0
    world.arrive("g")
    world.settle()
    assert isinstance(world.answers[2], Reply)
    assert world.now == 1.0


def test_blocks_are_evicted_once_the_demoted_worker_is_gone_and_the_other_worker_is_idle():
    world = World(host_bytes=20, cores=4)
    world.deploy(spec("f", keep_alive_s=1000.0, blobs=(("x", 20),), max_workers=2))
    world.deploy(spec("g", blobs=(("y", 20),)))
    for _ in range(2):
        world.arrive("f")
        world.settle_processes()
    world.finish()
    [run] = world.running.values()
    world.send(Demoted(run.worker))
    world.now += 1.0
    world.arrive("g")
    assert not dropped(world)
    world.finish()
    world.settle_processes()
    assert dropped(world) == ["x"]


def test_functions_that_share_every_block_are_evicted_one_after_the_other():
    world = World(host_bytes=20)
    for name in "fg":
        world.deploy(spec(name, keep_alive_s=0.0, blobs=(("x", 20),)))
        use(world, name)
    world.deploy(spec("h", keep_alive_s=0.0, blobs=(("y", 20),)))
    use(world, "h")
    assert isinstance(world.answers[3], Reply)
    assert [action.function for action in world.log if isinstance(action, Evict)] == ["f@1", "g@1"]
    assert dropped(world) == ["x"]


def test_what_can_never_fit_is_refused_clearly_and_evicts_nothing():
    world = full()
    world.deploy(spec("i", blobs=(("base", 10), ("x", 31))))
    world.arrive("i")
    refusal = world.answers[4]
    assert isinstance(refusal, Refuse)
    assert refusal.error == "NoSpaceError"
    assert "41 bytes" in refusal.message
    assert "40" not in refusal.message, "the capacity of the node is for its administrator"
    assert not dropped(world)
    world.log.clear()
    for name in "fgh":
        use(world, name)
    assert not [action for action in world.log if isinstance(action, LoadBlocks)], "they are where they were"


def test_what_can_never_fit_beside_what_is_pinned_evicts_nothing():
    world = World(host_bytes=40)
    for name, settings in (("f", {"pinned": True}), ("g", {})):
        world.deploy(own(name, **settings))
        use(world, name)
    world.deploy(spec("h", blobs=(("base", 10), ("x", 21))))
    world.arrive("h")
    assert world.answers[3].error == "NoSpaceError"
    assert "others have pinned" in world.answers[3].message
    assert "40" not in world.answers[3].message
    assert not dropped(world)


def test_a_worker_that_can_never_fit_is_refused_and_stops_no_other():
    def sized(memory_bytes: int) -> Profile:
        return Profile(weight_bytes=30, macs=1, points=(Point(1, memory_bytes, 1, 1, 0.1),))

    world = World(memory_bytes=100, host_bytes=40, cores=2)
    world.deploy(spec("f", profile=sized(60), blobs=(("x", 20),), keep_alive_s=100.0))
    world.arrive("f")
    world.settle()
    world.deploy(spec("g", profile=sized(101), blobs=(("y", 30),)))
    world.arrive("g")
    refusal = world.answers[2]
    assert refusal.error == "NoSpaceError"
    assert "101 bytes" in refusal.message
    assert "100" not in refusal.message
    assert not world.loads
    assert not world.stopping


def test_a_load_into_a_tmpfs_fuller_than_known_evicts_and_is_tried_once_more():
    world = full()
    world.deploy(own("i"))
    world.send(HostCapacityMeasured(1000))
    world.arrive("i")
    world.fail_load(came=("i-head",))
    assert dropped(world)
    assert [action.function for action in world.log if isinstance(action, LoadBlocks)] == ["i@1", "i@1"]
    world.settle()
    assert isinstance(world.answers[4], Reply)


def test_a_load_into_a_tmpfs_fuller_than_known_evicts_nothing_of_others_if_that_would_not_suffice():
    world = full()
    world.deploy(spec("i", blobs=(("base", 10), ("x", 41))))
    world.send(HostCapacityMeasured(1000))
    world.arrive("i")
    world.fail_load()
    # The blocks that it had claimed for itself.
    assert dropped(world) == ["x"]
    assert world.resources.host.taken == 40


def test_a_load_into_a_tmpfs_fuller_than_known_keeps_what_it_needs_and_does_not_count_it_as_freed():
    world = World(host_bytes=1000)
    world.deploy(own("f"))
    world.deploy(own("g"))
    for name in "fg":
        use(world, name)
    world.log.clear()
    world.deploy(spec("i", blobs=(("base", 10), ("x", 21))))
    world.arrive("i")
    world.fail_load()
    assert dropped(world) == ["x"], "the heads of the others have 20 bytes"
    world.log.clear()
    world.deploy(spec("j", blobs=(("base", 10), ("y", 20))))
    world.arrive("j")
    world.fail_load()
    assert sorted(dropped(world)) == ["f-head", "g-head", "y"]
    world.settle()
    assert isinstance(world.answers[4], Reply)


@pytest.mark.parametrize(("nbytes", "left"), [(1, 30), (15, 20), (1000, 0)])
def test_memory_pressure_evicts_no_more_functions_than_are_needed(nbytes, left):
    world = full()
    world.send(MemoryPressure(nbytes))
    assert world.resources.host.taken == left


def test_a_dedicated_host_store_shares_blocks_with_no_other_tenant():
    world = World()
    for name, tenant in (("f", "red"), ("g", "red"), ("h", "blue")):
        function = spec(name, blobs=(("base", 10),), tenant=tenant, dedicated=True, keep_alive_s=0.0)
        world.deploy(function)
        use(world, name)
    world.deploy(spec("i", blobs=(("base", 10),), keep_alive_s=0.0))
    use(world, "i")
    assert {name: store.nbytes for name, store in world.state.stores.items()} == {"red": 10, "blue": 10, "": 10}
    world.log.clear()
    world.send(Removed("f@1"))
    assert not dropped(world)
    world.send(Removed("g@1"))
    assert [action for action in world.log if isinstance(action, Drop)] == [Drop(("base",), "red")]


@pytest.mark.parametrize("tenant", ["t", "other"])
def test_blocks_in_use_by_a_run_that_hangs_become_free_for_another_tenant_only(tenant):
    world = World(host_bytes=20, drain_timeout_s=30.0)
    for name in ("long", "more"):
        world.deploy(spec(name, blobs=((name, 10),), family="f", timeout_s=86_400.0, has_handler=True))
        world.arrive(name)
        world.settle_processes()
    world.deploy(spec("waits", blobs=(("w", 10),), tenant=tenant, timeout_s=500.0))
    request = world.arrive("waits")
    while request not in world.answers:
        world.settle_processes()
        if any("waits@1" in world.whose(run) for run in world.running.values()):
            world.running = dict(reversed(world.running.items()))
            world.finish()
        else:
            world.ring()
    if tenant == "t":
        assert world.answers[request].error == "DeadlineError"
    else:
        assert isinstance(world.answers[request], Reply)
        assert world.now < 60.0


def test_blocks_go_to_a_function_that_waits_although_a_worker_died_as_the_time_slice_ended():
    world = World(host_bytes=10)
    for name in "fg":
        world.deploy(spec(name, blobs=((name, 10),)))
    world.arrive("f")
    world.load_blocks()
    world.ready()
    world.arrive("g")
    f = world.state.functions["f@1"]
    ends = f.blocks_usable_from + BYTES_TIME_SLICE_WAKES * f.latency.wake_s
    world.now = ends - 0.01
    world.die()
    assert world.now < ends < f.backoff_until
    while not world.alive:
        world.ring()
    assert world.state.releasing == "f@1"


def test_many_functions_that_share_their_blocks_are_evicted_in_several_steps(monkeypatch):
    monkeypatch.setattr(victims, "EVICTION_WORK_MAX", 40)
    world = World(host_bytes=30, devices=(device(),))
    names = [f"f{number}" for number in range(20)]
    for name in names:
        world.deploy(spec(name, blobs=(("a", 10), ("b", 10)), device="pool"), on_trial=True)
        world.settle()
    world.deploy(spec("busy", blobs=(("busy", 10),), timeout_s=1000.0))
    world.arrive("busy")
    world.settle_processes()
    world.log.clear()
    world.deploy(spec("big", blobs=(("big", 20),), timeout_s=1000.0))
    waiting = world.arrive("big")
    steps = [len([each for each in world.log if isinstance(each, Evict)])]
    while not world.loads:
        world.arrive("busy")
        world.ring()
        steps.append(len([each for each in world.log if isinstance(each, Evict)]))
    # A step looks at all unused functions before it evicts one, so the first step evicts two.
    # No function in use is drained.
    assert steps[0] == 2
    assert all(later > before for before, later in pairwise(steps))
    assert steps[-1] == len(names)
    assert {each.function for each in world.log if isinstance(each, Evict)} == {f"{name}@1" for name in names}
    assert dropped(world) == ["a", "b"]
    world.settle()
    assert all(isinstance(answer, Reply) for answer in world.answers.values())
    assert waiting in world.answers


def test_a_new_load_after_an_unload_may_be_tried_a_second_time_too():
    world = World(host_bytes=1000)
    for name in "gh":
        world.deploy(spec(name, blobs=((name, 10),)))
        world.arrive(name)
        world.settle()
    world.deploy(spec("f", blobs=(("f", 10),)))
    world.send(MemoryPressure(0))
    world.die(min(world.alive))
    world.arrive("f")
    world.fail_load()
    assert world.state.functions["f@1"].load_again
    world.send(UnloadAsked("f@1"))
    world.fail_load()
    world.manage(LoadAsked("f@1"))
    world.die(min(world.alive))
    request = world.arrive("f")
    world.fail_load()
    assert world.loads, "it must evict, and try again"
    world.settle()
    assert isinstance(world.answers[request], Reply)
