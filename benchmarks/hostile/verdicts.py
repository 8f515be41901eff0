"""The kinds of failures of an attacked node, how they are recognised, and a count of them with examples."""

from collections import Counter, defaultdict
from typing import Literal, NamedTuple, get_args

from benchmarks.hostile.exchange import Reply

FailureKind = Literal["crashes", "unforeseen_5xx", "wrong", "outside_reads", "outside_writes", "hung"]
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)

EXAMPLES_MAX = 3
"""The most examples of each failure by each case."""
INTERNAL_ERROR = "internal error ("
"""The beginning of the node's answer to an unforeseen error."""
FATAL = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
"""Signals that a process causes itself; others are sent to it, including those of limits."""


class Example(NamedTuple):
    """One failure, and how to repeat it."""

    kind: str
    case: str
    number: int
    failure: FailureKind
    text: str


class Tally:
    """The tries and failures by kind of attack, with examples."""

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.examples: list[Example] = []
        self.notes: Counter[str] = Counter()
        """The events that are no failures but worth knowing, with their number."""
        self.here = ("", "", 0)
        self._kept: Counter[tuple[str, str, FailureKind]] = Counter()

    def begin(self, kind: str, case: str, number: int) -> None:
        """Begin the next try; failures count for it from now on."""
        self.here = (kind, case, number)
        self.tries[kind] += 1

    def add(self, failure: FailureKind, message: str) -> None:
        """Count a failure of the current try."""
        kind, case, number = self.here
        self.counts[kind][failure] += 1
        key = (kind, case, failure)
        self._kept[key] += 1
        if self._kept[key] <= EXAMPLES_MAX:
            self.examples.append(Example(kind, case, number, failure, " ".join(message.split())[:300]))

    def note(self, message: str) -> None:
        """Count a harmless event of the current try."""
        kind, case, _ = self.here
        self.notes[f"{kind}/{case}: {message}"] += 1

    def total(self, failure: FailureKind) -> int:
        """Return the number of these failures over all kinds of attack."""
        return sum(counts[failure] for counts in self.counts.values())

    def judge(self, reply: Reply | None) -> None:
        """Count an unforeseen 5xx; a missing answer is no failure by itself."""
        fault = unforeseen(reply)
        if fault:
            self.add("unforeseen_5xx", fault)


def unforeseen(reply: Reply | None) -> str:
    """Return the text of a 5xx that is neither a function's failure nor a refusal; otherwise empty."""
    if reply is None or reply.status < 500 or reply.status in (503, 504, 507):
        return ""
    if reply.status != 500:
        return f"status {reply.status}: {reply.said}"
    # A function's failure is JSON with its own words; a server's error page is not.
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    return "" if is_json and not reply.said.startswith(INTERNAL_ERROR) else f"500: {reply.said}"


def is_failed_outcome(outcome: str) -> bool:
    """Whether a well-behaved client got a 5xx that is no refusal, although its function itself never fails."""
    return outcome.startswith("5") and outcome not in ("503", "504", "507")


def fatal_signal(reason: str) -> str:
    """Return the name of the signal that a process caused itself, from the node's message; otherwise empty."""
    return next((name for name in FATAL.values() if f"({name})" in reason), "")
