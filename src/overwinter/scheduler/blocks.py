"""Loads a function's blocks into its host store, and releases them."""

from collections.abc import Iterable

from overwinter.core.actions import Drop, Evict, LoadBlocks
from overwinter.core.ids import Address, OperationId, Seconds, StoreName
from overwinter.scheduler import fixed_devices, residency
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.held_blocks import HeldBlocks
from overwinter.scheduler.resources import store_owner
from overwinter.scheduler.state import Function


def missing_bytes(cycle: Cycle, function: Function) -> int:
    """Return the bytes of the function's blocks that its host store neither has nor is loading."""
    if function.loaded or function.loading is not None:
        return 0
    held = cycle.state.stores.get(function.spec.store)
    return sum(function.sizes.values()) if held is None else held.missing(function.sizes)


def begin_load(cycle: Cycle, function: Function) -> None:
    """Load the missing blocks."""
    function.loading = OperationId(next(cycle.load_ids))
    hold(cycle, function)
    cycle.actions.append(LoadBlocks(function.spec.id, function.loading))


def hold(cycle: Cycle, function: Function) -> None:
    """Record that the function's blocks are, or will be, in its host store."""
    cycle.state.held_blocks(function).hold(function.spec.id, function.sizes)
    if function.spec.settings.pinned:
        pinned = cycle.state.pinned.setdefault(function.spec.store, HeldBlocks())
        pinned.hold(function.spec.id, function.sizes)
    cycle.state.tenant(function.spec.tenant).hold(function.spec.store, function.sizes.keys())
    _count(cycle, function.spec.store)


def end_load(function: Function, now: Seconds) -> None:
    """Record that all blocks of the function are loaded."""
    function.loaded, function.loading, function.load_again = True, None, False
    function.blocks_usable_from = now if function.workers else None


def release(cycle: Cycle, function: Function) -> None:
    """Stop keeping the function's blocks, and drop those that no other function holds."""
    if function.loaded or function.loading is not None:
        function.loaded, function.loading = False, None
        cycle.state.held_blocks(function).release(function.spec.id, function.sizes)
        if function.spec.settings.pinned:
            pinned = cycle.state.pinned[function.spec.store]
            pinned.release(function.spec.id, function.sizes)
            pinned.remove_unused(set(function.sizes))
        cycle.state.tenant(function.spec.tenant).release(function.spec.store, function.sizes.keys())
    if function.pool is not None:
        residency.forget(cycle, function)
        fixed_devices.release(cycle, function)
    cycle.state.evictable.pop(function.spec.id, None)
    drop_unused(cycle, function.sizes, function.spec.store)


def is_lost_again(function: Function) -> bool:
    """Whether blocks that are missing now, before they are released, are missing twice in a row. It is no second time
    if the blocks are released already: several processes may miss the same block.
    """
    return function.lost_blocks and function.loaded


def lose(cycle: Cycle, function: Function) -> bool:
    """Release the function's blocks because a worker missed some, so that all are loaded again. Return whether they
    were missing twice in a row.
    """
    twice, function.lost_blocks = is_lost_again(function), True
    if function.loaded:
        release(cycle, function)
    return twice


def evict_blocks_of(cycle: Cycle, function: Function, why: str) -> None:
    """Release the function's blocks for the reason given: from now on its owner is not billed for them."""
    cycle.actions.append(Evict(function.spec.id, why))
    release(cycle, function)


def drop_unused(cycle: Cycle, addresses: Iterable[Address], store: StoreName) -> None:
    """Drop those of the blocks that no function holds."""
    held = cycle.state.stores.get(store)
    free = tuple(sorted(set(addresses))) if held is None else held.remove_unused(set(addresses))
    if not free:
        return
    cycle.actions.append(Drop(free, store))
    if held is not None:
        _count(cycle, store)
        cycle.bytes_changed = True


def host_bytes(cycle: Cycle) -> int:
    """Bytes in all host stores, including those being loaded."""
    return cycle.resources.host.taken


def _count(cycle: Cycle, store: StoreName) -> None:
    """Update the ledger with the size of the store."""
    owner, nbytes = store_owner(store), cycle.state.stores[store].nbytes
    if cycle.ledger.has(owner):
        cycle.ledger.change(owner, cycle.resources.host, nbytes)
    else:
        cycle.ledger.take(owner, None, {cycle.resources.host: nbytes})
