"""Counts open connections by client, and closes those that are too slow or idle for too long.

At the limit, a new connection is admitted only if another one can be closed for it. The first choice is a connection
of a client that has more connections than the client of the new one; the client with the most comes first. Of its
connections, the one that has been without a request the longest is closed, otherwise one on which the client is sending
a request or reading an answer. The second choice is a stalled connection of the client of the new one; an active one
may have a request in transit. A connection that waits for the node's answer is never closed for another;
`middleware.py` bounds the number of requests in progress.

Near the limit, the answers to clients with many connections announce that the connection closes, so that the clients
send no further request on it. The times of all connections are checked together and periodically: no request has a
timer of its own.
"""

import resource
import socket
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from overwinter.core.config import RequestLimits
from overwinter.node.fair_queue import FairQueue

PARSED_MAX = 64
"""The most request heads that one iteration of the event loop parses: about a millisecond of work."""
PIECE_BYTES = 256 << 10
"""Long answers are written in pieces of this size."""
DESCRIPTORS_DIVISOR = 4
"""The most connections are the process's limit of descriptors divided by this; the other descriptors are for workers,
blocks and files.
"""
LINGER_S = 30.0
"""How long the rest of an unwanted body is read and discarded, so that its sender can read the answer."""
CROWDED_SHARE = 7 / 8
"""More open connections than this share of the limit count as near the limit, and a client with at least this share of
the average number per client has many.
"""
REFUSED_SHARE = 1 / 8
"""The refused connections that may stay open in addition, as a share of the limit."""
REFUSED_S = 2.0
"""How long a refused connection stays open, so that its client can read the answer."""
IPV6_NETWORK_BYTES = 8
"""The bytes of an IPv6 address that name its network. One client usually has all addresses of a network."""


def client_of(host: str) -> str:
    """The key of one client: an IPv4 address, or an IPv6 network."""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    # Use the binary form, because the text form may omit zeros.
    address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return socket.inet_ntop(socket.AF_INET6, address[:IPV6_NETWORK_BYTES].ljust(len(address), b"\0"))


class Waits(NamedTuple):
    """The event that a connection waits for."""

    what: str
    """`head`, `body`, `linger` (the end of an unwanted body), `read` (the client reads a long answer), `close`, `idle`;
    empty: nothing from the client.
    """
    number: int
    """Distinguishes successive events of one kind."""
    nbytes: int
    """The bytes of the current body that have arrived."""


class Connection(Protocol):
    """A connection of a client."""

    client_key: str
    """The client's address or network (`client_of`)."""

    def waits(self) -> Waits:
        """Return the event that it waits for."""
        ...

    def time_out(self) -> None:
        """Answer that the client was too slow, if an answer is still possible, and close."""
        ...

    def abort(self) -> None:
        """Close at once; nothing more is sent."""
        ...


