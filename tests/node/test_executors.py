"""Real executors: they answer as workers do, move only what is missing, and fail without harm to others."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import zoo
from overwinter.api.deployer import package
from overwinter.core.actions import PrepareOnDevice, RunOnDevice, StartExecutor, StopWorker, Unbind
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import PreparedOnDevice, RunEnded, WorkerExited, WorkerReady
from overwinter.core.function import Settings
from overwinter.core.ids import DeviceId, OperationId, RequestId, RunId, WorkerId
from overwinter.core.profile import Point, Profile
from overwinter.model.closeness import BOUNDS, is_near
from overwinter.model.export import export
from overwinter.node import executor_process, executors
from overwinter.node.device_fit import slices_for
from overwinter.node.functions import DeployedFunction
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Deployment, weight_positions
from tests.store.source import Source

from .rig import Function, Rig, until

LARGE, SMALL, NULL = DeviceId("virtual:0"), DeviceId("virtual:1"), DeviceId("null:0")
DEVICES = (
    DeviceConfig(name=LARGE, memory_bytes=64 << 20, group_bytes=64 << 10),
    DeviceConfig(name=SMALL, memory_bytes=1 << 20, activation_bytes=1 << 20),
    DeviceConfig(name=NULL, kind="null", memory_bytes=64 << 30, bytes_per_s=1e12),
)


sees_maps = pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what a contained process has mapped")


class Variant(Function):
    """A variant of a model of the zoo, with another last parameter."""

    def __init__(self, name: str, variant: int) -> None:
        model = zoo.build(name, small=True)
        head = next(reversed(list(model.module.parameters())))
        with torch.no_grad():
            head.mul_(1 + variant)
        made = export(model.module, model.example_inputs, model.dynamic)
        settings = Settings(device="pool")
        packed = package(f"{name}-{variant}", made.program, made.weights, settings=settings)
        self.deployed = DeployedFunction(Deployment(packed.manifest.name, 1, packed.manifest, 0.0))
        self.files = {address: bytes(content()) for address, content in packed.contents.items()}
        self.inputs = dict(model.example_inputs)

    @property
    def block_bytes(self) -> dict[str, int]:
        """The bytes of each block that the executor copies: up to the end of its last weight."""
        program_weights = [piece for block in self.deployed.manifest.blocks for piece in block.pieces]
        sizes = {piece.weight: piece.nbytes for piece in program_weights}
        found: dict[str, int] = {}
        for weight, (address, offset) in enumerate(weight_positions(self.deployed.manifest.blocks)):
            found[address] = max(found.get(address, 0), offset + sizes[weight])
        return found


variant = cache(Variant)


class Lookup(torch.nn.Module):
    """Fails for numbers that are not in its table."""

    def __init__(self, numbers: int = 20_000) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(float(numbers)).view(-1, 1), requires_grad=False)

    def forward(self, x):
        return {"y": torch.nn.functional.embedding(x, self.table)}


class Scaled(torch.nn.Module):
    """Computes as many bytes as it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((1 << 16,), 3.0), requires_grad=False)

    def forward(self, x):
        return {"y": x * self.factor}


