"""Pipelines over functions in plain Python: order, deadlines, failures, limits and signatures."""

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import closing

import msgspec
import pytest

from overwinter.core.call import Call, Result
from overwinter.core.errors import (
    CallerError,
    ConflictError,
    DeadlineError,
    ForbiddenError,
    HandlerError,
    NoSpaceError,
    NotFoundError,
    OverloadedError,
    TooLargeError,
    WorkerError,
)
from overwinter.core.pipeline import Pipeline, Signature, Stage
from overwinter.core.tensor import Tensor, TensorSpec
from overwinter.node import pipelines as module
from overwinter.node import signatures
from overwinter.node.fair_queue import STARTED_MAX
from overwinter.node.pipelines import Pipelines
from overwinter.store.repository import Repository

from .pipeline_rig import FORK, FakeFunctions, View, Work, floats, scaling_functions, values
from .rig import until


@pytest.fixture
def functions() -> FakeFunctions:
    return scaling_functions()


@pytest.fixture
def pipelines(functions: FakeFunctions, tmp_path):
    repository = Repository(tmp_path)
    yield Pipelines(functions, functions.infer, repository, lambda: functions.time)
    repository.close()


def run(
    pipelines: Pipelines, *, timeout_s: float | None = None, priority: int = 0, pipeline: Pipeline = FORK
) -> Result:
    async def deployed() -> Result:
        await pipelines.deploy(pipeline, "tests")
        return await pipelines.infer(Call(pipeline.name, None, [floats("x", 1.0, 5.0)], timeout_s, priority))

    return asyncio.run(deployed())


def test_outputs_of_stages_get_the_pipelines_names(functions, pipelines):
    functions.starts = {"double": "host", "negate": "disk"}
    reply = run(pipelines, priority=3)
    assert {tensor.name: values(tensor) for tensor in reply.outputs} == {
        "l": [6.0, 30.0],
        "r": [-2.0, -10.0],
        "raw": [2.0, 10.0],
    }
    assert (reply.name, reply.version, reply.start) == ("fork", 1, "disk")
    assert functions.asked == [("double", None, 10.0, 3), ("triple", None, 10.0, 3), ("negate", 1, 10.0, 3)]


def test_independent_stages_run_concurrently(functions, pipelines):
    both = asyncio.Barrier(2)

    async def meet(inputs):
        # Neither could continue alone.
        await both.wait()
        return [floats("y", 7.0)]

    functions.add("triple", work=meet)
    functions.add("negate", work=meet)
    assert [values(tensor) for tensor in run(pipelines).outputs[:2]] == [[7.0], [7.0]]


