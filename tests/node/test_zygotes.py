"""Zygotes that hang, lie, flood or die: real processes, the node's real effects, and workers of other tenants."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest
import torch

from benchmarks.nodes import parents_of_all
from overwinter.core.actions import ForkAhead, Prepare
from overwinter.core.errors import MESSAGE_MAX
from overwinter.core.events import WorkerReady, ZygoteLost
from overwinter.core.ids import WorkerId
from overwinter.node.family_blocks import mapped_bytes
from overwinter.node.functions import FAILED_PREPARATIONS_MAX
from overwinter.node.zygote_process import TENANT_PENDING_MAX, ForkLimits, ZygoteProcess, ZygoteSettings
from overwinter.node.zygotes import CHECKS_PER_TIMEOUT, UNUSED_CHECKS
from overwinter.worker.messages import Forget, ForkFailed, ForkWorker, Ping
from overwinter.worker.sandbox import uid_of

from .rig import START_S, Function, Rig, until

TIMEOUT_S = 6.0
HANDLER = "def preprocess(inputs, state):\n    return inputs\n"
LOOKS = """
import sys
import torch

def setup(assets):
    return [name in sys.modules for name in ("tokenizers", "colorsys", "turtledemo", "filecmp")]

def preprocess(inputs, state):
    return {"x": torch.tensor([state], dtype=torch.float32)}
