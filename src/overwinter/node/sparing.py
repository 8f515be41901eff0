"""Limits repeated log lines: one line per cause in a period, with the number of repetitions."""

from collections.abc import Callable, Hashable
from math import inf

from overwinter.node import clock

EVERY_S = 60.0
"""The time between two lines on the same subject."""
FORGOTTEN_S = 600.0
"""A subject without a line for this long is forgotten."""


class Sparing:
    """Logs each cause at most once in a period. Used on the event loop's thread only."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._told: dict[Hashable, tuple[float, int]] = {}
        """For each subject, the time of its last line and the number of suppressed lines."""

    def say(self, about: Hashable, line: str) -> None:
        """Log the line, unless there was one on the same subject recently."""
        now = clock.now()
        last, since = self._told.get(about, (-inf, 0))
        if now - last < EVERY_S:
            self._told[about] = last, since + 1
            return
        self._told = {each: told for each, told in self._told.items() if now - told[0] < FORGOTTEN_S}
        self._told[about] = now, 0
        self._log(f"{line} (and {since} similar lines before)" if since else line)
