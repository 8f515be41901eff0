"""A worker whose handler keeps deleted blocks of an unbound function is ended, and no other worker is."""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch

from overwinter.api.arrays import to_tensor
from overwinter.bootstrap import running
from overwinter.core.config import NodeConfig
from overwinter.core.ids import SHARED, Address
from overwinter.node import kept_blocks
from overwinter.node.calls import Call
from overwinter.node.kept_blocks import KeptBlocks, deleted_files
from overwinter.server import ZYGOTE_ENVIRONMENT
from overwinter.store.host import HostStore
from overwinter.store.repository import Repository

from .log_lines import LogLines
from .rig import Function, until

WIDTH = 256
X = {"x": torch.ones(1, WIDTH)}
NUMBERS = count(1)
PLAIN = """
def postprocess(outputs, inputs, state):
    assert not outputs["y"].isnan().any(), "the run fails"
    return outputs
"""
COPIES = """
import os
import overwinter.worker.family as family

def setup(assets):
    family.close_all = lambda fds: [os.dup(fd) for fd in fds]
"""
MAPS = """
import overwinter.store.mapping as mapping

def setup(assets):
    mapping.unmap = lambda address, nbytes: None
"""
"""Both handlers change the worker's own code: the worker keeps the descriptors that later binds bring, or all blocks
that it has mapped.
"""
KEEPERS = {"descriptor": COPIES, "mapping": MAPS}


class Net(torch.nn.Module):
    def __init__(self, variant: int):
        super().__init__()
        torch.manual_seed(variant)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return {"y": self.layer(x)}


class Contents(dict[Address, bytes]):
    """The source of a host store."""

    def open(self, address: Address) -> int:
        fd = os.memfd_create("content")
        os.pwrite(fd, self[address], 0)
        return fd

    def set_aside(self, address: Address) -> bool:
        return False


class Member(Function):
    """A function whose blocks lie in a host store."""

    def __init__(self, directory: Path, handler: str) -> None:
        number = next(NUMBERS)
        super().__init__(Net(number), X, handler, name=f"kept{number}")
        self.host = HostStore(directory / str(number), Contents(self.files))
        self.load()

    def load(self) -> None:
        self.host.load(self.deployed.blobs)

    def open_blob(self, address: Address) -> int:
        [fd] = self.host.open([address])
        return fd

    @contextmanager
    def removed(self) -> Iterator[int]:
        """Remove the blocks from the host store, and yield a descriptor of the first one."""
        fd = self.open_blob(self.deployed.weight_blocks[0].address)
        try:
            self.host.drop(self.host.resident())
            yield fd
        finally:
            os.close(fd)


def is_free(fd: int) -> bool:
    """Whether nobody else has the file open or mapped: only then does the kernel grant a write lease."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


class Scene:
    """A worker with two functions, and the node's check."""

    def __init__(self, rig, directory, handler) -> None:
        self.rig, self.said = rig, []
        self.first, self.second, self.third = (Member(directory, handler) for _ in range(3))
        self.kept = KeptBlocks(rig.processes, directory, self.said.append)

    async def start(self):
        self.worker = await self.rig.start_worker(self.first, members=[self.second, self.third])
        assert await self.rig.bind(self.worker, self.second) is None

    @contextmanager
    def unbound(self) -> Iterator[int]:
        """Unbind the second function and remove its blocks, as the node does; yield a descriptor of one."""
        self.rig.unbind(self.worker, self.second)
        with self.second.removed() as block:
            yield block

    async def survives(self) -> None:
        """Check more often than is needed to end a worker; the worker still answers."""
        for _ in range(3):
            await self.kept.check()
        run = self.rig.begin(self.worker, self.first, **X)
        await self.rig.ended(run)
        assert self.rig.failures(run) == []
        assert self.said == []

    async def is_ended(self) -> None:
        await self.kept.check()
        assert not self.rig.exits(self.worker.worker)
        await self.kept.check()
        await until(lambda: self.rig.exits(self.worker.worker))
        [end] = self.rig.exits(self.worker.worker)
        assert end.reason == "it kept blocks of a function that it was told to unbind"
        [line] = self.said
        assert self.first.deployed.id in line


@pytest.mark.parametrize("keeps", KEEPERS)
def test_a_worker_that_keeps_a_removed_block_is_ended_and_the_memory_is_free(rig, directory, keeps):
    scene = Scene(rig, directory, KEEPERS[keeps])

    async def act():
        await scene.start()
        with scene.unbound() as block:
            if keeps == "descriptor" and os.geteuid() != 0:
                # An ordinary user may not see the descriptors of a worker. That ends no worker.
                await scene.survives()
                assert not is_free(block)
            else:
                await scene.is_ended()
                await until(lambda: is_free(block))

    rig.run(act())


