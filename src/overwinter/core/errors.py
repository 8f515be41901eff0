"""The errors of Overwinter, grouped by who is at fault, with their HTTP status.

OverwinterError
  CallerError           the caller's: 400
    UnauthorizedError   401: no valid token
    ForbiddenError      403
    NotFoundError       404
    ConflictError       409
    TooLargeError       413
      ActivationsError  413: what a run computes does not fit on its device
    MediaError          415
    RateError           429 with Retry-After
  AuthorError           the function author's: 400, also for a request
    ProgramError        a model or program that cannot be exported, validated or run
    HandlerError        the handler failed, or an answer is too large or not as declared: 500 (400 on deploy)
  MachineError          this machine's, or its load's
    OverloadedError     503 with Retry-After
      QuarantineError   503: the function is out of service
    DeadlineError       504
    NoSpaceError        507
    StoreError          500: stored data is damaged or missing, or a disk fails
    WorkerError         500: a worker or a device failed, or the node could not complete the operation
"""

from collections.abc import Sequence
from typing import ClassVar

MESSAGE_MAX = 4000
"""The most characters of an error's message between two processes. A handler may put what a caller sent into its
errors.
"""


class OverwinterError(Exception):
    """Root of the errors with an HTTP status; `str()` says what failed, and a remedy if there is one."""

    status: ClassVar[int] = 500

    def __init__(self, message: str, retry_after_s: float | None = None, totals: str = "") -> None:
        """`totals`: what the node has and uses in total. Only the administrator of the node sees them."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.totals = totals

    def text_for_administrator(self) -> str:
        """The message with the totals."""
        return f"{self} ({self.totals})" if self.totals else str(self)


class CallerError(OverwinterError):
    """The request is wrong."""

    status = 400


class UnauthorizedError(CallerError):
    """The request has no valid token."""

    status = 401


class ForbiddenError(CallerError):
    """The token does not allow this, the object belongs to another tenant, or a web page of another site may have sent
    the request.
    """

    status = 403


class NotFoundError(CallerError):
    """The request names something that does not exist: a function, a version, a pipeline, a profile or a token."""

    status = 404


def no_function(named: str, versions: Sequence[int] = ()) -> NotFoundError:
    """Return the error for a function that is not deployed. `versions`: the deployed ones of this name."""
    remedy = f"; its versions: {list(versions)}" if versions else ": `overwinter ps` lists the functions"
    return NotFoundError(f"no function {named!r} here{remedy}")


class ConflictError(CallerError):
    """The request conflicts with the state of the object that it names."""

    status = 409


class TooLargeError(CallerError):
    """The request or its answer is larger than the node, or a device, allows."""

    status = 413


class ActivationsError(TooLargeError):
    """A run needs more memory for what it computes than its device has."""


class MediaError(CallerError):
    """The body has a format that the node does not read."""

    status = 415


class RateError(CallerError):
    """The tenant exceeds its quota of requests: try again after the time in `Retry-After`."""

    status = 429


class AuthorError(OverwinterError):
    """The deployed function is wrong."""

    status = 400


class ProgramError(AuthorError):
    """The model cannot be exported, or the program is not valid or cannot run."""


class HandlerError(AuthorError):
    """The function's own code failed, or the function's answer is too large or not as declared."""

    status = 500


class MachineError(OverwinterError):
    """The machine or its load prevents the request."""


class OverloadedError(MachineError):
    """The node does not serve the request now: a limit is reached, the request would be late, the function is unloaded,
    its worker or executor was stopped because of others, or the node is stopping. `Retry-After` says when to try again.
    """

    status = 503


class QuarantineError(OverloadedError):
    """The function is out of service. If the scheduler failed on it, this lasts until it is loaded or deployed again;
    if its program could not be read, until it is deployed again or the node is restarted.
    """


class DeadlineError(MachineError):
    """The deadline passed before an answer, or the run of the request hung and was stopped."""

    status = 504


class NoSpaceError(MachineError):
    """A disk, a host store, a device, the memory for workers or a quota has no room."""

    status = 507


class StoreError(MachineError):
    """Stored data (a block, the catalog, the file of usage or of tokens) is damaged or missing, or cannot be read or
    written.
    """


class WorkerError(MachineError):
    """A worker or a device failed, or the node could not complete the operation, for example because the node's code
    failed or the node is stopping.
    """


def error_named(name: str) -> type[OverwinterError]:
    """Return the error class of this name; WorkerError for an unknown name."""
    tree: list[type[OverwinterError]] = [OverwinterError]
    for kind in tree:
        if kind.__name__ == name:
            return kind
        tree.extend(kind.__subclasses__())
    return WorkerError
