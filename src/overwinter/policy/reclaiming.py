"""Which functions' blocks leave a host store, and when? (Tetris 3.4: T_cold = T_all minus T_warm.)

Nothing leaves that a body, a waiting request or a pin holds. What stays warm follows from the functions that live, so
a crash leaks nothing. Nothing leaves for being idle alone unless a keep-alive window was asked for.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from overwinter.core.ids import Address, Seconds, StoreName
from overwinter.core.policies import Eviction
from overwinter.policy.containment import asked
from overwinter.policy.state import Function, State

CANDIDATES = 32
"""Of the functions used longest ago, so many are weighed against each other."""
FIXED_BYTES = 1 << 20
"""What opening, checking and naming a block costs, in bytes copied."""
LEAST_S = 1e-3


def may_leave(function: Function) -> bool:
    """Whether nothing holds the function's blocks in the host store."""
    return (
        function.blocks == "present"
        and not function.bodies
        and not function.queue
        and not (function.announce or function.on_trial or function.spec.settings.pinned)
    )


def next_victim(state: State, rule: Eviction, now: Seconds, keep: Function | None) -> Function | None:
    """The function whose blocks should leave next, or None. One that shares every block gives nothing back: it goes
    when nobody else may, so that the last of its sharers gives them back.
    """
    giving = (each for each in _leaving(state, keep) if state.residents(each).exclusive(each.sizes))
    candidates = islice(giving, 1 if rule == "lru" else CANDIDATES)
    worth = {each.spec.id: asked(state, each, 0.0, _worth, state, each, now) for each in candidates}
    victim = state.functions[min(worth, key=worth.__getitem__)] if worth else None
    return next(_leaving(state, keep), None) if victim is None else victim


def winnable_bytes(state: State, keep: Function | None) -> int:
    """What the host stores would give back if all left that may."""
    leaving: dict[StoreName, Counter[Address]] = {}
    for function in _leaving(state, keep):
        leaving.setdefault(function.spec.store, Counter()).update(function.sizes.keys())
    return sum(
        state.stores[store].sizes.get(address, 0)
        for store, counts in leaving.items()
        for address, count in counts.items()
        if state.stores[store].sharers[address] == count
    )


def pinned_bytes(state: State, function: Function) -> int:
    """What others have pinned of the host stores, the blocks that this function shares with them apart."""
    pinned = {
        (other.spec.store, address): size
        for other in state.functions.values()
        if other.spec.settings.pinned and other.blocks != "absent" and other is not function
        for address, size in other.sizes.items()
        if other.spec.store != function.spec.store or address not in function.sizes
    }
    return sum(pinned.values())


def _leaving(state: State, keep: Function | None) -> Iterator[Function]:
    for id_ in state.kept:
        function = state.functions[id_]
        if function is not keep and may_leave(function):
            yield function


def _worth(state: State, function: Function, now: Seconds) -> float:
    """What it costs to bring it back, by how often that is likely, per byte won. Bringing a block costs its bytes and
    a fixed part, so a small head over a shared body is worth more a byte than a whole model.
    """
    won = state.residents(function).exclusive(function.sizes)
    cost = won + FIXED_BYTES * len(function.sizes)
    return cost / won / max(now - function.used, function.every_s, LEAST_S)
