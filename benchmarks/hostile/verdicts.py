"""What did an attack come to? The kinds of harm, what tells them, and a count of them with examples."""

from collections import Counter, defaultdict
from typing import Literal, NamedTuple, get_args

from benchmarks.hostile.exchange import Reply

Harm = Literal["crashes", "unforeseen_5xx", "wrong", "outside_reads", "outside_writes", "hung"]
HARMS: tuple[Harm, ...] = get_args(Harm)

EXAMPLES_MAX = 3
"""Kept of each harm done by each case."""
UNFORESEEN = "internal error ("
"""How the node's answer to an unexpected error begins."""
FATAL = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
"""Signals that a process brings upon itself; others are sent by somebody, limits included."""


class Example(NamedTuple):
    """One harm that was done, and how to do it again."""

    kind: str
    case: str
    number: int
    harm: Harm
    told: str


class Tally:
    """Tries and harms by kind of attack and case."""

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.examples: list[Example] = []
        self.notes: Counter[str] = Counter()
        """What is no harm, but worth knowing, and how often."""
        self.here = ("", "", 0)
        self._kept: Counter[tuple[str, str, Harm]] = Counter()

    def begin(self, kind: str, case: str, number: int) -> None:
        """The next try; what is told from now on is its doing."""
        self.here = (kind, case, number)
        self.tries[kind] += 1

    def add(self, harm: Harm, told: str) -> None:
        """A harm was done by the try under way."""
        kind, case, number = self.here
        self.counts[kind][harm] += 1
        key = (kind, case, harm)
        self._kept[key] += 1
        if self._kept[key] <= EXAMPLES_MAX:
            self.examples.append(Example(kind, case, number, harm, " ".join(told.split())[:300]))

    def note(self, told: str) -> None:
        """Something that is no harm happened in the try under way."""
        kind, case, _ = self.here
        self.notes[f"{kind}/{case}: {told}"] += 1

    def total(self, harm: Harm) -> int:
        """Of all kinds."""
        return sum(counts[harm] for counts in self.counts.values())

    def judge(self, reply: Reply | None) -> None:
        """Whether an answer is unexpected; no answer at all is no harm by itself."""
        fault = unforeseen(reply)
        if fault:
            self.add("unforeseen_5xx", fault)


def unforeseen(reply: Reply | None) -> str:
    """What an answer says if it is a 5xx that is neither a function's own failure nor a refusal; else empty."""
    if reply is None or reply.status < 500 or reply.status in (503, 504, 507):
        return ""
    if reply.status != 500:
        return f"status {reply.status}: {reply.said}"
    # A function's failure is told as JSON in words of its own; a server's own page is none.
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    return "" if is_json and not reply.said.startswith(UNFORESEEN) else f"500: {reply.said}"


def unforeseen_words(fate: str, said: str) -> bool:
    """Whether a well-behaved caller's error is unexpected: any 500, for its function has no failures."""
    return fate.startswith("5") and fate not in ("503", "504", "507")


def fatal_signal(reason: str) -> str:
    """The name of the signal that a process brought upon itself, in what the node says of its end; else empty."""
    return next((name for name in FATAL.values() if f"({name})" in reason), "")
