"""The output of workers is logged with the worker's name; a flood is cut and affects no other worker."""

import asyncio
import os

import torch

from overwinter.node import output
from overwinter.node.output import Output

from .log_lines import LogLines
from .rig import Function, Same, until

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


def test_excessive_output_is_cut_and_output_is_logged_with_its_source(rig):
    rig.said.clear()

    async def scene():
        flooding = await rig.start_worker(Function(Same(), {"x": torch.zeros(2, 4)}, FLOOD))
        talking = await rig.start_worker(Function(Same(), {"x": torch.zeros(2, 4)}, TALK))
        flood = rig.begin(flooding, x=torch.zeros(1, 4))
        talk = rig.begin(talking, x=torch.zeros(1, 4))
        await rig.ended(flood, talk)
        await until(lambda: any("worker f@1: hello" in line for line in rig.said))
        await until(lambda: any("worker f@1:" in line and "were dropped" in line for line in rig.said))

    rig.run(scene())
    results = [line for line in rig.said if "me!" in line]
    assert 0 < len(results) < 20 * output.LINES_MAX
    assert max(len(line) for line in results) < output.LINE_BYTES_MAX + 100


async def spoken(*parts: bytes) -> list[str]:
    said = LogLines()
    mouth = Output("worker", said)
    mouth.assign("f@1")
    for part in parts:
        os.write(mouth.far_end, part)
        await asyncio.sleep(0)
    mouth.close()
    return said


def test_lines_are_complete_and_have_no_control_characters():
    said = asyncio.run(spoken(b"one\ntw", b"o\n\x1b[2Jthree\r\nlast"))
    assert said == [f"worker f@1: {line}" for line in ("one", "two", "\ufffd[2Jthree", "last")]


def test_the_number_of_dropped_lines_is_logged():
    said = asyncio.run(spoken(b"x\n" * (output.LINES_MAX + 7)))
    assert len(said) == output.LINES_MAX + 1
    assert "7 more lines" in said[-1]


def test_no_descriptor_stays_open():
    async def many():
        for _ in range(20):
            await spoken(b"x\n")

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(many())
    assert len(os.listdir("/proc/self/fd")) == before


def test_lines_that_are_dropped_are_only_counted(monkeypatch):
    added = []
    add = Output._add
    monkeypatch.setattr(Output, "_add", lambda self, line: added.append(line) or add(self, line))
    said = asyncio.run(spoken(b"first\n" + b"\n" * 30_000, b"\n" * 30_000 + b"last"))
    assert len(added) == output.LINES_MAX + 1
    assert added[0] == b"first"
    assert added[-1] == b"last"
    assert len(said) == output.LINES_MAX + 1
    assert f"{60_002 - output.LINES_MAX} more lines" in said[-1]
