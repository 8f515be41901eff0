"""The memory of workers is reported as the kernel counts it, whenever it has changed."""

import os

import pytest
import torch

from overwinter.core.profile import Point
from overwinter.node import accounting
from overwinter.node.accounting import Accounting
from overwinter.node.footprints import EVERY_S, HIDDEN_CHECKS, UNATTRIBUTED_CHECKS, Footprints
from overwinter.node.memory import process_memory
from overwinter.node.process_stat import lacks_first_thread
from overwinter.scheduler.state import State, Worker
from tests.node.rig import AddOne, Function, until

MIB = 1 << 20
HEAP = 96 * MIB
BOUND = 1 << 30
WIDTH = 8192
GREEDY = f"""
import torch

def setup(assets):
    return {{"kept": bytearray(b"x") * {HEAP}}}

def preprocess(inputs, state):
    return inputs

def postprocess(outputs, inputs, state):
    return outputs
"""


TABLES = """
import ctypes

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
PROT_READ, MAP_PRIVATE, MAP_ANONYMOUS = 1, 2, 0x20

def setup(assets):
    for number in range(1024, 5120):
        # A page in each GiB needs two pages of tables.
        at = libc.mmap(number << 30, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        ctypes.c_char.from_address(at).value
"""
COPIES = """
import sys

def setup(assets):
    # A reference to an object writes to its page.
    modules = [dict(vars(module)) for module in list(sys.modules.values())]
    values = [value for module in modules for value in module.values()]
    return {"kept": (modules, [dict(vars(value)) for value in values if isinstance(value, type)])}
"""


MAPPINGS = """
import mmap

def preprocess(inputs, state):
    if inputs["x"].sum() > 0:
        for number in range(20000):
            state.append(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=1 + number % 2))
    return inputs

def setup(assets):
    return []
"""


LEADERLESS = f"""
import ctypes, threading, time

def grow():
    time.sleep(0.1)
    kept = bytearray(b"x") * {HEAP}
    time.sleep(600)

def preprocess(inputs, state):
    if inputs["x"].sum() > 0:
        threading.Thread(target=grow).start()
        ctypes.CDLL(None).syscall(60, 0)  # exit, of this thread only
    return inputs
"""


class Scene:
    """A node's measurement of its workers, with a scheduler that accepts the results."""

    def __init__(self, rig, most_bytes=BOUND) -> None:
        self.rig, self.state, self.events = rig, State(), []
        self.bound(most_bytes)
        self.now = 0.0

    def bound(self, most_bytes: int) -> None:
        self.footprints = Footprints(self.expected, self.rig.processes, most_bytes, self.listen)

    def expected(self) -> dict[int, int]:
        return {id_: worker.expected_bytes for id_, worker in self.state.workers.items()}

    def start(self, handler=None, known=True, tenant="t"):
        function = Function(AddOne(), {"x": torch.zeros(2, WIDTH)}, handler, tenant=tenant)
        worker = self.rig.run(self.rig.start_worker(function))
        if known:
            self.state.workers[worker.worker] = Worker(
                worker.worker, "f@1", "t", Point(1, 1, 1, 1, 0.0), 60.0, 0.0, None
            )
        return worker

    def listen(self, event) -> None:
        self.events.append(event)
        for worker, nbytes in event.taken:
            self.state.workers[worker].measured_bytes, self.state.workers[worker].coming_bytes = nbytes, 0

    def check(self) -> float:
        self.now += 1.0
        return self.footprints.check(self.now)

    def taken(self, worker) -> int:
        return self.state.workers[worker.worker].measured_bytes


@pytest.fixture
def scene(rig):
    return Scene(rig)


@pytest.fixture
def ungrouped(scene, monkeypatch):
    """A scene on a system where no control group counts the memory of tenants."""
    monkeypatch.setattr(scene.rig.processes.zygotes.groups, "memory", None)
    return scene


