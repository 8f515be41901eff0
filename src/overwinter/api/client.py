"""A synchronous Python client of a node, which uses the binary tensor extension."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from overwinter.api.arrays import ArrayLike, from_tensor, to_tensor
from overwinter.api.binary import HEAD_LENGTH, decode_reply, encode_request
from overwinter.api.identity import authorization, checked_tenant
from overwinter.core.errors import (
    CallerError,
    ConflictError,
    DeadlineError,
    ForbiddenError,
    MachineError,
    NoSpaceError,
    NotFoundError,
    OverloadedError,
    OverwinterError,
    RateError,
    TooLargeError,
    UnauthorizedError,
)
from overwinter.core.ids import Address
from overwinter.core.pipeline import Pipeline
from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileLine, ProfileOptions, Progress
from overwinter.core.tensor import Buffer, TensorSpec
from overwinter.store.manifest import Manifest

ERRORS: dict[int, type[OverwinterError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    413: TooLargeError,
    429: RateError,
    503: OverloadedError,
    504: DeadlineError,
    507: NoSpaceError,
}
"""The error of each status. Of the others, those below 500 raise CallerError, and the rest MachineError."""
CHUNK_BYTES = 1 << 20
ADDRESSES_MAX = 10_000
"""The most addresses of blocks in one query."""
GRACE_S = 5.0
"""How much longer than the request's own timeout the client waits, so that the node's refusal arrives."""
T = TypeVar("T")

TENANT = "overwinter-tenant"


class RegisteredVersion(msgspec.Struct, frozen=True):
    """The registered version of a function or a pipeline."""

    name: str
    version: int
    warning: str = ""
    """What the author should know about the trial; empty if there is nothing."""


class AnswerMetadata(msgspec.Struct, frozen=True):
    """Metadata of an answer besides its tensors."""

    version: int
    start: str
    """What the function needed: nothing (warm), a bind in a worker of its family (bound), or a new worker or
    a transfer to a device, with its weights in memory (host) or on disk (disk).
    """
    milliseconds: float
    """The time from sending the request to reading the answer."""


class Client:
    """A connection pool to one node. Errors carry the node's message.

    While a tenant's rate of requests is exceeded, a call waits and sends its request again, up to `timeout_s` in all;
    inference requests and those of `ready` raise RateError at once. For values without a datatype, such as lists,
    `infer` first asks for the function's inputs, which counts as a request, and may then wait once.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        timeout_s: float = 75.0,
        tenant: str = "default",
        token: str | None = None,
    ) -> None:
        """`timeout_s` bounds each wait for the node; an `infer` with its own timeout waits GRACE_S longer than that
        instead. Functions are deployed, loaded, unloaded, measured and removed for `tenant`; such calls raise
        ForbiddenError for functions of another tenant, or NotFoundError with a `token`. With a token, "default" means
        the token's tenant; another tenant needs the scope `admin`. An empty token is none. Raises CallerError for an
        invalid address, token or tenant.
        """
        try:
            httpx.URL(url).raw_host.decode("ascii").encode("idna")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise CallerError(f"{url!r} is not an address, such as http://[::1]:8000: {error}") from error
        self._url, self.tenant, self._timeout_s = url, checked_tenant(tenant), timeout_s
        headers = authorization(token)
        # The environment's proxies are not for a node, which is usually local. Reading certificates takes 40 ms.
        tls = not url.lower().startswith("http:")
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, headers=headers, verify=tls)
        self.last_answer: AnswerMetadata | None = None
        """How the last successful call of `infer` was answered."""

    def for_tenant(self, tenant: str) -> Self:
        """Return a client for another tenant that uses the same connections. Raises CallerError for an invalid name."""
        other = copy(self)
        other.tenant = checked_tenant(tenant)
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # General requests

    def live(self) -> bool:
        """Whether the node reports itself live; raises MachineError or DeadlineError if none answers."""
        return self._is_true("/v2/health/live")

    def ready(self, name: str | None = None, version: int | None = None) -> bool:
        """Whether the node, or one of its functions, answers requests. Raises MachineError, DeadlineError,
        NotFoundError, RateError.
        """
        return self._is_true("/v2/health/ready" if name is None else f"{_model_path(name, version)}/ready")

    def functions(self) -> list[dict[str, Any]]:
        """Every version of every function, as the node describes it; with a token, of the tenant's functions."""
        return _json(self._send("GET", "/overwinter/v1/functions"), list[dict[str, Any]])

    def function(self, name: str, version: int | None = None) -> dict[str, Any]:
        """Return one version of a function, by default the default version; or a pipeline. Raises NotFoundError."""
        return _json(self._send("GET", _function_path(name, version)), dict[str, Any])

    def pipelines(self) -> list[dict[str, Any]]:
        """Every pipeline, as the node describes it; with a token, of the tenant."""
        return _json(self._send("GET", "/overwinter/v1/pipelines"), list[dict[str, Any]])

    # Telemetry

    def activity(self) -> dict[str, Any]:
        """The current state of the node and its functions."""
        return _json(self._send("GET", "/overwinter/v1/activity"), dict[str, Any])

    def devices(self) -> list[dict[str, Any]]:
        """The devices of the pool, with the functions whose blocks are on them."""
        return _json(self._send("GET", "/overwinter/v1/devices"), list[dict[str, Any]])

    def explain(self, name: str, version: int | None = None) -> dict[str, Any]:
        """The blocks, profile and workers of a function, and the last decisions about it. Raises NotFoundError."""
        return _json(self._send("GET", f"{_function_path(name, version)}/explain"), dict[str, Any])

    def logs(self, name: str, version: int | None = None) -> list[dict[str, Any]]:
        """The last lines that a function printed: `at` (seconds since 1970), `worker`, `text`. Raises NotFoundError."""
        return _json(self._send("GET", f"{_function_path(name, version)}/logs"), list[dict[str, Any]])

    def usage(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """The usage of each function, of all tenants or of one; with a tenant's token, of its own functions."""
        path = "/overwinter/v1/usage" + ("" if tenant is None else f"/{quote(tenant, safe='')}")
        return _json(self._send("GET", path), list[dict[str, Any]])

    def metrics(self) -> str:
        """All metrics, in Prometheus's text format; with a tenant's token, of its own functions."""
        return self._send("GET", "/metrics").text

    # Profiles

    def known_profile(self, name: str, version: int | None = None) -> Profile:
        """The profile of a function on the node's machine; raises NotFoundError if there is none."""
        return _json(self._send("GET", f"{_function_path(name, version)}/profile"), Profile)

    def profile(
        self,
        name: str,
        version: int | None = None,
        options: ProfileOptions | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Profile:
        """Measure the configurations of `options` on the node's machine, and skip known ones unless `again`. A list
        that is None means 1, 2, 4 and so on, up to the function's setting, or to what machine and program allow if that
        is less. Takes seconds to minutes; closing the client ends it.
        """
        path = f"{_function_path(name, version)}/profile"
        body = msgspec.json.encode(options or ProfileOptions())
        response = self._send("POST", path, content=body, stream=True)
        try:
            with closing(response):
                return _measured(response.iter_lines(), progress)
        except (httpx.TransportError, msgspec.DecodeError) as error:
            raise MachineError(f"the measurement at {response.url} ended without a result: {error}") from error

    # Inference

    def infer(
        self,
        name: str,
        inputs: Mapping[str, ArrayLike],
        version: int | None = None,
        timeout_s: float | None = None,
        wait_s: float | None = None,
    ) -> dict[str, Any]:
        """Run a function, or a pipeline of them, on tensors, arrays, or (nested) lists, by name of input.

        Returns its outputs by name: NumPy arrays, or nested lists where NumPy is not installed. `timeout_s` is the
        timeout of the request; the default is the function's. `wait_s`: how long to wait for the answer, by default
        somewhat longer than `timeout_s`, or without a `timeout_s` as long as for any other answer.
        """
        specs: dict[str, TensorSpec] = {}

        def spec_of(wanted: str) -> TensorSpec:
            if not specs:
                found = msgspec.convert(self.function(name, version)["inputs"], list[TensorSpec])
                specs.update({spec.name: spec for spec in found})
            if wanted not in specs:
                raise CallerError(f"unknown input {wanted!r} of {name!r}; its inputs are {', '.join(specs) or 'none'}")
            return specs[wanted]

        tensors = [to_tensor(key, value, partial(spec_of, key)) for key, value in inputs.items()]
        head, body = encode_request(tensors, timeout_s)
        if wait_s is None:
            wait_s = self._timeout_s if timeout_s is None else timeout_s + GRACE_S
        headers = {HEAD_LENGTH: str(head), "content-type": "application/octet-stream"}
        path = f"{_model_path(name, version)}/infer"
        response = self._request("POST", path, content=body, headers=headers, timeout=wait_s)
        pause_s = _retry_after_s(response) or 0.0
        if specs and response.status_code == RateError.status and pause_s <= wait_s:
            # The question for the inputs may have used up the tenant's rate.
            time.sleep(pause_s)
            response = self._request("POST", path, content=body, headers=headers, timeout=wait_s)
        _raise_for_status(response)
        reply, outputs = decode_reply(response)
        spent_ms = response.elapsed.total_seconds() * 1e3
        self.last_answer = AnswerMetadata(int(reply.model_version), response.headers["overwinter-start"], spent_ms)
        return {tensor.name: from_tensor(tensor) for tensor in outputs}

    def load(self, name: str, version: int | None = None) -> None:
        """Wake a version, by default all versions that get requests without a version, and make it available again."""
        self._send("POST", f"{_repository_path(name, version)}/load")

    def unload(self, name: str, version: int | None = None) -> None:
        """Unload a version, by default all: it releases its memory and answers no requests until it is loaded."""
        self._send("POST", f"{_repository_path(name, version)}/unload")

    # Deploys

    def missing(self, addresses: Sequence[Address]) -> list[Address]:
        """Return the addresses of the blocks that the tenant still has to send."""
        lacking: list[Address] = []
        for at in range(0, len(addresses), ADDRESSES_MAX):
            body = msgspec.json.encode({"addresses": addresses[at : at + ADDRESSES_MAX]})
            response = self._send("POST", "/overwinter/v1/blocks/missing", content=body)
            lacking += _json(response, dict[str, list[Address]])["missing"]
        return lacking

    def put_block(self, address: Address, data: Buffer) -> bool:
        """Send one block; return False if the node held it for the tenant before."""
        view = memoryview(data).cast("B")
        headers = {"content-length": str(len(view)), "content-type": "application/octet-stream"}
        path = f"/overwinter/v1/blocks/{address}"
        return self._send("PUT", path, content=_Chunks(view), headers=headers).status_code == 201

    def register(self, manifest: Manifest) -> RegisteredVersion:
        """Register a new version of a function whose blocks the tenant has sent. Raises ConflictError when some
        are missing, or a pipeline has the name, and the error of the trial.
        """
        response = self._send("POST", "/overwinter/v1/functions", content=msgspec.json.encode(manifest))
        return _json(response, RegisteredVersion)

    def deploy_pipeline(self, pipeline: Pipeline) -> RegisteredVersion:
        """Register a pipeline of deployed functions; it replaces a pipeline of that name.

        Raises NotFoundError for an unknown function, CallerError where tensors do not fit, ConflictError when a
        function has the name or a version is on trial, NoSpaceError at a limit.
        """
        response = self._send("POST", "/overwinter/v1/pipelines", content=msgspec.json.encode(pipeline))
        return _json(response, RegisteredVersion)

    def set_traffic(self, name: str, shares: Mapping[int, int]) -> None:
        """Set the shares of versions in the requests that name no version, in per cent; without shares, the newest
        version gets all. Raises CallerError, NotFoundError, ConflictError.
        """
        percentages = [{"version": version, "percent": percent} for version, percent in shares.items()]
        self._send("PUT", f"{_function_path(name)}/traffic", content=msgspec.json.encode({"shares": percentages}))

    def remove(self, name: str, version: int | None = None) -> None:
        """Remove one version of a function, or all of them, or a pipeline. Raises NotFoundError, and ConflictError
        while a pipeline needs the function, or if the version has a share of the requests and others remain.
        """
        self._send("DELETE", _function_path(name, version))

    def _is_true(self, path: str) -> bool:
        response = self._request("GET", path)
        if response.status_code == 400:
            return False
        _raise_for_status(response)
        return True

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        waited_s = 0.0
        while True:
            response = self._request(method, path, **options)
            wait_s = _retry_after_s(response)
            if response.status_code != RateError.status or wait_s is None or waited_s + wait_s > self._timeout_s:
                _raise_for_status(response)
                return response
            time.sleep(wait_s)
            waited_s += wait_s

    def _request(self, method: str, path: str, stream: bool = False, **options: Any) -> httpx.Response:
        headers = {TENANT: self.tenant, **options.pop("headers", {})}
        try:
            request = self._http.build_request(method, path, headers=headers, **options)
            response = self._http.send(request, stream=stream)
            if not response.is_success:
                response.read()
            return response
        except httpx.TimeoutException as error:
            raise DeadlineError(f"the node at {self._url} did not answer in time") from error
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.TransportError) -> MachineError:
        return MachineError(f"no node answers at {self._url} ({error}): start one with `overwinter serve`")


def _raise_for_status(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = str(msgspec.json.decode(response.content, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, UnicodeError, KeyError):
        message = f"HTTP status {response.status_code} and no error text: is this a node?"
    raise _error_of(response.status_code)(message, _retry_after_s(response))


def _retry_after_s(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else None


def _measured(lines: Iterable[str], progress: Callable[[Progress], None] | None) -> Profile:
    for text in lines:
        line = msgspec.json.decode(text, type=ProfileLine) if text else ProfileLine()
        if line.progress is not None and progress is not None:
            progress(line.progress)
        if line.error is not None:
            raise _error_of(line.status or 500)(line.error)
        if line.profile is not None:
            return line.profile
    raise MachineError("the node ended the measurement without a result")


def _error_of(status: int) -> type[OverwinterError]:
    return ERRORS.get(status, CallerError if status < 500 else MachineError)


def _json(response: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MachineError(f"the answer from {response.url} is not a node's: {error}") from error


class _Chunks:
    """The content of a block in parts. Each attempt of a request iterates over them anew."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._view), CHUNK_BYTES):
            yield bytes(self._view[start : start + CHUNK_BYTES])


def _model_path(name: str, version: int | None) -> str:
    return f"/v2/models/{quote(name, safe='')}" + ("" if version is None else f"/versions/{version}")


def _repository_path(name: str, version: int | None) -> str:
    return _model_path(name, version).replace("/v2", "/v2/repository", 1)


def _function_path(name: str, version: int | None = None) -> str:
    return f"/overwinter/v1/functions/{quote(name, safe='')}" + ("" if version is None else f"/versions/{version}")
