"""The node's effects without processes: loads, failed starts, removals, log lines and alarms."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop

from overwinter.core.actions import Drop, Explanation, LoadBlocks, Refuse, SetAlarm, StartWorker, StopWorker
from overwinter.core.config import SchedulerConfig
from overwinter.core.errors import NoSpaceError, StoreError
from overwinter.core.events import Alarm, Arrived, BlocksLoaded, Deployed, Event, LoadFailed, WorkerExited
from overwinter.core.journal import Journal
from overwinter.node import clock
from overwinter.node.calls import Calls
from overwinter.node.closing import ClosingThread
from overwinter.node.effects import NodeEffects
from overwinter.node.fair_queue import FairQueue
from overwinter.node.faults import Faults
from overwinter.node.loop import Loop
from overwinter.node.quarantine import Quarantine
from overwinter.node.registry import Registry
from overwinter.scheduler.published import Published
from overwinter.scheduler.scheduler import Scheduler
from overwinter.store.blocks import address_of
from overwinter.store.host import HostStore
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Blob
from tests.scheduler.world import spec
from tests.store.family import Pipes, names

from .log_lines import LogLines
from .rig import START_S, until

BUSY_THREADS = 64
"""More threads than asyncio's default executor has."""


def effects_over(tasks, functions, host=None, post=None, processes=None, log=None, published=None) -> NodeEffects:
    hosts, log = SimpleNamespace(store=lambda name: host), LogLines() if log is None else log
    processes = processes or SimpleNamespace()
    processes.queue = FairQueue()
    registry = Registry(hosts, published, post, log)
    registry.functions.update(functions)
    return NodeEffects(registry, processes, Calls(post, None, None), hosts, SchedulerConfig(), tasks, post, log)


def test_a_load_does_not_wait_for_busy_threads():
    host = SimpleNamespace(
        holds=lambda address: False, load=lambda blobs, pause: 7, collapse_pages=lambda blobs, pause: 0
    )
    manifest = SimpleNamespace(tenant="ada")
    blobs = [SimpleNamespace(address="a")]
    function = SimpleNamespace(id="f@1", manifest=manifest, store="", blobs=blobs, on_trial=False)
    held = threading.Event()
    heard: list[Event] = []

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            effects = effects_over(tasks, {"f@1": function}, host, heard.append)
            deploys = [tasks.create_task(asyncio.to_thread(held.wait)) for _ in range(BUSY_THREADS)]
            try:
                # All are given to the default executor.
                await asyncio.sleep(0)
                effects.carry_out(LoadBlocks("f@1", 1))
                await until(lambda: heard)
                assert not any(deploy.done() for deploy in deploys)
            finally:
                held.set()
        assert heard == [BlocksLoaded("f@1", 1, 7, ("a",), "")]

    asyncio.run(scene())


def test_a_node_that_stops_gives_up_the_block_that_it_copies(tmp_path):
    source, address = Pipes(), address_of(b"more than comes before the node stops")
    host = HostStore(tmp_path / "host", source)
    manifest = SimpleNamespace(tenant="ada")
    function = SimpleNamespace(id="f@1", manifest=manifest, store="", blobs=[Blob(address, 1 << 20)])
    heard: list[Event] = []
    lines = LogLines()

    async def scene(writer):
        async with asyncio.timeout(START_S), asyncio.TaskGroup() as tasks:
            effects = effects_over(tasks, {"f@1": function}, host, heard.append, log=lines)
            effects.carry_out(LoadBlocks("f@1", 1))
            writer.write(b"the first of it")
            await until(lambda: names(host))
            effects.close()
            writer.write(b"the second, and not the last")

    with open(source.pipe(address), "wb", buffering=0) as writer:
        asyncio.run(scene(writer))
    assert (names(host), host.is_copying) == (set(), False)
    assert (heard, lines) == ([], [])


class Dropping:
    """Effects over a real host store, which holds one block, and the thread that removes dropped blocks."""

    def __init__(self, root: Path) -> None:
        source, data = Pipes(), b"a block"
        self.blob = Blob(address_of(data), len(data))
        self.hosts = HostStores(root, source)
        self.host = self.hosts.store("")
        with open(source.pipe(self.blob.address), "wb", buffering=0) as writer:
            writer.write(data)
        self.host.load([self.blob])
        self.marked: list[tuple[str, frozenset[str]]] = []
        self.lines = LogLines()

    async def run(self, scene: Callable[[NodeEffects], Awaitable[None]]) -> None:
        closing = ClosingThread()
        processes = SimpleNamespace(
            queue=FairQueue(),
            files=SimpleNamespace(closing=closing),
            forks=SimpleNamespace(closing=False),
            mark_dropped=lambda store, addresses: self.marked.append((store, addresses)),
        )
        heard: list[Event] = []
        registry = Registry(self.hosts, None, heard.append, self.lines)
        calls = Calls(heard.append, None, None)
        try:
            async with asyncio.timeout(START_S), asyncio.TaskGroup() as tasks:
                config = SchedulerConfig()
                await scene(
                    NodeEffects(registry, processes, calls, self.hosts, config, tasks, heard.append, self.lines)
                )
        finally:
            closing.end()


