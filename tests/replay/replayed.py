"""As a program: feed each journal named to a fresh scheduler, which must do the same; how many steps it has."""

import sys
from pathlib import Path

from overwinter.core.journal import Entry, read_journal
from overwinter.scheduler.scheduler import Scheduler


def replayed(journal: Path) -> list[Entry]:
    """The steps of a journal, once a fresh scheduler has taken them all."""
    with journal.open("rb") as file:
        config, entries = read_journal(file)
        scheduler, steps = Scheduler(config), list(entries)
    for step in steps:
        assert tuple(scheduler.handle(step.event, step.now)) == step.actions
    return steps


if __name__ == "__main__":
    sys.stdout.write(" ".join(str(len(replayed(Path(name)))) for name in sys.argv[1:]))