class Chain(torch.nn.Module):
    """Has two weights of a MiB; the second one holds `number` everywhere."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(512, 512), requires_grad=False)
        self.second = torch.nn.Parameter(torch.full((512, 512), number), requires_grad=False)

    def forward(self, x):
        return {"y": x @ self.first @ self.second}


class Pool:
    """A rig with devices, and a host store with everything deployed."""

    def __init__(self, rig: Rig, devices: Sequence[DeviceConfig], root) -> None:
        self.rig, self.devices, self.root = rig, devices, root
        self.contents: dict[str, bytes] = {}
        self.hosts = HostStores(root, Source(self.contents))
        self.effects = rig.run(self._effects())

    async def _effects(self):
        return self.rig.effects_over(self.hosts, asyncio.TaskGroup(), self.devices)

    def deploy(self, *functions: Function) -> None:
        for function in functions:
            self.contents.update(function.files)
            self.hosts.store("").load(function.deployed.blobs)
        self.rig.registry.add(*(function.deployed for function in functions))

    async def start(self, device: DeviceId = LARGE, tenant: str | None = None) -> WorkerId:
        executor = WorkerId(self.rig.number())
        self.effects.carry_out(StartExecutor(executor, device, tenant))
        await until(lambda: WorkerReady(executor) in self.rig.events or self.rig.exits(executor))
        assert not self.rig.exits(executor), self.rig.exits(executor)
        return executor

    async def run(
        self,
        executor: WorkerId,
        function: Function,
        *requests,
        evict: tuple[Function, ...] = (),
        peer: DeviceId | None = None,
    ) -> RunEnded:
        """Run requests as one batch, by default the function's example."""
        run = RunId(self.rig.number())
        ids = [RequestId(self.rig.number()) for _ in requests or (0,)]
        for id_, inputs in zip(ids, requests or (function.inputs,), strict=True):
            self.rig._ask(id_, inputs)
        evicted = tuple(each.deployed.id for each in evict)
        device = self.effects.executors._executors[executor].device
        id_ = function.deployed.id
        self.effects.carry_out(RunOnDevice(executor, device, run, id_, tuple(ids), evict=evicted, peer=peer))
        await until(lambda: run in self.rig.ends())
        [ended] = [event for event in self.rig.events if isinstance(event, RunEnded) and event.run == run]
        assert ended.worker == executor
        self.last = ids
        return ended

    async def run_together(
        self, executor: WorkerId, *functions: Function, inputs: dict, evict: tuple[Function, ...] = ()
    ) -> RunEnded:
        """Run one request of each of these functions of a family in one run."""
        run = RunId(self.rig.number())
        ids = [RequestId(self.rig.number()) for _ in functions]
        for id_ in ids:
            self.rig._ask(id_, inputs)
        whose, evicted = (tuple(each.deployed.id for each in group) for group in (functions, evict))
        device = self.effects.executors._executors[executor].device
        order = RunOnDevice(executor, device, run, whose[0], tuple(ids), evict=evicted, functions=whose)
        self.effects.carry_out(order)
        await until(lambda: run in self.rig.ends())
        [ended] = [event for event in self.rig.events if isinstance(event, RunEnded) and event.run == run]
        self.last = ids
        return ended

    async def bring(self, executor: WorkerId, function: Function) -> RunEnded:
        """Bring the blocks of a function without a request."""
        run, device = RunId(self.rig.number()), self.effects.executors._executors[executor].device
        self.effects.carry_out(RunOnDevice(executor, device, run, function.deployed.id, ()))
        await until(lambda: run in self.rig.ends())
        return next(each for each in self.rig.events if isinstance(each, RunEnded) and each.run == run)

    def order(self, executor: WorkerId, function: Function) -> OperationId:
        """Order a preparation."""
        operation, device = OperationId(self.rig.number()), self.effects.executors._executors[executor].device
        self.effects.carry_out(PrepareOnDevice(executor, device, function.deployed.id, operation))
        return operation

    def prepared(self, operation: OperationId) -> list[PreparedOnDevice]:
        return [each for each in self.rig.events if isinstance(each, PreparedOnDevice) and each.operation == operation]

    async def prepare(self, executor: WorkerId, function: Function) -> PreparedOnDevice:
        """Prepare a function, and wait for the end."""
        operation = self.order(executor, function)
        await until(lambda: self.prepared(operation))
        return self.prepared(operation)[0]

    def answers(self) -> list[list[tuple[str, tuple[int, ...], bytes]]]:
        """Return the outputs of the last run, request by request."""
        payloads = self.rig.calls.payloads
        return [[(t.name, t.shape, bytes(t.data)) for t in payloads[id_].outputs] for id_ in self.last]

    def unbind(self, executor: WorkerId, function: Function) -> None:
        self.effects.carry_out(Unbind(executor, function.deployed.id))

    async def stop(self, executor: WorkerId, kill: bool = False) -> WorkerExited:
        self.effects.carry_out(StopWorker(executor, kill))
        await until(lambda: self.rig.exits(executor))
        [event] = self.rig.exits(executor)
        return event

    def mapped(self, executor: WorkerId) -> int:
        """Return how many blocks an executor has mapped."""
        with open(f"/proc/{self.effects.executors._executors[executor].pid}/maps") as maps:
            return len({line.split()[-1] for line in maps if str(self.root) in line})


