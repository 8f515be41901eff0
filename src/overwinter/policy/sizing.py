"""How many bodies a function should have, and of which shape: the periodic look, and what a wake asks for.

The rate is counted here and predicted by name; the decision itself is a scaler of `scaling/`.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from overwinter.core.config import MindConfig
from overwinter.core.ids import Seconds
from overwinter.core.profile import Shape
from overwinter.policy.containment import asked
from overwinter.policy.scaling import exact
from overwinter.policy.scaling.demand import Demand, Scaled, Standing
from overwinter.policy.scaling.names import SCALERS
from overwinter.policy.scaling.predictors import PREDICTORS
from overwinter.policy.state import Body, Function
from overwinter.policy.waking import Waking

BURST_S = 0.25
"""A rate is not measured over less than this."""
LOW_RATE = 1e-3


class Sizing(Waking):
    """Adds the number of bodies to waking."""

    def __init__(self, config: MindConfig) -> None:
        super().__init__(config)
        if self.policy.scaling == "exact":
            exact.require()
        self._scaler = SCALERS[self.policy.scaling]
        self._predict = None if self.policy.rate == "oracle" else PREDICTORS[self.policy.rate]

    def _count(self, function: Function, now: Seconds) -> None:
        """One request more; the first after a silence begins a period."""
        function.arrivals += 1
        if function.tick_at is None:
            function.tick_at = Seconds(now + self.policy.period_s)
            self._alarms.watch(function.spec.id, function.tick_at)

    def _tick(self, function: Function, now: Seconds) -> None:
        """A period ended: compare what comes with what the bodies can do."""
        function.rates.append(function.arrivals / self.policy.period_s)
        del function.rates[: -self.policy.history]
        function.arrivals = 0
        function.tick_at = None
        if function.state in ("waking", "awake") and function.bodies and function.speeds.points:
            self._resize(function, asked(self.state, function, Scaled(), self._by_rate, function, now), now)
        if function.bodies or any(function.rates):
            function.tick_at = Seconds(now + self.policy.period_s)

    def _by_rate(self, function: Function, now: Seconds) -> Scaled | None:
        """What a scaler says of the rate expected; None: it need not be asked."""
        rate = self._expected(function)
        if self._needs_first_alone(function, rate):
            return None
        return self._scaler(self._demand(function, rate, now))

    def _expected(self, function: Function) -> float:
        if self._predict is None:
            return function.foretold or 0.0
        return self._predict(function.rates) if function.rates else 0.0

    def _resize(self, function: Function, scaled: Scaled | None, now: Seconds) -> None:
        if scaled is None:
            return
        self._tell_effort(function, scaled.best_effort)
        if scaled.start and now >= function.rest_until and function.blocks == "present":
            started = self._start(function, scaled.start, now)
            if started:
                self._decide(function, "scale-out", self._told(function, f"{started} more"))
        for worker in [worker for worker in scaled.stop if worker in function.bodies]:
            self._retire(self.state.bodies[worker], now)
        if scaled.stop:
            self._decide(function, "scale-in", self._told(function, f"{len(scaled.stop)} fewer"))

    def _told(self, function: Function, change: str) -> str:
        shapes = [self.state.bodies[worker].point.shape for worker in function.bodies]
        bodies = ", ".join(f"c={shape.cores} b={shape.batch} p={shape.concurrency}" for shape in shapes)
        return f"{change}, expecting {self._expected(function):.2f} requests/s; bodies: {bodies}"

    def _tell_effort(self, function: Function, best_effort: bool) -> None:
        if best_effort and not function.best_effort:
            fastest = min(point.latency_s for point in function.speeds.points)
            slo_ms = function.spec.settings.slo_ms
            why = f"no configuration keeps {slo_ms:g} ms here: the fastest takes {fastest * 1000:.1f} ms"
            self._decide(function, "best-effort", f"{why}; it is served as fast as it can be")
        function.best_effort = best_effort

    def _wanted_shapes(self, function: Function, now: Seconds) -> Sequence[Shape]:
        """For what waits now: what a scaler says of the rate at which it came, and at least one body."""
        usual = (function.speeds.usual.shape,)
        if not function.speeds.points or function.on_trial or not function.queue:
            return usual
        rate = max(self._expected(function), self._burst(function, now))
        if not self.state.has_body(function):
            usual = (self._first(function, now),)
            if rate <= function.speeds.first_rate and self._has_room(function, function.speeds.point(*usual)):
                return usual
        else:
            rate += self._backlog(function)
        scaled = self._scaler(self._demand(function, rate, now))
        self._tell_effort(function, scaled.best_effort)
        return scaled.start or usual

    def _first(self, function: Function, now: Seconds) -> Shape:
        """The shape of the only body at a low rate on an empty node, asked for once: most functions never need
        another, and what there is no room for at the moment must not be remembered.
        """
        speeds = function.speeds
        if speeds.first is None:
            demand = self._demand(function, LOW_RATE, now)
            limit = self.config.memory_bytes
            scaled = self._scaler(
                msgspec.structs.replace(
                    demand,
                    bodies=(),
                    free_cores=self.cores,
                    free_bodies=min(function.spec.settings.max_bodies, self.config.bodies_max),
                    free_bytes=inf if limit is None else limit,
                )
            )
            self._tell_effort(function, scaled.best_effort)
            speeds.first = scaled.start[0] if scaled.start else speeds.usual.shape
            point = speeds.point(speeds.first)
            alone = speeds.latency_s(point, 1)
            if alone and not scaled.best_effort:
                speeds.first_rate = self.policy.alpha * point.concurrency / alone
        return speeds.first

    def _needs_first_alone(self, function: Function, rate: float) -> bool:
        """Whether the function has just the body that it needs."""
        if len(function.bodies) != 1 or rate > function.speeds.first_rate:
            return False
        return self.state.bodies[function.bodies[0]].point.shape == function.speeds.first

    def _burst(self, function: Function, now: Seconds) -> float:
        """Requests per second in the period under way, as far as it has gone."""
        if function.tick_at is None:
            return 0.0
        begun = function.tick_at - self.policy.period_s
        return function.arrivals / max(now - begun, BURST_S)

    def _backlog(self, function: Function) -> float:
        """The rate at which what waits would have to be worked off to be in time, or within a period."""
        slo_ms = function.spec.settings.slo_ms
        return len(function.queue) / (self.policy.period_s if slo_ms is None else slo_ms / 1000)

    def _demand(self, function: Function, rate: float, now: Seconds) -> Demand:
        state, settings, speeds = self.state, function.spec.settings, function.speeds
        alive = [body for worker in function.bodies if (body := state.bodies[worker]).state != "stopping"]
        # A body may be older than the last measurement of its shape.
        measured = {point.shape: point for point in speeds.points}
        standing = tuple(
            Standing(body.id, measured.get(body.point.shape, body.point), _load(body), body.since)
            for body in alive
            if not body.retires
        )
        if self.policy.reserves:
            free_cores = self.cores - state.reserved_cores
        else:
            # Idle bodies of others take no core, and this function's own share theirs with nobody but each other.
            free_cores = self.cores - sum(body.point.cores for body in alive)
        limit = self.config.memory_bytes
        return Demand(
            rate=rate,
            slo_s=None if settings.slo_ms is None else settings.slo_ms / 1000,
            points=speeds.points,
            bodies=standing,
            free_cores=max(0, free_cores),
            free_bodies=max(0, min(settings.max_bodies, self.config.bodies_max) - len(function.bodies)),
            free_bytes=inf if limit is None else max(0, limit - state.body_bytes),
            weight_bytes=speeds.weight_bytes,
            missing_bytes=0 if function.blocks == "present" else state.residents(function).missing(function.sizes),
            macs=speeds.macs,
            shared=self.policy.shares,
            alpha=self.policy.alpha,
            beta=self.policy.beta,
            gamma=self.policy.core_mib * (1 << 20),
        )

    def _keeps_up(self, function: Function) -> bool:
        """Whether the bodies keep up with what comes even if each request runs alone."""
        need = function.rates[-1] / self.policy.alpha if function.rates else 0.0
        for worker in function.bodies:
            if need <= 0:
                return True
            body = self.state.bodies[worker]
            latency = function.speeds.latency_s(body.point, 1)
            if body.state in ("idle", "busy") and latency:
                need -= body.point.concurrency / latency
        return need <= 0


def _load(body: Body) -> float:
    """Share of a body's slots in use."""
    return len(body.runs) / body.point.concurrency
