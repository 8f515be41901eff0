"""Measures the service of a well-behaved tenant while other tenants and callers attack the node.

`python -m benchmarks.siege [--minutes M] [--seed S]` calls twenty functions of one tenant fifty times a second in
total, open-loop; each answer is compared with plain PyTorch's, bit for bit. During the first phase, `calm`, there is no
other load. Then each attack of other tenants and callers runs in turn (`benchmarks/siege/attacks.py`), and the table
shows the effect of each. The attackers share the machine with the node. So their process has a high nice value and may
use only a fifth of a core: what an attack slows down is the node, not the machine.

After each attack the node has time to become idle. The table shows how long that took, and the tenant's service during
that time, in the row of the attack that caused it.

Latency counts from the planned time of a request. A refused, lost or wrong answer does not attain the SLO, and counts
with the client's timeout in the p99. The limit of memory is the configured one (private memory of workers, host store,
requests) plus the memory of daemon and zygotes, which is measured before the first request.
"""

import argparse
import json
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from benchmarks.hostile.attacked_node import AttackedNode, attacked_node
from benchmarks.hostile.exchange import HungError, ask
from benchmarks.hostile.verdicts import FAILURE_KINDS, Tally
from benchmarks.measure import MIB, print_result, quantile
from benchmarks.openloop import Outcome, Plan, Sender, attainment, count_kinds
from benchmarks.siege.attacks import ATTACKS
from benchmarks.siege.peak_memory import PeakMemory, process_bytes
from benchmarks.siege.recovery import Recovery
from benchmarks.siege.well_behaved import WellBehavedTenant, phase_of

RATE = 50.0
CALM = "calm"
CALM_SHARE = 0.2
WARM_S = 3.0
"""The time in which every function is woken once, before measurements begin."""
PATIENCE_S = 25.0
"""Longer than any function may take."""
BOUNDS = {"--memory-bytes": 3 << 30, "--host-bytes": 2 << 30, "--requests-bytes-max": 512 << 20}
"""The node's configured limits: private memory of workers, host store, requests."""
CHECK_INTERVAL_S = 0.2
START_S = 60.0
END_S = 10.0
SLACK = 4.0
"""Requests are planned for this multiple of the time, because some attacks take long to end."""


class Phase(NamedTuple):
    """A part of the time, on the system's monotonic clock, and its peak of memory in bytes."""

    name: str
    began: float
    ended: float
    peak: int
    over: float
    """The end of the attack and of the memory measurement; until `quiet` the node is busy with its consequences."""
    quiet: float


class AttackerProcess:
    """The process of the attackers. It is replaced if it does not end an attack in time."""

    def __init__(self, found: AttackedNode, seed: int, keep: Sequence[str]) -> None:
        """Start the process. `keep` are the functions of the well-behaved tenant."""
        self._found = found
        self._keep = set(keep)
        self._command = [sys.executable, "-m", "benchmarks.siege.attacker", str(found.port), str(seed)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not self._answers_within(START_S):
            raise RuntimeError("the attackers' process does not start")

    def begin(self, name: str) -> None:
        """Begin an attack."""
        self._write(name)

    def end(self) -> None:
        """End the attack, and remove what it deployed."""
        self._write("")
        if not self._answers_within(END_S):
            self.stop()
            self._clear()
            self._start()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _answers_within(self, seconds: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0] and self._process.stdout.readline())

    def _clear(self) -> None:
        with suppress(OSError, HungError):
            reply = ask(self._found.port, "GET", "/overwinter/v1/functions", patience_s=END_S)
            there = [] if reply is None or reply.status != 200 else json.loads(reply.body)
            for name, tenant in {each["name"]: each["tenant"] for each in there}.items():
                if name not in self._keep:
                    ask(self._found.port, "DELETE", f"/overwinter/v1/functions/{name}", b"", END_S, tenant)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def wait(found: AttackedNode, seconds: float) -> None:
    """Wait; restart the node if it ends."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(CHECK_INTERVAL_S, left))
        found.examine()


def run_phases(
    found: AttackedNode,
    names: Sequence[str],
    seconds: float,
    peak_memory: PeakMemory,
    attackers: AttackerProcess,
    keep: Sequence[str],
) -> list[Phase]:
    """Run all phases, one after the other."""
    calm_s = CALM_SHARE * seconds
    each_s = (seconds - calm_s) / len(names)
    recovery = Recovery(found.node, keep)
    found.tally.begin(CALM, CALM, 0)
    wait(found, WARM_S)
    began = time.monotonic()
    recovery.learn(lambda: wait(found, calm_s))
    ended = time.monotonic()
    phases = [Phase(CALM, began, ended, peak_memory.take(), ended, ended)]
    for number, name in enumerate(names):
        found.tally.begin(name, name, number)
        began = time.monotonic()
        attackers.begin(name)
        wait(found, each_s)
        ended, peak = time.monotonic(), peak_memory.take()
        attackers.end()
        over = time.monotonic()
        recovery.wait(lambda seconds: wait(found, seconds))
        phases.append(Phase(name, began, ended, peak, over, time.monotonic()))
        print(
            f"{name}: {ended - began:.0f} s, quiet {phases[-1].quiet - over:.0f} s later", file=sys.stderr, flush=True
        )
    return phases


def slowness(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the seconds of each request; the whole patience if it has no correct answer."""
    return [each.latency_s if each.kind == "answered" else PATIENCE_S for each in outcomes] or [0.0]


