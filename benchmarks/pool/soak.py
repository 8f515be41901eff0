"""The soak of `benchmarks.soak`, with functions of the pool on devices that hold only some of them at a time.

The devices are linked, so blocks are copied from other devices, too, even while the executors there are killed.
Executors are killed, and stopped (SIGSTOP): most continue after a while, some are stopped for TIMEOUT_S. No function
allows batches, so every answer equals plain PyTorch's bit for bit. A request that waited for a stopped executor may
time out; an outcome that comes too long after the timeout counts as `after_timeout`. Before the resources of the idle
node are read, its executors are killed, because idle executors stay.
"""

import argparse
import os
import signal
import threading
from contextlib import suppress
from random import Random

from benchmarks.fault_injection import kill
from benchmarks.openloop import Outcome
from benchmarks.pool.readings import read
from benchmarks.pool.serving import PoolNode, devices, pool_node, scheduling
from benchmarks.resources_held import ResourcesHeld
from benchmarks.soak.__main__ import BETWEEN_KILLS_S, UNNEEDED_S, Soak, list_counts, measure
from benchmarks.soak.members import TIMEOUT_S
from benchmarks.soak.steps import JournalSteps
from overwinter.core.devices import DeviceIsolation

DEVICES = 4
MEMORY_BYTES = 160 << 20
SMALL_MEMORY_BYTES = 1 << 20
PEER_BYTES_PER_S = 4e9
MODELS = ("mlp", "textcnn", "lstm", "dssm", "mobilenet-v2", "minilm", "densenet169", "resnet50")
KINDS = ("kill executor", "kill executor", "stop executor", "stop executor", "hang executor", "kill zygote")
STOP_S = (0.5, 6.0)
AFTER_TIMEOUT_S = 1.0
"""How long after the timeout an outcome may come on a busy machine."""


class PoolSoak(Soak):
    """A soak of functions of the pool."""

    pool = True
    node: PoolNode

    def judge(self, outcome: Outcome, began: float) -> None:
        """Judge an outcome, and whether it came too long after the timeout."""
        super().judge(outcome, began)
        waited_s = outcome.latency_s - outcome.delay_s
        if waited_s > TIMEOUT_S + AFTER_TIMEOUT_S:
            self.counts["after_timeout"] += 1
            self.print_line(f"after the timeout: {waited_s:.1f} s: {outcome.status} {outcome.start[:120]}")

    def judge_expired(self, steps: JournalSteps) -> None:
        """Judge timeouts: one during a fault counts as refused, any other as lost."""
        for span, line in self.expired:
            explained = self.events.kills.overlaps(span)
            self.counts["refused" if explained else "lost"] += 1
            if not explained:
                self.print_line(line)

    def kill_processes(self, over: threading.Event) -> None:
        """Kill and stop executors, and kill zygotes, until the event."""
        random = Random(f"{self.seed} faults {self.rounds}")
        while not over.wait(random.uniform(*BETWEEN_KILLS_S)):
            kind = random.choice(KINDS)
            is_zygote = kind == "kill zygote"
            if self._kill_zygote(random) if is_zygote else self._kill_or_stop_executor(kind, random):
                self.done[kind] += 1

    def _kill_zygote(self, random: Random) -> bool:
        if not kill(self.node, "zygote", random):
            return False
        self.events.killed()
        return True

    def _kill_or_stop_executor(self, kind: str, random: Random) -> bool:
        pids = self.node.executor_pids()
        if not pids:
            return False
        pid = random.choice(pids)
        if kind == "kill executor":
            self.events.killed()
            _signal(pid, signal.SIGKILL)
            return True
        stopped_s = TIMEOUT_S if kind == "hang executor" else random.uniform(*STOP_S)
        self.events.killed(stopped_s)
        _signal(pid, signal.SIGSTOP)
        timer = threading.Timer(stopped_s, _signal, (pid, signal.SIGCONT))
        timer.daemon = True
        timer.start()
        return True

    def idle_resources(self) -> ResourcesHeld:
        """Return what the idle node holds without executors."""
        for pid in self.node.executor_pids():
            _signal(pid, signal.SIGKILL)
        return super().idle_resources()


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def soak(
    seconds: float,
    *,
    functions: int,
    rate: float,
    seed: int,
    small: bool,
    isolation: DeviceIsolation,
    models: tuple[str, ...] = MODELS,
    rounds: int = 2,
) -> dict[str, float]:
    """Run the soak; print its tables, and return its counts and what is left."""
    options = argparse.Namespace(functions=functions, models=models, small=small, rate=rate, seed=seed)
    pool = devices(DEVICES, SMALL_MEMORY_BYTES if small else MEMORY_BYTES, PEER_BYTES_PER_S)
    scheduler = scheduling(pool, device_isolation=isolation)
    with pool_node(scheduler, unneeded_keep_s=float(UNNEEDED_S)) as node:
        done = PoolSoak(node, options)
        figures = measure(done, seconds, rounds, node.journal)
        readings = read(node.journal)
        list_counts("what the devices did", readings.counts)
        if node.log is not None and "Traceback" in (text := node.log.read_text()):
            print(text[-8000:])
            figures["tracebacks"] = text.count("Traceback")
    copied = readings.counts["runs that copied blocks from another device"]
    counted = {"after_timeout": done.counts["after_timeout"], "expired": len(done.expired), "copied_from_peers": copied}
    return {**figures, **counted}
