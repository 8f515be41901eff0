"""Invariants of the pool's tables that hold after every event, for tests and checked simulations."""

from collections import Counter
from collections.abc import Mapping

from overwinter.core.ids import Address, FunctionId
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.device_admission import could_begin
from overwinter.scheduler.held_blocks import HeldBlocks
from overwinter.scheduler.ledger import Claim, Owner
from overwinter.scheduler.pool import Device, pool_record
from overwinter.scheduler.resources import device_owner, run_owner
from overwinter.scheduler.swaps import owner_of


def check(cycle: Cycle) -> None:
    """Raise AssertionError if the tables of the pool contradict each other, or a function waits without a reason."""
    pool, state = cycle.state.pool, cycle.state
    executors = {each.executor.id: each for each in pool.devices.values() if each.executor is not None}
    assert executors == pool.executors, "the table of executors is wrong"
    assert not executors.keys() & (state.workers.keys() | state.ahead.keys()), "an executor is also a worker"
    for device in pool.devices.values():
        _check_executor(cycle, device)
        _check_residents(cycle, device)
    operations = [each.operation for each in pool.devices.values() if each.operation is not None]
    running = Counter(function.spec.id for operation in operations for function in operation.functions)
    first = {each.spec.id for each in pool.waiting.first()}
    for id_, function in state.functions.items():
        if function.pool is not None:
            assert function.pool.running >= 0
            assert function.removed or function.pool.running <= running[id_], f"the runs of {id_} are wrong"
            assert not function.workers, f"{id_} is a function of the pool, and has a worker"
        if function.waits_in == "devices":
            assert function.pool is not None
            at = cycle.timers.at("devices")
            # A step with many actions (`Cycle.is_long`) leaves the rest to the next one, for which the timer is due
            # now. Of the functions behind each tenant's first ones, a step tries only some.
            if at is None or (id_ in first and at > cycle.now):
                assert not could_begin(cycle, function), f"{id_} waits although a device that serves its owner is free"
    for device in pool.devices.values() if pool.waiting else ():
        at = cycle.timers.at("devices")
        in_backoff = device.executor is None and device.backoff_until > cycle.now
        assert not in_backoff or (at is not None and at <= device.backoff_until), "a device in backoff has no timer"


def claims(cycle: Cycle) -> dict[Owner, Claim]:
    """Return the claims of the devices that the ledger should have."""
    found: dict[Owner, Claim] = {}
    for name, device in cycle.state.pool.devices.items():
        found[device_owner(name)] = {cycle.resources.device_bytes[name]: device.blocks.nbytes}
        if device.executor is not None and device.executor.run is not None:
            found[run_owner(device.executor.run)] = {cycle.resources.device_time[name]: 1}
    return found


def _check_executor(cycle: Cycle, device: Device) -> None:
    executor, name = device.executor, device.config.name
    if executor is None:
        assert not device.residents, f"functions are resident on {name}, which has no executor"
        return
    assert (executor.run is None) == (executor.operation is None)
    needs_timer = not executor.stopping and (executor.operation is not None or executor.ready_at is None)
    at = cycle.timers.at(executor.id)
    assert not needs_timer or at is not None, f"the executor of {name} has no timer"
    assert device.residents.keys() <= executor.handed_over.keys(), (
        f"a function on {name} was not handed over to its executor"
    )
    for id_ in executor.handed_over:
        function = cycle.state.functions.get(id_)
        is_held = function is not None and function.loaded
        assert is_held or id_ in device.residents, f"the executor of {name} has {id_}, which is not in the host store"
    if executor.preparing is not None:
        assert executor.stopping or at is not None, f"the executor of {name} prepares without a timer"
    if executor.operation is not None:
        assert executor.ready_at is not None
        for function in executor.operation.functions:
            assert function.spec.id in device.residents, f"{function.spec.id} runs on {name} without its blocks"


def _check_residents(cycle: Cycle, device: Device) -> None:
    name, wanted = device.config.name, Counter[Address]()
    for pooled, nbytes in device.missing.items():
        assert nbytes == device.blocks.missing(pooled.sizes), f"the missing bytes on {name} are out of date"
    for id_, resident in device.residents.items():
        function = resident.function
        wanted.update(resident.sizes.keys())
        assert device.executor is not None
        assert device.executor.owner == owner_of(cycle, function), f"{id_} is on {name}, which serves another owner"
        if resident.draining:
            assert device.operation is not None
            assert function in device.operation.functions, f"{id_} should have left {name}"
        else:
            assert function.loaded, f"{id_} is on {name} but not in the host store"
            assert cycle.state.functions[id_] is function, f"{id_} is on {name} but removed"
            assert pool_record(function).fixed_device in (None, name), f"{id_} is on {name} but bound to another device"
    assert +device.blocks.holders == wanted, f"the number of holders of a block on {name} is wrong"
    check_exclusive(device.blocks, {id_: resident.sizes for id_, resident in device.residents.items()})
    assert set(device.blocks.sizes) == set(wanted), f"a block on {name} has no holder"
    assert device.blocks.nbytes == sum(device.blocks.sizes.values()) <= device.config.memory_bytes, (
        f"{device.blocks.nbytes} bytes are recorded on {name}"
    )


def waiting(cycle: Cycle) -> dict[FunctionId, list[str]]:
    """Return the functions that wait for a device, each with the name of this queue."""
    return {each.spec.id: ["devices"] for each in cycle.state.pool.waiting}


def check_exclusive(blocks: HeldBlocks, functions: Mapping[FunctionId, Mapping[Address, int]]) -> None:
    """Raise AssertionError unless the exclusive bytes and the number of references of these functions are right.
    Together they hold all blocks.
    """
    for id_, sizes in functions.items():
        exclusive = sum(nbytes for address, nbytes in sizes.items() if blocks.holders[address] == 1)
        assert blocks.exclusive(id_) == exclusive, f"the exclusive bytes of {id_} are wrong"
    assert blocks.references == sum(map(len, functions.values())), "the references to blocks are counted wrongly"