def outcomes_by_phase(
    outcomes: Sequence[Outcome], spans: Sequence[tuple[str, float, float]]
) -> dict[str, list[Outcome]]:
    """Return the outcomes in each phase, by its name."""
    found: dict[str, list[Outcome]] = {name: [] for name, _, _ in spans}
    for each in outcomes:
        if name := phase_of(each.planned_at_s, spans):
            found[name].append(each)
    return found


def wrong(outcomes: Sequence[Outcome]) -> int:
    """Count the wrong answers."""
    return sum(each.status == 200 and not each.right for each in outcomes)


def row(
    phase: Phase, part: Sequence[Outcome], after: Sequence[Outcome], slo_s: Sequence[float], failures: str = ""
) -> str:
    """Format a line of the table."""
    counts, times = count_kinds(part), slowness(part)
    lost = counts["lost"] - wrong(part)
    p50, p99 = (1e3 * quantile(times, share) for share in (0.5, 0.99))
    message = f"{len(part):9}{attainment(part, slo_s):9.1%}{p50:9.1f}{p99:10.1f}"
    left = f"{phase.quiet - phase.over:9.0f}{1e3 * quantile(slowness(after), 0.99):14.1f}"
    counted = f"{counts['refused']:9}{lost:6}{wrong(part):7}{phase.peak / MIB:10.0f}"
    return f"{phase.name:18}{message}{counted}{left}  {failures}"


def report(
    found: AttackedNode, plan_began: float, phases: list[Phase], outcomes: list[Outcome], measured: dict
) -> None:
    """Print the table and RESULT; `measured` has the SLOs, the memory limit, and the memory of daemon and zygotes."""
    by_phase = outcomes_by_phase(
        outcomes, [(phase.name, phase.began - plan_began, phase.ended - plan_began) for phase in phases]
    )
    afters = outcomes_by_phase(
        outcomes, [(phase.name, phase.over - plan_began, phase.quiet - plan_began) for phase in phases]
    )
    print(
        f"\n{'phase':18}{'requests':>9}{'in SLO':>9}{'p50 ms':>9}{'p99 ms':>10}{'refused':>9}{'lost':>6}{'wrong':>7}",
        end="",
    )
    print(f"{'peak MiB':>10}{'after s':>9}{'p99 ms after':>14}  failures of the node")
    for phase in phases:
        failures = ", ".join(
            f"{failure} {count}" for failure in FAILURE_KINDS if (count := found.tally.counts[phase.name][failure])
        )
        print(row(phase, by_phase[phase.name], afters[phase.name], measured["slo_s"], failures))
    for example in found.tally.examples:
        print(f"{example.failure}: {example.case}: {example.text}")
    under = [each for phase in phases if phase.name != CALM for each in by_phase[phase.name]]
    counts = count_kinds(under)
    calm_s, under_s = (quantile(slowness(part), 0.99) for part in (by_phase[CALM], under))
    peak = max(phase.peak for phase in phases)
    print(
        f"p99 {1e3 * calm_s:.1f} ms when calm, {1e3 * under_s:.1f} ms under attack; peak {peak / MIB:.0f} MiB of",
        end=" ",
    )
    print(f"{measured['bound'] / MIB:.0f} MiB, {measured['base'] / MIB:.0f} MiB of these the daemon's and the zygotes'")
    print_result(
        {
            "attainment": attainment(under, measured["slo_s"]),
            "p99_over_calm": under_s / max(calm_s, 1e-6),
            "wrong": wrong(outcomes),
            "lost": counts["lost"] - wrong(under),
            "peak_over_bound": peak / measured["bound"],
            "after_s": max(phase.quiet - phase.over for phase in phases),
            "after_p99_ms": max(1e3 * quantile(slowness(part), 0.99) for part in afters.values()),
            "calm_attainment": attainment(by_phase[CALM], measured["slo_s"]),
            "crashes": found.tally.total("crashes"),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="minutes of the calm phase and the attacks together; default 10"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests and attacks; default 1")
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="run only this attack; repeatable")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only or list(ATTACKS)
    seconds = 60 * options.minutes
    well_behaved = WellBehavedTenant()
    with attacked_node(Tally(), *(part for flag, nbytes in BOUNDS.items() for part in (flag, str(nbytes)))) as found:
        found.keep_port()
        found.on_empty.append(lambda: well_behaved.deploy(found.node.client))
        found.start()
        found.node.wait_quiet()
        base = process_bytes(found.node.own_pids())
        peak_memory = PeakMemory(found.node)
        attackers = AttackerProcess(found, options.seed, well_behaved.names)
        # Restarts of the node take part of the time, and the tenant's figures include them.
        planned_s = WARM_S + SLACK * seconds
        plan = Plan(
            well_behaved.targets,
            well_behaved.payloads,
            well_behaved.arrivals(planned_s, RATE, options.seed),
            PATIENCE_S,
        )
        try:
            with Sender(found.port, plan, found.root) as sender:
                began = sender.began()
                phases = run_phases(found, names, seconds, peak_memory, attackers, well_behaved.names)
                sender.stop()
                outcomes = sender.outcomes()
        finally:
            attackers.stop()
            peak_memory.stop()
        report(
            found,
            began,
            phases,
            outcomes,
            {"slo_s": well_behaved.slo_s, "bound": sum(BOUNDS.values()) + base, "base": base},
        )


if __name__ == "__main__":
    main()