"""
"""Answers 2.0 for each of these modules that was imported before the function was set up, and 1.0 for others."""


class AddOne(torch.nn.Module):
    def forward(self, x):
        return {"y": x + 1.0}


def function(name: str, tenant: str, handler: str | None = None) -> Function:
    return Function(AddOne(), {"x": torch.zeros(2, 4)}, handler, name=name, tenant=tenant)


@pytest.fixture(scope="module")
def one_rig():
    settings = ZygoteSettings(zygotes_max=2, zygote_timeout_s=TIMEOUT_S, warm_up_timeout_s=600.0)
    with closing(Rig(settings._replace(imports="colorsys,no_such_library, filecmp"))) as made:
        yield made


@pytest.fixture(scope="module")
def calm():
    """Yield a rig with a worker of a tenant that no test harms. A `Double` answers no pings, so the timeout is long."""
    with closing(Rig(ZygoteSettings(zygote_timeout_s=60.0))) as made:
        made.victim = made.run(made.start_worker(function("victim", "ada")))
        yield made


async def check_answer(rig: Rig, process) -> None:
    run = rig.begin(process, x=torch.ones(1, 4))
    await rig.ended(run)
    assert rig.failures(run) == []
    assert rig.output(run).tolist() == [[2.0] * 4]


async def prepared(rig: Rig, which: Function) -> ZygoteProcess:
    """Order the preparation of the function, wait for its end, and return the zygote of the tenant."""
    tenant = which.deployed.manifest.tenant
    rig.effects.carry_out(Prepare(which.deployed.id))
    await until(lambda: tenant in rig.processes.zygotes.tenants)
    zygote = rig.processes.zygotes.tenants[tenant]
    # No ping may be pending either: a test that halts the zygote would leave it without an answer.
    await until(lambda: zygote.pid is not None and not zygote.pending)
    return zygote


async def gone(pid: int) -> None:
    await until(lambda: pid not in parents_of_all())


def parent_of(process) -> int | None:
    return parents_of_all().get(process.pid)


def test_workers_are_forked_from_their_tenants_zygote_and_others_from_the_base(rig):
    ada, handled, bob = function("a", "ada"), function("h", "ada", HANDLER), function("b", "bob")

    async def scene():
        rig.deploy(ada, handled, bob)
        zygote = await prepared(rig, ada)
        own = [await rig.start_worker(ada), await rig.start_worker(handled)]
        other = await rig.start_worker(bob)
        assert {parent_of(process) for process in own} == {zygote.pid}
        assert parent_of(other) == rig.processes.zygotes.base.pid
        assert len(rig.processes.zygote_smaps()) == 2
        assert len(rig.processes.worker_smaps()) == 3
        for process in (*own, other):
            await check_answer(rig, process)
        os.kill(zygote.pid, signal.SIGKILL)
        await until(lambda: all(rig.exits(process.worker) for process in own))
        await check_answer(rig, other)
        assert ZygoteLost("ada") in rig.events

    rig.run(scene())


def test_libraries_that_handlers_use_are_imported_before_the_first_wake(rig):
    checks = function("checks", "ada", LOOKS)

    async def scene():
        rig.deploy(checks)
        workers = [await rig.start_worker(checks)]
        await prepared(rig, checks)
        workers.append(await rig.start_worker(checks))
        for process in workers:
            run = rig.begin(process, x=torch.ones(1, 4))
            await rig.ended(run)
            assert rig.output(run).tolist() == [[2.0, 2.0, 1.0, 2.0]]
        assert [line for line in rig.said if "in advance" in line and "no_such_library" in line]

    rig.run(scene())


def test_a_warm_up_that_does_not_end_delays_no_request_and_is_not_repeated(rig):
    quick, bob = function("quick", "ada"), function("b", "bob")
    slow, sibling = (Function(AddOne(), {"x": torch.zeros(2, 5)}, name=name, tenant="ada") for name in ("slow", "same"))

    async def scene():
        rig.deploy(quick, slow, sibling, bob)
        zygote = await prepared(rig, quick)
        os.kill(zygote.pid, signal.SIGSTOP)
        rig.effects.carry_out(Prepare(slow.deployed.id))
        assert "program" in zygote.pending
        workers = [await rig.start_worker(which) for which in (quick, bob)]
        # The workers are ready before the zygote has compiled the program.
        assert "program" in zygote.pending
        assert {parent_of(process) for process in workers} == {rig.processes.zygotes.base.pid}
        # Simulate that this has taken long.
        zygote.pending["program"] = 1 << 20
        await until(lambda: ZygoteLost("ada") in rig.events)
        await gone(zygote.pid)
        for process in workers:
            await check_answer(rig, process)
        assert (slow.deployed.failed_preparations_left, sibling.deployed.failed_preparations_left) == (0, 0)
        assert quick.deployed.failed_preparations_left == FAILED_PREPARATIONS_MAX
        again = await prepared(rig, quick)
        for which in (slow, sibling):
            rig.effects.carry_out(Prepare(which.deployed.id))
        assert "program" not in again.pending

    rig.run(scene())


def test_a_preparation_whose_zygote_dies_is_repeated_a_few_times(rig):
    quick, slow = function("quick", "ada"), Function(AddOne(), {"x": torch.zeros(2, 5)}, name="slow", tenant="ada")

    async def scene():
        rig.deploy(quick, slow)
        for left in range(FAILED_PREPARATIONS_MAX - 1, -1, -1):
            zygote = await prepared(rig, quick)
            os.kill(zygote.pid, signal.SIGSTOP)
            rig.effects.carry_out(Prepare(slow.deployed.id))
            assert "program" in zygote.pending
            os.kill(zygote.pid, signal.SIGKILL)
            await until(lambda: ZygoteLost("ada") in rig.events)
            rig.events.clear()
            assert slow.deployed.failed_preparations_left == left
        zygote = await prepared(rig, quick)
        rig.effects.carry_out(Prepare(slow.deployed.id))
        assert "program" not in zygote.pending
        assert quick.deployed.failed_preparations_left == FAILED_PREPARATIONS_MAX

    rig.run(scene())


@pytest.mark.parametrize("whose", ["base", "tenant"])
def test_a_hung_zygote_is_replaced_and_its_workers_are_reported_as_ended(rig, whose):
    ada = function("a", "ada")

    async def scene():
        rig.deploy(ada)
        zygote = await prepared(rig, ada)
        hung = rig.processes.zygotes.base if whose == "base" else zygote
        process = await rig.start_worker(ada)
        os.kill(hung.pid, signal.SIGSTOP)
        await until(lambda: rig.exits(process.worker))
        await gone(hung.pid)
        await until(rig.processes.is_up)
        assert (await prepared(rig, ada)).pid not in (hung.pid, zygote.pid)
        await check_answer(rig, await rig.start_worker(ada))

    rig.run(scene())


def test_the_number_of_zygotes_is_limited_and_an_unused_one_is_replaced(rig):
    ada, bob, eve = (function(name, name) for name in ("ada", "bob", "eve"))

    async def scene():
        rig.deploy(ada, bob, eve)
        first, second = await prepared(rig, ada), await prepared(rig, bob)
        process = await rig.start_worker(bob)
        # Neither may be replaced yet, however long the worker took to start.
        first.unused_checks = second.unused_checks = 0
        rig.effects.carry_out(Prepare(eve.deployed.id))
        assert set(rig.processes.zygotes.tenants) == {"ada", "bob"}
        third = await prepared(rig, eve)
        assert first.unused_checks >= UNUSED_CHECKS
        assert set(rig.processes.zygotes.tenants) == {"bob", "eve"}
        await gone(first.pid)
        assert rig.events.count(ZygoteLost("ada")) == 1
        await check_answer(rig, process)
        assert {second.pid, third.pid} <= parents_of_all().keys()

    rig.run(scene())


def test_a_zygote_that_is_too_small_for_a_worker_is_replaced_once_it_is_idle(rig):
    ada = function("a", "ada")
    large = Function(AddOne(), {"x": torch.zeros(2, 4)}, memory_mib=8192, name="large", tenant="ada")

    async def scene():
        rig.deploy(ada)
        zygote = await prepared(rig, ada)
        rig.deploy(large)
        workers = [await rig.start_worker(which) for which in (ada, large)]
        assert [parent_of(process) for process in workers] == [zygote.pid, rig.processes.zygotes.base.pid]
        rig.processes.stop(workers[0].worker, kill=False)
        await until(lambda: ZygoteLost("ada") in rig.events)
        await check_answer(rig, workers[1])
        again = await prepared(rig, large)
        assert parent_of(await rig.start_worker(large)) == again.pid

    rig.run(scene())


def test_an_unresponsive_base_zygote_is_replaced_when_zygotes_of_tenants_are_to_be_ended(rig):
    async def scene():
        zygotes = rig.processes.zygotes
        base = zygotes.base
        os.kill(base.pid, signal.SIGSTOP)
        with suppress(BlockingIOError):
            while True:
                base.channel.send(Ping())
        for tenant in ("ada", "bob"):
            # The node does not know its process yet, and so asks the base zygote to kill it.
            zygotes.tenants[tenant] = ZygoteProcess(tenant, ForkLimits())
            zygotes.listen(zygotes.tenants[tenant])
        rig.processes.checked()
        assert not zygotes.tenants
        assert zygotes.base is not base
        await until(rig.processes.is_up)
        await check_answer(rig, await rig.start_worker(function("f", "ada")))

    rig.run(scene())


def test_a_tenant_without_functions_has_no_zygote(rig):
    ada = function("a", "ada")

    async def scene():
        rig.deploy(ada)
        zygote = await prepared(rig, ada)
        rig.registry.remove(ada.deployed.id)
        await until(lambda: not rig.processes.zygotes.tenants)
        await gone(zygote.pid)

    rig.run(scene())


DOUBLE = """
import os, socket, sys, time
from overwinter.worker.channel import Channel
from overwinter.worker.messages import *

