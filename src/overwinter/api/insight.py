"""What can be asked over HTTP of what a node does: metrics, activity, usage, and why a function is as it is?"""

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from overwinter.api.exchange import Request, Response, json_response
from overwinter.api.inference import function_of
from overwinter.api.routing import Route
from overwinter.api.tenants import check_owner
from overwinter.core.ids import TenantId

METRICS_TYPE = (b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode())


class InsightApi:
    """The routes for whoever looks at a node."""

    def routes(self) -> list[Route]:
        """Every route for lookers-on."""
        return [
            ("GET", "/metrics", self.metrics),
            ("GET", "/overwinter/v1/activity", self.activity),
            ("GET", "/overwinter/v1/usage", self.usage),
            ("GET", "/overwinter/v1/usage/*", self.usage),
            ("GET", "/overwinter/v1/functions/*/explain", self.explain),
            ("GET", "/overwinter/v1/functions/*/versions/*/explain", self.explain),
            ("GET", "/overwinter/v1/functions/*/logs", self.logs),
            ("GET", "/overwinter/v1/functions/*/versions/*/logs", self.logs),
        ]

    async def metrics(self, request: Request) -> Response:
        """All metrics, for Prometheus."""
        return Response(200, await request.caller.front.insight.metrics(), [METRICS_TYPE])

    async def activity(self, request: Request) -> Response:
        """What the node and its functions do just now."""
        return json_response(await request.caller.front.insight.activity())

    async def usage(self, request: Request) -> Response:
        """What each function used, of all tenants or of the one in the path."""
        tenant = TenantId(request.values[0]) if request.values else None
        return json_response(await request.caller.front.insight.usage(tenant))

    async def explain(self, request: Request) -> Response:
        """Why a function is as it is."""
        return json_response(await request.caller.front.insight.explain(*function_of(request)))

    async def logs(self, request: Request) -> Response:
        """What the code of a function printed of late, for its own tenant: it may have printed what callers sent."""
        name, version = function_of(request)
        check_owner(request, name)
        return json_response(await request.caller.front.insight.logs(name, version))
