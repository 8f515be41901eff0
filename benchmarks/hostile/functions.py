"""Small functions that deploy in milliseconds: exported once, each time with other weights or another handler."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch

from benchmarks.families import as_tensors
from benchmarks.hostile.exchange import PATIENCE_S, Reply, ask, exchange, request, tenant_header
from benchmarks.wire import binary_request
from overwinter.api.client import Client
from overwinter.api.deployer import Package, package, settings_of
from overwinter.model.agreement import agree
from overwinter.model.export import export
from overwinter.store.manifest import encode_manifest

ROWS = 2
COLUMNS = 4
SIZE = 16384
"""The elements of the large weight, which has a separate block."""
DEPLOY_S = 90.0
INPUT = tuple(float(n) - 2.5 for n in range(COLUMNS))


class Scale(torch.nn.Module):
    """y = x * factor + shift, over one large weight and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((SIZE,), 2.0), requires_grad=False)
        self.shift = torch.nn.Parameter(torch.ones(COLUMNS), requires_grad=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x * self.factor[:COLUMNS] + self.shift}


class Functions:
    """Makes packages of one program, whose weight `factor` has `SIZE` equal elements."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        exported = export(model or Scale(), {"x": torch.zeros(ROWS, COLUMNS)})
        self.program, self._weights, self.agreement = agree(exported)
        [self._place] = [at for at, weight in enumerate(self.program.weights) if weight.name == "factor"]

    def weights(self, factor: float, mark: bytes = b"") -> list[torch.Tensor]:
        """Return the weights of a variant; the mark is in the part of the large weight that no answer shows."""
        large = torch.full((SIZE,), factor)
        if mark:
            raw = large.view(torch.uint8)
            for at in range(1024, SIZE * 4 - len(mark), 4096):
                raw[at : at + len(mark)] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        return [large if at == self._place else weight for at, weight in enumerate(self._weights)]

    def package(
        self,
        name: str,
        factor: float = 2.0,
        *,
        handler: str | None = None,
        assets: dict[str, bytes] | None = None,
        tenant: str = "default",
        mark: bytes = b"",
        **settings: Any,
    ) -> Package:
        """Package a function of this program."""
        return package(
            name,
            self.program,
            self.weights(factor, mark),
            self.agreement,
            handler=handler,
            assets=assets,
            tenant=tenant,
            settings=settings_of(None, settings),
        )

    def deploy(self, client: Client, name: str, factor: float = 2.0, **function: Any) -> None:
        """Deploy such a function."""
        self.package(name, factor, **function).upload(client)


def right(factor: float, values: Sequence[float] = INPUT) -> bytes:
    """Return the answer of the function with this factor to these values."""
    with torch.inference_mode():
        y = torch.tensor([list(values)]) * torch.full((COLUMNS,), factor) + torch.ones(COLUMNS)
    return bytes(as_tensors({"y": y})[0].data)


def infer_request(name: str, values: Sequence[float] = INPUT) -> bytes:
    """Return a whole request to such a function."""
    return binary_request(name, as_tensors({"x": torch.tensor([list(values)])}))


def upload_blobs(port: int, made: Package) -> None:
    """Upload all blobs of a package as an attacker."""
    for blob in made.manifest.blobs():
        content = bytes(made.contents[blob.address]())
        exchange(
            port, request("PUT", f"/overwinter/v1/blocks/{blob.address}", content, tenant_header(made.manifest.tenant))
        )


def register(port: int, made: Package, patience_s: float = DEPLOY_S) -> Reply | None:
    """Send the manifest of a package whose blobs are uploaded; a trial may take a minute."""
    manifest = made.manifest
    return ask(port, "POST", "/overwinter/v1/functions", encode_manifest(manifest), patience_s, manifest.tenant)


def order_request(name: str, text: str) -> bytes:
    """Return a whole request to a hostile handler, which takes one BYTES `what` and returns one BYTES `found`."""
    given = {"name": "what", "datatype": "BYTES", "shape": [1], "data": [text]}
    return request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [given]}).encode())


def order(port: int, name: str, text: str, patience_s: float = PATIENCE_S) -> Reply | None:
    """Send a text to a hostile handler, and return its answer."""
    return exchange(port, order_request(name, text), patience_s)


def source(*names: str) -> str:
    """Join files of `benchmarks/hostile/handlers` to the source of a hostile handler."""
    return "\n".join(files("benchmarks.hostile.handlers").joinpath(f"{name}.py").read_text() for name in names)
