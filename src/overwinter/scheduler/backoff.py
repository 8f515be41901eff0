"""The backoff after failures, and the limit of retries."""

from overwinter.core.config import SchedulerConfig
from overwinter.scheduler.request import Request


def backoff_s(failures: int, config: SchedulerConfig) -> float:
    """Return the seconds before the next attempt: they double with each consecutive failure, up to a bound."""
    doubled = config.backoff_first_s * float(1 << min(max(failures - 1, 0), 30))
    return min(doubled, config.backoff_max_s)


def may_retry(request: Request, config: SchedulerConfig) -> bool:
    """Whether a request whose worker or executor died is tried again."""
    return request.failures < config.attempts_max
