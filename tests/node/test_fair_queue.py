"""Requests that arrive together start in several iterations of the loop, round-robin by client."""

import asyncio
import time
from collections import Counter
from functools import partial
from threading import Thread

import uvloop

from overwinter.node.fair_queue import BYTES_OF_ONE, STARTED_MAX, FairQueue


async def started(*clients: str) -> list[list[str]]:
    """Return which clients' requests start in each iteration, if they all arrive in the first."""
    queue, now = FairQueue(), list[str]()
    for client in clients:
        queue.add(client, partial(now.append, client))
    found = [now.copy()]
    while sum(map(len, found)) < len(clients):
        now.clear()
        await asyncio.sleep(0)
        found.append(now.copy())
    return found


def test_a_few_requests_start_immediately() -> None:
    clients = ["a"] * STARTED_MAX
    assert asyncio.run(started(*clients)) == [clients]


def test_many_requests_start_in_several_iterations() -> None:
    found = asyncio.run(started(*["a"] * (3 * STARTED_MAX)))
    assert [len(each) for each in found] == [STARTED_MAX] * 3


def test_clients_take_turns() -> None:
    found = asyncio.run(started(*["a"] * (5 * STARTED_MAX), "b", *["c"] * STARTED_MAX))
    assert found[1][:3] == ["a", "b", "c"]
    assert found[1].count("c") == STARTED_MAX // 2 - 1


def test_an_iteration_that_starts_waiting_requests_may_start_new_ones_too() -> None:
    async def scene() -> list[str]:
        queue, seen = FairQueue(), list[str]()
        for number in range(STARTED_MAX + 2):
            queue.add("a", partial(seen.append, str(number)))
        await asyncio.sleep(0)
        # Both that waited have started, and the iteration may start more.
        queue.add("b", partial(seen.append, "b"))
        assert seen[-3:] == [str(STARTED_MAX), str(STARTED_MAX + 1), "b"]
        for _ in range(3):
            await asyncio.sleep(0)
        queue.add("a", partial(seen.append, "later"))
        return seen

    assert asyncio.run(scene())[-1] == "later"


def test_completely_received_requests_are_handled_in_turns_of_the_callers() -> None:
    async def scene() -> None:
        queue, handled = FairQueue(), []
        iteration = 0

        async def handle(caller: str, nbytes: int) -> None:
            await queue.turn(caller, nbytes)
            handled.append((iteration, caller))

        large = STARTED_MAX * BYTES_OF_ONE
        tasks = [asyncio.create_task(handle("a", large)) for _ in range(20)]
        tasks += [asyncio.create_task(handle("b", 10)) for _ in range(3)]
        tasks[5].cancel()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            iteration += 1
        assert len(handled) == 22
        assert max(Counter(number for number, caller in handled if caller == "a").values()) == 1
        # Each request of the other caller waits for at most one large one.
        assert [caller for _, caller in handled[:7]].count("b") == 3

    asyncio.run(scene())


def test_a_single_completely_received_request_is_handled_immediately() -> None:
    async def scene() -> None:
        turn = asyncio.create_task(FairQueue().turn("a", 1 << 30))
        await asyncio.sleep(0)
        assert turn.done()

    asyncio.run(scene())


def test_work_that_fails_does_not_stop_what_follows() -> None:
    async def scene() -> list[str]:
        queue, now = FairQueue(), list[str]()

        def fail() -> None:
            raise ValueError("failed")

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        for _ in range(STARTED_MAX):
            queue.add("a", partial(now.append, "a"))
        queue.add("a", fail)
        for _ in range(STARTED_MAX):
            queue.add("a", partial(now.append, "a"))
        for _ in range(4):
            await asyncio.sleep(0)
        return now

    assert asyncio.run(scene()) == ["a"] * (2 * STARTED_MAX)


def test_work_that_takes_longer_than_was_expected_makes_further_work_wait() -> None:
    async def scene() -> int:
        queue, now = FairQueue(), list[str]()

        def large() -> None:
            now.append("a")
            queue.spend(STARTED_MAX)

        for _ in range(3):
            queue.add("a", large)
        return len(now)

    assert asyncio.run(scene()) == 1


def test_other_work_counts_only_in_its_iteration() -> None:
    async def scene() -> list[int]:
        queue, now, found = FairQueue(), list[str](), list[int]()
        queue.spend(STARTED_MAX)
        for _ in range(3):
            queue.add("a", partial(now.append, "a"))
            found.append(len(now))
            await asyncio.sleep(0)
        return found

    assert asyncio.run(scene()) == [0, 2, 3]


def test_threads_run_between_iterations_with_work_left() -> None:
    steps = 20

    def compute() -> None:
        for _ in range(steps):
            time.sleep(0)

    async def scene() -> int:
        queue, iterations = FairQueue(), 0
        thread = Thread(target=compute)

        def start() -> None:
            sum(range(2000))
            queue.add("a", start)

        for _ in range(STARTED_MAX + 1):
            queue.add("a", start)
        thread.start()
        while thread.is_alive():
            iterations += 1
            await asyncio.sleep(0)
        return iterations

    # Without a pause the thread waits for tens of thousands of iterations. With one, it does only while the system does
    # not run it.
    assert any(uvloop.run(scene()) <= 50 * steps for _ in range(5))


def test_small_work_goes_before_large_work_and_discarding_work_and_none_waits_without_end() -> None:
    async def scene() -> list[list[str]]:
        queue, now, found = FairQueue(), list[str](), []
        for client in range(20):
            for _ in range(3):
                queue.add(f"large {client}", partial(now.append, "large"), STARTED_MAX)
                queue.add(f"discards {client}", partial(now.append, "discards"), STARTED_MAX, discards=True)
        for _ in range(3 * STARTED_MAX):
            queue.add("large 0", partial(now.append, "small"))
        while sum(map(len, found)) < 120 + 3 * STARTED_MAX:
            found.append(now.copy())
            now.clear()
            await asyncio.sleep(0)
        return found

    first, *found = asyncio.run(scene())
    assert first == ["large"]
    for each in found[:3]:
        assert Counter(each) == {"small": STARTED_MAX, "large": 1, "discards": 1}
    assert Counter(found[3]) == {"large": 1, "discards": 1}
