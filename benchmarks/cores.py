"""How are many simulations run at once, where the machine has several cores?"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def on_all_cores(function: Callable[..., Result], tasks: Sequence[tuple[object, ...]]) -> list[Result]:
    """What a function of a module gives for each tuple of arguments, in their order, in a process for each core."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as processes:
        return list(processes.map(function, *zip(*tasks, strict=True)))
