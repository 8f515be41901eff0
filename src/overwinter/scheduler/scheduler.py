"""The scheduler of a node: `handle(event, now) -> [Action]`, pure, the only writer of its tables.

Facts come first, then one place that assigns resources. An event changes the tables (facts.py, due.py). Each changed
function is asked what it wants (wants.py). What fits begins, other functions join a queue, and the queues advance
(admission.py, order.py, victims.py). Only facts are stored, so the next action never depends on how a state was
reached.
"""

from overwinter.core.actions import Action, SetAlarm
from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Alarm, Event
from overwinter.core.ids import FunctionId, Seconds
from overwinter.scheduler import ahead, device_ahead, due, facts, replicas, slices
from overwinter.scheduler.admission import admit
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.functions import quarantine
from overwinter.scheduler.resources import Resources
from overwinter.scheduler.state import State


class Scheduler:
    """Decides for one node. Deterministic: the same events at the same times give the same actions."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.cycle = Cycle(config)

    @property
    def state(self) -> State:
        """The tables. Other modules must not write to them."""
        return self.cycle.state

    @property
    def resources(self) -> Resources:
        """The resources, and how much of each is taken."""
        return self.cycle.resources

    @property
    def current(self) -> FunctionId | None:
        """The function that is being handled, if there is one."""
        return self.cycle.current

    def handle(self, event: Event, now: Seconds) -> list[Action]:
        """Return the actions for `event`, in order."""
        cycle = self.cycle
        cycle.begin(now)
        facts.apply(cycle, event)
        if isinstance(event, Alarm):
            due.check(cycle)
        elif cycle.timers.alarm <= now:
            due.check_queues(cycle)
        admit(cycle)
        while cycle.state.faults:
            quarantine(cycle)
            admit(cycle)
        if cycle.ahead_due:
            ahead.check(cycle)
        if cycle.state.pool.executors:
            slices.check(cycle)
            replicas.check(cycle)
            device_ahead.check(cycle)
        alarm = cycle.timers.next_alarm()
        if alarm is not None:
            cycle.actions.append(SetAlarm(alarm))
        return cycle.actions
