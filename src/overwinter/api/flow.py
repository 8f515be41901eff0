"""When a connection reads, and how it writes an answer."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Sent before the head of an answer if the client waits for permission to send its body."""


class Flow(FlowControl):
    """Pauses and resumes reading. Reading resumes only after the received bytes are parsed."""

    is_parsing = False
    """Whether received bytes are still to be parsed."""
    is_pipelined = False
    """Whether requests wait behind the one that is being answered. Nothing is read then: it would be kept in memory."""

    def resume_reading(self) -> None:
        """Resume reading, now or as soon as all is parsed, unless requests wait."""
        if self.is_pipelined:
            return
        if self.is_parsing:
            self.read_paused = False
        else:
            super().resume_reading()


class AnswerTransport:
    """The transport of one answer. The head is sent together with the next bytes, because each write is a packet and
    wakes the reader; if there are none, `close` sends it.
    """

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport = transport
        self._end = end
        self._head: bytes | None = None
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Send `data`, or keep it if it is the head."""
        if self._head is None and data != CONTINUE:
            self._head = data
        elif self._head:
            self._transport.write(self._head + data)
            self._head = b""
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send a head that is still kept, then call `end`."""
        if self._head:
            self._transport.write(self._head)
        self._end()
