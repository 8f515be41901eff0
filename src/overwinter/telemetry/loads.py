"""Follows the loads of blocks: those in progress, and those from disk for which no worker has started yet."""

from collections.abc import Iterable
from typing import NamedTuple

from overwinter.core.events import BlocksLoaded, LoadFailed
from overwinter.core.ids import FunctionId, OperationId, Seconds


class LoadTimes(NamedTuple):
    """When a load began, and when it ended."""

    began: Seconds
    ended: Seconds


class Loads:
    """The loads of the functions' blocks."""

    def __init__(self) -> None:
        self._in_progress: dict[FunctionId, tuple[OperationId, Seconds]] = {}
        """The operation of each load in progress, and its start."""
        self._from_disk: dict[FunctionId, LoadTimes] = {}
        """The functions whose blocks came from disk and that have started no worker since."""

    def begin(self, function: FunctionId, operation: OperationId, now: Seconds) -> None:
        """A load begins."""
        self._in_progress[function] = operation, now

    def is_answered_by(self, event: BlocksLoaded | LoadFailed) -> bool:
        """Whether the event answers the current load rather than an abandoned one."""
        operation, _ = self._in_progress.get(event.function, (None, None))
        return operation == event.operation

    def end(self, function: FunctionId, from_disk: bool, now: Seconds) -> None:
        """The load in progress has succeeded."""
        _, began = self._in_progress.pop(function)
        if from_disk:
            self._from_disk[function] = LoadTimes(began, now)

    def take_from_disk(self, function: FunctionId, arrivals: Iterable[Seconds], now: Seconds) -> Seconds | None:
        """A worker starts for the function. Return when the load from disk began that belongs to this wake: one that
        ends now, or for which one of the open requests, which came at `arrivals`, waited; otherwise None.
        """
        load = self._from_disk.pop(function, None)
        if load is None or not (load.ended == now or any(each <= load.ended for each in arrivals)):
            return None
        return load.began

    def forget(self, function: FunctionId) -> None:
        """The blocks are no longer held, or their load was abandoned."""
        self._in_progress.pop(function, None)
        self._from_disk.pop(function, None)
