"""What if a policy fails on one function's numbers? That function is taken out of service, and nobody else.

A policy only answers: it changes no table. So each is asked through `asked`, which has a plain answer at hand for when
it fails, and remembers the function. The tables are as they should be at any such moment, and at the end of the step
the function is put away as if its owner had unloaded it, with the reason. Any other failure ends the node.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from overwinter.core.ids import FunctionId
from overwinter.core.profile import Point
from overwinter.scheduler.state import Function, State

FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What numbers that nobody thought of may raise."""

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def asked(
    state: State,
    function: Function,
    otherwise: Answer,
    policy: Callable[Asked, Answer],
    *args: Asked.args,
    **kwargs: Asked.kwargs,
) -> Answer:
    """What a policy answers about a function, and `otherwise` if it fails."""
    try:
        return policy(*args, **kwargs)
    except FAILURES as error:
        remember(state, function.spec.id, error)
        return otherwise


def expected_s(state: State, function: Function, point: Point, batch: int) -> float | None:
    """Seconds that a run should take; None: nothing is known, or can be said."""
    try:
        # As `asked`, without its cost: nothing is asked more often.
        return function.latency.latency_s(point, batch)
    except FAILURES as error:
        remember(state, function.spec.id, error)
        return None


def joint_s(state: State, function: Function, point: Point, counts: Sequence[int]) -> float | None:
    """The same of a run that the function leads, of so many requests of each of several."""
    if len(counts) == 1:
        return expected_s(state, function, point, counts[0])
    return asked(state, function, None, function.latency.joint_s, point, counts, function.own)


def remember(state: State, function: FunctionId, error: Exception) -> None:
    """A policy failed on the function: it goes at the end of the step."""
    state.faults.setdefault(function, f"{type(error).__name__}: {error}")


def told(function: FunctionId, fault: str) -> str:
    """What whoever asks for a function is told from then on."""
    return f"the scheduler failed on function {function} ({fault}): load it to try again, or deploy it anew"
