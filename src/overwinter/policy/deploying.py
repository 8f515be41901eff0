"""How do functions come and go, and how are they loaded, unloaded and put away?"""

import msgspec

from overwinter.core.actions import Announce
from overwinter.core.events import Deployed, Profiled
from overwinter.core.function import FunctionSpec, Settings
from overwinter.core.ids import FunctionId, Seconds
from overwinter.policy import containment, reclaiming
from overwinter.policy.lifecycles import step_blocks, step_function
from overwinter.policy.serving import Serving
from overwinter.policy.speeds import Speeds
from overwinter.policy.state import Function


class Deploying(Serving):
    """Adds the life of a function as its owner sees it."""

    def _known(self, spec: FunctionSpec, on_trial: bool) -> Function:
        sizes = {blob.address: blob.nbytes for blob in spec.blobs}
        return Function(spec, on_trial, self._speeds(spec), sizes)

    def _speeds(self, spec: FunctionSpec) -> Speeds:
        try:
            return Speeds(spec, self.policy, self.config.memory_bytes, self.config.cores)
        except containment.FAILURES as error:
            containment.remember(self.state, spec.id, error)
            return Speeds(msgspec.structs.replace(spec, profile=None, settings=Settings()), self.policy)

    def _profiled(self, event: Profiled) -> None:
        function = self.state.functions.get(event.function)
        if function is not None:
            function.spec = msgspec.structs.replace(function.spec, profile=event.profile)
            before, function.speeds = function.speeds, self._speeds(function.spec)
            function.speeds.run_s = before.run_s
            function.awaits = None

    def _deployed(self, event: Deployed, now: Seconds) -> None:
        self.in_hand = event.function.id
        function = self._known(event.function, event.on_trial)
        before = self.state.functions.get(function.spec.id)
        if before is not None:
            self._forget(before, "it was deployed anew", now)
        self.state.functions[function.spec.id] = function
        self.state.tenant(function.spec.tenant).functions += 1
        function.used = now
        if event.resident:
            function.blocks = step_blocks(step_blocks(function.blocks, "stage"), "staged")
            self.state.residents(function).hold(function.sizes)
            self.state.kept[function.spec.id] = None
        if event.quarantined:
            self.state.faults[function.spec.id] = event.quarantined
        if function.on_trial:
            self._wake(function, now)
        else:
            self._publish(function)

    def _removed(self, id_: FunctionId, now: Seconds) -> None:
        function = self.state.functions.get(id_)
        if function is not None:
            self._forget(function, "it was removed", now)

    def _load(self, id_: FunctionId, now: Seconds) -> None:
        function = self.state.functions.get(id_)
        if function is None:
            self._actions.append(Announce(id_, "NotFoundError", f"no function {id_!r} is deployed here"))
            return
        if function.state == "unloaded":
            function.state = step_function(function.state, "load")
            for body in map(self.state.bodies.__getitem__, function.bodies):
                # One that is another tenant's by right goes all the same.
                if not body.retires:
                    self._stay(body)
            if function.fault:
                function.fault, function.speeds = "", self._speeds(function.spec)
            if self.state.is_ready(function):
                function.state = step_function(step_function(function.state, "wake"), "ready")
        if function.state == "awake":
            self._actions.append(Announce(id_))
            return
        function.announce = True
        if function.state == "asleep":
            self._wake(function, now)

    def _unload(self, id_: FunctionId, now: Seconds) -> None:
        function = self.state.functions.get(id_)
        if function is None or function.on_trial or function.state == "unloaded":
            return
        self._put_away(function, "ConflictError", f"function {id_} was unloaded while it was loaded", now)

    def _put_away(self, function: Function, error: str, reason: str, now: Seconds) -> None:
        """Give back all that it holds, and answer no more until it is loaded; `reason`: for whoever was loading it."""
        self._refuse_unloaded(function)
        if function.announce:
            function.announce = False
            self._actions.append(Announce(function.spec.id, error, reason))
        self._let_go(function, now)
        function.state = step_function(function.state, "unload")
        self._watch(function, now)

    def _refuse_unloaded(self, function: Function) -> None:
        error, message = self._why_unloaded(function)
        self._refuse_queue(function, error, message, self.config.retry_after_min_s)

    def _contain(self, now: Seconds) -> None:
        """Put away the functions on which a policy failed in this step."""
        while self.state.faults:
            id_ = next(iter(self.state.faults))
            fault = self.state.faults.pop(id_)
            function = self.state.functions.get(id_)
            if function is not None:
                self._quarantine(function, containment.told(id_, fault), now)

    def _quarantine(self, function: Function, fault: str, now: Seconds) -> None:
        self._gave_bytes = True
        self._decide(function, "quarantine", fault)
        if function.on_trial:
            self._failed(function, "QuarantineError", fault, now)
            return
        function.fault = fault
        if function.state != "unloaded":
            self._put_away(function, "QuarantineError", fault, now)

    def _leave_at(self, function: Function) -> Seconds | None:
        """When the keep-alive window of its blocks ends, if there is one and nothing holds them."""
        if self.config.host_keep_alive_s is None or not reclaiming.may_leave(function):
            return None
        return Seconds(function.used + self.config.host_keep_alive_s)

    def _watch_leave(self, function: Function) -> None:
        leave_at = self._leave_at(function)
        if leave_at is not None:
            self._alarms.watch(function.spec.id, leave_at)

    def _watch(self, function: Function, now: Seconds) -> None:
        """Ring for the next of all that waits for a time."""
        times = [request.deadline for request in self.state.open_requests(function)]
        if function.rest_until > now:
            times.append(function.rest_until)
        times += [at for at in (function.batch_at, function.tick_at, self._leave_at(function)) if at is not None]
        if times:
            self._alarms.watch(function.spec.id, min(times))

    def _prove(self, function: Function) -> None:
        """A body of the function runs: a new version answers for its name from now on."""
        if function.on_trial:
            self._publish(function)
        function.on_trial = function.announce = False
        self._actions.append(Announce(function.spec.id))

    def _publish(self, function: Function) -> None:
        versions = self.state.versions.setdefault(function.spec.name, [])
        versions.append(function.spec.version)
        self.state.proven[function.spec.tenant, function.spec.program] += 1
        versions.sort()
