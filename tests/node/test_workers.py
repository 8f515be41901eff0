"""Several concurrent runs in one worker: bit-identical results, real concurrency, and no lost run whatever the worker
does.
"""

import asyncio
import errno
import os
import random
import resource
import signal
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overwinter.core.errors import MESSAGE_MAX
from overwinter.core.events import RunEnded
from overwinter.node import clock
from overwinter.node.contained import ProcessFiles
from overwinter.node.copying import THREADS
from overwinter.node.output import Outputs
from overwinter.node.runs import BUFFERS_IDLE_S
from overwinter.node.workers import WorkerProcess
from overwinter.node.zygote_process import ForkLimits, ZygoteProcess
from overwinter.worker.buffer import KEPT_BYTES, LARGE_BYTES

from .log_lines import LogLines, process_files
from .rig import Function, until


class Wide(torch.nn.Module):
    """Two matrices: enough work for rows to take time, and sums whose order shows in their last bits."""

    def __init__(self, depth: int = 6):
        super().__init__()
        torch.manual_seed(1)
        self.depth = depth
        self.first = torch.nn.Linear(256, 1024)
        self.second = torch.nn.Linear(1024, 256)

    def forward(self, x):
        for _ in range(self.depth):
            x = torch.softmax(self.second(torch.nn.functional.gelu(self.first(x))), dim=1)
        return {"y": x}


class AddOne(torch.nn.Module):
    """Adds one to its input."""

    def forward(self, x):
        return {"y": x + 1.0}


SPARE_BYTES = 16 << 20
"""Much less than the size of large tensors."""

GATED = """
import time

def preprocess(inputs, state):
    gate = inputs["x"]
    while gate[0, 0] == 0.0:
        time.sleep(0.001)
    if gate[0, 0] == 7.0:
        raise KeyboardInterrupt
    return inputs
"""
"""Its inputs lie in the buffer, where `open_gates` changes them."""

CENSUS = """
import time
import torch

OUTPUTS = [{"name": "most", "datatype": "FP32", "shape": [1]}]

class Census:
    inside = most = calls = 0

def setup(assets):
    return Census()

def preprocess(inputs, state):
    assert state.calls == 0, "called while it is called"
    state.calls += 1
    state.inside += 1
    state.most = max(state.most, state.inside)
    time.sleep(0.001)
    state.calls -= 1
    return inputs

def postprocess(outputs, inputs, state):
    assert state.calls == 0, "called while it is called"
    state.inside -= 1
    return {"most": torch.tensor([float(state.most)])}
"""


@pytest.fixture(scope="module")
def wide():
    return Function(Wide(), {"x": torch.zeros(2, 256)})


@pytest.fixture(scope="module")
def gated():
    return Function(AddOne(), {"x": torch.zeros(2, 4)}, GATED)


