"""What an agent meets outside its machine: a head that says what a test wants, and a metadata server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from spotrun.head.server import certificate
from spotrun.store import Store, head_key
from spotrun.wire import MAX_MESSAGE, NODE_HEADER, REFUSAL_HEADER, HeadRecord, JobReport, Order, Report
from tests.helpers import await_for


@dataclass(frozen=True)
class Seen:
    """A report, with the keys of one of its jobs beside those of the node. `devices` is the node's."""

    report: Report
    work: JobReport  # without a job: an empty one

    @classmethod
    def of(cls, report: Report, job: str = "") -> Seen:
        """job: its id; default: the only one."""
        works = [each for each in report.jobs if job in ("", each.job)]
        assert len(works) < 2, works
        return cls(report, works[0] if works else JobReport())

    @property
    def job(self) -> str | None:
        return self.work.job or None

    @property
    def phase(self) -> str:
        return self.report.phase if self.report.phase != "ready" else self.work.phase

    def __getattr__(self, key: str) -> Any:
        return getattr(self.report if key in Report.model_fields else self.work, key)


class FakeHead:
    """A head without a mind: it keeps the newest report of each node and sends the orders it is given.

    refusal: why it lets nobody in. Most tests have one job at most, so they see its keys with the node's (`Seen`).
    """

    def __init__(self, store: Store, cluster: str = "test", epoch: int = 1, refusal: str = "") -> None:
        self.store, self.cluster, self.epoch, self.refusal = store, cluster, epoch, refusal
        self.newest: dict[str, Report] = {}
        self.history: list[Report] = []
        self.orders: dict[str, Order] = {}
        self.visits: list[tuple[str, str, str]] = []  # node, address, Authorization
        self.sockets: dict[str, web.WebSocketResponse] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, publish: bool = True) -> HeadRecord:
        context, fingerprint = certificate.create()
        app = web.Application()
        app.router.add_get("/agent", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        port = self._runner.addresses[0][1]
        self.record = HeadRecord(epoch=self.epoch, address="127.0.0.1", port=port, fingerprint=fingerprint)
        if publish:
            self.publish(self.record)
        return self.record

    @property
    def reports(self) -> dict[str, Seen]:
        return {node: Seen.of(report) for node, report in self.newest.items()}

    def publish(self, record: HeadRecord) -> None:
        self.store.put(head_key(self.cluster), record.model_dump_json().encode())

    async def stop(self) -> None:
        for socket in list(self.sockets.values()):
            await socket.close(code=WSCloseCode.GOING_AWAY)
        if self._runner is not None:
            await self._runner.cleanup()

    async def order(self, node: str, order: Order) -> None:
        self.orders[node] = order
        if node in self.sockets:
            await self.sockets[node].send_str(order.model_dump_json())

    async def wait(
        self, node: str, look: Callable[[Seen], object], what: str, timeout: float = 40, job: str = ""
    ) -> Seen:
        """The newest report of the node, once `look` holds for it. job: of the reported jobs; default: the only one."""

        def found() -> Seen | None:
            report = self.newest.get(node)
            if report is None or (not job and len(report.jobs) > 1):
                return None
            seen = Seen.of(report, job)
            return seen if look(seen) else None

        try:
            report = await await_for(found, timeout, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; newest report: {self.newest.get(node)}") from None
        assert report is not None
        return report

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.visits.append((request.headers[NODE_HEADER], str(request.remote), request.headers["Authorization"]))
        if self.refusal:
            return web.Response(status=401, headers={REFUSAL_HEADER: self.refusal})
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        node = ""
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                continue
            report = Report.model_validate_json(message.data)
            self.newest[report.node] = report
            self.history.append(report)
            if not node:
                node = report.node
                self.sockets[node] = socket
                if node in self.orders:
                    await socket.send_str(self.orders[node].model_dump_json())
        if self.sockets.get(node) is socket:
            del self.sockets[node]
        return socket


class FakeMetadata:
    """A metadata server of either kind, with faults: `down` (503), `junk`, `hang`, tokens that are forgotten."""

    def __init__(self, flavour: str, attributes: dict[str, str], name: str = "n", address: str = "127.0.0.1") -> None:
        self.flavour, self.attributes = flavour, attributes
        self.name, self.address, self.type = name, address, "small"
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}  # GCE
        self.files: dict[str, str] = {}  # EC2: path below meta-data: text
        self.fault = ""
        self.asked = 0
        self.tokens: set[str] = set()
        self._changed = asyncio.Event()
        self._version = 1
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """host:port"""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.change()
        if self._runner is not None:
            await self._runner.cleanup()

    def change(self, **values: str) -> None:
        """New GCE values; those who wait are answered."""
        self.values |= {name.replace("_", "-"): value for name, value in values.items()}
        self._version += 1
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.fault == "hang":
            await self._changed.wait()
        if self.fault == "down":
            return web.Response(status=503)
        if self.fault == "junk":
            return web.Response(text="\x00<html>junk", headers={"Metadata-Flavor": "Google"})
        return await (self._gce(request) if self.flavour == "gce" else self._ec2(request))

    async def _gce(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        headers = {"Metadata-Flavor": "Google", "ETag": str(self._version)}
        if request.path == "/":
            return web.Response(text="computeMetadata/", headers=headers)
        path = request.path.removeprefix("/computeMetadata/v1/instance/")
        known = {
            "name": self.name,
            "zone": "projects/1/zones/zone-a",
            "/computeMetadata/v1/project/project-id": "my-project",
            "network-interfaces/0/ip": self.address,
            "id": "1234",
            "machine-type": f"projects/1/machineTypes/{self.type}",
            **{f"attributes/{key}": value for key, value in self.attributes.items()},
        }
        if path in known:
            return web.Response(text=known[path], headers=headers)
        if path not in self.values:
            return web.Response(status=404)
        if request.query.get("wait_for_change") == "true" and request.query.get("last_etag") == str(self._version):
            try:
                async with asyncio.timeout(float(request.query["timeout_sec"])):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return web.Response(text=self.values[path], headers=headers | {"ETag": str(self._version)})

    async def _ec2(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/latest/api/token":
            if request.method != "PUT" or "X-aws-ec2-metadata-token-ttl-seconds" not in request.headers:
                return web.Response(status=400)
            self.tokens.add(token := f"token{self.asked}")
            return web.Response(text=token)
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return web.Response(status=401)
        path = request.path.removeprefix("/latest/meta-data/")
        known = {
            "instance-id": "i-0123",
            "instance-type": self.type,
            "placement/availability-zone": "zone-a",
            "placement/region": "region",
            "local-ipv4": self.address,
            **{f"tags/instance/{key}": value for key, value in self.attributes.items()},
            **self.files,
        }
        return web.Response(text=known[path]) if path in known else web.Response(status=404)


def bundle_key(path: Path) -> str:
    """The sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
