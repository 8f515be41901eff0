"""Tracks the functions that each worker was told to bind, and the blocks that it received for them."""

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
        """The functions that the worker was told to bind, and not to unbind, including removed ones."""
        return list(self._functions.values())

    def lacking(self, bind: Bind) -> list[int]:
        """The indices of the function's blocks that the worker does not have."""
        return [number for number, (address, _) in enumerate(bind.blocks) if address not in self._users]

    def begin(self, function: DeployedFunction, bind: Bind, told: Told) -> None:
        """The worker is told to bind a function; ValueError if it was before."""
        if bind.function in self._blocks:
            raise ValueError(f"{bind.function} is bound already")
        self._functions[bind.function] = function
        self._blocks[bind.function] = tuple(address for address, _ in bind.blocks)
        self._users.update(self._blocks[bind.function])
        self._asked[bind.function] = told

    def begin_first(self, function: DeployedFunction, bind: Bind) -> None:
        """The worker is told to bind the function for which it is forked. Its readiness confirms the bind."""
        self.begin(function, bind, lambda failure: None)

    def answered(self, function: str) -> Told:
        """The worker has answered the bind: the listener. ValueError if no bind was requested."""
        told = self._asked.pop(function, None)
        if told is None:
            raise ValueError(f"it was not asked to bind {function:.100}")
        return told

    def end(self, function: str) -> None:
        """The worker is told to unbind a function; ValueError unless it has answered the bind."""
        if function not in self._blocks or function in self._asked:
            raise ValueError(f"{function} is not bound")
        del self._functions[function]
        for address in self._blocks.pop(function):
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
