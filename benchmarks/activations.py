"""Measures the memory that runs take beside the weights, and compares it with what liveness computes.

`python -m benchmarks.activations [model ...]` runs programs of the zoo in a process of their own, at batch 1 and 8, and
reads the peak of its memory. The computed peak includes the inputs; the measured one does not, because they exist
before the run. The rest of the difference is the scratch memory of operators, and memory that the allocator wastes. A
device admits runs by the computed peak times a factor that covers this.
"""

import argparse
import ctypes
import gc
import os
from pathlib import Path

import torch

from benchmarks import zoo
from benchmarks.measure import print_result
from overwinter.device.activations import SCRATCH_FACTOR
from overwinter.model.compile import Compiled, compile_program
from overwinter.model.export import Exported, export
from overwinter.model.liveness import peak_activation_bytes

BATCHES = (1, 8)
KIB, MIB = 1 << 10, 1 << 20


def peak_bytes(run: Compiled, made: Exported, inputs: list[torch.Tensor], first: list[torch.Tensor]) -> int:
    """Return the most memory that a run takes, in a process in which the program has run before."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        with torch.inference_mode():
            run(made.weights, first)
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            run(made.weights, inputs)
        os.write(there, b"%d" % (_status("VmHWM") - before))
        os._exit(0)
    os.close(there)
    with open(here) as said:
        found = int(said.read())
    os.waitpid(pid, 0)
    return found


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"the kernel does not report {key}")


def measure(name: str, small: bool = False) -> dict[int, float]:
    """Print a row for each batch; return by batch the memory that was taken, divided by the computed peak."""
    model = zoo.build(name, small=small)
    made = export(model.module, model.example_inputs, model.dynamic)
    run = compile_program(made.program)
    own = [tensor[:1] for tensor in model.example_inputs.values()]
    found = {}
    for batch in BATCHES:
        inputs = [torch.cat([tensor] * batch) for tensor in own]
        computed = peak_activation_bytes(made.program, {**made.program.example, "batch": batch})
        taken = peak_bytes(run, made, inputs, own)
        found[batch] = taken / computed
        sizes = (
            f"computed {computed / MIB:9.2f} MiB  taken {taken / MIB:9.2f} MiB  more {(taken - computed) / MIB:8.2f}"
        )
        print(f"{name:16} batch {batch}  {sizes} MiB  factor {found[batch]:.2f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(zoo.NAMES), metavar="model", help="models of the zoo")
    parser.add_argument("--small", action="store_true", help="small models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, options.small) for name in options.models}
    print_result({"factor": {name: rows[max(rows)] for name, rows in found.items()}, "used": SCRATCH_FACTOR})


if __name__ == "__main__":
    main()
