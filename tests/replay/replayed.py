"""A program that feeds each named journal to a new scheduler, which must return the same actions; prints the number of
steps.
"""

import sys
from pathlib import Path

from overwinter.core.journal import Entry, read_journal
from overwinter.scheduler.scheduler import Scheduler


def replayed(journal: Path) -> list[Entry]:
    """Return the steps of a journal after a new scheduler has returned the same actions for all of them."""
    with journal.open("rb") as file:
        config, entries = read_journal(file)
        scheduler, steps = Scheduler(config), list(entries)
    for step in steps:
        assert tuple(scheduler.handle(step.event, step.now)) == step.actions
    return steps


if __name__ == "__main__":
    sys.stdout.write(" ".join(str(len(replayed(Path(name)))) for name in sys.argv[1:]))
