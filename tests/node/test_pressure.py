"""What is known of the machine's memory, and what is asked for when it runs short."""

import asyncio
from pathlib import Path

from overwinter.core.events import Event, Pressed
from overwinter.node.faults import Faults
from overwinter.node.pressure import available_bytes, watch_memory

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
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(NOWHERE, tmp_path) is None


def test_just_what_is_lacking_is_asked_for():
    async def first_wish() -> Event:
        wish = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(watch_memory(100, wish.set_result, Faults([].append), lambda: 30))
        try:
            return await wish
        finally:
            task.cancel()

    assert asyncio.run(first_wish()) == Pressed(70)