def test_the_stages_of_a_tenants_requests_are_limited(functions, pipelines, monkeypatch):
    monkeypatch.setattr(module, "OPEN_STAGES_MAX", 7)
    go = asyncio.Event()

    async def wait(inputs):
        await go.wait()
        return [floats("y", 7.0)]

    functions.add("double", work=wait)

    async def scene() -> None:
        await pipelines.deploy(FORK, "tests")
        call = Call("fork", None, [floats("x", 1.0)], None, 0)
        two = [asyncio.create_task(pipelines.infer(call)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="may have at most 7 stages in progress"):
            await pipelines.infer(call)
        go.set()
        assert len(await asyncio.gather(*two)) == 2
        assert len((await pipelines.infer(call)).outputs) == 3

    asyncio.run(scene())


def test_each_stage_gets_the_remaining_time_of_the_pipeline(functions, pipelines):
    async def slow(inputs):
        functions.time += 1.5
        return [floats("y", 1.0)]

    functions.add("double", work=slow)
    run(pipelines, timeout_s=2.0)
    assert [asked[2] for asked in functions.asked] == [2.0, 0.5, 0.5]
    assert pipelines.view("fork", None).info().requests.answered == 1


@pytest.mark.parametrize("timeout_s", [2.0, None])
def test_a_deadline_between_stages_ends_the_request(functions, pipelines, timeout_s):
    async def slow(inputs):
        functions.time += 12.0
        return [floats("y", 1.0)]

    functions.add("double", work=slow)
    with pytest.raises(DeadlineError, match="stage 'left' of pipeline 'fork': .* after 'first'"):
        run(pipelines, timeout_s=timeout_s)
    assert functions.names() == ["double"]
    tally = pipelines.view("fork", None).info().requests
    assert (tally.running, tally.answered, tally.failed) == (0, 0, 1)


def fail_beside_another(functions: FakeFunctions, fault: Exception) -> None:
    """Let one stage fail as soon as a concurrent stage, which never ends, has begun."""
    begun = asyncio.Event()

    async def fail(inputs):
        await begun.wait()
        raise fault

    async def hang(inputs):
        begun.set()
        await asyncio.Event().wait()

    functions.add("triple", work=fail)
    functions.add("negate", work=hang)


def test_the_first_stage_that_fails_ends_the_others(functions, pipelines):
    fail_beside_another(functions, OverloadedError("512 requests waiting", 7.0))
    with pytest.raises(OverloadedError, match="^stage 'left' of pipeline 'fork': 512 requests waiting$") as result:
        run(pipelines)
    assert result.value.retry_after_s == 7.0
    assert functions.cancelled == ["negate"]


class Data(bytearray):
    """Bytes whose release can be observed."""


def released_by_a_failure(functions, pipelines, **works):
    """Return which tensors are released before a garbage collection when a pipeline fails. `works`: what stages do."""
    released = []

    async def make(inputs):
        data = Data(inputs[0].data)
        weakref.finalize(data, released.append, "first:y")
        return [Tensor("y", "FP32", inputs[0].shape, data)]

    for name, work in ({"double": make} | works).items():
        functions.add(name, work=work)
    gc.disable()
    try:
        with pytest.raises(OverloadedError):
            run(pipelines)
        return list(released)
    finally:
        gc.enable()


def test_tensors_of_a_failed_pipeline_are_released_without_a_garbage_collection(functions, pipelines):
    fail_beside_another(functions, OverloadedError("512 requests waiting"))
    assert released_by_a_failure(functions, pipelines) == ["first:y"]


def test_the_inputs_of_a_failed_stage_are_released_without_a_garbage_collection(functions, pipelines):
    """As a request to a function does, the stage holds its inputs while it waits for a future that gets the error."""

    async def fail(inputs):
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(answer.set_exception, OverloadedError("512 requests waiting"))
        return await answer

    assert released_by_a_failure(functions, pipelines, triple=fail, negate=fail) == ["first:y"]


def test_a_programming_error_in_a_stage_ends_the_others_and_is_raised(functions, pipelines):
    fail_beside_another(functions, ZeroDivisionError())
    with pytest.raises(ExceptionGroup) as result:
        run(pipelines)
    assert result.group_contains(ZeroDivisionError)
    assert functions.cancelled == ["negate"]


def test_a_disconnected_caller_ends_all_stages(functions, pipelines):
    both = asyncio.Barrier(3)

    async def hang(inputs):
        await both.wait()
        await asyncio.Event().wait()

    async def main():
        await pipelines.deploy(FORK, "tests")
        call = asyncio.ensure_future(pipelines.infer(Call("fork", None, [floats("x", 1.0)])))
        await both.wait()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()

    functions.add("triple", work=hang)
    functions.add("negate", work=hang)
    asyncio.run(main())
    assert sorted(functions.cancelled) == ["negate", "triple"]


def test_the_stages_of_callers_that_disconnect_together_end_over_several_iterations(functions, pipelines):
    async def hang(inputs):
        await asyncio.Event().wait()

    async def main():
        await pipelines.deploy(FORK, "tests")
        calls = [asyncio.ensure_future(pipelines.infer(Call("fork", None, [floats("x", 1.0)]))) for _ in range(40)]
        await until(lambda: functions.names().count("triple") + functions.names().count("negate") == 80)
        for call in calls:
            call.cancel()
        ended = [0]
        while ended[-1] < 80:
            await asyncio.sleep(0)
            ended.append(len(functions.cancelled))
        assert max(after - before for before, after in itertools.pairwise(ended)) <= STARTED_MAX
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)

    functions.add("triple", work=hang)
    functions.add("negate", work=hang)
    asyncio.run(main())


