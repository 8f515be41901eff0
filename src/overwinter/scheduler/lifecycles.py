"""The lifecycles of functions and workers. Their states are not stored; they are computed from the tables."""

from typing import Literal

from overwinter.core.ids import Seconds
from overwinter.scheduler.state import Function, Worker

FunctionState = Literal["asleep", "waking", "awake", "backoff", "unloaded"]
AWAKE_FIRST: tuple[FunctionState, ...] = ("awake", "waking", "asleep", "backoff", "unloaded")
"""The states, the soonest answer first."""
WorkerState = Literal["starting", "idle", "busy", "draining", "stopping"]


def function_state(function: Function, now: Seconds) -> FunctionState:
    """The state of a function at this time."""
    if function.unloaded:
        return "unloaded"
    if function.is_ready:
        return "awake"
    if function.loading is not None or function.is_starting:
        return "waking"
    return "backoff" if now < function.backoff_until else "asleep"


def worker_state(worker: Worker) -> WorkerState:
    """The state of a worker."""
    if worker.stopping:
        return "stopping"
    if worker.start is not None:
        return "starting"
    if worker.drain is not None:
        return "draining"
    return "idle" if worker.is_idle else "busy"
