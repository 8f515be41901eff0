"""Decides how long idle workers and unused blocks stay.

Both are caches: nothing is evicted for idleness alone, unless a keep-alive is set (for blocks: `host_keep_alive_s`),
and evictions for other functions go by value (idle.py, victims.py). Once a family has a profile, its number of workers
follows the rate. Then the end of a keep-alive stops a worker only if no other worker of the family has a free slot;
otherwise the scaler decides.
"""

from itertools import islice
from math import inf

from overwinter.core.ids import Seconds, WorkerId
from overwinter.scheduler import families, fixed_devices, idle, residency, victims
from overwinter.scheduler.binding import UNBOUND_MAX, stop_using
from overwinter.scheduler.blocks import drop_unused, evict_blocks_of, host_bytes, missing_bytes
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operations import drain, stop
from overwinter.scheduler.policies import keepalive
from overwinter.scheduler.policy_failures import call_policy
from overwinter.scheduler.state import Binding, Family, Function, Worker

WAITING_CHECKED = 1024
"""At most this many functions in the queue for bytes are searched for one of another tenant."""
EVICTION_PAUSE_S = 0.03
"""The pause after a step that has evicted as much as one step may, for other events."""


def settle(cycle: Cycle, function: Function) -> None:
    """Update spare workers and evictable blocks after the function's wants are handled."""
    family = function.family
    families.record_waiting(cycle, function)
    if function.spec.settings.device == "any" and function.pool is None:
        _note_waiting(cycle, function)
    if family.workers:
        _settle_workers(cycle, family)
    if function.spec.id == cycle.state.releasing and not function.is_used:
        _release(cycle, function)
    if _is_unused(function):
        _settle_blocks(cycle, function)
    elif function.loaded:
        cycle.state.evictable.pop(function.spec.id, None)
    if function.pool is not None:
        fixed_devices.watch(cycle, function)


def _note_waiting(cycle: Cycle, function: Function) -> None:
    """A free device may take its waiting requests, now or later."""
    waiting = cycle.state.pool.waiting_for_workers
    if not function.queue:
        waiting.leave(function)
    elif waiting.join(function):
        cycle.devices_changed = True


def _settle_workers(cycle: Cycle, family: Family) -> None:
    for worker in family.workers.values():
        if worker.runs or not worker.is_idle:
            continue
        spare = cycle.state.tenants[worker.tenant].spare
        if worker.drain is not None:
            stop(cycle, worker)
        elif families.is_wanted(worker):
            spare.pop(worker.id, None)
            # Another worker of its tenant may be stopped now: the least valuable, or one whose time slice is over.
            cycle.capacity_changed = True
        elif worker.id not in spare:
            worker.value = idle.value(cycle, worker)
            spare[worker.id] = worker
            cycle.capacity_changed = cycle.bytes_changed = True
            at = idle_until(cycle, worker)
            if at < inf:
                cycle.timers.arm(worker.id, at)


def idle_until(cycle: Cycle, worker: Worker) -> float:
    """Return when an idle worker's keep-alive ends: the latest end of the keep-alives of its functions; inf: never."""
    policy = cycle.policy
    if policy.keep_alive == "history":
        now = float(cycle.now)
        ends = [
            call_policy(cycle.state, each.function, now, keepalive.by_history, worker, each.function, policy)
            for each in worker.bound.values()
        ]
        return max(ends, default=now)
    if worker.keep_alive_s is None:
        # Cached, because a worker may have a hundred functions, and becomes idle after each run.
        worker.keep_alive_s = keepalive.longest_s(worker, policy)
    return worker.since + worker.keep_alive_s


def release_idle(cycle: Cycle, nbytes: int) -> int:
    """First unbind functions that are bound with others and have long been unused (at most UNBOUND_MAX): a new bind is
    cheap. Then stop idle workers. End when this many bytes are freed or nothing is left; return the freed bytes.
    """
    freed, unbound = 0, dict[WorkerId, Worker]()
    for unused in idle.unused_bindings(cycle)[:UNBOUND_MAX] if nbytes > 0 else ():
        if freed < nbytes and _unbind(cycle, unused.worker, unused.binding):
            freed += unused.nbytes
            unbound[unused.worker.id] = unused.worker
    for worker in unbound.values():
        families.mark(cycle, worker.family)
    for worker in idle.in_order(cycle.state.tenants.values()) if freed < nbytes else ():
        if freed < nbytes:
            freed += worker.nbytes
            idle.evict(cycle, worker)
    return freed


def _unbind(cycle: Cycle, worker: Worker, binding: Binding) -> bool:
    """Unbind an idle function, and release its blocks if they are unused; False: it is the worker's last function."""
    if all(other.draining for other in worker.bound.values() if other is not binding):
        return False
    function = binding.function
    stop_using(cycle, worker, function, "the machine is short of memory", marks=False)
    if _is_unused(function):
        unused_s = cycle.now - function.used_at
        evict_blocks_of(cycle, function, f"the machine ran short of memory; last used {unused_s:.1f} s ago")
    return True


def outlasts_keep_alive(worker: Worker) -> bool:
    """Whether the worker stays after its keep-alive: requests wait, or another worker of its family has a free slot and
    their number follows the rate.
    """
    family = worker.family
    if families.is_wanted(worker):
        return True
    if family.check_at is None or not family.latency.points:
        return False
    return any(other is not worker and other.has_slot for other in family.workers.values())


# Blocks


def _is_unused(function: Function) -> bool:
    """Whether the function's blocks are in the host store, and nothing uses or pins them for it."""
    return (
        function.loaded
        and not function.is_used
        and not function.queue
        and not function.wants_wake
        and not function.spec.settings.pinned
    )


