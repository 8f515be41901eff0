"""The HTTP protocol of a connection, with bounds on request heads and pipelined requests.

The server parses HTTP with httptools, which has no such bounds. Bodies are bounded where they are read.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from overwinter.api.access import ONCE
from overwinter.api.connections import Connections, Waits, client_of
from overwinter.api.exchange import CONNECTION
from overwinter.api.expecting import close_unless_asked
from overwinter.api.flow import AnswerTransport, Flow
from overwinter.api.received import STEP_BYTES, Received
from overwinter.node.fair_queue import BYTES_OF_ONE

HEADER_BYTES = 32
"""Parsing a header takes as long as parsing this many bytes, in addition to its own bytes."""
STEP_BYTES_MIN = 64
"""A step counts as at least this many bytes of a head or of chunk sizes."""
HEAD_USUAL_BYTES = 512
"""The work of parsing a usual head, in bytes: its own bytes, and HEADER_BYTES for each header."""
URL_MAX, BUSY = 8 << 10, 503
CLOSING_HEADERS = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
FRAME_RATIO = 8
"""The most bytes of chunk sizes and extensions per byte of a body, in addition to the limit of the head."""
CONTENT_LENGTH, TRANSFER_ENCODING, CHUNKED = b"content-length", b"transfer-encoding", b"chunked"
FRAMING = (CONTENT_LENGTH, TRANSFER_ENCODING)
"""The headers that say where a body ends."""
HEALTH = "/v2/health/"
"""The prefix of the paths whose requests start at once: a supervisor must not restart a node with a long queue."""


class _RefusedError(Exception):
    """The request is refused. Raised in a callback, to stop the parser."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections, self._limits = connections, connections.limits
        self._refusal: tuple[int, str] | None = None
        self._discards_input = False
        self.has_disconnected = False
        self._is_lost = False
        self._answering = 0
        """The requests that the application is handling: two for a moment, if requests are pipelined."""
        self.on_disconnect: Callable[[], object] | None = None
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the latest request."""
        self._number = 0
        """Counts events: the start of a head, the start of a body, the end of a request, more of an answer read."""
        self._in_head = self._in_body = self._chunked = False
        self._in_copy = False
        """Whether the parser reads a head that was read already."""
        self._chunks = bytearray()
        """The data of the chunks that the current step has parsed."""
        self._received = Received()
        """What is not parsed yet. Reading pauses while there is any."""
        self._is_held = False
        """Whether the parsing of `_received` waits for the end of an answer."""
        self._frame_bytes = 0
        """The bytes of this message without its body."""
        self._once: set[bytes] = set()
        self._length = self._body_bytes = self._step_body_bytes = self._headers_count = 0

    # Events of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, or refuse it."""
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        self.client_key = client_of(self.client[0] if self.client else "")
        if not self._connections.admit(self):
            self._refuse(BUSY, "too many connections are open: close some, or try again later")
            self._connections.keep_refused(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection, unless the application still handles a request of it."""
        self._is_lost = True
        self._leave()
        if not self._answering:
            self._connections.forget(self)
        self._received.clear()
        super().connection_lost(exc)
        # These refer back to this object. The loop would wait while garbage collection frees thousands of connections.
        self.scope = self.cycle = None  # type: ignore[assignment]
        self._running = None

    def data_received(self, data: bytes) -> None:
        """Parse received bytes in turns: an iteration of the loop parses some heads or bytes, not all that arrived."""
        is_first = not self._received
        self._received.add(data)
        if is_first:
            count = 1 + len(data) // BYTES_OF_ONE
            self._connections.parsing.add(self.client_key, self._parse, count, discards=self._discards_input)
            if self._received:
                self.flow.is_parsing = True
                self.transport.pause_reading()

    def _parse(self) -> None:
        """Parse up to the end of a request, of a part of a head, or of some small chunks; the rest in further turns."""
        work = 0
        while self._is_unparsed() and not self._must_hold():
            has_length = self._in_body and not self._chunked
            step = self._received.take(self._length - self._body_bytes if has_length else None)
            self._step_body_bytes = 0
            try:
                self._feed(step)
            except HttpParserError:
                self.send_400_response("")
            self._join_chunks()
            self._frame_bytes += len(step) - self._step_body_bytes
            if self._frame_bytes > self._limits.head_bytes_max + FRAME_RATIO * self._body_bytes:
                self._refuse(431, f"the head and the chunk sizes have more than {self._limits.head_bytes_max} bytes")
            work += max(len(step) - self._step_body_bytes, STEP_BYTES_MIN)
            if not self._in_body or work >= STEP_BYTES:
                break
        self._connections.parsing.spend((work + HEADER_BYTES * self._headers_count) // HEAD_USUAL_BYTES)
        if self._is_unparsed():
            self._is_held = self._must_hold()
            if not self._is_held:
                self._connections.parsing.add(self.client_key, self._parse)
            return
        self._received.clear()
        if self.flow.is_parsing:
            self.flow.is_parsing = False
            if not (self.flow.read_paused or self.transport.is_closing()):
                self.transport.resume_reading()

    def _is_unparsed(self) -> bool:
        return bool(self._received) and not (self._discards_input or self.transport.is_closing())

    def _must_hold(self) -> bool:
        """Whether a whole request waits behind another. Many parsed requests would make garbage collections long."""
        return bool(self.pipeline) and not (self._in_head or self._in_body)

    def _feed(self, data: bytes) -> None:
        """Pass bytes to the parser. A request to change the protocol is answered without the change."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if framing := self._framing():
                    # The parser leaves the body to the other protocol, and would read it as further requests. A new
                    # parser reads it, after a head that contains only the headers that say where the body ends.
                    self.parser = HttpRequestParser(self)
                    self._in_copy = True
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
                    self._in_copy = False

    def _framing(self) -> bytes:
        return b"".join(b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in FRAMING)

    # Events of the parser

    def on_message_begin(self) -> None:
        """A head begins."""
        if self._in_copy:
            return
        super().on_message_begin()
        self._number += 1
        self._in_head = True
        self._chunked = False
        self._frame_bytes = self._length = self._body_bytes = self._headers_count = 0
        self._once.clear()

    def on_url(self, url: bytes) -> None:
        """A part of the URL, which includes the query."""
        if self._in_copy:
            return
        super().on_url(url)
        if len(self.url) > URL_MAX:
            self._stop(414, f"the URL of the request is longer than {URL_MAX} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer. Trailers are ignored: a proxy that sets headers does not see them."""
        if self._in_copy:
            return
        self._headers_count += 1
        if self._headers_count > self._limits.headers_max:
            self._stop(431, f"the request has more than {self._limits.headers_max} headers")
        if not self._in_head:
            return
        lower = name.lower()
        if lower in ONCE:
            if lower in self._once:
                self._stop(400, f"the request has more than one {ONCE[lower]} header")
            self._once.add(lower)
        elif lower == TRANSFER_ENCODING:
            if value.lower() != CHUNKED:
                self._stop(501, "this node reads no transfer encoding except chunked")
            self._chunked = True
        elif lower == CONTENT_LENGTH:
            self._length = int(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: a request begins."""
        if self._in_copy:
            return
        self._number += 1
        self._in_head = False
        self._in_body = True
        self._connections.mark_busy(self)
        super().on_headers_complete()
        self.flow.is_pipelined = bool(self.pipeline)

    def on_body(self, body: bytes) -> None:
        """A part of the body, or of one of its chunks."""
        self._step_body_bytes += len(body)
        self._body_bytes += len(body)
        if self._chunked:
            self._chunks += body
        else:
            super().on_body(body)

    def _join_chunks(self) -> None:
        """Pass on the bytes of many chunks at once."""
        if self._chunks:
            super().on_body(bytes(self._chunks))
            self._chunks.clear()

    def on_message_complete(self) -> None:
        """The request is complete. Reading goes on, or nobody would notice that its client disconnects."""
        if self.parser.should_upgrade() and self._framing():
            # Its body is still to come.
            return
        self._join_chunks()
        self._number += 1
        self._in_body = False
        super().on_message_complete()
        self.flow.resume_reading()
        if self.cycle.response_complete:
            self._connections.mark_idle(self)

    def on_response_complete(self) -> None:
        """An answer is written. uvicorn would start a timer here, which the check of all connections replaces."""
        if not self.transport.is_closing():
            waiting = self.pipeline.pop() if self.pipeline else None
            self.flow.is_pipelined = bool(self.pipeline)
            self.flow.resume_reading()
            if waiting is not None:
                self._start_asgi_task(*waiting)
                if self._is_held and not self._must_hold():
                    self._is_held = False
                    self._connections.parsing.add(self.client_key, self._parse)
                return
        if not self._in_body:
            self._connections.mark_idle(self)

    def resume_writing(self) -> None:
        """The client read more of the answer."""
        self._number += 1
        super().resume_writing()

    # The end of a connection

    def send_400_response(self, msg: str) -> None:
        """Answer a refused request with the reason, and a parse error with 400."""
        self._refuse(*(self._refusal or (400, "this is not valid HTTP")))

    def waits(self) -> Waits:
        """The event that the connection waits for."""
        return Waits(self._waits_for(), self._number, self._body_bytes)

    def time_out(self) -> None:
        """The client was too slow."""
        if self._number == 0 and not self._frame_bytes:
            # The client has sent no request yet: it would take this answer for the answer to its first request.
            self.transport.close()
        else:
            self._refuse(408, "the request came too slowly")

    def shutdown(self) -> None:
        """The server stops: a connection that discards its input is closed at once."""
        if self._discards_input:
            self.transport.abort()
        else:
            super().shutdown()

    def abort(self) -> None:
        """Close at once."""
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.scope[CONNECTION] = self  # type: ignore[literal-required]
        if self._connections.is_crowded(self.client_key):
            # Announce that the connection closes: a client could use it again at the moment of a later close.
            cycle.keep_alive = False
        if cycle.waiting_for_100_continue:
            app = partial(close_unless_asked, cycle, app)
        # No body follows the head of an answer to HEAD.
        if cycle.scope["method"] != "HEAD":
            cycle.transport = AnswerTransport(self.transport, self._end)  # type: ignore[assignment]
        if cycle.scope["path"].startswith(HEALTH):
            super()._start_asgi_task(cycle, app)
        else:
            self._connections.request_queue.add(self.client_key, partial(self._start, cycle, app))

    def _start(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if not self.has_disconnected:
            self._answering += 1
            super()._start_asgi_task(cycle, partial(self._answer, app))

    async def _answer(
        self, app: ASGI3Application, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Answer a request. Until then, a lost connection counts as open, or its client could open more and more."""
        try:
            await app(scope, receive, send)
        finally:
            self._answering -= 1
            if self._is_lost and not self._answering:
                self._connections.forget(self)

    def _end(self) -> None:
        """Close after the last answer. The rest of the request is read and discarded, or the answer would be lost."""
        if self._in_body:
            self._discards_input = True
            # Requests behind it would run, and no one could receive their answers.
            self.pipeline.clear()
            self.transport.write_eof()
        else:
            self.transport.close()

    def _leave(self) -> None:
        """Tell the open request that its client has disconnected; pipelined requests are not started."""
        self.pipeline.clear()
        self.has_disconnected = True
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.waiting_for_100_continue = False  # Nothing is written any more.
            self._running.message_event.set()
            # A pipeline of functions has a request for each stage to cancel, and many clients may leave at once.
            self._connections.request_queue.add(self.client_key, self._tell_request)

    def _tell_request(self) -> None:
        """Tell the open request, if there is one, that its client has disconnected."""
        if self.on_disconnect is not None:
            self.on_disconnect()

    def _waits_for(self) -> str:
        if self._is_lost:
            return ""
        if self._discards_input or self.transport.is_closing():
            return "close"
        if self.flow.write_paused:
            return "read"
        answered = self.cycle is None or self.cycle.response_complete
        if self._in_body:
            # A client that was not asked for its body yet waits for the node.
            unasked = self.cycle is not None and self.cycle.waiting_for_100_continue
            return "linger" if answered else "" if self.flow.read_paused or self._received or unasked else "body"
        if self._in_head or self._number == 0:
            return "" if self.flow.read_paused else "head"
        if not answered:
            return ""
        return "close" if self.transport.get_write_buffer_size() else "idle"

    def _stop(self, status: int, why: str) -> None:
        self._refusal = (status, why)
        raise _RefusedError(why)

    def _refuse(self, status: int, why: str) -> None:
        """Answer with the reason, unless an answer has begun, and end; later bytes are discarded."""
        if self._discards_input:
            return
        self._discards_input = True
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            self.transport.abort()
            return
        body = msgspec.json.encode({"error": why})
        later = b"retry-after: 1\r\n" if status == BUSY else b""
        self.transport.write(STATUS_LINE[status] + later + CLOSING_HEADERS % len(body) + body)
        self._leave()
        # Closing now would discard unread data, and the client might not receive the reason.
        self.transport.write_eof()