@pytest.mark.parametrize("failing", ["triple", "negate"])
def test_a_failure_and_an_answer_in_one_loop_iteration_start_no_further_stage(functions, pipelines, failing):
    both = asyncio.Barrier(2)

    def end(name: str) -> Work:
        async def work(inputs):
            await both.wait()
            if name == failing:
                raise OverloadedError("full")
            return [floats("y", 1.0)]

        return work

    started = []

    async def never(inputs):
        started.append(inputs)
        raise AssertionError

    for name in ("triple", "negate"):
        functions.add(name, work=end(name))
    for name in ("after-left", "after-right"):
        functions.add(name, work=never)
    more = {
        "then-left": Stage(function="after-left", inputs={"x": "left:y"}),
        "then-right": Stage(function="after-right", inputs={"x": "right:y"}),
        "join": Stage(function="add", inputs={"x": "left:y", "z": "right:y"}),
    }
    functions.add("add", work=never, inputs=(TensorSpec("x", "FP32", ("n",)), TensorSpec("z", "FP32", ("n",))))
    outputs = {"l": "then-left:y", "r": "then-right:y", "raw": "join:y"}
    wide = msgspec.structs.replace(FORK, stages=FORK.stages | more, outputs=outputs)
    with pytest.raises(OverloadedError):
        run(pipelines, pipeline=wide)
    assert not started


def test_a_caller_that_disconnects_at_the_last_answer_leaves_nothing_running(functions, pipelines):
    last = asyncio.Barrier(3)

    async def wait(inputs):
        await last.wait()
        return [floats("y", 1.0)]

    async def main():
        await pipelines.deploy(FORK, "tests")
        call = asyncio.ensure_future(pipelines.infer(Call("fork", None, [floats("x", 1.0)])))
        await last.wait()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    functions.add("triple", work=wait)
    functions.add("negate", work=wait)
    asyncio.run(main())
    tally = pipelines.view("fork", None).info().requests
    assert (tally.running, tally.answered, tally.failed) == (0, 0, 1)


def test_dynamic_sizes_are_checked_between_stages(functions, pipelines):
    async def pair(inputs):
        return [floats("y", 1.0, 2.0)]

    functions.add("double", work=pair)
    functions.add("triple", inputs=(TensorSpec("x", "FP32", (3,)),))
    with pytest.raises(CallerError, match=r"stage 'left' of pipeline 'fork': input 'x' has shape \[2\]; .* \[3\]"):
        run(pipelines)
    assert functions.names().count("triple") == 0


def test_a_stage_that_does_not_return_a_declared_output_is_reported(functions, pipelines):
    async def other(inputs):
        return [floats("z", 1.0)]

    functions.add("triple", work=other)
    with pytest.raises(WorkerError, match="needs 'left:y'"):
        run(pipelines)


def test_an_error_of_a_stage_keeps_its_class(functions, pipelines):
    async def fail(inputs):
        raise HandlerError("preprocess failed")

    functions.add("double", work=fail)
    with pytest.raises(HandlerError, match="stage 'first'"):
        run(pipelines)


def test_outputs_of_stages_count_for_the_callers_memory(functions, pipelines):
    held: list[int] = []

    async def asked() -> None:
        await pipelines.deploy(FORK, "tests")
        await pipelines.infer(Call("fork", None, [floats("x", 1.0, 5.0)], reserve=held.append))

    asyncio.run(asked())
    assert held == [8] * len(functions.asked)
    assert len(held) > 2


FAN = Pipeline(
    name="fan",
    inputs=("x",),
    stages={
        "wide": Stage(function="wide", inputs={f"x{number}": "input:x" for number in range(10)}),
        "again": Stage(function="double", inputs={"x": "input:x"}),
    },
    outputs={"y": "wide:y", "z": "again:y"},
)


