"""The only owner of the scheduler: passes events to it, carries out its actions, writes each step to the journal,
and passes it to the reader.

`post` may be called from any callback of the node's event loop, but not from another thread. An event that is posted
while another is handled waits, so steps are never nested. If a step fails, the node ends, because the scheduler's state
may be inconsistent. If the reader fails at a step, the node goes on without its figures of that step and of the workers
that the step started.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from overwinter.core.actions import Action
from overwinter.core.errors import OverwinterError
from overwinter.core.events import Event
from overwinter.core.ids import Seconds
from overwinter.core.journal import Journal
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.node.quarantine import Quarantine
from overwinter.scheduler.published import Published
from overwinter.scheduler.scheduler import Scheduler

Observe = Callable[[Seconds, Event, list[Action]], None]
"""Receives each step. It must return quickly, and may not post events."""


class Effects(Protocol):
    """Carries out actions. It must not block: results of slow actions return as events."""

    def carry_out(self, action: Action) -> None:
        """Begin an action."""
        ...

    def close(self) -> None:
        """Fail what callers wait for: nothing is carried out any more."""
        ...


class Loop:
    """Passes events to the scheduler, one after another, and its actions to the effects. Its reader sees each step soon
    afterwards, in order, so that answers do not wait for it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        published: Published,
        journal: Journal,
        effects: Effects,
        read: Observe,
        quarantine: Quarantine,
        faults: Faults,
    ) -> None:
        """`quarantine` gets the function whose event was handled when a step failed; `faults` the reader's failures."""
        self._scheduler = scheduler
        self._published = published
        self._journal = journal
        self._effects = effects
        self._read_step = read
        self._quarantine = quarantine
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._unread: list[tuple[Seconds, Event, list[Action]]] = []
        self._in_step = False
        self.broken: asyncio.Future[None] = self._loop.create_future()
        """The error for which the node must end, once there is one."""

    def post(self, event: Event) -> None:
        """Pass an event to the scheduler; raise OverwinterError if the node has failed."""
        if self.broken.done():
            raise OverwinterError("the node has failed and is stopping")
        self._events.append(event)
        if self._in_step:
            return
        self._in_step = True
        try:
            while self._events:
                self._step(self._events.popleft())
        except Exception as error:  # noqa: BLE001 - the boundary to the scheduler: nothing may continue after it failed
            if self._scheduler.current is not None:
                self._quarantine.add(self._scheduler.current, error)
            self._fail(error)
        finally:
            self._in_step = False

    def _step(self, event: Event) -> None:
        now = clock.now()
        actions = self._scheduler.handle(event, now)
        self._journal.record(now, event, actions)
        for action in actions:
            self._effects.carry_out(action)
        if not self._unread:
            # After the callers whose requests the actions end, so that these send their answers first.
            self._loop.call_soon(self._read)
        self._unread.append((now, event, actions))

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        self._published.publish()
        for step in unread:
            with self._faults.contained("telemetry"):
                self._read_step(*step)

    def _fail(self, error: Exception) -> None:
        """End the node, because the scheduler may not continue after this error."""
        if not self.broken.done():
            self.broken.set_exception(error)
            self._effects.close()
