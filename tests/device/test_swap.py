"""Swapped runs give the same bits as plain PyTorch, and move only what is missing."""

import os
import time
from contextlib import closing
from functools import cache
from itertools import chain, pairwise, repeat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import zoo
from benchmarks.programs import flatten
from overwinter.api.deployer import package
from overwinter.core.errors import NoSpaceError, StoreError, WorkerError
from overwinter.device.cached import CachedAllocator
from overwinter.device.cuda import CudaDevice
from overwinter.device.function import DeviceFunction, DeviceProgram
from overwinter.device.host import HostBlocks
from overwinter.device.interface import Copy, CopyPath, FoundBlocks, Source
from overwinter.device.link import Link
from overwinter.device.memory_owners import MemoryOwners
from overwinter.device.partitioned import PartitionedAllocator
from overwinter.device.peer import PeerMemory
from overwinter.device.shared import shared_memory
from overwinter.device.swap import Route, SwapSettings, elbow, groups, run, transfer_times
from overwinter.device.virtual import VirtualDevice
from overwinter.model.export import export
from overwinter.store.manifest import weight_positions
from tests.device.kinds import KINDS, made, processor

KIB = 1 << 10
VARIANTS = 4
STEPS = st.lists(
    st.tuples(st.sampled_from(["resnet50", "minilm"]), st.integers(0, VARIANTS - 1), st.integers(0, 2)), max_size=15
)
SWAPPINGS = (
    SwapSettings(64 * KIB),
    SwapSettings(1 << 40, overlaps=False),
    SwapSettings(0, by_weight=True),
)


def fast():
    return Link(1e12, time.perf_counter, time.sleep)


@cache
class Stored:
    """Variants of one model, their blocks in host memory, and the answers of plain PyTorch."""

    def __init__(self, name, device):
        model = zoo.build(name, small=True)
        program, weights = export(model.module, model.example_inputs, model.dynamic)
        self.inputs = [model.example_inputs[spec.name] for spec in program.inputs]
        self.program = DeviceProgram(program, device)
        self.functions, self.answers, self.host = [], [], {}
        head = next(reversed(list(model.module.parameters())))
        for variant in range(VARIANTS):
            with torch.inference_mode():
                head.mul_(1 + variant)
                self.answers.append(self.answer(model, weights, device))
                self.functions.append(self.stored(f"{name}-{variant}", weights))
                head.div_(1 + variant)

    def answer(self, model, weights, device):
        """Return what plain PyTorch answers; on a GPU, what the program answers over tensors that were not swapped."""
        if device.type == "cpu":
            return flatten(model.module(**model.example_inputs))
        there = [each.to(device) for each in weights]
        return [each.cpu() for each in self.program.run(there, [each.to(device) for each in self.inputs])]

    def stored(self, name, weights):
        packaged = package(name, self.program.program, weights)
        for block in packaged.manifest.blocks:
            content = bytearray(packaged.contents[block.address]())
            self.host[block.address] = torch.frombuffer(content, dtype=torch.uint8)
        return DeviceFunction(name, "ada", self.program, weight_positions(packaged.manifest.blocks))

    @property
    def route(self):
        return Route(HostBlocks(self.host), fast())

    def check(self, device, variant, routes, swapping=SWAPPINGS[0]):
        outputs, moved = run(device, self.functions[variant], self.inputs, routes, swapping)
        assert all(map(torch.equal, outputs, self.answers[variant]))
        assert len(outputs) == len(self.answers[variant])
        self.moved = moved
        return sum(moved)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    processor(request.param)
    return request.param


@pytest.fixture(scope="module")
def stored(kind):
    return {name: Stored(name, processor(kind)) for name in ("resnet50", "minilm")}


@pytest.fixture(scope="module")
def on_cpu():
    return {name: Stored(name, torch.device("cpu")) for name in ("resnet50", "minilm")}


@pytest.fixture
def device(kind):
    device = made(kind, "a", PartitionedAllocator(64 << 20, 1 << 20))
    yield device
    device.close()


@pytest.fixture
def virtual():
    device = VirtualDevice("a", PartitionedAllocator(64 << 20, 1 << 20))
    yield device
    device.close()


