"""A version answers for its name only if the pipelines that call it go on fitting then, not when its trial began."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from overwinter.api.deployer import package
from overwinter.core.config import NodeConfig
from overwinter.core.errors import ConflictError
from overwinter.core.pipeline import Pipeline, Stage
from overwinter.core.versions import Share
from overwinter.model.export import export
from overwinter.node.runs import Runs
from overwinter.running import running
from overwinter.wiring import ZYGOTE_ENVIRONMENT
from tests.node.log_lines import LogLines
from tests.node.rig import Same, until

STAGES = {"only": Stage(function="f", inputs={"x": "input:x"})}
PIPELINE = Pipeline(name="passes", inputs=("x",), stages=STAGES, outputs={"y": "only:y"})


class Two(torch.nn.Module):
    """With one input more."""

    def forward(self, x, z):
        return {"y": x + z}


def packed(module, *names: str):
    made = export(module, {name: torch.ones(1) for name in names}, {})
    return package("f", made.program, made.weights)


class Held:
    """The end of a trial waits until a test lets it come, and what is stored meanwhile too."""

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


def run(tmp_path, scene) -> None:
    """A scene with a node that has the blobs of two versions, the second of which has other inputs."""
    first, second = packed(Same(), "x"), packed(Two(), "x", "z")

    async def within() -> None:
        config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), profile_on_deploy=False)
        async with running(config, ZYGOTE_ENVIRONMENT, LogLines()) as node:
            for address, content in (*first.contents.items(), *second.contents.items()):
                node.repository.put(first.manifest.tenant, address, bytes(content()), 0.0)
            await scene(node, first.manifest, second.manifest)

    asyncio.run(within())


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "being stored"])
@pytest.mark.parametrize("what", ["a pipeline", "a promotion"])
def test_changes_during_a_trial_are_considered_at_its_end(tmp_path, monkeypatch, what, is_stored):
    async def scene(node, first, second) -> None:
        await node.deploy(first)
        takes_back = what == "a promotion"
        if takes_back:
            await node.deploy_pipeline(PIPELINE, first.tenant)
            await node.set_traffic("f", (Share(1, 100),))
        with held_in(node, monkeypatch) as held:
            deploying = asyncio.create_task(node.deploy(second))
            await until(lambda: held.ready)
            changing = asyncio.create_task(
                node.set_traffic("f", ()) if takes_back else node.deploy_pipeline(PIPELINE, first.tenant)
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
        assert node.versions("f") == [1]
        assert node.view("passes", None).state == "READY"

    run(tmp_path, scene)


def test_a_version_on_trial_answers_for_a_promoted_one_that_was_removed_meanwhile(tmp_path, monkeypatch):
    async def scene(node, first, second) -> None:
        await node.deploy(first)
        await node.set_traffic("f", (Share(1, 100),))
        with held_in(node, monkeypatch) as held:
            deploying = asyncio.create_task(node.deploy(second))
            await until(lambda: held.ready)
            await node.remove("f", 1)
            held.end_trial()
            assert (await deploying).warning == ""
        assert node.versions("f") == [2]
        assert node.view("f", None).version == 2

    run(tmp_path, scene)
