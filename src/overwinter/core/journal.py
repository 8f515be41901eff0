"""The recorded steps of a scheduler: `(now, event, actions)`, in a bounded ring and, optionally, in a file.

A journal file has one JSON value per line: first the scheduler's configuration, then one Entry per step. A new
scheduler of that configuration must return the same actions for these events.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, TypeVar

import msgspec

from overwinter.core.actions import Action
from overwinter.core.config import SchedulerConfig
from overwinter.core.errors import CallerError
from overwinter.core.events import Event
from overwinter.core.ids import Seconds

Read = TypeVar("Read")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One step of a scheduler."""

    now: Seconds
    event: Event
    actions: tuple[Action, ...]


class Journal:
    """Keeps the last `ring` steps, and appends every step to `file`, if there is one. The caller closes the file."""

    def __init__(
        self,
        config: SchedulerConfig,
        ring: int,
        file: IO[bytes] | None = None,
        lost: Callable[[OSError], None] | None = None,
    ) -> None:
        """Create a journal. `lost` is called once if the file cannot be written any more; the ring continues."""
        self.recent: deque[Entry] = deque(maxlen=ring)
        self._file = file
        self._end = 0
        """The bytes of the complete lines in the file."""
        self._lost = lost
        self._encoder = msgspec.json.Encoder()
        if file is not None:
            self._write(self._encoder.encode(config))

    def record(self, now: Seconds, event: Event, actions: list[Action]) -> None:
        """Add one step."""
        entry = Entry(now, event, tuple(actions))
        self.recent.append(entry)
        if self._file is not None:
            self._write(self._encoder.encode(entry))

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        try:
            left = memoryview(line + b"\n")
            while left:
                # If little space is left, a part of the line is written, without an error.
                left = left[self._file.write(left) :]
            self._end += len(line) + 1
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            self._file = None
            if self._lost is not None:
                self._lost(error)


def read_journal(file: IO[bytes]) -> tuple[SchedulerConfig, Iterator[Entry]]:
    """Return the configuration of a journal file, and its steps, which are read when they are iterated. Both reads
    raise CallerError if a line is not that of a journal of this version.
    """
    [config] = _decoded([file.readline()], SchedulerConfig)
    return config, _decoded(file, Entry)


def _decoded(lines: Iterable[bytes], kind: type[Read]) -> Iterator[Read]:
    decoder = msgspec.json.Decoder(kind)
    try:
        for line in lines:
            yield decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError) as error:
        remedy = "read it with the version that wrote it"
        raise CallerError(f"this is not a journal of this version of Overwinter: {error}; {remedy}") from error
