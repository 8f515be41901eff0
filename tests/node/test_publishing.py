"""At the end of its trial, a version must fit the pipelines that would then call it; otherwise it is refused."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from msgspec import structs

from overwinter.api.deployer import package
from overwinter.core.errors import ConflictError, ForbiddenError
from overwinter.core.pipeline import Pipeline, Stage
from overwinter.core.versions import Share
from overwinter.model.export import export
from overwinter.node.calls import Calls
from overwinter.node.runs import Runs
from tests.node.rig import AddOne, until

NUMBERS = count()


def pipeline(function: str, version: int | None = None) -> Pipeline:
    stages = {"only": Stage(function=function, version=version, inputs={"x": "input:x"})}
    return Pipeline(name="passes", inputs=("x",), stages=stages, outputs={"y": "only:y"})


class Two(torch.nn.Module):
    """A program with two inputs."""

    def forward(self, x, z):
        return {"y": x + z}


def packed(name: str, module, *inputs: str):
    made = export(module, {name: torch.ones(1) for name in inputs}, {})
    return package(name, made.program, made.weights)


class Held:
    """Delays the end of a trial until `end_trial`, and what is stored meanwhile until `may_store` is set."""

    def __init__(self, node, monkeypatch) -> None:
        self.ready = []
        self.may_store, self.stores = threading.Event(), threading.Event()
        self._worker_ready = Runs.worker_ready
        monkeypatch.setattr(Runs, "worker_ready", lambda *ready: self.ready.append(ready))
        for owner, name in ((node.repository, "put_pipeline"), (node.repository.traffic, "put")):
            monkeypatch.setattr(owner, name, self._when_allowed(getattr(owner, name)))

    def _when_allowed(self, store):
        def wait_and_store(*arguments):
            self.stores.set()
            assert self.may_store.wait(60.0)
            return store(*arguments)

        return wait_and_store

    def end_trial(self) -> None:
        self._worker_ready(*self.ready.pop())


@contextmanager
def held_in(node, monkeypatch) -> Iterator[Held]:
    with monkeypatch.context() as patch:
        held = Held(node, patch)
        try:
            yield held
        finally:
            held.may_store.set()


def run(hosted, scene) -> None:
    """Run a scene with a node that has the blobs of two versions, the second of which has other inputs."""
    name = f"published{next(NUMBERS)}"
    first, second = packed(name, AddOne(), "x"), packed(name, Two(), "x", "z")

    async def within(node) -> None:
        for address, content in (*first.contents.items(), *second.contents.items()):
            node.repository.put(first.manifest.tenant, address, bytes(content()), 0.0)
        await scene(node, first.manifest, second.manifest)

    hosted.run(within)


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "being stored"])
@pytest.mark.parametrize("what", ["a pipeline", "a promotion"])
def test_changes_during_a_trial_are_considered_at_its_end(hosted, monkeypatch, what, is_stored):
    async def scene(node, first, second) -> None:
        await node.deploy(first)
        takes_back = what == "a promotion"
        if takes_back:
            await node.deploy_pipeline(pipeline(first.name), first.tenant)
            await node.set_traffic(first.name, (Share(1, 100),))
        with held_in(node, monkeypatch) as held:
            deploying = asyncio.create_task(node.deploy(second))
            await until(lambda: held.ready)
            changing = asyncio.create_task(
                node.set_traffic(first.name, ())
                if takes_back
                else node.deploy_pipeline(pipeline(first.name), first.tenant)
            )
            await until(held.stores.is_set)
            if is_stored:
                held.may_store.set()
                await changing
            held.end_trial()
            with pytest.raises(ConflictError, match="stage 'only' of pipeline 'passes'"):
                await deploying
            held.may_store.set()
            await changing
        assert node.versions(first.name) == [1]
        assert node.view("passes", None).state == "READY"

    run(hosted, scene)


def test_a_version_is_on_trial_before_the_scheduler_knows_it(hosted, monkeypatch):
    async def scene(node, first, second) -> None:
        await node.deploy(first)
        seen, ask = [], Calls.ask

        async def noted(calls, function, event):
            view = node.view(first.name, 2)
            seen.append((view.state, view.reason))
            with pytest.raises(ConflictError, match="version 2 of .* is on trial"):
                await node.deploy_pipeline(pipeline(first.name, 2), first.tenant)
            return await ask(calls, function, event)

        with monkeypatch.context() as patch:
            patch.setattr(Calls, "ask", noted)
            await node.deploy(second)
        assert seen == [("LOADING", "on trial")]
        assert node.view(first.name, 2).state == "READY"

    run(hosted, scene)


def test_a_new_version_answers_if_the_promoted_one_was_removed_during_its_trial(hosted, monkeypatch):
    async def scene(node, first, second) -> None:
        await node.deploy(first)
        await node.set_traffic(first.name, (Share(1, 100),))
        with held_in(node, monkeypatch) as held:
            deploying = asyncio.create_task(node.deploy(second))
            await until(lambda: held.ready)
            await node.remove(first.name, 1)
            held.end_trial()
            assert (await deploying).warning == ""
        assert node.versions(first.name) == [2]
        assert node.view(first.name, None).version == 2

    run(hosted, scene)


def test_a_promoted_version_cannot_be_removed_until_the_catalog_knows_that_a_newer_one_passed_its_trial(
    hosted, monkeypatch
):
    async def scene(node, first, second) -> None:
        await node.deploy(first)
        await node.deploy_pipeline(pipeline(first.name), first.tenant)
        await node.set_traffic(first.name, (Share(1, 100),))
        proves, may_prove, prove = threading.Event(), threading.Event(), node.repository.prove

        def prove_when_allowed(*version) -> None:
            proves.set()
            assert may_prove.wait(60.0)
            prove(*version)

        with monkeypatch.context() as patch:
            patch.setattr(node.repository, "prove", prove_when_allowed)
            deploying = asyncio.create_task(node.deploy(second))
            try:
                await until(proves.is_set)
                assert node.versions(first.name) == [1, 2]
                with pytest.raises(ConflictError, match="version 1 of .* gets 100 per cent"):
                    await node.remove(first.name, 1)
            finally:
                may_prove.set()
                await deploying
        assert node.versions(first.name) == [1, 2]
        assert node.view("passes", None).state == "READY"
        await node.remove("passes", None)

    run(hosted, scene)


def test_an_author_who_deploys_under_a_taken_name_does_not_learn_of_the_owners_pipelines(hosted):
    async def scene(node, first, second) -> None:
        await node.deploy(first)
        await node.deploy_pipeline(pipeline(first.name), first.tenant)
        with pytest.raises(ForbiddenError, match="another tenant") as refused:
            await node.deploy(structs.replace(second, tenant="bob"))
        assert "passes" not in str(refused.value)
        assert node.versions(first.name) == [1]
        await node.remove("passes", None)

    run(hosted, scene)