def test_a_stage_that_takes_one_tensor_many_times_reserves_memory_for_the_copies(functions, pipelines):
    held, both = list[int](), asyncio.Barrier(2)

    async def meet(inputs):
        await both.wait()
        return [floats("y", 7.0, 8.0)]

    functions.add("wide", work=meet, inputs=tuple(TensorSpec(f"x{number}", "FP32", (2,)) for number in range(10)))
    functions.add("double", work=meet)

    async def asked(reserve: Callable[[int], None]) -> None:
        await pipelines.deploy(FAN, "tests")
        await pipelines.infer(Call("fan", None, [floats("x", 1.0, 5.0)], reserve=reserve))

    asyncio.run(asked(held.append))
    assert sorted(held) == [8, 8, 8, 72]

    def refuse(nbytes: int) -> None:
        if nbytes == 72:
            raise TooLargeError("too many copies")

    with pytest.raises(TooLargeError, match="stage 'wide' of pipeline 'fan': too many copies"):
        asyncio.run(asked(refuse))
    assert functions.names().count("wide") == 1


def test_a_request_whose_stages_cannot_reserve_memory_is_refused(functions, pipelines):
    held: list[int] = []

    def hold(nbytes: int) -> None:
        held.append(nbytes)
        if sum(held) > 16:
            raise OverloadedError("no memory for requests", 2.0)

    async def asked() -> None:
        await pipelines.deploy(FORK, "tests")
        await pipelines.infer(Call("fork", None, [floats("x", 1.0, 5.0)], reserve=hold))

    with pytest.raises(OverloadedError, match="stage '(left|right)' of pipeline 'fork': no memory for requests"):
        asyncio.run(asked())


def test_a_signature_is_computed_again_only_after_a_function_has_changed(functions, pipelines, monkeypatch):
    asyncio.run(pipelines.deploy(FORK, "tests"))
    assert pipelines.view("fork", None).inputs == (TensorSpec("x", "FP32", ("first.n",)),)
    found: list[str] = []
    find = signatures.signature
    monkeypatch.setattr(
        signatures, "signature", lambda pipeline, how: found.append(pipeline.name) or find(pipeline, how)
    )
    for _ in range(3):
        assert pipelines.view("fork", None).state == "READY"
        assert [view.tenant for view in pipelines.views("tests")] == ["tests"]
        # A version with the same tensors affects no pipeline.
        pipelines.protect_at_once("double", View(2))
    assert list(pipelines.views("others")) == found == []
    functions.add("double", version=2, inputs=(TensorSpec("x", "FP32", (2,)),))
    assert pipelines.view("fork", None).inputs == (TensorSpec("x", "FP32", (2,)),)
    assert pipelines.view("fork", None).outputs
    assert found == ["fork"]


def test_the_pipelines_of_a_tenant_are_bounded_by_their_sources(functions, pipelines, monkeypatch):
    monkeypatch.setattr(module, "TENANT_SOURCES_MAX", 11)
    asyncio.run(pipelines.deploy(FORK, "tests"))
    # Its own sources are not counted twice.
    asyncio.run(pipelines.deploy(FORK, "tests"))
    more = msgspec.structs.replace(FORK, name="more")
    with pytest.raises(NoSpaceError, match="tenant 'tests' have 6 other sources .* 'more' more than 11"):
        asyncio.run(pipelines.deploy(more, "tests"))
    less = msgspec.structs.replace(more, outputs={"l": "left:y", "r": "right:y"})
    asyncio.run(pipelines.deploy(less, "tests"))
    for name in ("double", "triple", "negate"):
        functions.views[name, 1].tenant = "others"
    asyncio.run(pipelines.deploy(msgspec.structs.replace(FORK, name="theirs"), "others"))


def test_attainment_of_the_slo_is_counted(functions, pipelines):
    async def slow(inputs):
        functions.time += 0.2
        return [floats("y", 1.0)]

    run(pipelines, pipeline=msgspec.structs.replace(FORK, slo_ms=100.0))
    assert pipelines.view("fork", None).info().requests.in_slo == 1
    functions.add("double", work=slow)
    asyncio.run(pipelines.infer(Call("fork", None, [floats("x", 1.0)])))
    tally = pipelines.view("fork", None).info().requests
    assert (tally.answered, tally.in_slo) == (2, 1)


