"""Kind 5: programs of one call each, of every listed operator, with arguments that no export would produce.

Most run between guard pages in separate processes (`benchmarks.operator_fuzz`), without the node. Some are deployed to
the node, where they must be refused, fail or answer, and never end their worker.
"""

import json
import subprocess
import sys
from random import Random
from typing import Any

import torch

from benchmarks.fuzz.kind import judged
from benchmarks.fuzz.programs import zeros_request
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.exchange import ask, exchange
from benchmarks.hostile.functions import DEPLOY_S, register, upload_blobs
from benchmarks.hostile.verdicts import FailureKind
from overwinter.api.deployer import package, settings_of
from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.tensor import TensorSpec
from overwinter.model.program import Call, Layer, Program, Slot, Value, Weight

try:
    from benchmarks import guard_pages, operator_fuzz, operator_programs
except ImportError:
    operator_fuzz = None  # type: ignore[assignment]

FAILURE_OF: dict[str, FailureKind] = {
    "outside": "outside_reads",
    "unwritten": "outside_reads",
    "strange": "wrong",
    "crash": "crashes",
    "hung": "hung",
}
"""The failure of each finding between guard pages."""
NAME = "crafted"
SETTINGS = {"memory_mib": 512, "timeout_s": 10.0}
NICE = "nice"
OPERATORS_S = 300.0
DEPLOYED_A_TRY = 5
LEAKED = 1 << 16


class Crafted:
    """Calls of operators with extreme arguments."""

    name = "crafted"

    def __init__(self, attacked: AttackedNode) -> None:
        self._attacked = attacked
        self._calls = {} if operator_fuzz is None else operator_fuzz.valid_calls()
        guarded = ("guard pages", "deployed", "deployed") if self._calls else ()
        self.cases = (*guarded, *REACHING)

    def prepare(self) -> None:
        if not self._calls:
            self._attacked.tally.note("benchmarks.operator_fuzz is not here: only a few operators are tried")

    def run(self, case: str, rng: Random) -> None:
        if case == "guard pages":
            self._between_guards(rng)
        elif case == "deployed":
            for _ in range(DEPLOYED_A_TRY):
                self._deploy_call(rng)
        else:
            self._reach(case)

    def _between_guards(self, rng: Random) -> None:
        """Run every operator once, in a process that may die, at low priority."""
        command = [NICE, "-n", "10", sys.executable, "-m", "benchmarks.fuzz.crafted", str(rng.randrange(1 << 30))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=OPERATORS_S, check=False)
        if done.returncode:
            self._attacked.tally.add(
                "crashes", f"the fuzz of operators ended with {done.returncode}: {done.stderr[-300:]}"
            )
            return
        for operator, seed, at, kind, call in json.loads(done.stdout.splitlines()[-1]):
            message = f"{kind}: {call} (operator_fuzz, seed {seed}, {operator} at {at})"
            self._attacked.tally.add(FAILURE_OF.get(kind, "wrong"), message)

    def _deploy_call(self, rng: Random) -> None:
        name, seed, at = rng.choice(sorted(self._calls)), rng.randrange(1 << 30), rng.randrange(1000)
        call = operator_fuzz.call_of(self._calls, seed, name, at)
        with guard_pages.GuardedMemory(0, at_end=False) as memory:
            tried = operator_programs.program_of(call, memory, Random(seed))
            self._deploy(tried.program, [weight.clone() for weight in tried.weights])

    def _reach(self, case: str) -> None:
        """Deploy a program that reaches beyond its weights: any answer contains memory of others."""
        program, weights = REACHING[case]()
        answer = self._deploy(program, weights)
        if answer:
            self._attacked.tally.add("outside_reads", f"a program that reaches beyond its weights answered: {answer!r}")

    def _deploy(self, program: Program, weights: list[torch.Tensor]) -> bytes:
        """Deploy it and call it once; return the beginning of its answer, if there is one."""
        port = self._attacked.port
        flat = [weight.contiguous() for weight in weights]
        made = package(NAME, program, flat, tenant="crafters", settings=settings_of(None, SETTINGS))
        upload_blobs(port, made)
        reply = judged(self._attacked, register(port, made))
        if reply is None or reply.status != 201:
            return b""
        asked = zeros_request(NAME, program.inputs, program.dimensions)
        reply = judged(self._attacked, exchange(port, asked, DEPLOY_S))
        judged(self._attacked, ask(port, "DELETE", f"/overwinter/v1/functions/{NAME}", tenant="crafters"))
        return reply.tensors[:64] if reply is not None and reply.status == 200 else b""


