"""The lifecycles of functions, their blocks and workers as tables, against which tests check the scheduler.

The tables `{(state, event): state}` list the possible transitions. One event causes two of them at most; for a worker
three, when it becomes ready, gets a run, and drains because a policy failed on its function. `diagram` generates the
diagrams in docs/architecture.md from them.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from overwinter.core.ids import FunctionId, Seconds, WorkerId
from overwinter.scheduler.lifecycles import FunctionState, WorkerState, function_state, worker_state
from overwinter.scheduler.state import Function, State

BlocksState = Literal["absent", "coming", "present"]

FUNCTION: dict[tuple[FunctionState, str], FunctionState] = {
    ("asleep", "load or start"): "waking",
    ("asleep", "fail"): "backoff",
    ("asleep", "unload"): "unloaded",
    ("waking", "ready"): "awake",
    ("waking", "wait or stop"): "asleep",
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
    ("absent", "load"): "coming",
    ("coming", "loaded"): "present",
    ("coming", "release"): "absent",
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


def blocks_state(function: Function) -> BlocksState:
    """Where a function's blocks are, as far as its host store is concerned."""
    return "present" if function.loaded else "absent" if function.loading is None else "coming"


class LifecycleStates(msgspec.Struct, frozen=True):
    """The states of all functions and workers at one time."""

    functions: dict[FunctionId, tuple[FunctionState, BlocksState]]
    workers: dict[WorkerId, WorkerState]


def lifecycle_states(state: State, now: Seconds) -> LifecycleStates:
    """The states of all functions and workers at this time."""
    functions = {id_: (function_state(each, now), blocks_state(each)) for id_, each in state.functions.items()}
    return LifecycleStates(functions, {id_: worker_state(each) for id_, each in state.workers.items()})


def check_steps(before: LifecycleStates, after: LifecycleStates) -> None:
    """AssertionError for a change to which the steps of one event do not lead."""
    for id_ in before.functions.keys() & after.functions.keys():
        (life, blocks), (life_now, blocks_now) = before.functions[id_], after.functions[id_]
        assert life_now in _FUNCTION[life], f"function {id_} was {life} and is {life_now}"
        assert blocks_now in _BLOCKS[blocks], f"the blocks of function {id_} were {blocks} and are {blocks_now}"
    for worker in before.workers.keys() & after.workers.keys():
        then, now = before.workers[worker], after.workers[worker]
        assert now in _WORKER[then], f"worker {worker} was {then} and is {now}"


def _within(steps: int, table: Mapping[tuple[str, str], str]) -> dict[str, set[str]]:
    """The states that are reachable in at most so many steps, by their first state."""
    found = {state: {state} for (before, _), after in table.items() for state in (before, after)}
    for _ in range(steps):
        found = {
            start: reached | {after for (before, _), after in table.items() if before in reached}
            for start, reached in found.items()
        }
    return found


_FUNCTION, _BLOCKS = (_within(2, dict(table)) for table in (FUNCTION.items(), BLOCKS.items()))
_WORKER = _within(3, dict(WORKER.items()))


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
