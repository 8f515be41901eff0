"""A base model and its variants, in real bytes, for the tests of the store."""

import errno
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from overwinter.core.ids import Address, FunctionName, TenantId
from overwinter.core.tensor import TensorSpec
from overwinter.store.blocks import address_of, block_chunks, name_block
from overwinter.store.manifest import Blob, Handler, Manifest
from overwinter.store.packing import pack, weight_bytes
from overwinter.store.repository import Repository
from overwinter.store.uploads import Upload

TENANT = TenantId("tests")
NOW = 1000.0


def put(repository: Repository, address: str, body, tenant: TenantId = TENANT, now: float = NOW) -> bool:
    """Store a blob for the tests' tenant."""
    return repository.put(tenant, address, body, now)


def missing(repository: Repository, addresses, tenant: TenantId = TENANT, now: float = NOW) -> list[Address]:
    """Return the blobs that the tests' tenant has to send."""
    return repository.missing(tenant, addresses, now)


def upload(repository: Repository, address: str) -> Upload:
    """Begin the upload of a blob of the tests' tenant."""
    return repository.upload(TENANT, address)


class Shape(NamedTuple):
    """A weight's dtype and shape."""

    dtype: str
    shape: tuple[int, ...]


class Model(NamedTuple):
    """A function's weights with their bytes, and everything that a deploy needs."""

    weights: list[Shape]
    tensors: list[bytes]
    manifest: Manifest
    files: dict[Address, bytes]

    def deploy(self, repository: Repository, now: float = NOW) -> int:
        """Put what is missing, register, and return the bytes that were sent."""
        tenant = self.manifest.tenant
        lacking = missing(repository, [blob.address for blob in self.manifest.blobs()], tenant, now)
        for address in lacking:
            put(repository, address, self.files[address], tenant, now)
        repository.register(self.manifest, now)
        return sum(len(self.files[address]) for address in lacking)


LAYERS = 6
CONVOLUTION = Shape("float32", (64, 160))
NORM = Shape("float32", (64,))


def shapes(classes: int = 10) -> list[Shape]:
    """Return convolutions of 40 KiB with two norms each, and a head."""
    body = [shape for _ in range(LAYERS) for shape in (CONVOLUTION, NORM, NORM)]
    return [*body, Shape("float32", (classes, 1024)), Shape("float32", (classes,))]


def values(weights: Sequence[Shape], seed: int) -> list[bytes]:
    """Return random bytes for each weight."""
    chance = random.Random(seed)
    return [chance.randbytes(weight_bytes(weight)) for weight in weights]


def assemble(name: str, weights: list[Shape], tensors: list[bytes], handler: bytes | None = None) -> Model:
    """Build the manifest and the files of a function."""
    files: dict[Address, bytes] = {}
    blocks = []
    for plan in pack(weights):
        block = name_block(plan, tensors)
        files[block.address] = b"".join(block_chunks(plan, tensors))
        blocks.append(block)
    program = b"program of " + str(weights).encode()
    extra = [program] if handler is None else [program, handler]
    files |= {address_of(data): data for data in extra}
    source = None if handler is None else Handler(Blob(address_of(handler), len(handler)))
    manifest = Manifest(
        name=FunctionName(name),
        tenant=TENANT,
        program=Blob(address_of(program), len(program)),
        blocks=tuple(blocks),
        inputs=(TensorSpec("x", "FP32", ("batch", 3)),),
        outputs=(TensorSpec("y", "FP32", ("batch", 10)),),
        handler=source,
    )
    return Model(weights, tensors, manifest, files)


def base(name: str = "base") -> Model:
    """Build the model that variants start from."""
    weights = shapes()
    return assemble(name, weights, values(weights, seed=0))


def head_variant(name: str, seed: int, classes: int = 10) -> Model:
    """Build the base with another head."""
    weights = shapes(classes)
    return assemble(name, weights, [*base().tensors[:-2], *values(weights[-2:], seed)])


def norm_variant(name: str, seed: int) -> Model:
    """Build the base with other norms."""
    weights = shapes()
    other = values(weights, seed)
    tensors = [new if weight == NORM else old for weight, old, new in zip(weights, base().tensors, other, strict=True)]
    return assemble(name, weights, tensors)


def below(directory: Path) -> Iterator[Path]:
    """Return all files under a directory."""
    return (path for path in directory.rglob("*") if path.is_file())


def blocks_and_drafts(repository: Repository) -> set[str]:
    """Return the names of the files of a repository that contain blocks, complete or not."""
    return {path.name for folder in ("blocks", "incoming") for path in below(repository.root / folder)}


def fill_disk(directory: Path) -> Path:
    """Write a file until the disk is full."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def fail_reads(patch, path):
    """Let the system report that the disk cannot read this file, as some file systems do for damaged bytes."""
    inode, readv = os.stat(path).st_ino, os.readv

    def failing(descriptor, buffers):
        if os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return readv(descriptor, buffers)

    patch.setattr(os, "readv", failing)


def flip_bit(path: Path, at: int = 100) -> None:
    """Change one bit of a sealed file."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    path.chmod(0o444)


def cut(path: Path, nbytes: int) -> None:
    """Shorten a sealed file."""
    path.chmod(0o600)
    os.truncate(path, nbytes)
    path.chmod(0o444)


def stored(repository, count, nbytes=5000):
    blobs = []
    for _ in range(count):
        data = os.urandom(nbytes)
        put(repository, address_of(data), data)
        blobs.append(Blob(address_of(data), nbytes))
    return blobs


def names(host):
    return {path.name for path in below(host.root)}


class Pipes:
    """A source of blocks that arrive through pipes, as fast as the test writes them."""

    def __init__(self):
        self.readers = {}

    def pipe(self, address):
        self.readers[address], writer = os.pipe()
        return writer

    def open(self, address):
        return self.readers.pop(address)

    def set_aside(self, address):
        return True
