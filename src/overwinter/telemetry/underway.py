"""Open requests, runs in progress and live workers, as the tracker counts them."""

from collections.abc import Container
from typing import Generic, NamedTuple, TypeVar

import msgspec

from overwinter.core.actions import Start, StartWorker
from overwinter.core.ids import FunctionId, RunId, Seconds
from overwinter.telemetry.tally import Tally

T = TypeVar("T", bound=Tally)


class OpenRequest(msgspec.Struct, Generic[T], eq=False):
    """A request that has no answer yet."""

    tally: T
    arrived: Seconds
    ran: bool = False


class OpenRun(msgspec.Struct, Generic[T], eq=False):
    """A run that has not ended, with the number of requests of each function."""

    begun: Seconds
    function: FunctionId
    """The one that leads."""
    requests: dict[T, int]
    """By function; the one that leads comes first."""
    batch: int
    """All of them."""
    full: bool = False
    """Known to be of one function, and the last that the worker may have at once."""


class WorkerCost(NamedTuple):
    """The cost of a worker outside its runs."""

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


class LivingWorker(Generic[T]):
    """A worker, from its start to its end."""

    __slots__ = (
        "_paid",
        "_paid_before",
        "asked",
        "binds",
        "bound",
        "busy_s",
        "busy_since",
        "busy_weighed",
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
        "trial",
        "tried",
        "warm",
        "weighed",
    )

    def __init__(
        self, tally: T, action: StartWorker, start: Start, asked: Seconds, now: Seconds, trial: T | None = None
    ) -> None:
        self.tally = tally
        self.trial = trial
        """Who pays in place of its first function, until it serves that: it was started to try a version."""
        self.function = action.function
        self.tried = action.on_trial
        """Whether it had to run once before it was ready."""
        self.cores, self.concurrency = action.cores, action.concurrency
        self.run_cores = max(1, action.cores // action.concurrency)
        self.start = start
        self.asked = asked
        """When the wake began: with the load, if there was one."""
        self.since = self.busy_since = self.weighed = now
        self.bound: dict[FunctionId, T] = {action.function: tally}
        """Which functions it has: they share what it costs while it runs nothing."""
        self.runs: dict[RunId, OpenRun[T]] = {}
        """Under way."""
        self.binds: dict[FunctionId, Seconds] = {}
        """When each bind under way began."""
        self.busy_s = self.busy_weighed = 0.0
        self.nbytes = 0.0
        """Private memory."""
        self._paid = WorkerCost(0.0, 0.0, 0.0)
        """What one of its functions would have paid that had been bound all the time, up to `weighed`."""
        self._paid_before = {action.function: self._paid}
        """Of that, what was before each function was bound: so a bind takes no longer with a hundred others bound."""
        self.stopping = self.warm = False
        """`warm`: it has run, so that what only the first run pays for is paid."""

    @property
    def is_busy(self) -> bool:
        """Whether it runs or binds something."""
        return bool(self.runs) or bool(self.binds)

    @property
    def part_bytes(self) -> int:
        """Private memory, for each of the functions that it has."""
        return int(self.nbytes / len(self.bound))

    def serve(self, tallies: Container[T], now: Seconds) -> None:
        """The worker serves these functions: from now on the function that was tried in it pays."""
        if self.trial is not None and self.tally in tallies:
            self.pay(now)
            self.trial = None

    def begin_bind(self, function: FunctionId, tally: T, now: Seconds) -> None:
        """The worker is instructed to bind a further function."""
        self.weigh(self.nbytes, now)
        self.bound[function] = tally
        self._paid_before[function] = self._paid
        if not self.is_busy:
            self.busy_since = now
        self.binds[function] = now

    def end_bind(self, function: FunctionId, now: Seconds) -> None:
        """It has, or it could not; what that took is the function's."""
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
        """A function is no longer bound in the worker. The last one continues to pay."""
        self.weigh(self.nbytes, now)
        if len(self.bound) > 1 and function in self.bound:
            tally = self.bound.pop(function)
            self._charge(tally, self._paid.since(self._paid_before.pop(function)))

    def busy_until(self, now: Seconds) -> float:
        """Seconds in which it ran or bound something, those of what is under way included."""
        return self.busy_s + (now - self.busy_since if self.is_busy else 0.0)

    def weigh(self, nbytes: float, now: Seconds) -> None:
        """It takes so many bytes from now on."""
        self._paid = self._paid_until(now)
        self.weighed, self.busy_weighed, self.nbytes = now, self.busy_until(now), nbytes

    def owed(self, now: Seconds) -> list[tuple[T, WorkerCost]]:
        """What each of its functions has not paid yet: equal parts of its cost in the time in which it was bound."""
        # Other threads ask, too: what may change meanwhile is taken once.
        paid, before = self._paid_until(now), self._paid_before
        return [
            (self._payer(tally), paid.since(before.get(function, paid))) for function, tally in list(self.bound.items())
        ]

    def pay(self, now: Seconds) -> None:
        """Let all its functions pay."""
        self.weigh(self.nbytes, now)
        for function, tally in self.bound.items():
            self._charge(tally, self._paid.since(self._paid_before[function]))
        self._paid_before = dict.fromkeys(self.bound, self._paid)

    def _charge(self, tally: T, cost: WorkerCost) -> None:
        payer = self._payer(tally)
        payer.worker_s += cost.worker_s
        payer.worker_core_s += cost.worker_s * self.cores
        payer.idle_core_s += cost.idle_core_s
        payer.private_byte_s += cost.private_byte_s

    def _payer(self, tally: T) -> T:
        return self.trial if self.trial is not None and tally is self.tally else tally

    def _paid_until(self, now: Seconds) -> WorkerCost:
        passed, payers, paid = now - self.weighed, len(self.bound), self._paid
        idle = passed - (self.busy_until(now) - self.busy_weighed)
        return WorkerCost(
            paid.worker_s + passed / payers,
            paid.idle_core_s + idle * self.cores / payers,
            paid.private_byte_s + passed * self.nbytes / payers,
        )
