"""The node's log for tests: a list of its lines."""


class LogLines(list[str]):
    """The logged lines; `functions`: the function of each line."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str | None] = []

    def __call__(self, text: str, /, *, level: str = "warning", function: str | None = None) -> None:
        self.append(text)
        self.functions.append(function)
