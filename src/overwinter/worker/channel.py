"""The message channel between two processes of a node. Each message is one packet, which may carry file descriptors.
All messages are received in the same buffer.
"""

import array
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

PACKET_BYTES_MAX = 1 << 20
FDS_A_PACKET = 200
"""The most descriptors in one packet; the kernel takes 253. Further descriptors travel in packets before the message.
"""
MORE = b"+"
"""The content of a packet that only carries such descriptors."""
FDS_MAX = 1 << 16
_SO_SNDBUFFORCE = 32
"""The socket option by which root exceeds `net.core.wmem_max`."""
PACKET_OVERHEAD_BYTES = 32
"""The bytes of a send buffer that a packet cannot use."""
_CREDENTIALS = struct.Struct("iII")
"""The process, user and group of the sender of a packet."""

In = TypeVar("In")


class Packet(NamedTuple):
    """A message, or descriptors that travel before it."""

    content: bytes
    fds: Sequence[int]


class ChannelClosedError(Exception):
    """The process at the other end has ended."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Create two connected ends, for messages of up to `packet_bytes_max`."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        try:
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, PACKET_BYTES_MAX)
        except PermissionError:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES_MAX)
    return ends


def packet_bytes_max() -> int:
    """Return the size of the largest packet that this system sends: for an ordinary user, `net.core.wmem_max` bounds
    it.
    """
    ends = pair()
    try:
        return min(PACKET_BYTES_MAX, ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - PACKET_OVERHEAD_BYTES)
    finally:
        for end in ends:
            end.close()


class Channel(Generic[In]):
    """Sends any msgspec struct; receives messages of the union `incoming`."""

    def __init__(
        self, end: socket.socket, incoming: type[In], fds_max: int = FDS_MAX, names_sender: bool = False
    ) -> None:
        """At most `fds_max` descriptors are accepted per message, and others are closed: allow few to an untrusted
        sender. With `names_sender` the kernel reports the process that sent each message.
        """
        self._end = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        # A private map rather than an allocation: pages that no message reached take no memory, and a fork has its own
        # copy.
        self._buffer = mmap.mmap(-1, PACKET_BYTES_MAX, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._buffer)
        self._fds: list[int] = []
        self._fds_max = fds_max
        self._names_sender = names_sender
        if names_sender:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.received_bytes = 0
        """The size of the last message."""
        self.sender = 0
        """The process that sent the last message, as the kernel reports it; 0 without `names_sender`."""

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._end.fileno()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send one message; raise ChannelClosedError if the other end is closed, OSError if the message is too large,
        or a socket that does not block is full.
        """
        for packet in self.packets(message, fds):
            self.send_packet(packet)

    def packets(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> list[Packet]:
        """Return the packets of a message, in the order in which they are to be sent."""
        parts = [fds[at : at + FDS_A_PACKET] for at in range(0, len(fds), FDS_A_PACKET)] or [()]
        return [*(Packet(MORE, part) for part in parts[:-1]), Packet(self._encoder.encode(message), parts[-1])]

    def send_packet(self, packet: Packet) -> None:
        """Send one packet of a message, with the errors of `send`."""
        try:
            if packet.fds:
                socket.send_fds(self._end, [packet.content], packet.fds)
            else:
                self._end.send(packet.content)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError("the other process has ended") from error

    def receive(self, bytes_max: int = PACKET_BYTES_MAX) -> tuple[In, list[int]]:
        """Return the next message and its descriptors.

        Raises ChannelClosedError at the end, BlockingIOError if a socket that does not block has no message, and
        ValueError for a message that is invalid or has more than `bytes_max`; its descriptors are closed.
        """
        while True:
            self.received_bytes, fds = self._receive_packet()
            nbytes = self.received_bytes
            self._fds += fds
            if nbytes == 0:
                raise ChannelClosedError("the other process closed its end")
            # A sender that may send few descriptors has no use for such packets; a series of them would block the
            # receiver.
            if self._fds_max > FDS_A_PACKET and self._view[:nbytes] == MORE:
                continue
            taken, self._fds = self._fds, []
            close_all(taken[self._fds_max :])
            del taken[self._fds_max :]
            try:
                if nbytes > bytes_max:
                    raise ValueError(f"it has {nbytes} bytes")
                return self._decoder.decode(self._view[:nbytes]), taken
            except ValueError:
                close_all(taken)
                raise
            except RecursionError as error:
                close_all(taken)
                raise ValueError(f"it is nested too deeply: {error}") from None

    def _receive_packet(self) -> tuple[int, list[int]]:
        fds = array.array("i")
        if not self._fds_max and not self._names_sender:
            try:
                return self._end.recv_into(self._buffer), []
            except ConnectionResetError:
                return 0, []
        room = socket.CMSG_SPACE(min(self._fds_max, FDS_A_PACKET) * fds.itemsize)
        room += socket.CMSG_SPACE(_CREDENTIALS.size) if self._names_sender else 0
        try:
            nbytes, ancillary, _, _ = self._end.recvmsg_into([self._buffer], room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return 0, []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.sender, _, _ = _CREDENTIALS.unpack(data)
        return nbytes, list(fds)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


def connected(incoming: type[In], fds_max: int, names_sender: bool = False) -> tuple[Channel[In], socket.socket]:
    """Create a channel that does not block, and the other process's end of it. Raises OSError when the system has no
    descriptors or memory left.
    """
    near_end, far_end = pair()
    try:
        near_end.setblocking(False)
        return Channel(near_end, incoming, fds_max, names_sender), far_end
    except OSError:
        near_end.close()
        far_end.close()
        raise


def close_all(fds: Sequence[int]) -> None:
    """Close these descriptors."""
    for fd in fds:
        os.close(fd)
