"""What a worker holds of a family: the program and the handler's code, each once, and each bound function.

The order of the node's messages alone determines the blocks of a worker: a bind adds blocks, an unbind removes them,
and a failed bind keeps its blocks until the unbind. So the node always knows them. For this, `take`, `drop` and
`runner` are called in message order. The rest of a bind takes longer, and may be concurrent with runs and other binds.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from overwinter.core.errors import StoreError
from overwinter.core.ids import Address
from overwinter.worker.buffer import SharedBuffer
from overwinter.worker.channel import close_all
from overwinter.worker.handler import Assets, Code, Handler
from overwinter.worker.messages import Bind, Load, Trial
from overwinter.worker.pool_calls import PoolCalls, is_sendable
from overwinter.worker.prepared import Compiled, Prepared
from overwinter.worker.runner import Runner
from overwinter.worker.trial import check_samples, check_size, generated_warning, run_on_zeros
from overwinter.worker.values import read_requests
from overwinter.worker.weights import Blocks, MappedBlock, read_all, read_program, weight_tensors


class Member:
    """A function with its mapped blocks; `runner` is None until its bind succeeds."""

    def __init__(self, blocks: list[MappedBlock | StoreError]) -> None:
        self.blocks = blocks
        self.runner: Runner | None = None


class Family:
    """A program, a handler's code if there is one, and the bound functions."""

    def __init__(
        self,
        load: Load,
        fds: Sequence[int],
        prepared: Mapping[Address, Prepared],
        pool_calls: PoolCalls | None = None,
    ) -> None:
        """Compile the program unless it is prepared, or runs only on the pool. `pool_calls` runs it there. Closes the
        descriptors. Raises ProgramError, HandlerError or StoreError.
        """
        try:
            self._load = load
            self._pool_calls = pool_calls if load.handler_only or load.pool_first else None
            self.prepared = prepared.get(load.program) or self._prepared(
                read_program(fds[0], load.program_bytes, load.program)
            )
            code = None if load.source_bytes is None else read_all(fds[1], load.source_bytes).decode()
            self._code = None if code is None else Code(code)
        finally:
            close_all(fds)
        self._assets = Assets()
        self._blocks = Blocks()
        self._members: dict[str, Member] = {}

    def _prepared(self, content: bytes) -> Prepared:
        return Prepared(content, _not_run_here if self._load.handler_only else None)

    def take(self, bind: Bind, fds: Sequence[int]) -> Callable[[], str]:
        """Take a function's blocks, and return a function that completes the bind.

        The returned function must be called once. It returns notes on the trial for the author, raises an error if
        the bind fails, and closes the remaining descriptors.
        """
        count = len(bind.handed)
        blocks = self._blocks.take(bind.blocks, dict(zip(bind.handed, fds, strict=False)))
        close_all(fds[:count])
        member = self._members[bind.function] = Member(blocks)
        return partial(self._finish, member, bind, fds[count:])

    def _finish(self, member: Member, bind: Bind, fds: Sequence[int]) -> str:
        try:
            runner = self._runner(member, bind, fds)
            notes = "" if bind.trial is None else self._run_trial(runner, bind.trial, fds)
        finally:
            close_all(fds)
        member.runner = runner
        return notes

    def _runner(self, member: Member, bind: Bind, fds: Sequence[int]) -> Runner:
        prepared, load, function = self.prepared, self._load, bind.function
        handler = None if self._code is None else self._handler(self._code, bind, fds)
        weights = [] if load.handler_only else weight_tensors(prepared.program.weights, bind.pieces, member.blocks)
        # Measurements run on zeros.
        run = prepared.unchecked() if load.measured else None
        if self._pool_calls is not None:
            run = _on_pool(self._pool_calls, function, prepared, load.pool_first)
        return Runner(function, prepared, weights, handler, load.outputs, run)

    def _handler(self, code: Code, bind: Bind, fds: Sequence[int]) -> Handler:
        assets = {name: read_all(fd, nbytes) for fd, (name, _, nbytes) in zip(fds, bind.assets, strict=False)}
        addresses = {name: address for name, address, _ in bind.assets}
        return Handler(code, assets, lambda name, make: self._assets.read(name, addresses[name], make))

    def _run_trial(self, runner: Runner, trial: Trial, fds: Sequence[int]) -> str:
        warning = ""
        if trial.warm_up:
            output_bytes, warning = run_on_zeros(runner)
            if self._code is None:
                check_size(runner, output_bytes)
        if trial.samples:
            check_samples(runner, read_requests(SharedBuffer.open(fds[-1]), trial.samples))
            return ""
        return generated_warning(runner, self._load.inputs) if trial.generated else warning

    def drop(self, function: str) -> None:
        """Unbind a function; its runs in progress are completed."""
        self._members.pop(function, None)

    def runner(self, function: str) -> Runner | None:
        """Return the runner of a function, or None unless it is bound."""
        member = self._members.get(function)
        return None if member is None else member.runner


def _on_pool(pool_calls: PoolCalls, function: str, prepared: Prepared, pool_first: bool) -> Compiled:
    """Return a function that replaces the compiled program: it calls the pool, and runs the program itself if the pool
    leaves the call to the worker. `pool_first`: the worker may run the program, so it runs inputs that are too large to
    be sent.
    """

    def run_on_pool(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if pool_first and not is_sendable(inputs):
            return prepared.run(weights, inputs)
        outputs = pool_calls.run(function, prepared.program.inputs, inputs)
        if outputs is not None:
            return outputs
        with pool_calls.timed():
            return prepared.run(weights, inputs)

    return run_on_pool


def _not_run_here(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    raise AssertionError("the program runs on the pool")
