"""Who comes next when there is no room for one more body, and which body gives way?

Nobody is passed by: what becomes free is the first one's in line, also where it is too little for that one and enough
for a smaller one. First in line are those without any body. For them a body gives way that is idle, the one idle
longest, or else one that was busy for its turn: a function that always has work would keep others out for ever. A turn
is many wakes long, so that changing places costs a small share of the time; longer where blocks must come from disk.
"""

from overwinter.core.ids import FunctionId, Seconds
from overwinter.policy.scaling.wants import wake_s
from overwinter.policy.state import Body, Function, State

TURN_WAKES = 10
"""How long a body may stay at work when others wait for room, in wakes of its function."""
TURN_WAKES_BYTES = 100
"""The same when they wait for room in a host store."""


def is_behind(state: State, function: Function) -> bool:
    """Whether others come before this function."""
    first = state.wants_room[0] if state.wants_room else None
    if first is None and has_body(state, function):
        first = state.wants_more[0] if state.wants_more else None
    return first is not None and first != function.spec.id


def line_up(state: State, function: Function) -> None:
    """Wait for room, behind those who do already."""
    line = state.wants_more if has_body(state, function) else state.wants_room
    if function.spec.id not in line:
        line.append(function.spec.id)


def leave_line(state: State, function: Function) -> None:
    """Wait for room no more."""
    for line in (state.wants_room, state.wants_more):
        if function.spec.id in line:
            line.remove(function.spec.id)


def first_in_line(state: State) -> FunctionId | None:
    """Whose the next room is."""
    line = state.wants_room or state.wants_more
    return line[0] if line else None


def idle_longest(state: State, pinned: bool = True) -> Body | None:
    """Of the bodies that nobody needs now the first to go; those of pinned functions only if asked for."""
    for body in state.idle.values():
        owner = state.functions.get(body.function)
        if owner is None or (not owner.queue and (pinned or not owner.spec.settings.pinned)):
            return body
    return None


def longest_at_work(state: State, now: Seconds, wakes: int = TURN_WAKES, pinned: bool = True) -> Body | None:
    """Of the bodies that have had a turn of so many wakes the one that became ready first."""
    over = (body for body in state.bodies.values() if body.is_serving and _had_turn(state, body, now, wakes, pinned))
    return min(over, key=lambda body: (body.ready_at, body.id), default=None)


def has_body(state: State, function: Function) -> bool:
    """Whether the function has a body or gets one."""
    return any(state.bodies[worker].state != "stopping" for worker in function.bodies)


def _had_turn(state: State, body: Body, now: Seconds, wakes: int, pinned: bool) -> bool:
    function = state.functions.get(body.function)
    if function is None or (function.spec.settings.pinned and not pinned):
        return False
    return now >= body.ready_at + wakes * wake_s(function)
