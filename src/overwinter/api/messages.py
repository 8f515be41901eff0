"""What does ASGI call the parts of an exchange, and which errors has HTTP of its own?"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from overwinter.core.errors import CallerError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]


class MethodError(CallerError):
    """The path exists, but not with this method."""

    status = 405


class MediaError(CallerError):
    """The body comes in a form that nobody here reads."""

    status = 415