def one_call(
    operator: str, args: tuple[Any, ...], weights: list[torch.Tensor], outputs: list[TensorSpec], **kwargs: Any
) -> tuple[Program, list[torch.Tensor]]:
    """A program of one call over some weights, which have the first slots; its first results are its outputs."""
    kinds = {dtype: name for name in DTYPE_BYTES if (dtype := getattr(torch, name, None)) is not None}
    first = len(weights)
    made = tuple(range(first, first + max(1, len(outputs))))
    program = Program(
        inputs=(),
        outputs=tuple(outputs),
        weights=tuple(Weight(f"w{at}", kinds[each.dtype], tuple(each.shape)) for at, each in enumerate(weights)),
        calls=(Call(operator, args, kwargs, made),),
        values=tuple(Value("float32") for _ in made),
        output_slots=made,
        layers=(Layer("", 0, 1, 0, 0, 0),),
        dimensions={},
        example={},
    )
    return program, weights


def _outputs(*shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec(f"y{at}", "FP32", shape) for at, shape in enumerate(shapes)]


def _view_far(operator: str, *rest: Any) -> tuple[Program, list[torch.Tensor]]:
    args = (Slot(0), (2, LEAKED), (1 << 20, 1), *rest)
    return one_call(operator, args, [torch.zeros(64)], _outputs((2, LEAKED)))


def _short_statistics(count: int) -> tuple[Program, list[torch.Tensor]]:
    """Return a batch norm over many channels with the means of one."""
    weights = [torch.zeros(1, count), torch.zeros(1), torch.ones(1)]
    args = (Slot(0), None, None, Slot(1), Slot(2), 0.1, 1e-5)
    return one_call(
        "aten._native_batch_norm_legit_no_training.default", args, weights, _outputs((1, count), (0,), (0,))
    )


def _short_norm() -> tuple[Program, list[torch.Tensor]]:
    weights = [torch.ones(4096, 4), torch.ones(1, 1)]
    return one_call("aten._weight_norm.default", (Slot(0), Slot(1), 0), weights, _outputs((4096, 4)))


def _short_group() -> tuple[Program, list[torch.Tensor]]:
    weights = [torch.zeros(1, 4096, 2), torch.ones(1), torch.zeros(1)]
    args = (Slot(0), Slot(1), Slot(2), 1, 4096, 2, 4096, 1e-5)
    return one_call("aten.native_group_norm.default", args, weights, _outputs((1, 4096, 2), (1, 4096), (1, 4096)))


REACHING = {
    "reshape alias": lambda: _view_far("aten._reshape_alias.default"),
    "as strided": lambda: _view_far("aten.as_strided.default", 0),
    "as strided before": lambda: _view_far("aten.as_strided.default", -(1 << 16)),
    "short statistics": lambda: _short_statistics(4096),
    "very short statistics": lambda: _short_statistics(1 << 22),
    "short weight norm": _short_norm,
    "short group norm": _short_group,
    "empty": lambda: one_call("aten.empty.memory_format", ((1 << 16,),), [torch.zeros(1)], _outputs((1 << 16,))),
    "new empty": lambda: one_call(
        "aten.new_empty.default", (Slot(0), (LEAKED,)), [torch.zeros(1)], _outputs((LEAKED,))
    ),
}
"""Programs that would read memory beyond their weights, or uninitialised memory; none may ever answer."""


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(operator_fuzz.fuzz(int(sys.argv[1]), 1).findings))


if __name__ == "__main__":
    main()
