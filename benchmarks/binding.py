"""What does it cost to bind a sibling in a live worker, beside a warm run and beside a wake of its own?

`python -m benchmarks.binding [--runs N] [model ...]`, batch 1, one thread. Real zygotes and workers and a real host
store, driven by the node's own code without its scheduler, which decides and adds its own 0.1 ms or so. A family's
variants differ in a retrained head, or in all weights; with and without a handler, whose assets are a tokenizer for
texts and a list of labels for the rest, and whose steps pass everything through; it reads them in `setup`, or in
`read_asset`, by which functions share what they have in common. By turns:

* warm: a worker has answered for another member just before;
* sibling: the same worker is told to bind this member, is handed what it lacks, and answers; then it unbinds it;
* wake: a worker is forked for this member from the tenant's zygote, which holds the program, and answers.

`binding` is what passes until the worker says that it is bound, `first run` what the run after it takes over a warm
one. Every answer is compared with plain PyTorch's, bit for bit.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.families import Family, as_tensors
from benchmarks.measure import MIB, print_result, told_spread
from examples.weights import weights_path
from overwinter.api.deployer import Package
from overwinter.core.ids import Address, FunctionId, RequestId, RunId, TenantId, WorkerId
from overwinter.core.tensor import Tensor
from overwinter.node.bodies import BodyProcess
from overwinter.node.functions import DeployedFunction, mapped_bytes
from overwinter.node.insight.memory import process_memory
from overwinter.node.processes import Processes
from overwinter.node.zygotes import Room
from overwinter.store.host import HostStore
from overwinter.store.manifest import Deployment
from overwinter.wiring import ZYGOTE_ENVIRONMENT
from overwinter.worker.channel import close_all
from overwinter.worker.messages import Answer, Bind, Failure, ForkBody, Load, Measured, Ready, RunBatch
from overwinter.worker.sandbox import uid_of

MODELS = ("mlp", "minilm", "resnet50", "bert-base")
TEXTS = ("minilm", "bert-base")
TENANT = TenantId("default")
VARIANTS = {"head": 8, "all": 2}
DISCARDED = 2
HANDLER = """
import json
from tokenizers import Tokenizer

def {step}:
    return Tokenizer.from_str(data.decode()) if name == "tokenizer.json" else json.loads(data)

def setup(assets):
    return {state}

def preprocess(inputs, state):
    return inputs
