"""The node's log for tests: a list of its lines."""

import os
from types import SimpleNamespace

from overwinter.node.contained import ProcessFiles
from overwinter.node.output import Outputs


class LogLines(list[str]):
    """The logged lines; `functions`: the function of each line."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str | None] = []

    def __call__(self, text: str, /, *, level: str = "warning", function: str | None = None) -> None:
        self.append(text)
        self.functions.append(function)


def process_files() -> ProcessFiles:
    """What processes share, for processes that are never forked: their buffers are closed immediately."""
    return ProcessFiles(Outputs(LogLines()), SimpleNamespace(close_file=os.close))