def test_dropped_blocks_are_removed_by_a_thread(tmp_path):
    dropping = Dropping(tmp_path / "hosts")
    host, address = dropping.host, dropping.blob.address

    async def scene(effects):
        with dropping.hosts.removals._removing:
            # The event loop does not wait for the removal, which cannot begin.
            effects.carry_out(Drop((address,), ""))
            assert names(host) == {address}
            assert not host.holds(address)
            assert dropping.marked == [("", {address})]
        await until(lambda: names(host) == set())

    asyncio.run(dropping.run(scene))
    assert dropping.lines == []


def test_a_dropped_block_that_cannot_be_removed_is_logged(tmp_path):
    dropping = Dropping(tmp_path / "hosts")
    path = dropping.host.root / dropping.blob.address

    async def scene(effects):
        path.unlink()
        path.mkdir()
        effects.carry_out(Drop((dropping.blob.address,), ""))
        await until(lambda: dropping.lines)

    asyncio.run(dropping.run(scene))
    [line] = dropping.lines
    assert "could not be removed from memory" in line
    assert str(path) in line


def test_repeated_stops_of_a_tenants_workers_are_logged_once():
    heard: list[str] = []

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            owners = {"f@1": "ada", "g@1": "ada", "h@1": "bob"}
            functions = {id_: SimpleNamespace(manifest=SimpleNamespace(tenant=owners[id_])) for id_ in owners}
            effects = effects_over(tasks, functions, log=heard.append)
            for number in range(1000):
                for id_ in owners:
                    effects.carry_out(Explanation(id_, "stop", f"worker {number} of {id_} took too much"))

    asyncio.run(scene())
    assert heard == ["worker 0 of f@1 took too much", "worker 0 of h@1 took too much"]


def test_a_refusal_does_not_tell_how_full_the_node_is_and_the_log_tells_it_once():
    scheduler = Scheduler(SchedulerConfig(host_bytes=4001))
    scheduler.handle(Deployed(spec("f", blobs=(("x", 3002),), tenant="ada", pinned=True), resident=True), 0.0)
    scheduler.handle(Deployed(spec("g", blobs=(("y", 1000),), tenant="ada")), 0.0)
    steps = [scheduler.handle(Arrived(number, "g", None, None), float(100 * number)) for number in (1, 2)]
    refusals = [action for step in steps for action in step if isinstance(action, Refuse)]
    assert len(refusals) == 2
    lines = LogLines()

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            functions = {"g@1": SimpleNamespace(manifest=SimpleNamespace(tenant="ada"))}
            effects = effects_over(tasks, functions, log=lines, published=Published(scheduler.cycle))
            for refusal in refusals:
                assert (refusal.error, "4001" in refusal.message) == ("NoSpaceError", False)
                effects.carry_out(refusal)
            effects.carry_out(Refuse(3, "OverloadedError", "busy", function="g@1"))

    asyncio.run(scene())
    [line] = lines
    assert refusals[0].message in line
    assert "4001 bytes" in line
    assert "3002 of them pinned" in line


def test_an_alarm_is_reported_once_and_not_too_early():
    heard: list[tuple[float, Event]] = []

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            effects = effects_over(tasks, {}, post=lambda event: heard.append((clock.now(), event)))
            for number in range(20):
                at = clock.now() + 0.0003 * number
                effects.carry_out(SetAlarm(at))
                await until(lambda number=number: len(heard) > number)
                assert heard[number][0] >= at
                assert heard[number][1] == Alarm()
                assert len(heard) == number + 1

    uvloop.run(scene())


@pytest.mark.parametrize("is_stopped", [False, True], ids=["its blocks are gone", "it is stopped before"])
def test_a_failed_start_ends_the_process_forked_ahead_for_it(is_stopped):
    go_on = threading.Event()

    def gone(addresses):
        raise StoreError("they are gone")

    host = SimpleNamespace(
        holds=lambda address: False,
        unverified=lambda addresses: addresses if is_stopped else [],
        verify=lambda address, pause: go_on.wait(),
        open=gone,
    )
    blobs = [SimpleNamespace(address="a", nbytes=1)]
    function = SimpleNamespace(
        id="f@1",
        manifest=SimpleNamespace(tenant="ada"),
        store="",
        blobs=blobs,
        files=lambda: ["a"],
        load_files=lambda: ["a"],
    )
    heard: list[Event] = []
    ended: list[tuple[int, bool]] = []

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            processes = SimpleNamespace(stop=lambda worker, kill: ended.append((worker, kill)))
            effects = effects_over(tasks, {"f@1": function}, host, heard.append, processes)
            effects.carry_out(StartWorker(2, "f@1", False, ahead=1))
            if is_stopped:
                effects.carry_out(StopWorker(2))
            go_on.set()
        assert [event.worker for event in heard if isinstance(event, WorkerExited)] == [2]
        assert ended == [(1, True)]

    asyncio.run(scene())


