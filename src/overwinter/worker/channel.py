"""How two processes of a node speak: one message a packet, file descriptors beside it, one reused buffer."""

import array
import mmap
import socket
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

PACKET_BYTES_MAX = 1 << 20
FDS_A_PACKET = 200
"""The kernel takes 253 descriptors a packet; what goes beyond travels in packets of its own before the message."""
MORE = b"+"
CREDENTIALS = struct.Struct("iII")
"""Process, user and group, as the kernel tells them."""

In = TypeVar("In")


class ChannelClosedError(Exception):
    """The process at the other end is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, with room for a message of PACKET_BYTES_MAX where the kernel allows it."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES_MAX)
    return ends


class Channel(Generic[In]):
    """Sends any msgspec struct; receives messages of the union `incoming`."""

    def __init__(self, end: socket.socket, incoming: type[In], takes_fds: bool = True) -> None:
        """Without `takes_fds` the kernel drops the descriptors that the other side sends: it may not be trusted."""
        self._end = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        # Mapped, not allocated: pages that no message ever reached are never made.
        self._buffer = mmap.mmap(-1, PACKET_BYTES_MAX, flags=mmap.MAP_PRIVATE)
        self._view = memoryview(self._buffer)
        self._fds: list[int] = []
        self._takes_fds = takes_fds
        self.sender: int | None = None
        """The process that sent what was received last, as the kernel says; None: nobody asked who."""

    def ask_who_sends(self) -> None:
        """Let the kernel say of each message whose it is."""
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._end.fileno()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send one message; ChannelClosedError if nobody listens, OSError if it does not fit."""
        rest = list(fds)
        try:
            while len(rest) > FDS_A_PACKET:
                socket.send_fds(self._end, [MORE], rest[:FDS_A_PACKET])
                rest = rest[FDS_A_PACKET:]
            packet = self._encoder.encode(message)
            if rest:
                socket.send_fds(self._end, [packet], rest)
            else:
                self._end.send(packet)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError("the other process is gone") from error

    def receive(self) -> tuple[In, list[int]]:
        """The next message and its descriptors; ChannelClosedError at the end; BlockingIOError if none is there."""
        while True:
            nbytes, fds = self._receive_packet()
            self._fds += fds
            if nbytes == 0:
                raise ChannelClosedError("the other process closed its end")
            if self._view[:nbytes] == MORE:
                continue
            taken, self._fds = self._fds, []
            return self._decoder.decode(self._view[:nbytes]), taken

    def _receive_packet(self) -> tuple[int, list[int]]:
        fds = array.array("i")
        try:
            if not self._takes_fds:
                return self._end.recv_into(self._buffer), []
            room = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(FDS_A_PACKET * fds.itemsize)
            nbytes, ancillary, _, _ = self._end.recvmsg_into([self._buffer], room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return 0, []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.sender, _, _ = CREDENTIALS.unpack(data)
        return nbytes, list(fds)

    def close(self) -> None:
        """Close this end."""
        self._end.close()