@pytest.mark.parametrize("swapping", SWAPPINGS)
@pytest.mark.parametrize("name", ["resnet50", "minilm"])
def test_a_swapped_run_answers_as_plain_pytorch_does(stored, device, name, swapping):
    model = stored[name]
    function = model.functions[0]
    moved = model.check(device, 0, [model.route], swapping)
    assert 0.9 * function.nbytes < moved <= function.nbytes
    assert model.check(device, 0, [model.route], swapping) == 0
    device.evict(function.name)
    assert device.missing(function.blocks) == function.blocks


def test_weight_tensors_are_created_again_only_when_blocks_may_lie_elsewhere(stored, device):
    model = stored["minilm"]
    first, second = model.functions[:2]
    model.check(device, 0, [model.route])
    weights = first.bind(device)
    model.check(device, 1, [model.route])
    assert first.bind(device) is weights
    device.evict(second.name)
    assert first.bind(device) is weights
    model.check(device, 0, [model.route])
    device.evict(first.name)
    model.check(device, 0, [model.route])
    assert first.bind(device) is not weights


def test_a_run_whose_inputs_cannot_be_brought_leaves_no_blocks(stored, device, monkeypatch):
    model = stored["minilm"]
    function = model.functions[0]

    def lacks(inputs):
        raise torch.OutOfMemoryError("no memory for the inputs")

    with monkeypatch.context() as patch:
        patch.setattr(device, "bring", lacks)
        with pytest.raises(torch.OutOfMemoryError):
            run(device, function, model.inputs, [model.route], SWAPPINGS[0])
    assert device.missing(function.blocks) == function.blocks
    model.check(device, 0, [model.route])


def test_a_variant_brings_only_the_blocks_that_differ(stored, device):
    model = stored["minilm"]
    model.check(device, 0, [model.route])
    delta = set(model.functions[1].blocks) - set(model.functions[0].blocks)
    assert 0 < len(delta) < len(model.functions[1].blocks)
    assert model.check(device, 1, [model.route]) == sum(model.functions[1].blocks[address] for address in delta)
    device.evict(model.functions[0].name)
    assert model.check(device, 1, [model.route]) == 0


@pytest.fixture
def shared():
    """Another device, and its memory as another process sees it."""
    fd = shared_memory(64 << 20)
    try:
        device, memory = VirtualDevice("b", PartitionedAllocator(64 << 20, 1 << 20), fd), PeerMemory(fd)
    finally:
        os.close(fd)
    yield device, memory
    device.close()


def test_blocks_come_from_a_peer_where_it_has_them(on_cpu, virtual, shared):
    model, (peer, memory) = on_cpu["resnet50"], shared
    first, second = (set(function.blocks) for function in model.functions[:2])
    model.check(peer, 0, [model.route])
    alone = HostBlocks({address: model.host[address] for address in second - first})
    assert model.check(virtual, 1, [Route(memory, fast()), Route(alone, fast())]) == model.functions[1].nbytes
    near, far = model.moved
    assert near == sum(model.functions[1].blocks[address] for address in first & second)
    assert far == sum(model.functions[1].blocks[address] for address in second - first)


class EvictsAfterFind(Source):
    """The memory of a device that evicts a function once its blocks are found, before another device copies them."""

    def __init__(self, memory, peer, evicted):
        self.memory, self.peer, self.evicted = memory, peer, evicted

    def find(self, blocks):
        found = self.memory.find(blocks)
        self.peer.evict(self.evicted.name)
        other = {"0" * 64: self.evicted.nbytes}
        self.peer.hold("other", "ada", other)
        content = torch.full((self.evicted.nbytes,), 7, dtype=torch.uint8)
        self.peer.copy(
            [Copy("0" * 64, 0, self.evicted.nbytes)], [CopyPath(FoundBlocks({"0" * 64: content}), fast())]
        ).wait()
        return found