"""
HANDLERS = {
    "": None,
    "handler": HANDLER.format(
        step="read(name, data)", state="{name: read(name, data) for name, data in assets.items()}"
    ),
    "shared assets": HANDLER.format(step="read_asset(name, data)", state="assets"),
}
"""None; one that reads its assets for each function; one whose assets functions share where they are the same."""


class Member(NamedTuple):
    """One variant: what the node keeps of it, a request, and the right answer."""

    deployed: DeployedFunction
    request: list[Tensor]
    answer: bytes


class Contents:
    """Where the host store gets the blocks of one package after another from."""

    def __init__(self) -> None:
        self.package: Package

    def open(self, address: Address) -> int:
        fd = os.memfd_create("contents")
        with open(os.dup(fd), "wb") as file:
            file.write(self.package.contents[address]())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def set_aside(self, address: Address) -> bool:
        return True


class Bench:
    """The node's processes, and what they tell. It is their staff and their scheduler."""

    def __init__(self, root: Path) -> None:
        self.contents = Contents()
        self.store = HostStore(root, self.contents)
        self.members: dict[FunctionId, Member] = {}
        self.processes = Processes(self, ZYGOTE_ENVIRONMENT, lambda text: print(text, file=sys.stderr))
        self._last = 0
        self._heard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def heard(self) -> Any:
        """What is told next."""
        told = await self._heard
        self._heard = asyncio.get_running_loop().create_future()
        return told

    async def fork(self, member: Member, room: Sequence[Member]) -> BodyProcess:
        """A worker that is ready for a member, with room for others."""
        self._last += 1
        worker, deployed = WorkerId(self._last), member.deployed
        room_bytes = mapped_bytes(each.deployed for each in (member, *room))
        order = ForkBody(worker, uid_of(worker), deployed.memory_bytes, room_bytes)
        fds = self.store.open(deployed.files())
        self.processes.fork(deployed, order, deployed.load(), deployed.bind(), fds)
        close_all(fds)
        body: BodyProcess = await self.heard()
        return body

    async def bind(self, body: BodyProcess, member: Member) -> int:
        """Bind a member; the bytes of the blocks that were handed over."""
        bind = member.deployed.bind()
        blocks = [bind.blocks[number] for number in body.bindings.lacking(bind)]
        fds = self.store.open([*(address for address, _ in blocks), *member.deployed.assets()])
        self.processes.bind(body, member.deployed, fds, self._heard.set_result)
        close_all(fds)
        failure = await self.heard()
        if failure is not None:
            raise RuntimeError(f"{member.deployed.id} cannot be bound: {failure.message}")
        return sum(nbytes for _, nbytes in blocks)

    async def run(self, body: BodyProcess, member: Member) -> None:
        """One request; RuntimeError unless the answer is right."""
        self._last += 1
        run, metas = RunId(self._last), tuple(tensor.meta for tensor in member.request)
        slot = body.begin(run, (RequestId(self._last),))
        tray_bytes = body.lay(slot, member.request)
        self.processes.send(body, RunBatch(run, member.deployed.id, slot, (metas,), tray_bytes))
        if await self.heard() != member.answer:
            raise RuntimeError(f"{member.deployed.id} answers wrongly")

    async def end(self, body: BodyProcess) -> None:
        """Kill a worker, and wait until it is gone."""
        self.processes.stop(body.worker, kill=True)
        await self.heard()

    async def prepare(self, member: Member) -> None:
        """Let the tenant's zygote hold the program ready."""
        self.processes.prepare(TENANT, member.deployed.id)
        while True:
            zygote = self.processes.zygotes.tenants.get(TENANT)
            if zygote is not None and zygote.can_fork and zygote.is_idle:
                return
            await asyncio.sleep(0.02)

    # What the processes tell, and ask

    def body_ready(self, body: BodyProcess, ready: Ready) -> None:
        self._heard.set_result(body)

    def body_answered(self, body: BodyProcess, answer: Answer) -> None:
        flight = body.end(answer)
        [outcome] = body.answer_check.outputs_of(answer, body.slots[flight.slot].outputs)
        body.free(flight)
        failed = isinstance(outcome, Failure)
        self._heard.set_result(outcome if failed else b"".join(bytes(tensor.data) for tensor in outcome))

    def body_measured(self, body: BodyProcess, measured: Measured) -> None:
        raise ValueError("nobody asked")

    def body_exited(self, worker: WorkerId, error: str, reason: str) -> None:
        self._heard.set_result(reason)

    def zygote_lost(self, tenant: TenantId | None, culprit: FunctionId | None) -> None:
        raise RuntimeError("a zygote is lost")

    def tenants(self) -> set[TenantId]:
        return {TENANT}

    def room_of(self, tenant: TenantId) -> Room:
        return Room()

    def rehearsal_of(self, function: FunctionId) -> tuple[Load, Bind, list[int]]:
        deployed = self.members[function].deployed
        return deployed.load(bare=True), deployed.bind(bare=True), self.store.open(deployed.files(bare=True))


class Row(NamedTuple):
    """Milliseconds of each round, and what a member takes."""

    warm: list[float]
    binding: list[float]
    first: list[float]
    """Over `warm`, of the run after the bind."""
    wake: list[float]
    mapped: int
    """Bytes that a bind hands over."""
    private: float
    """Bytes of private memory that a further member adds."""

    @property
    def over_warm(self) -> list[float]:
        """What binding and running takes longer than a warm run."""
        return [binding + first for binding, first in zip(self.binding, self.first, strict=True)]


def staged(bench: Bench, family: Family, kind: str, handler: str | None) -> list[Member]:
    """The base and its variants, in the host store."""
    assets = None
    if handler and family.name in TEXTS:
        assets = {"tokenizer.json": weights_path("minilm-tokenizer").read_bytes()}
    elif handler:
        assets = {"labels.json": json.dumps([f"label {number}" for number in range(1000)]).encode()}
    floats = [name for name, tensor in family.state().items() if tensor.is_floating_point()]
    names = family.head() if kind == "head" else floats
    members = []
    for variant in range(VARIANTS[kind] + 1):
        family.vary(names, variant)
        package = family.packaged(f"{family.name}-{kind}-{variant}", handler, assets=assets)
        bench.contents.package = package
        deployed = DeployedFunction(Deployment(package.manifest.name, 1, package.manifest, 0.0))
        bench.store.stage(deployed.blobs)
        bench.store.join_pages(deployed.blobs)
        members.append(Member(deployed, as_tensors(family.one()), family.answer()))
        bench.members[deployed.id] = members[-1]
    family.vary(names, 0)
    return members


