"""Formats the errors of a command for its user.

Errors that are raised on purpose, and errors of the operating system, are printed as one line. Anything else is a
programming error, and needs its traceback.
"""

from collections.abc import Iterator

from overwinter.core.errors import OverwinterError

EXPECTED_ERRORS = (OverwinterError, OSError)


def expected_errors(error: Exception) -> list[Exception]:
    """Return the errors of a group, or the one error; none if any of them is unexpected."""
    errors = list(_leaves(error))
    return errors if all(isinstance(each, EXPECTED_ERRORS) for each in errors) else []


def error_text(error: Exception) -> str:
    """Return the text of an error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return (error.text_for_administrator() if isinstance(error, OverwinterError) else str(error)) or type(
        error
    ).__name__


def _leaves(error: Exception) -> Iterator[Exception]:
    if not isinstance(error, ExceptionGroup):
        yield error
        return
    for each in error.exceptions:
        yield from _leaves(each)
