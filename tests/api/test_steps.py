"""Long work is divided into steps, short work is not; other work runs between two steps."""

import asyncio

from overwinter.api.steps import StepRunner, Steps, finish


def counting(name: str, steps: int, seen: list[str]) -> Steps[str]:
    for _ in range(steps):
        seen.append(name)
        yield
    return name


def test_the_result_comes_with_or_without_steps() -> None:
    assert [finish(counting("a", steps, [])) for steps in (0, 3)] == ["a", "a"]


def test_others_have_their_turn_between_two_steps() -> None:
    seen: list[str] = []

    async def neighbour() -> None:
        for _ in range(3):
            seen.append("neighbour")
            await asyncio.sleep(0)

    async def work() -> None:
        runner = StepRunner()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(runner.run("a", counting("first", 3, seen)))
            tasks.create_task(runner.run("a", counting("second", 2, seen)))
            tasks.create_task(runner.run("a", counting("short", 0, seen)))
            tasks.create_task(neighbour())

    asyncio.run(work())
    # They alternate: none waits for the end of another.
    assert [name for name in seen if name != "neighbour"] == ["first", "second", "first", "second", "first"]
    assert seen.index("neighbour") < 4


def test_callers_take_turns_whatever_the_number_of_their_requests() -> None:
    seen: list[str] = []

    async def work() -> None:
        runner = StepRunner()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(50):
                tasks.create_task(runner.run("many", counting("many", 9, seen)))
            tasks.create_task(runner.run("one", counting("one", 9, seen)))

    asyncio.run(work())
    first, last = seen.index("one"), len(seen) - 1 - seen[::-1].index("one")
    # The first step of `one` runs immediately. Each of the 8 others waits for a step of the other caller, or two.
    assert seen[first:last].count("many") <= 16
