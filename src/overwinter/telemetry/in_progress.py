"""The records of open requests, runs in progress and live workers, which a `Tracker` maintains."""

from collections.abc import Container
from typing import Generic, NamedTuple, TypeVar

import msgspec

from overwinter.core.actions import Start, StartWorker
from overwinter.core.ids import FunctionId, RunId, Seconds, WorkerId
from overwinter.telemetry.tally import Tally

T = TypeVar("T", bound=Tally)


class OpenRequest(msgspec.Struct, Generic[T], eq=False):
    """A request that has no answer yet."""

    tally: T
    arrived: Seconds
    caller: tuple[WorkerId, RunId] | None = None
    """The run of a handler that made it."""
    asked: T | None = None
    """The tally of its function, if the request is not counted there."""
    last_slice: int = 0
    """The slice of the program for which it was last sent to a worker or a device; 1 for the whole program too, 0 if it
    was not sent yet.
    """


class OpenRun(msgspec.Struct, Generic[T], eq=False):
    """A run that has not ended."""

    begun: Seconds
    function: FunctionId
    """The function for which the run began; requests of other functions may share it."""
    requests: dict[T, int]
    """The number of requests of each function."""
    batch: int
    """The number of all requests."""
    at_full_concurrency: bool = False
    """Whether all requests are of one function, all slots of the worker were in use at its start, and no device ran the
    program for it.
    """


class WorkerCost(NamedTuple):
    """One bound function's part of the cost of a worker, apart from runs and binds: its lifetime, its idle cores, and
    its memory over time.
    """

    worker_s: float
    idle_core_s: float
    private_byte_s: float

    def since(self, before: "WorkerCost") -> "WorkerCost":
        """The cost since `before`."""
        return WorkerCost(
            self.worker_s - before.worker_s,
            self.idle_core_s - before.idle_core_s,
            self.private_byte_s - before.private_byte_s,
        )


