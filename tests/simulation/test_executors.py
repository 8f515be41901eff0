"""A run on a simulated device takes the longer of its execution and its transfer, plus the time of the first group."""

import msgspec
import pytest

from overwinter.core.actions import RunOnDevice, StartExecutor
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import RunEnded, WorkerExited, WorkerReady
from overwinter.simulation.executors import Executors
from overwinter.simulation.models import MIB
from overwinter.simulation.timeline import Timeline
from tests.simulation.scenes import function, scene

SPEED = 1000.0 * MIB
PEER_SPEED = 4000.0 * MIB
PAIR = [
    DeviceConfig(
        name=name,
        memory_bytes=100 * MIB,
        bytes_per_s=SPEED,
        latency_s=0.0,
        switch="s",
        peers={peer: PEER_SPEED},
        group_bytes=MIB,
    )
    for name, peer in (("a", "b"), ("b", "a"))
]
RUN_S = 0.01
FIRST_S = 0.001 / 8


class Pool:
    """Two devices behind one switch, each with an executor, and the events that come from them."""

    def __init__(self, tenant=None, configs=PAIR, **changes):
        self.timeline = Timeline()
        self.events = []
        self.executors = Executors(configs, self.timeline, self._handle)
        pool = {"settings": {"device": "pool"}, **changes}
        models = [function("f", variants=2, **pool), function("g", blocks=[{"mib": 60}], **pool)]
        made = scene(*models, devices=[{"name": each.name, "memory_bytes": each.memory_bytes} for each in configs])
        self.functions = {each.spec.id: each for each in made.simulated_functions()}
        self.names = [each.name for each in configs]
        for number, name in enumerate(self.names, 1):
            self.executors.start(StartExecutor(number, name, tenant), 0.0, None, None)
        self.timeline.run_until(0.0)

    def _handle(self, event):
        self.events.append((self.timeline.now, event))

    def run(self, id_, mib, device="a", number=1, until=None, crash=None, unplaced=False, **more):
        executor = self.names.index(device) + 1
        action = RunOnDevice(executor, device, number, id_, (1,), missing_bytes=mib * MIB, **more)
        self.executors.run(action, [self.functions[id_]], RUN_S, crash, unplaced)
        if until is None:
            self.finish()

    def finish(self):
        """Let all that is in progress end; `ended` then has the events, with the seconds since this call."""
        began = self.timeline.now
        self.events.clear()
        while self.timeline.next_at() < float("inf"):
            self.timeline.step()
        self.ended = [(at - began, event) for at, event in self.events]


def ended(seconds, moved, executor=1, number=1):
    return [(pytest.approx(seconds), RunEnded(executor, number, moved_bytes=moved * MIB))]


def test_an_executor_is_ready_after_its_start():
    timeline, events = Timeline(), []
    executors = Executors(PAIR, timeline, lambda event: events.append((timeline.now, event)))
    executors.start(StartExecutor(1, "a"), 0.25, None, None)
    timeline.run_until(1.0)
    assert events == [(0.25, WorkerReady(1))]
    with pytest.raises(RuntimeError, match="has an executor already"):
        executors.start(StartExecutor(2, "a"), 0.25, None, None)


def test_a_swap_takes_its_transfer_and_the_first_group_and_the_next_run_only_its_execution():
    pool = Pool()
    pool.run("f-0000@1", 31)
    assert pool.ended == ended(0.031 + FIRST_S, 31)
    pool.run("f-0000@1", 0)
    assert pool.ended == ended(RUN_S, 0)


def test_the_blocks_that_a_sibling_does_not_share_are_copied_during_its_execution():
    pool = Pool(swap_ms=2.0)
    pool.run("f-0000@1", 31)
    pool.run("f-0001@1", 1)
    assert pool.ended == ended(RUN_S + FIRST_S + 0.002, 1)


def test_two_swaps_behind_one_switch_take_twice_as_long():
    pool = Pool()
    pool.run("f-0000@1", 31, "a", 1, until="later")
    pool.run("f-0000@1", 31, "b", 2)
    assert pool.ended == ended(0.062 + FIRST_S, 31) + ended(0.062 + FIRST_S, 31, 2, 2)


def test_each_group_waits_for_the_latency_of_its_link():
    slow = [DeviceConfig(name="a", memory_bytes=100 * MIB, bytes_per_s=SPEED, latency_s=1e-3, group_bytes=10 * MIB)]
    pool = Pool(configs=slow)
    pool.run("f-0000@1", 31)
    assert pool.ended == ended((0.031 + 6e-3) + (0.010 / 8 + 1e-3), 31)


def test_a_peer_gives_what_it_has_and_the_host_the_rest():
    pool = Pool()
    pool.run("f-0000@1", 31, "a")
    pool.run("f-0001@1", 31, "b", peer="a")
    assert pool.ended == ended(RUN_S + FIRST_S, 31, 2)
    pool.run("g@1", 60, "a")
    pool.run("g@1", 60, "b", peer="a")
    assert pool.ended == ended(0.015 + FIRST_S, 60, 2)