@contextmanager
def pool_of(rig, devices, root):
    """Yield a pool of these devices; at the end, kill its executors."""
    pool = Pool(rig, devices, root)

    async def clear():
        for executor in list(pool.effects.executors._executors):
            await pool.stop(executor, kill=True)

    try:
        yield pool
    finally:
        rig.run(clear())
        pool.hosts.close()


@pytest.fixture
def pool(rig, tmp_path):
    with pool_of(rig, DEVICES, tmp_path) as made:
        yield made


@pytest.mark.parametrize("name", ["resnet50", "minilm", "gpt2", "mobilenet-v2"])
def test_an_executor_answers_as_a_worker_does(rig, pool, name):
    function = variant(name, 0)
    one = {key: value[:1] for key, value in function.inputs.items()}
    pool.deploy(function)

    async def scene():
        worker = await rig.start_worker(function)
        single = rig.begin(worker, **one)
        await rig.ended(single)
        pool.last = [RequestId(single)]
        wanted = pool.answers()
        whole = rig.begin(worker, **function.inputs)
        await rig.ended(whole)
        pool.last = [RequestId(whole)]
        wanted_whole = pool.answers()
        executor = await pool.start()
        ended = await pool.run(executor, function, one)
        assert ended == RunEnded(executor, ended.run, (), sum(function.block_bytes.values()))
        assert pool.answers() == wanted
        ended = await pool.run(executor, function)
        assert ended == RunEnded(executor, ended.run)
        assert pool.answers() == wanted_whole
        ended = await pool.run(executor, function, one, one)
        assert ended.failures == ()
        assert all(map(near, pool.answers(), wanted * 2, [BOUNDS["float32"]] * 2))
        assert len(pool.answers()) == 2

    rig.run(scene())


def test_a_variant_moves_only_blocks_that_are_missing_and_eviction_moves_none(rig, pool):
    first, second = variant("minilm", 0), variant("minilm", 1)
    other = variant("resnet50", 0)
    pool.deploy(first, second, other)
    delta = {address: nbytes for address, nbytes in second.block_bytes.items() if address not in first.block_bytes}
    assert 0 < len(delta) < len(second.block_bytes)

    async def scene():
        executor = await pool.start()
        assert (await pool.run(executor, first)).moved_bytes == sum(first.block_bytes.values())
        wanted = pool.answers()
        assert (await pool.run(executor, second)).moved_bytes == sum(delta.values())
        assert pool.answers() != wanted
        assert (await pool.run(executor, other, evict=(first,))).moved_bytes == sum(other.block_bytes.values())
        own = {address: nbytes for address, nbytes in first.block_bytes.items() if address not in second.block_bytes}
        assert (await pool.run(executor, first)).moved_bytes == sum(own.values())
        assert pool.answers() == wanted
        ended = await pool.run(executor, first, evict=(first, second, other))
        assert ended.moved_bytes == sum(first.block_bytes.values())
        assert pool.answers() == wanted

    rig.run(scene())


def near(answer, right, bound) -> bool:
    """Whether the outputs of two requests are equal within the bound."""
    return len(answer) == len(right) and all(
        (name, shape) == (other, same)
        and is_near(*(torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (wanted, data)), bound)
        for (name, shape, data), (other, same, wanted) in zip(answer, right, strict=True)
    )


