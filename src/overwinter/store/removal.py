"""Removes the files of dropped blocks.

The kernel frees the memory of a file when it is removed, about 7 GiB a second, so a thread removes the files. Until
then a block is neither resident nor absent: it cannot be opened, and a load of it waits.
"""

import threading
from collections.abc import Iterable
from pathlib import Path


class Removals:
    """The files that are to be removed, of all host stores on one tmpfs. Used by several threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Notified after each file; it guards the state of all host stores, too."""
        self._files: dict[Path, int] = {}
        self._removing = threading.Lock()

    def add(self, path: Path, nbytes: int) -> None:
        """Add a file. The caller holds `changed`."""
        self._files[path] = nbytes

    def __contains__(self, path: Path) -> bool:
        return path in self._files

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each file that is still to be removed."""
        with self.changed:
            return tuple(self._files.values())

    def remove(self, paths: Iterable[Path] | None = None) -> None:
        """Remove these files, or all. A file that cannot be removed counts as removed, because a load replaces it.
        Raises the first such OSError after the other files are removed: loads may wait for them.
        """
        first: OSError | None = None
        for path in self._all() if paths is None else paths:
            # A load may write a file again as soon as it counts as removed, so only one thread removes at a time.
            with self._removing:
                try:
                    self._remove(path)
                except OSError as error:
                    first = first or error
        if first is not None:
            raise first

    def _remove(self, path: Path) -> None:
        if path not in self._files:
            return
        try:
            path.unlink(missing_ok=True)
        finally:
            with self.changed:
                del self._files[path]
                self.changed.notify_all()

    def _all(self) -> list[Path]:
        with self.changed:
            return list(self._files)
