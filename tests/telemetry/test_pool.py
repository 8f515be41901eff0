"""The readers derive what happens on devices from the steps alone, and count it as the scheduler does."""

from random import Random

import pytest

from overwinter.core.actions import Reply, RunOnDevice, StopWorker
from overwinter.core.events import LoadAsked, Removed, UnloadAsked
from overwinter.core.ids import whole_id
from overwinter.store.usage import UsageFile
from overwinter.telemetry.metering import IDLE_DEVICE_PRICE, Meter
from overwinter.telemetry.report import StepReader
from overwinter.telemetry.statistics import Statistics
from tests.scheduler.test_devices import device, of, pooled
from tests.scheduler.world import World, spec

DAY = 86400.0


class Watched(World):
    """A world whose steps are read."""

    def __init__(self, **config) -> None:
        super().__init__(**config)
        self.statistics, self.reader = Statistics(), StepReader(100.0)

    def send(self, event) -> list:
        actions = super().send(event)
        for reader in (self.statistics, self.reader):
            reader.observe(self.now, event, actions)
        return actions

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def serve(self, name="f", seconds=1.0) -> None:
        """Let a request be answered by a run of this time."""
        self.arrive(name)
        self.settle_processes()
        self.wait(seconds)
        self.settle()

    def agree(self) -> None:
        """Check that the statistics have what the scheduler's tables have."""
        pool, seen = self.state.pool, self.statistics.pool
        assert seen.executors.keys() == pool.executors.keys()
        for id_, known in pool.executors.items():
            executor, run = known.executor, seen.executors[id_].run
            assert seen.executors[id_].stopping == executor.stopping
            assert (None if run is None else (run.id, run.function, run.requests)) == (
                None
                if executor.operation is None
                else (executor.run, executor.operation.function.spec.id, executor.operation.requests)
            )
        for name, device_ in seen.devices.items():
            assert device_.residents.keys() == pool.devices[name].residents.keys()
            assert device_.blocks.nbytes == pool.devices[name].blocks.nbytes
        operations = [each.operation for each in pool.devices.values() if each.operation is not None]
        running = {function.spec.id for operation in operations for function in operation.functions}
        loaded = {id_ for id_, each in self.state.functions.items() if each.loaded and each.pool is not None}
        assert seen.idle.keys() == {whole_id(id_) for id_ in loaded} - {whole_id(id_) for id_ in running}


@pytest.mark.parametrize("cut", [False, True])
def test_the_slices_of_a_program_are_billed_as_one(cut, tmp_path):
    world = Watched(devices=(device(),))
    world.deploy(spec("f", 1, [(block, 10_000) for block in "abcd"], device="pool"), cut=cut)
    world.serve("f", 1.0)
    busy_s = world.now
    world.wait(100.0)
    meter = Meter(world.statistics, UsageFile(tmp_path / "usage"), print)
    [usage] = meter.usage(None, world.now, DAY)
    assert usage.device.idle_ms == pytest.approx(100_000 + (1000 * busy_s - usage.device.device_ms), abs=2000)


def test_an_executor_whose_device_failed_counts_as_a_crash():
    world = Watched(devices=(device(),))
    world.deploy(pooled())
    world.serve()
    world.arrive()
    [run] = world.devices.running.values()
    world.finish_on_device(run.requests, fault="CUDA error: unspecified launch failure")
    seen = world.statistics.pool.devices["virtual:0"]
    assert seen.crashes == 1
    world.settle_processes()
    assert seen.crashes == 1


