"""Whose request gets the next core that is free?

More runs at once than there are cores make all of them late, for the kernel shares the cores out equally. So runs and
wakes wait for a core here, and get it by their promises: of those that can still be in time the one due first, then
those that are late, in the order in which they came. Every LATE_TURN-th core goes to one that is late, so that none
stays unanswered. Among the requests of one function it is the same. One run more than there are cores may go on for a
request that would be late otherwise and is not at the slower pace: short ones need not wait for the end of long ones.

What takes much longer than it should keeps its core no more: nothing that hangs keeps others out. Code of users may
wait for other things than a core, so functions with a handler wait for none here, and keep none.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import NamedTuple

from overwinter.core.ids import Seconds
from overwinter.policy.containment import expected_s
from overwinter.policy.queueing import ORDINARY, late_last
from overwinter.policy.scaling.wants import wake_s
from overwinter.policy.state import Body, Function, State

LATE_TURN = 10
CANDIDATES = 64
"""Of those that wait and can be in time, so many are compared, the ones that wait longest."""
SHARED_PACE = 1.5
"""How much longer something is taken to last while one more than the cores goes on, as with three on two cores."""
OVERDUE = 4.0
"""Times the expected time after which a run or wake is not taken to keep its core."""
OVERDUE_LEAST_S = 0.2
UNKNOWN_S = 1.0
"""Of a run about which nothing is known."""
UNPROMISED_S = 2.0
"""When a request is due to which no latency was promised."""


class Hold(NamedTuple):
    """Cores that a run or wake keeps."""

    cores: int
    ends: float
    """When it should end."""
    until: float
    """When it is not taken to keep them any more."""


def is_late(state: State, function: Function, now: Seconds) -> bool:
    """Whether the function's first request cannot be in time any more."""
    return now + _needed_s(state, function) > _due(state, function)


def put_late_last(state: State, function: Function, now: Seconds, turned: bool = False) -> None:
    """Let the requests that can be in time go before those that cannot; `turned`: behind them."""
    slo_ms = function.spec.settings.slo_ms
    if slo_ms is not None and len(function.queue) > 1 and (turned or is_late(state, function, now)):
        before = now + _needed_s(state, function) - slo_ms / 1000
        late_last(function.queue, state.requests, before, turned)


def leave_line(state: State, function: Function) -> None:
    """Wait for a core no more."""
    for waiting in (state.wants_core, state.late):
        waiting.pop(function.spec.id, None)


def is_free(state: State, cores: int, needed: int, now: Seconds) -> bool:
    """Whether so many cores are free; to whoever needs more than there are, all of them."""
    if state.running_cores + state.counts["starting"] + needed <= cores:
        return True
    taken = sum(hold.cores for hold in _holds(state, now))
    return not taken or taken + needed <= cores


def needs(state: State, function: Function) -> int:
    """Cores of what the function would do next."""
    ready = next(iter(state.slots(function)), None)
    return 1 if ready is None else ready.point.run_cores


def next_overdue(state: State, now: Seconds) -> Seconds:
    """When the next core is free at the latest, whatever hangs."""
    return Seconds(min((hold.until for hold in _holds(state, now)), default=inf))


def next_up(state: State, turn: int, now: Seconds) -> Function:
    """Of the functions that wait the one whose first request gets a core; `turn` counts the cores given out."""
    hopeful = _hopeful(state, now)
    if not hopeful or (state.late and turn % LATE_TURN == 0):
        return state.functions[next(iter(state.late))]
    return min(hopeful, key=lambda function: (_level(state, function), _due(state, function)))


def in_a_hurry(state: State, cores: int, now: Seconds) -> Function | None:
    """The function for whose first request it is worth to have one run more than there are cores, or None."""
    holds = list(_holds(state, now))
    if sum(hold.cores for hold in holds) > cores:
        return None
    wait_s = max(0.0, min((hold.ends for hold in holds), default=now) - now)

    def hurries(function: Function) -> bool:
        left_s, needed_s = _due(state, function) - now, _needed_s(state, function)
        return SHARED_PACE * needed_s <= left_s < wait_s + needed_s and needs(state, function) == 1

    hurried = filter(hurries, _hopeful(state, now))
    return min(hurried, key=lambda function: (_level(state, function), _due(state, function)), default=None)


def _hopeful(state: State, now: Seconds) -> list[Function]:
    """Those that wait and can be in time. Whoever cannot any more is late from now on, but a request of priority."""
    for id_ in list(islice(state.late, CANDIDATES)):
        # What was late may have been answered, or given up.
        if not is_late(state, state.functions[id_], now):
            del state.late[id_]
            state.wants_core[id_] = None
    hopeful = []
    for id_ in list(islice(state.wants_core, CANDIDATES)):
        function = state.functions[id_]
        put_late_last(state, function, now)
        if _level(state, function) < ORDINARY or not is_late(state, function, now):
            hopeful.append(function)
        else:
            del state.wants_core[id_]
            state.late[id_] = None
    return hopeful


def _level(state: State, function: Function) -> int:
    return state.requests[function.queue[0]].level


def _due(state: State, function: Function) -> float:
    slo_ms = function.spec.settings.slo_ms
    return state.requests[function.queue[0]].arrived + (UNPROMISED_S if slo_ms is None else slo_ms / 1000)


def _needed_s(state: State, function: Function) -> float:
    ready = next((body for worker in function.bodies if (body := state.bodies[worker]).is_serving), None)
    if ready is None:
        return (expected_s(state, function, function.speeds.usual, 1) or 0.0) + wake_s(function)
    return expected_s(state, function, ready.point, 1) or 0.0


def _holds(state: State, now: Seconds) -> Iterator[Hold]:
    for body in state.working.values():
        function = state.owner(body)
        if function is not None and not function.spec.sandboxed:
            yield from (hold for hold in _of_body(state, function, body) if hold.until > now)


def _of_body(state: State, function: Function, body: Body) -> Iterator[Hold]:
    if body.state == "starting":
        took = wake_s(function)
        yield Hold(1, body.since + took, body.since + max(UNKNOWN_S, OVERDUE * took))
    for run, begun in body.begun.items():
        known = expected_s(state, function, body.point, len(body.runs[run]))
        patience = UNKNOWN_S if known is None else max(OVERDUE_LEAST_S, OVERDUE * known)
        yield Hold(body.point.run_cores, begun + (known or 0.0), begun + patience)
