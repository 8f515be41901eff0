"""The journal of a node, fed to a new scheduler, gives the same actions, for any hash seed."""

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overwinter.core.errors import DeadlineError
from overwinter.core.journal import read_journal
from tests.replay.replayed import replayed
from tests.system.nodes import Scale, ask, deploy
from tests.system.test_serving import SLOW, wait_for_answer


def test_a_live_journal_replays_to_the_same_actions(make_node):
    node = make_node()
    deploy(node, "f", keep_alive_s=0.05, max_batch=4)
    deploy(node, "f", Scale(3.0), handler=SLOW)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ask(node, "f", 0.01, version=1 + n % 2), range(24)))
    with pytest.raises(DeadlineError):
        wait_for_answer(node, "f", 0.3, timeout_s=0.05)
    node.client.unload("f")
    node.stop()
    node.start()
    ask(node, "f", 0.01, version=1)
    node.stop()
    journals = [node.journal.with_name("journal.jsonl.1"), node.journal]
    steps, later = map(replayed, journals)
    for seed in ("0", "1"):
        # In a separate process, because the hash seed, and with it the order of sets of strings, is fixed within one.
        result = subprocess.run(
            [sys.executable, "-m", "tests.replay.replayed", *map(str, journals)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
        )
        assert result.stdout.split() == [b"%d" % len(each) for each in (steps, later)]
    with node.journal.open("rb") as file:
        config, _ = read_journal(file)
    assert config.cores
    assert config.host_bytes
    assert len(steps) > 50
    assert {type(action).__name__ for step in steps for action in step.actions} >= {
        "LoadBlocks", "StartWorker", "Run", "Reply", "StopWorker", "Refuse", "LoadFinished", "SetAlarm", "Drop",
        "Prepare",
    }  # fmt: skip
