"""Which functions was a worker told to bind, and which blocks does it have for them?"""

from collections import Counter
from collections.abc import Callable

from overwinter.core.ids import Address
from overwinter.node.functions import DeployedFunction
from overwinter.worker.messages import Bind, Failure

Told = Callable[[Failure | None], None]
"""Hears of a bind: None when the function is bound, else why it is not."""


class Bindings:
    """What one worker has.

    A function's blocks count from the bind to the unbind, whether it can be bound or not: the worker sees it so too.
    """

    def __init__(self) -> None:
        self._functions: dict[str, DeployedFunction] = {}
        self._blocks: dict[str, tuple[Address, ...]] = {}
        self._users: Counter[Address] = Counter()
        self._asked: dict[str, Told] = {}

    def functions(self) -> list[DeployedFunction]:
        """Those that it was told to bind, and not to unbind, also if they were removed meanwhile."""
        return list(self._functions.values())

    def lacking(self, bind: Bind) -> list[int]:
        """Which of the function's blocks it has to be handed, by their places."""
        return [number for number, (address, _) in enumerate(bind.blocks) if address not in self._users]

    def begin(self, function: DeployedFunction, bind: Bind, told: Told) -> None:
        """It is told to bind a function; ValueError when it was before."""
        if bind.function in self._blocks:
            raise ValueError(f"{bind.function} is bound already")
        self._functions[bind.function] = function
        self._blocks[bind.function] = tuple(address for address, _ in bind.blocks)
        self._users.update(self._blocks[bind.function])
        self._asked[bind.function] = told

    def begin_first(self, function: DeployedFunction, bind: Bind) -> None:
        """It is told to bind the function that it is forked for. That it has is told by the worker's being ready."""
        self.begin(function, bind, lambda failure: None)

    def answered(self, function: str) -> Told:
        """It has answered the bind: who is to hear of it. ValueError unless it was asked."""
        told = self._asked.pop(function, None)
        if told is None:
            raise ValueError(f"it was not asked to bind {function:.100}")
        return told

    def end(self, function: str) -> None:
        """It is told to unbind a function; ValueError unless it has answered the bind."""
        if function not in self._blocks or function in self._asked:
            raise ValueError(f"{function} is not bound")
        del self._functions[function]
        for address in self._blocks.pop(function):
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
