"""The methods that `Tracker` (tracking.py) calls while it reads the scheduler's steps. Subclasses override those that
they need; by default a method does nothing.
"""

from typing import Generic, TypeVar

from overwinter.core.actions import Decision, Refuse, Reply, Run
from overwinter.core.events import Event, Profiled, RunEnded
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import Seconds
from overwinter.telemetry.in_progress import LiveWorker, OpenRun
from overwinter.telemetry.pool import DeviceRun
from overwinter.telemetry.tally import Tally

T = TypeVar("T", bound=Tally)


class Hooks(Generic[T]):
    """The methods that a tracker calls while it reads (tracking.py)."""

    def _answered(self, tally: T, action: Reply, seconds: float, now: Seconds) -> None:
        """A request was answered, `seconds` after it arrived."""

    def _refused(self, tally: T, action: Refuse, now: Seconds) -> None:
        """A request was refused."""

    def _run_started(self, worker: LiveWorker[T], run: OpenRun[T], action: Run, now: Seconds) -> None:
        """A worker began a run."""

    def _run_completed(self, worker: LiveWorker[T], run: OpenRun[T], event: RunEnded | None, now: Seconds) -> None:
        """A run ended; `event` is None if it ended with its worker."""

    def _run_on_device_completed(self, run: DeviceRun[T], now: Seconds) -> None:
        """A run for requests ended on a device, or with its executor."""

    def _worker_started(self, worker: LiveWorker[T], now: Seconds) -> None:
        """A worker was started."""

    def _worker_ready(self, worker: LiveWorker[T], seconds: float, now: Seconds) -> None:
        """A worker is ready, this long after its wake began."""

    def _worker_ended(self, worker: LiveWorker[T], now: Seconds) -> None:
        """A worker ended."""

    def _version_deployed(self, spec: FunctionSpec, now: Seconds) -> None:
        """A version was deployed."""

    def _version_removed(self, spec: FunctionSpec, now: Seconds) -> None:
        """A version was removed."""

    def _function_removed(self, tally: T) -> None:
        """A function's last version was removed; workers of it may still end later."""

    def _blocks_held(self, spec: FunctionSpec, now: Seconds) -> None:
        """The host store holds all blocks of the version."""

    def _blocks_released(self, spec: FunctionSpec, now: Seconds) -> None:
        """The host store no longer holds the blocks for the version."""

    def _decision_made(self, tally: T, what: Decision, why: str, now: Seconds) -> None:
        """A decision was made for this reason."""

    def _profiled(self, event: Profiled, now: Seconds) -> None:
        """A profile of a function is known or has changed."""

    def _other_event(self, event: Event, now: Seconds) -> None:
        """An event occurred that the tracker does not handle."""
