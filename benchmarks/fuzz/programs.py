"""Kind 4: mutated encoded programs. They must be refused or run. No worker may end, and no other failure may occur."""

from random import Random
from typing import Any

import msgspec
import torch

from benchmarks import zoo
from benchmarks.families import as_tensors
from benchmarks.fuzz.kind import judged
from benchmarks.hostile import mutation
from benchmarks.hostile.attacked_node import AttackedNode
from benchmarks.hostile.exchange import ask, exchange
from benchmarks.hostile.functions import DEPLOY_S, Functions, upload_blobs
from benchmarks.wire import binary_request
from overwinter.api.deployer import package
from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.agreement import agree
from overwinter.model.export import export
from overwinter.model.program import Program, decode_program, validate
from overwinter.store.blocks import address_of
from overwinter.store.manifest import Blob, Manifest, encode_manifest
from overwinter.worker.values import TORCH_DTYPES

MODELS = ("mlp", "textcnn")
"""Small models of the zoo, in addition to the one that all attacks use."""
MUTANTS = 30
"""The mutants of one program in one try."""
DEPLOYED = 3
"""The valid mutants that are deployed in one try."""
NAME = "mutated"
ELEMENTS_MAX = 1 << 16


class Programs:
    """Programs with flipped bits, truncated, or with exchanged parts."""

    name = "programs"
    cases = ("bits", "parts", "numbers of calls", "arguments")

    def __init__(self, attacked: AttackedNode, functions: Functions) -> None:
        self._attacked = attacked
        self._made: list[tuple[bytes, Manifest]] = []
        self._packages = [functions.package(NAME, 2.0, tenant="mutants")]
        for name in MODELS:
            model = zoo.build(name, small=True)
            agreed = agree(export(model.module, model.example_inputs, model.dynamic))
            self._packages.append(package(NAME, *agreed, tenant="mutants"))

    def prepare(self) -> None:
        self._made = []
        for made in self._packages:
            upload_blobs(self._attacked.port, made)
            content = bytes(made.contents[made.manifest.program.address]())
            self._made.append((content, made.manifest))

    def run(self, case: str, rng: Random) -> None:
        content, manifest = rng.choice(self._made)
        left = DEPLOYED
        for _ in range(MUTANTS):
            mutant = _mutant(content, case, rng)
            program = self._screened(mutant)
            if program is not None and left and mutant != content:
                left -= 1
                self._deploy(mutant, program, manifest)

    def _screened(self, mutant: bytes) -> Program | None:
        """Return the program if it is valid; anything but ProgramError is an unforeseen failure."""
        try:
            program = decode_program(mutant)
            validate(program)
        except ProgramError:
            return None
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            self._attacked.tally.add("unforeseen_5xx", f"a mutant is refused with {type(error).__name__}: {error}")
            return None
        return program

    def _deploy(self, mutant: bytes, program: Program, manifest: Manifest) -> None:
        client, port = self._attacked.node.client.for_tenant(manifest.tenant), self._attacked.port
        blob = Blob(address_of(mutant), len(mutant))
        client.put_block(blob.address, mutant)
        changed = msgspec.structs.replace(
            manifest, program=blob, inputs=program.inputs, outputs=program.outputs, agreement=None
        )
        body = encode_manifest(changed)
        reply = judged(self._attacked, ask(port, "POST", "/overwinter/v1/functions", body, DEPLOY_S, manifest.tenant))
        if reply is not None and reply.status == 201:
            judged(self._attacked, exchange(port, zeros_request(NAME, program.inputs, program.dimensions), DEPLOY_S))
            judged(self._attacked, ask(port, "DELETE", f"/overwinter/v1/functions/{NAME}", tenant=manifest.tenant))


def zeros_request(name: str, specs: tuple[TensorSpec, ...], dimensions: dict[str, tuple[int, int]]) -> bytes:
    """Return a request of zeros with matching sizes, if they are not too large."""
    inputs: dict[str, torch.Tensor] = {}
    for spec in specs:
        shape = [size if isinstance(size, int) else dimensions.get(size, (1, 1))[0] for size in spec.shape]
        if torch.Size([min(size, ELEMENTS_MAX) for size in shape]).numel() > ELEMENTS_MAX:
            shape = [1] * len(shape)
        inputs[spec.name] = torch.zeros([min(size, ELEMENTS_MAX) for size in shape], dtype=TORCH_DTYPES[spec.datatype])
    return binary_request(name, as_tensors(inputs))


def _mutant(content: bytes, case: str, rng: Random) -> bytes:
    if case == "bits":
        return mutation.content(content, rng)
    parts: dict[str, Any] = msgspec.msgpack.decode(content)
    if case == "parts":
        parts = mutation.tree(parts, rng)
    elif case == "numbers of calls":
        call = rng.choice(parts["calls"])
        place = rng.choice((3, 4))
        call[place] = mutation.tree(call[place], rng) if rng.random() < 0.5 else [rng.randrange(-1, 60)]
    else:
        call = rng.choice(parts["calls"])
        call[rng.choice((1, 2))] = mutation.tree(call[rng.choice((1, 2))], rng)
    try:
        return msgspec.msgpack.encode(parts)
    except (OverflowError, ValueError, TypeError, RecursionError):
        # msgpack cannot encode the mutant, so bytes of the original are changed instead.
        return mutation.content(content, rng)
