"""Who comes next when there is no room for one more body, or for one more's blocks, and who gives way?

Nobody is passed by: what becomes free is the first one's in line, also where it is too little for that one and enough
for a smaller one. First in line are those without any body. For them a body gives way that is idle, the one idle
longest, or else one that was busy for its turn: a function that always has work would keep others out for ever. A turn
is many wakes long, so that changing places costs a small share of the time.

For bytes a whole function gives way, and its turn counts from its first body since its blocks came: those that wait for
a body or a core would else take the blocks from each other, and none would get to run. It is longer, for blocks come
from disk. One that is idle goes sooner, unless it is used so often that it would be back at once, or has just come.
"""

from collections.abc import Iterable, Iterator
from math import inf

from overwinter.core.ids import FunctionId, Seconds
from overwinter.policy.scaling.wants import wake_s
from overwinter.policy.state import Body, Function, State

TURN_WAKES = 10
"""How long a body may stay at work when others wait for room, in wakes of its function."""
TURN_WAKES_BYTES = 100
"""How long a function may keep its blocks when others wait for room in a host store."""
OFTEN = 4.0
"""An idle function stays for so many times the time that usually lies between two uses, if that is less than a turn."""


def is_behind(state: State, function: Function) -> bool:
    """Whether others of its tenant come before this function."""
    lines = state.tenant(function.spec.tenant)
    first = next(iter(lines.wants_room), None)
    if first is None and state.has_body(function):
        first = next(iter(lines.wants_more), None)
    return first is not None and first != function.spec.id


def line_up(state: State, function: Function) -> None:
    """Wait for room, behind those who do already."""
    for lines in (state, state.tenant(function.spec.tenant)):
        line, other = lines.wants_room, lines.wants_more
        if state.has_body(function):
            line, other = other, line
        other.pop(function.spec.id, None)
        line[function.spec.id] = None


def is_in_line(state: State, function: Function) -> bool:
    """Whether it waits for room."""
    return function.spec.id in state.wants_room or function.spec.id in state.wants_more


def keep_line(state: State, function: Function) -> None:
    """Whoever loses his last body while he waits for one more waits among those without any."""
    if function.spec.id in state.wants_more and not state.has_body(function):
        line_up(state, function)


def leave_line(state: State, function: Function) -> None:
    """Wait for room no more."""
    function.awaits = None
    if not is_in_line(state, function):
        return
    for lines in (state, state.tenant(function.spec.tenant)):
        lines.wants_room.pop(function.spec.id, None)
        lines.wants_more.pop(function.spec.id, None)


def leave_bytes_line(state: State, function: Function) -> None:
    """Wait for room in a host store no more."""
    state.wants_bytes.pop(function.spec.id, None)


def first_in_line(state: State) -> FunctionId | None:
    """Whose the next room is."""
    return next(iter(state.wants_room or state.wants_more), None)


def idle_longest(state: State) -> Body | None:
    """Of the bodies that nobody needs now the first to go."""
    return next(iter(not_needed(state, state.idle.values())), None)


def not_needed(state: State, bodies: Iterable[Body]) -> Iterator[Body]:
    """Those of these bodies that have nothing to do."""
    for body in bodies:
        owner = state.owner(body)
        if body.state == "idle" and (owner is None or not owner.queue):
            yield body


def longest_at_work(state: State, now: Seconds) -> Body | None:
    """Of the bodies that have had their turn the one that became ready first."""
    over = (body for body in state.bodies.values() if body.is_serving and _had_turn(state, body, now))
    return min(over, key=lambda body: (body.ready_at, body.id), default=None)


def next_to_yield(state: State, now: Seconds) -> tuple[Function | None, float]:
    """Of the functions in use the one whose blocks go next; where none may go yet, when to look again."""
    using = dict.fromkeys(body.function for body in state.bodies.values())
    using |= dict.fromkeys((*state.wants_room, *state.wants_core, *state.late))
    holding = [function for id_ in using if (function := state.functions.get(id_)) is not None and _may_yield(function)]
    yields = min(holding, key=lambda function: (_yields_at(state, function), function.used), default=None)
    if yields is None:
        return None, inf
    at = _yields_at(state, yields)
    return (yields if at <= now else None), at


def turn_s(state: State, body: Body) -> float:
    """How long a body may stay at work when others wait; nothing where its function is gone."""
    function = state.owner(body)
    return 0.0 if function is None else TURN_WAKES * wake_s(function)


def _had_turn(state: State, body: Body, now: Seconds) -> bool:
    return state.owner(body) is not None and now >= body.ready_at + turn_s(state, body)


def _may_yield(function: Function) -> bool:
    return function.blocks == "present" and not (
        function.spec.settings.pinned or function.on_trial or function.announce
    )


def _yields_at(state: State, function: Function) -> float:
    if function.turn_at is None:
        return inf
    turn_s, least_s = TURN_WAKES_BYTES * wake_s(function), TURN_WAKES * wake_s(function)
    turned = function.turn_at + turn_s
    if function.queue or any(state.bodies[worker].state in ("starting", "busy") for worker in function.bodies):
        return turned
    often = OFTEN * function.every_s
    return min(turned, max(function.turn_at + least_s, function.used + (often if often < turn_s else 0.0)))
