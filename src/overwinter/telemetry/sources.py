"""The data sources of metrics, usage, `top` and `explain`."""

from collections import Counter
from typing import NamedTuple

from overwinter.core.config import SchedulerConfig
from overwinter.store.host import Health
from overwinter.telemetry.accounts import Accounts
from overwinter.telemetry.statistics import Statistics


class Sources(NamedTuple):
    """All data of a node's telemetry, except its scheduler, of which readers get a snapshot. Threads read it while the
    loop runs: a table is copied as a whole before it is read, and the tables are of about the same moment.
    """

    config: SchedulerConfig
    statistics: Statistics
    """What was read out of its steps."""
    accounts: Accounts
    """What the kernel says."""
    health: Health
    """What was found of blocks."""
    faults: Counter[str]
    """What could not be looked after."""