def test_functions_share_a_run_and_get_their_own_answers(rig, pool):
    first, second = variant("minilm", 0), variant("minilm", 1)
    pool.deploy(first, second)
    one = {key: value[:1] for key, value in first.inputs.items()}
    union = sum({**first.block_bytes, **second.block_bytes}.values())

    async def scene():
        executor, alone = await pool.start(), []
        for function in (first, second):
            await pool.run(executor, function, one)
            alone += pool.answers()
        assert not near(*alone, BOUNDS["float32"])
        whole = await pool.run_together(executor, first, second, inputs=one, evict=(first, second))
        assert whole == RunEnded(executor, whole.run, (), union)
        assert all(map(near, pool.answers(), alone, [BOUNDS["float32"]] * 2))
        again = await pool.run_together(executor, second, first, inputs=one)
        assert again == RunEnded(executor, again.run)
        assert all(map(near, pool.answers(), reversed(alone), [BOUNDS["float32"]] * 2))
        await pool.run(executor, second, one)
        assert pool.answers() == alone[1:]

    rig.run(scene())


def test_a_function_that_is_removed_during_a_shared_run_harms_no_other(rig, pool):
    one = {"x": torch.ones(2, 512)}
    leader, mate = (Function(Chain(float(number)), one, name=f"chain{number}") for number in (2, 3))
    for each in (leader, mate):
        slices = slices_for(each.deployed.manifest, each.program, [DEVICES[1]])
        assert len(slices) == 2
        each.deployed.cut(slices)
    pool.deploy(leader, mate)

    async def remove():
        rig.registry.remove(leader.deployed.id)

    async def scene():
        executor = await pool.start()
        for each in (leader, mate):
            await pool.run(executor, each, one)
        alone = rig.calls.payloads[pool.last[0]]
        await asyncio.gather(pool.run_together(executor, leader, mate, inputs=one), remove())
        # What later slices take is kept, and nothing is an answer yet.
        kept = rig.calls.payloads[pool.last[1]]
        assert (kept.outputs, [each.meta for each in kept.inputs]) == ([], [each.meta for each in alone.inputs])

    rig.run(scene())


def test_functions_that_do_not_fit_on_a_device_together_are_both_removed_from_it(rig, pool):
    first, second = (Function(Lookup(150_000 + more), {"x": torch.tensor([3, 4])}, name=f"t{more}") for more in (0, 1))
    pool.deploy(first, second)
    one = first.inputs = second.inputs = {"x": torch.tensor([3, 4])}

    async def scene():
        executor = await pool.start(SMALL)
        await pool.run(executor, first)
        ended = await pool.run_together(executor, first, second, inputs=one)
        assert (ended.unplaced, ended.failures) == (True, ())
        ended = await pool.run(executor, second)
        assert (ended.unplaced, ended.moved_bytes) == (False, 150_001 * 4)

    rig.run(scene())


@sees_maps
def test_a_function_that_is_unbound_is_not_mapped_and_not_on_the_device(rig, pool):
    first, second = variant("minilm", 0), variant("minilm", 1)
    pool.deploy(first, second)

    async def scene():
        executor = await pool.start()
        pool.unbind(executor, first)
        await pool.run(executor, first)
        assert pool.mapped(executor) == len(first.block_bytes)
        await pool.run(executor, second)
        assert pool.mapped(executor) == len(first.block_bytes | second.block_bytes)
        pool.unbind(executor, first)
        pool.unbind(executor, second)
        assert (await pool.run(executor, second)).moved_bytes == sum(second.block_bytes.values())
        assert pool.mapped(executor) == len(second.block_bytes)

    rig.run(scene())


def test_the_first_request_moves_nothing_where_the_blocks_were_brought_before(rig, pool):
    function = variant("minilm", 0)
    large = Function(Lookup(300_000), {"x": torch.zeros(2, dtype=torch.int64)}, name="l")
    pool.deploy(function, large)

    async def scene():
        first = await pool.start()
        assert (await pool.run(first, function)).moved_bytes == sum(function.block_bytes.values())
        wanted = pool.answers()
        second = await pool.start(SMALL)
        brought = await pool.bring(second, function)
        assert brought == RunEnded(second, brought.run, (), sum(function.block_bytes.values()))
        ended = await pool.run(second, function)
        assert ended == RunEnded(second, ended.run)
        assert pool.answers() == wanted
        assert (await pool.bring(second, large)).unplaced

    rig.run(scene())


