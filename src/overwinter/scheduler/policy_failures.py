"""Isolates failures of policies: if a policy fails on one function, only that function is taken out of service.

Policies that are called through `call_policy` change no table except the latency model, the estimates for shared runs
(trunks.py), and whether the SLO is infeasible. If one of them raises, `call_policy` returns the given default and
records the function. The tables are consistent at that moment. At the end of the step, the function is unloaded, as its
owner could do, with the error as the reason; a version on trial is removed. After a failure in the work ahead of
requests, which comes last in a step (slices.py, replicas.py), this happens in the next step. Any other failure ends the
node, also that of a policy that is called directly.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

from overwinter.core.ids import FunctionId
from overwinter.core.profile import Point
from overwinter.scheduler.state import Function, State

FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The exceptions that a policy may raise on unexpected numbers."""

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")


def call_policy(
    state: State,
    function: Function,
    otherwise: Otherwise,
    policy: Callable[[*Arguments], Result],
    *args: *Arguments,
) -> Result | Otherwise:
    """Return a policy's answer about a function, or `otherwise` if the policy fails."""
    try:
        return policy(*args)
    except FAILURES as error:
        remember_failure(state, function.spec.id, error)
        return otherwise


def expected_s(state: State, function: Function, point: Point, batch: int) -> float | None:
    """Expected seconds of a run; None: unknown."""
    try:
        # Like `call_policy`, but without its overhead, because this is called most often.
        return function.family.latency.latency_s(point, batch)
    except FAILURES as error:
        remember_failure(state, function.spec.id, error)
        return None


def shared_run_s(state: State, function: Function, point: Point, counts: Sequence[int]) -> float | None:
    """Expected seconds of a shared run that the function leads, with these numbers of requests of each function; None:
    unknown.
    """
    if len(counts) == 1:
        return expected_s(state, function, point, counts[0])
    return call_policy(state, function, None, function.latency.shared_run_s, point, counts, function.separate_part)


def remember_failure(state: State, function: FunctionId, error: Exception) -> None:
    """A policy failed on the function: the function will be taken out of service."""
    state.faults.setdefault(function, f"{type(error).__name__}: {error}")


def fault_text(function: FunctionId, fault: str) -> str:
    """Format the reason that callers of the function get from then on."""
    return f"function {function} is out of service ({fault}): deploy it again or, if its program can be read, load it"