def _settle_blocks(cycle: Cycle, function: Function) -> None:
    id_, evictable = function.spec.id, cycle.state.evictable
    if id_ not in evictable:
        evictable[id_] = function
        cycle.bytes_changed = True
        leaves_at = keep_alive_of_blocks_ends(cycle, function)
        if leaves_at is not None:
            cycle.timers.arm(id_, leaves_at)


def keep_alive_of_blocks_ends(cycle: Cycle, function: Function) -> Seconds | None:
    """Return when the function leaves the host store for lack of use; None: `host_keep_alive_s` is not set, or its
    blocks are in use or pinned.
    """
    if cycle.config.host_keep_alive_s is None or not _is_unused(function):
        return None
    return Seconds(function.kept_since + cycle.config.host_keep_alive_s)


def end_keep_alive_of_blocks(cycle: Cycle, function: Function) -> None:
    """Evict the function's blocks if their keep-alive has ended."""
    ends = keep_alive_of_blocks_ends(cycle, function)
    if ends is not None and ends <= cycle.now:
        evict_blocks_of(cycle, function, f"it was not used for {cycle.now - function.used_at:.0f} s")


def make_space(cycle: Cycle, function: Function) -> bool:
    """Evict blocks until those that the function lacks fit in the host store; return whether that was possible in this
    step: then its load must begin at once.
    """
    short = cycle.resources.host.short(missing_bytes(cycle, function))
    return not short or evict_for(cycle, short, function)


def evict_for(cycle: Cycle, nbytes: int, function: Function) -> bool:
    """Evict blocks until this many bytes are freed for the load of a function, which must then begin at once; return
    whether that was possible in this step. Meanwhile the function holds those of its blocks that the store has: the
    eviction of another function that shares them could drop them.
    """
    if not cycle.state.evictable:
        return False
    held = cycle.state.held_blocks(function)
    present = {address: nbytes for address, nbytes in function.sizes.items() if address in held.sizes}
    held.hold(function.spec.id, present)
    has_space = evict(cycle, nbytes)
    held.release(function.spec.id, present)
    if not has_space:
        drop_unused(cycle, present, function.spec.store)
    return has_space


def evict(cycle: Cycle, nbytes: int) -> bool:
    """Evict blocks from the host stores until this many bytes are freed; return whether that was possible in this step.
    If the step has done its share of work, the queue for bytes is served again soon.
    """
    goal = host_bytes(cycle) - nbytes
    while host_bytes(cycle) > goal:
        if has_evicted_enough(cycle):
            cycle.timers.arm("bytes", Seconds(cycle.now + EVICTION_PAUSE_S))
            return False
        victim = victims.for_bytes(cycle)
        if victim is None:
            return False
        cycle.eviction_work += len(victim.sizes) + min(len(cycle.state.evictable), victims.SCANNED_MAX)
        # The reason does not say how many bytes this frees: that would reveal how many of them other functions hold,
        # perhaps of another tenant.
        evict_blocks_of(cycle, victim, f"others needed space; last used {cycle.now - victim.used_at:.1f} s ago")
    return True


def has_evicted_enough(cycle: Cycle) -> bool:
    """Whether this step has done the most eviction work that one step may. Without this limit it could evict very many
    functions to free few bytes, because functions may share blocks.
    """
    return cycle.eviction_work >= victims.EVICTION_WORK_MAX


def release_blocks(cycle: Cycle, nbytes: int) -> int:
    """Evict unused blocks until this many bytes are freed, nothing is left, or the step has done its share of work;
    return the freed bytes.
    """
    before = host_bytes(cycle)
    evict(cycle, nbytes)
    return before - host_bytes(cycle)


def drain_for_bytes(cycle: Cycle) -> None:
    """Drain a function in use, so that its bytes become free for a waiting one; if one of another tenant waits, within
    the drain timeout. Only one drains at a time.
    """
    state, why = cycle.state, "its time slice is over, and others wait for its bytes"
    function = None if state.releasing is None else state.functions[state.releasing]
    if function is None and has_evicted_enough(cycle):
        cycle.timers.arm("bytes", Seconds(cycle.now + EVICTION_PAUSE_S))
        return
    if function is None:
        function, at = victims.next_in_use(cycle)
        if function is None:
            if at < inf:
                cycle.timers.arm("bytes", at)
            return
        state.releasing = function.spec.id
        for worker in list(function.workers.values()):
            stop_using(cycle, worker, function, why)
        cycle.mark(function)
    waiting = islice(state.waiting_for_bytes, WAITING_CHECKED)
    if any(state.functions[id_].spec.tenant != function.spec.tenant for id_ in waiting):
        _limit_drain(cycle, function, why)


def _limit_drain(cycle: Cycle, function: Function, why: str) -> None:
    """End the starts of a draining function at once, and its other operations, with their workers, after the drain
    timeout.
    """
    until = Seconds(cycle.now + cycle.config.drain_timeout_s)
    for worker in list(function.workers.values()):
        if worker.start is not None:
            stop(cycle, worker, kill=True)
        elif not worker.stopping and (worker.drain is None or worker.drain.until is None):
            drain(cycle, worker, why, until)
    if function.pool is not None:
        residency.drain_runs(cycle, function)


def _release(cycle: Cycle, function: Function) -> None:
    """No worker or device uses the draining function now: release its blocks too, if other functions wait for space."""
    state = cycle.state
    state.releasing = None
    if state.waiting_for_bytes and function.loaded:
        cycle.eviction_work += len(function.sizes)
        evict_blocks_of(cycle, function, "others wait for space in the host store, and its time slice is over")
    cycle.bytes_changed = True
    cycle.mark(function)