@pytest.mark.parametrize("name", ["resnet50", "minilm"])
def test_a_prepared_function_answers_as_others_do(rig, pool, name):
    function = variant(name, 0)
    pool.deploy(function)

    async def scene():
        executor = await pool.start()
        await pool.run(executor, function)
        wanted = pool.answers()
        await pool.stop(executor)
        executor = await pool.start()
        assert not (await pool.prepare(executor, function)).interrupted
        # Preparing brings nothing to the device.
        assert (await pool.run(executor, function)).moved_bytes == sum(function.block_bytes.values())
        assert pool.answers() == wanted

    rig.run(scene())


def test_a_run_that_is_ordered_during_a_preparation_follows_it(rig, pool):
    first, second = variant("minilm", 0), variant("resnet50", 0)
    pool.deploy(first, second)

    async def scene():
        executor = await pool.start()
        await pool.run(executor, first)
        wanted = pool.answers()
        operation = pool.order(executor, second)
        await pool.run(executor, first)
        assert pool.answers() == wanted
        assert len(pool.prepared(operation)) == 1
        operation = pool.order(executor, second)
        assert (await pool.run(executor, second)).failures == ()
        assert len(pool.prepared(operation)) == 1

    rig.run(scene())


@sees_maps
def test_a_prepared_function_that_is_unbound_is_not_mapped(rig, pool):
    function = variant("minilm", 0)
    pool.deploy(function)

    async def scene():
        executor = await pool.start()
        await pool.prepare(executor, function)
        assert pool.mapped(executor) == len(function.block_bytes)
        operation = pool.order(executor, function)
        pool.unbind(executor, function)
        await until(lambda: pool.prepared(operation))
        await until(lambda: pool.mapped(executor) == 0)
        assert (await pool.run(executor, function)).failures == ()

    rig.run(scene())


@sees_maps
def test_few_blocks_stay_mapped_and_more_on_the_device(rig, pool, monkeypatch):
    first, second = variant("minilm", 0), variant("resnet50", 0)
    monkeypatch.setattr(executors, "MAPPED_MAX", len(first.block_bytes) + 1)
    pool.deploy(first, second)

    async def scene():
        executor = await pool.start()
        await pool.run(executor, first)
        await pool.run(executor, second)
        assert pool.mapped(executor) == len(second.block_bytes)
        assert (await pool.run(executor, first)).moved_bytes == 0
        pool.unbind(executor, second)
        assert (await pool.run(executor, second)).moved_bytes == sum(second.block_bytes.values())

    rig.run(scene())


def test_what_does_not_fit_is_reported_and_runs_after_an_eviction(rig, pool):
    numbers = torch.zeros(2, dtype=torch.int64)
    first, second = (Function(Lookup(150_000 + more), {"x": numbers}, name=f"f{more}") for more in (0, 1))
    first.inputs = second.inputs = {"x": torch.tensor([3, 4])}
    pool.deploy(first, second)

    async def scene():
        executor = await pool.start(SMALL)
        assert (await pool.run(executor, first)).moved_bytes == 600_000
        ended = await pool.run(executor, second)
        assert ended == RunEnded(executor, ended.run, unplaced=True)
        assert (await pool.run(executor, first)).moved_bytes == 0
        ended = await pool.run(executor, second, evict=(first,))
        assert ended == RunEnded(executor, ended.run, (), 600_004)
        assert pool.rig.output(RunId(pool.last[0])).tolist() == [[3.0], [4.0]]
        assert (await pool.run(executor, first)).unplaced

    rig.run(scene())


