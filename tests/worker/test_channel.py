"""Messages and descriptors arrive complete and in order, and the end of a channel is reported."""

import os
import socket

import msgspec
import pytest

from overwinter.worker.channel import FDS_A_PACKET, MORE, Channel, ChannelClosedError, packet_bytes_max, pair


class Note(msgspec.Struct, tag=True, array_like=True):
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
    for number in range(20):
        assert right.receive()[0].number == number
        assert 0 <= right.received_bytes - number * 1000 < 100


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


def test_a_message_that_is_too_large_is_not_decoded(ends, tmp_path):
    left, right = ends
    left.send(Note(1, "x" * 1000))
    left.send(Note(2))
    with pytest.raises(ValueError, match="bytes"):
        right.receive(bytes_max=1000)
    assert right.receive(bytes_max=1000) == (Note(2), [])


def test_a_closed_end_is_reported_to_the_other_when_it_receives_and_when_it_sends(ends):
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


def test_receiving_without_a_message_does_not_wait_on_a_nonblocking_socket():
    left, right = pair()
    right.setblocking(False)
    with pytest.raises(BlockingIOError):
        Channel(right, Note).receive()
    left.close()
    right.close()


def test_a_fork_does_not_share_what_is_received(ends):
    left, right = ends
    left.send(Note(1, "of the parent"))
    assert right.receive()[0] == Note(1, "of the parent")
    pid = os.fork()
    if pid == 0:
        right._view[:] = bytes(len(right._view))
        os._exit(0)
    os.waitpid(pid, 0)
    assert bytes(right._view).startswith(msgspec.msgpack.encode(Note(1, "of the parent")))


def test_the_kernel_names_the_sender_of_a_message():
    left, right = pair()
    sending, receiving = Channel(left, Note), Channel(right, Note, fds_max=1, names_sender=True)
    pid = os.fork()
    if pid == 0:
        sending.send(Note(1), [0])
        os._exit(0)
    os.waitpid(pid, 0)
    message, fds = receiving.receive()
    assert (message, receiving.sender, len(fds)) == (Note(1), pid, 1)
    sending.send(Note(2))
    assert receiving.receive() == (Note(2), [])
    assert receiving.sender == os.getpid()
    for fd in fds:
        os.close(fd)
    left.close()
    right.close()


@pytest.mark.parametrize("fds_max", [0, 1])
def test_no_more_descriptors_are_kept_than_an_untrusted_sender_may_send(fds_max):
    left, right = pair()
    receiving = Channel(right, Note, fds_max=fds_max, names_sender=True)
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(left, [msgspec.msgpack.encode(Note(1))], [0] * 50)
    message, fds = receiving.receive()
    assert (message, len(fds)) == (Note(1), fds_max)
    assert len(os.listdir("/proc/self/fd")) == before + fds_max
    socket.send_fds(left, [b"\xc1 nonsense"], [0] * 50)
    with pytest.raises(msgspec.DecodeError):
        receiving.receive()
    assert len(os.listdir("/proc/self/fd")) == before + fds_max
    for fd in fds:
        os.close(fd)
    left.close()
    right.close()


@pytest.mark.parametrize("fds_max", [0, 1])
def test_a_packet_of_an_untrusted_sender_that_announces_further_packets_is_invalid(fds_max):
    left, right = pair()
    right.setblocking(False)
    left.send(MORE)
    left.send(MORE)
    with pytest.raises(msgspec.DecodeError):
        Channel(right, Note, fds_max=fds_max).receive()
    assert right.recv(10) == MORE
    left.close()
    right.close()


def test_a_message_that_is_nested_too_deeply_is_invalid_and_its_descriptors_are_closed(ends):
    left, right = ends
    before = set(os.listdir("/proc/self/fd"))
    nested = b"\x94\xa4Note\x01\xa0" + b"\x91" * 3000 + b"\xc0"
    socket.send_fds(left._end, [nested], [left.fileno()])
    with pytest.raises(ValueError, match="nested too deeply"):
        right.receive()
    assert set(os.listdir("/proc/self/fd")) == before
    left.send(Note(2))
    assert right.receive() == (Note(2), [])


def test_the_largest_packet_of_the_system_can_be_sent(ends):
    left, right = ends
    overhead = len(msgspec.msgpack.encode(Note(1, "x" * 100_000))) - 100_000
    left.send(Note(1, "x" * (packet_bytes_max() - overhead)))
    assert len(right.receive()[0].text) == packet_bytes_max() - overhead
