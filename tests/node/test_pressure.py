"""The measurement of the machine's memory, and the request to free memory when it is short."""

import asyncio
from pathlib import Path

import pytest

from overwinter.core.events import Event, MemoryPressure
from overwinter.node.faults import Faults
from overwinter.node.pressure import available_bytes, total_bytes, watch_memory

NOWHERE = Path("/nowhere")


def test_the_system_says_what_can_be_had():
    free = available_bytes(cgroup=NOWHERE)
    assert free is not None
    assert free > 1 << 20


def test_a_container_s_limit_counts_and_what_can_be_dropped_is_free(tmp_path: Path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("800\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert available_bytes(NOWHERE, tmp_path) == 500
    for told in ("max", "", "0", "-5", "much"):
        (tmp_path / "memory.max").write_text(told + "\n")
        assert available_bytes(NOWHERE, tmp_path) is None
        assert total_bytes(tmp_path) == total_bytes(NOWHERE)


@pytest.mark.parametrize("told", ["", "MemAvailable:\n", "MemAvailable: much\n", "no sign in it\n"])
def test_a_system_that_does_not_say_what_can_be_had_is_not_believed(tmp_path: Path, told: str):
    (tmp_path / "meminfo").write_text(told)
    assert available_bytes(tmp_path / "meminfo", NOWHERE) is None


def test_just_what_is_lacking_is_asked_for():
    async def first_wish() -> Event:
        wish = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(watch_memory(100, wish.set_result, Faults([].append), lambda: 30))
        try:
            return await wish
        finally:
            task.cancel()

    assert asyncio.run(first_wish()) == MemoryPressure(70)