def tasks_of(process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/task"))


async def stopped(rig, process) -> str:
    """Stop the worker, and return how it ended."""
    rig.processes.stop(process.worker, kill=False)
    await until(lambda: rig.exits(process.worker))
    [end] = rig.exits(process.worker)
    return end.reason


def open_gates(process, value: float = 1.0) -> None:
    for slot in process.slots:
        torch.frombuffer(slot.inputs.map, dtype=torch.float32, count=1).fill_(value)


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_concurrent_runs_give_the_bits_of_a_single_run(rig, wide, concurrency):
    chance = random.Random(concurrency)
    requests = [torch.randn(chance.choice((1, 3, 8, 40)), 256) for _ in range(40)]
    expected = []

    async def scene():
        alone = await rig.start_worker(wide)
        for x in requests:
            run = rig.begin(alone, x=x)
            await rig.ended(run)
            expected.append(rig.output(run))
        process = await rig.start_worker(wide, cores=concurrency, concurrency=concurrency)
        runs, waiting = [], list(requests)
        while waiting or not set(runs) <= set(rig.ends()):
            flying = len(set(runs) - set(rig.ends()))
            while waiting and flying < concurrency:
                runs.append(rig.begin(process, x=waiting.pop(0)))
                flying += 1
            await asyncio.sleep(0)
        assert tasks_of(alone) == 1
        assert tasks_of(process) == concurrency
        assert await stopped(rig, alone) == await stopped(rig, process) == "its process exited with status 0"
        return runs

    runs = rig.run(scene())
    for run, wanted in zip(runs, expected, strict=True):
        assert rig.failures(run) == []
        assert torch.equal(rig.output(run), wanted)
    with torch.inference_mode():
        assert torch.allclose(expected[0], Wide()(requests[0])["y"], atol=1e-6)


def test_a_short_run_overtakes_a_long_one(rig):
    # The long run takes some seconds.
    deep = Function(Wide(120), {"x": torch.zeros(2, 256)})

    async def scene():
        process = await rig.start_worker(deep, cores=2, concurrency=2)
        long = rig.begin(process, x=torch.randn(1024, 256))
        short = rig.begin(process, x=torch.randn(1, 256))
        await rig.ended(short)
        return long, short

    long, short = rig.run(scene())
    assert long not in rig.ends()[: rig.ends().index(short)]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_programs_run_concurrently_and_a_handler_serially(rig, concurrency):
    function = Function(Wide(), {"x": torch.zeros(2, 256)}, CENSUS)

    async def scene():
        process = await rig.start_worker(function, cores=concurrency, concurrency=concurrency)
        rounds, most = 0, 0
        # On a busy machine, short runs may happen to follow each other for a while.
        while rounds < (6 if concurrency == 1 else 200) and most < 2:
            runs = [rig.begin(process, x=torch.randn(200, 256)) for _ in range(concurrency)]
            await rig.ended(*runs)
            assert [rig.failures(run) for run in runs] == [[]] * concurrency
            rounds, most = rounds + 1, rig.output(runs[-1], "most").item()
        await stopped(rig, process)
        return most

    most = rig.run(scene())
    assert most == 1 if concurrency == 1 else most >= 2


def test_all_runs_are_sent_before_the_first_answer_and_each_is_answered_after_a_stop(rig, gated):
    async def scene():
        process = await rig.start_worker(gated, concurrency=3)
        runs = [rig.begin(process, x=torch.zeros(1, 4)) for _ in range(3)]
        rig.processes.stop(process.worker, kill=False)
        assert not set(runs) & set(rig.ends())
        open_gates(process)
        await until(lambda: rig.exits(process.worker))
        return runs, rig.exits(process.worker)

    runs, ends = rig.run(scene())
    assert set(runs) <= set(rig.ends())
    assert [end.reason for end in ends] == ["its process exited with status 0"]
    assert all(rig.output(run)[0, 1:].tolist() == [1.0] * 3 for run in runs)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_message_is_read_exactly_once_at_the_turn_of_its_tenant(rig, wide, monkeypatch, given_up):
    turns = []

    async def scene():
        process = await rig.start_worker(wide)
        with monkeypatch.context() as patch:
            patch.setattr(rig.processes.queue, "add", lambda client, start: turns.append((client, start)))
            run = rig.begin(process, x=torch.zeros(2, 256))
            await until(lambda: turns)
            for _ in range(10):
                await asyncio.sleep(0)
        [(client, start)] = turns
        assert client == process.tenant
        assert run not in rig.ends()
        if given_up:
            rig.processes.forks.give_up(process, "it sent nonsense")
        start()
        start()
        if given_up:
            await until(lambda: rig.exits(process.worker))
        assert (run in rig.ends()) == (not given_up)

    rig.run(scene())


def test_the_exit_of_a_killed_worker_is_reported_and_no_end_of_its_runs(rig, gated):
    async def scene():
        process = await rig.start_worker(gated, concurrency=4)
        done = rig.begin(process, x=torch.ones(1, 4))
        await rig.ended(done)
        flying = [rig.begin(process, x=torch.zeros(1, 4)) for _ in range(4)]
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: rig.exits(process.worker))
        return done, flying, process

    done, flying, process = rig.run(scene())
    assert rig.output(done).tolist() == [[2.0] * 4]
    assert not set(flying) & set(rig.ends())
    [end] = rig.exits(process.worker)
    assert "signal 9" in end.reason
    assert rig.processes.process(process.worker) is None


