"""The fuzzer repeats its inputs for a seed, and distinguishes violations from allowed outcomes."""

import errno
import json
import socket
import threading
from random import Random

import pytest

from benchmarks.fuzz.kind import Attacker, Try, case_of
from benchmarks.fuzz.report import longest
from benchmarks.hostile import connections, mutation
from benchmarks.hostile.attacked_node import Journal, Tail, tracebacks
from benchmarks.hostile.bodies import HEAVY, LIGHT, row_of
from benchmarks.hostile.canaries import canary, canary_in
from benchmarks.hostile.exchange import ATTACKER, HungError, Reply, connect, exchange
from benchmarks.hostile.neighbour import Record
from benchmarks.hostile.verdicts import Tally, fatal_signal, unforeseen

VALID = {"inputs": [{"name": "x", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}], "id": "a", "deep": {"er": [None]}}


def mutants(seed, count=200):
    return [repr(mutation.tree(VALID, Random(f"{seed}/{number}"))) for number in range(count)]


def test_a_seed_gives_the_same_mutants_again_and_another_gives_others():
    assert mutants(1) == mutants(1)
    assert mutants(1) != mutants(2)
    assert len(set(mutants(1))) > 150


def test_mutating_does_not_change_the_valid_value():
    before = repr(VALID)
    mutants(3)
    assert repr(VALID) == before


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256))])
def test_mutants_of_bytes_are_repeated_by_their_seed(data):
    made = [mutation.content(data, Random(seed)) for seed in range(100)]
    assert made == [mutation.content(data, Random(seed)) for seed in range(100)]
    assert len(set(made)) > 10


@pytest.mark.parametrize("make", LIGHT.values(), ids=LIGHT.keys())
def test_hostile_bodies_are_repeated_by_their_seed(make):
    assert [make(Random(seed)) for seed in range(50)] == [make(Random(seed)) for seed in range(50)]


@pytest.mark.parametrize("name", [name for name in HEAVY if "MiB" not in name and "million" not in name])
def test_heavy_bodies_have_the_length_that_they_announce(name):
    head, _, body = HEAVY[name]().partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head


@pytest.mark.parametrize("name", [name for name in connections.SENT if name not in ("slow", "one long header")])
def test_hostile_connections_are_repeated_by_their_seed(name):
    first, second = (next(connections.SENT[name](Random(7))) for _ in range(2))
    assert first == second


def test_a_request_has_a_row_to_check_only_if_it_is_certainly_valid():
    sure = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4.5]}]}
    assert row_of(sure) == [1.0, 2.0, 3.0, 4.5]
    assert row_of({"inputs": []}) is None
    assert row_of({"inputs": [{**sure["inputs"][0], "shape": [4]}]}) is None
    assert row_of([None]) is None


def test_an_attacker_waits_until_the_machine_has_a_free_port(monkeypatch):
    tries = []
    plain = socket.create_connection

    def scarce(*args):
        tries.append(args)
        if len(tries) == 1:
            raise OSError(errno.EADDRNOTAVAIL, "no port is left")
        return plain(*args)

    monkeypatch.setattr(socket, "create_connection", scarce)
    with socket.create_server(("127.0.0.1", 0)) as server, connect(server.getsockname()[1]) as end:
        assert end.getsockname()[0] == ATTACKER
    assert len(tries) == 2


class Kind:
    name = "kind"
    cases = ("a", "b", "c", "d", "e")


def test_each_case_comes_once_in_each_round_and_a_try_can_be_repeated_by_its_number():
    order = [case_of(Kind, 1, number) for number in range(20)]
    assert order[:5] == list(Kind.cases)
    assert all(set(order[at : at + 5]) == set(Kind.cases) for at in range(0, 20, 5))
    assert [case_of(Kind, 1, number) for number in range(20)] == order


def reply(status, body, kind="application/json"):
    return Reply(status, {"content-type": kind}, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (None, False),
        (reply(200, {}), False),
        (reply(400, {"error": "no"}), False),
        (reply(503, {"error": "full"}), False),
        (reply(507, {"error": "disk"}), False),
        (reply(500, {"error": "function f failed: its process was killed by signal 9"}), False),
        (reply(500, {"error": "internal error (KeyError); see the node's log"}), True),
        (reply(500, b"Internal Server Error", "text/plain"), True),
        (reply(502, {"error": "?"}), True),
    ],
)
def test_a_500_is_unexpected_unless_a_function_caused_it(answer, failure):
    assert bool(unforeseen(answer)) == failure


def test_only_signals_that_a_process_brings_upon_itself_are_fatal():
    assert fatal_signal("its process was killed by signal 11 (SIGSEGV): it may have written") == "SIGSEGV"
    assert fatal_signal("its process was killed by signal 9 (SIGKILL)") == ""
    assert fatal_signal("its process exited with status 1") == ""


def test_tracebacks_are_shown_from_the_lines_before_to_the_last_error_whoever_wrote_them():
    log = ["far ahead", "1", "2", "3", "Traceback (most recent call last):", "  File x", "KeyError: 1", "calm"]
    theirs = [
        "zygote: Traceback (most recent call last):",
        "zygote:   File y",
        "zygote: overwinter.a.BError: gone",
        "z",
    ]
    assert tracebacks([line.encode() for line in log]) == log[1:-1]
    assert tracebacks([line.encode() for line in log + theirs]) == log[1:] + theirs[:-1]
    assert tracebacks([b"KeyError: 1", b"all is well"]) == []