@pytest.mark.parametrize("swapping", SWAPPINGS)
def test_what_a_peer_evicts_meanwhile_comes_from_the_host(on_cpu, virtual, shared, swapping):
    model, (peer, memory) = on_cpu["minilm"], shared
    model.check(peer, 0, [model.route])
    source = EvictsAfterFind(memory, peer, model.functions[0])
    assert model.check(virtual, 0, [Route(source, fast()), model.route], swapping) > 0
    assert model.moved[0] == 0
    virtual.evict(model.functions[0].name)
    model.check(peer, 0, [model.route])
    with pytest.raises(WorkerError, match="was evicted from its device"):
        run(virtual, model.functions[0], model.inputs, [Route(source, fast())], swapping)
    assert virtual.missing(model.functions[0].blocks) == model.functions[0].blocks


def test_a_failed_swap_leaves_no_blocks(stored, device):
    model = stored["minilm"]
    with pytest.raises(StoreError, match="none of the places"):
        run(device, model.functions[0], model.inputs, [Route(HostBlocks({}), fast())], SWAPPINGS[0])
    short = HostBlocks({address: data[:5] for address, data in model.host.items()})
    with pytest.raises(WorkerError, match="could not be brought to device a"):
        run(device, model.functions[0], model.inputs, [Route(short, fast())], SWAPPINGS[0])
    assert device.missing(model.functions[0].blocks) == model.functions[0].blocks
    model.check(device, 0, [model.route])


def test_an_error_before_the_last_transfer_was_asked_for_leaves_no_blocks(stored, device, monkeypatch):
    model, copy, asked = stored["minilm"], device.copy, []

    def fails_later(copies, paths):
        asked.append(copies)
        if len(asked) == 2:
            raise MemoryError("no memory for a transfer")
        return copy(copies, paths)

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", fails_later)
        with pytest.raises(MemoryError):
            run(device, model.functions[0], model.inputs, [model.route], SWAPPINGS[0])
    assert device.missing(model.functions[0].blocks) == model.functions[0].blocks
    model.check(device, 0, [model.route])


def test_an_error_while_memory_is_cleared_leaves_no_blocks(stored, device, monkeypatch):
    model = stored["minilm"]

    def fails(extent, tenant):
        raise MemoryError("no memory to clear memory")

    with monkeypatch.context() as patch:
        patch.setattr(device, "_clear", fails)
        with pytest.raises(MemoryError):
            run(device, model.functions[0], model.inputs, [model.route], SWAPPINGS[0])
    assert device.missing(model.functions[0].blocks) == model.functions[0].blocks
    model.check(device, 0, [model.route])


def test_the_blocks_of_a_run_that_fails_stay_on_the_device(stored, device):
    model = stored["minilm"]
    with pytest.raises(IndexError):
        run(device, model.functions[0], [torch.zeros(1)] * len(model.inputs), [model.route], SWAPPINGS[0])
    assert model.check(device, 0, [model.route]) == 0


def test_what_does_not_fit_is_refused(stored, kind):
    model = stored["resnet50"]
    with (
        closing(made(kind, "small", PartitionedAllocator(64 * KIB, 64 * KIB))) as device,
        pytest.raises(NoSpaceError, match="do not fit on device small"),
    ):
        run(device, model.functions[0], model.inputs, [model.route], SWAPPINGS[0])


