"""A node needs no new thread when the system refuses further threads."""

import asyncio
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from overwinter.api.deployer import package
from overwinter.bootstrap import running
from overwinter.core.config import NodeConfig
from overwinter.core.errors import MachineError
from overwinter.core.pipeline import Pipeline, Stage
from overwinter.model.export import export
from overwinter.node.threads import SharedThreads, Threads
from overwinter.server import ZYGOTE_ENVIRONMENT
from overwinter.store.repository import Repository
from tests.node.log_lines import LogLines
from tests.node.rig import AddOne, until

NUMBER = 3
STACK_BYTES = 1 << 46
"""No machine has memory for such a stack."""

ENDS_WITHOUT = """
import os, signal, sys, threading
from overwinter.core.config import NodeConfig
from overwinter.server import open_listener, run

def end():
    threading.stack_size(int(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGTERM)

with open_listener("127.0.0.1", 0) as listener:
    run(NodeConfig(data=sys.argv[1] + "/data", host_store=sys.argv[1]), listener, lambda text, **_: print(text), end)
"""

ENDS_BADLY = """
import asyncio, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from overwinter.core.config import NodeConfig
from overwinter.server import open_listener, run

class Unfinished(ThreadPoolExecutor):
    def shutdown(self, *_, **__):
        raise RuntimeError("work was left")

def end():
    asyncio.get_running_loop().set_default_executor(Unfinished())
    os.kill(os.getpid(), signal.SIGTERM)

with open_listener("127.0.0.1", 0) as listener:
    run(NodeConfig(data=sys.argv[1] + "/data", host_store=sys.argv[1]), listener, print, end)
"""


@contextmanager
def no_more_threads():
    """Make the system refuse each new thread."""
    before = threading.stack_size(STACK_BYTES)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread().start()
        yield
    finally:
        threading.stack_size(before)


def test_work_runs_on_threads_that_already_exist():
    begun = []
    with Threads(NUMBER, "some", lambda: begun.append(threading.get_ident())) as threads:
        together = threading.Barrier(NUMBER)
        with no_more_threads():
            done = [threads.submit(together.wait, 10.0) for _ in range(NUMBER)]
            done += [threads.submit(threading.get_ident) for _ in range(10)]
            assert sorted(each.result() for each in done[:NUMBER]) == list(range(NUMBER))
            assert {each.result() for each in done[NUMBER:]} <= set(begun)
    assert len(begun) == NUMBER


def test_one_tenant_gets_half_of_shared_threads():
    async def scene():
        threads, release, running = SharedThreads(4, "some"), threading.Event(), []

        def work(name):
            running.append(name)
            release.wait(10)
            return name

        calls = [asyncio.create_task(threads.run("a", lambda: work("a"))) for _ in range(6)]
        calls.append(asyncio.create_task(threads.run("b", lambda: work("b"))))
        await until(lambda: len(running) == 3)
        assert sorted(running) == ["a", "a", "b"]
        release.set()
        return await asyncio.gather(*calls)

    assert asyncio.run(scene()) == ["a"] * 6 + ["b"]


def test_a_node_that_may_start_no_thread_fails_at_its_start_with_the_reason(tmp_path):
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path))

    async def scene():
        async with running(config, ZYGOTE_ENVIRONMENT, LogLines()):
            raise AssertionError("it has started")

    before = threading.enumerate()
    with no_more_threads(), pytest.raises(MachineError, match=r"pids\.max"):
        asyncio.run(scene())
    assert [each for each in threading.enumerate() if each not in before] == []


def test_a_node_keeps_serving_when_the_system_refuses_threads(tmp_path):
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), profile_on_deploy=False)
    made = export(AddOne(), {"x": torch.ones(1)}, {})
    packed = package("f", made.program, made.weights)
    repository = Repository(tmp_path / "data")
    for address, content in packed.contents.items():
        repository.put(packed.manifest.tenant, address, bytes(content()), 0.0)
    repository.register(packed.manifest, 0.0)
    repository.close()

    async def scene():
        async with running(config, ZYGOTE_ENVIRONMENT, LogLines()) as node:
            with no_more_threads():
                waking = asyncio.create_task(node.load("f", None))
                # A thread loads its blocks.
                await until(lambda: node.view("f", None).info().missing_bytes == 0)
                assert b"overwinter_" in await node.telemetry.metrics()
                pipeline = Pipeline(
                    name="p",
                    inputs=("x",),
                    stages={"s": Stage(function="f", inputs={"x": "input:x"})},
                    outputs={"y": "s:y"},
                )
                await node.deploy_pipeline(pipeline, packed.manifest.tenant)
                await node.remove("p", None)
                await node.remove("f", None)
                assert node.live()
            await asyncio.gather(waking, return_exceptions=True)

    asyncio.run(scene())


def test_other_failures_at_the_end_of_the_loop_are_raised(tmp_path):
    command = [sys.executable, "-c", ENDS_BADLY, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "work was left" in ended.stderr) == (1, True), ended.stderr


def test_a_node_stops_cleanly_when_the_system_refuses_threads(tmp_path):
    command = [sys.executable, "-c", ENDS_WITHOUT, str(tmp_path), str(STACK_BYTES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