def test_a_programming_error_in_work_for_one_function_fails_only_its_operation():
    def mistaken(*of):
        raise KeyError(7)

    host = SimpleNamespace(
        holds=lambda address: False,
        unverified=lambda addresses: addresses,
        load=mistaken,
        verify=mistaken,
    )
    blobs = [SimpleNamespace(address="a", nbytes=1)]
    manifest = SimpleNamespace(tenant="ada")
    function = SimpleNamespace(
        id="f@1", manifest=manifest, store="", blobs=blobs, files=lambda: ["a"], load_files=lambda: ["a"]
    )
    heard: list[Event] = []
    stopped: list[int] = []
    lines = LogLines()

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            processes = SimpleNamespace(process=lambda worker: None, stop=lambda worker, kill: stopped.append(worker))
            effects = effects_over(tasks, {"f@1": function}, host, heard.append, processes, lines)
            effects.carry_out(LoadBlocks("f@1", 1))
            effects.carry_out(StartWorker(2, "f@1", False))
            await until(lambda: len(heard) == 2)
            effects.carry_out(StopWorker(2))

    asyncio.run(scene())
    failed, exited = sorted(heard, key=lambda event: type(event).__name__)
    assert isinstance(failed, LoadFailed)
    assert (failed.function, failed.operation, failed.error, failed.addresses) == ("f@1", 1, "WorkerError", ("a",))
    assert (exited.worker, exited.error) == (2, "WorkerError")
    assert all("KeyError: 7" in text for text in (failed.message, exited.reason))
    assert (len(lines), stopped) == (2, [2])


def test_a_host_store_that_cannot_be_made_fails_only_the_load():
    function = SimpleNamespace(id="f@1", manifest=SimpleNamespace(tenant="ada"), store="ada", blobs=[])
    heard: list[Event] = []

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            effects = effects_over(tasks, {"f@1": function}, post=heard.append)
            effects._hosts.store = full
            effects.carry_out(LoadBlocks("f@1", 3))

    def full(name):
        raise NoSpaceError("the tmpfs has no room for a directory")

    asyncio.run(scene())
    [failed] = heard
    assert (failed.function, failed.operation, failed.error) == ("f@1", 3, "NoSpaceError")


class FullStores(HostStores):
    """Host stores on a tmpfs that has no room for the directory of a further one."""

    def store(self, name):
        if name not in self.every():
            raise NoSpaceError("the tmpfs has no room for a directory")
        return super().store(name)


def test_only_the_deploy_whose_host_store_cannot_be_made_fails(tmp_path):
    hosts, config, lines = FullStores(tmp_path / "hosts", Pipes()), SchedulerConfig(), LogLines()
    scheduler, quarantine = Scheduler(config), Quarantine(tmp_path / "quarantine.json")
    published = Published(scheduler.cycle)
    new = spec("f", tenant="ada", dedicated=True)
    function = SimpleNamespace(id=new.id, manifest=SimpleNamespace(tenant="ada"), store=new.store, blobs=new.blobs)

    async def scene():
        def post(event):
            loop.post(event)

        async with asyncio.TaskGroup() as tasks:
            registry, calls = Registry(hosts, published, post, lines), Calls(post, published, quarantine)
            registry.functions[new.id] = function
            processes = SimpleNamespace(queue=FairQueue())
            effects = NodeEffects(registry, processes, calls, hosts, config, tasks, post, lines)
            journal = Journal(config, 10)
            loop = Loop(scheduler, published, journal, effects, lambda *step: None, quarantine, Faults(lines))
            with pytest.raises(NoSpaceError, match="no room for a directory"):
                await calls.ask(new.id, Deployed(new, on_trial=True))
            # The blocks that the load would have brought are dropped.
            assert any(isinstance(action, Drop) for entry in journal.recent for action in entry.actions)
            assert not loop.broken.done()
            effects.close()

    asyncio.run(scene())


@pytest.mark.parametrize("error", [NoSpaceError("full"), OSError("full"), MemoryError()])
def test_a_failure_of_the_machine_quarantines_no_function(tmp_path, error):
    quarantine = Quarantine(tmp_path / "quarantine.json")
    quarantine.add("f@1", error)
    assert quarantine.reason("f@1") == ""