@pytest.mark.parametrize("isolation", ["none", "tenant", "function"])
@pytest.mark.parametrize("seed", range(4))
def test_the_readers_agree_with_the_scheduler_whatever_happens(seed, isolation, tmp_path):
    chance, world = Random(seed), Watched(devices=(device(0), device(1)), device_isolation=isolation)
    names = "fghi"
    for name in names:
        blobs = [("trunk", 300_000), (f"{name}-head", chance.choice((10_000, 400_000)))]
        world.deploy(spec(name, 1, blobs, device="pool", max_batch=2, tenant="tu"[name in "hi"]))
    for _ in range(300):
        world.wait(chance.random())
        may = [lambda: world.arrive(chance.choice(names))] * 4
        may += [lambda: world.send(chance.choice((UnloadAsked, LoadAsked))(f"{chance.choice(names)}@1"))]
        may += [world.load_blocks] * 3 if world.loads else []
        may += [world.ready] * 3 if world.starting else []
        if world.devices.running:
            may += [world.finish_on_device] * 4
            may += [lambda: world.finish_on_device(next(iter(world.devices.running.values())).requests[:1])]
            may += [lambda: world.finish_on_device(unplaced=True)]
        if world.devices.executors:
            may += [lambda: world.die(chance.choice(list(world.devices.executors)), lost_blocks=chance.random() < 0.3)]
        if world.stopping:
            may += [lambda: world.die(min(world.stopping))] * 3
        if world.alarm is not None and world.alarm <= world.now:
            may = [world.ring]
        chance.choice(may)()
        world.agree()
    for name in names:
        world.send(Removed(f"{name}@1"))
        world.agree()
    world.calm()
    world.agree()
    usage_file = UsageFile(tmp_path / "usage.sqlite")
    Meter(world.statistics, usage_file, print).flush(world.now, DAY)
    usage_file.close()
    assert world.statistics.removed_tallies == []


def test_two_versions_of_a_function_in_one_run_count_as_one_run_of_it():
    world = Watched(devices=(device(),))
    for version in (1, 2):
        blobs = [("trunk", 500_000), (f"head-{version}", 10)]
        world.deploy(spec("f", version, blobs, device="pool", max_batch=8, family="one"))
    for version in (1, 2, 1, 2):
        world.arrive("f", version)
        world.settle_processes()
        world.wait(0.1)
        world.settle()
    f, before = world.statistics.tallies["f"], len(of(world, RunOnDevice))
    for version in (1, 1, 2, 2, 2):
        world.arrive("f", version)
    assert world.statistics.running()["f"] == 1
    world.finish_on_device()
    assert set(of(world, RunOnDevice)[-1].functions) == {"f@1", "f@2"}
    assert world.statistics.running()["f"] == 4
    world.settle()
    assert f.by_device["virtual:0"].runs == f.on_devices.runs == len(of(world, RunOnDevice)) == before + 2


def test_a_run_counts_where_and_for_whom_it_ran():
    world = Watched(devices=(device(),))
    for name in "fg":
        world.deploy(spec(name, 1, [("trunk", 500_000), (f"{name}-head", 10_000)], device="pool", slo_ms=1500))
    for name, seconds in (("f", 2.0), ("f", 1.0), ("g", 0.5)):
        world.serve(name, seconds)
    seen, f = world.statistics.pool.devices["virtual:0"].counts, world.statistics.tallies["f"]
    assert (seen.hits, seen.misses, seen.run_s, seen.moved_bytes) == (1, 2, 3.5, 520_000)
    assert (f.by_device["virtual:0"].hits, f.by_device["virtual:0"].misses, f.on_devices.run_s) == (1, 1, 3.0)
    assert (f.on_devices.moved_bytes, f.on_devices.hit_ratio) == (510_000, 0.5)
    assert (f.runs, f.run_requests, f.run_s, f.answered, f.attainment, f.core_s) == (2, 2, 3.0, 2, 0.5, 0.0)
    assert f.answered_by_start == {"disk": 1, "warm": 1}
    assert world.statistics.tallies["g"].answered_by_start == {"disk": 1}


