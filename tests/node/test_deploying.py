"""A deploy that fails leaves no version behind, and many versions are removed in steps."""

import asyncio
import threading
from functools import partial
from itertools import count

import pytest
import torch
from msgspec import structs

from overwinter.api.deployer import package
from overwinter.core.errors import AuthorError, CallerError, ConflictError, NotFoundError, StoreError, TooLargeError
from overwinter.core.events import Deployed, Removed, UnloadAsked
from overwinter.core.ids import function_id, is_part
from overwinter.core.tensor import RUN_TENSORS_MAX
from overwinter.model.export import export
from overwinter.node.deploys import BLOBS_MAX
from overwinter.node.fair_queue import STARTED_MAX
from overwinter.node.functions import DeployedFunction
from overwinter.node.runs import Runs
from overwinter.store.blocks import address_of
from overwinter.store.manifest import Blob, Block, Handler
from tests.node.rig import AddOne, until

NUMBERS = count()


@pytest.fixture
def deploying(hosted):
    """Return a function that runs a coroutine with a node and a manifest whose blobs the node has, and checks that
    afterwards no version is left.
    """
    made = export(AddOne(), {"x": torch.ones(1)}, {})
    packed = package(f"deployed{next(NUMBERS)}", made.program, made.weights)

    def run(scene):
        async def within(node):
            for address, content in packed.contents.items():
                node.repository.put(packed.manifest.tenant, address, bytes(content()), 0.0)
            await scene(node, packed.manifest)
            rows = node.repository._catalog.rows(unproven=True)
            assert packed.manifest.name not in {row.name for row in rows}
            assert (await node.deploy(packed.manifest)).version == 2

        hosted.run(within)

    return run


def test_a_deploy_that_fails_before_its_trial_leaves_nothing(deploying, monkeypatch):
    async def scene(node, manifest):
        def stored(function):
            raise StoreError("the catalog cannot be read")

        with monkeypatch.context() as patch:
            patch.setattr(node.profiler, "stored", stored)
            with pytest.raises(StoreError):
                await node.deploy(manifest)

    deploying(scene)


def test_a_function_with_more_files_than_a_worker_may_open_is_refused(deploying):
    async def scene(node, manifest):
        more = tuple(Block(f"{number:064x}", 1, ()) for number in range(BLOBS_MAX + 1 - len(manifest.blobs())))
        with pytest.raises(TooLargeError, match=f"{manifest.name!r} has {BLOBS_MAX + 1} blobs"):
            await node.deploy(structs.replace(manifest, blocks=(*manifest.blocks, *more)))
        with pytest.raises(ConflictError, match=manifest.name):
            await node.deploy(structs.replace(manifest, blocks=(*manifest.blocks, *more[1:])))
        assert (await node.deploy(manifest)).version == 1
        await node.remove(manifest.name, None)

    deploying(scene)


