"""Bounds the memory of all requests together, and queues requests when it is used up.

A request reserves the memory for a body of announced length before the body is read, and releases it when its answer
is sent. A large request waits for this memory, round-robin by caller; memory that was not announced is reserved at once
or refused. A small request never waits: all small ones together are bounded by the number of connections. A part of the
memory is for callers that hold little, so that a few others cannot use all of it.

A caller is the tenant of a token, or without tokens a client's address.
"""

import asyncio
from collections import Counter

from overwinter.core.config import RequestLimits
from overwinter.core.errors import OverloadedError, TooLargeError

MEMORY_DIVISOR = 8
"""The default memory for requests is the available memory, of the machine or the container, divided by this."""
MEMORY_ASSUMED_BYTES = 4 << 30
"""The available memory that is assumed if the system does not report it."""
SMALL_BYTES = 64 << 10
"""A request that needs no more memory than this is accepted even if the memory is in use."""
LITTLE_SHARE = 1 / 128
"""A caller that holds at most this share of the memory holds little."""
RESERVED_SHARE = 1 / 4
"""The share of the memory that is reserved for callers that hold little."""


class _Queue:
    """The reservations that wait, round-robin by caller."""

    def __init__(self) -> None:
        self.waiting: dict[str, dict[asyncio.Future[None], tuple[Reservation, int]]] = {}
        """The reservations of each caller that wait, in order, and the memory that each waits for."""
        self.turns: dict[str, None] = {}
        """The callers whose first waiting reservation may fit into their share, in the order of their turns."""

    def has_earlier(self, caller: str) -> bool:
        """Whether a new reservation of this caller would wait behind others."""
        return bool(self.turns) or caller in self.waiting

    def remove(self, caller: str, granted: asyncio.Future[None]) -> bool:
        """Remove a waiting reservation; False if it waits no more."""
        waiting = self.waiting.get(caller)
        if waiting is None or waiting.pop(granted, None) is None:
            return False
        if not waiting:
            del self.waiting[caller]
            self.turns.pop(caller, None)
        return True


