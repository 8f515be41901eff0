"""Measurements leave threads and turns to others, and what they and corrections find is stored."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from overwinter.core.errors import CallerError, WorkerError
from overwinter.core.function import Settings
from overwinter.core.profile import LayerPoint, Point, Profile
from overwinter.core.profiling import ProfileOptions, with_points
from overwinter.model.export import export
from overwinter.model.program import encode_program
from overwinter.node.functions import DeployedFunction
from overwinter.node.threads import default_count
from overwinter.profiling import profiler as module
from overwinter.profiling import survey
from overwinter.profiling.bench import Layers, Measurement
from overwinter.profiling.observer import Correction
from overwinter.profiling.profiler import Profiler


def parts_with(read: Callable[[str], bytes]) -> SimpleNamespace:
    stored: dict[str, Profile] = {}

    def put_profile(machine: str, subject: str, profile: Profile, now: float) -> None:
        stored[subject] = profile

    repository = SimpleNamespace(read=read, profile=lambda machine, of: stored.get(of), put_profile=put_profile)
    return SimpleNamespace(
        calls=SimpleNamespace(busy=lambda: False, wake=None),
        config=SimpleNamespace(profile_share=0.1),
        processes=None,
        hosts=None,
        registry=SimpleNamespace(functions={}),
        log=None,
        repository=repository,
    )


def test_measurements_that_wait_leave_the_threads_of_the_loop_to_others() -> None:
    go = threading.Event()

    def read(address: str) -> bytes:
        go.wait(60)
        return b"no program"

    async def measured() -> list[object]:
        function = function_of("any")
        async with asyncio.TaskGroup() as tasks:
            profiler = Profiler(parts_with(read), tasks)
            asked = [
                asyncio.create_task(profiler.measure(function, ProfileOptions(), print))
                for _ in range(2 * default_count())
            ]
            # Each has asked for its program after this.
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(20):
                    assert await asyncio.to_thread(lambda: "other work") == "other work"
            finally:
                go.set()
            return await asyncio.gather(*asked, return_exceptions=True)

    assert {type(error).__name__ for error in asyncio.run(measured())} == {"ProgramError"}


class Doubled(torch.nn.Module):
    def forward(self, x):
        return {"y": x * 2.0}


def function_of(tenant: str) -> SimpleNamespace:
    manifest = SimpleNamespace(tenant=tenant, program=SimpleNamespace(address=""), settings=Settings())
    names = {
        "id": f"{tenant}@1",
        "profile_key": tenant,
        "program_key": tenant,
        "handler_only": False,
        "slice": None,
    }
    function = SimpleNamespace(**names, manifest=manifest, profile=None, batch_limit=None)
    function.use_profile = partial(DeployedFunction.use_profile, function)
    return function


def test_a_measurement_that_does_not_end_leaves_its_turn_to_other_tenants(monkeypatch) -> None:
    program = encode_program(export(Doubled(), {"x": torch.zeros(2, 4)}).program)
    monkeypatch.setattr(module, "TURN_S", 0.2)
    options = ProfileOptions(cores=(1,), batches=(1, 2), concurrency=(1,), layers=False)

    async def point(function, program, configuration) -> Measurement:
        if configuration.batch == 2 and function.manifest.tenant == "slow":
            await asyncio.Event().wait()
        return Measurement(Point(1, 1, configuration.batch, 1, 0.1), 7, None)

    async def measured() -> tuple[object, Profile]:
        async with asyncio.TaskGroup() as tasks:
            profiler = Profiler(parts_with(lambda address: program), tasks)
            profiler._bench = SimpleNamespace(point=point)
            profiler._functions = functions = {each: function_of(each) for each in ("slow", "quick")}
            profiler._parts.post = lambda event: None
            slow, quick = (
                asyncio.create_task(profiler.measure(function, options, lambda progress: None))
                for function in functions.values()
            )
            async with asyncio.timeout(20):
                await asyncio.wait([slow, quick])
        with pytest.raises(WorkerError, match="not all of it was measured"):
            slow.result()
        return functions["slow"].profile, quick.result()

    begun, whole = asyncio.run(measured())
    # What was measured up to then is kept.
    assert [point.batch for point in begun.points] == [1]
    assert [point.batch for point in whole.points] == [1, 2]


def test_layers_are_measured_at_as_many_batch_sizes_as_a_profile_may_have_and_not_kept_in_memory(monkeypatch) -> None:
    exported = export(Doubled(), {"x": torch.zeros(8, 4)}).program
    monkeypatch.setattr(survey, "LAYER_LATENCIES_MAX", 2 * len(exported.layers))
    said: list[str] = []

    async def point(function, program, configuration) -> Measurement:
        return Measurement(Point(1, 1, configuration.batch, 1, 0.1), 7, None)

    async def layers(function, program, batch) -> Layers:
        return Layers(batch, (0.1 * batch,) * len(program.layers), 7)

    async def measured(*batches: int) -> Profile:
        options = ProfileOptions(cores=(1,), batches=batches, concurrency=(1,))
        return await profiler.measure(function, options, lambda progress: said.append(progress.what))

    async def twice() -> list[Profile]:
        nonlocal profiler
        async with asyncio.TaskGroup() as tasks:
            profiler = Profiler(parts_with(lambda address: encode_program(exported)), tasks)
            profiler._bench, profiler._functions = SimpleNamespace(point=point, layers=layers), {"any": function}
            profiler._parts.post = lambda event: None
            return [await measured(2), await measured(1, 4, 8)]

    function, profiler = function_of("any"), None
    found = asyncio.run(twice())
    assert [list(profile.layers[0].latency_s) for profile in found] == [[2], [1, 2]]
    assert [[point.batch for point in profile.points] for profile in found] == [[2], [1, 2, 4, 8]]
    assert any("at 2 more batch sizes: they are not measured there" in what for what in said)
    assert function.profile.points == found[1].points
    assert function.profile.layers == ()


def test_requests_for_measurements_read_the_program_once() -> None:
    program = encode_program(export(Doubled(), {"x": torch.zeros(2, 4)}).program)
    read: list[str] = []
    function = function_of("any")

    async def refused() -> None:
        async with asyncio.TaskGroup() as tasks:
            profiler = Profiler(parts_with(lambda address: read.append(address) or program), tasks)
            for _ in range(3):
                with pytest.raises(CallerError, match="batch must be from 1"):
                    await profiler.measure(function, ProfileOptions(batches=(0,)), print)

    asyncio.run(refused())
    assert len(read) == 1


def test_a_background_measurement_that_fails_is_logged_and_its_turn_passes_on() -> None:
    program = encode_program(export(Doubled(), {"x": torch.zeros(2, 4)}).program)
    said: list[str] = []

    async def point(function, program, configuration) -> Measurement:
        if function.manifest.tenant == "odd":
            raise OverflowError("Python int too large to convert to C long")
        return Measurement(Point(1, 1, configuration.batch, 1, 0.1), 7, None)

    async def layers(function, program, batch) -> Layers:
        return Layers(batch, (0.1,) * len(program.layers), 7)

    async def measured() -> Profile | None:
        async with asyncio.TaskGroup() as tasks:
            profiler = Profiler(parts_with(lambda address: program), tasks)
            profiler._bench = SimpleNamespace(point=point, layers=layers)
            profiler._functions = functions = {each: function_of(each) for each in ("odd", "usual")}
            profiler._parts.post, profiler._log = lambda event: None, said.append
            for function in functions.values():
                profiler.measure_soon(function)
        return functions["usual"].profile

    assert asyncio.run(measured()).points
    [line] = said
    assert "odd@1 was not measured" in line
    assert "OverflowError" in line


def test_a_correction_keeps_the_layers_that_were_measured_for_the_program_alone() -> None:
    async def corrected() -> Profile | None:
        async with asyncio.TaskGroup() as tasks:
            parts = parts_with(lambda address: b"")
            layer = LayerPoint(path="l", macs=1, weight_bytes=1, output_bytes=4, latency_s={1: 0.01})
            measured = Profile(weight_bytes=1, macs=1, points=(Point(1, 1, 1, 1, 0.01),), layers=(layer,))
            parts.repository.put_profile("", "the program", measured, 0.0)
            profiler = Profiler(parts, tasks)
            function = function_of("any")
            function.program_key = "the program"
            function.use_profile(profiler.stored(function))
            profiler._functions, parts.post = {function.id: function}, lambda event: None
            await profiler._correct(function.id, Correction((Point(1, 1, 1, 1, 0.02),), None))
            assert profiler.stored(function) is parts.repository.profile("", function.profile_key)
            return profiler.stored(function)

    profile = asyncio.run(corrected())
    assert [point.latency_s for point in profile.points] == [0.02]
    assert [layer.path for layer in profile.layers] == ["l"]


def test_a_correction_and_a_measurement_at_the_same_time_are_both_stored() -> None:
    old, corrected, new = Point(1, 1, 1, 1, 0.01), Point(1, 1, 1, 1, 0.02), Point(1, 1, 2, 1, 0.03)
    both = threading.Barrier(2)

    async def stored() -> Profile | None:
        async with asyncio.TaskGroup() as tasks:
            parts = parts_with(lambda address: b"")
            parts.repository.put_profile("", "any", Profile(weight_bytes=1, macs=1, points=(old,)), 0.0)
            put = parts.repository.put_profile

            def put_together(*args) -> None:
                # If another thread changes the profile, both have read it now, and neither has written it.
                with suppress(threading.BrokenBarrierError):
                    both.wait(0.2)
                put(*args)

            parts.repository.put_profile, parts.post = put_together, lambda event: None
            profiler, function = Profiler(parts, tasks), function_of("any")
            function.use_profile(profiler.stored(function))
            profiler._functions = {function.id: function}
            found = SimpleNamespace(
                blank=Profile(weight_bytes=1, macs=1), added_to=lambda known: with_points(known, (new,))
            )
            await asyncio.gather(
                profiler._keep(function, found), profiler._correct(function.id, Correction((corrected,), None))
            )
            assert function.profile == profiler.stored(function)
            return function.profile

    assert asyncio.run(stored()).points == (corrected, new)
