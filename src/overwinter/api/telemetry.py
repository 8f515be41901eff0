"""The telemetry routes: metrics, activity, devices, usage, explanations, and the output of functions."""

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from overwinter.api.exchange import JSON_TYPE, Request, Response, json_response
from overwinter.api.inference import function_of
from overwinter.api.listing import listed
from overwinter.api.operations import Body, Operation, json_body
from overwinter.api.tenants import check_owner
from overwinter.core.ids import TenantId
from overwinter.node.recent_output import OutputLine
from overwinter.telemetry.activity import NodeActivity
from overwinter.telemetry.devices import DeviceActivity
from overwinter.telemetry.explaining import Explanation
from overwinter.telemetry.metering import Usage

METRICS_TYPE = (b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode())


class TelemetryApi:
    """The routes for telemetry."""

    def operations(self) -> list[Operation]:
        """Every operation of telemetry."""
        root = "/overwinter/v1"
        function = f"{root}/functions/{{name}}"
        return [
            Operation("GET", path, "token", handler, {200: answer}, errors=(413,))
            for path, handler, answer in (
                ("/metrics", self.metrics, (Body(CONTENT_TYPE_PLAIN_0_0_4, str),)),
                (f"{root}/activity", self.activity, json_body(NodeActivity)),
                (f"{root}/devices", self.devices, json_body(list[DeviceActivity])),
                (f"{root}/usage", self.usage, json_body(list[Usage])),
                (f"{root}/usage/{{tenant}}", self.usage, json_body(list[Usage])),
                (f"{function}/explain", self.explain, json_body(Explanation)),
                (f"{function}/logs", self.logs, json_body(list[OutputLine])),
                (f"{function}/versions/{{version}}/explain", self.explain, json_body(Explanation)),
                (f"{function}/versions/{{version}}/logs", self.logs, json_body(list[OutputLine])),
            )
        ]

    async def metrics(self, request: Request) -> Response:
        """The metrics, for Prometheus. A tenant gets only those of its own functions and pipelines."""
        return request.counted(Response(200, await request.caller.node.telemetry.metrics(), [METRICS_TYPE]))

    async def activity(self, request: Request) -> Response:
        """The current state of the node and its functions."""
        return request.counted(json_response(await request.caller.node.telemetry.activity()))

    async def devices(self, request: Request) -> Response:
        """The devices of the pool and the functions there. A tenant gets only its own, on the devices that serve it."""
        return request.counted(json_response(await request.caller.node.telemetry.devices()))

    async def usage(self, request: Request) -> Response:
        """The usage of each function, of all tenants or of the one in the path. A tenant gets only its own."""
        tenant = request.path_params.get("tenant")
        used = await request.caller.node.telemetry.usage(None if tenant is None else TenantId(tenant))
        return Response(200, await request.run(listed(used, lambda each: each, request.reservation)), [JSON_TYPE])

    async def explain(self, request: Request) -> Response:
        """The state of a function and the reasons for the last decisions."""
        return request.counted(json_response(await request.caller.node.telemetry.explain(*function_of(request))))

    async def logs(self, request: Request) -> Response:
        """The last output of a function's code, for its own tenant only, because it may contain requests."""
        name, version = function_of(request)
        check_owner(request, name)
        return request.counted(json_response(await request.caller.node.telemetry.logs(name, version)))