end = socket.socket(fileno=int(sys.argv[1]))
channel = Channel(end, ToZygote)
victim = int(sys.argv[2])

def child(step):
    parent = os.getpid()
    ended, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        step()
        os.write(report, b".")
        while os.getppid() == parent:
            time.sleep(0.01)
        os._exit(0)
    os.close(report)
    os.read(ended, 1)  # until the step or the child has ended
    return pid

def smaps():
    return os.open("/proc/self/smaps", os.O_RDONLY)

"""


class Double:
    """A process in the place of a tenant's zygote that runs any code."""

    def __init__(self, rig: Rig, code: str, victim: int) -> None:
        self._zygotes = rig.processes.zygotes
        self.zygote = self._zygotes.tenants["eve"] = ZygoteProcess("eve", ForkLimits(1 << 50, 1 << 50))
        fd = self.zygote.far_end.fileno()
        command = [sys.executable, "-c", DOUBLE + code + "\ntime.sleep(600)", str(fd), str(victim)]
        self.process = subprocess.Popen(command, pass_fds=[fd])
        self.zygote.pid = self.process.pid
        self.zygote.pidfd = os.pidfd_open(self.process.pid)
        self._zygotes.listen(self.zygote)

    def lose(self) -> None:
        """Let the node kill it, unless it has done so."""
        self._zygotes.lose(self.zygote, "the test is over")

    def close(self) -> None:
        self.lose()
        self.process.kill()
        self.process.wait()


