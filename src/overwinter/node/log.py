"""How does a part of the node say what people should read?"""

from typing import Literal, Protocol

from overwinter.core.ids import FunctionId

Level = Literal["info", "warning", "error"]


class Log(Protocol):
    """Takes one line."""

    def __call__(self, text: str, /, *, level: Level = "warning", function: FunctionId | None = None) -> None:
        """`function`: which one it is about, if it is about one."""
        ...
