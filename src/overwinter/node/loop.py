"""The one owner of the scheduler: events in, actions out, each step into the journal and to those who read steps.

`post` may be called from any callback of the node's event loop, never from another thread. An event posted
while another is handled waits for its turn, so a step is never inside a step.
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
    """Whoever carries actions out. It must not block: what takes long comes back as an event."""

    def carry_out(self, action: Action) -> None:
        """Begin what the action asks for."""
        ...


class Loop:
    """Feeds events to the scheduler, one after another, and hands its actions to `effects`.

    Readers see each step soon afterwards, in order: a caller's answer does not wait for what is counted of it.
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
        """Let the scheduler know what happened."""
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
