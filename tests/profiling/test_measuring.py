"""Configurations measured in real workers: their limits and results, and that nothing of them remains."""

import os
from pathlib import Path

import msgspec
import pytest
import torch

from overwinter.core.errors import WorkerError
from overwinter.core.ids import WorkerId
from overwinter.core.profile import Configuration
from overwinter.core.tensor import RUN_TENSORS_MAX, TensorSpec
from overwinter.model.program import decode_program
from overwinter.node import clock
from overwinter.node.functions import DeployedFunction
from overwinter.profiling.measuring import DisturbedError, MeasuredWorker, batch_limit
from tests.node.rig import Function, Rig, until

MIB = 1 << 20


class Grows(torch.nn.Module):
    """A weight of 16 MiB, and `copies` temporary results of 1 MiB per row."""

    def __init__(self, copies: int):
        super().__init__()
        self.copies = copies
        self.weight = torch.nn.Parameter(torch.ones(4 << 20), requires_grad=False)

    def forward(self, x):
        wide = [x.repeat(1, (MIB // 16)) + float(number) for number in range(self.copies)]
        return {"y": torch.stack(wide).sum(dim=(0, 2)) + self.weight[:1]}


class Doubles(torch.nn.Module):
    """A model without weights."""

    def forward(self, x):
        return {"y": x + x}


class Long(torch.nn.Module):
    """A model that computes for seconds on a thousand rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1024, 1024), requires_grad=False)

    def forward(self, x):
        wide = x * self.weight[0]
        for _ in range(150):
            wide = torch.cos(wide @ self.weight)
        return {"y": wide}


def measured(rig: Rig, function: Function, configuration: Configuration) -> MeasuredWorker:
    program = decode_program(function.files[function.deployed.manifest.program.address])
    worker = WorkerId(-rig.number())
    return MeasuredWorker(rig.processes, worker, function.deployed, program, configuration, clock.now)


def never() -> bool:
    return False


def test_each_configuration_runs_in_a_separate_process_on_its_number_of_cores(rig):
    function = Function(Grows(1), {"x": torch.zeros(2, 4)})

    async def measure(configuration):
        worker = measured(rig, function, configuration)
        ready_s = await worker.start(function.open())
        pid = worker.pid
        allowed = len(os.sched_getaffinity(pid))
        took = await worker.waves(0.0, never)
        more = await worker.waves(0.05, never)
        await worker.end()
        assert rig.processes.process(worker.worker) is None
        return pid, allowed, took, more, ready_s

    cores = len(os.sched_getaffinity(0))
    descriptors = len(os.listdir("/proc/self/fd"))
    configurations = [Configuration(1, 1, 1), Configuration(1, 4, 1), Configuration(cores, 2, 3)]
    found = [rig.run(measure(each)) for each in configurations]
    assert len({pid for pid, *_ in found}) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid, *_ in found)
    assert [allowed for _, allowed, *_ in found] == [1, 1, cores]
    assert [len(took) for _, _, took, *_ in found] == [1, 1, 3]
    assert all(len(more) % each.concurrency == 0 for (*_, more, _), each in zip(found, configurations, strict=True))
    assert all(seconds > 0 for *_, took, more, ready_s in found for seconds in [*took, *more, ready_s])
    # Buffers are closed in a thread.
    rig.run(until(lambda: len(os.listdir("/proc/self/fd")) == descriptors))
    assert rig.events == []


def test_private_memory_is_the_peak_without_the_weights(rig):
    async def measure(copies, batch):
        function = Function(Grows(copies), {"x": torch.zeros(2, 4)})
        worker = measured(rig, function, Configuration(1, batch, 1))
        await worker.start(function.open())
        await worker.waves(0.0, never)
        nbytes = await worker.private_bytes()
        await worker.end()
        return nbytes

    one = rig.run(measure(1, 1))
    more, batched = rig.run(measure(40, 1)), rig.run(measure(40, 2))
    # It varies by some MiB, depending on where the heap of its zygote ended.
    assert 0 < one < 32 * MIB
    # The results and their concatenation; both are freed before the measurement.
    assert more - one > 60 * MIB
    assert batched - more > 60 * MIB


def test_layers_are_reported_one_by_one(rig):
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    function = Function(model, {"input": torch.zeros(2, 4)})

    async def measure():
        worker = measured(rig, function, Configuration(1, 2, 1))
        await worker.start(function.open())
        layers = await worker.layers(2, never)
        await worker.end()
        return layers

    layers = rig.run(measure())
    assert len(layers) == 3
    assert sum(layers) > 0


def test_a_run_beyond_the_memory_of_its_function_is_an_error_and_leaves_no_worker(rig):
    function = Function(Grows(40), {"x": torch.zeros(2, 4)}, memory_mib=256)

    async def measure():
        worker = measured(rig, function, Configuration(1, 4, 1))
        try:
            await worker.start(function.open())
            await worker.waves(0.0, never)
        finally:
            await worker.end()

    with pytest.raises(WorkerError, match="f@1 cannot be measured"):
        rig.run(measure())
    assert rig.processes.worker_pids() == {}


def test_a_long_run_is_given_up_when_a_request_comes(rig):
    function = Function(Long(), {"x": torch.zeros(2, 1)})

    async def measure():
        worker = measured(rig, function, Configuration(1, 1024, 1))
        await worker.start(function.open())
        with pytest.raises(DisturbedError):
            await worker.waves(0.0, lambda: True)
        return worker.worker

    assert rig.processes.process(rig.run(measure())) is None


def test_programs_whose_requests_cannot_be_joined_have_no_batches():
    joined = Function(Grows(1), {"x": torch.zeros(2, 4)})
    program = decode_program(joined.files[joined.deployed.manifest.program.address])
    assert batch_limit(program) == program.dimensions["batch"][1]
    unlimited = msgspec.structs.replace(program, dimensions={"batch": (1, 1 << 40)})
    assert batch_limit(unlimited) == RUN_TENSORS_MAX // 2, "an input and an output"
    [output] = program.outputs
    apart = msgspec.structs.replace(program, outputs=(TensorSpec(output.name, output.datatype, (3,)),))
    assert batch_limit(apart) == 1


def test_inputs_beyond_the_memory_of_a_function_are_not_measured(rig):
    function = Function(Doubles(), {"x": torch.zeros(2, MIB)}, memory_mib=256)

    async def measure(batch):
        # A request has 4 MiB.
        worker = measured(rig, function, Configuration(1, batch, 2))
        await worker.start(function.open())
        try:
            await worker.waves(0.0, never)
        finally:
            await worker.end()

    with pytest.raises(WorkerError, match="memory of f@1"):
        rig.run(measure(33))
    assert rig.processes.worker_pids() == {}


def test_inputs_that_no_buffer_can_hold_are_not_measured(rig, monkeypatch):
    monkeypatch.setattr(DeployedFunction, "memory_bytes", 1 << 62)
    function = Function(Grows(1), {"x": torch.zeros(2, 4)})

    async def measure():
        worker = measured(rig, function, Configuration(1, 1, 1))
        [meta] = worker._metas
        worker._metas = (msgspec.structs.replace(meta, nbytes=1 << 61),)
        await worker.start(function.open())
        try:
            with pytest.raises(WorkerError, match=f"cannot be made to hold {1 << 61} bytes"):
                await worker.waves(0.0, never)
        finally:
            await worker.end()

    rig.run(measure())