def test_an_unplaced_run_counts_as_waiting_and_not_as_a_run_or_a_retry():
    world = Watched(devices=(device(),))
    world.deploy(pooled())
    world.deploy(pooled("g", 300_000))
    world.serve("g")
    world.arrive()
    world.settle_processes()
    world.wait(1.0)
    world.finish_on_device(unplaced=True)
    world.wait(1.0)
    assert len(of(world, RunOnDevice)) == 3
    assert world.statistics.running() == {"f": 1}
    world.settle()
    f, counts = world.statistics.tallies["f"], world.statistics.pool.devices["virtual:0"]
    assert (f.retries, f.wait_s, f.on_devices.runs, f.on_devices.run_s, counts.unplaced) == (0, 1.0, 1, 1.0, 1)


def test_an_executor_that_dies_or_hangs_counts_as_a_crash_and_its_run_is_billed():
    world = Watched(devices=(device(),))
    world.deploy(pooled(timeout_s=5.0))
    world.arrive()
    world.settle_processes()
    world.wait(1.0)
    world.die(of(world, RunOnDevice)[-1].executor)
    while not world.devices.running:
        world.settle_processes()
        if not world.devices.running:
            world.ring()
    f, seen = world.statistics.tallies["f"], world.statistics.pool.devices["virtual:0"]
    assert (seen.starts, seen.crashes, f.on_devices.run_s, f.on_devices.moved_bytes) == (2, 1, 1.0, 0)
    world.settle()
    assert (f.retries, f.answered, f.runs) == (1, 1, 2)
    world.arrive()
    while not world.stopping:
        world.ring()
    assert (seen.crashes, f.runs, seen.residents) == (2, 3, {})
    world.settle_processes()
    world.agree()


def test_a_load_continues_when_a_second_executor_lacks_the_same_blocks():
    world = Watched(devices=(device(0), device(1)))
    world.deploy(spec("f", 1, [("f", 10_000)], device="pool"))
    for _ in range(2):
        world.arrive("f")
        world.settle_processes()
    assert len(world.devices.running) == 2
    for executor in sorted(world.devices.executors):
        world.die(executor, lost_blocks=True)
    assert len(world.loads) == 1
    world.load_blocks()
    assert (world.state.functions["f@1"].loaded, world.statistics.store("").held("f@1")) == (True, 10_000)
    world.agree()


def test_an_executor_that_is_replaced_while_it_prepares_a_function_has_not_crashed():
    world = Watched(devices=(device(),))
    for number, function in enumerate((pooled("f"), pooled("g"), pooled("h", tenant="u"))):
        world.now = float(number)
        world.deploy(function, on_trial=True)
        world.settle()
    world.arrive("f")
    world.ready()
    world.finish_on_device()
    assert world.devices.preparing
    world.now += 60.0
    world.arrive("h")
    assert [each.kill for each in of(world, StopWorker)] == [True]
    world.settle()
    assert isinstance(world.answers[2], Reply)
    seen = world.statistics.pool.devices["virtual:0"]
    assert (seen.starts, seen.crashes) == (2, 0)
    world.agree()


def test_a_later_slice_is_no_retry_unless_it_is_run_again():
    world = Watched(devices=(device(),))
    world.deploy(spec("f", 1, [("a", 10_000), ("b", 10_000)], device="pool"), cut=True)
    world.serve()
    f = world.statistics.tallies["f"]
    assert (f.retries, f.answered, len(of(world, RunOnDevice))) == (0, 1, 2)
    world.arrive()
    world.settle_processes()
    world.finish_on_device()
    world.die(of(world, RunOnDevice)[-1].executor)
    while not world.devices.running:
        world.settle_processes()
        if not world.devices.running:
            world.ring()
    world.settle()
    assert [run.function for run in of(world, RunOnDevice)][2:] == ["f@1", "f:2@1", "f:2@1"]
    assert (f.retries, f.answered) == (1, 2)


