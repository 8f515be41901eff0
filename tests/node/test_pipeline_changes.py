"""Deploys and removals of pipelines that happen at the same time, or whose caller disconnects."""

import asyncio
import threading

import pytest

from overwinter.core.errors import ConflictError, NotFoundError
from overwinter.core.tensor import TensorSpec
from overwinter.node.pipelines import Pipelines
from overwinter.node.signatures import Signatures
from overwinter.store.repository import Repository

from .pipeline_rig import FORK, View, scaling_functions
from .rig import until


@pytest.fixture
def pipelines(tmp_path):
    functions = scaling_functions()
    repository = Repository(tmp_path)
    yield Pipelines(functions, functions.infer, repository)
    repository.close()


def test_a_pipeline_that_is_removed_during_its_deploy_is_gone_in_memory_and_on_disk(pipelines, monkeypatch):
    repository, may_return = pipelines._repository, threading.Event()
    put = repository.put_pipeline

    def put_slowly(*arguments):
        stored = put(*arguments)
        assert may_return.wait(60)
        return stored

    async def scene():
        await pipelines.deploy(FORK, "tests")
        monkeypatch.setattr(repository, "put_pipeline", put_slowly)
        deploying = asyncio.create_task(pipelines.deploy(FORK, "tests"))
        await until(lambda: [stored.version for stored in repository.pipelines()] == [2])
        removing = asyncio.create_task(pipelines.remove("fork", None))
        try:
            await until(lambda: pipelines.changing._waiting or removing.done())
        finally:
            may_return.set()
        await asyncio.gather(deploying, removing)

    asyncio.run(scene())
    assert "fork" not in pipelines
    assert repository.pipelines() == []


def test_a_pipeline_is_protected_as_soon_as_it_has_been_checked(pipelines):
    async def scene():
        deploying = asyncio.create_task(pipelines.deploy(FORK, "tests"))
        found = asyncio.get_running_loop().create_future()

        def change_a_function():
            try:
                pipelines.protect_at_once("double", View(2, outputs=(TensorSpec("other", "FP32", ("n",)),)))
            except ConflictError as error:
                found.set_result(str(error))
            else:
                found.set_result("the version was accepted")

        # It runs after the deploy has checked the pipeline, and before anything else does.
        asyncio.get_running_loop().call_soon(change_a_function)
        assert "pipeline 'fork'" in await found
        await deploying

    asyncio.run(scene())


@pytest.mark.parametrize("change", ["put_pipeline", "remove_pipeline"])
def test_a_change_whose_caller_disconnects_is_completed(pipelines, monkeypatch, change):
    repository, may_return = pipelines._repository, threading.Event()
    make = getattr(repository, change)
    started = threading.Event()

    def make_slowly(*arguments):
        made = make(*arguments)
        started.set()
        assert may_return.wait(60)
        return made

    async def scene():
        await pipelines.deploy(FORK, "tests")
        monkeypatch.setattr(repository, change, make_slowly)
        deploys = change == "put_pipeline"
        changing = asyncio.create_task(pipelines.deploy(FORK, "tests") if deploys else pipelines.remove("fork", None))
        try:
            await until(started.is_set)
            changing.cancel()
            await asyncio.sleep(0)
            # Until the change is made, no other one of the tenant begins.
            assert pipelines.changing._taken
        finally:
            may_return.set()
        with pytest.raises(asyncio.CancelledError):
            await changing
        assert [view.version for view in pipelines.views()] == ([2] if deploys else [])

    asyncio.run(scene())
    assert [stored.version for stored in repository.pipelines()] == [view.version for view in pipelines.views()]


def test_a_removal_that_waited_removes_no_pipeline_of_another_tenant(pipelines):
    async def scene():
        await pipelines.deploy(FORK, "tests")
        async with pipelines.changing.turn("tests"):
            late = asyncio.create_task(pipelines.remove("fork", None))
            await until(lambda: pipelines.changing._waiting)
            # Meanwhile the tenant's pipeline is removed, and another tenant deploys one of the same name.
            await pipelines._remove("fork")
            theirs = Signatures(FORK, "others", pipelines._functions)
            pipelines._being_stored.append(theirs)
            await pipelines._store(FORK, "others", theirs)
        with pytest.raises(NotFoundError, match="pipeline 'fork' was removed"):
            await late

    asyncio.run(scene())
    assert pipelines.tenants() == {"fork": "others"}
