"""What measurements that wait may take of the node."""

import asyncio
import threading
from types import SimpleNamespace

from overwinter.core.profiling import Wanted
from overwinter.node.threads import usual
from overwinter.profiling.profiler import Profiler


def test_measurements_that_wait_leave_the_threads_of_the_loop_to_others() -> None:
    go = threading.Event()

    def read(address: str) -> bytes:
        go.wait(60)
        return b"no program"

    async def measured() -> list[object]:
        parts = SimpleNamespace(
            calls=SimpleNamespace(busy=lambda: False),
            config=SimpleNamespace(profile_share=0.1),
            processes=None,
            hosts=None,
            registry=SimpleNamespace(functions={}),
            log=None,
            repository=SimpleNamespace(read=read),
        )
        function = SimpleNamespace(manifest=SimpleNamespace(program=SimpleNamespace(address="")))
        async with asyncio.TaskGroup() as tasks:
            profiler = Profiler(parts, tasks)
            asked = [asyncio.create_task(profiler.measure(function, Wanted(), print)) for _ in range(2 * usual())]
            # Each has asked for its program after this.
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(20):
                    assert await asyncio.to_thread(lambda: "other work") == "other work"
            finally:
                go.set()
            return await asyncio.gather(*asked, return_exceptions=True)

    assert {type(error).__name__ for error in asyncio.run(measured())} == {"ProgramError"}
