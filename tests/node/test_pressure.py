"""The measurement of the machine's memory, and the request to free memory when it is short."""

import asyncio
from pathlib import Path

import pytest

from overwinter.core.events import Event, MemoryPressure
from overwinter.node.faults import Faults
from overwinter.node.pressure import available_bytes, total_bytes, watch_memory
from tests.node.log_lines import LogLines

NOWHERE = Path("/nowhere")


def test_the_system_reports_available_memory():
    free = available_bytes(cgroup=NOWHERE)
    assert free is not None
    assert free > 1 << 20


def test_the_limit_of_a_container_counts_and_its_page_cache_is_available(tmp_path: Path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("800\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert available_bytes(NOWHERE, tmp_path) == 500
    for result in ("max", "", "0", "-5", "much"):
        (tmp_path / "memory.max").write_text(result + "\n")
        assert available_bytes(NOWHERE, tmp_path) is None
        assert total_bytes(tmp_path) == total_bytes(NOWHERE)


@pytest.mark.parametrize("result", ["", "MemAvailable:\n", "MemAvailable: much\n", "no sign in it\n"])
def test_invalid_reports_of_available_memory_are_ignored(tmp_path: Path, result: str):
    (tmp_path / "meminfo").write_text(result)
    assert available_bytes(tmp_path / "meminfo", NOWHERE) is None


def test_exactly_the_missing_bytes_are_requested():
    async def first_request() -> Event:
        request = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(watch_memory(100, request.set_result, Faults(LogLines()), lambda: 30))
        try:
            return await request
        finally:
            task.cancel()

    assert asyncio.run(first_request()) == MemoryPressure(70)
