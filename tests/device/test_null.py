"""A null device takes the time of links and profiles, moves no bytes, and returns the outputs for inputs of zeros."""

import resource

import pytest
import torch

from benchmarks import zoo
from overwinter.core.ids import Address, TenantId
from overwinter.device.function import DeviceFunction
from overwinter.device.host import HostBlocks
from overwinter.device.link import Link
from overwinter.device.null import NullDevice, NullProgram
from overwinter.device.partitioned import PartitionedAllocator
from overwinter.device.swap import Route, SwapSettings, run
from overwinter.model.export import export

LARGE_BYTES = 64 << 30
"""Far more than a test may take."""


class Clock:
    """A clock that only sleeping advances."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


def stored(run_s, clock):
    """Return a function with a profile, its inputs, and the route to its blocks."""
    model = zoo.build("mlp", small=True)
    program, weights = export(model.module, model.example_inputs, model.dynamic)
    compiled = NullProgram(program, run_s, clock, clock.sleep)
    places = [(Address(f"{number:064}"), 0) for number in range(len(weights))]
    function = DeviceFunction("f", TenantId("t"), compiled, places)
    blocks = {address: torch.ones(nbytes, dtype=torch.uint8) for address, nbytes in function.blocks.items()}
    link = Link(1e6, clock, clock.sleep)
    return function, [model.example_inputs[spec.name] for spec in program.inputs], Route(HostBlocks(blocks), link)


@pytest.fixture
def device():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = NullDevice("null:0", PartitionedAllocator(LARGE_BYTES))
    yield made
    made.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LARGE_BYTES >> 10 >> 5


@pytest.mark.parametrize("group_bytes", [1, 1 << 30])
def test_a_run_takes_at_least_the_longer_of_transfer_and_execution_and_at_most_their_sum(device, group_bytes):
    clock = Clock()
    function, inputs, route = stored({1: 0.25, 2: 0.5}, clock)
    transfer_s = function.nbytes / 1e6
    outputs, moved = run(device, function, inputs, [route], SwapSettings(group_bytes))
    assert moved == (function.nbytes,)
    longest = max(transfer_s, 0.5)
    # The clock is shared, so the sleeps of the transfer and of the run add up where they do not overlap.
    assert longest - 1e-9 <= clock.now <= transfer_s + 0.5 + 1e-9
    before = clock.now
    assert run(device, function, inputs, [route], SwapSettings(group_bytes)).moved == (0,)
    assert clock.now - before == pytest.approx(0.5)
    [output] = outputs
    assert output.shape == zoo.build("mlp", small=True).module(*inputs).shape


def test_a_run_takes_the_time_in_the_profile_for_its_number_of_requests(device):
    clock = Clock()
    function, [x], route = stored({1: 0.1, 2: 0.15, 4: 0.25}, clock)
    run(device, function, [x], [route], SwapSettings(1 << 30))
    for count, seconds in ((1, 0.1), (2, 0.15), (3, 0.2), (4, 0.25), (6, 0.35)):
        before = clock.now
        [output], _ = run(device, function, [x[:1].repeat(count, 1)], [route], SwapSettings(1 << 30))
        assert clock.now - before == pytest.approx(seconds)
        assert len(output) == count


class Widened(torch.nn.Module):
    """Returns a MiB for each row."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Parameter(torch.ones(1 << 18), requires_grad=False)

    def forward(self, x):
        return {"y": x[:, :1] * self.wide}


def test_outputs_are_kept_up_to_a_limit():
    clock = Clock()
    program, weights = export(Widened(), {"x": torch.ones(2, 4)}, {"x": {0: "batch"}})
    compiled, kept = NullProgram(program, {1: 0.1}, clock, clock.sleep), []
    for count in (1, 2, 4, 8, 1, 2, 32, 5, 64):
        [output] = compiled.run([torch.zeros_like(each) for each in weights], [torch.ones(count, 4)])
        assert (len(output), output.any()) == (count, False)
        kept.append(compiled.kept_bytes >> 20)
    # The outputs of 32 and 64 rows are too large to be kept, and those of 5 rows have no room beside the others.
    assert kept == [1, 3, 7, 15, 15, 15, 15, 5, 5]
