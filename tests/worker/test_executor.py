"""An executor answers as plain PyTorch does, wherever blocks lie on its device."""

import os
import time
from contextlib import ExitStack, closing
from functools import partial
from typing import ClassVar

import pytest
import torch
from msgspec import structs

from overwinter.api.deployer import package
from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import ActivationsError
from overwinter.core.function import Settings
from overwinter.device import function as device_function
from overwinter.device.cuda import RegisteredBlocks, _enough_memory
from overwinter.device.interface import UnusableDeviceError
from overwinter.device.link import Link
from overwinter.device.null import NullDevice, NullProgram
from overwinter.device.partitioned import PartitionedAllocator
from overwinter.device.swap import SwapSettings
from overwinter.device.virtual import VirtualDevice
from overwinter.model.compile import compile_program, compile_waiting
from overwinter.model.export import export
from overwinter.node.device_fit import slices_for
from overwinter.node.functions import DeployedFunction
from overwinter.store.manifest import Deployment
from overwinter.worker import swapped
from overwinter.worker.buffer import SharedBuffer, Slot, offsets
from overwinter.worker.channel import Channel, close_all, pair
from overwinter.worker.executor import Executor
from overwinter.worker.executor_messages import Evict, HandOver, Learn, ToExecutor, WarmUp
from overwinter.worker.inbox import Inbox
from overwinter.worker.messages import FromWorker, RunBatch, Stop, Unbind, WarmedUp
from overwinter.worker.own_device import OwnDevice
from overwinter.worker.peers import Peers
from overwinter.worker.values import EncodedTensor, read

KIB = 1 << 10
PARTITION_BYTES = 64 * KIB


class Headed(torch.nn.Module):
    """A trunk in a block of 8 KiB and a head in one of 140 KiB."""

    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk
        self.head = torch.nn.Linear(64, 560, bias=False)

    def forward(self, x):
        return {"y": self.head(self.trunk(x).relu())}


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def hand_over(channel, name, model, known, damaged=False, run_s=None):
    """Send a function to an executor, which has the known blocks. `damaged`: its program has changed in memory."""
    features = next(model.parameters()).shape[1]
    made = export(model, {"x": torch.zeros(2, features)}, {"x": {0: "batch"}})
    packaged = package(name, made.program, made.weights)
    function = DeployedFunction(Deployment(name, 1, packaged.manifest, 0.0))
    program, *blocks = function.files(bare=True)
    lacking = tuple(number for number, address in enumerate(blocks) if address not in known)
    known.update(blocks)
    content = bytearray(packaged.contents[program]())
    content[0] ^= damaged
    files = [packaged.contents[blocks[each]]() for each in lacking]
    fds = [memory_file(each) for each in (content, *files)]
    bind = structs.replace(function.bind_message(bare=True), handed=lacking)
    channel.send(HandOver("ada", function.load_message(bare=True), bind, {}, run_s or {}), fds)
    close_all(fds)


def memory_file(content):
    fd = os.memfd_create("blob")
    os.write(fd, content)
    return fd


def ends(stack):
    """Return the node's channel to an executor, the executor's end, and a slot."""
    ours, theirs = map(stack.enter_context, pair())
    slot = Slot(*(stack.enter_context(closing(SharedBuffer.make(name))) for name in ("inputs", "outputs")))
    return Channel(ours, FromWorker), theirs, slot


def write(slot, *tensors):
    """Write the inputs of requests into a slot."""
    metas = [tensor.meta for tensor in tensors]
    for tensor, at in zip(tensors, offsets(metas), strict=False):
        tensor.write(slot.inputs.map, at)