async def clocked(step: Any) -> float:
    """Milliseconds until it is done."""
    began = time.perf_counter()
    await step
    return (time.perf_counter() - began) * 1e3


async def measure(bench: Bench, members: list[Member], runs: int) -> Row:
    """One row of the table."""
    base, *siblings = members
    await bench.prepare(base)
    body = await bench.fork(base, siblings)
    row = Row([], [], [], [], 0, 0)
    for turn in range(runs + DISCARDED):
        sibling = siblings[turn % len(siblings)]
        await bench.run(body, base)
        warm = await clocked(bench.run(body, base))
        binding = await clocked(bench.bind(body, sibling))
        first = await clocked(bench.run(body, sibling)) - warm
        bench.processes.unbind(body, sibling.deployed.id)
        began = time.perf_counter()
        own = await bench.fork(sibling, ())
        await bench.run(own, sibling)
        wake = (time.perf_counter() - began) * 1e3 - warm
        await bench.end(own)
        for values, took in zip(row[:4], (warm, binding, first, wake), strict=True):
            values.extend([took] if turn >= DISCARDED else [])
    before = private_bytes(body)
    mapped = [await bench.bind(body, sibling) for sibling in siblings]
    for sibling in siblings:
        await bench.run(body, sibling)
    # An idle worker gives back what it does not need.
    await asyncio.sleep(0.3)
    added = (private_bytes(body) - before) / len(siblings)
    await bench.end(body)
    return row._replace(mapped=max(mapped), private=added)


def private_bytes(body: BodyProcess) -> int:
    """What the kernel counts as the worker's own."""
    assert body.smaps is not None
    with open(os.dup(body.smaps), "rb", buffering=0) as smaps:
        return process_memory(smaps).private


async def measured(model: str, runs: int) -> dict[str, Row]:
    """All rows of a model."""
    family = Family(model)
    rows = {}
    for kind in VARIANTS:
        for which, handler in HANDLERS.items():
            title = ", ".join(filter(None, (kind, which)))
            with tempfile.TemporaryDirectory(prefix="overwinter-bench-", dir="/dev/shm") as root:
                bench = Bench(Path(root))
                bench.processes.start()
                while not bench.processes.is_up():  # noqa: ASYNC110 - it is told to nobody
                    await asyncio.sleep(0.05)
                rows[title] = await measure(bench, staged(bench, family, kind, handler), runs)
                await bench.processes.close()
            print(f"  {model}: {title}", file=sys.stderr)
    return rows


def report(table: dict[str, dict[str, Row]], runs: int) -> None:
    """The table, and the line for programs."""
    print(f"milliseconds, median (least-largest) of {runs}; batch 1, one thread")
    columns = ("warm", "binding", "first run - warm", "sibling - warm", "wake - warm")
    print(f"{'':32}" + "".join(f"{column:>22}" for column in columns) + f"{'mapped MiB':>12}{'private KiB':>12}")
    for model, rows in table.items():
        for title, row in rows.items():
            times = (row.warm, row.binding, row.first, row.over_warm, row.wake)
            cells = "".join(f"{told_spread(values):>22}" for values in times)
            print(f"{model + ', ' + title:32}{cells}{row.mapped / MIB:12.2f}{row.private / 1024:12.0f}")
    print("every answer equals plain PyTorch's bit for bit")

    def column(of: Callable[[Row], float]) -> dict[str, dict[str, float]]:
        return {model: {title: of(row) for title, row in rows.items()} for model, rows in table.items()}

    print_result(
        {
            "sibling_over_warm_ms": column(lambda row: median(row.over_warm)),
            "wake_over_warm_ms": column(lambda row: median(row.wake)),
            "mapped_mib": column(lambda row: row.mapped / MIB),
            "private_kib": column(lambda row: row.private / 1024),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="model", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--runs", type=int, default=10, help="of each kind; default 10")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report({model: asyncio.run(measured(model, options.runs)) for model in options.models}, options.runs)


if __name__ == "__main__":
    main()
