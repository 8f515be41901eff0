"""Several functions of one family in one worker: each answers as plain PyTorch does with its own weights, whatever else
is bound or unbound or fails.
"""

import os
import random

import msgspec
import pytest
import torch

from overwinter.node.functions import DeployedFunction
from overwinter.node.memory import process_memory
from overwinter.worker.channel import close_all

from .rig import Function, until

WIDTH = 64


class Net(torch.nn.Module):
    """A trunk that all variants share, large enough for separate blocks, and a head that differs."""

    def __init__(self, variant: int, everything: bool = False, width: int = WIDTH):
        super().__init__()
        torch.manual_seed(variant if everything else 1)
        self.trunk = torch.nn.Sequential(torch.nn.Linear(width, 512), torch.nn.GELU(), torch.nn.Linear(512, width))
        torch.manual_seed(variant)
        self.head = torch.nn.Linear(width, 8)

    def forward(self, x):
        return {"y": self.head(self.trunk(x) + x)}


class Member(Function):
    """One variant, and the answers of plain PyTorch with its weights."""

    def __init__(self, variant: int, module: torch.nn.Module | None = None, **options):
        self.module = module or Net(variant)
        width = options.pop("width", WIDTH)
        super().__init__(self.module, {"x": torch.zeros(2, width)}, name=f"f{variant}", **options)

    def answer(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.module(x)["y"]


GATED = """
import time

def setup(assets):
    return assets.get("word", b"").decode()

def preprocess(inputs, state):
    gate = inputs["x"]
    while gate[0, 0] == 0.0:
        time.sleep(0.001)
    return inputs
"""
"""Its inputs lie in the buffer, where `open_gates` changes them."""


def open_gates(worker) -> None:
    for slot in worker.slots:
        torch.frombuffer(slot.inputs.map, dtype=torch.float32, count=1).fill_(1.0)


@pytest.fixture(scope="module")
def variants():
    return [Member(number) for number in range(20)]


async def stopped(rig, worker) -> None:
    """Stop the worker; it must end by itself and successfully."""
    rig.processes.stop(worker.worker, kill=False)
    await until(lambda: rig.exits(worker.worker))
    assert [end.reason for end in rig.exits(worker.worker)] == ["its process exited with status 0"]


def right(rig, run, member, x) -> bool:
    assert rig.failures(run) == []
    return torch.equal(rig.output(run), member.answer(x))


def mapped_by(worker) -> int:
    """Return how many blocks the worker's process has mapped, as the kernel reports."""
    # An ordinary user cannot open this file of a contained process, but the node holds it open.
    with open(os.dup(worker.smaps)) as lines:
        lines.seek(0)
        return sum("/memfd:test" in line for line in lines)


@pytest.mark.parametrize("count", [2, 20])
def test_members_answer_bit_for_bit_as_plain_pytorch_with_their_own_weights(rig, variants, count):
    members = variants[:count]

    async def scene():
        worker = await rig.start_worker(members[0], members=members)
        blocks = [mapped_by(worker)]
        for member in members[1:]:
            assert await rig.bind(worker, member) is None
            blocks.append(mapped_by(worker))
        for _ in range(2):
            for member in random.Random(count).sample(members, count):
                x = torch.randn(3, WIDTH)
                run = rig.begin(worker, member, x=x)
                await rig.ended(run)
                assert right(rig, run, member, x)
        await stopped(rig, worker)
        return blocks

    blocks = rig.run(scene())
    total = len(members[0].deployed.bind_message().blocks)
    of_two = {address for member in members[:2] for address, _ in member.deployed.bind_message().blocks}
    added = len(of_two) - total
    # The trunk's blocks are mapped once; each further member maps only its own blocks.
    assert blocks == [total + number * added for number in range(count)]
    assert 0 < added < total


@pytest.mark.parametrize("concurrency", [1, 4])
def test_runs_of_several_members_in_one_worker_get_their_own_answers(rig, variants, concurrency):
    members = variants[:5]
    # Products of matrices may differ in the last bit by the number of threads: use that of one of the worker's runs.
    usual = torch.get_num_threads()
    torch.set_num_threads(2 // concurrency or 1)

    async def scene():
        worker = await rig.start_worker(members[0], 2, concurrency, members)
        for result in [rig.begin_bind(worker, member) for member in members[1:]]:
            await until(lambda result=result: result)
            assert result == [None]
        flying, done = {}, 0
        while done < 80:
            while len(flying) < concurrency:
                member, x = random.choice(members), torch.randn(random.choice((1, 7, 40)), WIDTH)
                flying[rig.begin(worker, member, x=x)] = member, x
            await until(lambda: flying.keys() & set(rig.ends()))
            for run in flying.keys() & set(rig.ends()):
                assert right(rig, run, *flying.pop(run))
                done += 1
        await rig.ended(*flying)
        await stopped(rig, worker)

    try:
        rig.run(scene())
    finally:
        torch.set_num_threads(usual)


def test_a_member_is_bound_and_answers_while_another_runs(rig):
    first, second = (Member(number, handler=GATED) for number in (1, 2))

    async def scene():
        worker = await rig.start_worker(first, concurrency=2, members=[second])
        held = rig.begin(worker, first, x=torch.zeros(1, WIDTH))
        assert await rig.bind(worker, second) is None
        x = torch.ones(1, WIDTH)
        beside = rig.begin(worker, second, x=x)
        await rig.ended(beside)
        assert held not in rig.ends()
        assert right(rig, beside, second, x)
        open_gates(worker)
        await rig.ended(held)
        opened = torch.zeros(1, WIDTH)
        opened[0, 0] = 1.0
        assert right(rig, held, first, opened)
        await stopped(rig, worker)

    rig.run(scene())


def test_a_member_is_unbound_while_it_and_others_run(rig):
    first, second = (Member(number, handler=GATED) for number in (1, 2))

    async def scene():
        worker = await rig.start_worker(first, concurrency=3, members=[second])
        assert await rig.bind(worker, second) is None
        held = [rig.begin(worker, member, x=torch.zeros(1, WIDTH)) for member in (first, second)]
        rig.unbind(worker, second)
        # A run that comes later finds no function.
        late = rig.begin(worker, second, x=torch.ones(1, WIDTH))
        await rig.ended(late)
        assert "f2@1 is not bound" in rig.failures(late)[0]
        assert not set(held) & set(rig.ends())
        open_gates(worker)
        await rig.ended(*held)
        x = torch.zeros(1, WIDTH)
        x[0, 0] = 1.0
        for run, member in zip(held, (first, second), strict=True):
            assert right(rig, run, member, x)
        await until(lambda: mapped_by(worker) == len(first.deployed.bind_message().blocks))
        await stopped(rig, worker)

    rig.run(scene())


def test_an_unbound_member_leaves_no_memory_and_can_be_bound_again(rig):
    handler = "import torch\ndef setup(assets):\n    return torch.ones(8 << 20)\n"
    first, second = (Member(number, Net(number, everything=True), handler=handler) for number in (1, 2))

    def private(worker) -> int:
        with open(os.dup(rig.processes.worker_smaps()[worker.worker]), "rb", buffering=0) as smaps:
            return process_memory(smaps).private

    async def scene():
        worker = await rig.start_worker(first, members=[second])
        alone, blocks = private(worker), mapped_by(worker)
        for _ in range(3):
            assert await rig.bind(worker, second) is None
            x = torch.randn(2, WIDTH)
            run = rig.begin(worker, second, x=x)
            await rig.ended(run)
            assert right(rig, run, second, x)
            assert private(worker) >= alone + (30 << 20)
            assert mapped_by(worker) == 2 * blocks
            rig.unbind(worker, second)
            await until(lambda: mapped_by(worker) == blocks)
            await until(lambda: private(worker) < alone + (4 << 20))
        await stopped(rig, worker)

    rig.run(scene())


def test_outputs_that_are_views_of_weights_outlive_an_unbind(rig):
    class Tells(torch.nn.Module):
        def __init__(self, value: float):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((4096,), value), requires_grad=False)

        def forward(self, x):
            return {"y": x + self.weight[0], "weight": self.weight[:8].unsqueeze(0)}

    keeps = (
        "import sys, torch\n"
        "OUTPUTS = [{'name': 'y', 'datatype': 'FP32', 'shape': ['n', 8]}]\n"
        "def postprocess(outputs, inputs, state):\n"
        "    kept = sys.modules.setdefault('kept_by_the_test', [])\n"
        "    kept.append(outputs['weight'])\n"
        "    return {'y': torch.cat([weight.reshape(1, 8) for weight in kept])}\n"
    )
    first, second = (Member(number, Tells(float(number)), handler=keeps, width=4) for number in (1, 2))

    async def scene():
        worker = await rig.start_worker(first, members=[second])
        assert await rig.bind(worker, second) is None
        for member in (second, first):
            run = rig.begin(worker, member, x=torch.zeros(1, 4))
            await rig.ended(run)
            if member is second:
                # The worker has unbound it before it runs the first one.
                rig.unbind(worker, second)
        run = rig.begin(worker, first, x=torch.zeros(1, 4))
        await rig.ended(run)
        assert rig.output(run)[:, 0].tolist() == [2.0, 1.0, 1.0]
        await stopped(rig, worker)

    rig.run(scene())


COUNTING = """
import torch

OUTPUTS = [{"name": "y", "datatype": "FP32", "shape": [1, 3]}]
calls = 0

def setup(assets):
    return {"word": float(assets["word"]), "calls": 0}

def postprocess(outputs, inputs, state):
    global calls
    calls += 1
    state["calls"] += 1
    return {"y": torch.tensor([[state["word"], state["calls"], calls]])}
"""


def test_each_member_has_its_own_state_assets_and_globals_of_the_handler(rig):
    members = [Member(number, handler=COUNTING, assets={"word": str(number).encode()}) for number in range(3)]

    async def scene():
        worker = await rig.start_worker(members[0], members=members)
        for member in members[1:]:
            assert await rig.bind(worker, member) is None
        answers = {number: [] for number in range(3)}
        for number in (0, 1, 0, 2, 2, 0):
            run = rig.begin(worker, members[number], x=torch.zeros(1, WIDTH))
            await rig.ended(run)
            answers[number].append(rig.output(run)[0].tolist())
        await stopped(rig, worker)
        return answers

    assert rig.run(scene()) == {
        0: [[0.0, 1.0, 1.0], [0.0, 2.0, 2.0], [0.0, 3.0, 3.0]],
        1: [[1.0, 1.0, 1.0]],
        2: [[2.0, 1.0, 1.0], [2.0, 2.0, 2.0]],
    }


READING = """
import torch

OUTPUTS = [{"name": "y", "datatype": "FP32", "shape": [1, 3]}]

def read_asset(name, data):
    return [float(data)]

def setup(assets):
    return {"common": assets["common"], "own": assets["own"][0], "calls": 0}

def postprocess(outputs, inputs, state):
    state["calls"] += 1
    return {"y": torch.tensor([[float(id(state["common"]) % 100003), state["own"], state["calls"]]])}
"""


def test_members_with_equal_assets_share_what_is_read_of_them_but_no_state(rig):
    commons = (b"7", b"7", b"8")
    members = [
        Member(number, handler=READING, assets={"common": common, "own": str(number).encode()})
        for number, common in enumerate(commons)
    ]

    async def scene():
        worker = await rig.start_worker(members[0], members=members)
        for member in members[1:]:
            assert await rig.bind(worker, member) is None
        answers = []
        for member in members:
            run = rig.begin(worker, member, x=torch.zeros(1, WIDTH))
            await rig.ended(run)
            answers.append(rig.output(run)[0].tolist())
        await stopped(rig, worker)
        return answers

    first, second, third = rig.run(scene())
    assert first[0] == second[0] != third[0]
    assert [own for _, own, _ in (first, second, third)] == [0.0, 1.0, 2.0]
    assert [calls for _, _, calls in (first, second, third)] == [1.0, 1.0, 1.0]


def test_a_failed_bind_affects_only_its_function_and_has_a_reason(rig):
    good, bad, third = (
        Member(number, handler=COUNTING, assets={"word": word})
        for number, word in ((1, b"1"), (2, b"no number"), (3, b"3"))
    )
    # It can be bound once its asset is corrected.
    mended = Member(2, handler=COUNTING, assets={"word": b"2"})

    async def scene():
        worker = await rig.start_worker(good, concurrency=2, members=[bad, third])
        blocks = mapped_by(worker)
        # Both binds are in progress at the same time.
        failed, result = rig.begin_bind(worker, bad), rig.begin_bind(worker, third)
        await until(lambda: failed and result)
        [failure] = failed
        assert failure.error == "HandlerError"
        assert "no number" in failure.message
        assert result == [None]
        for member, word in ((good, 1.0), (third, 3.0)):
            run = rig.begin(worker, member, x=torch.zeros(1, WIDTH))
            await rig.ended(run)
            assert rig.output(run)[0, 0] == word
        assert bad.deployed not in worker.bindings.functions()
        assert await rig.bind(worker, mended) is None
        run = rig.begin(worker, mended, x=torch.zeros(1, WIDTH))
        await rig.ended(run)
        assert rig.output(run)[0, 0] == 2.0
        for member in (third, mended):
            rig.unbind(worker, member)
        await until(lambda: mapped_by(worker) == blocks)
        await stopped(rig, worker)

    rig.run(scene())


def test_a_truncated_block_affects_only_its_member(rig, variants):
    first, second = variants[:2]

    class Truncated(Member):
        def open_blob(self, address):
            fd = super().open_blob(address)
            os.ftruncate(fd, 16)
            return fd

    async def scene():
        worker = await rig.start_worker(first, members=[second])
        failure = await rig.bind(worker, Truncated(1))
        assert "has only 16" in failure.message
        assert await rig.bind(worker, second) is None
        x = torch.randn(1, WIDTH)
        for member in (first, second):
            run = rig.begin(worker, member, x=x)
            await rig.ended(run)
            assert right(rig, run, member, x)
        await stopped(rig, worker)

    rig.run(scene())


def test_only_members_can_be_bound_and_only_bound_ones_unbound(rig, variants):
    first, second = variants[:2]
    stranger = Member(3, tenant="other")
    larger = Member(4, Net(4, width=WIDTH + 1), width=WIDTH + 1)

    async def scene():
        worker = await rig.start_worker(first, members=[second])
        for other in (stranger, larger):
            with pytest.raises(ValueError, match="not of the family"):
                rig.begin_bind(worker, other)
        with pytest.raises(ValueError, match="bound already"):
            rig.begin_bind(worker, first)
        with pytest.raises(ValueError, match="not bound"):
            rig.unbind(worker, second)
        result = rig.begin_bind(worker, second)
        with pytest.raises(ValueError, match="not bound"):
            rig.unbind(worker, second)
        await until(lambda: result)
        rig.unbind(worker, first)
        x = torch.randn(1, WIDTH)
        run = rig.begin(worker, second, x=x)
        await rig.ended(run)
        assert right(rig, run, second, x)
        await stopped(rig, worker)

    rig.run(scene())


def test_a_bind_beyond_the_workers_address_space_affects_only_its_function(rig, variants):
    first, second = Member(1, memory_mib=256), Member(2, memory_mib=256)

    async def scene():
        worker = await rig.start_worker(first, members=[second])
        deployment = second.deployed.deployment
        blocks = [msgspec.structs.replace(block, nbytes=8 << 30) for block in deployment.manifest.blocks]
        manifest = msgspec.structs.replace(deployment.manifest, blocks=tuple(blocks))
        large = DeployedFunction(msgspec.structs.replace(deployment, manifest=manifest))
        results = []
        bind = worker.bind_message(large)
        fds = [os.memfd_create("large") for _ in bind.handed]
        for fd in fds:
            os.ftruncate(fd, 8 << 30)
        rig.processes.bind(worker, large, bind, fds, results.append)
        close_all(fds)
        await until(lambda: results)
        assert "could not be mapped" in results[0].message
        assert await rig.bind(worker, second) is None
        for member in (first, second):
            x = torch.randn(1, WIDTH)
            run = rig.begin(worker, member, x=x)
            await rig.ended(run)
            assert right(rig, run, member, x)
        await stopped(rig, worker)

    rig.run(scene())


def test_in_a_shared_run_each_request_is_answered_with_the_weights_of_its_function(rig):
    members = [Member(variant) for variant in range(4)]
    *bound, unbound = members

    async def together():
        worker = await rig.start_worker(members[0], members=members[1:])
        for member in bound[1:]:
            assert await rig.bind(worker, member) is None
        for _ in range(2):
            # At the first run, the results are compared with separate runs.
            asked = [(member, torch.randn(1, WIDTH)) for member in (*bound, bound[1], unbound)]
            run, requests = rig.begin_together(worker, *asked)
            await rig.ended(run)
            *_, result = rig.failures(run)
            assert unbound.deployed.id in result
            for request, (member, x) in zip(requests[:-1], asked, strict=False):
                [outcome] = rig.calls.payloads[request].outputs
                given = torch.frombuffer(bytearray(outcome.data), dtype=torch.float32).view(outcome.shape)
                assert torch.allclose(given, member.answer(x), atol=1e-5)

    rig.run(together())
