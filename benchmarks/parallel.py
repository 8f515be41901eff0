"""Runs independent simulations in parallel, one process per core."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def on_all_cores(function: Callable[..., Result], tasks: Sequence[tuple[object, ...]]) -> list[Result]:
    """Return the results of a module-level function for each tuple of arguments, in their order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as processes:
        return list(processes.map(function, *zip(*tasks, strict=True)))
