"""Messages and descriptors arrive whole, in order, with their descriptors, and an end is an end."""

import os
import socket

import msgspec
import pytest

from overwinter.worker.channel import FDS_A_PACKET, Channel, ChannelClosedError, pair


class Note(msgspec.Struct, tag=True):
    number: int
    text: str = ""


@pytest.fixture
def ends():
    left, right = pair()
    yield Channel(left, Note), Channel(right, Note)
    left.close()
    right.close()


def test_messages_keep_their_order_and_size(ends):
    left, right = ends
    for number in range(20):
        left.send(Note(number, "x" * number * 1000))
    assert [right.receive()[0].number for _ in range(20)] == list(range(20))


@pytest.mark.parametrize("count", [1, FDS_A_PACKET, FDS_A_PACKET + 1, 3 * FDS_A_PACKET + 7])
def test_any_number_of_descriptors_travels_with_its_message(ends, count, tmp_path):
    left, right = ends
    fds = []
    for number in range(count):
        path = tmp_path / str(number)
        path.write_text(str(number))
        fds.append(os.open(path, os.O_RDONLY))
    left.send(Note(1), fds)
    left.send(Note(2))
    message, taken = right.receive()
    assert message.number == 1
    assert [os.read(fd, 10).decode() for fd in taken] == [str(number) for number in range(count)]
    assert not any(os.get_inheritable(fd) for fd in taken)
    assert right.receive() == (Note(2), [])
    for fd in fds + taken:
        os.close(fd)


def test_a_closed_end_is_told_to_both_sides(ends):
    left, right = ends
    left.send(Note(1))
    left.close()
    assert right.receive()[0].number == 1
    with pytest.raises(ChannelClosedError):
        right.receive()
    with pytest.raises(ChannelClosedError):
        right.send(Note(2))


def test_nonsense_is_an_error_of_the_decoder():
    left, right = pair()
    channel = Channel(right, Note)
    left.send(b"\xc1 nonsense")
    with pytest.raises(msgspec.DecodeError):
        channel.receive()
    left.close()
    right.close()


def test_nothing_to_read_does_not_wait():
    left, right = pair()
    right.setblocking(False)
    with pytest.raises(BlockingIOError):
        Channel(right, Note).receive()
    left.close()
    right.close()
    assert isinstance(left, socket.socket)