def test_a_run_that_computes_more_than_the_device_holds_is_divided_or_refused(rig, pool):
    function = Function(Scaled(), {"x": torch.zeros(2, 1 << 16)})
    pool.deploy(function)
    one, two = {"x": torch.ones(1, 1 << 16)}, {"x": torch.ones(2, 1 << 16)}

    async def scene():
        executor = await pool.start(SMALL)
        # Each alone fits, and both together do not.
        assert (await pool.run(executor, function, one, one)).failures == ()
        assert all(bytes(each[0][2]) == torch.full((1, 1 << 16), 3.0).numpy().tobytes() for each in pool.answers())
        [failure] = (await pool.run(executor, function, two)).failures
        assert failure.error == "ActivationsError"
        assert "f@1 needs 1572864 bytes" in failure.message
        assert "virtual:1 has 1048576" in failure.message
        assert "--device-activations" in failure.message
        large = await pool.start(LARGE)
        assert (await pool.run(large, function, two)).failures == ()

    rig.run(scene())


def test_the_outputs_of_a_run_are_bounded_and_requests_beyond_fail(rig, pool, monkeypatch):
    monkeypatch.setattr(executor_process, "OUTPUTS_BYTES", 2 << 18)
    function = Function(Scaled(), {"x": torch.zeros(2, 1 << 16)})
    pool.deploy(function)
    one = {"x": torch.ones(1, 1 << 16)}

    async def scene():
        executor = await pool.start()
        ended = await pool.run(executor, function, one, one, one, one)
        assert [failure.request for failure in ended.failures] == pool.last[2:]
        assert all("max_batch" in failure.message for failure in ended.failures)
        process = pool.effects.executors._executors[executor]
        assert os.fstat(process.slots[0].outputs.fd).st_size == 2 << 18
        assert (await pool.run(executor, function, one, one)).failures == ()

    rig.run(scene())


def test_the_error_of_an_operator_reaches_its_request(rig, pool):
    function = Function(Lookup(), {"x": torch.zeros(2, dtype=torch.int64)})
    pool.deploy(function)
    good, bad = {"x": torch.tensor([5])}, {"x": torch.tensor([20000])}

    async def scene():
        executor = await pool.start()
        ended = await pool.run(executor, function, good, bad)
        assert ended.moved_bytes == 80000
        [failure] = ended.failures
        assert failure.request == pool.last[1]
        assert failure.error == "CallerError"
        assert "f@1 cannot run inputs" in failure.message
        wrong = {"x": torch.tensor([0.5])}
        [failure] = (await pool.run(executor, function, wrong)).failures
        assert failure.error == "CallerError"
        assert (await pool.run(executor, function, good)).failures == ()
        assert pool.rig.output(RunId(pool.last[0])).tolist() == [[5.0]]

    rig.run(scene())


def test_lost_blocks_are_reported_by_the_end_of_the_executor(rig, pool):
    function = variant("resnet50", 0)
    pool.deploy(function)

    async def scene():
        executor = await pool.start()
        pool.hosts.store("").drop([function.deployed.manifest.blocks[0].address])
        order = RunOnDevice(executor, LARGE, RunId(rig.number()), function.deployed.id, ())
        pool.effects.carry_out(order)
        await until(lambda: rig.exits(executor))
        [end] = rig.exits(executor)
        assert end.lost_blocks
        assert end.error == "StoreError"

    rig.run(scene())


def test_a_program_that_changed_in_memory_fails_its_runs_only(rig, pool):
    function, other = variant("resnet50", 0), variant("minilm", 0)
    pool.deploy(function, other)
    address = function.deployed.manifest.program.address
    path = pool.root / address
    content = path.read_bytes()

    async def scene():
        executor = await pool.start()
        path.unlink()
        path.write_bytes(bytes(len(content)))
        assert not (await pool.prepare(executor, function)).interrupted
        ended = await pool.run(executor, function)
        assert [failure.error for failure in ended.failures] == ["WorkerError"]
        assert (await pool.run(executor, other)).failures == ()
        path.write_bytes(content)
        assert (await pool.run(executor, function)).failures == ()

    rig.run(scene())


