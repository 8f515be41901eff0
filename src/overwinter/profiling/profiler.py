"""Stores, measures and corrects the profiles of functions.

A profile belongs to a program of a tenant, with a handler or none, on a machine: all functions with the same program
and handler have it, also one deployed after a restart. A handler whose program runs only on the pool has a separate
profile. Profiles are measured in workers that the scheduler does not know, and corrected by observations in service.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from overwinter.core.errors import WorkerError
from overwinter.core.events import Profiled
from overwinter.core.ids import FunctionId
from overwinter.core.profile import Profile
from overwinter.core.profiling import (
    ConfigurationLimits,
    ProfileOptions,
    Progress,
    ReportProgress,
    batches_to_measure,
    configurations_to_measure,
    with_points,
)
from overwinter.model.program import Program, decode_program
from overwinter.node import clock
from overwinter.node.fair_lock import FairLock
from overwinter.node.faults import contain
from overwinter.node.functions import DeployedFunction
from overwinter.node.parts import Parts
from overwinter.node.threads import Threads
from overwinter.profiling.bench import Bench
from overwinter.profiling.machine import core_count, fingerprint
from overwinter.profiling.measuring import batch_limit
from overwinter.profiling.observer import Correction, Observer
from overwinter.profiling.quiet import Quiet
from overwinter.profiling.survey import Survey

AT_ONCE = 16
"""The functions that one iteration of the event loop checks for the key of a new profile."""
TURN_S = 600.0
"""The longest that one measurement may take, in seconds; others wait for it."""


class Profiler:
    """Measures functions, one at a time; other measurements wait."""

    def __init__(self, parts: Parts, tasks: asyncio.TaskGroup) -> None:
        self.observer = Observer(self._profile_of, self._correct_soon)
        quiet = Quiet(self.observer, parts.calls.busy, parts.config.profile_share, clock.now)
        self._bench = Bench(parts.processes, parts.hosts, quiet, clock.now)
        self._parts = parts
        self._functions = parts.registry.functions
        self._tasks = tasks
        self._log = parts.log
        self._machine = fingerprint()
        self._turns, self._reads = FairLock(), FairLock()
        self._background: set[asyncio.Task[object]] = set()
        # One thread: any number of measurements may wait, and whatever else needs a thread must not wait for them. A
        # stored profile must not change between the read and the write of another change.
        self._disk = Threads(1, "profiles")

    async def close(self) -> None:
        """Stop measurements in the background, with their workers, and corrections of profiles."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def known(self, function: DeployedFunction) -> Profile | None:
        """Return the whole stored profile of the function, with its layers. Reads take turns, round-robin by tenant."""
        async with self._reads.turn(function.manifest.tenant):
            return await asyncio.get_running_loop().run_in_executor(self._disk, self.stored, function)

    def stored(self, function: DeployedFunction) -> Profile | None:
        """Return the stored profile of the function on this machine, or of its program alone. Reads the disk."""
        for key in _profile_keys(function):
            found = self._parts.repository.profile(self._machine, key)
            if found is not None:
                return found
        return None

    async def measure(self, function: DeployedFunction, options: ProfileOptions, report: ReportProgress) -> Profile:
        """Measure the configurations of `options`, and skip known ones unless `options.again`. Results are stored even
        if the rest fails or is cancelled. Raises CallerError for an impossible configuration, WorkerError if none runs,
        TURN_S is over or the measurements are impossible.
        """
        loop = asyncio.get_running_loop()
        if function.batch_limit is None:
            # Once for each function, because reading a large program takes far longer than requesting a measurement.
            async with self._reads.turn(function.manifest.tenant):
                program = await loop.run_in_executor(self._disk, self._program, function)
            function.batch_limit = batch_limit(program)
        limits = ConfigurationLimits(core_count(), function.batch_limit)
        configurations = configurations_to_measure(options, function.manifest.settings, limits)
        batches = batches_to_measure(options, function.manifest.settings, limits) if options.layers else ()
        report(Progress(done=0, total=len(configurations) + len(batches), what="waiting for its turn"))
        async with self._turns.turn(function.manifest.tenant):
            # Read the program again: many measurements may wait, and a decoded program is large.
            program = await loop.run_in_executor(self._disk, self._program, function)
            survey = Survey(self._bench, self._parts.calls.wake, function, program, report)
            known = await self.known(function)
            if known is not None and not options.again:
                survey.skip_known(known)
            try:
                async with asyncio.timeout(TURN_S):
                    await survey.run(configurations, batches)
            except TimeoutError:
                message = f"not all of it was measured within {TURN_S:g} s: measure it again for the rest"
                raise WorkerError(message) from None
            finally:
                if survey.found:
                    # Store it even if no caller waits any more.
                    await asyncio.shield(self._keep(function, survey))
        return await self.known(function) or survey.blank

    def measure_soon(self, function: DeployedFunction) -> None:
        """Measure the unknown configurations of the default options, in the background."""
        self._do_soon(self.measure(function, ProfileOptions(), _ignore), f"{function.id} was not measured")

    def _profile_of(self, id_: FunctionId) -> Profile | None:
        function = self._functions.get(id_)
        return None if function is None else function.profile

    def _correct_soon(self, id_: FunctionId, correction: Correction) -> None:
        self._do_soon(self._correct(id_, correction), f"the profile of {id_} was not corrected")

    def _do_soon(self, work: Coroutine[Any, Any, object], failed: str) -> None:
        task = self._tasks.create_task(contain(work, lambda error: self._log(f"{failed}: {error}")))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _correct(self, id_: FunctionId, correction: Correction) -> None:
        function = self._functions.get(id_)
        if function is not None and function.profile is not None:
            loop = asyncio.get_running_loop()
            profile = await loop.run_in_executor(self._disk, self._corrected, function, function.profile, correction)
            await self._spread(function.profile_key, profile)

    def _corrected(self, function: DeployedFunction, used: Profile, correction: Correction) -> Profile:
        """Correct the stored profile of a function that uses this one, and return the result."""
        correct = partial(with_points, points=correction.points, wake_s=correction.wake_s)
        # The stored profile has the layers too.
        return self._put(function.profile_key, self.stored(function) or used, correct)

    def _program(self, function: DeployedFunction) -> Program:
        return decode_program(self._parts.repository.read(function.manifest.program.address))

    async def _keep(self, function: DeployedFunction, survey: Survey) -> None:
        """Add the measurements to the stored profile of the program, and to that of a function with a handler, which
        begins as the program's.
        """
        profile, loop = survey.blank, asyncio.get_running_loop()
        for key in reversed(_profile_keys(function)):
            profile = await loop.run_in_executor(self._disk, self._put, key, profile, survey.added_to)
            await self._spread(key, profile)

    def _put(self, key: str, first: Profile, changed: Callable[[Profile], Profile]) -> Profile:
        """Change the stored profile, or `first` if there is none, and return the result. Reads and writes the disk."""
        profile = changed(self._parts.repository.profile(self._machine, key) or first)
        fault = profile.fault()
        if fault is not None:
            raise WorkerError(f"the measurements of {key} are impossible: {fault}")
        self._parts.repository.put_profile(self._machine, key, profile, clock.wall())
        return profile

    async def _spread(self, key: str, profile: Profile) -> None:
        """Use a profile for all functions with its key, some in each iteration of the event loop."""
        for number, function in enumerate(list(self._functions.values()), 1):
            if not number % AT_ONCE:
                await asyncio.sleep(0)
            if function.profile_key == key:
                function.use_profile(profile)
                self._parts.post(Profiled(function.id, function.profile or profile))


def _ignore(progress: Progress) -> None:
    """Nobody follows a background measurement."""


def _profile_keys(function: DeployedFunction) -> tuple[str, ...]:
    """Return the keys of its profile, its own first. The profile of a handler alone says nothing about its
    program, which runs on the pool.
    """
    if function.handler_only:
        return (function.profile_key,)
    return tuple(dict.fromkeys((function.profile_key, function.program_key)))