@pytest.fixture
def compiled(monkeypatch):
    """Return the form of each compilation for a device."""
    found = []

    def noted(compile_, *args, **more):
        found.append(compile_.__name__)
        return compile_(*args, **more)

    for compile_ in (compile_program, compile_waiting):
        monkeypatch.setattr(device_function, compile_.__name__, partial(noted, compile_))
    return found


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_warm_up_compiles_both_forms_unless_a_message_interrupts_it(stack, compiled, monkeypatch, interrupted):
    channel, theirs, slot = ends(stack)
    allocator = PartitionedAllocator(8 * PARTITION_BYTES, PARTITION_BYTES)
    device = stack.enter_context(closing(VirtualDevice("a", allocator)))
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(DeviceConfig(name="a", memory_bytes=1 << 20))
    model = Headed(torch.nn.Linear(32, 64, bias=False)).eval()
    x = torch.randn(1, 32)
    sent = EncodedTensor("x", x)
    write(slot, sent)
    if not interrupted:
        # All messages are sent before the warm-up begins, and would interrupt it.
        monkeypatch.setattr(Inbox, "has_message", lambda inbox: False)
    hand_over(channel, "first", model, set())
    channel.send(WarmUp("first@1"))
    channel.send(RunBatch(1, ("first@1",), 0, ((sent.meta,),)))
    channel.send(Stop())
    own = OwnDevice(device, "virtual", 1 << 20, link, SwapSettings(PARTITION_BYTES), peers)
    Executor(Channel(theirs, ToExecutor), slot, own).work()
    _, warmed_up, answer = [channel.receive()[0] for _ in range(3)]
    assert warmed_up == WarmedUp(interrupted)
    # The first run has blocks to wait for.
    assert compiled == (["compile_waiting"] if interrupted else ["compile_waiting", "compile_program"])
    [meta] = answer.outcomes[0].metas
    with torch.inference_mode():
        torch.testing.assert_close(read(slot.outputs, meta, 0), model(x)["y"])


class Moving(VirtualDevice):
    """A device that counts the blocks that it moves."""

    moved = 0

    def _move(self, moves):
        self.moved += len(moves)
        super()._move(moves)


def test_blocks_that_move_for_a_sibling_are_read_where_they_are(stack):
    channel, theirs, slot = ends(stack)
    allocator = PartitionedAllocator(8 * PARTITION_BYTES, PARTITION_BYTES)
    device = stack.enter_context(closing(Moving("a", allocator)))
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(DeviceConfig(name="a", memory_bytes=1 << 20))
    # The eviction of the filler leaves no three adjacent free partitions for the second head: the trunk must move.
    device.hold("filler", "ada", {"f" * 64: 2 * PARTITION_BYTES})
    trunk, known = torch.nn.Linear(32, 64, bias=False), set()
    models = {name: Headed(trunk).eval() for name in ("first", "second")}
    for name, model in models.items():
        hand_over(channel, name, model, known)
    x = torch.randn(1, 32)
    sent = EncodedTensor("x", x)
    requests = ((sent.meta,),) * 2
    write(slot, sent, sent)
    channel.send(RunBatch(1, ("first@1",), 0, requests[:1]))
    channel.send(Evict(("filler",)))
    channel.send(RunBatch(2, ("first@1", "second@1"), 0, requests))
    channel.send(Stop())
    own = OwnDevice(device, "virtual", 1 << 20, link, SwapSettings(PARTITION_BYTES), peers)
    Executor(Channel(theirs, ToExecutor), slot, own).work()
    assert device.moved
    *_, answer = [channel.receive()[0] for _ in range(3)]
    metas = [outcome.metas[0] for outcome in answer.outcomes]
    for model, meta, at in zip(models.values(), metas, offsets(metas), strict=False):
        with torch.inference_mode():
            torch.testing.assert_close(read(slot.outputs, meta, at), model(x)["y"])


class Stuck(VirtualDevice):
    """A device that cannot move blocks."""

    def _move(self, moves):
        raise RuntimeError("no memory to move blocks")


