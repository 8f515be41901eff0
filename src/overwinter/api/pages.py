"""The pages for browsers: a description of the server, the OpenAPI document, and a page made from it."""

from collections.abc import Sequence
from importlib.resources import files

from overwinter.api.exchange import JSON_TYPE, Request, Response, encode_json
from overwinter.api.openapi import openapi_document
from overwinter.api.operations import Body, Operation, json_body

STATIC = files("overwinter.api") / "static"
HTML = "text/html; charset=utf-8"
HTML_HEADERS = [
    (b"content-type", HTML.encode()),
    # The pages load nothing from elsewhere, and no page may show them in a frame.
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        b"base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
]


class Pages:
    """The pages about the API itself."""

    def __init__(self, operations: Sequence[Operation], version: str) -> None:
        pages = [
            Operation("GET", "/", "nothing", self.root, {200: (Body(HTML, str),)}),
            Operation("GET", "/docs", "nothing", self.docs, {200: (Body(HTML, str),)}),
            Operation("GET", "/openapi.json", "nothing", self.openapi, {200: json_body(dict)}),
        ]
        self._pages = pages
        self._document = encode_json(openapi_document([*operations, *pages], version))
        self._root, self._docs = ((STATIC / name).read_bytes() for name in ("index.html", "docs.html"))

    def operations(self) -> list[Operation]:
        """Every operation for browsers."""
        return self._pages

    async def root(self, request: Request) -> Response:
        """The page that describes this server."""
        return Response(200, self._root, HTML_HEADERS)

    async def docs(self, request: Request) -> Response:
        """The OpenAPI document, as a page."""
        return Response(200, self._docs, HTML_HEADERS)

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document of the whole API."""
        return Response(200, self._document, [JSON_TYPE])
