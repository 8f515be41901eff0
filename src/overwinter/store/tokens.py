"""The tokens of a node, hashed, and the quotas of their tenants, in one file of its data directory.

    tokens.json        replaced as a whole by a rename, so that a reader never sees a partial file
    tokens.lock        held during a change

Only the administrator may write into the data directory. A token has 256 random bits, which cannot be guessed or
enumerated: one round of SHA-256 is enough to make the file useless to a reader, and is fast enough for each request. A
slow hash (argon2, bcrypt) protects passwords, and would let attackers keep the node busy.
"""

import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from overwinter.core.errors import CallerError, NotFoundError, StoreError
from overwinter.core.ids import NAME_PATTERN, TenantId
from overwinter.store.disk import OPEN_FLAGS, disk_errors, give_to_owner, private_directory

Scope = Literal["infer", "deploy", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

FILE = "tokens.json"
LOCK = "tokens.lock"
PREFIX = "ow"
"""The prefix of every token, by which scanners of source code find one that was checked in."""
SECRET_BYTES = 32
ID_BYTES = 6
TENANT_MAX = 63
LABEL_MAX = 64
TOKENS_MAX = 10_000
SEPARATOR = ".."
"""The separator between tenant and name in the node's internal function names (`api/tenancy.py`). The name of a tenant
with tokens cannot contain it.
"""

UNUSED_DIGEST = "0" * 64
"""A digest that no token has."""

_is_name = re.compile(NAME_PATTERN).match


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token, as it is stored."""

    id: str
    """Identifies the token to people; it is a part of the token."""
    label: str = ""
    """The purpose of the token."""
    tenant: TenantId
    scopes: tuple[Scope, ...]
    digest: str
    """The SHA-256 digest of the whole token."""
    created: float
    """The time of creation, in seconds since 1970."""


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of a tenant; None: the node's default, or unlimited."""

    functions: Annotated[int, Meta(ge=0)] | None = None
    """The most deployed versions of functions."""
    nbytes: Annotated[int, Meta(ge=0)] | None = None
    """The most bytes on disk, each block in whole pages."""
    requests_per_s: Annotated[float, Meta(gt=0)] | None = None
    """The requests per second of all tokens of the tenant together."""


class KnownTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    tokens: dict[str, Token] = {}
    """The tokens by id."""
    required: bool = msgspec.field(default=False, name="asked")
    """Whether the node requires a token: always after the first one was created, even if all are revoked. The file
    calls it `asked`, so that older files stay valid.
    """
    quotas: dict[TenantId, Quota] = {}

    def find(self, text: bytes) -> Token | None:
        """Return the token with this text. The duration does not depend on whether its id is known."""
        parts = text.split(b"_", 2)
        token = self.tokens.get(parts[1].decode("latin-1")) if len(parts) == 3 else None
        expected = UNUSED_DIGEST if token is None else token.digest
        return token if hmac.compare_digest(digest_of(text), expected) else None


class FileVersion(NamedTuple):
    """Distinguishes versions of the file without reading it."""

    inode: int
    modified_ns: int
    nbytes: int


NO_TOKENS = KnownTokens()


class TokenFile:
    """The tokens of the node that serves a data directory."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._path = str(data / FILE)

    def version(self) -> FileVersion | None:
        """Return the version of the file, or None if it does not exist; raise StoreError if it cannot be checked. Each
        request calls this, so it makes only one system call.
        """
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot check {self._path}: {error.strerror}") from error
        return FileVersion(found.st_ino, found.st_mtime_ns, found.st_size)

    def read(self) -> KnownTokens:
        """Read the file; empty if it does not exist. Raises StoreError when it cannot be read."""
        try:
            return msgspec.json.decode(Path(self._path).read_bytes(), type=KnownTokens)
        except FileNotFoundError:
            return NO_TOKENS
        except OSError as error:
            raise StoreError(
                f"cannot read {self._path}: {error.strerror}: make it readable for the node's user"
            ) from error
        except (msgspec.DecodeError, UnicodeError) as error:
            raise StoreError(
                f"{self._path} is damaged ({error}): all requests are refused until it is repaired"
            ) from error

    def create(self, tenant: str, scopes: Sequence[Scope], label: str, now: float) -> tuple[Token, str]:
        """Create a token, and return it with its text, which is not stored. Raises CallerError for an invalid tenant or
        label, without a scope, and if there are too many tokens.
        """
        _check_tenant(tenant)
        if not scopes:
            raise CallerError(f"a token needs a scope: {', '.join(SCOPES)}")
        if len(label) > LABEL_MAX or not label.isprintable():
            raise CallerError(f"a label has at most {LABEL_MAX} printable characters")
        id_ = secrets.token_hex(ID_BYTES)
        text = f"{PREFIX}_{id_}_{secrets.token_urlsafe(SECRET_BYTES)}"
        chosen = tuple(scope for scope in SCOPES if scope in scopes)
        token = Token(
            id=id_, label=label, tenant=TenantId(tenant), scopes=chosen, digest=digest_of(text.encode()), created=now
        )
        with self._changing() as known:
            if len(known.tokens) >= TOKENS_MAX:
                raise CallerError(f"{self._path} has {TOKENS_MAX} tokens: revoke some first")
            self._write(msgspec.structs.replace(known, tokens={**known.tokens, id_: token}, required=True))
        return token, text

    def revoke(self, id_: str) -> Token:
        """Revoke a token, from the next request on. Raises NotFoundError for an unknown id."""
        with self._changing() as known:
            if id_ not in known.tokens:
                raise NotFoundError(f"no token {id_!r} in {self._path}: `overwinter token list` shows the ids")
            left = {key: token for key, token in known.tokens.items() if key != id_}
            self._write(msgspec.structs.replace(known, tokens=left))
        return known.tokens[id_]

    def limit(self, tenant: str, quota: Quota) -> None:
        """Set the quota of a tenant, replacing its previous quota."""
        _check_tenant(tenant)
        with self._changing() as known:
            quotas = {**known.quotas, TenantId(tenant): quota}
            self._write(msgspec.structs.replace(known, quotas=quotas))

    @contextmanager
    def _changing(self) -> Iterator[KnownTokens]:
        """Lock the file against other changes, and yield its content."""
        private_directory(self._data)
        with disk_errors("lock the tokens", self._data):
            descriptor = os.open(self._data / LOCK, os.O_RDWR | OPEN_FLAGS, 0o600)
        try:
            give_to_owner(descriptor, self._data)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield self.read()
        finally:
            os.close(descriptor)

    def _write(self, known: KnownTokens) -> None:
        draft = f"{self._path}.draft"
        with disk_errors("write the tokens", self._data):
            with open(os.open(draft, os.O_WRONLY | os.O_TRUNC | OPEN_FLAGS, 0o600), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(known)))
                give_to_owner(file.fileno(), self._data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._path)
            directory = os.open(self._data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


def digest_of(text: bytes) -> str:
    """Return the stored form of a token."""
    return hashlib.sha256(text).hexdigest()


def is_tenant(name: str) -> bool:
    """Whether this is a valid name of a tenant with tokens."""
    return bool(_is_name(name)) and len(name) <= TENANT_MAX and SEPARATOR not in name and name[-1] != "."


def _check_tenant(tenant: str) -> None:
    if not is_tenant(tenant):
        raise CallerError(
            f"{tenant[:80]!r} is not a valid tenant name: at most {TENANT_MAX} lower-case letters, digits, single "
            "dots, dashes and underscores, a letter or digit first and no dot last"
        )
