"""The forecasts of an oracle: future request rates, from a second pass over the same arrivals."""

from collections import deque
from collections.abc import Iterator
from math import inf

FORECASTS_PER_PERIOD = 10
"""The oracle sends several forecasts in each period, because it does not know when the scheduler decides."""


def rates_ahead(times: Iterator[float], period_s: float) -> Iterator[tuple[float, float]]:
    """Yield (time, arrivals per second in the period that follows) at 0 and every tenth of a period, without end.

    `times` are seconds in ascending order; those at the end of a period belong to the next.
    """
    ahead: deque[float] = deque()
    number = 0
    following = next(times, inf)
    while True:
        at = number * period_s / FORECASTS_PER_PERIOD
        while ahead and ahead[0] < at:
            ahead.popleft()
        while following < at + period_s:
            if following >= at:
                ahead.append(following)
            following = next(times, inf)
        yield at, len(ahead) / period_s
        number += 1