def test_a_footprint_includes_the_heap_but_no_pages_shared_with_the_zygote(scene):
    greedy, plain = scene.start(GREEDY), scene.start()
    scene.check()
    # The system may have reclaimed a few pages.
    assert 0.9 * HEAP <= scene.taken(greedy) < HEAP + 48 * MIB
    assert scene.taken(plain) < 48 * MIB


def test_a_worker_that_ends_its_first_thread_is_stopped(scene):
    worker, plain = scene.start(LEADERLESS), scene.start()
    scene.check()

    async def end_first_thread() -> None:
        scene.rig.begin(worker, x=torch.ones(2, WIDTH))
        await until(lambda: lacks_first_thread(worker.pid))

    scene.rig.run(end_first_thread())
    for _ in range(HIDDEN_CHECKS - 1):
        scene.check()
    assert scene.rig.exits(worker.worker) == []
    scene.check()
    scene.rig.run(until(lambda: scene.rig.exits(worker.worker)))
    [end] = scene.rig.exits(worker.worker)
    assert "first thread" in end.reason
    for _ in range(HIDDEN_CHECKS):
        scene.check()
    assert scene.rig.exits(plain.worker) == []


def test_a_footprint_includes_unusually_large_page_tables(scene):
    greedy, plain = scene.start(TABLES), scene.start()
    scene.check()
    assert 16 * MIB < scene.taken(greedy) - scene.taken(plain) < 40 * MIB


