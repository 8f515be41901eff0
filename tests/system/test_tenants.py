"""A tenant whose handlers never answer delays no other, and its workers end when its functions are removed."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from overwinter.core.errors import NotFoundError
from tests.system.nodes import NodeProcess, ask, deploy, wait_gone, wait_until

SLEEPERS = 6
WORKERS_MAX = 4
HANDLER = (
    "import time\n"
    "def preprocess(inputs, state):\n"
    # Not at its trial, which is on zeros.
    "    if inputs['x'].any():\n"
    "        time.sleep(86400)\n"
    "    return inputs\n"
)


def never(node: NodeProcess, name: str) -> None:
    with pytest.raises(NotFoundError, match="removed"):
        ask(node, name)


def test_sleeping_handlers_delay_no_other_tenant_and_end_when_they_are_removed(make_node):
    node = make_node("--workers-max", f"{WORKERS_MAX}", "--drain-timeout-s", "1")
    deploy(node, "well", tenant="well")
    names = [f"sleeper{number}" for number in range(SLEEPERS)]
    for name in names:
        apart = {"timeout_s": 86_400.0, "keep_alive_s": 0.0, "isolation": "function"}
        deploy(node, name, handler=HANDLER, tenant="asleep", **apart)
    with ThreadPoolExecutor(SLEEPERS) as pool:
        asked = [pool.submit(never, node, name) for name in names]
        node.wait_for("Arrived", SLEEPERS)
        for _ in range(5):
            assert ask(node, "well") == [3.0] * 4
        workers = wait_until(lambda: len(pids := node.worker_pids()) == WORKERS_MAX and pids)
        asleep = node.client.for_tenant("asleep")
        for name in names:
            asleep.remove(name)
        for each in asked:
            each.result(60)
    node.client.for_tenant("well").remove("well")
    wait_gone(workers)
