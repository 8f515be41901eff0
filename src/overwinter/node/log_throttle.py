"""Limits repeated log lines: one line per subject in a period, with the number of repetitions."""

from collections.abc import Callable, Hashable
from math import inf

from overwinter.node import clock

EVERY_S = 60.0
"""The shortest time between two lines on the same subject."""
FORGOTTEN_S = 600.0
"""A subject without a line for this long is forgotten."""


class LogThrottle:
    """Logs each subject at most once in a period. Used on the event loop's thread only."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._logged: dict[Hashable, tuple[float, int]] = {}
        """For each subject, the time of its last line and the number of suppressed lines."""

    def log(self, subject: Hashable, line: str | Callable[[], str]) -> None:
        """Log the line, unless there was one on the same subject recently; a callable is then not called."""
        now = clock.now()
        last, suppressed = self._logged.get(subject, (-inf, 0))
        if now - last < EVERY_S:
            self._logged[subject] = last, suppressed + 1
            return
        self._logged = {each: messages for each, messages in self._logged.items() if now - messages[0] < FORGOTTEN_S}
        self._logged[subject] = now, 0
        line = line if isinstance(line, str) else line()
        self._log(f"{line} (and {suppressed} similar lines before)" if suppressed else line)
