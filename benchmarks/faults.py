"""Injects faults into a node under load, and checks that every answer is correct or an explained error.

`python -m benchmarks.faults [--minutes N] [--seed N]` sends a continuous load to small models of three tenants, with
and without handlers, one tenant's in its own host store. Workers end after one idle second. Meanwhile it injects
faults, one of processes and one of storage at a time (`benchmarks/fault_injection.py`): SIGKILL and SIGSTOP of workers,
zygotes and the daemon, which is restarted after a SIGKILL; full memory and full disk, also at a start; deleted blocks
and flipped bits in both, but no deletion of a block with a flipped bit; unloads, so that functions are loaded from disk
again. Memory and disk are small tmpfs of the benchmark; without the right to mount, the faults that fill them are
skipped with a message. If a block on disk is lost or damaged, its function is deployed again, as the error says.

Every 200 is compared with plain PyTorch, bit for bit. Anything else must be a documented status with a message, unless
the daemon was down. A request that takes longer than REQUEST_S counts as hung. A bit flipped in memory may affect
answers until the node verifies the block again: such answers are counted as `unverified_wrong`, and the longest time
until a flip was found is printed; after VERIFIED_WITHIN_S they count as wrong. At the end all functions must answer,
the idle daemon may have at most DESCRIPTORS_SPARE more descriptors than at first, and the stopped node must leave no
process and no file (`left`).
"""

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import torch

from benchmarks.families import Family, as_tensors
from benchmarks.fault_injection import (
    Fault,
    Span,
    SupervisedNode,
    adopt_orphans,
    descendants,
    process_fault,
    small_filesystems,
    storage_fault,
)
from benchmarks.measure import descriptors, print_result
from benchmarks.nodes import Node
from benchmarks.wire import Answer, Connection, binary_request
from overwinter.api.client import Client
from overwinter.core.errors import OverwinterError

MODELS = ("mlp", "textcnn", "minilm")
TENANTS = {"north": {}, "south": {}, "east": {"dedicated": True}}
HANDLER = """
def preprocess(inputs, state):
    return dict(inputs)

def postprocess(outputs, inputs, state):
    return dict(outputs)
"""
CLIENTS = 3
PAUSE_S = 0.01
DOWN_S = 0.2
"""The time between two requests while the daemon is down."""
TIMEOUT_S = 10.0
REQUEST_S = 30.0
"""More than the function's timeout plus the longest stop of the daemon."""
VERIFIED_WITHIN_S = 60.0
"""The longest time until the node finds a changed bit in memory."""
FAULT_INTERVAL_S = (0.5, 2.5)
"""The shortest and the longest time between two faults."""
RECOVERY_S = 60.0
UNLOADS_SHARE = 0.4
"""The share of unloads among the faults of storage."""
DESCRIPTORS_SPARE = 84
"""The descriptors of four zygotes and eight processes forked ahead, seven each, whose number varies."""
STATUSES = {429, 500, 503, 504, 507}
DAMAGED = re.compile(r"\b[0-9a-f]{64}\b|block")


class Subject:
    """One function, its request and its correct answer."""

    def __init__(self, family: Family, variant: int, tenant: str) -> None:
        self.name = f"{family.name}-{tenant}"
        family.vary(family.head(), variant)
        handler = HANDLER if variant % 2 else None
        settings = {"keep_alive_s": 1.0, "timeout_s": TIMEOUT_S, **TENANTS[tenant]}
        made = family.packaged(self.name, handler, tenant=tenant, **settings)
        contents = {address: bytes(content()) for address, content in made.contents.items()}
        made.contents = {address: (lambda data=data: data) for address, data in contents.items()}
        self.package = made
        self.addresses = set(contents)
        self.request = binary_request(self.name, as_tensors(family.one()))
        self.answer = family.answer()
        self.flips: list[tuple[Path, int, float]] = []
        """The blocks that were changed in memory: path, inode, time."""
        self.doubtful: list[Span] = []
        """The periods in which its answers may be wrong, because a bit was changed in memory."""
        self.replaced: list[Span] = []
        """The periods in which requests may be refused, because another version replaced it."""
        self.damaged = False

    def client(self, url: str) -> Client:
        """Return a client of the function's tenant."""
        return Client(url, TIMEOUT_S, tenant=self.package.manifest.tenant)

    def deploy(self, url: str) -> None:
        """Deploy the next version. The previous one is removed, and its waiting requests are refused."""
        with self.client(url) as client:
            self._replace(client)

    def _replace(self, client: Client) -> None:
        made = self.package.upload(client)
        self.replaced.append(Span(time.monotonic(), time.monotonic() + TIMEOUT_S))
        for each in client.functions():
            if each["name"] == made.name and each["version"] != made.version:
                client.remove(made.name, each["version"])
        self.damaged = False


