"""Recognizes errors that are caused by a lack of memory."""

import errno

ALLOCATOR_MESSAGES = ("can't allocate memory", "not enough memory")
"""What PyTorch's allocators write in a RuntimeError."""


def lacks_memory(error: BaseException) -> bool:
    """Whether the error, or one that caused it, says that the system or a limit refused memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        if isinstance(cause, RuntimeError) and any(words in str(cause) for words in ALLOCATOR_MESSAGES):
            return True
        cause = cause.__cause__
    return False