@settings(deadline=None, max_examples=30)
@given(steps=STEPS)
@pytest.mark.parametrize("allocator", [PartitionedAllocator, lambda nbytes, _: CachedAllocator(nbytes)])
def test_answers_stay_right_while_functions_are_brought_and_evicted(stored, kind, allocator, steps):
    nbytes = max(model.functions[0].nbytes for model in stored.values())
    recent = []
    with closing(made(kind, "a", allocator(nbytes + nbytes // 2 >> 16 << 16, 64 * KIB))) as device:
        for name, variant, swapping in steps:
            model = stored[name]
            function = model.functions[variant]
            while not fits(device, model, variant, SWAPPINGS[swapping]):
                device.evict(recent.pop(0))
            recent = [each for each in recent if each != function.name] + [function.name]
            assert not device.missing(function.blocks)


def fits(device, model, variant, swapping):
    try:
        model.check(device, variant, [model.route], swapping)
    except NoSpaceError:
        return False
    return True


def test_no_tensor_reaches_another_block(device):
    device.hold("f", "ada", {"1": 64, "2": 64})
    tensor = torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(device.storage("1"))
    for outside in (
        lambda: tensor.as_strided((65,), (1,)),
        lambda: tensor.as_strided((64,), (1,), 1),
        lambda: tensor.resize_(65),
        lambda: tensor.untyped_storage().resize_(65),
    ):
        with pytest.raises(RuntimeError):
            outside()


def test_memory_is_cleared_when_it_changes_tenant(device):
    def content(address):
        return torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(device.storage(address))

    device.hold("f", "ada", {"1": 5000})
    content("1").fill_(7)
    device.evict("f")
    device.hold("g", "ada", {"2": 4000})
    assert content("2").eq(7).all()
    device.evict("g")
    device.hold("h", "bob", {"3": 5000})
    assert not content("3").any()


def test_many_blocks_are_cleared_and_those_between_them_kept(device):
    def content(address):
        return torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(device.storage(address))

    sizes = [5000, 4096, 1, 9000, 300_000, 4097, 70_000, 12_288] * 4
    device.hold("kept", "ada", {f"{at}": size for at, size in enumerate(sizes) if at % 3 == 0})
    device.hold("gone", "ada", {f"{at}": size for at, size in enumerate(sizes) if at % 3})
    for at in range(len(sizes)):
        content(f"{at}").fill_(7)
    device.evict("gone")
    device.hold("bob's", "bob", {f"b{at}": size for at, size in enumerate(sizes)})
    for at in range(len(sizes)):
        assert not content(f"b{at}").any()
        assert at % 3 or content(f"{at}").eq(7).all()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.sampled_from("abc")), max_size=20))
def test_owners_know_the_last_tenant_of_every_byte(given_):
    owners, last = MemoryOwners(60), [None] * 60
    for start, length, tenant in given_:
        owners.give(start, start + length, tenant)
        last[start : start + length] = [tenant] * length
        ranges = list(owners.ranges(0, 60))
        assert [had for start, stop, had in ranges for _ in range(start, stop)] == last
        others = {at for start, stop in owners.others(0, 60, "a") for at in range(start, stop)}
        assert others == {at for at, had in enumerate(last) if had not in (None, "a")}


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 1)), min_size=1), st.integers(0, 200))
def test_groups_keep_the_order_and_the_first_ones_are_smaller(blocks, group_bytes):
    copies = [(Copy(str(at), 0, nbytes), at) for at, (nbytes, _) in enumerate(blocks)]
    made = list(groups(copies, {str(at): route for at, (_, route) in enumerate(blocks)}, group_bytes))
    assert [copy for group in made for copy in group.copies] == [copy for copy, _ in copies]
    asked = chain((group_bytes // 8, group_bytes // 4, group_bytes // 2), repeat(group_bytes))
    for (group, following), least in zip(pairwise(made), asked, strict=False):
        sizes = [copy.nbytes for copy in group.copies]
        assert sum(sizes[:-1]) < max(least, 1)
        assert sum(sizes) >= least or following.route != group.route
    for group in made:
        assert group.first_use == int(group.copies[0].address)


def test_the_elbow_is_where_larger_transfers_have_hardly_more_throughput():
    assert elbow({size: 1e-3 + size / 1e6 for size in (1000, 10_000, 100_000, 1_000_000)}) == 100_000


def test_a_device_without_its_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(WorkerError, match="device cuda:0: PyTorch .* was built without CUDA"):
        CudaDevice("cuda:0", PartitionedAllocator(1 << 20, 1 << 20))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(WorkerError, match="device cuda:0 would be GPU 0, and PyTorch finds 0"):
        CudaDevice("cuda:0", PartitionedAllocator(1 << 20, 1 << 20))


def test_transfers_are_measured_with_the_given_clock(device):
    times = iter(range(100))
    device.hold("f", "ada", {"1": 100})
    source = HostBlocks({"1": torch.ones(100, dtype=torch.uint8)})
    assert transfer_times(device, Route(source, fast()), "1", [10, 20], lambda: next(times), rounds=2) == {10: 1, 20: 1}