class FaultRun:
    """A node under load and faults, with the outcome of each request."""

    def __init__(self, supervised: SupervisedNode, subjects: list[Subject], seed: int) -> None:
        self.supervised = supervised
        self.subjects = subjects
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.found_s = [0.0]
        """The seconds until each changed block was dropped."""
        self.over = threading.Event()

    def ask(self, subject: Subject) -> str:
        """Send one request; return its outcome."""
        begun = time.monotonic()
        try:
            with Connection(self.supervised.node.port, REQUEST_S) as connection:
                answer = connection.exchange(subject.request)
        except TimeoutError:
            return "hung"
        except (OSError, ValueError, KeyError) as error:
            span = Span(begun, time.monotonic())
            return "daemon_down" if self.supervised.was_down(span) else f"unexplained: {type(error).__name__}: {error}"
        span = Span(begun, time.monotonic())
        if answer.status == 200:
            if answer.tensors == subject.answer:
                return "right"
            return "unverified_wrong" if any(span.overlaps(each) for each in subject.doubtful) else "wrong"
        return self._refused(subject, answer, span)

    def _refused(self, subject: Subject, answer: Answer, span: Span) -> str:
        status = answer.status
        try:
            sentence = str(json.loads(answer.body)["error"])
        except (ValueError, KeyError, TypeError):
            sentence = ""
        self.refusals[f"{status} {_without_names(sentence)}"] += 1
        if status == 500 and DAMAGED.search(sentence):
            subject.damaged = True
        # A program whose bits were changed may be invalid, which the node reports as its author's error.
        doubts = {400: subject.doubtful, 404: subject.replaced}.get(status, [])
        explained = (status in STATUSES or any(span.overlaps(each) for each in doubts)) and " " in sentence
        return "refused" if explained else f"unexplained: {status} {sentence}"

    def send_requests(self, number: int) -> None:
        """Send requests as one client."""
        random = Random(f"{self.seed} asker {number}")
        while not self.over.is_set():
            outcome = self.ask(random.choice(self.subjects))
            kind, _, words = outcome.partition(": ")
            self.counts[kind] += 1
            if kind in ("wrong", "hung", "unexplained"):
                print(f"  {kind} {words}", file=sys.stderr, flush=True)
            self.over.wait(DOWN_S if kind == "daemon_down" else PAUSE_S)

    def inject_faults(self, which: str) -> None:
        """Cause faults of one kind, one after the other."""
        random = Random(f"{self.seed} {which}")
        while not self.over.wait(random.uniform(*FAULT_INTERVAL_S)):
            fault = self._inject_one(which, random)
            self.faults[fault.what] += 1
            try:
                self.over.wait(fault.lasts_s)
            finally:
                if fault.undo is not None:
                    fault.undo()

    def _inject_one(self, which: str, random: Random) -> Fault:
        if which == "process":
            return process_fault(self.supervised, random)
        if random.random() < UNLOADS_SHARE:
            return self.unload(random.choice(self.subjects))
        return storage_fault(self.supervised, random, self.flipped)

    def unload(self, subject: Subject) -> Fault:
        """Unload a function, so that its blocks leave memory."""
        try:
            with subject.client(self.supervised.node.url) as client:
                client.unload(subject.name)
                client.load(subject.name)
        except OverwinterError as error:
            self.refusals[f"load: {_without_names(str(error))}"] += 1
        return Fault("unload")

    def flipped(self, block: Path) -> None:
        """Record that a bit of a block in memory was changed: its functions may answer wrong until the node
        finds it.
        """
        now = time.monotonic()
        for subject in self.subjects:
            if block.name in subject.addresses:
                subject.flips.append((block, block.stat().st_ino, now))
                subject.doubtful.append(Span(now, now + VERIFIED_WITHIN_S))

    def watch_blocks(self) -> None:
        """Record when a changed block is dropped, and deploy again what is damaged on disk."""
        while not self.over.wait(0.2):
            for subject in self.subjects:
                self._check_flips(subject)
                if subject.damaged:
                    self.deploy_again(subject)

    def _check_flips(self, subject: Subject) -> None:
        for flip in list(subject.flips):
            block, inode, begun = flip
            now = time.monotonic()
            if not _is_there(block, inode):
                subject.flips.remove(flip)
                # Runs that used it may still be answered.
                subject.doubtful = [Span(begun, now) if span.begin == begun else span for span in subject.doubtful]
                self.found_s.append(now - begun)

    def deploy_again(self, subject: Subject) -> None:
        """Deploy a function again; try again later if the node refuses."""
        try:
            subject.deploy(self.supervised.node.url)
        except OverwinterError as error:
            self.refusals[f"deploy: {_without_names(str(error))}"] += 1

    def recover(self) -> int:
        """Return the number of functions that still do not answer correctly after the end of all faults."""
        until = time.monotonic() + RECOVERY_S
        failing = list(self.subjects)
        while failing and time.monotonic() < until:
            for subject in failing:
                if subject.damaged or subject.flips:
                    self._check_flips(subject)
                    self.deploy_again(subject)
            failing = [subject for subject in failing if self.ask(subject) != "right"]
            time.sleep(PAUSE_S)
        for subject in failing:
            print(f"  {subject.name} does not answer again: {self.ask(subject)}", file=sys.stderr)
        return len(failing)

    def run(self, seconds: float) -> None:
        """Run everything for this long."""
        jobs = [(self.send_requests, (number,)) for number in range(CLIENTS)]
        jobs += [(self.inject_faults, ("process",)), (self.inject_faults, ("storage",)), (self.watch_blocks, ())]
        with ThreadPoolExecutor(len(jobs)) as pool:
            ends = [pool.submit(job, *arguments) for job, arguments in jobs]
            wait(ends, seconds, FIRST_EXCEPTION)
            self.over.set()
        for end in ends:
            end.result()