FORGED = {
    "nonsense": "end.send(b'\\xc1')",
    "an answer to no question": "channel.send(Pong())",
    "an unexpected program": "channel.send(PreparationEnded())",
    "up again": "channel.send(Up(('x' * 100_000,)), [smaps()])",
    "a fork of another's": "channel.send(Forked(victim), [smaps()])",
    "an end of another's": "channel.send(Exited(victim, 0))",
    "no fork of another's": "channel.send(ForkFailed(victim, ''))",
    "many descriptors": "socket.send_fds(end, [b'\\x91\\xa4Pong'], [0] * 100)",
    "more to come": "[end.send(b'+') for _ in range(100_000)]",
    "a flood": "[channel.send(Pong()) for _ in range(1_000_000)]",
    "a message for another": "channel.send(Ready())",
}


@pytest.mark.parametrize("code", FORGED.values(), ids=FORGED.keys())
def test_only_the_zygote_that_sends_an_unexpected_message_is_ended(calm, code):
    async def scene():
        held = len(os.listdir("/proc/self/fd"))
        with closing(Double(calm, code, calm.victim.worker)) as double:
            await until(lambda: "eve" not in calm.processes.zygotes.tenants)
            # The node killed it: by itself it would sleep.
            assert double.process.wait() == -signal.SIGKILL
        await until(lambda: len(os.listdir("/proc/self/fd")) <= held)
        assert calm.exits(calm.victim.worker) == []
        await check_answer(calm, calm.victim)
        await check_answer(calm, await calm.start_worker(function("another", "bob")))

    calm.run(scene())


def test_a_long_reason_of_a_zygote_is_truncated(calm):
    """It is sent to each caller that waits."""

    async def scene():
        base, ended = calm.processes.zygotes.base, []
        listener = SimpleNamespace(worker_ended=lambda zygote, worker, status, reason: ended.append(reason))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calm.processes.zygotes, "_listener", listener)
            base.pending[WorkerId(7)] = 0
            calm.processes.zygotes._handle(base, ForkFailed(WorkerId(7), "x" * 1_000_000), [])
        assert ended == ["x" * MESSAGE_MAX]

    calm.run(scene())


HEARS = """
while True:
    message, _ = channel.receive()
    if isinstance(message, Forget) and message.program == "f" * 64:
        os._exit(7)
"""


def test_a_zygote_with_a_full_socket_gets_its_forget_messages_later(calm):
    eve = function("eves", "eve")

    async def scene():
        calm.registry.add(eve.deployed)
        with closing(Double(calm, HEARS, 0)) as double:
            os.kill(double.process.pid, signal.SIGSTOP)
            with suppress(BlockingIOError):
                while True:
                    double.zygote.channel.send(Forget("0" * 64))
            calm.processes.prepare("eve", "unknown@1", "f" * 64)
            os.kill(double.process.pid, signal.SIGCONT)
            while double.process.poll() is None:
                calm.processes.checked()
                await asyncio.sleep(0.01)
            assert double.process.wait() == 7
            calm.registry.remove(eve.deployed.id)
            await until(lambda: "eve" not in calm.processes.zygotes.tenants)

    calm.run(asyncio.wait_for(scene(), START_S))


