"""Refuses requests that web pages of other sites send from a browser to a node without tokens.

A page can send some requests to any address, without reading the answers; those that may change something name the
page in `Origin`. With DNS rebinding its own name leads to the node, and it can read the answers too: a node on loopback
therefore accepts only names in `Host` that no site has. A node with tokens needs no such checks, because a browser
sends no token for a page of another site.
"""

import re
import socket
from collections.abc import Mapping
from ipaddress import ip_address

from overwinter.core.errors import ForbiddenError

HOST, ORIGIN = b"host", b"origin"
LOCAL = "localhost"
AUTHORITY = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]*))(?::\d*)?", re.ASCII)
PORTS = {"http": "80", "https": "443"}
SEEN_MAX, SEEN_BYTES_MAX = 256, 512
"""The most pairs of headers whose check is remembered, and the most bytes of one."""


class Sites:
    """Checks the headers by which a browser names the sites of a request and of the page that sends it."""

    def __init__(self, listens_on: str) -> None:
        """`listens_on`: the address to which the node's socket is bound."""
        self._is_local = is_loopback(listens_on)
        self._own_name = socket.gethostname().lower()
        self._allowed: set[tuple[bytes, bytes | None]] = set()

    def check(self, fields: Mapping[bytes, bytes]) -> None:
        """Raise ForbiddenError if a page of another site may have sent this request."""
        host, origin = fields.get(HOST, b""), fields.get(ORIGIN)
        if (host, origin) in self._allowed:
            return
        if host and self._is_local and not self._is_own(name_of(host.decode("latin-1"))):
            raise ForbiddenError(
                f"this node has no tokens and accepts only localhost, an address or its machine's name as Host, not "
                f"{host[:80].decode('latin-1')!r}: use one of these, or create a token with `overwinter token create`"
            )
        if origin is not None and not _may_call(origin.decode("latin-1"), host.decode("latin-1")):
            raise ForbiddenError(
                f"this node has no tokens and answers no web page of {origin[:80].decode('latin-1')!r}: create a token "
                "with `overwinter token create`, and let the page's server send the request"
            )
        if len(host) + len(origin or b"") <= SEEN_BYTES_MAX:
            if len(self._allowed) >= SEEN_MAX:
                self._allowed.clear()
            self._allowed.add((host, origin))

    def _is_own(self, name: str) -> bool:
        # A name without a dot is not in the public DNS.
        return "." not in name or name == self._own_name or _is_local_name(name) or _is_address(name)


def is_loopback(host: str) -> bool:
    """Whether an address, or a name to listen on, can be reached from this machine only."""
    return ip_address(host).is_loopback if _is_address(host) else host == LOCAL


def name_of(host: str) -> str:
    """Return the name or the address in a `Host` header, without the port; a dot if it is neither."""
    found = AUTHORITY.fullmatch(host)
    return "." if found is None else (found[1] or found[2]).rstrip(".").lower()


def _may_call(origin: str, host: str) -> bool:
    """Whether a page of this origin may call the node at `host`: a page of the node itself, or of this machine."""
    scheme, _, authority = origin.lower().partition("://")
    called = host.lower()
    if called and called in (authority, f"{authority}:{PORTS.get(scheme)}"):
        return True
    return _is_local_name(name_of(authority))


def _is_local_name(name: str) -> bool:
    return is_loopback(name) or name.endswith("." + LOCAL)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
