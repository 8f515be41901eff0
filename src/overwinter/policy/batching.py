"""Which waiting requests go together into one run."""

from overwinter.core.ids import RequestId
from overwinter.policy.state import Function


def next_batch(function: Function) -> tuple[RequestId, ...]:
    """Take what waits, up to the function's largest batch, without waiting for more."""
    count = min(len(function.queue), function.spec.settings.max_batch)
    return tuple(function.queue.popleft() for _ in range(count))
