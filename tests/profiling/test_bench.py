"""A measurement starts its worker with verified blocks."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from overwinter.core.errors import StoreError
from overwinter.profiling.bench import Bench
from overwinter.profiling.quiet import Quiet
from overwinter.store.blocks import address_of
from overwinter.store.host import HostStore
from overwinter.store.manifest import Blob
from tests.store.source import Source

DATA = os.urandom(10_000)
BLOB = Blob(address_of(DATA), len(DATA))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_blocks_that_an_earlier_run_of_the_node_left_are_verified_first(tmp_path, is_damaged):
    source = Source({BLOB.address: DATA})
    HostStore(tmp_path, source).load([BLOB])
    path = tmp_path / BLOB.address
    if is_damaged:
        path.chmod(0o600)
        path.write_bytes(bytes(len(DATA)))
    host = HostStore(tmp_path, source)
    host.sweep([BLOB])
    assert host.unverified() == [BLOB.address]
    got: list[bytes] = []

    async def start(descriptors: list[int]) -> float:
        for descriptor in descriptors:
            got.append(os.pread(descriptor, len(DATA), 0))
            os.close(descriptor)
        return 0.25

    async def started() -> float | None:
        quiet = Quiet(SimpleNamespace(arrivals=0, arrived_at=None), lambda: False, 1.0, lambda: 0.0)
        bench = Bench(None, SimpleNamespace(store=lambda name: host), quiet, lambda: 0.0)
        function = SimpleNamespace(store="", files=lambda bare: [BLOB.address])
        return await bench._start(SimpleNamespace(start=start), function)

    if is_damaged:
        with pytest.raises(StoreError, match=BLOB.address):
            asyncio.run(started())
        assert got == []
    else:
        assert asyncio.run(started()) == 0.25
        assert got == [DATA]
    assert host.unverified() == []
