"""A failure of the machine or of the node's own code ends one check, or only the work for one function."""

import asyncio
import errno

import pytest

from overwinter.bootstrap import running
from overwinter.core.config import NodeConfig
from overwinter.core.errors import ConflictError, StoreError, WorkerError
from overwinter.node import upkeep, verifying
from overwinter.node.accounting import Accounting
from overwinter.node.core_shares import CoreShares
from overwinter.node.faults import Faults, contain
from overwinter.node.footprints import Footprints
from overwinter.node.overuse import OveruseCheck
from overwinter.server import ZYGOTE_ENVIRONMENT
from overwinter.store.hosts import HostStores
from overwinter.store.repository import Repository
from tests.node.log_lines import LogLines
from tests.node.rig import until

CALLED = [
    (Footprints, "check"),
    (CoreShares, "check"),
    (OveruseCheck, "check"),
    (Accounting, "compare"),
    (verifying.Verifier, "_pass"),
    (HostStores, "capacity_bytes"),
    (Repository, "collect"),
]
"""What the periodic checks of the node call."""
FAILURES = [OSError(errno.EIO, "the disk fails"), MemoryError(), StoreError("a block cannot be read")]


def logged_of(failure: Exception) -> str:
    """Let the same work fail three times; return the only line that is logged."""
    said = LogLines()
    faults = Faults(said)
    for _ in range(3):
        with faults.contained("disk"):
            raise failure
    assert faults.counts == {"disk": 3}
    [line] = said
    assert "disk" in line
    return line


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_of_the_machine_is_counted_and_logged_once(failure):
    assert "raise failure" not in logged_of(failure)


@pytest.mark.parametrize("mistake", [TypeError("no"), RuntimeError("dictionary changed size during iteration")])
def test_a_mistake_in_the_nodes_code_is_counted_and_logged_once_with_its_traceback(mistake, mistakes):
    assert "raise failure" in logged_of(mistake)
    assert mistakes == [mistake] * 3
    mistakes.clear()


def node_in(tmp_path, said):
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), accounting_s=0.05, unneeded_keep_s=0.1)
    return running(config, ZYGOTE_ENVIRONMENT, said)


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "the disk fails"), TypeError("the disk fails")])
@pytest.mark.usefixtures("no_zygotes")
def test_a_node_survives_failures_of_its_periodic_checks(failure, tmp_path, monkeypatch, mistakes):
    monkeypatch.setattr(upkeep, "CAPACITY_EVERY_S", 0.05)
    monkeypatch.setattr(verifying, "ROUND_PAUSE_S", 0.05)
    tried = dict.fromkeys(CALLED, 0)

    def failing(called):
        def fail(*arguments):
            tried[called] += 1
            raise failure

        return fail

    for called in CALLED:
        monkeypatch.setattr(*called, failing(called))
    said = LogLines()

    async def scene():
        async with node_in(tmp_path, said) as node:
            await until(lambda: all(count > 1 for count in tried.values()))
            assert node.live()
            metrics = (await node.telemetry.metrics()).decode()
        result = [line for line in said if "the disk fails" in line]
        assert len(result) == len(set(result)) == len(CALLED)
        assert metrics.count("overwinter_checks_failed_total{what=") == len(CALLED)

    asyncio.run(scene())
    assert bool(mistakes) == isinstance(failure, TypeError)
    mistakes.clear()


@pytest.mark.parametrize("failure", [*FAILURES, ConflictError("not now")])
def test_work_for_one_function_reports_an_expected_failure_as_it_is(failure):
    assert failures_of(failure) == [failure]


@pytest.mark.parametrize("mistake", [TypeError("no"), KeyError(7), OverflowError("int too large"), RecursionError()])
def test_a_programming_error_in_work_for_one_function_fails_only_that_work(mistake):
    [failure] = failures_of(mistake)
    assert isinstance(failure, WorkerError)
    assert type(mistake).__name__ in str(failure)


def failures_of(failure: Exception) -> list[Exception]:
    """Return what is reported of work that fails, in a group whose other work completes."""
    reported, done = [], []

    async def fail():
        raise failure

    async def other():
        await asyncio.sleep(0)
        done.append(True)

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(contain(fail(), reported.append))
            tasks.create_task(other())

    asyncio.run(scene())
    assert done
    return reported