class Budget:
    """The memory of all requests; one caller's share of it is bounded too."""

    def __init__(self, bytes_max: int, caller_share: float, wait_s: float) -> None:
        self.bytes_max = bytes_max
        self._little_bytes = int(bytes_max * LITTLE_SHARE)
        self._reserved_bytes = int(bytes_max * RESERVED_SHARE)
        self.caller_bytes_max = min(int(bytes_max * caller_share), bytes_max - self._reserved_bytes)
        self.wait_s = wait_s
        self.held = 0
        self.held_by: Counter[str] = Counter()
        self._held_by_little = 0
        """What the callers that hold little hold together."""
        self._little, self._large = _Queue(), _Queue()
        """The waiting reservations after which their caller holds little, and the others."""

    def fits(self, caller: str, nbytes: int) -> bool:
        """Whether a caller may reserve this much more."""
        return self._fits_memory(caller, nbytes) and self._fits_share(caller, nbytes)

    def is_available(self, caller: str, nbytes: int) -> bool:
        """Whether a caller may reserve this much more before all that wait."""
        if self._is_little(caller, nbytes):
            is_first = not self._little.has_earlier(caller) and self._may_overtake(nbytes)
        else:
            is_first = not self._large.has_earlier(caller)
        return is_first and self.fits(caller, nbytes)

    def check(self, nbytes: int) -> None:
        """Raise TooLargeError when one request may never reserve this much."""
        if nbytes > max(self.caller_bytes_max, SMALL_BYTES):
            raise TooLargeError(
                f"the request needs {nbytes} bytes of memory, and one caller may hold {self.caller_bytes_max} here: "
                "send less at once, or start the node with more --requests-bytes-max"
            )

    def change(self, caller: str, nbytes: int) -> None:
        """Add `nbytes` to what a caller holds; a negative amount releases memory, which is granted to waiting
        reservations, round-robin by caller.
        """
        held = self.held_by.get(caller, 0) + nbytes
        self.held += nbytes
        self._held_by_little += self._if_little(held) - self._if_little(held - nbytes)
        if held:
            self.held_by[caller] = held
        else:
            self.held_by.pop(caller, None)
        if nbytes < 0 and (self._little.waiting or self._large.waiting):
            self._grant(caller)

    async def wait(self, reservation: "Reservation", nbytes: int) -> None:
        """Wait until this much more memory is reserved; raise OverloadedError after the maximum wait."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._little if self._is_little(reservation.caller, nbytes) else self._large
        queue.waiting.setdefault(reservation.caller, {})[granted] = reservation, nbytes
        self._grant(reservation.caller)
        try:
            async with asyncio.timeout(self.wait_s):
                await granted
        except TimeoutError:
            raise lack_of_memory(nbytes) from None
        finally:
            if queue.remove(reservation.caller, granted):
                # Reservations behind this one may have waited only for it.
                self._grant(reservation.caller)

    def _grant(self, caller: str) -> None:
        """Grant what the memory allows, after this caller released memory or its first waiting reservation changed."""
        for queue in (self._little, self._large):
            if caller in queue.waiting:
                queue.turns.setdefault(caller)
        self._serve(self._little)
        self._serve(self._large)
        if not self._large.turns:
            self._serve(self._little)

    def _serve(self, queue: _Queue) -> None:
        """Grant reservations of a queue. It looks only at the first one of each caller whose turn has come: each
        disconnect calls it, and thousands of reservations may wait.
        """
        while queue.turns:
            caller = next(iter(queue.turns))
            granted, (reservation, nbytes) = next(iter(queue.waiting[caller].items()))
            if granted.done():
                # It was cancelled, and its task has not run since.
                queue.remove(caller, granted)
            elif not self._fits_share(caller, nbytes):
                # The caller's turn comes again when it has released memory.
                del queue.turns[caller]
            elif not self._fits_memory(caller, nbytes) or (queue is self._little and not self._may_overtake(nbytes)):
                # Stop here: otherwise smaller reservations of others could overtake this one forever.
                return
            else:
                del queue.turns[caller]
                queue.remove(caller, granted)
                reservation.take(nbytes)
                granted.set_result(None)
                if caller in queue.waiting:
                    queue.turns[caller] = None

    def _is_little(self, caller: str, nbytes: int) -> bool:
        """Whether a caller holds little if it reserves this much more."""
        return self.held_by.get(caller, 0) + nbytes <= self._little_bytes

    def _if_little(self, held: int) -> int:
        """Return what a caller holds if that is little, otherwise 0."""
        return held if held <= self._little_bytes else 0

    def _may_overtake(self, nbytes: int) -> bool:
        """Whether a caller that holds little may reserve this much before the waiting callers that hold more."""
        return not self._large.turns or self._held_by_little + nbytes <= self._reserved_bytes

    def _fits_memory(self, caller: str, nbytes: int) -> bool:
        if self._is_little(caller, nbytes):
            return self.held + nbytes <= self.bytes_max
        little = self._held_by_little - self._if_little(self.held_by.get(caller, 0))
        # What others that hold little have in the reserve does not count.
        return self.held - min(little, self._reserved_bytes) + nbytes <= self.bytes_max - self._reserved_bytes

    def _fits_share(self, caller: str, nbytes: int) -> bool:
        return self.held_by[caller] + nbytes <= self.caller_bytes_max


class Reservation:
    """The reservation of one request."""

    __slots__ = ("_budget", "caller", "nbytes")

    def __init__(self, budget: Budget, caller: str) -> None:
        """`caller`: the tenant of the token, or without tokens the client's address."""
        self._budget = budget
        self.caller = caller
        self.nbytes = 0

    def take(self, nbytes: int) -> None:
        """Reserve this much more, even beyond the budget."""
        self.nbytes += nbytes
        self._budget.change(self.caller, nbytes)

    def reserve(self, nbytes: int) -> bool:
        """Reserve an announced amount, or return False if the request must wait for it. Raises TooLargeError."""
        if self.nbytes + nbytes > SMALL_BYTES:
            self._budget.check(self.nbytes + nbytes)
            if not self._budget.is_available(self.caller, nbytes):
                return False
        self.take(nbytes)
        return True

    async def wait(self, nbytes: int) -> None:
        """Reserve an announced amount as soon as there is memory. Raises OverloadedError after the maximum wait."""
        await self._budget.wait(self, nbytes)

    def grow(self, nbytes: int) -> None:
        """Reserve an amount that was not announced. Raises TooLargeError or OverloadedError.

        It does not wait, because two waiting requests that hold memory could deadlock.
        """
        if self.nbytes + nbytes > SMALL_BYTES:
            self._budget.check(self.nbytes + nbytes)
            if not self._budget.fits(self.caller, nbytes):
                raise lack_of_memory(nbytes)
        self.take(nbytes)

    def close(self) -> None:
        """Release the whole reservation."""
        self._budget.change(self.caller, -self.nbytes)
        self.nbytes = 0


def lack_of_memory(nbytes: int) -> OverloadedError:
    """Return the error for a lack of memory."""
    return OverloadedError(
        f"the memory for requests is in use, and {nbytes} more bytes are not available: try again later, send less at "
        "once, or start the node with more --requests-bytes-max"
    )


def budget_of(limits: RequestLimits, memory_bytes: int | None) -> Budget:
    """Return the budget of a node with this much available memory; None: the amount is unknown."""
    nbytes = limits.requests_bytes_max
    if nbytes is None:
        nbytes = (memory_bytes or MEMORY_ASSUMED_BYTES) // MEMORY_DIVISOR
    return Budget(nbytes, limits.caller_share, limits.memory_wait_s)
