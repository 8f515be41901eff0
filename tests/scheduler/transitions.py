"""The lifecycles of functions, their blocks and workers as tables, against which tests check the scheduler.

The tables `{(state, label): state}` list the possible transitions. One event causes two of them at most; for a worker
three, when it becomes ready, gets a run, and drains because a policy failed on its function. Most labels are decisions,
which may follow any event. Those in `REPORTED` happen elsewhere: only an event that reports them may cause them, and
only for the function or worker that it names. `diagram` generates the diagrams in docs/architecture.md from the tables.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import msgspec

from overwinter.core.events import BindFailed, BlocksLoaded, Bound, Event, LoadAsked, RunEnded, WorkerReady
from overwinter.core.ids import FunctionId, Seconds, WorkerId
from overwinter.scheduler.lifecycles import FunctionState, WorkerState, function_state, worker_state
from overwinter.scheduler.state import Function, State

BlocksState = Literal["absent", "loading", "present"]

FUNCTION: dict[tuple[FunctionState, str], FunctionState] = {
    ("asleep", "load or start"): "waking",
    ("asleep", "fail"): "backoff",
    ("asleep", "unload"): "unloaded",
    ("waking", "ready"): "awake",
    ("waking", "no worker, or stop"): "asleep",
    ("waking", "fail"): "backoff",
    ("waking", "unload"): "unloaded",
    ("awake", "stop"): "asleep",
    ("awake", "fail"): "backoff",
    ("awake", "unload"): "unloaded",
    ("backoff", "over"): "asleep",
    ("backoff", "unload"): "unloaded",
    ("unloaded", "load"): "asleep",
}

BLOCKS: dict[tuple[BlocksState, str], BlocksState] = {
    ("absent", "load"): "loading",
    ("loading", "loaded"): "present",
    ("loading", "release"): "absent",
    ("present", "release"): "absent",
}

WORKER: dict[tuple[WorkerState, str], WorkerState] = {
    ("starting", "ready"): "idle",
    ("starting", "stop"): "stopping",
    ("idle", "run"): "busy",
    ("idle", "stop"): "stopping",
    ("busy", "done"): "idle",
    ("busy", "drain"): "draining",
    ("busy", "stop"): "stopping",
    ("draining", "stop"): "stopping",
}

REPORTED: dict[tuple[str, str], tuple[type, ...]] = {
    ("function", "load"): (LoadAsked,),
    ("blocks", "loaded"): (BlocksLoaded,),
    ("worker", "ready"): (WorkerReady,),
    ("worker", "done"): (RunEnded, Bound, BindFailed),
}
"""The events that report a transition of the function or worker that they name, by table and label."""


def blocks_state(function: Function) -> BlocksState:
    """Where a function's blocks are, as far as its host store is concerned."""
    return "present" if function.loaded else "absent" if function.loading is None else "loading"


class LifecycleStates(msgspec.Struct, frozen=True):
    """The states of all functions and workers at one time."""

    functions: dict[FunctionId, tuple[FunctionState, BlocksState]]
    workers: dict[WorkerId, WorkerState]


def lifecycle_states(state: State, now: Seconds) -> LifecycleStates:
    """The states of all functions and workers at this time."""
    functions = {id_: (function_state(each, now), blocks_state(each)) for id_, each in state.functions.items()}
    return LifecycleStates(functions, {id_: worker_state(each) for id_, each in state.workers.items()})


def check_steps(before: LifecycleStates, after: LifecycleStates, event: Event) -> None:
    """Raise AssertionError for a change to which the transitions of this event do not lead."""
    kind, function, worker = type(event), getattr(event, "function", None), getattr(event, "worker", None)
    for id_ in before.functions.keys() & after.functions.keys():
        (life, blocks), (life_now, blocks_now) = before.functions[id_], after.functions[id_]
        named = kind if id_ == function else None
        assert life_now in _reachable("function", life, named), f"function {id_} was {life} and is {life_now}"
        allowed = _reachable("blocks", blocks, named)
        assert blocks_now in allowed, f"the blocks of function {id_} were {blocks} and are {blocks_now}"
    for each in before.workers.keys() & after.workers.keys():
        then, now = before.workers[each], after.workers[each]
        allowed = _reachable("worker", then, kind if each == worker else None)
        assert now in allowed, f"worker {each} was {then} and is {now}"


TABLES: dict[str, tuple[Mapping[tuple[str, str], str], int]] = {
    "function": (FUNCTION, 2),
    "blocks": (BLOCKS, 2),
    "worker": (WORKER, 3),
}
"""The tables, with the most transitions that one event causes."""


@cache
def _reachable(table: str, start: str, named_by: type | None) -> set[str]:
    """The states that can be reached by one event; `named_by`: its kind, if it names this function or worker."""
    transitions, most = TABLES[table]
    steps = [
        (before, after)
        for (before, label), after in transitions.items()
        if (table, label) not in REPORTED or named_by in REPORTED[table, label]
    ]
    reached = {start}
    for _ in range(most):
        reached |= {after for before, after in steps if before in reached}
    return reached


def diagram() -> str:
    """The tables as mermaid state diagrams."""
    tables: list[tuple[str, list[tuple[str, str, str]]]] = [
        ("function", [(before, after, event) for (before, event), after in FUNCTION.items()]),
        ("function's blocks in the host store", [(before, after, event) for (before, event), after in BLOCKS.items()]),
        (
            "worker",
            [(before, after, event) for (before, event), after in WORKER.items()] + [("stopping", "[*]", "exit")],
        ),
    ]
    lines: list[str] = []
    for title, rows in tables:
        lines += [f"### Lifecycle of a {title}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {rows[0][0]}"]
        lines += [f"    {before} --> {after}: {event}" for before, after, event in rows]
        lines += ["```", ""]
    return "\n".join(lines)