def _is_there(block: Path, inode: int) -> bool:
    try:
        return block.stat().st_ino == inode
    except FileNotFoundError:
        return False


def _without_names(sentence: str) -> str:
    """Return a sentence without its names and numbers."""
    return re.sub(r"\b[\w-]+-(north|south|east)(@\d+)?\b|[0-9a-f]{64}|/\S+|\d[\d.]*", "_", sentence)[:110]


@contextmanager
def supervised_node() -> Iterator[SupervisedNode]:
    """Create a node, not yet started, whose files can be counted."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overwinter-faults-")))
        mounts = stack.enter_context(small_filesystems(root))
        (root / "temporary").mkdir()
        os.environ["TMPDIR"] = str(root / "temporary")
        memory = mounts.get("memory") or Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        node = Node(mounts.get("disk", root / "data"), memory, ("--disk-free-min-bytes", "4MiB"), log=root / "node.log")
        stack.callback(node.stop)
        yield SupervisedNode(node, mounts)


def left_files(supervised: SupervisedNode, before: set[str]) -> list[str]:
    """Return files that remain after the node has stopped."""
    temporary = Path(os.environ["TMPDIR"])
    found = [path for root in (supervised.node.host_store, temporary) for path in root.rglob("*") if path.is_file()]
    found += [path for path in (supervised.node.data / "blocks").rglob("*") if path.is_file() and len(path.name) != 64]
    # Files with these prefixes belong to another node, because this one uses another directory, or to another Python.
    shared = [name for name in {*os.listdir("/dev/shm")} - before if not name.startswith(("overwinter-", "sem."))]
    return [str(path) for path in found] + sorted(shared)


def measure(supervised: SupervisedNode, seconds: float, seed: int) -> dict[str, float]:
    """Run the load and the faults, print the tables, and return the counts."""
    before = {*os.listdir("/dev/shm")}
    families = [Family(name, small=True) for name in MODELS]
    subjects = [Subject(family, variant, tenant) for family in families for variant, tenant in enumerate(TENANTS, 1)]
    supervised.node.start()
    for subject in subjects:
        subject.deploy(supervised.node.url)
    faulty = FaultRun(supervised, subjects, seed)
    held = _at_rest(supervised)
    faulty.run(seconds)
    unrecovered = faulty.recover()
    grown = _at_rest(supervised) - held
    supervised.node.stop()
    left = [f"process {pid}" for pid in descendants(os.getpid())] + left_files(supervised, before)
    left += [f"{grown} descriptors"] if grown > DESCRIPTORS_SPARE else []
    for title, counts in (("faults", faulty.faults), ("errors that callers got", faulty.refusals)):
        print(f"{title}:")
        for what, count in counts.most_common():
            print(f"{count:8} {what}")
    for each in left:
        print(f"left behind: {each}")
    print(f"a changed block in memory was found after {max(faulty.found_s):.1f} s at most")
    kinds = ("right", "wrong", "unverified_wrong", "refused", "daemon_down", "hung", "unexplained")
    return {
        "requests": faulty.counts.total(),
        **{kind: faulty.counts[kind] for kind in kinds},
        "left": len(left),
        "unrecovered": unrecovered,
        "starts_refused": len(supervised.refused_starts),
        "faults": faulty.faults.total(),
        "found_after_s": max(faulty.found_s),
    }


def _at_rest(supervised: SupervisedNode) -> int:
    """Return the descriptors of the daemon when it is idle and no client is connected."""
    until = time.monotonic() + RECOVERY_S
    while supervised.node.worker_pids() and time.monotonic() < until:
        time.sleep(0.1)
    supervised.node.close_connections()
    supervised.node.wait_quiet()
    return descriptors(supervised.node.pids()[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of requests under faults; default 10")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults and of the requests; default 0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    adopt_orphans()
    with supervised_node() as supervised:
        figures = measure(supervised, options.minutes * 60, options.seed)
    print_result(figures)


if __name__ == "__main__":
    main()