def test_programs_that_a_zygote_was_told_to_drop_are_counted_for_its_existing_workers_only(rig):
    ada = function("drops", "ada")

    async def scene():
        rig.deploy(ada)
        zygote = await prepared(rig, ada)
        process = await rig.start_worker(ada)
        assert process.forked_as in zygote.workers
        rig.processes.prepare("ada", ada.deployed.id, "f" * 64)
        await until(lambda: process.dropped_by_zygote == 1)
        later = await rig.start_worker(ada)
        assert later.dropped_by_zygote == 0

    rig.run(scene())


ORDERED = "order, fds = channel.receive()\n"
LIES = {
    "itself": ("channel.send(Forked(order.worker), [smaps()])", True),
    "a grandchild": ("child(lambda: child(lambda: channel.send(Forked(order.worker), [smaps()])))", True),
    "an end of one that lives": (
        "child(lambda: channel.send(Forked(order.worker), [smaps()]))\nchannel.send(Exited(order.worker, -999_999))",
        False,
    ),
    "an end that it keeps for itself": (
        "pid = child(lambda: (channel.send(Forked(order.worker), [smaps()]), os._exit(3)))\nos.waitpid(pid, 0)",
        False,
    ),
    "a false file": (
        "child(lambda: channel.send(Forked(order.worker), [os.open('/dev/zero', os.O_RDONLY)]))\n"
        "channel.send(Exited(order.worker, 0))",
        False,
    ),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("code", "ends_it"), LIES.values(), ids=LIES.keys())
def test_reports_of_a_zygote_on_its_workers_are_checked_with_the_kernel(calm, code, ends_it):
    calm.run(asked_for_a_worker(calm, code, calm.victim, ends_it))


def test_only_the_zygote_that_never_reports_a_worker_is_ended(rig):
    async def scene():
        await asked_for_a_worker(rig, "", await rig.start_worker(function("victim", "ada")), ends_it=True)

    rig.run(scene())


async def asked_for_a_worker(rig: Rig, code: str, victim, ends_it: bool) -> None:
    """Ask a double that runs this code for a worker, and check that the victim still answers."""
    held, which = len(os.listdir("/proc/self/fd")), function("evil", "eve")
    # The node ends an idle zygote of a tenant without functions.
    rig.registry.add(which.deployed)
    with closing(Double(rig, ORDERED + code, victim.worker)) as double:
        await end_of_its_worker(rig, double, which)
        assert ("eve" not in rig.processes.zygotes.tenants) == ends_it
        double.lose()
        assert double.process.wait() == -signal.SIGKILL
    rig.registry.remove(which.deployed.id)
    # Buffers are closed in a thread, perhaps also those of an earlier test.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= held)
    await check_answer(rig, victim)


async def end_of_its_worker(rig: Rig, double: Double, which: Function) -> None:
    """Ask a double for a worker, and wait for the worker's end. Meanwhile the node may keep only a real smaps file."""
    worker, fds = WorkerId(rig.number()), which.open()
    order = ForkWorker(worker, uid_of(worker), 1 << 30, mapped_bytes([which.deployed]))
    rig.processes.fork(
        which.deployed, order, which.deployed.load_message(), which.deployed.bind_message(), fds, rig.effects.runs
    )
    assert worker in double.zygote.workers
    for fd in fds:
        os.close(fd)
    process = rig.processes.process(worker)
    while not rig.exits(worker):
        if process.smaps is None:
            assert process.inherited_bytes == 0
        else:
            assert os.readlink(f"/proc/self/fd/{process.smaps}").endswith("/smaps")
        await asyncio.sleep(0.002)
    await gone(process.pid)


@pytest.mark.usefixtures("impatient")
def test_a_late_report_of_a_workers_end_does_not_end_the_zygote():
    ada = function("late", "ada")

    async def scene(rig):
        rig.deploy(ada)
        zygote = await prepared(rig, ada)
        process, other = await rig.start_worker(ada), await rig.start_worker(ada)
        os.kill(zygote.pid, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: rig.exits(process.worker))
        os.kill(zygote.pid, signal.SIGCONT)
        await until(lambda: not zygote.unreported_exits)
        assert rig.processes.zygotes.tenants.get("ada") is zygote
        await check_answer(rig, other)

    with closing(Rig(ZygoteSettings(zygote_timeout_s=20.0))) as rig:
        rig.run(scene(rig))