def test_a_pipeline_is_replaced_and_restored(functions, pipelines, tmp_path):
    changed = msgspec.structs.replace(FORK, outputs={"l": "left:y", "r": "right:y"})
    for pipeline in (FORK, changed):
        asyncio.run(pipelines.deploy(pipeline, "tests"))
    with closing(Repository(tmp_path)) as repository:
        again = Pipelines(functions, functions.infer, repository)
        again.restore(pytest.fail)
        for known in (pipelines, again):
            assert [view.version for view in known.views()] == [2]
            assert [spec.name for spec in known.view("fork", 2).outputs] == ["l", "r"]
            with pytest.raises(NotFoundError, match="'fork' has only version 2, not 1"):
                known.view("fork", 1)
        asyncio.run(pipelines.remove("fork", None))
        assert "fork" not in pipelines
        again.restore(pytest.fail)
        assert list(again.views()) == []


def test_a_refused_pipeline_leaves_nothing(functions, pipelines):
    del functions.views["triple", 1]
    with pytest.raises(NotFoundError, match="stage 'left' of pipeline 'fork': no function 'triple' here"):
        asyncio.run(pipelines.deploy(FORK, "tests"))
    with pytest.raises(CallerError, match="nothing in pipeline 'fork' uses 'right'"):
        asyncio.run(pipelines.deploy(msgspec.structs.replace(FORK, outputs={"l": "left:y"}), "tests"))
    assert "fork" not in pipelines


def test_a_pipeline_calls_only_functions_of_its_tenant(functions, pipelines):
    functions.views["negate", 1].tenant = "other"
    with pytest.raises(ForbiddenError, match="'negate' belongs to another tenant"):
        asyncio.run(pipelines.deploy(FORK, "tests"))
    functions.views["negate", 1].tenant = "tests"
    asyncio.run(pipelines.deploy(FORK, "tests"))
    with pytest.raises(ForbiddenError, match="'fork'"):
        pipelines._repository.put_pipeline(FORK, "other", 1.0)
    assert pipelines.view("fork", None).tenant == "tests"
    # An older node may have left such a pipeline.
    functions.views["negate", 1].tenant = "other"
    assert pipelines.view("fork", None).state == "UNAVAILABLE"
    with pytest.raises(ForbiddenError):
        _ = pipelines.view("fork", None).inputs


def test_a_function_of_a_pipeline_cannot_be_removed_or_change_its_tensors(functions, pipelines):
    asyncio.run(pipelines.deploy(FORK, "tests"))
    other = Signature((TensorSpec("x", "FP64", ("n",)),), functions.views["triple", 1].outputs)
    with pytest.raises(ConflictError, match="stage 'left' of .*'first:y' is FP32.*remove pipeline 'fork' first"):
        pipelines.protect_at_once("triple", other)
    with pytest.raises(ConflictError, match="stage 'left' of pipeline 'fork': its function 'triple' would be missing"):
        pipelines.protect_at_once("triple", None, {1})
    # A version that a stage names may be followed by any other, and may not be removed.
    pipelines.protect_at_once("negate", other)
    with pytest.raises(ConflictError, match="stage 'right'"):
        pipelines.protect_at_once("negate", other, {1})
    functions.add("triple", version=2)
    pipelines.protect_at_once("triple", functions.views["triple", 2], {1})
    pipelines.protect_at_once("unrelated", None, {1})


def test_a_pipeline_without_one_of_its_functions_is_unavailable_and_blocks_no_deploy(functions, pipelines):
    asyncio.run(pipelines.deploy(FORK, "tests"))
    functions.views["negate", 1].state, functions.views["negate", 1].reason = "UNAVAILABLE", "unloaded"
    view = pipelines.view("fork", None)
    assert (view.state, view.reason) == ("UNAVAILABLE", "function 'negate' of stage 'right': unloaded")
    del functions.views["negate", 1]
    view = pipelines.view("fork", None)
    assert (view.state, view.info().inputs) == ("UNAVAILABLE", ())
    with pytest.raises(NotFoundError, match="stage 'right' of pipeline 'fork': no function 'negate'"):
        _ = view.inputs
    pipelines.protect_at_once("triple", None, {1})
    pipelines.protect_at_once("negate", View(2))


