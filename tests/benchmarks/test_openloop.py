"""Every request of a plan gets one outcome: answered correctly, refused with a reason, or lost."""

import hashlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks import openloop
from benchmarks.openloop import Generator, Outcome, Plan, Target, attainment, count_kinds

TENSORS = b"\x00\x01\x02\x03" * 1000
RIGHT = hashlib.sha256(TENSORS).digest()


class RequestHandler(BaseHTTPRequestHandler):
    """A server that answers as a node would, each path in a different way."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_POST(self):
        payload = self.rfile.read(int(self.headers["content-length"]))
        self.server.payloads.append((self.path, payload))
        if self.path == "/gone":
            self.close_connection = True
        elif self.path == "/crossed" and self.server.crossed:
            self.server.crossed -= 1
            self.close_connection = True
        elif self.path == "/last":
            self.answer(503, b'{"error": "no room"}', {"connection": "close"})
        elif self.path == "/late":
            time.sleep(0.05)
            self.answer(200, b"{}" + TENSORS, {"inference-header-content-length": "2", "overwinter-start": "host"})
        elif self.path == "/silent":
            self.server.released.wait(10)
        elif self.path == "/busy":
            self.answer(503, b'{"error": "no room"}', {})
        elif self.path == "/mute":
            self.answer(500, b"", {})
        else:
            self.answer(200, b"{}" + TENSORS, {"inference-header-content-length": "2", "overwinter-start": "host"})

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # A connection that the system refuses is tried again only after a second.
    request_queue_size = 1000


@pytest.fixture
def server():
    server = Server(("127.0.0.1", 0), RequestHandler)
    server.payloads = []
    server.crossed = 1
    server.connections = 0
    server.released = threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


class Impatient:
    """Polls again soon, as after a signal."""

    def __init__(self, poll):
        self.poll_ = poll

    def poll(self, seconds):
        return self.poll_.poll(min(seconds, 0.01))

    def __getattr__(self, name):
        return getattr(self.poll_, name)


def target(path, payload=0, digest=RIGHT):
    return Target(f"POST {path} HTTP/1.1\r\nhost: node\r\ncontent-length: 5\r\n\r\n".encode(), payload, digest)


def run(server, targets, arrivals, patience_s=30.0):
    plan = Plan(targets, [b"first", b"other"], arrivals, patience_s)
    return sorted(Generator(server.server_port, plan).run(), key=lambda outcome: outcome.planned_at_s)


def test_answers_come_with_their_start(server):
    outcomes = run(server, [target("/a"), target("/b", payload=1)], [(0.0, 0), (0.01, 1), (0.02, 0)])
    assert [(each.target, each.status, each.start, each.right) for each in outcomes] == [
        (0, 200, "host", True),
        (1, 200, "host", True),
        (0, 200, "host", True),
    ]
    assert sorted(server.payloads) == [("/a", b"first"), ("/a", b"first"), ("/b", b"other")]
    assert count_kinds(outcomes) == {"answered": 3, "refused": 0, "lost": 0}


def test_a_wrong_answer_counts_as_lost(server):
    assert count_kinds(run(server, [target("/a", digest=b"")], [(0.0, 0)]))["lost"] == 1


def test_a_refusal_must_say_why(server):
    outcomes = run(server, [target("/busy"), target("/mute")], [(0.0, 0), (0.01, 1)])
    assert [(each.kind, each.status, each.start) for each in outcomes] == [
        ("refused", 503, "no room"),
        ("lost", 500, ""),
    ]


def test_a_connection_that_ends_with_its_answer_is_not_used_again(server):
    outcomes = run(server, [target("/last")], [(0.0, 0), (0.1, 0), (0.2, 0)])
    assert [(each.kind, each.start) for each in outcomes] == [("refused", "no room")] * 3
    assert len(server.payloads) == 3


def test_a_closed_connection_loses_one_request_and_no_other(server):
    outcomes = run(server, [target("/a"), target("/gone")], [(0.0, 1), (0.1, 0), (0.2, 1), (0.3, 0)])
    assert [each.kind for each in outcomes] == ["lost", "answered", "lost", "answered"]
    assert outcomes[0].start
    # The request on the connection that was open before was sent once more.
    assert [path for path, _ in server.payloads] == ["/gone", "/a", "/gone", "/gone", "/a"]


def test_a_request_that_crosses_the_end_of_its_connection_is_sent_once_more(server):
    outcomes = run(server, [target("/a"), target("/crossed")], [(0.0, 0), (0.1, 1), (0.2, 0)])
    assert [each.kind for each in outcomes] == ["answered"] * 3


def test_a_request_that_a_node_has_seen_is_not_sent_again(server, monkeypatch):
    monkeypatch.setattr(openloop, "CROSSED_MAX_S", 0.0)
    outcomes = run(server, [target("/a"), target("/crossed")], [(0.0, 0), (0.1, 1)])
    assert [each.kind for each in outcomes] == ["answered", "lost"]


def test_answers_are_read_between_requests_that_are_sent_late(server):
    # All are planned for the same moment; further connections are needed only while an answer is on its way.
    outcomes = run(server, [target("/a")], [(0.0, 0)] * 800)
    assert count_kinds(outcomes)["answered"] == 800
    assert server.connections < 800


def test_patience_begins_when_the_last_request_is_sent(server):
    # It was planned for long ago, as when the generator was delayed.
    outcomes = run(server, [target("/late")], [(-60.0, 0)])
    assert [each.kind for each in outcomes] == ["answered"]


def test_a_server_that_never_answers_delays_no_other_request(server):
    outcomes = run(server, [target("/silent"), target("/a")], [(0.0, 0), (0.01, 1)], patience_s=2.0)
    assert [each.kind for each in outcomes] == ["lost", "answered"]


def test_requests_to_a_closed_port_are_lost_and_the_generator_continues():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    outcomes = Generator(port, Plan([target("/a")], [b"first"], [(0.0, 0), (0.01, 0)], 1.0)).run()
    assert [each.kind for each in outcomes] == ["lost", "lost"]


def test_the_answers_of_a_plan_that_is_ended_early_are_still_read(server):
    generator = Generator(server.server_port, Plan([target("/a")], [b"first"], [(0.0, 0), (3600.0, 0)], 30.0))
    ended = threading.Timer(0.05, generator.stop)
    # The generator polls until the next arrival or a signal; here it polls more often.
    generator._poll = Impatient(generator._poll)
    ended.start()
    assert [each.kind for each in generator.run()] == ["answered"]


def test_a_plan_may_be_ended_while_its_next_request_is_looked_at(server):
    class Ending(tuple):
        def __getitem__(self, at):
            generator.stop()
            return super().__getitem__(at)

    plan = Plan([target("/a")], [b"first"], [Ending((0.0, 0)), (3600.0, 0)], 30.0)
    generator = Generator(server.server_port, plan)
    generator._poll = Impatient(generator._poll)
    assert [each.kind for each in generator.run()] == ["answered"]


def test_attainment_counts_what_was_answered_in_time():
    def outcome(latency_s, status=200, function=0):
        return Outcome(function, 0.0, 0.0, latency_s, status, "warm", status == 200)

    outcomes = [outcome(0.05), outcome(0.2), outcome(0.2, function=1), outcome(0.01, status=503)]
    assert attainment(outcomes, [0.1, 0.3]) == 0.5
    assert attainment([], []) == 1.0
