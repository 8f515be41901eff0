"""What a node did can be done again: its journal, fed to a fresh scheduler, gives the same actions."""

import concurrent.futures
from pathlib import Path

import pytest

from overwinter.core.errors import DeadlineError
from overwinter.core.journal import Entry, read_journal
from overwinter.scheduler.scheduler import Scheduler
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
    assert_replays(node.journal)
    steps = assert_replays(node.journal.with_name("journal.jsonl.1"))
    assert len(steps) > 50
    assert {type(action).__name__ for step in steps for action in step.actions} >= {
        "Stage", "StartBody", "Run", "Reply", "StopBody", "Refuse", "Announce", "SetAlarm", "Drop", "Prepare",
    }  # fmt: skip


def assert_replays(journal: Path) -> list[Entry]:
    """The steps of a journal, once a fresh scheduler has taken them all."""
    with journal.open("rb") as file:
        config, entries = read_journal(file)
        scheduler, steps = Scheduler(config), list(entries)
    assert config.cores
    assert config.host_bytes
    for step in steps:
        assert tuple(scheduler.handle(step.event, step.now)) == step.actions
    return steps
