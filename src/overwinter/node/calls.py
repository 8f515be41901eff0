"""The open requests and loads of callers. Each request or load becomes an event, and an action answers it."""

import asyncio
import itertools
from collections.abc import Callable
from math import inf
from typing import Any

from overwinter.core.actions import WARMEST_FIRST, LoadFinished, Refuse, Reply, Start
from overwinter.core.call import Call, Result
from overwinter.core.errors import ConflictError, NotFoundError, OverwinterError, WorkerError, error_named
from overwinter.core.events import Arrived, Cancelled, Event, LoadAsked
from overwinter.core.ids import FunctionId, RequestId, Seconds, split_id, whole_names
from overwinter.core.tensor import Tensor
from overwinter.node import clock
from overwinter.node.functions import DeployedFunction
from overwinter.node.quarantine import Quarantine
from overwinter.scheduler.published import Published


class Payload:
    """A request's tensors, while the scheduler handles the request by its id."""

    def __init__(self, inputs: list[Tensor], result: asyncio.Future[Result], call: Call | None = None) -> None:
        """`call`: the request; None: it has no timeout, and no memory is reserved for its outputs."""
        self.inputs = inputs
        self.result = result
        self.call = call
        self.arrived = clock.now()
        self.values: list[Tensor] = []
        """What slices of its program have computed, and later ones take."""
        self.outputs: list[Tensor] = []
        self.start: Start = "warm"
        """The coldest start of its calls of a program on the pool."""
        self._reserved = 0

    def reserve(self, nbytes: int) -> None:
        """Reserve memory for outputs before they are copied, in addition to the kept results of slices. What was
        reserved earlier for this request counts, so a retry reserves only the difference. Raises TooLargeError or
        OverloadedError if the caller may not hold so much.
        """
        lacking = sum(len(tensor.data) for tensor in self.values) + nbytes - self._reserved
        if lacking > 0 and self.call is not None and self.call.reserve is not None:
            self.call.reserve(lacking)
            self._reserved += lacking

    @property
    def expires_at(self) -> float:
        """When its timeout ends; infinite if it has none of its own."""
        timeout_s = None if self.call is None else self.call.timeout_s
        return inf if timeout_s is None else self.arrived + timeout_s


class Calls:
    """The open requests and loads of callers. Used on the event loop's thread only."""

    def __init__(self, post: Callable[[Event], None], published: Published, quarantine: Quarantine) -> None:
        self._post = post
        self._published = published
        self._quarantine = quarantine
        self._loop = asyncio.get_running_loop()
        self._last = 0
        self.payloads: dict[RequestId, Payload] = {}
        self._loads: dict[FunctionId, set[asyncio.Future[None]]] = {}

    async def infer(self, call: Call) -> Result:
        """Run a function; wakes it if needed. Raises OverwinterError."""
        self._last += 1
        request = RequestId(self._last)
        future: asyncio.Future[Result] = self._loop.create_future()
        self.payloads[request] = payload = Payload(call.inputs, future, call)
        deadline = None if call.timeout_s is None else Seconds(payload.expires_at)
        self._post(Arrived(request, call.name, call.version, deadline, call.priority, call.due, call.caller))
        try:
            return await future
        except asyncio.CancelledError:
            self.payloads.pop(request, None)
            self._post(Cancelled(request))
            raise

    async def load(self, id_: FunctionId) -> None:
        """Wake a function, also one that is unloaded or out of service; raise an error if it does not wake."""
        await self.ask(id_, LoadAsked(id_))

    async def wake(self, function: DeployedFunction) -> None:
        """Wake a function for the node itself, and raise an error if it does not wake. An unloaded function
        stays unloaded.
        """
        known = self._published.function(function.id, clock.now())
        if known is None:
            raise NotFoundError(f"{function.id} was removed meanwhile")
        if known.state == "unloaded":
            raise ConflictError(f"{function.id} was unloaded meanwhile: load it first")
        await self.load(function.id)

    async def ask(self, id_: FunctionId, event: Event) -> None:
        """Post an event, and wait for the load that it causes; raise the load's error."""
        future: asyncio.Future[None] = self._loop.create_future()
        waiting = self._loads.setdefault(id_, set())
        waiting.add(future)
        self._post(event)
        try:
            await future
        finally:
            waiting.discard(future)

    def busy(self) -> bool:
        """Whether any request is open, any worker or device has an operation in progress, or a worker is stopping."""
        return bool(self.payloads) or self._published.busy()

    def reply(self, action: Reply) -> None:
        """Answer a request."""
        payload = self.payloads.pop(action.request, None)
        if payload is not None and not payload.result.done():
            name, version = split_id(action.function)
            start = max(action.start, payload.start, key=WARMEST_FIRST.index)
            payload.result.set_result(Result(name, version, payload.outputs, start))

    def refuse(self, action: Refuse) -> None:
        """Refuse a request."""
        payload = self.payloads.pop(action.request, None)
        if payload is not None and not payload.result.done():
            # Callers do not know the parts of a function.
            message = whole_names(action.message, action.function)
            payload.result.set_exception(error_named(action.error)(message, action.retry_after_s))

    def load_finished(self, action: LoadFinished) -> None:
        """Report the result of a load to the callers that wait for it."""
        error: OverwinterError | None = None
        if action.error is not None:
            error = error_named(action.error)(whole_names(action.reason))
        else:
            self._quarantine.forget(action.function)
        for future in self._loads.pop(action.function, ()):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def close(self) -> None:
        """Fail all requests and loads, because the node stops."""
        waiting: list[asyncio.Future[Any]] = [payload.result for payload in self.payloads.values()]
        waiting += itertools.chain.from_iterable(self._loads.values())
        for future in waiting:
            if not future.done():
                future.set_exception(WorkerError("the node is stopping"))
        self.payloads.clear()
        self._loads.clear()
