"""Measures the bytes that a fine-tuned variant adds, on disk and in memory. Part of `benchmarks.density`.

Variants are deployed on a real node one after another. A deploy wakes the function once, so its blocks are in the host
store.
"""

import sys
from collections.abc import Iterable

import torch
from blake3 import blake3

from benchmarks.families import Family, as_tensors
from benchmarks.measure import file_bytes, occupied_bytes
from benchmarks.nodes import Node, running_node
from benchmarks.wire import Connection, binary_request

CHECKED = 3
"""The variants of each kind whose answers are checked at the end."""
STEP = 50


class Tally:
    """The bytes of tensors, each content once: what sharing by whole tensors would store."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.nbytes = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the tensors that are new."""
        for tensor in tensors:
            digest = blake3(tensor.numpy().data.cast("B") if tensor.dim() else tensor.numpy().tobytes()).digest()
            if digest not in self._seen:
                self._seen.add(digest)
                self.nbytes += tensor.nbytes


def stored(node: Node) -> tuple[int, int, int]:
    """Return the bytes of blocks in the repository, of all its files (including manifests), and of the host store's
    pages.
    """
    return file_bytes(node.data / "blocks"), file_bytes(node.data), occupied_bytes(node.host_store)


def add_variants(node: Node, family: Family, kind: str, names: list[str], count: int) -> dict[str, float]:
    """Add variants in which these tensors differ; return the bytes that each added."""
    family.vary(names, 0)
    tally = Tally()
    tally.add(family.weights)
    base, before = tally.nbytes, stored(node)
    right: dict[str, bytes] = {}
    for variant in range(1, count + 1):
        family.vary(names, variant)
        function = f"{kind}-{variant}"
        family.deploy(node.client, function, keep_alive_s=0)
        tally.add(family.weights)
        if variant > count - CHECKED:
            right[function] = family.answer()
        if variant % STEP == 0:
            print(f"  {kind}: {variant} variants of {count}", file=sys.stderr)
    family.vary(names, 0)
    check(node, family, kind, right)
    blocks, files, memory = (now - then for now, then in zip(stored(node), before, strict=True))
    return {
        "blocks": blocks / count,
        "files": files / count,
        "memory": memory / count,
        "tensors": (tally.nbytes - base) / count,
    }


def check(node: Node, family: Family, kind: str, right: dict[str, bytes]) -> None:
    """Raise RuntimeError unless these functions answer correctly, and all of the node are in the host store."""
    with Connection(node.port) as connection:
        for function, answer in right.items():
            if connection.ask(binary_request(function, as_tensors(family.one()))).tensors != answer:
                raise RuntimeError(f"{function} answers wrongly")
    absent = [view["name"] for view in node.client.functions() if view["missing_bytes"]]
    if absent:
        raise RuntimeError(f"after the variants ({kind}), {absent} are not in the host store")


def measure_variants(model: str, count: int) -> dict[str, float]:
    """Print the table; return for each kind what a variant adds to the repository or to the host store, whichever is
    more, as a share of its full size.
    """
    family = Family(model)
    with running_node() as node:
        family.deploy(node.client, model, keep_alive_s=0)
        rows = {
            "head": add_variants(node, family, "head", family.head(), count),
            "norms": add_variants(node, family, "norms", family.norms(), count),
        }
    full = family.nbytes
    print(f"\n{count} variants of {model}, kB added by each; its full size is {full / 1e3:.0f} kB")
    print(f"{'':8}{'blocks on disk':>18}{'with manifest':>18}{'host store':>18}{'sharing by tensor':>20}{'share':>10}")
    shares = {}
    for kind, row in rows.items():
        shares[kind] = max(row["files"], row["memory"]) / full
        sizes = f"{row['blocks'] / 1e3:18.1f}{row['files'] / 1e3:18.1f}{row['memory'] / 1e3:18.1f}"
        print(f"{kind:8}{sizes}{row['tensors'] / 1e3:20.1f}{shares[kind]:10.2%}")
    print("share: of the full size, the larger of what a variant adds to the repository and to the host store")
    return shares
