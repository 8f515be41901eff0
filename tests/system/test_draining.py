"""A stopping node answers open requests, refuses new ones, and ends when all are answered, or at its limit."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from .nodes import START_S, NodeProcess, ask, deploy, wait_until

SLOW = """
import time

def preprocess(inputs, state):
    time.sleep(float(inputs["x"][0, 0]))
    return inputs
"""
LONG_S = 100.0
"""No test waits this long."""


class OpenRequest:
    """A request in progress in a worker; it takes this many seconds."""

    def __init__(self, node: NodeProcess, seconds: float) -> None:
        runs = str(node.steps()).count("'Run'")
        self.answer: list[float] = []
        self.error = ""
        self._asking = threading.Thread(target=self._ask, args=(node, seconds))
        self._asking.start()
        wait_until(lambda: str(node.steps()).count("'Run'") > runs)

    def _ask(self, node: NodeProcess, seconds: float) -> None:
        try:
            self.answer = ask(node, "slow", seconds)
        except Exception as error:  # noqa: BLE001 - the test checks it
            self.error = str(error)

    def join(self) -> None:
        self._asking.join()


@contextmanager
def stop_begun(node: NodeProcess) -> Iterator[httpx.Client]:
    """Begin to stop the node, and yield a client of it."""

    def stops() -> bool:
        try:
            return http.get("/v2/health/ready").json() == {"ready": False}
        except httpx.TransportError:
            # With a short drain limit, the node may have ended already.
            return True

    with httpx.Client(base_url=node.url, timeout=20, trust_env=False) as http:
        # A node is not ready while its base zygote is slow to answer.
        wait_until(lambda: http.get("/v2/health/ready").json() == {"ready": True})
        node.process.send_signal(signal.SIGTERM)
        wait_until(stops)
        yield http


def assert_ends(node: NodeProcess) -> None:
    assert node.process.wait(START_S) == 0
    node.client.close()


def test_open_requests_are_answered_and_new_ones_refused(make_node):
    node = make_node("--drain-s", "60")
    deploy(node, "slow", handler=SLOW)
    [worker] = node.worker_pids()
    os.kill(worker, signal.SIGSTOP)
    asked = OpenRequest(node, 0.0)
    with stop_begun(node) as http:
        refused = [http.get("/v2/models/slow"), http.get("/metrics"), http.post("/v2/models/slow/infer", content=b"{}")]
        assert http.get("/v2/health/live").json() == {"live": True}
    os.kill(worker, signal.SIGCONT)
    assert [(answer.status_code, answer.headers["retry-after"]) for answer in refused] == [(503, "1")] * 3
    asked.join()
    assert (asked.answer, asked.error) == ([1.0] * 4, "")
    assert_ends(node)
    wait_until(lambda: any("for 1 requests in progress" in line for line in node.said))


@pytest.mark.parametrize(("drain_s", "again"), [("0.5", False), ("60", True)])
def test_requests_beyond_the_drain_limit_or_at_a_second_signal_are_refused(make_node, drain_s, again):
    node = make_node("--drain-s", drain_s)
    deploy(node, "slow", handler=SLOW)
    asked = OpenRequest(node, LONG_S)
    with stop_begun(node):
        if again:
            node.process.send_signal(signal.SIGTERM)
    assert_ends(node)
    asked.join()
    assert "stopped" in asked.error