class LiveWorker(Generic[T]):
    """A worker, from its start to its end."""

    __slots__ = (
        "_cost",
        "_cost_before",
        "binds",
        "bound",
        "busy_at_update",
        "busy_s",
        "busy_since",
        "concurrency",
        "cores",
        "function",
        "nbytes",
        "run_cores",
        "runs",
        "since",
        "start",
        "stopping",
        "tally",
        "trial_tally",
        "updated",
        "wake_began",
        "warm",
        "warm_up",
    )

    def __init__(
        self,
        tally: T,
        action: StartWorker,
        start: Start,
        wake_began: Seconds,
        now: Seconds,
        trial_tally: T | None = None,
    ) -> None:
        self.tally = tally
        """The tally of the function for which it was started."""
        self.trial_tally = trial_tally
        """If it was started to try a version: the tally that is charged instead, until it serves a request of that
        function.
        """
        self.function = action.function
        self.warm_up = action.warm_up
        """Whether its start included a run of the program on zeros."""
        self.cores, self.concurrency = action.cores, action.concurrency
        self.run_cores = max(1, action.cores // action.concurrency)
        self.start = start
        self.wake_began = wake_began
        """When the load of its blocks began, if they had to be loaded; otherwise its start."""
        self.since = self.busy_since = now
        self.updated = now
        """The time up to which `_cost` is computed."""
        self.bound: dict[FunctionId, T] = {action.function: tally}
        """The functions that it has bound. They share its cost apart from that of runs and binds."""
        self.runs: dict[RunId, OpenRun[T]] = {}
        """The runs in progress."""
        self.binds: dict[FunctionId, Seconds] = {}
        """When each bind in progress began."""
        self.busy_s = self.busy_at_update = 0.0
        """`busy_s`: the seconds in which it ran or bound something, until it was last idle. `busy_at_update`:
        `total_busy_s` at `updated`.
        """
        self.nbytes = 0.0
        """The private memory."""
        self._cost = WorkerCost(0.0, 0.0, 0.0)
        """The cost up to `updated` for one function that was bound all the time."""
        self._cost_before = {action.function: self._cost}
        """`_cost` when each function was bound or last charged: the function is charged for the difference. So
        `begin_bind` need not charge the functions that are already bound.
        """
        self.stopping = self.warm = False
        """`stopping`: whether it is being stopped. `warm`: whether it has completed a run of requests, so that no
        further run has the cost of the first one.
        """

    @property
    def is_busy(self) -> bool:
        """Whether it runs or binds something."""
        return bool(self.runs) or bool(self.binds)

    @property
    def part_bytes(self) -> int:
        """Return the private memory divided equally among its functions."""
        return int(self.nbytes / len(self.bound))

    def serve(self, tallies: Container[T], now: Seconds) -> None:
        """A run for these functions begins: if one of them is the function that the worker was started to try, that
        function is charged from now on.
        """
        if self.trial_tally is not None and self.tally in tallies:
            self.charge_all(now)
            self.trial_tally = None

    def begin_bind(self, function: FunctionId, tally: T, now: Seconds) -> None:
        """Begin to bind a further function."""
        self.set_memory(self.nbytes, now)
        self.bound[function] = tally
        self._cost_before[function] = self._cost
        if not self.is_busy:
            self.busy_since = now
        self.binds[function] = now

    def end_bind(self, function: FunctionId, now: Seconds) -> None:
        """End a bind, successful or not; the function is charged for its time."""
        began = self.binds.pop(function, None)
        if began is None:
            return
        tally = self.bound[function]
        tally.binds += 1
        tally.bind_s += now - began
        tally.core_s += now - began
        if not self.is_busy:
            self.busy_s += now - self.busy_since

    def unbind(self, function: FunctionId, now: Seconds) -> None:
        """Unbind a function from the worker. The worker's last function continues to be charged."""
        self.set_memory(self.nbytes, now)
        if len(self.bound) > 1 and function in self.bound:
            tally = self.bound.pop(function)
            self._charge(tally, self._cost.since(self._cost_before.pop(function)))

    def total_busy_s(self, now: Seconds) -> float:
        """Return the seconds in which it ran or bound something, including operations in progress."""
        return self.busy_s + (now - self.busy_since if self.is_busy else 0.0)

    def set_memory(self, nbytes: float, now: Seconds) -> None:
        """Set the private memory from now on."""
        self._cost = self._cost_until(now)
        self.updated, self.busy_at_update, self.nbytes = now, self.total_busy_s(now), nbytes

    def uncharged(self, now: Seconds) -> list[tuple[T, WorkerCost]]:
        """Return what each of its functions is not charged for yet: equal parts of its cost in the time in which the
        function was bound.
        """
        # Other threads call this too. A function that is bound meanwhile may not be in `_cost_before` yet.
        cost, before = self._cost_until(now), self._cost_before
        return [
            (self._charged(tally), cost.since(before.get(function, cost)))
            for function, tally in list(self.bound.items())
        ]

    def charge_all(self, now: Seconds) -> None:
        """Charge each function for its part of the cost."""
        self.set_memory(self.nbytes, now)
        for function, tally in self.bound.items():
            self._charge(tally, self._cost.since(self._cost_before[function]))
        self._cost_before = dict.fromkeys(self.bound, self._cost)

    def _charge(self, tally: T, cost: WorkerCost) -> None:
        charged = self._charged(tally)
        charged.worker_s += cost.worker_s
        charged.worker_core_s += cost.worker_s * self.cores
        charged.idle_core_s += cost.idle_core_s
        charged.private_byte_s += cost.private_byte_s

    def _charged(self, tally: T) -> T:
        """The tally that is charged for a function of this tally."""
        return self.trial_tally if self.trial_tally is not None and tally is self.tally else tally

    def _cost_until(self, now: Seconds) -> WorkerCost:
        passed, sharers, cost = now - self.updated, len(self.bound), self._cost
        idle = passed - (self.total_busy_s(now) - self.busy_at_update)
        return WorkerCost(
            cost.worker_s + passed / sharers,
            cost.idle_core_s + idle * self.cores / sharers,
            cost.private_byte_s + passed * self.nbytes / sharers,
        )