def test_a_function_pays_for_its_runs_and_a_tenth_while_it_lies_in_the_host_store(tmp_path):
    world = Watched(devices=(device(),))
    for name in "fg":
        world.deploy(spec(name, 1, [("trunk", 500_000), (f"{name}-head", 10_000)], device="pool"))
    usage_file = UsageFile(tmp_path / "usage.sqlite")
    meter = Meter(world.statistics, usage_file, print)
    world.serve("f", 2.0)
    world.wait(1.0)
    world.serve("g", 1.0)
    world.wait(6.0)
    meter.flush(world.now, DAY)
    world.serve("f", 3.0)
    world.arrive("f")
    world.wait(4.0)
    f, g = (each.device for each in meter.usage(None, world.now, DAY))
    # At 0 to 2, 10 to 13 and from 13 on it ran.
    assert (f.device_ms, f.idle_ms) == (pytest.approx(9000), pytest.approx(8000))
    assert f.billed_ms == pytest.approx(9000 + IDLE_DEVICE_PRICE * 8000)
    assert (g.device_ms, g.idle_ms) == (pytest.approx(1000), pytest.approx(13_000))
    assert (f.moved_bytes, g.moved_bytes) == (510_000, 10_000)
    # Alone for 3 s, then each has half of the trunk.
    assert f.device_byte_s == pytest.approx(3 * 510_000 + 14 * 260_000)
    assert g.device_byte_s == pytest.approx(14 * 260_000)
    world.settle()
    for name in "fg":
        world.send(Removed(f"{name}@1"))
    meter.flush(world.now, DAY)
    after = [each.device for each in meter.usage(None, world.now + 9, DAY)]
    assert after == [f, g]
    usage_file.close()


def test_blocks_that_are_brought_ahead_are_charged_to_no_function(tmp_path):
    world = Watched(devices=(device(),))
    world.deploy(pooled())
    world.serve(seconds=1.0)
    world.wait(1.0)
    [executor] = world.statistics.pool.executors
    brings = RunOnDevice(executor, "virtual:0", 99, "f@1", (), 600_000)
    world.statistics.observe(world.now, UnloadAsked("other@1"), [brings])
    usage_file = UsageFile(tmp_path / "usage.sqlite")
    [used] = Meter(world.statistics, usage_file, print).usage(None, world.now + 5, DAY)
    assert (used.device.device_ms, used.device.idle_ms) == (pytest.approx(1000), pytest.approx(1000))
    usage_file.close()


def test_without_devices_there_are_no_figures_of_devices(tmp_path):
    world = Watched()
    world.deploy(spec())
    world.serve()
    usage_file = UsageFile(tmp_path / "usage.sqlite")
    [used] = Meter(world.statistics, usage_file, print).usage(None, world.now, DAY)
    usage_file.close()
    assert used.device is None
    assert isinstance(world.answers[1], Reply)
    assert not world.statistics.pool.devices


def test_a_report_has_the_figures_of_devices_and_of_the_functions_on_them():
    world = Watched(devices=(device(0), device(1)))
    for name in "fg":
        world.deploy(spec(name, 1, [("trunk", 500_000), (f"{name}-head", 10_000)], device="pool"))
    for name, seconds in (("f", 2.0), ("f", 1.0), ("g", 1.0)):
        world.serve(name, seconds)
    world.wait(4.0)
    report = world.reader.report(world.now)
    [used] = report.devices.values()
    assert (used.runs, used.busy_share, used.hit_ratio) == (3, 0.5, pytest.approx(1 / 3))
    assert (used.moved_bytes, used.executors, used.crashes, used.unplaced) == (520_000, 1, 0, 0)
    f, total = report.functions["f"], report.total
    assert (f.device_seconds, f.idle_device_seconds, f.hit_ratio, f.moved_bytes) == (3.0, 5.0, 0.5, 510_000)
    assert (total.device_seconds, total.hit_ratio, total.moved_bytes) == (4.0, pytest.approx(1 / 3), 520_000)
    assert (total.busy_core_s, total.worker_seconds) == (0, 0)
