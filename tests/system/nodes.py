"""Real nodes for the tests: a daemon in a separate process, its processes, and what they leave behind."""

import concurrent.futures
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.nodes import parents_of_all
from overwinter.api.client import Client
from overwinter.api.deployer import package, settings_of
from overwinter.core.errors import OverwinterError
from overwinter.model.agreement import agree
from overwinter.model.export import export
from overwinter.store.host import page_bytes

START_S = 60.0
BASE_NAME, ZYGOTE_NAME = "ow-base-zygote", "ow-zygote"
WORKER_NAMES = ("ow-worker", "ow-executor")
"""The names that these processes give themselves."""
KILLED = "signal 9|its process ended|it closed its channel"
"""What is said of a worker that was killed; the last two if its zygote is slow to report the signal."""

T = TypeVar("T")


class NodeProcess:
    """A daemon started as a user would, on a free port."""

    def __init__(self, data: Path, *options: str, port_file: Path | None = None) -> None:
        self.data = data
        self.port_file = port_file or data / "port"
        self.journal = data / "journal.jsonl"
        data.mkdir(parents=True, exist_ok=True)
        self.shm = Path(tempfile.mkdtemp(prefix="overwinter-test-", dir="/dev/shm"))
        self.options = ("--host-store", str(self.shm), *options)
        self.start()

    def start(self) -> None:
        port_file, self._emptied_at = self.port_file, 0
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "overwinter", "serve", "--port", "0", "--port-file", str(port_file)]
        command += ["--no-profile-on-deploy"]
        command += ["--data", str(self.data), "--journal", str(self.journal), *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said: list[str] = []
        ready = threading.Event()
        threading.Thread(target=self._listen, args=(self.process.stdout, ready), daemon=True).start()
        if not ready.wait(START_S):
            self.process.kill()
            self.process.wait()
            shutil.rmtree(self.shm)
            raise AssertionError(f"the node did not become ready: {self.said}")
        if not any("http://" in line for line in self.said):
            self.process.wait(START_S)
            self.shm.rmdir()
            raise AssertionError(f"the node ended at once: {''.join(self.said)}")
        self.url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        self.client = Client(self.url)

    def _listen(self, output, ready) -> None:
        with output:
            for line in output:
                self.said.append(line)
                if "http://" in line:
                    ready.set()
            ready.set()

    def children(self) -> list[int]:
        """Return every process below the daemon: zygotes, workers and executors."""
        found, parents = [], [self.process.pid]
        table = parents_of_all()
        while parents:
            parent = parents.pop()
            below = [pid for pid, its in table.items() if its == parent]
            found += below
            parents += below
        return found

    def zygotes(self) -> list[int]:
        """Return the base zygote, then the tenants'. A process that was just forked, and still has the name of the
        zygote that forked it, is left out.
        """
        names = {pid: name_of(pid) for pid in self.children()}
        table = parents_of_all()
        by_kind = [(pid, (name, names.get(table[pid]) == BASE_NAME)) for pid, name in names.items() if pid in table]
        base = [pid for pid, kind in by_kind if kind == (BASE_NAME, False)]
        return base + [pid for pid, kind in by_kind if kind == (ZYGOTE_NAME, True)]

    def worker_pids(self) -> list[int]:
        """Return the workers and the executors, without processes that were forked ahead, or have no name yet."""
        return [pid for pid in self.children() if name_of(pid) in WORKER_NAMES]

    def steps(self) -> list[list]:
        """Return the steps of the journal since the start, or since the node was emptied: [now, event, actions]."""
        with self.journal.open() as journal:
            journal.seek(self._emptied_at)
            lines = journal.readlines()
        # The last line may not be written completely yet.
        return [json.loads(line) for line in lines if line.startswith("[") and line.endswith("]\n")]

    def seen(self) -> list[str]:
        """Return the kinds of the events that the scheduler has handled, and of the actions that it has returned."""
        return [each["type"] for step in self.steps() for each in (step[1], *step[2])]

    def wait_for(self, kind: str, count: int = 1) -> None:
        """Wait until the scheduler has returned this kind of action, or handled this kind of event, `count` times."""
        wait_until(
            lambda: self.seen().count(kind) >= count,
            lambda: f"of {kind} not {count}, but {sorted(set(self.seen()))}",
        )

    def store(self) -> Path:
        """Return the host store's directory."""
        [place] = self.shm.iterdir()
        return place

    def stored_bytes(self) -> int:
        """Return the bytes of the host store's files, in whole pages."""
        found = 0
        for path in self.store().rglob("*"):
            # A block may be removed meanwhile.
            with suppress(FileNotFoundError):
                found += page_bytes(path.stat().st_size) * path.is_file()
        return found

    def empty(self) -> None:
        """Remove all functions, and leave out what the journal and the log have so far. The node must not have survived
        an error of its own code.
        """
        self.check_log()
        for listed in (self.client.pipelines(), self.client.functions()):
            for name, tenant in {(each["name"], each["tenant"]) for each in listed}:
                self.client.for_tenant(tenant).remove(name)
        wait_until(lambda: not self.client.activity()["workers"] and not self.stored_bytes())
        self._emptied_at = self.journal.stat().st_size
        self.said.clear()

    def check_log(self) -> None:
        """Fail if the node has survived an error of its own code."""
        assert not [line for line in self.said if "the node continues" in line and "Traceback" in line], self.said

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        below = self.children()
        self.process.kill()
        self.process.wait()
        self.client.close()
        wait_gone(below)

    def stop(self) -> None:
        """Stop the daemon, as Ctrl-C or a service manager would."""
        below = self.children()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(START_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.client.close()
        wait_gone(below)

    def clean(self) -> None:
        """Stop it if it runs, and remove its directory in memory, which a clean stop must have emptied."""
        if self.process.poll() is None:
            self.stop()
        self.shm.rmdir()
        self.check_log()


def name_of(pid: int) -> str:
    """Return the name of a process; empty if it has ended."""
    try:
        # The name of a process may be any bytes.
        return Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stopped_workers(node: NodeProcess) -> list[int]:
    """Return the workers and executors that a signal has stopped."""
    found = []
    for pid in node.worker_pids():
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T":
                found.append(pid)
    return found


def let_continue(node: NodeProcess, work: concurrent.futures.Future[T]) -> T:
    """Let each worker continue that has stopped itself, until the work is done, and return its result."""

    def is_done() -> bool:
        for pid in stopped_workers(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return work.done()

    wait_until(is_done)
    return work.result()


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: not parents_of_all().keys() & set(pids))


def wait_until(holds: Callable[[], T], report: Callable[[], object] = lambda: "it never came true") -> T:
    """Wait until the condition is true, and return its value; a busy machine may take long."""
    end, pause_s = time.monotonic() + START_S, 0.002
    while not (found := holds()):
        assert time.monotonic() < end, report()
        time.sleep(pause_s)
        # Without a pause, this would take the processor from the processes for which it waits.
        pause_s = min(2 * pause_s, 0.05)
    return found


@functools.cache
class Scale(torch.nn.Module):
    """y = x * factor + shift, with a weight large enough for a separate block. Created once for equal arguments."""

    def __init__(self, factor: float, size: int = 16384) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((size,), factor), requires_grad=False)
        self.shift = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return {"y": x * self.factor[:4] + self.shift}


@functools.cache
def exported(module: torch.nn.Module):
    """Export a module that takes x [batch, 4], once."""
    return agree(export(module, {"x": torch.zeros(2, 4)}))


def deploy(node: NodeProcess, name: str, module=None, handler=None, assets=None, tenant="default", **settings):
    """Deploy a small function that takes x [batch, 4]; return what the upload did."""
    agreed, chosen = exported(module or Scale(2.0)), settings_of(None, settings)
    made = package(name, *agreed, handler=handler, assets=assets, tenant=tenant, settings=chosen)
    return made.upload(node.client)


def ask(node: NodeProcess, name: str, value: float = 1.0, **options) -> list[float]:
    """The first row of the function's answer."""
    x = torch.full((1, 4), value)
    with Client(node.url) as client:
        return client.infer(name, {"x": x}, **options)["y"].tolist()[0]


@contextmanager
def asking(node: NodeProcess, name: str) -> Iterator[list[float]]:
    """The first number of each answer of a client that sends one request after another until the context ends."""
    stop, answers = threading.Event(), []

    def keep_asking() -> None:
        while not stop.is_set():
            answers.append(ask(node, name)[0])

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def asked_while_killing(
    ask: Callable[[int], bool], count: int, kinds: Sequence[Callable[[NodeProcess], list[int]]], node: NodeProcess
) -> list[bool]:
    """Ask `count` times, eight at a time, while one process of each of these kinds is killed, one after the other.
    Return whether each answer is right; a clear refusal, because both attempts met a dying process, counts as right.
    """

    def answered(at: int) -> bool:
        try:
            return ask(at)
        except OverwinterError as error:
            return re.search(KILLED, str(error)) is not None

    exited = node.seen().count("WorkerExited")
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers, gone, faults = [threads.submit(answered, at) for at in range(count)], list[int](), Counter[object]()
        for killed, pids in enumerate(kinds):
            wait_until(lambda killed=killed: sum(each.done() for each in answers) > 40 * killed + 20)
            # All that are there may have been killed already.
            found = kill_one(pid for pid in pids(node) if pid not in gone)
            faults[pids] += len(found)
            gone += found
        # A later request must not meet a process whose end the scheduler does not know yet.
        node.wait_for("WorkerExited", exited + len(gone))
        assert all(faults[pids] for pids in kinds)
        return [each.result(60) for each in answers]


def kill_one(pids: Iterable[int]) -> list[int]:
    """Kill the first of these processes that has not ended by itself, and return it."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return [pid]
    return []
