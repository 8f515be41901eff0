"""How functions and bodies live: `{(state, event): state}`. A missing pair is an error that changes nothing.

The diagrams in docs/architecture.md are made from these tables by `diagram`, and a test holds them to it.
"""

from typing import Literal

FunctionState = Literal["asleep", "waking", "awake", "resting", "unloaded"]
BlocksState = Literal["absent", "coming", "present"]
BodyState = Literal["starting", "idle", "busy", "stopping"]

FUNCTION: dict[tuple[FunctionState, str], FunctionState] = {
    ("asleep", "wake"): "waking",
    ("waking", "ready"): "awake",
    ("waking", "wait"): "asleep",
    ("waking", "failed"): "resting",
    ("awake", "sleep"): "asleep",
    ("awake", "failed"): "resting",
    ("resting", "rested"): "asleep",
    ("asleep", "unload"): "unloaded",
    ("waking", "unload"): "unloaded",
    ("awake", "unload"): "unloaded",
    ("resting", "unload"): "unloaded",
    ("unloaded", "load"): "asleep",
}

BLOCKS: dict[tuple[BlocksState, str], BlocksState] = {
    ("absent", "stage"): "coming",
    ("coming", "staged"): "present",
    ("coming", "release"): "absent",
    ("present", "release"): "absent",
}

BODY: dict[tuple[BodyState, str], BodyState] = {
    ("starting", "ready"): "idle",
    ("starting", "stop"): "stopping",
    ("idle", "run"): "busy",
    ("busy", "run"): "busy",
    ("busy", "done"): "idle",
    ("idle", "stop"): "stopping",
    ("busy", "stop"): "stopping",
    ("stopping", "ready"): "stopping",
    ("stopping", "done"): "stopping",
}


class LifecycleError(Exception):
    """An event that the table does not allow in this state."""


def step_function(state: FunctionState, event: str) -> FunctionState:
    """The function's next state; LifecycleError if there is none."""
    after = FUNCTION.get((state, event))
    if after is None:
        raise LifecycleError(f"a function that is {state} cannot {event}")
    return after


def step_blocks(state: BlocksState, event: str) -> BlocksState:
    """The next state of a function's blocks in the host store; LifecycleError if there is none."""
    after = BLOCKS.get((state, event))
    if after is None:
        raise LifecycleError(f"blocks that are {state} cannot {event}")
    return after


def step_body(state: BodyState, event: str) -> BodyState:
    """The body's next state; LifecycleError if there is none."""
    after = BODY.get((state, event))
    if after is None:
        raise LifecycleError(f"a body that is {state} cannot {event}")
    return after


def diagram() -> str:
    """The tables as mermaid state diagrams."""
    tables: list[tuple[str, list[tuple[str, str, str]]]] = [
        ("function", [(before, after, event) for (before, event), after in FUNCTION.items()]),
        ("function's blocks in the host store", [(before, after, event) for (before, event), after in BLOCKS.items()]),
        ("body", [(before, after, event) for (before, event), after in BODY.items()] + [("stopping", "[*]", "exit")]),
    ]
    lines: list[str] = []
    for title, rows in tables:
        lines += [f"### Life of a {title}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {rows[0][0]}"]
        lines += [f"    {before} --> {after}: {event}" for before, after, event in rows]
        lines += ["```", ""]
    return "\n".join(lines)
