"""The data sources of metrics, usage, `top` and `explain`."""

from typing import NamedTuple

from overwinter.core.config import SchedulerConfig
from overwinter.node.faults import Faults
from overwinter.node.telemetry.accounting import Accounting
from overwinter.node.telemetry.statistics import Statistics
from overwinter.store.host import Health


class Sources(NamedTuple):
    """All data of a node's telemetry, except its scheduler, of which readers get a snapshot. Threads read it while the
    loop runs: a table is copied as a whole before it is read, and the tables are of about the same moment.
    """

    config: SchedulerConfig
    statistics: Statistics
    """What was read out of its steps."""
    accounting: Accounting
    """What the kernel says."""
    health: Health
    """What was found of blocks."""
    faults: Faults
    """What could not be looked after."""