def test_a_null_device_needs_a_profile_reports_transfers_and_computes_nothing(rig, pool):
    function = variant("resnet50", 0)
    pool.deploy(function)
    nbytes = sum(function.block_bytes.values())

    async def scene():
        executor = await pool.start(NULL)
        [failure] = (await pool.run(executor, function)).failures
        assert (failure.error, "profile" in failure.message) == ("ProgramError", True)
        function.deployed.profile = Profile(weight_bytes=nbytes, macs=1, points=(Point(1, 0, 1, 1, 0.01),))
        try:
            ended = await pool.run(executor, function)
        finally:
            function.deployed.profile = None
        assert (ended.failures, ended.moved_bytes) == ((), nbytes)
        given = pool.answers()
        assert (await pool.run(executor, function)).moved_bytes == 0
        assert pool.answers() == given
        other = await pool.start()
        await pool.run(other, function)
        computed = pool.answers()
        assert shapes(given) == shapes(computed)
        assert given != computed

    rig.run(scene())


def shapes(answers) -> list[list[tuple]]:
    """Return the names and shapes of the outputs of each request."""
    return [[(name, shape) for name, shape, _ in answer] for answer in answers]


def test_an_executor_that_is_killed_is_reported_and_can_be_replaced(rig, pool):
    function = variant("minilm", 0)
    pool.deploy(function)

    async def scene():
        executor = await pool.start(tenant="default")
        await pool.run(executor, function)
        wanted = pool.answers()
        os.kill(pool.effects.executors._executors[executor].pid, signal.SIGKILL)
        await until(lambda: rig.exits(executor))
        [end] = rig.exits(executor)
        assert end.error == "WorkerError"
        assert "signal 9" in end.reason
        assert [line for line in pool.effects.executors._log if "virtual:0 has ended" in line and "signal 9" in line]
        again = await pool.start(tenant="default")
        assert (await pool.run(again, function)).moved_bytes == sum(function.block_bytes.values())
        assert pool.answers() == wanted
        assert (await pool.stop(again)).reason == "its process exited with status 0"
        assert not [line for line in pool.effects.executors._log if "status 0" in line]

    rig.run(scene())


def test_an_executor_is_contained_as_a_worker_is(rig, pool):
    async def scene():
        executor = await pool.start()
        pid = pool.effects.executors._executors[executor].pid
        status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
        state = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
        assert state["Name"] == "ow-executor"
        assert state["Seccomp"] == "2"
        assert state["NoNewPrivs"] == "1"
        assert int(state["CapEff"], 16) == 0
        assert os.geteuid() != 0 or int(state["Uid"].split()[0]) >= 0x70000000
        if os.geteuid() == 0:
            files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            assert not [file for file in files if file.startswith("/dev/") and file != "/dev/null"]
        assert executor not in rig.processes.worker_pids()

    rig.run(scene())


def test_the_reason_names_the_memory_that_the_system_refuses(rig, pool):
    name = DeviceId("huge")
    pool.effects.executors._devices[name] = DeviceConfig(name=name, memory_bytes=1 << 45)

    async def scene():
        executor = WorkerId(rig.number())
        pool.effects.carry_out(StartExecutor(executor, name))
        await until(lambda: rig.exits(executor))
        [end] = rig.exits(executor)
        assert "35184372088832 bytes of device huge could not be reserved" in end.reason

    rig.run(scene())


def test_a_damaged_block_ends_the_executor_that_copied_it_even_if_it_no_longer_maps_it(rig, pool, monkeypatch):
    function, other = variant("minilm", 0), variant("resnet50", 0)
    monkeypatch.setattr(executors, "MAPPED_MAX", 1)
    pool.deploy(function, other)

    async def scene():
        executor = await pool.start()
        await pool.run(executor, function)
        await pool.run(executor, other)
        assert pool.effects.kill_block_readers("", "0" * 64) == []
        assert len(pool.effects.kill_block_readers("", next(iter(function.block_bytes)))) == 1
        await until(lambda: rig.exits(executor))
        assert rig.exits(executor)[0].lost_blocks

    rig.run(scene())
