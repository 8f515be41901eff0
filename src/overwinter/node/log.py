"""The interface by which parts of the node write log lines."""

from typing import Literal, Protocol

from overwinter.core.ids import FunctionId

Level = Literal["info", "warning", "error"]


class Log(Protocol):
    """Writes one line."""

    def __call__(self, text: str, /, *, level: Level = "warning", function: FunctionId | None = None) -> None:
        """Write one line. `function`: the function that it is about."""
        ...