def test_an_executor_ends_if_blocks_may_lie_where_the_device_does_not_look_for_them(stack):
    channel, theirs, slot = ends(stack)
    device = stack.enter_context(closing(Stuck("a", PartitionedAllocator(8 * PARTITION_BYTES, PARTITION_BYTES))))
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(DeviceConfig(name="a", memory_bytes=1 << 20))
    device.hold("filler", "ada", {"f" * 64: 2 * PARTITION_BYTES})
    trunk, known = torch.nn.Linear(32, 64, bias=False), set()
    for name in ("first", "second"):
        hand_over(channel, name, Headed(trunk).eval(), known)
    sent = EncodedTensor("x", torch.randn(1, 32))
    write(slot, sent)
    channel.send(RunBatch(1, ("first@1",), 0, ((sent.meta,),)))
    channel.send(Evict(("filler",)))
    for number, function in ((2, "second@1"), (3, "first@1")):
        channel.send(RunBatch(number, (function,), 0, ((sent.meta,),)))
    channel.send(Stop())
    own = OwnDevice(device, "virtual", 1 << 20, link, SwapSettings(PARTITION_BYTES), peers)
    with pytest.raises(UnusableDeviceError, match="could not be moved"):
        Executor(Channel(theirs, ToExecutor), slot, own).work()
    left, _ = Channel(theirs, ToExecutor).receive()
    assert left.run == 3


class Tied(torch.nn.Module):
    """The decoder has the transposed weight of the encoder: both lie at one position. Functions differ in the head."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = torch.nn.Linear(96, 96, bias=False)
        self.decoder.weight = torch.nn.Parameter(encoder.weight.t())
        self.head = torch.nn.Linear(96, 112, bias=False)

    def forward(self, x):
        return {"y": self.head(self.decoder(self.encoder(x).relu()).relu())}


def test_siblings_whose_decoder_is_the_transposed_encoder_get_correct_answers_in_one_batch(stack):
    channel, theirs, slot = ends(stack)
    allocator = PartitionedAllocator(16 * PARTITION_BYTES, PARTITION_BYTES)
    device = stack.enter_context(closing(VirtualDevice("a", allocator)))
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(DeviceConfig(name="a", memory_bytes=1 << 20))
    encoder, known = torch.nn.Linear(96, 96, bias=False), set()
    models = {name: Tied(encoder).eval() for name in ("first", "second")}
    for name, model in models.items():
        hand_over(channel, name, model, known)
    x = torch.randn(1, 96)
    sent = EncodedTensor("x", x)
    write(slot, sent, sent)
    channel.send(RunBatch(1, ("first@1", "second@1"), 0, ((sent.meta,),) * 2))
    channel.send(Stop())
    own = OwnDevice(device, "virtual", 1 << 20, link, SwapSettings(PARTITION_BYTES), peers)
    Executor(Channel(theirs, ToExecutor), slot, own).work()
    _, answer = [channel.receive()[0] for _ in range(2)]
    metas = [outcome.metas[0] for outcome in answer.outcomes]
    for model, meta, at in zip(models.values(), metas, offsets(metas), strict=False):
        with torch.inference_mode():
            torch.testing.assert_close(read(slot.outputs, meta, at), model(x)["y"])


class Breaking(VirtualDevice):
    """A device whose first run fails and makes it unusable."""

    def run(self, program, weights, *arguments):
        raise RuntimeError("an illegal address")

    def fault(self):
        return "an illegal address"


def test_an_executor_ends_with_the_answer_of_the_run_that_made_its_device_unusable(stack):
    channel, theirs, slot = ends(stack)
    device = stack.enter_context(closing(Breaking("a", PartitionedAllocator(8 * PARTITION_BYTES, PARTITION_BYTES))))
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(DeviceConfig(name="a", memory_bytes=1 << 20))
    sent = EncodedTensor("x", torch.randn(1, 32))
    write(slot, sent)
    hand_over(channel, "first", Headed(torch.nn.Linear(32, 64, bias=False)).eval(), set())
    for number in (1, 2):
        channel.send(RunBatch(number, ("first@1",), 0, ((sent.meta,),)))
    own = OwnDevice(device, "cuda", 1 << 20, link, SwapSettings(PARTITION_BYTES), peers)
    Executor(Channel(theirs, ToExecutor), slot, own).work()
    _, answer = [channel.receive()[0] for _ in range(2)]
    assert (answer.run, answer.fault) == (1, "an illegal address")
    [failure] = answer.outcomes
    assert failure.error == "WorkerError"
    assert "first@1" in failure.message
    [left, _] = Channel(theirs, ToExecutor).receive()
    assert left.run == 2


class Reordered(torch.nn.Module):
    """Computes with the rows in the opposite order, over two weights of a MiB."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(512, 512, bias=False).requires_grad_(False) for _ in range(2))

    def forward(self, x):
        return {"y": self.second(self.first(x.flip(0)).relu()).flip(0)}