def test_a_zygote_is_asked_for_few_workers_at_a_time_in_turns_of_the_tenants(rig):
    """One tenant's starts, most of which are stopped again, delay those of others by a few forks."""
    ada, bob = function("many", "ada"), function("few", "bob")

    async def scene():
        rig.deploy(ada, bob)
        base = rig.processes.zygotes.base
        os.kill(base.pid, signal.SIGSTOP)
        many = [asyncio.create_task(rig.start_worker(ada)) for _ in range(20)]
        await until(lambda: len(rig.processes.workers()) == 20)
        few = [asyncio.create_task(rig.start_worker(bob)) for _ in range(2)]
        await until(lambda: len(rig.processes.workers()) == 22)
        asked = [process for process in rig.processes.workers() if process.asked]
        assert [process.tenant for process in asked] == ["ada"] * TENANT_PENDING_MAX + ["bob"] * 2
        for process in rig.processes.workers():
            if process.tenant == "ada" and not process.asked:
                rig.processes.stop(process.worker, kill=False)
                assert "before it was forked" in rig.exits(process.worker)[0].reason
        os.kill(base.pid, signal.SIGCONT)
        for process in await asyncio.gather(*few):
            await check_answer(rig, process)
        started = await asyncio.gather(*many, return_exceptions=True)
        assert sum(not isinstance(each, AssertionError) for each in started) == TENANT_PENDING_MAX

    rig.run(scene())


def test_waiting_workers_are_asked_for_when_others_are_forked(rig):
    ada = function("waits", "ada")

    async def scene():
        rig.deploy(ada)
        started = await asyncio.gather(*(rig.start_worker(ada) for _ in range(TENANT_PENDING_MAX + 3)))
        for process in started:
            await check_answer(rig, process)

    rig.run(scene())


def test_a_zygote_that_answers_some_of_its_requests_gets_more_time(rig, monkeypatch):
    async def scene():
        zygotes = rig.processes.zygotes
        base = zygotes.base
        await until(lambda: not base.pending)
        monkeypatch.setattr(zygotes, "_check_later", lambda: None)
        base.pending |= {WorkerId(9001): 0, WorkerId(9002): 0}
        for _ in range(CHECKS_PER_TIMEOUT):
            zygotes._check_all()
        del base.pending[9001]
        for _ in range(CHECKS_PER_TIMEOUT):
            zygotes._check_all()
        assert zygotes.base is base
        zygotes._check_all()
        assert zygotes.base is not base
        # The next check is scheduled still: nothing has waited meanwhile.
        monkeypatch.undo()
        await until(rig.processes.is_up)

    rig.run(scene())


def test_a_worker_that_is_not_forked_yet_ends_if_a_block_changed(rig):
    ada = function("bereft", "ada")

    async def scene():
        rig.deploy(ada)
        base = rig.processes.zygotes.base
        os.kill(base.pid, signal.SIGSTOP)
        starting = asyncio.create_task(rig.start_worker(ada))
        await until(lambda: base.workers)
        assert len(rig.effects.worker_actions.kill_block_readers(ada.deployed.store, ada.deployed.files()[-1])) == 1
        os.kill(base.pid, signal.SIGCONT)
        with pytest.raises(AssertionError, match="lost_blocks=True"):
            await starting

    rig.run(scene())


def test_a_worker_of_a_removed_function_ends_if_a_block_changed(rig):
    ada, handled = function("removed", "ada"), function("h", "ada", HANDLER)

    async def scene():
        rig.deploy(ada, handled)
        other, draining = await rig.start_worker(ada), await rig.start_worker(handled)
        rig.registry.remove(handled.deployed.id)
        source = handled.deployed.manifest.handler.source.address
        assert len(rig.effects.worker_actions.kill_block_readers(handled.deployed.store, source)) == 1
        await until(lambda: rig.exits(draining.worker))
        assert rig.exits(draining.worker)[0].lost_blocks
        await check_answer(rig, other)

    rig.run(scene())