def test_memory_of_a_tenant_that_no_process_shows_counts_for_its_workers_in_equal_parts(scene):
    if scene.rig.processes.zygotes.groups.memory is None:
        pytest.skip("no control groups count the memory of tenants")
    greedy, plain, other = scene.start(GREEDY), scene.start(), scene.start(tenant="bob")
    scene.check()
    before = [scene.taken(worker) for worker in (greedy, plain, other)]
    # As if the worker could hide memory from the check.
    greedy.inherited_bytes += HEAP
    for _ in range(UNATTRIBUTED_CHECKS):
        assert scene.taken(plain) == before[1]
        scene.check()
    changes = [scene.taken(worker) - taken for worker, taken in zip((greedy, plain, other), before, strict=True)]
    # The group also counts pages of the kernel, which come and go.
    assert abs(changes[0] + changes[1]) < HEAP // 4
    assert abs(changes[1] - HEAP // 2) < HEAP // 8
    assert abs(changes[2]) < MIB
    # The process that had the memory has ended.
    greedy.kill()
    scene.rig.run(until(lambda: scene.rig.exits(greedy.worker)))
    scene.check()
    assert abs(scene.taken(plain) - before[1]) < MIB


def test_inherited_pages_that_a_worker_has_copied_count_after_they_are_measured(ungrouped, monkeypatch):
    scene = ungrouped
    monkeypatch.setattr(accounting, "COPIED_BYTES", MIB)
    worker, plain = scene.start(COPIES), scene.start()
    scene.check()
    before = scene.taken(worker)
    accounts = Accounting(None, None, scene.rig.processes, None, print)
    scene.rig.run(accounts.measure_copies())
    # It has not computed since.
    scene.check()
    copied = scene.taken(worker) - before
    assert copied > 2 * MIB
    assert copied > scene.taken(plain)
    scene.rig.run(accounts.measure_copies())
    scene.check()
    assert scene.taken(worker) == before + copied


def test_pages_that_the_zygote_has_dropped_count_for_the_workers_that_still_share_them(scene):
    worker, other = scene.start(), scene.start()
    before = worker.inherited_bytes
    accounts = Accounting(None, None, scene.rig.processes, None, print)
    scene.rig.run(accounts.measure_copies())
    assert worker.inherited_bytes == before
    worker.dropped_by_zygote += 1
    scene.rig.run(accounts.measure_copies())
    with open(os.dup(worker.smaps), "rb", buffering=0) as smaps:
        others = process_memory(smaps).others
    assert abs(worker.inherited_bytes - others) < MIB
    assert worker.inherited_bytes < before
    assert other.inherited_bytes == before
    # The worker is measured only once.
    worker.inherited_bytes = 7
    scene.rig.run(accounts.measure_copies())
    assert worker.inherited_bytes == 7


def test_a_worker_with_too_many_mappings_is_stopped(scene, monkeypatch):
    monkeypatch.setattr(accounting, "COPIED_BYTES", 0)
    worker, plain = scene.start(MAPPINGS), scene.start()
    before = worker.inherited_bytes
    accounts = Accounting(None, None, scene.rig.processes, None, print)
    scene.rig.run(accounts.measure_copies())
    assert worker.inherited_bytes > before - 64 * MIB

    async def make_mappings() -> None:
        await scene.rig.ended(scene.rig.begin(worker, x=torch.ones(2, WIDTH)))
        await accounts.measure_copies()
        await until(lambda: scene.rig.exits(worker.worker))

    scene.rig.run(make_mappings())
    [end] = scene.rig.exits(worker.worker)
    assert f"{accounting.MAPPINGS_MAX}" in end.reason
    assert scene.rig.exits(plain.worker) == []


def test_workers_that_copy_more_pages_do_not_delay_the_measurement_of_others(ungrouped, monkeypatch):
    scene = ungrouped
    monkeypatch.setattr(accounting, "COPIED_BYTES", MIB)
    monkeypatch.setattr(accounting, "COPIES_MEASURED_MAX", 1)
    workers = [scene.start(COPIES), scene.start(COPIES)]
    scene.check()
    before = [scene.taken(worker) for worker in workers]
    accounts = Accounting(None, None, scene.rig.processes, None, print)
    scene.rig.run(accounts.measure_copies())
    [first] = [worker for worker, faults in accounts._page_faults.items() if faults.turn]
    accounts._page_faults[first] = accounts._page_faults[first]._replace(counted=1 << 40)
    scene.rig.run(accounts.measure_copies())
    scene.check()
    assert all(scene.taken(worker) > taken for worker, taken in zip(workers, before, strict=True))


def test_a_footprint_is_posted_only_when_it_has_changed(scene):
    worker = scene.start(GREEDY)
    scene.check()
    first = scene.taken(worker)
    assert first
    scene.check()
    assert len(scene.events) == 1


def test_a_footprint_is_posted_when_binds_took_less_memory_than_expected(scene):
    worker = scene.start()
    scene.check()
    first, result = scene.taken(worker), len(scene.events)
    scene.state.workers[worker.worker].coming_bytes = HEAP
    scene.check()
    assert len(scene.events) == result + 1
    assert scene.state.workers[worker.worker].expected_bytes < first + HEAP


def test_a_footprint_includes_buffers_until_they_are_released(scene):
    worker = scene.start()
    scene.check()
    before = scene.taken(worker)

    async def large():
        await scene.rig.ended(scene.rig.begin(worker, x=torch.zeros(1024, WIDTH)))

    scene.rig.run(large())
    scene.check()
    assert scene.taken(worker) >= before + 2 * 32 * MIB
    assert list(worker.release())
    scene.check()
    assert scene.taken(worker) < before + 2 * 32 * MIB


def test_memory_is_measured_more_often_while_the_sum_grows(scene):
    scene.start(GREEDY)
    scene.bound(2 * HEAP)
    scene.check()
    assert scene.check() == EVERY_S
    scene.now -= 0.99
    scene.start(GREEDY)
    assert scene.check() < EVERY_S


def test_a_worker_that_only_measures_is_ended_when_memory_is_scarce(scene):
    serving, measured = scene.start(GREEDY), scene.start(GREEDY, known=False)
    scene.bound(HEAP + HEAP // 2)
    scene.check()
    scene.rig.run(until(lambda: scene.rig.exits(measured.worker)))
    assert "--memory-bytes" in scene.rig.exits(measured.worker)[0].reason
    assert not scene.rig.exits(serving.worker)