@pytest.fixture
def computed(functions, pipelines, monkeypatch) -> list[str]:
    """Deploy three pipelines that use "triple"; return a list of those whose signatures are computed from then on."""
    for number in range(3):
        asyncio.run(pipelines.deploy(msgspec.structs.replace(FORK, name=f"fork{number}"), "tests"))
    computed: list[str] = []
    compute = signatures.signature

    def counted(pipeline, find):
        computed.append(pipeline.name)
        return compute(pipeline, find)

    monkeypatch.setattr(signatures, "signature", counted)
    return computed


def wide(version: int, *shape: int | str) -> View:
    """A version of "triple" that takes the output of "double" and returns this shape."""
    return View(version, outputs=(TensorSpec("y", "FP32", shape),))


def test_an_iteration_of_the_loop_computes_at_most_one_further_signature_for_all_checks_together(pipelines, computed):
    async def main() -> list[int]:
        checks = [asyncio.ensure_future(pipelines.protect("triple", wide(2, "n", size))) for size in (1, 2)]
        steps = []
        while not all(check.done() for check in checks):
            before = len(computed)
            await asyncio.sleep(0)
            steps.append(len(computed) - before)
        await asyncio.gather(*checks)
        return steps

    # Both checks compute their first signature when they begin.
    begun, *steps = asyncio.run(main())
    assert (begun, max(steps)) == (2, 1)
    assert sorted(computed) == ["fork0", "fork0", "fork1", "fork1", "fork2", "fork2"]


def test_a_change_back_computes_no_signature_again(functions, pipelines, computed):
    for _ in range(3):
        for version in (wide(2, "n", "m"), wide(1, "n")):
            # A decoded manifest has equal tensors, not the same objects.
            asyncio.run(pipelines.protect("triple", msgspec.convert(msgspec.to_builtins(version), View)))
            functions.views["triple", 1] = version
            assert [view.state for view in pipelines.views()] == ["READY"] * 3
    assert computed == ["fork0", "fork1", "fork2"]


def test_a_function_that_changes_during_a_check_is_considered(functions, pipelines, computed):
    async def main() -> None:
        check = asyncio.ensure_future(pipelines.protect("triple", View(2, inputs=(TensorSpec("x", "FP32", (3,)),))))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(computed) == 3
        functions.add("double", version=2, outputs=(TensorSpec("y", "FP32", (2,)),))
        with pytest.raises(ConflictError, match=r"stage 'left' of pipeline 'fork0': 'first:y' is FP32 \[2\]"):
            await check

    asyncio.run(main())


def test_an_error_of_a_pipeline_is_remembered(functions, pipelines, computed):
    before, other = functions.views["triple", 1], View(1, inputs=(TensorSpec("x", "FP64", ("n",)),))
    for version, state in ((other, "UNAVAILABLE"), (before, "READY")):
        functions.views["triple", 1] = version
        assert {view.state for _ in range(3) for view in pipelines.views()} == {state}
    with pytest.raises(ConflictError, match="stage 'left' of pipeline 'fork0': 'first:y' is FP32"):
        pipelines.protect_at_once("triple", other)
    assert computed == ["fork0", "fork1", "fork2"]


def test_a_version_on_trial_may_not_become_a_stage(functions, pipelines):
    run(pipelines)
    functions.add("negate", version=2, state="LOADING")
    stages = {**FORK.stages, "right": msgspec.structs.replace(FORK.stages["right"], version=2)}
    with pytest.raises(ConflictError, match="version 2 of 'negate' is on trial"):
        asyncio.run(pipelines.deploy(msgspec.structs.replace(FORK, stages=stages), "tests"))
    assert pipelines.view("fork", None).state == "READY"