def test_requests_of_a_slice_keep_their_own_rows_whatever_order_the_program_gives_them(stack):
    channel, theirs, slot = ends(stack)
    device = stack.enter_context(closing(VirtualDevice("a", PartitionedAllocator(8 << 20, 1 << 20))))
    config = DeviceConfig(name="a", memory_bytes=1 << 20, activation_bytes=1 << 20)
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(config)
    model = Reordered()
    made = export(model, {"x": torch.zeros(2, 512)}, {"x": {0: "batch"}})
    packaged = package("f", made.program, made.weights, settings=Settings(device="pool"))
    function = DeployedFunction(Deployment("f", 1, packaged.manifest, 0.0))
    function.cut(slices_for(packaged.manifest, made.program, [config]))
    [second] = function.later_slices
    for each in (function, second):
        fds = [memory_file(packaged.contents[address]()) for address in each.files(bare=True)]
        bind = each.bind_message(bare=True)
        sizes = tuple(each.slice.sizes[block] for block, _ in bind.blocks)
        channel.send(HandOver("ada", each.load_message(bare=True), bind, {}, {}, sizes), fds)
        close_all(fds)
    rows = [torch.randn(1, 512) for _ in range(2)]
    sent = [EncodedTensor("x", row) for row in rows]
    write(slot, *sent)
    own = OwnDevice(device, "virtual", 1 << 20, link, SwapSettings(1 << 20), peers)
    executor = Executor(Channel(theirs, ToExecutor), slot, own)
    channel.send(RunBatch(1, (function.id,) * 2, 0, tuple((each.meta,) for each in sent)))
    for _ in range(3):
        executor._handle()
    answer, _ = channel.receive()
    metas = [outcome.metas[0] for outcome in answer.outcomes]
    between = [read(slot.outputs, meta, at).clone() for meta, at in zip(metas, offsets(metas), strict=False)]
    for row, value, meta in zip(rows, between, metas, strict=True):
        write(slot, EncodedTensor(meta.name, value))
        channel.send(RunBatch(2, (second.id,), 0, ((meta,),)))
        executor._handle()
        answer, _ = channel.receive()
        torch.testing.assert_close(read(slot.outputs, answer.outcomes[0].metas[0], 0), model(row)["y"])


class Rectified(Headed):
    """The same weights, and another program."""

    def forward(self, x):
        return {"y": super().forward(x)["y"].relu()}


def test_the_blocks_of_a_function_that_cannot_run_serve_the_next_function(stack):
    channel, theirs, slot = ends(stack)
    allocator = PartitionedAllocator(8 * PARTITION_BYTES, PARTITION_BYTES)
    device = stack.enter_context(closing(VirtualDevice("a", allocator)))
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(DeviceConfig(name="a", memory_bytes=1 << 20))
    model, other = (kind(torch.nn.Linear(32, 64, bias=False)).eval() for kind in (Headed, Rectified))
    other.load_state_dict(model.state_dict())
    known = set()
    x = torch.randn(1, 32)
    sent = EncodedTensor("x", x)
    write(slot, sent)
    hand_over(channel, "bad", other, known, damaged=True)
    hand_over(channel, "good", model, known)
    channel.send(RunBatch(1, ("good@1",), 0, ((sent.meta,),)))
    channel.send(Unbind("good@1"))
    channel.send(Unbind("bad@1"))
    channel.send(Stop())
    own = OwnDevice(device, "virtual", 1 << 20, link, SwapSettings(PARTITION_BYTES), peers)
    executor = Executor(Channel(theirs, ToExecutor), slot, own)
    executor.work()
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if "/memfd:blob" in line]
    _, failed, answer = [channel.receive()[0] for _ in range(3)]
    assert (failed.function, failed.error) == ("bad@1", "StoreError")
    with torch.inference_mode():
        torch.testing.assert_close(read(slot.outputs, answer.outcomes[0].metas[0], 0), model(x)["y"])