def test_blocks_that_are_still_on_the_way_to_a_peer_are_not_copied_from_it():
    pool = Pool()
    pool.run("g@1", 60, "a", 1, until="later")
    pool.run("g@1", 60, "b", 2, peer="a")
    assert pool.ended == ended(0.120 + FIRST_S, 60) + ended(0.120 + FIRST_S, 60, 2, 2)


def test_an_eviction_frees_only_what_no_other_function_has():
    pool = Pool()
    pool.run("f-0000@1", 31)
    pool.run("f-0001@1", 1)
    pool.run("g@1", 60, evict=("f-0000@1",))
    pool.run("f-0000@1", 1)
    # The other function still has the rest.
    [(_, last)] = pool.ended
    assert last.moved_bytes == MIB


def test_more_than_fits_on_a_device_is_an_error():
    small = [msgspec.structs.replace(each, memory_bytes=91 * MIB) for each in PAIR]
    pool = Pool(configs=small)
    pool.run("f-0000@1", 31)
    pool.run("g@1", 60)
    with pytest.raises(OverflowError, match="with those of f-0001@1"):
        pool.run("f-0001@1", 1)


@pytest.mark.parametrize("mib", [0, 30, 32])
def test_a_wrong_number_of_missing_bytes_is_an_error(mib):
    with pytest.raises(RuntimeError, match="were said to be missing"):
        Pool().run("f-0000@1", mib)


def test_a_device_runs_one_function_at_a_time_and_only_functions_of_its_executor_s_tenant():
    pool = Pool()
    pool.run("f-0000@1", 31, until="later")
    with pytest.raises(RuntimeError, match="not free"):
        pool.run("f-0001@1", 1)
    with pytest.raises(RuntimeError, match="another's executor"):
        Pool(tenant="another").run("f-0000@1", 31)


def test_unbinding_a_function_drops_its_blocks_and_is_an_error_during_its_run():
    pool = Pool()
    pool.run("f-0000@1", 31)
    pool.executors.unbind(1, "f-0000@1")
    pool.run("f-0000@1", 31, until="later")
    with pytest.raises(RuntimeError, match="during its run"):
        pool.executors.unbind(1, "f-0000@1")
    pool.finish()
    pool.executors.unbind(1, "unknown@1")
    pool.executors.unbind(9, "f-0000@1")


def test_an_executor_that_ends_leaves_an_empty_device_and_all_bandwidth_of_its_switch_to_others():
    pool = Pool()
    pool.run("f-0000@1", 31)
    pool.run("g@1", 60, "a", 2, until="later")
    pool.run("g@1", 60, "b", 3, until="later")
    pool.executors.exit(1, "killed")
    pool.finish()
    exited, other = pool.ended
    assert exited == (0.0, WorkerExited(1, "WorkerError", "killed"))
    assert other == (pytest.approx(0.060 + FIRST_S), RunEnded(2, 3, moved_bytes=60 * MIB))
    pool.executors.start(StartExecutor(3, "a"), 0.0, None, None)
    pool.executors.run(RunOnDevice(1, "a", 4, "g@1", (1,)), [pool.functions["g@1"]], RUN_S, None, False)
    pool.finish()
    assert [event for _, event in pool.ended] == [WorkerReady(3)]
    action = RunOnDevice(3, "a", 5, "f-0000@1", (1,), missing_bytes=31 * MIB)
    pool.executors.run(action, [pool.functions["f-0000@1"]], RUN_S, None, False)
    pool.finish()
    assert [event.moved_bytes for _, event in pool.ended] == [31 * MIB]


def test_a_fault_ends_an_executor_during_its_start_during_a_run_or_at_the_end_of_its_life():
    pool = Pool()
    pool.run("f-0000@1", 31, crash=0.5)
    assert pool.ended == [(pytest.approx(RUN_S / 2), WorkerExited(1, "WorkerError", "crashed by a fault"))]
    pool.executors.start(StartExecutor(3, "a"), 1.0, 0.5, None)
    pool.finish()
    assert pool.ended == [(pytest.approx(0.5), WorkerExited(3, "WorkerError", "crashed by a fault"))]
    pool.executors.start(StartExecutor(4, "a"), 1.0, None, 3.0)
    pool.finish()
    events = [WorkerReady(4), WorkerExited(4, "WorkerError", "killed by a fault")]
    assert pool.ended == [(pytest.approx(at), event) for at, event in zip((1.0, 3.0), events, strict=True)]


def test_what_does_not_fit_in_one_piece_is_unplaced_after_its_evictions():
    pool = Pool()
    pool.run("f-0000@1", 31)
    pool.run("f-0001@1", 1)
    pool.run("g@1", 60, unplaced=True, evict=("f-0000@1",))
    assert pool.ended == [(0.0, RunEnded(1, 1, unplaced=True))]
    pool.run("g@1", 60, unplaced=True, evict=("f-0001@1",))
    assert pool.ended == ended(0.060 + FIRST_S, 60)
    pool.run("f-0000@1", 31)
    assert pool.ended == ended(0.031 + FIRST_S, 31)
