"""Which handler answers this method and path?

A tree of path parts instead of a framework: a request for a model finds its handler with five dictionary
look-ups, and nothing else stands between the socket and the codec.
"""

from collections.abc import Awaitable, Callable, Iterable

from overwinter.api.exchange import Request, Response
from overwinter.api.messages import MethodError
from overwinter.core.errors import NotFoundError

Handler = Callable[[Request], Awaitable[Response]]
Route = tuple[str, str, Handler]
"""A method, a path in which `*` stands for any one part, and who answers."""


class _Branch:
    """One part of a path: what may follow, and who answers when nothing does."""

    __slots__ = ("branches", "handlers")

    def __init__(self) -> None:
        self.branches: dict[str, _Branch] = {}
        self.handlers: dict[str, Handler] = {}


class Routes:
    """The table of all routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._root = _Branch()
        for method, path, handler in routes:
            branch = self._root
            for part in path.split("/"):
                branch = branch.branches.setdefault(part, _Branch())
            branch.handlers[method] = handler

    def find(self, method: str, path: str) -> tuple[Handler, list[str]]:
        """The handler and the parts that stood for `*`; NotFoundError or MethodError."""
        branch = self._root
        values: list[str] = []
        for part in path.split("/"):
            following = branch.branches.get(part)
            if following is None and part:
                following = branch.branches.get("*")
                values.append(part)
            if following is None:
                raise NotFoundError(f"there is nothing at {path!r}; GET /v2 says what this node is")
            branch = following
        handler = branch.handlers.get("GET" if method == "HEAD" else method)
        if handler is not None:
            return handler, values
        if not branch.handlers:
            raise NotFoundError(f"there is nothing at {path!r}; GET /v2 says what this node is")
        raise MethodError(f"{path!r} does not take {method}; it takes {', '.join(sorted(branch.handlers))}")