def test_a_worker_that_releases_removed_blocks_keeps_running(rig, directory):
    scene = Scene(rig, directory, PLAIN)

    async def act():
        await scene.start()
        # A failure's traceback may refer to weights.
        fails = [rig.begin(scene.worker, scene.second, x=torch.full((1, WIDTH), torch.nan))]
        await rig.ended(*fails)
        fails.append(rig.begin(scene.worker, scene.second, x=torch.ones(1, 3)))
        await rig.ended(*fails)
        assert all(map(rig.failures, fails))
        with scene.unbound() as block:
            await until(lambda: is_free(block))
            await scene.survives()

    rig.run(act())


def test_a_worker_may_keep_what_is_still_in_the_host_store(rig, directory):
    scene = Scene(rig, directory, MAPS)

    async def act():
        await scene.start()
        rig.unbind(scene.worker, scene.second)
        await scene.survives()
        with scene.second.removed():
            await scene.is_ended()

    rig.run(act())


def test_removed_blocks_of_a_bound_function_do_not_count_but_their_former_copies_do(rig, directory):
    scene = Scene(rig, directory, MAPS)

    async def act():
        await scene.start()
        assert await rig.bind(scene.worker, scene.third) is None
        rig.unbind(scene.worker, scene.third)
        with scene.second.removed():
            await scene.survives()
        rig.unbind(scene.worker, scene.second)
        scene.second.load()
        assert await rig.bind(scene.worker, scene.second) is None
        await scene.is_ended()

    rig.run(act())


@pytest.mark.parametrize("busy", ["run", "bind"])
def test_a_worker_that_was_busy_when_it_was_told_to_unbind_may_release_blocks_later(rig, directory, busy):
    scene = Scene(rig, directory, PLAIN)

    async def act():
        await scene.start()
        os.kill(scene.worker.pid, signal.SIGSTOP)
        if busy == "run":
            run = rig.begin(scene.worker, scene.first, **X)
            is_done = lambda: run in rig.ends()  # noqa: E731
        else:
            results = rig.begin_bind(scene.worker, scene.third)
            is_done = lambda: results  # noqa: E731
        with scene.unbound() as block:
            for _ in range(3):
                await scene.kept.check()
            assert not is_free(block)
            os.kill(scene.worker.pid, signal.SIGCONT)
            await until(is_done)
            await until(lambda: is_free(block))
            await scene.survives()

    rig.run(act())


HOLDS = """
import ctypes, mmap, os, sys, threading

fd = os.open(sys.argv[1], os.O_RDONLY)
if sys.argv[2] == "mapped":
    held = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
os.unlink(sys.argv[1])

def say():
    first.join(0.1)
    print("ready", flush=True)
    sys.stdin.read()

first = threading.main_thread()
threading.Thread(target=say).start()
if sys.argv[3] == "first thread ends":
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


@pytest.mark.parametrize("threads", ["all threads run", "first thread ends"])
@pytest.mark.parametrize("how", ["open", "mapped"])
def test_deleted_files_are_seen_whichever_threads_run(directory, how, threads):
    path = directory / "a file"
    path.write_bytes(bytes(4096))
    inode = path.stat().st_ino
    command = [sys.executable, "-c", HOLDS, str(path), how, threads]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        smaps = os.open(f"/proc/{process.pid}/smaps", os.O_RDONLY)
        assert process.stdout.readline() == b"ready\n"
        assert deleted_files(process.pid, os.dup(smaps), str(directory)) == {inode}
        assert deleted_files(process.pid, os.dup(smaps), f"{directory}/other") == set()
        process.stdin.close()
    assert deleted_files(process.pid, smaps, str(directory)) == set()


def test_a_node_ends_the_worker_of_a_removed_function_that_keeps_its_blocks(directory, monkeypatch):
    monkeypatch.setattr(kept_blocks, "CHECK_INTERVAL_S", 0.1)
    stays, leaves = (Function(Net(variant), X, MAPS, name=f"f{variant}") for variant in (1, 2))
    repository, said = Repository(directory / "data"), LogLines()
    for each in (stays, leaves):
        for address, content in each.files.items():
            repository.put(each.deployed.manifest.tenant, address, content, 0.0)
        repository.register(each.deployed.manifest, 0.0)
    repository.close()
    config = NodeConfig(data=str(directory / "data"), host_store=str(directory), profile_on_deploy=False)

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, said) as node:

            async def answer(function: Function) -> None:
                await node.infer(Call(function.deployed.manifest.name, None, [to_tensor("x", X["x"], None)]))

            await answer(stays)
            await answer(leaves)
            [worker] = node.parts.processes.workers()
            [block] = node.parts.hosts.store(SHARED).open([leaves.deployed.weight_blocks[0].address])
            try:
                await node.remove(leaves.deployed.manifest.name, None)
                await until(lambda: worker.over and is_free(block))
            finally:
                os.close(block)
            await answer(stays)

    asyncio.run(scene())
    assert any("it kept blocks of a function that it was told to unbind" in line for line in said)
