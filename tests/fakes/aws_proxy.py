"""A proxy before a server of AWS's API: keeps what is asked, and answers in its stead where a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import aiohttp
from aiohttp import web

Hook = Callable[["Proxy", dict[str, str]], web.Response | None]


class Proxy:
    """Passes requests on to `endpoint`, and keeps them.

    asked: what was asked, each with its form's fields, and `path` (method and path) and `body`. hook: sees each request
    first, in a thread, and answers it or returns None.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.asked: list[dict[str, str]] = []
        self.hook: Hook | None = None
        self._runner: web.AppRunner | None = None

    def of(self, action: str) -> list[dict[str, str]]:
        """What was asked of EC2 or Auto Scaling by this name."""
        return [fields for fields in self.asked if fields.get("Action") == action]

    async def start(self) -> str:
        """Returns its own URL."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._carry)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fields = {key: values[0] for key, values in parse_qs(body.decode()).items()} | {
            "path": f"{request.method} {request.path}",
            "body": body.decode(),
        }
        self.asked.append(fields)
        # In a thread: a hook may itself ask the server for something.
        answer = await asyncio.to_thread(self.hook, self, fields) if self.hook else None
        if answer is not None:
            return answer
        headers = {key: value for key, value in request.headers.items() if key.lower() != "host"}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, self.endpoint + request.path_qs, data=body, headers=headers) as said,
        ):
            return web.Response(status=said.status, body=await said.read(), content_type=said.content_type)


def refuse(code: str, message: str, status: int = 400) -> web.Response:
    """An error as EC2 and Auto Scaling write it."""
    error = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    ec2 = f"<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>"
    query = f"<ErrorResponse>{error}<RequestId>r</RequestId></ErrorResponse>"
    xml = ec2 if code in ("RequestLimitExceeded", "UnauthorizedOperation") else query
    return web.Response(status=status, text=xml, content_type="text/xml")


def groups(sizes: dict[str, tuple[int, list[str]]], suspended: str = "") -> web.Response:
    """What Auto Scaling says of groups: names, each with its size and the machines that it counts.

    suspended: why the groups launch no machines; empty: they do.
    """
    stopped = f"<ProcessName>Launch</ProcessName><SuspensionReason>{escape(suspended)}</SuspensionReason>"
    stopped = f"<member>{stopped}</member>" if suspended else ""
    listed = "".join(
        f"<member><AutoScalingGroupName>{name}</AutoScalingGroupName><DesiredCapacity>{size}</DesiredCapacity>"
        f"<MinSize>0</MinSize><MaxSize>9</MaxSize><SuspendedProcesses>{stopped}</SuspendedProcesses>"
        "<AvailabilityZones><member>us-east-1a</member></AvailabilityZones><Instances>"
        + "".join(
            f"<member><InstanceId>{machine}</InstanceId><LifecycleState>InService</LifecycleState></member>"
            for machine in machines
        )
        + "</Instances></member>"
        for name, (size, machines) in sizes.items()
    )
    result = f"<AutoScalingGroups>{listed}</AutoScalingGroups>"
    action = "DescribeAutoScalingGroups"
    text = f"<{action}Response><{action}Result>{result}</{action}Result></{action}Response>"
    return web.Response(text=text, content_type="text/xml")
