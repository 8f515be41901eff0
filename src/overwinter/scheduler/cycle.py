"""The context of a scheduler: the tables, the ledger, the timers and the policies, which last as long as the scheduler,
and the time and the actions of the event that is handled now.

Each event sets the time and clears the actions. Those functions of this package that need the context take it as their
first argument.
"""

from itertools import count

from overwinter.core.actions import Action, Decision, Explanation
from overwinter.core.config import WORKERS_MOST, SchedulerConfig
from overwinter.core.ids import FunctionId, Seconds, WorkerId
from overwinter.core.policies import policy_named
from overwinter.scheduler.ledger import Ledger
from overwinter.scheduler.policies import batching
from overwinter.scheduler.policies.scaling import exact
from overwinter.scheduler.policies.scaling.names import SCALERS
from overwinter.scheduler.policies.scaling.predictors import PREDICTORS
from overwinter.scheduler.pool import Device, Pool
from overwinter.scheduler.resources import Resources
from overwinter.scheduler.state import Function, State
from overwinter.scheduler.timers import Timers

ACTIONS_MAX = 256
"""The most actions of a step before it leaves what can wait to the next one: thousands of requests may expire together.
"""


class Cycle:
    """The data that the functions of this package share; nothing here decides."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = policy_named(config.policy)
        if self.policy.scaling == "exact":
            exact.require_scipy()
        self.scaler = SCALERS[self.policy.scaling]
        self.predict = None if self.policy.rate == "oracle" else PREDICTORS[self.policy.rate]
        self.batching = batching.RULES[self.policy.batching]
        self.cores = config.cores or 1
        self.workers_max = config.workers_max or WORKERS_MOST
        self.orders_cores = self.policy.order == "due-time" and config.cores is not None
        """Whether runs, binds and starts may have to wait for a core; if not, the kernel shares the cores among all."""
        self.state = State(pool=Pool({each.name: Device(each) for each in config.devices}))
        self.resources = Resources(config, self.policy)
        self.ledger = Ledger(self.resources)
        self.timers = Timers()
        self.run_ids, self.load_ids, self.bind_ids = count(1), count(1), count(1)
        self.last_worker = WorkerId(0)
        """The id of the last process: workers, executors and processes forked ahead are numbered together."""
        self.eviction_clock = 0.0
        """The highest value of an idle worker that was stopped for others (the clock of GreedyDual)."""
        self.ahead_due = False
        """Whether the processes forked ahead need a check."""
        self.ahead_after = Seconds(0.0)
        """No process is forked ahead before this time."""
        self.now = Seconds(0.0)
        self.actions: list[Action] = []
        self.changed: dict[FunctionId, bool] = {}
        """Functions whose want may have changed; True: a core is already reserved for the function."""
        self.cores_changed = False
        """Whether a core became free, or the queue for cores may have changed."""
        self.capacity_changed = False
        """Whether a worker ended or may be stopped, or the queue for capacity may have changed."""
        self.bytes_changed = False
        """Whether bytes of a host store are or may become free, or the queue for them has changed."""
        self.devices_changed = False
        """Whether a device is or may become free, or the functions that could use one have changed."""
        self.eviction_work = 0
        """The work of this step for evictions from the host stores (retention.py)."""
        self.current: FunctionId | None = None
        """The function that is being handled, if there is one."""

    def begin(self, now: Seconds) -> None:
        """Begin to handle the next event."""
        self.now, self.actions, self.current, self.eviction_work = now, [], None, 0
        self.cores_changed = self.capacity_changed = self.bytes_changed = self.devices_changed = False

    @property
    def is_long(self) -> bool:
        """Whether the step has so many actions that the next one, which follows at once, does what can wait."""
        return len(self.actions) > ACTIONS_MAX

    def mark(self, function: Function, has_core: bool = False) -> None:
        """Mark a function whose want may have changed; one that was removed is ignored. `has_core`: the core of its
        ended start or bind is reserved until it is handled.
        """
        id_ = function.spec.id
        if has_core:
            self.changed[id_] = True
        else:
            self.changed.setdefault(id_, False)

    def explain(self, function: Function, what: Decision, why: str) -> None:
        """Record the reason of a decision, for the command `explain`."""
        self.actions.append(Explanation(function.spec.id, what, why))
