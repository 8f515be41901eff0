"""Exports every model of the zoo, and compares the programs with eager PyTorch bit for bit.

`python -m benchmarks.programs [--small] [name ...]` exports each model, encodes and decodes the program, and compares
outputs at several batch sizes and, for dynamic lengths, at another sequence length.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import zoo
from overwinter.model.compile import compile_program
from overwinter.model.export import export
from overwinter.model.liveness import peak_activation_bytes
from overwinter.model.program import Program, decode_program, encode_program, validate

BATCHES = (1, 2, 3, 5)


def sized_inputs(program: Program, model: zoo.Model, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return inputs of these dynamic sizes, made by repeating the example's."""
    made: dict[str, torch.Tensor] = {}
    for spec in program.inputs:
        tensor = model.example_inputs[spec.name]
        for dim, size in enumerate(spec.shape):
            if isinstance(size, str):
                wanted = sizes.get(size, tensor.shape[dim])
                index = torch.arange(wanted) % tensor.shape[dim]
                tensor = tensor.index_select(dim, index)
        made[spec.name] = tensor.contiguous()
    return made


def flatten(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors in a model's outputs, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    parts = outputs.values() if hasattr(outputs, "values") else outputs
    return [tensor for part in parts if part is not None for tensor in flatten(part)]


def cases(program: Program, batches: tuple[int, ...] = BATCHES) -> Iterator[dict[str, int]]:
    """Yield the dynamic sizes to compare at: each batch, then the other sizes changed."""
    yield from ({"batch": batch} for batch in batches if "batch" in program.dimensions)
    others = {name: max(low, min(high, program.example[name] - 3)) for name, (low, high) in program.dimensions.items()}
    if others.keys() - {"batch"}:
        yield {**others, "batch": 2}


def is_equal(program: Program, weights: list[torch.Tensor], model: zoo.Model, sizes: dict[str, int]) -> bool:
    """Whether the program and the module give the same bits at these sizes."""
    inputs = sized_inputs(program, model, sizes)
    with torch.inference_mode():
        expected = flatten(model.module(**inputs))
        given = compile_program(program)(weights, [inputs[spec.name] for spec in program.inputs])
    return len(expected) == len(given) and all(map(torch.equal, expected, given))


def measure(name: str, small: bool) -> dict[str, Any]:
    """Measure one row of the table."""
    model = zoo.build(name, small=small)
    began = time.perf_counter()
    program, weights = export(model.module, model.example_inputs, model.dynamic)
    export_s = time.perf_counter() - began
    data = encode_program(program)
    began = time.perf_counter()
    program = decode_program(data)
    validate(program)
    compile_program(program)
    load_ms = (time.perf_counter() - began) * 1e3
    return {
        "calls": len(program.calls),
        "layers": len(program.layers),
        "program_kb": round(len(data) / 1e3, 1),
        "export_s": round(export_s, 2),
        "compile_ms": round(load_ms, 1),
        "gmacs": round(sum(layer.macs for layer in program.layers) / 1e9, 3),
        "weights_mb": round(sum(weight.nbytes for weight in program.weights) / 1e6, 1),
        "peak_activation_mb": round(peak_activation_bytes(program) / 1e6, 2),
        "equal_at": [sizes for sizes in cases(program) if is_equal(program, weights, model, sizes)],
        "cases": len(list(cases(program))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="models of the zoo; all if none is given")
    parser.add_argument("--small", action="store_true", help="the small variants that the tests use")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    columns = ("calls", "layers", "program_kb", "export_s", "compile_ms", "gmacs", "weights_mb", "peak_activation_mb")
    print(f"{'model':18}" + "".join(f"{column:>19}" for column in columns) + "  equal at")
    for name in options.names or zoo.NAMES:
        row = rows[name] = measure(name, options.small)
        equal = " ".join("x".join(str(size) for size in sizes.values()) for sizes in row["equal_at"])
        print(f"{name:18}" + "".join(f"{row[column]:>19}" for column in columns), f" {equal}", flush=True)
        gc.collect()
    failed = [name for name, row in rows.items() if len(row["equal_at"]) != row["cases"]]
    print("RESULT " + json.dumps({"programs": rows, "all_equal": not failed, "failed": failed}))


if __name__ == "__main__":
    main()
