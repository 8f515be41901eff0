"""A program that no device can hold is cut into slices, and a function that no device could ever run is refused."""

from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from overwinter.api.deployer import package
from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import ConflictError, NoSpaceError
from overwinter.core.function import Settings
from overwinter.core.ids import DeviceId
from overwinter.core.profile import LayerPoint, Point, Profile
from overwinter.device.partitioned import PARTITION_BYTES
from overwinter.model.export import export
from overwinter.node import device_fit
from overwinter.node.device_fit import slices_for

MIB = 1 << 20


class Table(torch.nn.Module):
    """A block larger than a partition, and one that fills most of another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros((PARTITION_BYTES + 8 * MIB) // 4 // 64, 64), requires_grad=False)
        self.rest = torch.nn.Parameter(torch.zeros(30 * MIB // 4 // 64, 64), requires_grad=False)

    def forward(self, x):
        return {"y": torch.nn.functional.embedding(x, self.table) + torch.nn.functional.embedding(x, self.rest)}


@pytest.fixture(scope="module")
def packed():
    made = export(Table(), {"x": torch.zeros(2, 4096, dtype=torch.int64)})
    settings = Settings(device="pool")
    return SimpleNamespace(
        manifest=package("table", made.program, made.weights, settings=settings).manifest, program=made.program
    )


def devices(*mib: int, **settings: int) -> list[DeviceConfig]:
    return [
        DeviceConfig(name=DeviceId(f"virtual:{at}"), memory_bytes=size * MIB, **settings) for at, size in enumerate(mib)
    ]


def test_blocks_must_fit_into_the_partitions_and_not_only_into_the_bytes_of_a_device(packed):
    assert slices_for(packed.manifest, packed.program, devices(32, 96)) == []
    # 70 MiB are fewer than 80, but only two partitions fit there.
    first, second = slices_for(packed.manifest, packed.program, devices(32, 80))
    assert [sum(each.sizes.values()) for each in (first, second)] == [40 * MIB, 30 * MIB]


@pytest.mark.parametrize(
    ("bound", "named"),
    [("SLOTS_MAX", r"'table' .* arguments"), ("VALUES_MAX", "'table'"), ("BLOCKS_MAX", "'table'|one call")],
)
def test_a_program_with_too_many_slots_values_or_blocks_is_not_cut(packed, monkeypatch, bound, named):
    monkeypatch.setattr(device_fit, bound, 0)
    with pytest.raises(NoSpaceError, match=named):
        slices_for(packed.manifest, packed.program, devices(32, 80))


def test_the_weights_of_one_call_are_not_cut(packed):
    with pytest.raises(NoSpaceError, match="41943040 bytes .* call of 'table' .*aten.embedding.*--device-memory"):
        slices_for(packed.manifest, packed.program, devices(32, 32))


def test_a_slice_needs_memory_for_what_it_computes(packed):
    with pytest.raises(NoSpaceError, match="'table' in 2 blocks.*--device-activations"):
        slices_for(packed.manifest, packed.program, devices(32, 80, activation_bytes=MIB))


class Layers(torch.nn.Module):
    """Layers of 4 MiB each, with a small bias."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return {"y": x}


def test_slices_are_few_balanced_and_complete():
    made = export(Layers(9), {"x": torch.zeros(2, 1024)})
    manifest = package("layers", made.program, made.weights, settings=Settings(device="pool")).manifest
    all_blocks = {block.address: block.nbytes for block in manifest.blocks}
    for mib, count in ((64, 0), (32, 2), (16, 3), (8, 9)):
        slices = slices_for(manifest, made.program, devices(mib))
        assert len(slices) == count
        if not slices:
            continue
        assert [each.calls[0] for each in slices[1:]] == [each.calls[1] for each in slices[:-1]]
        assert (slices[0].calls[0], slices[-1].calls[1]) == (0, len(made.program.calls))
        large = [sum(nbytes > MIB for nbytes in each.sizes.values()) for each in slices]
        assert max(large) - min(large) <= 1
        assert sum(large) == 9
        assert set().union(*(each.sizes for each in slices)) == all_blocks.keys()
        assert all(sum(each.sizes.values()) <= mib * MIB for each in slices)
        names = {spec.name for spec in made.program.inputs}
        for each in slices:
            assert {spec.name for spec in each.inputs} <= names
            names |= {spec.name for spec in each.outputs}


def test_slices_have_their_parts_of_the_profile():
    made = export(Layers(9), {"x": torch.zeros(2, 1024)})
    manifest = package("layers", made.program, made.weights, settings=Settings(device="pool")).manifest
    slices = slices_for(manifest, made.program, devices(16))
    blank = Profile(weight_bytes=9 << 20, macs=1 << 30, points=(Point(1, MIB, 1, 1, 0.09), Point(1, MIB, 2, 1, 0.18)))

    def shares(whole: Profile) -> list[float]:
        parts = [each.profile(whole) for each in slices]
        for at, point in enumerate(whole.points):
            assert sum(part.points[at].latency_s for part in parts) == pytest.approx(point.latency_s)
        return [part.points[0].latency_s / 0.09 for part in parts]

    calls = len(made.program.calls)
    assert shares(blank) == pytest.approx([(stop - start) / calls for start, stop in (each.calls for each in slices)])
    assert len(made.program.layers) > len(slices)
    timed = tuple(
        LayerPoint(path=each.path, macs=each.macs, weight_bytes=0, output_bytes=0, latency_s={1: float(not at)})
        for at, each in enumerate(made.program.layers)
    )
    # The first layer takes all the time.
    assert shares(structs.replace(blank, layers=timed)) == pytest.approx([1, 0, 0])
    never = tuple(structs.replace(each, latency_s={}) for each in timed)
    assert shares(structs.replace(blank, layers=never)) == shares(blank)


def test_a_function_whose_smallest_request_needs_too_much_memory_is_refused(packed):
    with pytest.raises(NoSpaceError, match="smallest request to 'table'.*--device-activations"):
        slices_for(packed.manifest, packed.program, devices(96, activation_bytes=MIB))


def test_a_function_is_refused_on_a_node_without_devices(packed):
    with pytest.raises(ConflictError, match="no devices for 'table'.*--devices"):
        slices_for(packed.manifest, packed.program, [])