def test_a_thread_that_dies_ends_its_worker(rig, gated):
    async def scene():
        process = await rig.start_worker(gated, concurrency=2)
        # Both threads wait, one at the gate and one for the handler: whichever fails, neither run may hang.
        runs = [rig.begin(process, x=torch.zeros(1, 4)) for _ in range(2)]
        open_gates(process, 7.0)
        await until(lambda: rig.exits(process.worker))
        return runs, process

    runs, process = rig.run(scene())
    assert not set(runs) & set(rig.ends())
    assert [end.reason for end in rig.exits(process.worker)] == ["its process exited with status 1"]


def test_threads_use_little_of_a_small_memory_limit(rig):
    function = Function(AddOne(), {"x": torch.zeros(2, 4)}, memory_mib=256)

    async def scene():
        process = await rig.start_worker(function, cores=16, concurrency=16)
        runs = [rig.begin(process, x=torch.full((1, 4), float(number))) for number in range(16)]
        await rig.ended(*runs)
        await stopped(rig, process)
        return runs

    assert [rig.output(run)[0, 0].item() for run in rig.run(scene())] == [number + 1.0 for number in range(16)]


FAT = """
def setup(assets):
    return bytearray(1 << 30)
"""


class Fat(torch.nn.Module):
    """A model whose temporary values do not fit within its memory limit."""

    def forward(self, x):
        return {"y": x.repeat(1, 40_000).sum(dim=1, keepdim=True)}


@pytest.mark.parametrize(("module", "handler"), [(AddOne(), FAT), (Fat(), None)], ids=["handler", "program"])
def test_a_worker_without_memory_to_load_reports_it_with_a_remedy(rig, module, handler):
    function = Function(module, {"x": torch.zeros(2, 1024)}, handler, memory_mib=256)

    async def scene():
        with pytest.raises(AssertionError) as failed:
            await rig.start_worker(function, warm_up=True)
        return str(failed.value)

    reason = rig.run(scene())
    assert ("HandlerError" if handler else "ProgramError") in reason
    assert "too little memory" in reason
    assert "memory_mib" in reason


FORGER = """
import msgspec, os, socket, time

def channel():
    for fd in range(3, 100):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                return socket.socket(fileno=os.dup(fd))
        except OSError:
            pass

def preprocess(inputs, state):
    run, kind = (int(value) for value in inputs["x"][0, :2])
    meta = lambda rows: ["Outputs", [["y", "FP32", [rows, 4], 16 * rows]]]
    forged = [
        [["Answer", run, [["Failure", "WorkerError", "twice"]]]] * 2,
        [["Answer", run + 1, [["Failure", "WorkerError", "not mine"]]]] * 2,
        [["Answer", run, [meta(1)], 1 << 50]],
        [["Answer", run, [meta(1 << 36)]]],
        [["Answer", run, [meta(-4)]]],
        [["Answer", run, []]],
        [["Answer", 1 << 62, [meta(1)]]],
        [["Bound", "f@1"]],
        [["BindFailed", "f@1", "WorkerError", "never"]],
        [["Answer", run, [["Failure", "WorkerError", "bad"]], 0, 0, False, float("nan")]],
        [["Answer", run, [["Failure", "WorkerError", "bad"]], 0, 0, False, -1.0]],
    ][kind]
    for message in forged:
        channel().send(msgspec.msgpack.encode(message))
    # Its own answer would be invalid after one that was accepted.
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", range(11))
def test_a_forged_answer_ends_the_worker_and_each_run_ends_at_most_once(rig, kind):
    function = Function(AddOne(), {"x": torch.zeros(2, 4)}, FORGER)

    async def scene():
        process = await rig.start_worker(function, concurrency=2)
        first = rig.number() + 1
        runs = [rig.begin(process, x=torch.tensor([[float(first), float(kind), 0.0, 0.0]])) for _ in range(2)]
        assert runs == [first, first + 1]
        await until(lambda: rig.exits(process.worker))
        return runs, process

    runs, process = rig.run(scene())
    [end] = rig.exits(process.worker)
    assert "it sent an invalid" in end.reason
    assert all(rig.ends().count(run) <= 1 for run in runs)


def test_a_worker_that_reports_its_trial_again_is_ended(rig):
    talking = (
        FORGER
        + """