class Untimed(NullProgram):
    """A program whose runs only record how long they would take."""

    taken: ClassVar[list[float]] = []

    def __init__(self, program, run_s):
        super().__init__(program, run_s, lambda: 0.0, lambda seconds: None)

    def _run(self, weights, inputs, wait=None):
        self.taken.append(self._seconds(inputs))
        return super()._run(weights, inputs, wait)


def test_runs_of_a_null_device_take_the_times_that_it_learned_last(stack, monkeypatch):
    channel, theirs, slot = ends(stack)
    allocator = PartitionedAllocator(8 * PARTITION_BYTES, PARTITION_BYTES)
    device = stack.enter_context(closing(NullDevice("a", allocator)))
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(DeviceConfig(name="a", memory_bytes=1 << 20))
    monkeypatch.setattr(swapped, "NullProgram", Untimed)
    model, known = Headed(torch.nn.Linear(32, 64, bias=False)).eval(), set()
    sent = EncodedTensor("x", torch.randn(1, 32))
    write(slot, sent)
    hand_over(channel, "first", model, known, run_s={1: 1.0})
    channel.send(RunBatch(1, ("first@1",), 0, ((sent.meta,),)))
    channel.send(Learn("first@1", {}, {1: 2.0}))
    channel.send(RunBatch(2, ("first@1",), 0, ((sent.meta,),)))
    # The second function shares the program.
    hand_over(channel, "second", model, known, run_s={1: 3.0})
    channel.send(RunBatch(3, ("second@1",), 0, ((sent.meta,),)))
    channel.send(Stop())
    own = OwnDevice(device, "null", 1 << 20, link, SwapSettings(PARTITION_BYTES), peers)
    Executor(Channel(theirs, ToExecutor), slot, own).work()
    assert Untimed.taken == [1.0, 2.0, 3.0]


class Registering(VirtualDevice):
    """A device whose blocks are registered like those of a GPU."""

    def __init__(self, name, allocator):
        super().__init__(name, allocator)
        self.registered = []

    def host(self, blocks):
        return RegisteredBlocks(blocks, self.registered.append)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_warm_up_for_a_gpu_registers_block_by_block_until_a_message_interrupts_it(stack, monkeypatch, interrupted):
    channel, theirs, slot = ends(stack)
    allocator = PartitionedAllocator(8 * PARTITION_BYTES, PARTITION_BYTES)
    device = stack.enter_context(closing(Registering("a", allocator)))
    link, peers = Link(1e12, time.perf_counter, time.sleep), Peers(DeviceConfig(name="a", memory_bytes=1 << 20))
    monkeypatch.setattr(Inbox, "has_message", lambda inbox: interrupted and len(device.registered) == 1)
    hand_over(channel, "first", Headed(torch.nn.Linear(32, 64, bias=False)).eval(), set())
    channel.send(WarmUp("first@1"))
    channel.send(Stop())
    own = OwnDevice(device, "cuda", 1 << 20, link, SwapSettings(PARTITION_BYTES), peers)
    Executor(Channel(theirs, ToExecutor), slot, own).work()
    assert [channel.receive()[0] for _ in range(2)][1] == WarmedUp(interrupted)
    assert len(device.registered) == (1 if interrupted else 2)


def test_an_out_of_memory_error_of_a_gpu_becomes_an_activations_error():
    with pytest.raises(ActivationsError, match=r"cuda:0.*--device-activations"), _enough_memory("cuda:0"):
        raise torch.OutOfMemoryError("CUDA out of memory")
