"""The only owner of the scheduler: passes events to it, carries out its actions, and writes each step to the journal
and its readers.

`post` may be called from any callback of the node's event loop, but not from another thread. An event that is posted
while another is handled waits, so steps are never nested.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from overwinter.core.actions import Action
from overwinter.core.events import Event
from overwinter.core.ids import Seconds
from overwinter.core.journal import Journal
from overwinter.node import clock
from overwinter.scheduler.scheduler import Scheduler

Observe = Callable[[Seconds, Event, list[Action]], None]
"""Reads a step; what it does must be quick, and may not post."""


class Effects(Protocol):
    """Carries out actions. It must not block: results of slow actions return as events."""

    def carry_out(self, action: Action) -> None:
        """Begin an action."""
        ...


class Loop:
    """Passes events to the scheduler, one after another, and its actions to `effects`. Readers see each step soon
    afterwards, in order, so that answers do not wait for them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        journal: Journal,
        effects: Effects,
        readers: Sequence[Observe] = (),
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """`failed` hears why a reader could not read on."""
        self._scheduler = scheduler
        self._journal = journal
        self._effects = effects
        self._readers = readers
        self._failed = failed
        self._events: deque[Event] = deque()
        self._unread: list[tuple[Seconds, Event, list[Action]]] = []
        self._turning = False

    def post(self, event: Event) -> None:
        """Pass an event to the scheduler."""
        self._events.append(event)
        if self._turning:
            return
        self._turning = True
        try:
            while self._events:
                self._turn(self._events.popleft())
        finally:
            self._turning = False

    def _turn(self, event: Event) -> None:
        now = clock.now()
        actions = self._scheduler.handle(event, now)
        self._journal.record(now, event, actions)
        if self._readers:
            if not self._unread:
                asyncio.get_running_loop().call_soon(self._read)
            self._unread.append((now, event, actions))
        for action in actions:
            self._effects.carry_out(action)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        try:
            for step in unread:
                for read in self._readers:
                    read(*step)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)
