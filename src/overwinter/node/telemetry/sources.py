"""What do metrics, usage, `top` and `explain` look at?"""

from typing import NamedTuple

from overwinter.core.config import SchedulerConfig
from overwinter.node.faults import Faults
from overwinter.node.telemetry.accounting import Accounting
from overwinter.node.telemetry.statistics import Statistics
from overwinter.store.host import Health


class Sources(NamedTuple):
    """All that a node knows of what it does, but for its scheduler, of which readers get a snapshot. Looked at from
    threads while the loop goes on: a table is copied whole before it is gone through, and what is seen is true of about
    the same moment.
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