def test_a_base_zygote_that_the_system_cannot_start_is_started_later(rig, monkeypatch):
    start, refused = subprocess.Popen, []

    def popen(*args, **kwargs):
        if not refused:
            refused.append(BlockingIOError(errno.EAGAIN, "no more processes"))
            raise refused[0]
        return start(*args, **kwargs)

    async def scene():
        base = rig.processes.zygotes.base
        monkeypatch.setattr(subprocess, "Popen", popen)
        os.kill(base.pid, signal.SIGKILL)
        await until(lambda: rig.processes.zygotes.base not in (base, None) and rig.processes.is_up())
        assert refused

    rig.run(scene())


async def killed(rig: Rig) -> None:
    """Kill the base zygote, and wait until the node has noticed."""
    base = rig.processes.zygotes.base
    base.process.kill()
    await until(lambda: rig.processes.zygotes.base is not base)


def test_workers_wait_if_a_base_zygote_dies_before_it_is_up(rig, monkeypatch):
    monkeypatch.setattr("overwinter.node.zygotes.RESTART_FIRST_S", START_S)
    early, late, stopped = (function(name, "ada") for name in ("early", "late", "stopped"))

    async def scene():
        await killed(rig)
        # The next base zygote is started immediately, and is not up yet.
        first = asyncio.ensure_future(rig.start_worker(early))
        await asyncio.sleep(0)
        await killed(rig)
        assert rig.processes.zygotes.base is None
        second = asyncio.ensure_future(rig.start_worker(late))
        third = asyncio.ensure_future(rig.start_worker(stopped))
        await asyncio.sleep(0)
        [held] = [process for process in rig.processes.workers() if process.function == stopped.deployed.id]
        rig.processes.stop(held.worker, kill=False)
        assert "before it was forked" in rig.exits(held.worker)[0].reason
        rig.processes.zygotes._start_again()
        for process in await asyncio.gather(first, second):
            await check_answer(rig, process)
        with pytest.raises(AssertionError, match="before it was forked"):
            await third

    rig.run(scene())


def test_a_zygote_whose_process_forked_ahead_has_just_been_used_is_not_stopped_for_another(rig):
    ada, bob, eve = function("a", "ada"), function("b", "bob"), function("e", "eve")

    async def scene():
        rig.deploy(ada, bob, eve)
        zygote, other = await prepared(rig, ada), await prepared(rig, bob)
        ahead = WorkerId(rig.number())
        rig.effects.carry_out(ForkAhead(ahead, ada.deployed.id))
        await until(lambda: WorkerReady(ahead) in rig.events)
        zygote.unused_checks = UNUSED_CHECKS
        process = await rig.start_worker(ada, ahead=ahead)
        # Nothing has checked the zygotes meanwhile.
        zygote.unused_checks, other.unused_checks = UNUSED_CHECKS, 0
        rig.effects.carry_out(Prepare(eve.deployed.id))
        assert rig.processes.zygotes.tenants["ada"] is zygote
        await check_answer(rig, process)

    rig.run(scene())


def test_an_idle_zygote_that_failed_to_fork_is_replaced(rig):
    ada = function("a", "ada")

    async def scene():
        rig.deploy(ada)
        zygote = await prepared(rig, ada)
        process = await rig.start_worker(ada)
        assert parent_of(process) == zygote.pid
        zygote.fork_failed = True
        rig.processes.checked()
        assert rig.processes.zygotes.tenants["ada"] is zygote
        rig.processes.stop(process.worker, kill=False)
        await until(lambda: rig.exits(process.worker) and zygote.is_idle)
        zygote.fork_failed = True
        rig.processes.checked()
        await until(lambda: ZygoteLost("ada") in rig.events)
        again = await prepared(rig, ada)
        assert again.pid != zygote.pid
        assert parent_of(await rig.start_worker(ada)) == again.pid

    rig.run(scene())
