"""Errors say whose fault it is and which HTTP status tells so.

OverwinterError
  CallerError           the caller's: 400
    UnauthorizedError   401: no token, or none that is valid
    ForbiddenError      403
    NotFoundError       404
    ConflictError       409
    TooLargeError       413
    MediaError          415
    RateError           429 with Retry-After
  AuthorError           the function author's: 400 on deploy
    ProgramError        what cannot be exported, validated or run
    HandlerError        raised by preprocess or postprocess, or an answer that is not what was declared: 500
  MachineError          this machine's, or its load's
    OverloadedError     503 with Retry-After
      QuarantineError   503: the scheduler failed on the function
    DeadlineError       504
    NoSpaceError        507
    StoreError          500: a damaged block, a disk that fails
    WorkerError         500: a worker died or answered nonsense
"""

from typing import ClassVar


class OverwinterError(Exception):
    """Root of all errors raised on purpose; `str()` names the thing and the way out."""

    status: ClassVar[int] = 500

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CallerError(OverwinterError):
    """The request is wrong."""

    status = 400


class UnauthorizedError(CallerError):
    """The request has no token, or none that is valid."""

    status = 401


class ForbiddenError(CallerError):
    """The thing belongs to another tenant, or the token does not allow this."""

    status = 403


class NotFoundError(CallerError):
    """No such function, version or block."""

    status = 404


class ConflictError(CallerError):
    """The request does not fit the state of the thing it names."""

    status = 409


class TooLargeError(CallerError):
    """The request is larger than the node accepts."""

    status = 413


class MediaError(CallerError):
    """The body comes in a form that the node does not read."""

    status = 415


class RateError(CallerError):
    """The tenant sends more requests than its quota: try again after `retry_after_s`."""

    status = 429


class AuthorError(OverwinterError):
    """What was deployed is wrong."""

    status = 400


class ProgramError(AuthorError):
    """A model that cannot be exported, or a program that is not valid."""


class HandlerError(AuthorError):
    """The function's own code failed, or gave what it does not declare."""

    status = 500


class MachineError(OverwinterError):
    """The machine or its load is in the way."""


class OverloadedError(MachineError):
    """Full for now: try again after `retry_after_s`."""

    status = 503


class QuarantineError(OverloadedError):
    """The scheduler failed on the function, which is out of service until it is loaded or deployed anew."""


class DeadlineError(MachineError):
    """The deadline passed before an answer."""

    status = 504


class NoSpaceError(MachineError):
    """A disk, a tmpfs or a budget is full."""

    status = 507


class StoreError(MachineError):
    """A stored block is damaged or cannot be read."""


class WorkerError(MachineError):
    """A worker process died, or could not start."""


def error_named(name: str) -> type[OverwinterError]:
    """The class of this tree with that name; WorkerError for a name that is none of ours."""
    tree: list[type[OverwinterError]] = [OverwinterError]
    for kind in tree:
        if kind.__name__ == name:
            return kind
        tree.extend(kind.__subclasses__())
    return WorkerError
