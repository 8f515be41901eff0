"""Published snapshots agree with the scheduler's tables, and do not change."""

from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from overwinter.core.events import RateForecast
from overwinter.core.policies import Policy
from overwinter.scheduler import details, snapshot
from overwinter.scheduler.lifecycles import function_state, worker_state
from overwinter.scheduler.order import has_spare_core
from overwinter.scheduler.published import Published
from tests.scheduler.replayed import play
from tests.scheduler.test_devices import device
from tests.scheduler.world import World, spec


def everything(published: Published, world: World) -> list[object]:
    """All that can be asked."""
    ids, names = list(world.state.functions), list(world.state.versions)
    tenants = {each.spec.tenant for each in world.state.functions.values()}
    stores = {(each.spec.tenant, each.spec.store) for each in world.state.functions.values()}
    blocks = {address for each in world.state.functions.values() for address in each.sizes}
    return [
        [published.function(id_, world.now) for id_ in ids],
        [published.detail(id_, world.now) for id_ in ids],
        [published.family(id_) for id_ in ids],
        [published.functions_of(tenant) for tenant in tenants],
        [(published.default(name), published.versions(name)) for name in names],
        [published.held(tenant, store, blocks) for tenant, store in sorted(stores)],
        (
            published.families(),
            published.busy(),
            published.expected_bytes(),
            published.profiled_memory(),
            published.stores(),
        ),
    ]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 16), steps=st.integers(20, 200))
def test_published_views_do_not_change(seed, steps):
    world = World(policy="overwinter", cores=2, workers_max=4, host_bytes=60, memory_bytes=40)
    published = Published(world.scheduler.cycle)
    play(world, Random(seed), steps)
    result = everything(published, world)
    before = repr(result)
    play(world, Random(seed + 1), 50, first=steps)
    assert repr(result) == before


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 16), steps=st.integers(20, 200))
@example(seed=544, steps=200)
@example(seed=1958, steps=200)
@example(seed=2854, steps=200)
def test_published_views_agree_with_the_tables(seed, steps):
    world = World(policy="overwinter", cores=2, workers_max=4, host_bytes=60, memory_bytes=40)
    published, state = Published(world.scheduler.cycle), world.state
    play(world, Random(seed), steps)
    for id_, function in state.functions.items():
        detail = published.detail(id_, world.now)
        assert detail.function == published.function(id_, world.now)
        assert detail.function.state == function_state(function, world.now)
        assert [each.worker for each in detail.workers] == [each.worker for each in published.family(id_).workers]
        for worker in detail.workers:
            assert worker.state == worker_state(state.workers[worker.worker])
            assert worker.requests == len(list(state.workers[worker.worker].requests()))
            assert sum(each.requests for each in worker.bound) == worker.requests
        assert set(published.functions_of(function.spec.tenant)) == {
            other.spec.id for other in state.functions.values() if other.spec.tenant == function.spec.tenant
        }
        tenant, store = function.spec.tenant, function.spec.store
        own = [each for each in state.functions.values() if (each.spec.tenant, each.spec.store) == (tenant, store)]
        assert published.held(tenant, store, function.sizes) == {
            address
            for address in function.sizes
            if any(address in each.sizes for each in own if each.loaded or each.loading is not None)
        }
    assert published.busy() == any(not worker.is_idle for worker in state.workers.values())
    assert {id_: each.function for id_, each in published.profiled_memory().items()} == {
        id_: worker.function for id_, worker in state.workers.items()
    }
    loading = {each.spec.store for each in state.functions.values() if each.loading is not None}
    assert {name for name, blocks in published.stores().items() if not blocks.settled} == loading


def test_of_many_functions_the_first_are_listed_and_all_counted(monkeypatch):
    for module in (snapshot, details):
        monkeypatch.setattr(module, "LISTED_MAX", 2)
    world = World(cores=1, workers_max=1)
    for name in "fghi":
        world.deploy(spec(name, blobs=(("shared", 10), (name, 5)), family="one"))
    for name in "fghi":
        world.arrive(name)
        world.settle()
    published = Published(world.scheduler.cycle)
    detail, family = published.detail("h@1", world.now), published.family("h@1")
    assert (detail.members, detail.member_count) == (family.members, family.member_count) == (("f@1", "g@1"), 4)
    [worker], [seen] = detail.workers, family.workers
    assert (seen.bound, seen.bound_count, worker.bound_count) == (("f@1", "g@1"), 4, 4)
    # The described function is among those listed.
    assert [each.function for each in worker.bound] == ["f@1", "h@1"]


def test_a_spare_core_is_published_only_when_the_loop_asks():
    world = World(cores=1)
    published = Published(world.scheduler.cycle)
    world.deploy(spec("f", blobs=(("a", 10),)))
    world.arrive("f")
    world.settle_processes()
    world.arrive("f")
    assert published.has_spare_core
    assert not has_spare_core(world.scheduler.cycle)
    published.publish()
    assert not published.has_spare_core


def test_a_name_that_is_not_there_has_no_version():
    published = Published(World().scheduler.cycle)
    assert (published.default("f"), published.versions("f").numbers) == (None, [])
    assert published.function("f@1", 0.0) is published.detail("f@1", 0.0) is published.family("f@1") is None


def test_the_expected_rate_of_a_function_is_that_of_its_family():
    world = World(policy=Policy(rate="oracle"))
    for name, rate in (("f", 3.0), ("g", 5.0)):
        world.deploy(spec(name, family="one"))
        world.send(RateForecast(f"{name}@1", rate))
    assert Published(world.scheduler.cycle).detail("f@1", world.now).expected_rate == 8.0


def test_a_function_shows_the_backoff_of_its_program_on_the_pool():
    world = World(cores=4, devices=(device(),))
    published = Published(world.scheduler.cycle)
    world.deploy(spec("h:program", device="pool", blobs=(("p", 10),)))
    world.deploy(spec("h", device="pool", has_handler=True, blobs=()))
    program = world.state.functions["h:program@1"]
    world.arrive("h:program", 1)
    while program.backoff_until <= world.now:
        world.settle_processes()
        if world.devices.running:
            world.die(min(world.devices.executors))
        else:
            world.ring()
    detail = published.detail("h@1", world.now)
    assert (detail.failures, detail.backoff_s) == (program.failures, program.backoff_until - world.now)
    assert detail.backoff_s > 0
    world.now = program.backoff_until
    world.state.functions["h@1"].failures = program.failures + 1
    assert published.detail("h@1", world.now).failures == program.failures + 1
