"""The output of workers is logged with the worker's name; a flood is limited and affects no other worker."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from overwinter.node import output
from overwinter.node.output import Output, Outputs

from .log_lines import LogLines
from .rig import AddOne, Function, until

FLOOD = """
import os
def preprocess(inputs, state):
    for _ in range(20):
        os.write(1, b"me! " * 4096)
        os.write(2, b"and me!\\n" * 2048)
    return inputs
"""
TALK = """
def preprocess(inputs, state):
    print("hello", flush=True)
    return inputs
"""


def test_excessive_output_is_limited_and_output_is_logged_with_its_source(rig):
    rig.said.clear()

    async def scene():
        flooding = await rig.start_worker(Function(AddOne(), {"x": torch.zeros(2, 4)}, FLOOD))
        talking = await rig.start_worker(Function(AddOne(), {"x": torch.zeros(2, 4)}, TALK))
        flood = rig.begin(flooding, x=torch.zeros(1, 4))
        talk = rig.begin(talking, x=torch.zeros(1, 4))
        await rig.ended(flood, talk)
        await until(lambda: any("worker f@1: hello" in line for line in rig.said))
        await until(lambda: any("worker f@1:" in line and "were dropped" in line for line in rig.said))

    rig.run(scene())
    results = [line for line in rig.said if "me!" in line]
    assert 0 < len(results) < 20 * output.LINES_MAX
    assert max(len(line) for line in results) < output.LINE_BYTES_MAX + 100


async def logged(*parts: bytes) -> list[str]:
    said = LogLines()
    pipe_end = Outputs(said).open("worker")
    pipe_end.assign("f@1")
    for part in parts:
        os.write(pipe_end.far_end, part)
        await asyncio.sleep(0)
    pipe_end.close()
    return said


def test_lines_are_complete_and_have_no_control_characters():
    said = asyncio.run(logged(b"one\ntw", b"o\n\x1b[2Jthree\r\nlast"))
    assert said == [f"worker f@1: {line}" for line in ("one", "two", "\ufffd[2Jthree", "last")]


def test_the_number_of_dropped_lines_is_logged():
    said = asyncio.run(logged(b"x\n" * (output.LINES_MAX + 7)))
    assert len(said) == output.LINES_MAX + 1
    assert "7 more lines" in said[-1]


def test_no_descriptor_stays_open():
    async def many():
        for _ in range(20):
            await logged(b"x\n")

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(many())
    # Buffers of an earlier test may have been closed in a thread meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before


def test_lines_that_are_dropped_are_only_counted(monkeypatch):
    added = []
    add = Output._add
    monkeypatch.setattr(Output, "_add", lambda self, line: added.append(line) or add(self, line))
    said = asyncio.run(logged(b"first\n" + b"\n" * 30_000, b"\n" * 30_000 + b"last"))
    assert len(added) == output.LINES_MAX + 1
    assert added[0] == b"first"
    assert added[-1] == b"last"
    assert len(said) == output.LINES_MAX + 1
    assert f"{60_002 - output.LINES_MAX} more lines" in said[-1]


@contextmanager
def tenants_that_print(loud: int, lines: int) -> Iterator[tuple[LogLines, list[Output]]]:
    """Yield the log, and pipes with output: `loud` pipes of one tenant with `lines` lines each, and one of another
    tenant with one line.
    """
    said = LogLines()
    outputs = Outputs(said)
    pipes = [outputs.open(f"loud {at}", "loud") for at in range(loud)] + [outputs.open("quiet", "quiet")]
    try:
        for pipe in pipes:
            os.write(pipe.far_end, b"x\n" * (lines if pipe.tenant == "loud" else 1))
        yield said, pipes
    finally:
        for pipe in pipes:
            pipe.close()


def test_pipes_are_read_a_few_at_a_time_in_turns_of_the_tenants(monkeypatch):
    read = []
    monkeypatch.setattr(output, "PAUSE_S", 3600)
    monkeypatch.setattr(Output, "read", lambda self: read.append(self.tenant))

    async def scene() -> None:
        with tenants_that_print(40, 1):
            await until(lambda: read)
            assert len(read) == output.PIPES_AT_ONCE
            assert read.index("quiet") < 2
            assert read.count("loud") == output.PIPES_AT_ONCE - 1

    asyncio.run(scene())


def test_the_lines_of_all_processes_of_a_tenant_are_limited_and_others_lose_none(monkeypatch):
    monkeypatch.setattr(output, "ALL_LINES_MAX", 100)
    monkeypatch.setattr(output, "PIPES_AT_ONCE", 1000)
    monkeypatch.setattr(output, "WINDOW_S", 3600)

    async def scene() -> None:
        with tenants_that_print(30, 20) as (said, pipes):
            await until(lambda: any(line.startswith("quiet") for line in said))
            assert said.count("quiet: x") == 1
            # Until the quiet tenant printed, the loud one could use the whole limit.
            assert 50 <= len(said) - 1 <= 100
            pipes[0]._outputs._end_window()
            reports = [line for line in said if "dropped" in line]
            assert len(reports) == output.REPORTS_MAX + 1
            assert "other processes of tenant loud were dropped" in reports[-1]
            dropped = sum(int(line.split(" more lines")[0].split()[-1]) for line in reports)
            assert dropped + sum(line.endswith(": x") for line in said) == 30 * 20 + 1
            said.clear()
            for pipe in pipes:
                os.write(pipe.far_end, b"x\n" * 20)
            await until(lambda: any(line.startswith("quiet") for line in said))
            assert [line.startswith("quiet") for line in said].count(True) == 20
            assert len(said) == 50 + 20

    asyncio.run(scene())