def setup(assets):
    # Fields beyond the known ones are no error, so each of these messages may be long.
    for _ in range(3):
        channel().send(msgspec.msgpack.encode(["Trying", *[None] * 100_000]))
    time.sleep(5)
"""
    )

    async def scene():
        with pytest.raises(AssertionError, match="its trial had already begun"):
            await rig.start_worker(Function(AddOne(), {"x": torch.zeros(2, 4)}, talking))

    rig.run(scene())


def test_system_calls_of_a_worker_that_would_lock_a_buffer_by_writing_or_resizing_fail(rig):
    writing = (
        "import os, stat\n"
        "def done(call):\n"
        "    try:\n"
        "        call()\n"
        "        return 1\n"
        "    except OSError:\n"
        "        return 0\n"
        "def preprocess(inputs, state):\n"
        "    files = [fd for fd in range(3, 100) if done(lambda: os.lseek(fd, 0, os.SEEK_CUR))]\n"
        "    inputs['x'][0, 0] = 100 * len(files)\n"
        "    for fd in files:\n"
        "        for call in (lambda: os.pwrite(fd, b'x', 0), lambda: os.writev(fd, [b'x']),\n"
        "                     lambda: os.ftruncate(fd, 1 << 20), lambda: os.ftruncate(fd, 1 << 40)):\n"
        "            inputs['x'][0, 0] += done(call)\n"
        "    return inputs\n"
    )
    function = Function(AddOne(), {"x": torch.zeros(2, 4096)}, writing)

    async def scene():
        process = await rig.start_worker(function, concurrency=2)
        run, large = rig.begin(process, x=torch.zeros(1, 4096)), rig.begin(process, x=torch.ones(256, 4096))
        await rig.ended(run, large)
        await stopped(rig, process)
        return run, large

    run, large = rig.run(scene())
    files, done = divmod(rig.output(run)[0, 0].item() - 1, 100)
    # Two buffers for each of two runs.
    assert files >= 4
    assert done == 0
    assert torch.equal(rig.output(large)[1:], torch.full((255, 4096), 2.0))


@contextmanager
def no_memory():
    """Limit this process to a little more address space than it has mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("copied", ["inputs", "outputs"])
def test_a_node_without_memory_for_tensors_refuses_and_its_worker_keeps_serving(rig, copied):
    function = Function(AddOne(), {"x": torch.zeros(2, 16 << 10)})
    large = torch.ones(1 << 10, 16 << 10)

    async def scene():
        process = await rig.start_worker(function)
        with ExitStack() as scarce:
            with no_copies(rig):
                run = rig.begin(process, x=large)
                if copied == "inputs":
                    scarce.enter_context(no_memory())
            if copied == "outputs":
                with no_copies(rig):
                    await until(lambda: run not in process._pending_runs)
                    scarce.enter_context(no_memory())
            await until(lambda: run in rig.ends() or rig.exits(process.worker))
        assert not rig.exits(process.worker)
        # Its buffer may be larger than the node could map.
        again = rig.begin(process, x=large[:700])
        await rig.ended(again)
        await stopped(rig, process)
        return run, again

    run, again = rig.run(scene())
    [failure] = next(event.failures for event in rig.events if isinstance(event, RunEnded) and event.run == run)
    assert failure.error == "OverloadedError"
    assert rig.failures(again) == []
    assert torch.equal(rig.output(again), large[:700] + 1.0)


@contextmanager
def no_copies(rig):
    """Prevent copies of large tensors."""
    gate = threading.Event()
    try:
        for _ in range(THREADS):
            rig.effects.runs._copies._threads.submit(gate.wait)
        yield
    finally:
        gate.set()


