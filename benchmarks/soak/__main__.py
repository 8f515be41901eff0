"""Runs a node for a long time under load, changes and kills; checks its answers, and the resources that it keeps.

`python -m benchmarks.soak [--minutes 10] [--seed N]` deploys 200 functions of three tenants: variants with retrained
heads of eight models of the zoo at full size. Three of the models have a stateful handler, one of these a tokenizer;
four allow batches, so that their variants share runs. Some variants of each have separate workers
(`isolation = "function"`), and some refuse requests that would be late. They are called at random rates, sometimes many
of a family at once, each request with one of two different inputs of its function. Meanwhile workers and zygotes are
killed, and functions are deployed, updated, removed, unloaded and loaded.

Every answer is compared with plain PyTorch's for the versions that may have answered between request and answer: once
an update or a removal is confirmed, no later request may be answered by the version before. Answers must be equal bit
for bit, or within NEAR where batches are allowed.

The time is divided into rounds. A round deploys all functions, calls them under changes and kills, restores all, calls
each of them while nothing else happens, and removes all. The first round is the warm-up, which fills the bounded
caches. The reference is the idle node after it: no function is deployed, so only the daemon and its base zygote run.
The node is measured again after each round.

A refusal is explained if its reason was true: the function was removed or updated (404) or unloaded (503), the request
failed in every attempt and a process was killed shortly before or meanwhile (500), it could not be answered within its
SLO and the function refuses late requests (503), or it had no answer within its timeout while all cores of the node
were claimed (504). Any other refusal counts as lost. So do a request without an answer, and a change that the node
refuses without a kill. `requests` in the result counts refused changes too.

At the end the benchmark reads the node's journal: what the scheduler did, whether it had a core free meanwhile, and
that a replay gives the same actions.
"""

import argparse
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch

from benchmarks.fault_injection import Span, kill
from benchmarks.measure import print_result
from benchmarks.nodes import Node, running_node
from benchmarks.openloop import Outcome, Plan, Sender
from benchmarks.resources_held import HEADER, ResourcesHeld, at_rest, growth, row
from benchmarks.soak.members import CHANGES, MODELS, ROWS, Member, arrivals, make_members
from benchmarks.soak.steps import JournalSteps
from benchmarks.soak.verdicts import NodeEvents, verdict
from overwinter.core.errors import OverwinterError

PATIENCE_S = 70.0
"""Longer than any function's timeout with its drain: a request without an answer by then is lost."""
BETWEEN_CHANGES_S = (0.1, 1.0)
BETWEEN_KILLS_S = (0.5, 4.0)
ZYGOTES_SHARE = 0.2
"""The share of zygotes among the kills."""
CHANGES_TO_ABSENT_SHARE = 0.5
"""The share of changes for which a function is drawn from those that are absent or unloaded, if there is one; the
others draw from all.
"""
VARYING = re.compile(r"(?<=@)\d+|\d+\.\d+")
"""The parts of messages that vary: versions and times."""
UNDISTURBED_RATE = 20.0
"""The requests per second when, without faults, each function is called with each input."""
RETRIES = 20
UNNEEDED_S = "5"
"""Unneeded blocks leave the disk soon, because a soak has thousands."""
READ_MAX = 60
COUNTED = slice(ResourcesHeld._fields.index("descriptors"), None)
"""The parts of a reading that count: all but memory."""


