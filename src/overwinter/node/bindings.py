"""Tracks the functions that each worker or executor was given, and the blocks that it received for them."""

import os
from collections import Counter
from collections.abc import Callable, Sequence

from overwinter.core.ids import Address, StoreName
from overwinter.node.functions import DeployedFunction
from overwinter.worker.messages import Bind, Failure

BindCallback = Callable[[Failure | None], None]
"""Receives the result of a bind: None when the function is bound, otherwise the failure."""
StoredBlock = tuple[StoreName, Address]
"""A block in a host store. An executor has functions of several, each with a file of its own."""


class Bindings:
    """The functions and blocks of one worker or executor.

    A function's blocks are held from the bind to the unbind, even if the bind fails; the process does the same.
    """

    def __init__(self) -> None:
        self._functions: dict[str, DeployedFunction] = {}
        self._blocks: dict[str, tuple[StoredBlock, ...]] = {}
        self._users: Counter[StoredBlock] = Counter()
        self._dropped: set[StoredBlock] = set()
        """Its blocks whose files were dropped from a host store: they are handed over again for further functions."""
        self._files: dict[StoredBlock, int] = {}
        """The inode of the file that it received last for each of its blocks."""
        self._inodes: dict[str, frozenset[int]] = {}
        """The inodes of the files that each function uses: those of its blocks when it was handed over."""
        self._weights: dict[str, int] = {}
        """The number of weights of each function."""
        self.weight_count = 0
        """The number of weights of all functions together, shared ones as often as functions have them."""
        self.has_unbound = False
        """Whether it was instructed to unbind a function."""
        self._pending: dict[str, BindCallback] = {}
        """The callbacks of the binds that the worker has not answered yet."""

    def functions(self) -> list[DeployedFunction]:
        """Return the functions that the worker was instructed to bind and not yet to unbind, including removed ones."""
        return list(self._functions.values())

    def lacking(self, bind: Bind, store: StoreName) -> list[int]:
        """The indices of the function's blocks that the worker does not have from this host store, or has from files
        that were dropped since. A dropped file is neither counted nor verified, and the function would use it until its
        unbind.
        """
        stored = enumerate(_stored(bind, store))
        return [at for at, block in stored if block not in self._users or block in self._dropped]

    def mark_dropped(self, blocks: frozenset[StoredBlock]) -> None:
        """Record that the files of these blocks were dropped from their host store."""
        self._dropped |= self._users.keys() & blocks

    @property
    def block_count(self) -> int:
        """The number of blocks that the worker has."""
        return len(self._users)

    def has(self, function: str) -> bool:
        """Whether the worker was instructed to bind the function, and not yet to unbind it."""
        return function in self._blocks

    @property
    def inodes(self) -> set[int]:
        """The inodes of the files that the worker received as its blocks, as far as they were recorded."""
        # With the former file of a block, a worker keeps the one that it received last for the next function.
        return set(self._files.values()).union(*self._inodes.values())

    def add(self, function: DeployedFunction, bind: Bind, fds: Sequence[int] = ()) -> None:
        """Record that a function was handed to an executor, which answers only if the function cannot run there.
        Raises ValueError if it was handed over already. `fds`: see `begin`.
        """
        if bind.function in self._blocks:
            raise ValueError(f"{bind.function} is bound already")
        blocks = _stored(bind, function.store)
        for number, fd in zip(self.lacking(bind, function.store), fds, strict=False):
            self._files[blocks[number]] = os.fstat(fd).st_ino
        # A function that was bound before continues to use the former file of a block.
        self._inodes[bind.function] = frozenset(self._files[block] for block in blocks if block in self._files)
        self._functions[bind.function] = function
        self._blocks[bind.function] = blocks
        self._weights[bind.function] = len(bind.pieces)
        self.weight_count += len(bind.pieces)
        self._users.update(blocks)
        self._dropped.difference_update(blocks)

    def begin(self, function: DeployedFunction, bind: Bind, report: BindCallback, fds: Sequence[int] = ()) -> None:
        """Record that the worker was instructed to bind a function; raise ValueError if it was already. `fds`:
        descriptors; the first are those of the blocks that it lacks, and the files of these are recorded.
        """
        self.add(function, bind, fds)
        self._pending[bind.function] = report

    def begin_first(self, function: DeployedFunction, bind: Bind, fds: Sequence[int] = ()) -> None:
        """Record the function for which the worker is forked. Its readiness confirms the bind."""
        self.begin(function, bind, lambda failure: None, fds)

    @property
    def pending_binds(self) -> frozenset[str]:
        """The functions whose bind the worker has not answered yet."""
        return frozenset(self._pending)

    def answered(self, function: str) -> BindCallback:
        """Return the callback of an answered bind; raise ValueError if no bind was requested."""
        report = self._pending.pop(function, None)
        if report is None:
            raise ValueError(f"it was not asked to bind {function:.100}")
        return report

    def end(self, function: str) -> None:
        """Record the instruction to unbind a function; raise ValueError if it is not bound or its bind is pending."""
        if function not in self._blocks or function in self._pending:
            raise ValueError(f"{function} is not bound")
        self.has_unbound = True
        del self._functions[function], self._inodes[function]
        self.weight_count -= self._weights.pop(function)
        for block in self._blocks.pop(function):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._dropped.discard(block)
                self._files.pop(block, None)


def _stored(bind: Bind, store: StoreName) -> tuple[StoredBlock, ...]:
    return tuple((store, address) for address, _ in bind.blocks)
