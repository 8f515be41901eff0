"""What follows the death of a worker: the backoff of its function, and the requests that are retried."""

from overwinter.core.config import SchedulerConfig
from overwinter.scheduler.request import Request


def backoff_s(failures: int, config: SchedulerConfig) -> float:
    """Seconds before the next start: doubles with each death in a row, up to a bound."""
    doubled = config.backoff_first_s * float(1 << min(max(failures - 1, 0), 30))
    return min(doubled, config.backoff_max_s)


def may_retry(request: Request, config: SchedulerConfig) -> bool:
    """Whether a request that a worker died under is tried once more."""
    return request.failures < config.attempts_max
