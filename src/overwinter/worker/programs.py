"""Which programs does a tenant's zygote hold ready? Compiled, and run once on zeros for the primitives.

A handler is never among them: its author's code runs in bodies alone.
"""

import gc
import sys
from collections.abc import Iterator, Mapping

from overwinter.core.errors import OverwinterError
from overwinter.core.ids import Address
from overwinter.worker.body import give_back_heap
from overwinter.worker.channel import close_all
from overwinter.worker.messages import Load
from overwinter.worker.runner import Prepared, load
from overwinter.worker.weights import MappedBlock, read_all


class Programs(Mapping[Address, Prepared]):
    """What is ready, by the program's address."""

    def __init__(self) -> None:
        self._ready: dict[Address, Prepared] = {}

    def __getitem__(self, program: Address) -> Prepared:
        return self._ready[program]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._ready)

    def __len__(self) -> int:
        return len(self._ready)

    def prepare(self, wanted: Load, fds: list[int]) -> None:
        """Make the program of `wanted` ready; what fails is said, and is compiled by each body for itself."""
        blocks: list[MappedBlock] = []
        try:
            ready = Prepared(read_all(fds[0], wanted.program_bytes))
            runner, blocks = load(wanted, fds, {wanted.program: ready})
            runner.rehearse()
            del runner
            self._ready[wanted.program] = ready
        except OverwinterError as error:
            _say(f"{wanted.function} is not prepared: {error}")
        except Exception as error:  # noqa: BLE001 - the border to a program: it has run before, on other sizes
            _say(f"{wanted.function} was not rehearsed: {type(error).__name__}: {error}")
        finally:
            close_all(fds)
        gc.collect()
        for block in blocks:
            block.close()
        # What the forks share must not be written to by their collectors.
        gc.freeze()
        give_back_heap()

    def forget(self, program: Address) -> None:
        """Let go of a program."""
        self._ready.pop(program, None)


def _say(text: str) -> None:
    sys.stderr.write(f"overwinter zygote: {text}\n")
