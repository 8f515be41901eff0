"""The description of a function tells its tenant nothing about the blocks of other tenants."""

from types import SimpleNamespace

import pytest

from overwinter.core.function import FunctionSpec
from overwinter.node.views import TenantBlocks
from overwinter.scheduler.published import Published
from overwinter.store.residency import missing_bytes
from tests.scheduler.world import World, spec

BLOCK = ("x", 1 << 20)


def missing(world: World, function: FunctionSpec) -> int:
    """Return what the description of a function gives as its missing bytes."""
    resident = {(name, address) for name, store in world.state.stores.items() for address in store.sizes}
    hosts = SimpleNamespace(store=lambda name: SimpleNamespace(holds=lambda address: (name, address) in resident))
    manifest = SimpleNamespace(tenant=function.tenant, blobs=lambda: function.blobs)
    deployed = SimpleNamespace(store=function.store, manifest=manifest)
    return missing_bytes(function.blobs, TenantBlocks(deployed, Published(world.scheduler.cycle), hosts))


@pytest.mark.parametrize("bob_has_it", [False, True])
def test_a_block_in_a_dedicated_store_does_not_reveal_whether_the_shared_store_has_it(bob_has_it):
    world = World()
    shared = spec("f", blobs=[BLOCK], tenant="ada")
    dedicated = spec("g", blobs=[BLOCK], tenant="ada", dedicated=True)
    bobs = spec("h", blobs=[BLOCK], tenant="bob")
    for function in (shared, dedicated, bobs):
        world.deploy(function)
    for name in ("g", *(["h"] if bob_has_it else [])):
        world.arrive(name)
        world.settle_processes()
    assert missing(world, dedicated) == 0
    assert missing(world, shared) == 1 << 20
    assert missing(world, bobs) == (0 if bob_has_it else 1 << 20)
