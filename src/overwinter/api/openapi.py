"""Generates the OpenAPI 3.1 document from the operations, the types of their messages, and the errors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from overwinter.api.answers import Error
from overwinter.api.operations import Body, Operation, json_body
from overwinter.api.tenants import HEADER as TENANT_HEADER
from overwinter.core.errors import OverwinterError
from overwinter.core.ids import NAME_PATTERN
from overwinter.store.manifest import ADDRESS_PATTERN

UNAUTHORIZED, FORBIDDEN, RATE, BUSY = 401, 403, 429, 503
ALWAYS = (500, BUSY)
"""The statuses of errors that any operation may have. The following apply to some operations:"""
WITH_BODY = (400, 413, 415)
WITH_NAME = (404,)
WITH_CALLER = (400, UNAUTHORIZED, FORBIDDEN, RATE)
"""They apply if tokens are required, if the header with the tenant is invalid, or if a web page may have sent the
request.
"""

ABOUT = """The Open Inference Protocol v2 under `/v2`, and Overwinter's own operations.

An error is `{"error": text}`. Before a request reaches an operation it may be refused with 400 (not HTTP, or `Host`,
`Authorization` or `Overwinter-Tenant` twice), 404 and 405 (no such operation), 408 (too slow), 414 and 431 (too long a
path or head), 501 (a transfer encoding other than chunked) and 503 (too many connections). The answer repeats the
header `X-Request-Id`. Bodies other than blocks may be compressed with gzip or deflate (`Content-Encoding`).

After the first token was created, a node answers 401 to requests without one, even for paths that do not exist, except
for those operations below that need no token: health and these pages. Without the scope `admin`, an operation sees only
what the token's tenant owns; a function of another tenant is 404. Some operations need the scope `infer` or `deploy`;
`admin` includes both. A node without tokens requires none.
"""

PATH_PARAMETERS: dict[str, dict[str, Any]] = {
    "name": {"description": "A function or a pipeline.", "schema": {"type": "string", "pattern": NAME_PATTERN}},
    "version": {"description": "A version of it.", "schema": {"type": "integer", "minimum": 1}},
    "address": {
        "description": "A block's address: the BLAKE3 hash of its bytes.",
        "schema": {"type": "string", "pattern": ADDRESS_PATTERN},
    },
    "tenant": {"description": "A tenant.", "schema": {"type": "string", "pattern": NAME_PATTERN}},
}
HEADERS: dict[str, dict[str, Any]] = {
    TENANT_HEADER: {
        "description": "The tenant for which the request acts. Without tokens it may be any; without the header it is "
        "`default`. With a token, `default` or no header means the token's tenant; another needs the scope `admin`.",
        "schema": {"type": "string", "pattern": NAME_PATTERN},
    },
    "inference-header-content-length": {
        "description": "The bytes of JSON before the binary tensors. Without the header the whole body is JSON.",
        "schema": {"type": "integer", "minimum": 0},
    },
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
ANSWER_HEADERS: dict[int, dict[str, Any]] = {
    UNAUTHORIZED: {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}},
    RATE: RETRY_AFTER,
    BUSY: RETRY_AFTER,
}
BEARER = "bearer"
SECURITY = {
    BEARER: {
        "type": "http",
        "scheme": "bearer",
        "description": "A token that `overwinter token create` printed on the node's machine.",
    }
}


def openapi_document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """The document, as data for JSON."""
    bodies = [
        body
        for each in operations
        for body in (*each.request_body, *(one for many in each.responses.values() for one in many))
    ]
    types = [Error, *(body.message for body in bodies if body.message is not None)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    descriptions = _Descriptions([(kind, schema) for kind, schema in zip(types, schemas, strict=True)])
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = descriptions.operation(each)
    whole: dict[str, Any] = _with_ecma_patterns(
        {
            "openapi": "3.1.0",
            "info": {"title": "Overwinter", "version": version, "description": ABOUT},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": SECURITY},
        }
    )
    return whole


class _Descriptions:
    """Describes operations in OpenAPI's format, with the schemas of their messages."""

    def __init__(self, schemas: list[tuple[Any, dict[str, Any]]]) -> None:
        # A list, because not every union is hashable, and there are few types.
        self._schemas = schemas

    def operation(self, operation: Operation) -> dict[str, Any]:
        """One operation."""
        parameters = list(_parameters(operation))
        text = " ".join((operation.handler.__doc__ or "").split())
        names = [parameter["name"] for parameter in parameters if parameter["in"] == "path"]
        described: dict[str, Any] = {
            "operationId": "_".join([operation.handler.__name__, *names]),
            "summary": re.split(r"[.;:] ", text, maxsplit=1)[0].rstrip("."),
            "description": text,
            "parameters": parameters,
            "security": _security(operation),
            "responses": {
                **{str(status): self._response(status, bodies) for status, bodies in operation.responses.items()},
                **{
                    str(status): self._response(status, json_body(Error))
                    for status in _errors(operation, bool(names))
                    if status not in operation.responses
                },
            },
        }
        if operation.request_body:
            described["requestBody"] = {
                "content": self._content(operation.request_body),
                "required": not operation.is_body_optional,
            }
        return described

    def _response(self, status: int, bodies: Sequence[Body]) -> dict[str, Any]:
        described: dict[str, Any] = {"description": HTTPStatus(status).phrase if status < 400 else _why(status)}
        if bodies:
            described["content"] = self._content(bodies)
        if status in ANSWER_HEADERS:
            described["headers"] = ANSWER_HEADERS[status]
        return described

    def _content(self, bodies: Sequence[Body]) -> dict[str, Any]:
        forms: dict[str, list[dict[str, Any]]] = {}
        for body in bodies:
            forms.setdefault(body.media_type, []).append(self._schema(body))
        return {
            media_type: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
            for media_type, schemas in forms.items()
        }

    def _schema(self, body: Body) -> dict[str, Any]:
        if body.message is None:
            # A body of bytes has no type (OpenAPI 3.1, 4.8.14.2).
            return {"description": body.about}
        return next(schema for kind, schema in self._schemas if kind is body.message)