def test_small_runs_continue_while_large_tensors_are_copied(rig):
    function = Function(AddOne(), {"x": torch.zeros(2, 1024)})
    large = torch.ones(LARGE_BYTES // 1024, 1024)

    async def scene():
        process = await rig.start_worker(function, concurrency=2)
        with no_copies(rig):
            run = rig.begin(process, x=large)
            short = rig.begin(process, x=torch.zeros(1, 1024))
            await rig.ended(short)
        await rig.ended(run)
        with no_copies(rig):
            again = rig.begin(process, x=large)
        with no_copies(rig):
            # The inputs are copied, and the answer is not taken: nothing else may be written in its place.
            await until(lambda: again not in process._pending_runs)
            others = [rig.begin(process, x=torch.full((1, 1024), 3.0))]
            await rig.ended(*others)
        await rig.ended(again)
        await stopped(rig, process)
        return run, again, others[0]

    run, again, other = rig.run(scene())
    assert torch.equal(rig.output(run), large + 1.0)
    assert torch.equal(rig.output(again), large + 1.0)
    assert torch.equal(rig.output(other), torch.full((1, 1024), 4.0))


@pytest.mark.parametrize("copied", ["inputs", "outputs"])
def test_a_worker_may_end_while_large_tensors_are_copied(rig, copied):
    function = Function(AddOne(), {"x": torch.zeros(2, 1024)})
    large = torch.ones(LARGE_BYTES // 1024, 1024)

    async def scene():
        process = await rig.start_worker(function)
        if copied == "outputs":
            run = rig.begin(process, x=large)
        with no_copies(rig):
            if copied == "outputs":
                await until(lambda: run not in process._pending_runs)
            else:
                run = rig.begin(process, x=large)
            rig.processes.forks.kill(process)
            await until(lambda: rig.exits(process.worker))
            # The thread may still be copying.
            assert not any(buffer.map.closed for buffer in process.slots[0])
        await until(lambda: all(buffer.map.closed for buffer in process.slots[0]))
        return run

    assert rig.run(scene()) not in rig.ends()


def test_idle_large_buffers_are_released_and_the_worker_keeps_serving(rig):
    function = Function(AddOne(), {"x": torch.zeros(2, 4096)})

    async def scene():
        process = await rig.start_worker(function, concurrency=2)
        large, release, taken = torch.ones(256, 4096), process.release, []
        # It is called at the end of the run, and some time later the buffers are released.
        process.release = lambda: taken.append(sum(process.buffer_bytes())) or release()
        run = rig.begin(process, x=large)
        await rig.ended(run)
        assert taken[0] >= 2 * large.nbytes
        buffers = [buffer for slot in process.slots for buffer in slot]
        await until(
            lambda: all(os.fstat(buffer.fd).st_blocks * 512 <= KEPT_BYTES for buffer in buffers), 60 * BUFFERS_IDLE_S
        )
        again = rig.begin(process, x=large * 2.0)
        await rig.ended(again)
        await stopped(rig, process)
        return run, again

    run, again = rig.run(scene())
    assert torch.equal(rig.output(run), torch.full((256, 4096), 2.0))
    assert torch.equal(rig.output(again), torch.full((256, 4096), 3.0))


def test_workers_leave_no_descriptor(rig, wide):
    async def scene():
        process = await rig.start_worker(wide, concurrency=4)
        await stopped(rig, process)

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        rig.run(scene())
    # Buffers are closed in a thread.
    rig.run(until(lambda: len(os.listdir("/proc/self/fd")) <= before))


@pytest.mark.parametrize(("cores", "concurrency", "threads"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (3, 2, 1), (1, 4, 1)])
def test_concurrent_runs_share_the_cores(wide, cores, concurrency, threads):
    load = wide.deployed.load_message(cores=cores, concurrency=concurrency)
    assert (load.threads, load.concurrency) == (threads, concurrency)


def test_a_worker_refused_for_too_few_descriptors_leaves_none(wide):
    async def scene():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = os.listdir("/proc/self/fd")
        load = wide.deployed.load_message(concurrency=3)
        failures = 0
        try:
            for limit in range(3, soft):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                try:
                    process = WorkerProcess(1, wide.deployed, load, None, process_files())
                except OSError:
                    failures += 1
                    continue
                process.far_end.close()
                process.close()
                break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert os.listdir("/proc/self/fd") == held
        assert failures > 2 * 3

    asyncio.run(scene())


@pytest.mark.parametrize("of", ["worker", "zygote"])
def test_a_process_refused_for_too_little_memory_leaves_no_descriptor(wide, monkeypatch, of):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    # Each channel maps memory for its messages.
    refusing = SimpleNamespace(mmap=refuse, MAP_PRIVATE=0, MAP_ANONYMOUS=0)
    monkeypatch.setattr("overwinter.worker.channel.mmap", refusing)

    async def scene():
        load, held = wide.deployed.load_message(), os.listdir("/proc/self/fd")
        make = {
            "worker": lambda: WorkerProcess(1, wide.deployed, load, None, process_files()),
            "zygote": lambda: ZygoteProcess("ada", ForkLimits()),
        }
        with pytest.raises(OSError, match="memory"):
            make[of]()
        assert os.listdir("/proc/self/fd") == held

    asyncio.run(scene())


def test_the_buffers_of_a_process_are_handed_to_the_closing_thread(wide):
    async def scene() -> list[int]:
        closed: list[int] = []
        files = ProcessFiles(Outputs(LogLines()), SimpleNamespace(close_file=closed.append))
        process = WorkerProcess(1, wide.deployed, wide.deployed.load_message(concurrency=3), None, files)
        fds = process.buffer_fds()
        process.close()
        assert closed == fds
        return closed

    for fd in asyncio.run(scene()):
        # The kernel may need seconds to free what a worker has written there.
        os.close(fd)


COMPUTES = """
import time

def preprocess(inputs, state):
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    return inputs
"""


def test_computation_for_a_run_does_not_count_as_outside_runs(rig):
    function = Function(AddOne(), {"x": torch.zeros(2, 4)}, COMPUTES)

    async def scene():
        process = await rig.start_worker(function)
        began = clock.cpu_time_s(process.pid)
        for _ in range(2):
            await rig.ended(rig.begin(process, x=torch.zeros(2, 4)))
        outside_runs_s, cpu_time_s = process.cpu_time_outside_runs_s(), clock.cpu_time_s(process.pid) - began
        await stopped(rig, process)
        return outside_runs_s, cpu_time_s

    outside_runs_s, cpu_time_s = rig.run(scene())
    assert cpu_time_s >= 0.4
    assert outside_runs_s < 0.1


LONG_ERRORS = """
def setup(assets):
    return None

def preprocess(inputs, state):
    if inputs["x"][0, 0] == 9.0:
        raise ValueError("y" * (3 << 20))
    return inputs
"""


def test_a_long_error_of_a_handler_is_truncated_and_ends_no_worker(rig):
    function = Function(AddOne(), {"x": torch.zeros(2, 4)}, LONG_ERRORS)

    async def scene():
        process = await rig.start_worker(function)
        for value in (9.0, 1.0):
            run = rig.begin(process, x=torch.full((1, 4), value))
            await rig.ended(run)
            if value == 9.0:
                [message] = rig.failures(run)
                assert ("yyy" in message, len(message)) == (True, MESSAGE_MAX)
            else:
                assert rig.output(run).tolist() == [[2.0] * 4]
        assert not rig.exits(process.worker)

    rig.run(scene())


def test_a_long_error_of_a_handlers_setup_is_reported(rig):
    function = Function(
        AddOne(), {"x": torch.zeros(2, 4)}, "def setup(assets):\n    raise ValueError('y' * (3 << 20))\n"
    )

    async def scene():
        with pytest.raises(AssertionError) as failed:
            await rig.start_worker(function)
        return str(failed.value)

    reason = rig.run(scene())
    assert "HandlerError" in reason
    assert "yyy" in reason