def test_a_function_with_too_many_tensors_in_a_run_is_refused_with_the_batch_that_is_possible(deploying, monkeypatch):
    async def scene(node, manifest):
        def batched(requests):
            return structs.replace(manifest, settings=structs.replace(manifest.settings, max_batch=requests))

        with pytest.raises(CallerError, match=f"max_batch to {RUN_TENSORS_MAX // 2}"):
            await node.deploy(batched(RUN_TENSORS_MAX // 2 + 1))
        sizes = sum(len(spec.shape) for spec in (*manifest.inputs, *manifest.outputs))
        with monkeypatch.context() as patch:
            patch.setattr("overwinter.core.tensor.RUN_SIZES_MAX", 100 * sizes)
            with pytest.raises(CallerError, match=f"{sizes} sizes in their shapes.* max_batch to 100"):
                await node.deploy(batched(101))
        await node.deploy(batched(RUN_TENSORS_MAX // 2))
        await node.remove(manifest.name, None)

    deploying(scene)


def test_versions_are_unloaded_and_removed_a_few_in_each_iteration_of_the_loop(deploying, monkeypatch):
    versions = 2 * STARTED_MAX

    async def scene(node, manifest):
        first = await node.deploy(manifest)
        assert first.version == 1
        [function] = [each for each in node._registry.deployed_functions() if each.deployment.name == manifest.name]
        for number in range(2, versions + 1):
            deployment = structs.replace(function.deployment, version=number)
            other = DeployedFunction(deployment)
            node._registry.add(other)
            node._loop.post(Deployed(other.spec()))
        await until(lambda: len(node._registry.versions(manifest.name)) == versions)
        posted: list[str] = []
        most = 0

        def counted(post, event):
            # A worker may end meanwhile, or an alarm be due.
            if isinstance(event, UnloadAsked | Removed):
                posted.append(event.function)
            post(event)

        async def watch():
            nonlocal most
            while True:
                before = len(posted)
                await asyncio.sleep(0)
                most = max(most, len(posted) - before)

        every = [function_id(manifest.name, number) for number in range(1, versions + 1)]
        with monkeypatch.context() as patch:
            patch.setattr(node._loop, "post", partial(counted, node._loop.post))
            patch.setattr(node.repository, "remove", lambda name, version: list(range(1, versions + 1)))
            watching = asyncio.create_task(watch())
            try:
                for act in (node.unload, node.remove):
                    posted.clear()
                    most = 0
                    await act(manifest.name, None)
                    await asyncio.sleep(0)
                    assert posted == every
                    assert 0 < most <= STARTED_MAX
            finally:
                watching.cancel()
        assert not any(each.deployment.name == manifest.name for each in node._registry.deployed_functions())
        node.repository.remove(manifest.name, None)

    deploying(scene)


def test_a_removal_collects_unneeded_blocks_in_the_thread_for_collections(deploying, monkeypatch):
    async def scene(node, manifest):
        seen, collect = [], node.repository.collect

        def collecting(now, grace_s, only):
            seen.append((threading.current_thread().name, only))
            return collect(now, grace_s, only)

        await node.deploy(manifest)
        with monkeypatch.context() as patch:
            patch.setattr(node.repository, "collect", collecting)
            await node.remove(manifest.name, 1)
        assert seen == [("collection_0", {blob.address for blob in manifest.blobs()})]

    deploying(scene)


def test_the_owner_of_a_function_is_found_without_reading_all_functions(deploying, monkeypatch):
    class Unread(dict):
        """Fails if all its values are read."""

        def values(self):
            raise AssertionError("all functions were read")

    async def scene(node, manifest):
        ready, worker_ready = [], Runs.worker_ready
        with monkeypatch.context() as patch:
            patch.setattr(Runs, "worker_ready", lambda *what: ready.append(what))
            deploy = asyncio.create_task(node.deploy(manifest))
            await until(lambda: ready)
            try:
                patch.setattr(node._registry, "functions", Unread(node._registry.functions))
                assert node.owner(manifest.name) == manifest.tenant
                with pytest.raises(NotFoundError):
                    node.owner("absent")
            finally:
                patch.undo()
                worker_ready(*ready.pop())
                await deploy
        with monkeypatch.context() as patch:
            patch.setattr(node._registry, "functions", Unread(node._registry.functions))
            assert node.owner(manifest.name) == manifest.tenant
        await node.remove(manifest.name, 1)
        with pytest.raises(NotFoundError):
            node.owner(manifest.name)

    deploying(scene)


def test_a_function_is_removed_although_its_blocks_cannot_be_removed(deploying, monkeypatch):
    async def scene(node, manifest):
        def failing(*of):
            raise StoreError("cannot remove unneeded blocks")

        await node.deploy(manifest)
        before = node.parts.faults.counts["removing unneeded blocks"]
        with monkeypatch.context() as patch:
            patch.setattr(node.repository, "collect", failing)
            await node.remove(manifest.name, None)
        assert node.parts.faults.counts["removing unneeded blocks"] == before + 1
        with pytest.raises(NotFoundError):
            node.view(manifest.name, None)

    deploying(scene)


def test_a_version_on_trial_is_neither_loaded_nor_unloaded(deploying, monkeypatch):
    async def scene(node, manifest):
        ready, worker_ready = [], Runs.worker_ready
        with monkeypatch.context() as patch:
            patch.setattr(Runs, "worker_ready", lambda *what: ready.append(what))
            deploy = asyncio.create_task(node.deploy(manifest))
            await until(lambda: ready)
            try:
                with pytest.raises(ConflictError, match=f"{manifest.name}@1 is on trial"):
                    await node.unload(manifest.name, 1)
                with pytest.raises(ConflictError, match=f"{manifest.name}@1 is on trial"):
                    await node.load(manifest.name, 1)
            finally:
                patch.undo()
                worker_ready(*ready.pop())
                await deploy
        assert node.view(manifest.name, 1).state == "READY"
        await node.unload(manifest.name, 1)
        await node.remove(manifest.name, 1)

    deploying(scene)


def test_a_version_that_is_removed_between_the_trials_of_its_parts_is_not_deployed(deploying, monkeypatch):
    async def scene(node, manifest):
        source = b"def preprocess(inputs, state):\n    return inputs\n"
        handler = Handler(Blob(address_of(source), len(source)))
        node.repository.put(manifest.tenant, handler.source.address, source, 0.0)
        settings = structs.replace(manifest.settings, device="pool")
        tried = []
        ask = node._calls.ask

        async def remove_after(id_, event):
            await ask(id_, event)
            tried.append(id_)
            await node.remove(manifest.name, None)

        with monkeypatch.context() as patch:
            patch.setattr(node._calls, "ask", remove_after)
            with pytest.raises(NotFoundError, match=f"{manifest.name}@1 was removed"):
                await node.deploy(structs.replace(manifest, handler=handler, settings=settings))
        assert len(tried) == 1
        assert is_part(tried[0])

    deploying(scene)


def test_blobs_that_arrive_after_the_check_of_a_deploy_are_not_registered_unchecked(deploying, monkeypatch):
    async def scene(node, manifest):
        late = b"no block"
        blocks = (*manifest.blocks, Block(address_of(late), len(late), ()))
        check = node._deploys._check

        def check_before_upload(checked):
            try:
                return check(checked)
            finally:
                node.repository.put(manifest.tenant, address_of(late), late, 0.0)

        with monkeypatch.context() as patch:
            patch.setattr(node._deploys, "_check", check_before_upload)
            with pytest.raises(ConflictError, match=f"1 blobs of .* not in the repository: {address_of(late)}"):
                await node.deploy(structs.replace(manifest, blocks=blocks))
        with pytest.raises(CallerError, match="is not a block"):
            await node.deploy(structs.replace(manifest, blocks=blocks))
        await node.deploy(manifest)
        await node.remove(manifest.name, None)

    deploying(scene)


def test_samples_of_a_function_without_inputs_are_tried(deploying):
    fails = b"import torch\nINPUTS = []\ndef preprocess(inputs, state):\n    raise ValueError('tried')\n"
    answers = fails.replace(b"raise ValueError('tried')", b"return {'x': torch.ones(1)}")

    async def scene(node, manifest):
        def with_samples(name, source):
            node.repository.put(manifest.tenant, address_of(source), source, 0.0)
            handler = Handler(Blob(address_of(source), len(source)))
            return structs.replace(manifest, name=name, handler=handler, inputs=(), samples=((), ()))

        with pytest.raises(AuthorError, match=r"does not answer sample 1: .*tried"):
            await node.deploy(with_samples(f"{manifest.name}-failing", fails))
        await node.deploy(with_samples(manifest.name, answers))
        await node.remove(manifest.name, None)

    deploying(scene)


def test_a_deploy_that_is_cancelled_while_it_is_registered_leaves_nothing(deploying, monkeypatch):
    registered, go = threading.Event(), threading.Event()

    async def scene(node, manifest):
        register = node.repository.register

        def slow(*arguments, **named):
            deployment = register(*arguments, **named)
            registered.set()
            go.wait()
            return deployment

        with monkeypatch.context() as patch:
            patch.setattr(node.repository, "register", slow)
            deploy = asyncio.create_task(node.deploy(manifest))
            try:
                await until(registered.is_set)
                deploy.cancel()
                await asyncio.sleep(0)
            finally:
                go.set()
            with pytest.raises(asyncio.CancelledError):
                await deploy

    deploying(scene)
