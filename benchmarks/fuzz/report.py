"""Reports the results of the fuzz: effects on the well-behaved tenant, the table by kind, examples, and RESULT."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.fuzz.kind import Attacker, Try
from benchmarks.hostile.neighbour import Record
from benchmarks.hostile.verdicts import FAILURE_KINDS, is_failed_outcome
from benchmarks.measure import print_result

KILLS = "calls"
"""The kind that also kills the neighbour's workers."""
SIGKILL = "(SIGKILL)"
NOTES_SHOWN = 40
SLOWEST_SHOWN = 8


def longest(records: Sequence[Record], past_tries: Sequence[Try], what: str) -> dict[str, tuple[float, str]]:
    """Return the longest time by kind, and the case in progress; requests sent between two tries, as while the node
    restarts, are excluded.
    """
    worst: dict[str, tuple[float, str]] = {}
    for each in records:
        if each.what != what or each.outcome == "asked":
            continue
        # The answer to a late request of one try may come during the next.
        attempt = next((attempt for attempt in past_tries if attempt.began <= each.at <= attempt.ended), None)
        if attempt is not None and each.took > worst.get(attempt.kind, (0.0, ""))[0]:
            worst[attempt.kind] = (each.took, f"{attempt.case} ({attempt.number})")
    return worst


def count_records(records: Sequence[Record], attacker: Attacker) -> None:
    """Count the wrong, missing and failed answers to the neighbour."""
    tally = attacker.attacked.tally
    downs = attacker.attacked.restarts
    for each in records:
        attempt = next((attempt for attempt in attacker.past_tries if attempt.began <= each.at <= attempt.ended), None)
        down = any(began - 2.0 <= each.at <= ended + 2.0 for began, ended in downs)
        if attempt is None or down or each.what == "control":
            continue
        tally.here = (attempt.kind, attempt.case, attempt.number)
        if each.outcome == "wrong":
            tally.add("wrong", f"the neighbour's answer: {each.said}")
        elif each.outcome == "silent":
            tally.add("hung", "the neighbour was never answered")
        elif each.outcome not in ("right", "asked", "down", "unanswered"):
            tally.note(f"the neighbour got {each.outcome}: {each.said[:80]}")
            # A request is tried twice; if every worker is killed, its failure is expected.
            killed = attempt.kind == KILLS and SIGKILL in each.said
            if is_failed_outcome(each.outcome) and not killed:
                tally.add("unforeseen_5xx", f"the neighbour got {each.outcome}: {each.said}")


def report(attacker: Attacker, records: Sequence[Record], seed: int) -> None:
    """Print the table by kind, the first examples of each failure, and the RESULT line."""
    tally = attacker.attacked.tally
    stalls = {what: longest(records, attacker.past_tries, what) for what in ("live", "infer", "control")}
    names = [failure.replace("unforeseen_", "").replace("outside_", "out-") for failure in FAILURE_KINDS]
    heads = "".join(f"{name:>11}" for name in names)
    titles = f"{'stall ms':>10}{'infer ms':>10}{'control':>9}  cases of the longest stall and infer"
    print(f"\n{'kind':12}{'tries':>7}{heads}{titles}")
    for kind in tally.tries:
        counts = "".join(f"{tally.counts[kind][failure]:11}" for failure in FAILURE_KINDS)
        times = [1e3 * stalls[what].get(kind, (0.0, ""))[0] for what in stalls]
        print(f"{kind:12}{tally.tries[kind]:7}{counts}{times[0]:10.0f}{times[1]:10.0f}{times[2]:9.0f}", end="")
        print("  " + ", ".join(stalls[what].get(kind, (0.0, "-"))[1] for what in ("live", "infer")))
    for example in sorted(tally.examples, key=lambda each: (each.failure, each.kind, each.case)):
        print(f"{example.failure}: {example.case}: {example.text}")
        print(f"    to repeat it: --seed {seed} --only {example.kind} --first {example.number} --tries 1")
    for attempt in sorted(attacker.past_tries, key=lambda attempt: attempt.began - attempt.ended)[:SLOWEST_SHOWN]:
        print(f"{attempt.ended - attempt.began:.1f} s for {attempt.kind}: {attempt.case} ({attempt.number})")
    for note, times_ in tally.notes.most_common(NOTES_SHOWN):
        print(f"noted {times_} times: {note}")
    asked = Counter({each.what: int(each.said) for each in records if each.outcome == "asked"})
    print(f"the neighbour called its function {asked['infer']} times, and asked {asked['live']} times for liveness")
    worst = {what: max([0.0, *(took for took, _ in found.values())]) for what, found in stalls.items()}
    print_result(
        {
            "tries": sum(tally.tries.values()),
            **{failure: tally.total(failure) for failure in FAILURE_KINDS},
            "stall_max_ms": 1e3 * worst["live"],
            "infer_max_ms": 1e3 * worst["infer"],
            "control_max_ms": 1e3 * worst["control"],
        }
    )