def test_harms_are_counted_by_kind_and_the_first_are_kept_with_their_numbers():
    tally = Tally()
    for number in range(9):
        tally.begin("requests", "json", number)
        tally.add("wrong", f"number {number}")
    assert tally.total("wrong") == 9
    assert tally.tries["requests"] == 9
    assert [example.number for example in tally.examples] == [0, 1, 2]


def test_a_worker_of_a_function_without_code_that_dies_by_itself_is_a_crash(tmp_path):
    def deployed(name, has_handler):
        return {"type": "Deployed", "function": {"id": name, "has_handler": has_handler}}

    def started(worker, name):
        return {"type": "StartWorker", "worker": worker, "function": name}

    def ended(worker, reason):
        return {"type": "WorkerExited", "worker": worker, "reason": reason}

    file = tmp_path / "journal"
    steps = [
        [0, deployed("plain@1", False), [started(1, "plain@1")]],
        [1, deployed("coded@1", True), [started(2, "coded@1"), started(3, "plain@1")]],
        [2, ended(1, "its process was killed by signal 11 (SIGSEGV)"), []],
        [3, ended(2, "its process was killed by signal 11 (SIGSEGV)"), []],
        [4, ended(3, "its process was killed by signal 9 (SIGKILL)"), []],
    ]
    file.write_text('{"policy": "overwinter"}\n' + "".join(json.dumps(step) + "\n" for step in steps))
    journal = Journal(file)
    assert [function for function, _ in journal.deaths()] == ["plain@1"]
    assert journal.deaths() == []


def test_a_tail_gives_whole_lines_once(tmp_path):
    file = tmp_path / "log"
    tail = Tail(file)
    assert tail.lines() == []
    file.write_bytes(b"one\ntw")
    assert tail.lines() == [b"one"]
    with file.open("ab") as more:
        more.write(b"o\n")
    assert tail.lines() == [b"two"]


def test_a_tail_follows_the_new_file_when_a_file_is_replaced(tmp_path):
    file = tmp_path / "journal"
    file.write_bytes(b"one of the first life\n")
    tail = Tail(file)
    assert tail.lines() == [b"one of the first life"]
    file.rename(tmp_path / "journal.1")
    file.write_bytes(b"a second\n")
    assert tail.lines() == [b"a second"]


def test_a_canary_is_found_with_its_place():
    assert canary_in(b"\x00" + canary("weight").encode() + b"\x00") == "weight"
    assert canary_in(b"overwinter-canary-weight-") == ""


def test_the_longest_stall_is_charged_to_the_try_in_which_it_began():
    past_tries = [Try(0.0, 1.0, "requests", "json", 0), Try(1.0, 2.0, "uploads", "dripping", 5)]
    result = [
        Record("live", 0.5, 0.2, "right"),
        Record("live", 1.5, 0.9, "right"),
        Record("live", 1.6, 0.1, "right"),
        Record("infer", 1.6, 5.0, "right"),
        Record("live", 9.0, 9.0, "right"),
    ]
    assert longest(result, past_tries, "live") == {"requests": (0.2, "json (0)"), "uploads": (0.9, "dripping (5)")}


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def answering(listener, content):
    def answer():
        end, _ = listener.accept()
        with end:
            end.recv(1 << 16)
            end.sendall(content)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return listener.getsockname()[1]


def test_an_answer_is_read_completely_for_any_kind_of_length(listener):
    for content in (
        b"content-length: 2\r\n\r\nok",
        b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"\r\nok",
    ):
        got = exchange(answering(listener, b"HTTP/1.1 200 OK\r\n" + content), b"GET / HTTP/1.1\r\n\r\n", 5.0)
        assert got is not None
        assert got.status == 200
        assert b"ok" in got.body


def test_half_an_answer_is_none(listener):
    port = answering(listener, b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
    assert exchange(port, b"GET / HTTP/1.1\r\n\r\n", 5.0) is None


def test_an_open_connection_without_an_answer_counts_as_hung(listener):
    with pytest.raises(HungError):
        exchange(listener.getsockname()[1], b"GET / HTTP/1.1\r\n\r\n", 0.05)


def test_tries_are_run_in_order_and_repeated_by_their_numbers(tmp_path):

    class AttackedNode:
        def __init__(self):
            self.tally = Tally()
            self.on_empty = []
            self.expects_death = False

        def examine(self):
            pass

    class Noting(Kind):
        def prepare(self):
            pass

        def run(self, case, rng):
            attacked.tally.add("wrong", f"{case} {rng.random()}")

    attacked = AttackedNode()
    Attacker(attacked, 1).run_tries(Noting(), 60.0, 2, 3)
    again = AttackedNode()
    attacked, first = again, attacked
    Attacker(again, 1).run_tries(Noting(), 60.0, 2, 3)
    assert [example.case for example in first.tally.examples] == ["c", "d", "e"]
    assert first.tally.examples == again.tally.examples
