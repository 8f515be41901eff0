"""A function is refused at its deploy if no device of the node could ever run it, and by the rules of the device."""

from types import SimpleNamespace

import pytest
import torch

from overwinter.api.deployer import package
from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import ConflictError, NoSpaceError
from overwinter.core.function import Settings
from overwinter.core.ids import DeviceId
from overwinter.device.partitioned import PARTITION_BYTES
from overwinter.model.export import export
from overwinter.node.device_fit import check_devices_fit

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


def test_the_blocks_need_places_and_not_only_bytes(packed):
    check_devices_fit(packed.manifest, packed.program, devices(32, 96))
    # 70 MiB are fewer than 80, but only two partitions fit there.
    with pytest.raises(NoSpaceError, match="'table' in 2 blocks.*--device-memory"):
        check_devices_fit(packed.manifest, packed.program, devices(32, 80))


def test_the_smallest_request_needs_memory(packed):
    with pytest.raises(NoSpaceError, match="smallest request to 'table'.*--device-activations"):
        check_devices_fit(packed.manifest, packed.program, devices(96, activation_bytes=MIB))


def test_a_node_without_devices_is_named(packed):
    with pytest.raises(ConflictError, match="no devices for 'table'.*--devices"):
        check_devices_fit(packed.manifest, packed.program, [])
