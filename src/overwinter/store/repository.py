"""The repository of deployed functions on disk.

    root/                       created with access for this user only
      blocks/<aa>/<address>     the blobs: sealed files, read-only; aa = the first two digits of the address
      incoming/                 drafts of blocks that are being uploaded
      damaged/                  blocks whose bytes no longer match their address, kept for inspection until a collection
      catalog.sqlite            functions (name, version, manifest), pipelines, profiles, holdings, shares of traffic
      reserve                   space that a start and a removal need on a full disk
      lock                      locked as shared while blocks must stay, exclusively while blocks are removed
      turn                      locked while a caller waits for `lock`, so that callers get it in order

A deploy asks which blobs are missing, puts those, and registers a manifest, all for one tenant: a blob is missing until
the tenant has put it, even if another tenant has. One file serves all tenants that hold a blob. Asking,
putting and registering renew the tenant's holdings, and `collect` keeps what was renewed within its grace period, so a
deploy in progress loses no block that it renewed within that time. Threads and processes may do all of this
concurrently.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from overwinter.core.errors import CallerError, ConflictError, StoreError
from overwinter.core.ids import Address, FunctionName, TenantId
from overwinter.core.pipeline import Pipeline
from overwinter.core.profile import Profile, decode_profile
from overwinter.core.tensor import Buffer
from overwinter.store.blocks import LENGTH_BYTES, address_of, check_address, layout_bytes, parse_layout
from overwinter.store.catalog import Catalog, Row
from overwinter.store.collection import Collected, Collector, Need
from overwinter.store.compatibility import addresses_in, stored_manifest, stored_pipeline
from overwinter.store.disk import disk_errors, private_directory
from overwinter.store.holdings import Holdings
from overwinter.store.locking import Lock
from overwinter.store.manifest import Deployment, Manifest, decode_manifest, encode_manifest
from overwinter.store.packing import BlockPlan
from overwinter.store.reserve import Reserve
from overwinter.store.residency import Sized
from overwinter.store.sealing import Draft, is_intact, read_chunks
from overwinter.store.traffic import StoredTraffic
from overwinter.store.uploads import UNBOUNDED, DiskBounds, Upload, UploadSpace, UploadTotals

NAMED_AT_MOST = 3
"""The most blocks that an error message lists."""
T = TypeVar("T")


def _raise(error: StoreError) -> None:
    raise error


class StoredPipeline(msgspec.Struct, frozen=True):
    """A registered pipeline; `created` in seconds since 1970."""

    version: int
    pipeline: Pipeline
    created: float
    tenant: TenantId
    limited: tuple[str, ...] = ()
    """Messages about numbers of an old pipeline that were brought within the current bounds."""


class Repository:
    """Blocks as files and functions in SQLite, under one directory."""

    def __init__(self, root: Path, bounds: DiskBounds = UNBOUNDED) -> None:
        """Open or create the repository at `root`; raise StoreError or NoSpaceError if that is impossible."""
        self.root = private_directory(Path(root))
        self._bounds = bounds
        self.reserve = Reserve(self.root / "reserve")
        """Disk space for operations that must succeed on a full disk."""
        self._blocks = private_directory(self.root / "blocks")
        self._incoming = private_directory(self.root / "incoming")
        self._damaged = private_directory(self.root / "damaged")
        self._lock = Lock(self.root)
        with self.reserve.released(), self._lock.exclusive():
            self._catalog = Catalog(self.root / "catalog.sqlite")
        self._holdings = Holdings(self._catalog.file)
        self._upload_totals = UploadTotals()
        self.traffic = StoredTraffic(self._catalog.file)
        self.node_identity = self._catalog.node_identity
        self._collector = Collector(self._lock, self._catalog, self._holdings, self._blocks, self._need)

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    # Blobs

    def path(self, address: str) -> Path:
        """The path at which a blob lies if it exists; raises CallerError for an invalid `address`."""
        return Path(self._block_path(check_address(address)))

    def holds(self, address: Address) -> bool:
        """Whether the blob exists."""
        return os.path.exists(self._block_path(check_address(address)))

    def missing(self, tenant: TenantId, addresses: Iterable[str], now: float) -> list[Address]:
        """Return the blobs, each once, that the tenant must send; the others are kept for the grace period."""
        wanted = dict.fromkeys(check_address(address) for address in addresses)
        # Without the lock, because this may wait for the catalog. A step of a collection that begins later keeps these
        # holdings, and the lock waits for a step that began before.
        held = self._holdings.touch(tenant, wanted, now)
        with self._lock.shared():
            stored = set(filter(self.holds, held))
        return [address for address in wanted if address not in stored]

    def put(self, tenant: TenantId, address: str, body: Buffer | Iterable[Buffer], now: float) -> bool:
        """Store a blob of the tenant, and return whether it was missing for the tenant. An existing blob is replaced by
        an equal one, which repairs it; the duration is the same as for a new one, so that it does not reveal which
        blobs exist. Raises CallerError when the body has another address, for instance because it was truncated, or
        NoSpaceError.
        """
        with self.upload(tenant, address) as upload:
            for chunk in [body] if isinstance(body, Buffer) else body:
                upload.write(chunk)
            return upload.commit(now)

    def upload(self, tenant: TenantId, address: str, most_bytes: int | None = None) -> Upload:
        """Begin an upload in pieces: a context with `write` and `commit`. `most_bytes`: the tenant's own limit."""
        checked, bounds = check_address(address), self._bounds.within(most_bytes)
        bounds.check_free(self._incoming, 0)
        held = (0, 0) if bounds.tenant_bytes is None else self._holdings.held_bytes(tenant, checked)
        space = UploadSpace(bounds, self._incoming, tenant, self._upload_totals, *held)
        return Upload(checked, Draft(self._incoming, checked), space, partial(self._admit, tenant, bounds))

    def open(self, address: Address) -> int:
        """Open a read-only descriptor of the blob; raise StoreError if it does not exist."""
        try:
            return os.open(self._block_path(check_address(address)), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StoreError(
                f"block {address} is not in the repository {self.root}: deploy again the function that needs it"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot open block {address} in {self.root}: {error.strerror}") from error

    def read(self, address: Address) -> bytes:
        """Read a whole blob, verified; raise StoreError if it does not exist or is damaged."""
        with open(self.open(address), "rb") as file, disk_errors(f"read block {address}", self._blocks):
            try:
                data = b"".join(map(bytes, read_chunks(file.fileno())))
            except OSError as error:
                if error.errno != errno.EIO or not self.set_aside(address):
                    raise
                raise damaged(address) from error
        if address_of(data) == address:
            return data
        if self.set_aside(address):
            raise damaged(address)
        raise StoreError(
            f"block {address} was damaged at the first read and intact at the second: memory or disk may be failing"
        )

    def set_aside(self, address: Address) -> bool:
        """Read a suspicious block again. Unless it is intact, set it aside, so that it is missing, and return True."""
        path = self._block_path(check_address(address))
        with disk_errors(f"check block {address}", self._blocks):
            try:
                file = open(path, "rb")  # noqa: SIM115 - the `with` below closes it
            except FileNotFoundError:
                return True
            with file:
                # Hash without the lock, because a large block takes seconds.
                if is_intact(file.fileno(), address):
                    return False
                self._move_aside(path, file.fileno(), address)
            return True

    def _move_aside(self, path: str, fd: int, address: Address) -> None:
        """Move a damaged block aside, unless an intact one has replaced it meanwhile."""
        with self._lock.exclusive(), suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                # An administrator may have removed the directory with what it contained.
                aside = private_directory(self._damaged) / f"{address}.damaged"
                os.rename(path, aside)
                # A collection removes it by its age.
                os.utime(aside)

    # Functions

    def register(self, manifest: Manifest, now: float, proven: bool = True) -> Deployment:
        """Register the next version of the function; `now` in seconds since 1970. A version that is not `proven` is
        removed at the next start of a node unless `prove` was called. Raises CallerError when the manifest is invalid
        or gives a wrong size of a blob; ConflictError when a pipeline has the name, or the tenant has to send blobs, of
        which the message names some; ForbiddenError when the name belongs to another tenant; NoSpaceError when the disk
        is too full.
        """
        encoded = encode_manifest(manifest)
        checked = decode_manifest(encoded)
        wanted = checked.blobs()
        with self._lock.shared(), disk_errors("look for blocks", self._blocks):
            self._bounds.check_free(self.root, len(encoded))
            held = self._holdings.touch(checked.tenant, [blob.address for blob in wanted], now)
            absent = [blob.address for blob in wanted if blob.address not in held or not self.holds(blob.address)]
            unequal = [blob for blob in wanted if blob.address not in absent and self._nbytes(blob) != blob.nbytes]
            if not absent and not unequal:
                version = self._catalog.add(checked.name, checked.tenant, encoded, now, proven)
                return Deployment(checked.name, version, checked, now)
        for blob in unequal:
            if not self.set_aside(blob.address):
                raise CallerError(
                    f"the manifest of {checked.name!r} gives blob {blob.address} {blob.nbytes} bytes; "
                    f"it has {self._nbytes(blob)}"
                )
            absent.append(blob.address)
        raise absent_error(checked.name, absent)

    def layout(self, address: Address) -> BlockPlan:
        """Return the layout in a block's trailer, weights numbered from 0; raise CallerError if the blob is not a
        block.
        """
        with open(self.open(address), "rb") as file, disk_errors(f"read block {address}", self._blocks):
            file_bytes = os.fstat(file.fileno()).st_size
            text_stop = max(file_bytes - LENGTH_BYTES, 0)
            body_stop = text_stop - layout_bytes(os.pread(file.fileno(), LENGTH_BYTES, text_stop), file_bytes)
            return parse_layout(os.pread(file.fileno(), text_stop - body_stop, body_stop), body_stop)

    def prove(self, name: FunctionName, version: int) -> None:
        """Record that the version has passed its trial; raise NotFoundError if it was removed meanwhile."""
        self._catalog.prove(name, version)

    def forget_unproven(self) -> None:
        """Remove versions whose trial never ended; called at the start of a node."""
        with self.reserve.released():
            self._catalog.forget_unproven()

    def forget_drafts(self) -> None:
        """Remove partial uploads after a crash; called at the start of a node, before uploads are accepted."""
        with disk_errors("remove drafts", self._incoming):
            for entry in os.scandir(self._incoming):
                os.unlink(entry.path)

    def remove(self, name: FunctionName, version: int | None = None) -> tuple[int, ...]:
        """Remove one version, or all with None, and return their numbers. Raises NotFoundError, or ConflictError when
        the version has a share of the requests and a version remains that has passed its trial.
        """
        with self.reserve.released():
            return self._catalog.remove(name, version)

    def deployment(self, name: FunctionName, version: int | None = None) -> Deployment:
        """Return one version of a function, or the newest with None; raise NotFoundError, or StoreError if its entry is
        damaged.
        """
        return _deployment(self._catalog.get(name, version))

    def deployments(self, skip: Callable[[StoreError], None] = _raise) -> list[Deployment]:
        """Return all versions that have passed their trial, by name and number. `skip` gets an error for each whose
        entry cannot be read; by default it is raised.
        """
        return list(_readable(_deployment, self._catalog.rows(), skip))

    def collect(self, now: float, grace_s: float, only: Collection[Address] | None = None) -> Collected:
        """Remove blocks that no function needs and that were not renewed for `grace_s` before `now`, and drafts and
        damaged blocks of that age; with `only`, only these blocks. The caller runs one collection at a time.
        """
        old = now - grace_s
        with self.reserve.released(), disk_errors("remove unneeded blocks", self._blocks):
            blocks = self._collector.collect(old, only)
            others = Collected(0, 0)
            if only is None:
                others = self._collector.remove_old((self._incoming, self._damaged), old)
        return Collected(blocks.files + others.files, blocks.nbytes + others.nbytes)

    def _need(self, name: FunctionName, version: int) -> Need:
        row = self._catalog.get(name, version)
        try:
            manifest = _deployment(row).manifest
        except StoreError:
            # A version of Overwinter that can read the entry will need these.
            return Need(row.tenant, addresses_in(row.manifest))
        return Need(manifest.tenant, tuple(blob.address for blob in manifest.blobs()))

    # Pipelines

    def put_pipeline(self, pipeline: Pipeline, tenant: TenantId, now: float) -> StoredPipeline:
        """Register the next version of the pipeline, replacing the previous one. Raises ConflictError if a function has
        its name, ForbiddenError if the previous version belongs to another tenant, NoSpaceError if the disk is too
        full.
        """
        encoded = msgspec.json.encode(pipeline)
        self._bounds.check_free(self.root, len(encoded))
        return StoredPipeline(self._catalog.put_pipeline(pipeline.name, tenant, encoded, now), pipeline, now, tenant)

    def remove_pipeline(self, name: FunctionName) -> None:
        """Remove a pipeline; raise NotFoundError if there is none."""
        with self.reserve.released():
            self._catalog.remove_pipeline(name)

    def pipelines(self, skip: Callable[[StoreError], None] = _raise) -> list[StoredPipeline]:
        """Return all pipelines, by name; `skip` as for `deployments`."""
        return list(_readable(_pipeline, self._catalog.pipelines(), skip))

    # Profiles

    def put_profile(self, machine: str, subject: str, profile: Profile, now: float) -> None:
        """Store the profile of a subject (a tenant's program, with its handler if there is one) on a machine. It is
        kept when its function is removed, which may be deployed again. Raises NoSpaceError if the disk is too full.
        """
        encoded = msgspec.msgpack.encode(profile)
        self._bounds.check_free(self.root, len(encoded))
        self._catalog.put_profile(machine, subject, encoded, now)

    def profile(self, machine: str, subject: str) -> Profile | None:
        """Return the profile of a subject on a machine; None also for the format of another version, and for impossible
        numbers.
        """
        found = self._catalog.profile(machine, subject)
        return None if found is None else decode_profile(found)

    # Internals

    def _block_path(self, address: Address) -> str:
        return f"{self._blocks}/{address[:2]}/{address}"

    def _nbytes(self, blob: Sized) -> int:
        try:
            return os.stat(self._block_path(blob.address)).st_size
        except FileNotFoundError:
            return -1

    def _admit(self, tenant: TenantId, bounds: DiskBounds, draft: Draft, now: float) -> bool:
        path = self._block_path(draft.digest)
        with self._lock.shared():
            existed = os.path.exists(path)
            # Record the holder first: a tenant at its limit must not store the block either.
            new = self._holdings.add(tenant, draft.digest, draft.nbytes, now, bounds.tenant_bytes)
            draft.seal(private_directory(Path(path).parent), durable=True)
        return new or not existed


def damaged(address: Address) -> StoreError:
    """Return the error for a block that was set aside."""
    return StoreError(
        f"block {address} is damaged on disk and was set aside: to replace it, deploy again the function that needs it"
    )


def absent_error(name: FunctionName, absent: Sequence[Address]) -> ConflictError:
    """Return the error for a function whose tenant has to send these blobs first."""
    return ConflictError(
        f"{len(absent)} blobs of {name!r} are not in the repository: "
        f"{', '.join(absent[:NAMED_AT_MOST])}{', ...' if len(absent) > NAMED_AT_MOST else ''}; "
        f"upload them, then register again"
    )


def _readable(read: Callable[[Row], T], rows: Iterable[Row], skip: Callable[[StoreError], None]) -> Iterator[T]:
    for row in rows:
        try:
            yield read(row)
        except StoreError as error:
            skip(error)


def _unreadable(what: str, error: CallerError) -> str:
    return (
        f"the catalog's entry of {what} cannot be read by this version of Overwinter: {error}: start a newer version, "
        "or deploy it again"
    )


def _deployment(row: Row) -> Deployment:
    try:
        manifest, limited = stored_manifest(row.manifest)
    except CallerError as error:
        raise StoreError(_unreadable(f"{row.name}@{row.version}", error)) from error
    return Deployment(row.name, row.version, manifest, row.created, limited)


def _pipeline(row: Row) -> StoredPipeline:
    try:
        pipeline, limited = stored_pipeline(row.manifest)
    except CallerError as error:
        raise StoreError(_unreadable(f"pipeline {row.name!r}", error)) from error
    return StoredPipeline(row.version, pipeline, row.created, row.tenant, limited)