class Connections:
    """All connections of a server."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.parsing = FairQueue(PARSED_MAX)
        """The parsing of received bytes: a part in each iteration of the event loop; the clients take turns."""
        self.request_queue = FairQueue()
        """The starts of requests with complete heads, and cancellations for clients that left, in the same way."""
        self.most = connections_most(limits)
        """The limit of open connections."""
        self._longest_s = {
            "head": limits.head_timeout_s,
            "linger": LINGER_S,
            "read": limits.stall_s + PIECE_BYTES / limits.rate_min_bytes,
            "close": limits.stall_s,
            "idle": limits.idle_timeout_s,
        }
        """The longest time for each kind of event but `body`, which has a minimum rate."""
        self._open: dict[Connection, tuple[Waits, float]] = {}
        """For each open connection, what it waited for at the last check, and since when. For a body, both are those
        at the start of the current measurement of its rate.
        """
        self._unchanged: dict[Connection, None] = {}
        """The connections that waited for the same event at the last two checks. If that is a body, nothing of it has
        arrived since the start of the current measurement of its rate.
        """
        self._without_stalled: set[str] = set()
        """The clients that were found to have no stalled connection since the last check. It saves a search for each of
        many new connections.
        """
        self._all_answering: set[str] = set()
        """The clients that were found to have no connection to close for others since the last check."""
        self._refused: dict[Connection, float] = {}
        """The refused connections that are still open, and since when."""
        self._checked_at = 0.0
        self._idle: dict[str, dict[Connection, None]] = {}
        """For each client, its connections without a request, the longest idle first."""
        self._counts: dict[str, int] = {}
        """The number of connections of each client."""

    def admit(self, connection: Connection) -> bool:
        """Count a new connection without a request; return False if it must be refused."""
        client = connection.client_key
        if len(self._open) >= self.most and not self._make_room(client):
            return False
        self._counts[client] = self._counts.get(client, 0) + 1
        self._open[connection] = (Waits("", 0, 0), 0.0)
        self.mark_idle(connection)
        return True

    def keep_refused(self, connection: Connection) -> None:
        """Keep a refused connection open for a while: closing it at once would discard the data that it has not read,
        and its client would not receive the answer.
        """
        self._refused[connection] = self._checked_at
        if len(self._refused) > REFUSED_SHARE * self.most:
            first = next(iter(self._refused))
            del self._refused[first]
            first.abort()

    def is_crowded(self, client: str) -> bool:
        """Whether the open connections are near the limit, and this client has many of them (CROWDED_SHARE)."""
        open_, mine = len(self._open), self._counts.get(client, 0)
        return open_ > CROWDED_SHARE * self.most and mine * len(self._counts) >= CROWDED_SHARE * open_

    def forget(self, connection: Connection) -> None:
        """Remove a connection that is being closed, or is closed and has no request any more."""
        self._refused.pop(connection, None)
        if self._open.pop(connection, None) is None:
            return
        self._unchanged.pop(connection, None)
        self.mark_busy(connection)
        self._counts[connection.client_key] -= 1
        if not self._counts[connection.client_key]:
            del self._counts[connection.client_key]

    def mark_idle(self, connection: Connection) -> None:
        """Record that the connection has no request."""
        if connection not in self._open:
            return
        self._all_answering.discard(connection.client_key)
        self._idle.setdefault(connection.client_key, {})[connection] = None

    def mark_busy(self, connection: Connection) -> None:
        """Record that a request began on the connection."""
        idle = self._idle.get(connection.client_key)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.client_key]

    def sweep(self, now: float) -> None:
        """Check all connections: close those that exceed their time."""
        self._checked_at = now
        for connection, since in list(self._refused.items()):
            if now - since >= REFUSED_S:
                connection.abort()
        self._unchanged.clear()
        self._without_stalled.clear()
        self._all_answering.clear()
        for connection, (seen, since) in list(self._open.items()):
            waits = connection.waits()
            if waits[:2] != seen[:2]:
                self._open[connection] = (waits, now)
                continue
            if waits == seen:
                self._unchanged[connection] = None
            if waits.what == "body":
                self._check_rate(connection, waits, now)
            elif waits.what and now - since >= self._longest_s[waits.what]:
                if waits.what == "head":
                    connection.time_out()
                else:
                    connection.abort()

    def _check_rate(self, connection: Connection, waits: Waits, now: float) -> None:
        """Close a connection if a body has arrived below the minimum rate since the last check of the rate."""
        seen, since = self._open[connection]
        if now - since < self.limits.stall_s:
            return
        self._open[connection] = (waits, now)
        if waits.nbytes - seen.nbytes < self.limits.rate_min_bytes * self.limits.stall_s:
            connection.time_out()

    def _make_room(self, newcomer: str) -> bool:
        """Close a connection for a new one of `newcomer`, as the module describes; return False if there is none."""
        own = self._counts.get(newcomer, 0)
        larger = {
            client: count for client, count in self._counts.items() if count > own and client not in self._all_answering
        }
        connection = (self._closable(larger) if larger else None) or self._stalled(newcomer)
        if connection is None:
            return False
        connection.abort()
        # `connection_lost` comes later, but the connection does not count from now on.
        self.forget(connection)
        return True

    def _closable(self, counts: dict[str, int]) -> Connection | None:
        """Return a connection that may be closed; None if there is none. It is of the client with the most connections
        among these clients; clients without such a connection are skipped.
        """
        first = max(counts, key=counts.__getitem__)
        connection = next(iter(self._idle.get(first, ())), None) or self._waiting_one(first, self._open)
        if connection is not None:
            return connection
        # One search for all others: there may be as many clients as connections.
        found = {client: next(iter(idle)) for client, idle in self._idle.items() if client in counts}
        for each in self._open:
            client = each.client_key
            if client != first and client in counts and client not in found and each.waits().what:
                found[client] = each
        self._all_answering.update(counts.keys() - found.keys())
        return found[max(found, key=counts.__getitem__)] if found else None

    def _stalled(self, client: str) -> Connection | None:
        """Return a stalled connection of a client, if there is one."""
        idle = next(iter(self._idle.get(client, ())), None)
        if idle is not None and self._is_stalled(idle):
            return idle
        if client in self._without_stalled:
            return None
        connection = self._waiting_one(client, filter(self._is_stalled, self._unchanged))
        if connection is None:
            self._without_stalled.add(client)
        return connection

    def _waiting_one(self, client: str, among: Iterable[Connection]) -> Connection | None:
        """Return one of these connections that is the client's and waits for something from it, if there is one."""
        mine = (connection for connection in among if connection.client_key == client)
        return next((connection for connection in mine if connection.waits().what), None)

    def _is_stalled(self, connection: Connection) -> bool:
        return connection in self._unchanged and connection.waits() == self._open[connection][0]


def connections_most(limits: RequestLimits) -> int:
    """Return the most connections that may be open, and thus the most requests that may be in progress."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(limits.connections_max, descriptors // DESCRIPTORS_DIVISOR))
