"""The metadata servers of GCE and of EC2 (IMDSv2), with their own paths and rules.

https://cloud.google.com/compute/docs/metadata/querying-metadata
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html

One application serves all machines: the local address of a request tells which machine asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from aiohttp import web

from spotrun.cloud.base import Market

Flavour = Literal["gce", "ec2"]
Tree: TypeAlias = "dict[str, str | Tree]"
_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_LONGEST_TTL = 21600


@dataclass(frozen=True)
class Facts:
    """What a machine's metadata say."""

    name: str  # the machine's name
    id: str  # its id
    zone: str  # its zone
    region: str  # its region
    machine: str  # its machine type
    address: str  # its IP address
    market: Market  # spot or on-demand
    attributes: Mapping[str, str] = field(default_factory=dict)  # attributes on GCE, tags on EC2
    terminate_at: float | None = None  # epoch seconds when the machine ends, once there is a notice
    rebalance_at: float | None = None  # epoch seconds of EC2's rebalance recommendation, once there is one
    account: str = ""  # The id of the project or account. Default: an id that no real one has.


class Subject:
    """A machine's facts, which change."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.gone = False
        self._changed = asyncio.Event()

    def change(self, **values: Any) -> None:
        self.facts = replace(self.facts, **values)
        self._wake()

    def end(self) -> None:
        """The machine is gone: wake every waiting request."""
        self.gone = True
        self._wake()

    async def wait(self, until: float) -> bool:
        """Whether something changed before `until` (the loop's time)."""
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        before, self._changed = self._changed, asyncio.Event()
        before.set()


def build(flavour: Flavour, find: Callable[[str], Subject | None]) -> web.Application:
    """The server. `find` gives the machine at an address."""
    app = web.Application(client_max_size=1024)
    secret = secrets.token_bytes(32)

    async def answer(request: web.Request) -> web.StreamResponse:
        local = request.transport.get_extra_info("sockname") if request.transport else None
        subject = find(local[0]) if local else None
        if subject is None:
            return web.Response(status=404, text="there is no machine at this address\n")
        return await (_gce(request, subject) if flavour == "gce" else _ec2(request, subject, secret))

    app.router.add_route("*", "/{path:.*}", answer)
    return app


def gce_tree(facts: Facts) -> Tree:
    """Everything below /computeMetadata/v1/."""
    instance: Tree = {
        "attributes": dict(facts.attributes),
        "hostname": f"{facts.name}.c.local.internal",
        "id": facts.id,
        "machine-type": f"projects/0/machineTypes/{facts.machine}",
        "maintenance-event": "NONE",  # only `preempted` announces a spot machine's end
        "name": facts.name,
        "network-interfaces": {"0": {"ip": facts.address, "network": "projects/0/networks/default"}},
        "preempted": "TRUE" if facts.terminate_at is not None else "FALSE",
        "scheduling": {
            "automatic-restart": "FALSE" if facts.market == "spot" else "TRUE",
            "on-host-maintenance": "TERMINATE",
            "preemptible": "TRUE" if facts.market == "spot" else "FALSE",
        },
        "zone": f"projects/0/zones/{facts.zone}",
    }
    return {
        "instance": instance,
        "project": {"attributes": {}, "numeric-project-id": "0", "project-id": facts.account or "local"},
    }


def ec2_tree(facts: Facts) -> Tree:
    """Everything below /latest/."""
    tags: Tree = {"Name": facts.name, **facts.attributes}
    data: Tree = {
        "hostname": f"{facts.name}.local.internal",
        "instance-id": facts.id,
        "instance-life-cycle": facts.market,
        "instance-type": facts.machine,
        "local-hostname": f"{facts.name}.local.internal",
        "local-ipv4": facts.address,
        "placement": {"availability-zone": facts.zone, "region": facts.region},
        "tags": {"instance": tags},
    }
    if facts.terminate_at is not None:
        at = _utc(facts.terminate_at)
        data["spot"] = {"instance-action": json.dumps({"action": "terminate", "time": at}), "termination-time": at}
    if facts.rebalance_at is not None:
        data["events"] = {"recommendations": {"rebalance": json.dumps({"noticeTime": _utc(facts.rebalance_at)})}}
    document = {
        "accountId": facts.account or "000000000000",
        "availabilityZone": facts.zone,
        "instanceId": facts.id,
        "instanceType": facts.machine,
        "privateIp": facts.address,
        "region": facts.region,
    }
    return {"dynamic": {"instance-identity": {"document": json.dumps(document, indent=2)}}, "meta-data": data}


async def _gce(request: web.Request, subject: Subject) -> web.StreamResponse:
    if "X-Forwarded-For" in request.headers:
        return _refuse_gce(403, "forwarded requests are refused")
    if request.headers.get("Metadata-Flavor") != "Google":
        return _refuse_gce(403, "missing the header Metadata-Flavor: Google")
    if request.method not in ("GET", "HEAD"):
        return _refuse_gce(405, f"{request.method} is not allowed")
    if request.path == "/":
        return _gce_answer("computeMetadata/\n")
    if request.path == "/computeMetadata/v1":
        return _redirect(request)
    if not request.path.startswith("/computeMetadata/v1/"):
        return _refuse_gce(404, f"{request.path} is not there")
    path = request.path.removeprefix("/computeMetadata/v1/")
    query = request.query
    wait, known = query.get("wait_for_change", "false").lower() == "true", query.get("last_etag")
    timeout = query.get("timeout_sec", "")
    if timeout and not timeout.isdecimal():
        return _refuse_gce(400, f"timeout_sec: {timeout!r} is not a whole number")
    until = asyncio.get_running_loop().time() + (float(timeout) if timeout else float("inf"))
    while True:
        value = _look(gce_tree(subject.facts), path)
        if value is None or subject.gone:
            return _refuse_gce(404, f"{request.path} is not there")
        if isinstance(value, dict) and not request.path.endswith("/"):
            return _redirect(request)
        text, kind = _gce_text(value, query)
        etag = hashlib.sha256(text.encode()).hexdigest()[:16]
        known = etag if known is None else known
        if not wait or etag != known or not await subject.wait(until):
            return _gce_answer(text, etag, kind)


def _gce_text(value: str | Tree, query: Mapping[str, str]) -> tuple[str, str]:
    """(body, content type) of a value or a folder."""
    if isinstance(value, dict) and query.get("recursive", "").lower() == "true":
        return json.dumps(_camel(value)), "application/json"
    if isinstance(value, dict):
        names = (f"{name}/\n" if isinstance(item, dict) else f"{name}\n" for name, item in value.items())
        return "".join(names), "application/text"
    if query.get("alt") == "json":
        return json.dumps(value), "application/json"
    return value, "application/text"


def _gce_answer(text: str, etag: str = "", kind: str = "application/text") -> web.Response:
    headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM", "Content-Type": kind}
    return web.Response(body=text.encode(), headers=headers | ({"ETag": etag} if etag else {}))


def _refuse_gce(status: int, message: str) -> web.Response:
    headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
    return web.Response(status=status, text=f"Error {status}: {message}\n", headers=headers)


def _redirect(request: web.Request) -> web.Response:
    query = f"?{request.query_string}" if request.query_string else ""
    return web.Response(status=301, headers={"Location": f"{request.path}/{query}", "Metadata-Flavor": "Google"})


def _camel(tree: Tree) -> Any:
    """As in GCE's JSON: names in camel case, except in attributes; numbered folders as lists."""
    if tree and all(name.isdecimal() for name in tree):
        return [_camel(item) if isinstance(item, dict) else item for item in tree.values()]
    found: dict[str, Any] = {}
    for name, item in tree.items():
        first, *rest = name.split("-")
        key = first + "".join(word.title() for word in rest)
        if isinstance(item, dict):
            found[key] = dict(item) if name == "attributes" else _camel(item)
        else:
            found[key] = int(item) if name == "id" and item.isdecimal() else item
    return found


async def _ec2(request: web.Request, subject: Subject, secret: bytes) -> web.StreamResponse:
    if request.path == "/latest/api/token":
        return _grant(request, subject, secret)
    if request.method not in ("GET", "HEAD"):
        return web.Response(status=405)
    if not _valid(request.headers.get("X-aws-ec2-metadata-token", ""), subject, secret):
        return web.Response(status=401, headers={"Server": "EC2ws"})
    root, _, path = request.path.lstrip("/").partition("/")
    value = _look(ec2_tree(subject.facts), path) if root == "latest" else None
    if value is None or subject.gone:
        return web.Response(status=404, headers={"Server": "EC2ws"})
    if isinstance(value, dict):
        value = "\n".join(f"{name}/" if isinstance(item, dict) else name for name, item in value.items())
    return web.Response(text=value, headers={"Server": "EC2ws"})


def _grant(request: web.Request, subject: Subject, secret: bytes) -> web.Response:
    """A session token: its expiry time, signed for this machine."""
    if request.method != "PUT":
        return web.Response(status=405, headers={"Allow": "OPTIONS, PUT"})
    if "X-Forwarded-For" in request.headers:
        return web.Response(status=403)
    ttl = request.headers.get(_TTL, "")
    if not (ttl.isdecimal() and len(ttl) < 9 and 1 <= int(ttl) <= _LONGEST_TTL):
        return web.Response(status=400, text=f"{_TTL}: {ttl!r} is not a whole number from 1 to {_LONGEST_TTL}\n")
    end = f"{time.time() + int(ttl):.3f}"
    return web.Response(text=f"{end}-{_sign(end, subject, secret)}", headers={_TTL: ttl, "Server": "EC2ws"})


def _valid(token: str, subject: Subject, secret: bytes) -> bool:
    end, _, signature = token.partition("-")
    genuine = hmac.compare_digest(signature.encode(errors="surrogateescape"), _sign(end, subject, secret).encode())
    return genuine and float(end) > time.time()


def _sign(end: str, subject: Subject, secret: bytes) -> str:
    return hmac.new(secret, f"{subject.facts.id} {end}".encode(errors="surrogateescape"), hashlib.sha256).hexdigest()


def _look(tree: Tree, path: str) -> str | Tree | None:
    """The value or folder at a path. A value has no slash after it."""
    found: str | Tree = tree
    for part in filter(None, path.split("/")):  # Google's own guest agent asks for `v1//instance/…`
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return None if isinstance(found, str) and path.endswith("/") else found


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