def _with_ecma_patterns(value: Any) -> Any:
    """Replace what only Python's patterns have: JSON Schema's are those of ECMAScript, where $ is only the end."""
    if isinstance(value, Mapping):
        return {
            key: each.replace(r"\A", "^").replace(r"\Z", "$")
            if key == "pattern" and isinstance(each, str)
            else _with_ecma_patterns(each)
            for key, each in value.items()
        }
    return [_with_ecma_patterns(each) for each in value] if isinstance(value, list) else value


def _parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", operation.path):
        yield {"name": name, "in": "path", "required": True, **PATH_PARAMETERS[name]}
    for name in (*operation.headers, *(() if operation.needs == "nothing" else (TENANT_HEADER,))):
        yield {"name": name, "in": "header", "required": False, **HEADERS[name.lower()]}


def _errors(operation: Operation, named: bool) -> list[int]:
    with_body = WITH_BODY if operation.request_body else ()
    with_name = WITH_NAME if named else ()
    with_caller = () if operation.needs == "nothing" else WITH_CALLER
    return sorted({*ALWAYS, *with_body, *with_name, *with_caller, *operation.errors})


def _security(operation: Operation) -> list[dict[str, list[str]]]:
    """A token with the scope that the operation needs; none where the node has no tokens."""
    if operation.needs == "nothing":
        return []
    return [{BEARER: [] if operation.scope is None else [operation.scope]}, {}]


def _why(status: int) -> str:
    """The meaning of an error status: the docstring of the most general error class with it."""
    kinds: list[type[OverwinterError]] = [OverwinterError]
    for kind in kinds:
        if kind.status == status and kind is not OverwinterError:
            return (kind.__doc__ or "").strip()
        kinds.extend(kind.__subclasses__())
    return HTTPStatus(status).phrase
