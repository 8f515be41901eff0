"""Refuses what web pages of other sites send in a browser to a node without tokens.

A page can send some requests to any address, without reading the answers, and with DNS rebinding it can also read
them: its own name then leads to the node. A node with tokens needs no such check, because a browser sends no token for
a page of another site.
"""

import socket
from collections.abc import Mapping
from ipaddress import ip_address

from overwinter.core.errors import ForbiddenError

HOST, ORIGIN = b"host", b"origin"
LOCAL = "localhost"
SEEN_MAX = 256
"""The most headers whose check is remembered."""


class Sites:
    """Checks the headers by which a browser names the sites of a request and of the page that sends it."""

    def __init__(self, listens_on: str) -> None:
        """`listens_on`: the node's address. One that only this machine reaches is called by names that no site has."""
        self._is_local = is_local(listens_on)
        self._own_name = socket.gethostname().lower()
        self._allowed: set[tuple[bytes, bytes | None]] = set()

    def check(self, fields: Mapping[bytes, bytes]) -> None:
        """Raise ForbiddenError if a page of another site may have sent this request."""
        host, origin = fields.get(HOST, b""), fields.get(ORIGIN)
        if (host, origin) in self._allowed:
            return
        if host and self._is_local and not self._is_own(name_of(host.decode("latin-1"))):
            raise ForbiddenError(
                f"this node has no tokens and is called as localhost, by an address or by its machine's name, not as "
                f"{host[:80].decode('latin-1')!r}: use one of these, or create a token with `overwinter token create`"
            )
        if origin is not None and not _is_same(host, origin) and not is_local(_site_of(origin)):
            raise ForbiddenError(
                f"this node has no tokens and answers no web page of {origin[:80].decode('latin-1')!r}: create a token "
                "with `overwinter token create`, and let the page's server send the request"
            )
        if len(self._allowed) >= SEEN_MAX:
            self._allowed.clear()
        self._allowed.add((host, origin))

    def _is_own(self, name: str) -> bool:
        # Nobody can publish a name without a dot.
        return "." not in name or name == self._own_name or is_local(name) or _is_address(name)


def name_of(host: str) -> str:
    """Return the name or the address in a `Host` header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def is_local(name: str) -> bool:
    """Whether a name or an address is of this machine in any case."""
    if _is_address(name):
        return ip_address(name).is_loopback
    return name == LOCAL or name.endswith("." + LOCAL)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_same(host: bytes, origin: bytes) -> bool:
    return host != b"" and origin.partition(b"://")[2] == host


def _site_of(origin: bytes) -> str:
    """Return the name in an `Origin` header; empty for a page without one (`null`)."""
    return name_of(origin.decode("latin-1").partition("://")[2])
