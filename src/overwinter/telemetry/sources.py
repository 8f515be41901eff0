"""The data sources of metrics, `top`, `devices` and `explain`."""

from collections import Counter
from typing import NamedTuple

from overwinter.core.config import SchedulerConfig
from overwinter.store.host import VerificationCounts
from overwinter.telemetry.accounts import Accounts
from overwinter.telemetry.statistics import Statistics


class Sources(NamedTuple):
    """The data of these views, except the counts of pipelines, and the scheduler's data, of which readers get a
    snapshot. Threads read it while the loop runs. So they iterate over a copy of a table whose size may change; the
    copies are from about the same moment.
    """

    config: SchedulerConfig
    statistics: Statistics
    """The statistics from the scheduler's steps."""
    accounts: Accounts
    """The results of the accounting."""
    verification: VerificationCounts
    """The results of verifying blocks."""
    faults: Counter[str]
    """The failures of periodic tasks, and of steps in the telemetry."""