class Soak:
    """A node, its functions, and the outcomes of requests and changes."""

    pool = False
    """Whether the functions run on devices."""

    def __init__(self, node: Node, options: argparse.Namespace) -> None:
        self.node = node
        self.rate = options.rate
        families, self.targets, self.payloads = make_members(
            options.functions, tuple(options.models), options.small, self.pool
        )
        self.sizes = [len(family) for family in families]
        self.members = [member for family in families for member in family]
        self.counts: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.events = NodeEvents()
        self.expired: list[tuple[Span, str]] = []
        """The requests that timed out, each with the line to print if overload does not explain it."""
        self._random = Random(options.seed)
        self.seed = options.seed
        self._variants = 0
        self.rounds = 0

    def round(self, seconds: float) -> None:
        """Run a round: deploy all functions, call them with changes and kills for `seconds`, and remove them."""
        self.rounds += 1
        for member in self.members:
            self._change_with_retries(member, "deploy")
        plan = arrivals(seconds, self.rate, self.sizes, self._random)
        with self._changes_and_kills():
            self._send(plan)
        for member in self.members:
            if member.state != "present":
                self._change_with_retries(member, CHANGES[member.state][0])
        self._send([(number / UNDISTURBED_RATE, number) for number in range(len(self.targets))])
        for member in self.members:
            self._change_with_retries(member, "remove")

    def idle_resources(self) -> ResourcesHeld:
        """Return what the idle node holds, once two readings agree in descriptors, processes and files."""
        before = at_rest(self.node)
        for _ in range(READ_MAX):
            found = at_rest(self.node)
            if found[COUNTED] == before[COUNTED]:
                return found
            before = found
        raise RuntimeError(f"the node does not become idle: {before}")

    def _send(self, plan: list[tuple[float, int]]) -> None:
        planned = Plan(self.targets, self.payloads, plan, PATIENCE_S)
        with (
            tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root,
            Sender(self.node.port, planned, Path(root)) as sender,
        ):
            began = sender.began()
            outcomes = sender.outcomes()
        for outcome in outcomes:
            self.judge(outcome, began)

    def judge(self, outcome: Outcome, began: float) -> None:
        place, input_ = divmod(outcome.target, ROWS)
        member = self.members[place]
        found, span = verdict(outcome, began, input_, member.history, self.events)
        message = VARYING.sub("N", outcome.start.replace(member.name, "NAME"))[:120]
        if outcome.status != 200:
            self.refusals[f"{outcome.status} {found}: {message}"] += 1
        at = f"round {self.rounds}, {span.begin:.3f} to {span.until:.3f}"
        line = f"{found}: {member.name}, {at}: {outcome.status} {message}"
        if found == "expired":
            self.expired.append((span, line))
            return
        self.counts[found] += 1
        if found in ("wrong", "lost"):
            self.print_line(line)

    def judge_expired(self, steps: JournalSteps) -> None:
        """Judge timeouts, once it is known when the node had a free core."""
        for span, line in self.expired:
            explained = steps.overloaded(span)
            self.counts["refused" if explained else "lost"] += 1
            if not explained:
                self.print_line(line)

    # Changes and kills

    @contextmanager
    def _changes_and_kills(self) -> Iterator[None]:
        """Make changes and kills until the context ends."""
        over = threading.Event()
        jobs = (self._make_changes, self.kill_processes)
        with ThreadPoolExecutor(len(jobs)) as pool:
            ends = [pool.submit(job, over) for job in jobs]
            try:
                yield
            finally:
                over.set()
        for end in ends:
            end.result()

    def _make_changes(self, over: threading.Event) -> None:
        random = Random(f"{self.seed} changes {self.rounds}")
        while not over.wait(random.uniform(*BETWEEN_CHANGES_S)):
            absent = [member for member in self.members if member.state != "present"]
            member = random.choice(absent if absent and random.random() < CHANGES_TO_ABSENT_SHARE else self.members)
            self._change(member, random.choice(CHANGES[member.state]))

    def kill_processes(self, over: threading.Event) -> None:
        random = Random(f"{self.seed} kills {self.rounds}")
        while not over.wait(random.uniform(*BETWEEN_KILLS_S)):
            kind = "zygote" if random.random() < ZYGOTES_SHARE else "worker"
            if kill(self.node, kind, random):
                self.events.killed()
                self.done[f"kill {kind}"] += 1

    def _change(self, member: Member, what: str) -> bool:
        """Make a change; return whether the node accepted it."""
        began = time.monotonic()
        self._variants += 1
        try:
            member.change(what, self.node.client, self._variants)
        except OverwinterError as error:
            explained = self.events.kills.overlaps(Span(began, time.monotonic()))
            self.counts["refused" if explained else "lost"] += 1
            self.refusals[
                f"{what} {'refused' if explained else 'lost'}: {error}".replace(member.name, "NAME")[:120]
            ] += 1
            if not explained:
                self.print_line(f"lost: {what} {member.name}: {error}")
            return False
        self.done[what] += 1
        return True

    def _change_with_retries(self, member: Member, what: str) -> None:
        """Make a change; repeat it as long as the node refuses, up to RETRIES attempts."""
        if not any(self._change(member, what) for _ in range(RETRIES)):
            raise RuntimeError(f"{what} of {member.name} fails")

    def print_line(self, line: str) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)


def measure(soak: Soak, seconds: float, rounds: int, journal: Path) -> dict[str, float]:
    """Run the warm-up and the rounds, with `seconds` of requests under changes and kills in all, and print their table;
    return the counts of outcomes, and how much the resources grew. `journal`: the node's journal.
    """
    print(HEADER)
    readings: list[ResourcesHeld] = []
    for number in range(rounds + 1):
        began = time.monotonic()
        soak.round(seconds / (rounds + 1))
        readings.append(soak.idle_resources())
        title = f"after round {number}" if number else "after the warm-up"
        print(row(title, readings[-1], time.monotonic() - began), flush=True)
    steps = JournalSteps(journal)
    soak.judge_expired(steps)
    list_counts("done", soak.done)
    list_counts("messages of refusals", soak.refusals)
    list_counts("what the scheduler did, also when replayed", steps.counts)
    counted = {kind: soak.counts[kind] for kind in ("wrong", "lost", "refused")}
    return {"requests": soak.counts.total(), **counted, **growth(readings[0], readings[-1])}


def list_counts(title: str, counts: Counter[str]) -> None:
    """Print counts, the highest first."""
    print(f"{title}:")
    for what, count in counts.most_common():
        print(f"{count:8} {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="model", help="models of the zoo")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="minutes of requests under changes and kills; default 10"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds after the warm-up; default 2")
    parser.add_argument("--functions", type=int, default=200, help="number of functions; default 200")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second of all functions; default 20")
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests, changes and kills; default 0")
    parser.add_argument("--journal", type=Path, help="keep the node's journal in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        journal = options.journal or Path(root) / "journal"
        with running_node("--unneeded-keep-s", UNNEEDED_S, "--journal", str(journal)) as node:
            figures = measure(Soak(node, options), 60 * options.minutes, options.rounds, journal)
    print_result(figures)


if __name__ == "__main__":
    main()
