"""The cloud's metadata server, which tells a machine its identity: GCE's, or EC2's version 2 (IMDSv2).

GCE: https://cloud.google.com/compute/docs/metadata/querying-metadata
EC2: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Self

import aiohttp

from spotrun.backoff import Backoff

log = logging.getLogger(__name__)

TIMEOUT = 3.0  # seconds for a whole answer
TOKEN_TTL = 21600  # seconds, the longest that IMDSv2 allows
MAX_ANSWER = 1 << 16  # bytes; a larger answer is junk
BACKOFF = (0.2, 5.0)  # seconds between tries to find the server: the first pause, the longest


@dataclass(frozen=True)
class Identity:
    """Which machine this is."""

    name: str  # of the node, as in the cloud module's list of nodes
    zone: str
    address: str
    machine: str  # the name that IAP or SSM uses
    region: str = ""
    type: str = ""  # machine type, such as g2-standard-8


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    headers: Mapping[str, str]


class Server:
    """The base of both servers: one HTTP session, and a limit on the size of answers."""

    def __init__(self, base: str) -> None:
        self.base = base.rstrip("/")
        self.ahead: float | None = None  # seconds that this clock is ahead of the server's; None: not known
        self._session = aiohttp.ClientSession(trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def _request(self, method: str, path: str, headers: dict[str, str], wait: float = 0.0) -> Answer:
        """wait: seconds that the server may take on top of `TIMEOUT`."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT + wait)
        before = time.time()
        async with self._session.request(
            method, self.base + path, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if not wait:  # a slow answer says nothing about the clock
                self.ahead = clock_ahead(response.headers.get("Date", ""), before, time.time())
            data = bytearray()
            async for chunk in response.content.iter_chunked(MAX_ANSWER):
                data += chunk
                if len(data) > MAX_ANSWER:
                    raise aiohttp.ClientPayloadError(f"{path}: more than {MAX_ANSWER} bytes")
            return Answer(response.status, data.decode(errors="replace").strip(), response.headers)


class GceMetadata(Server):
    """Google Compute Engine's server."""

    PROVIDER = "gcp"
    ROOT = "/computeMetadata/v1"

    async def answers(self) -> bool:
        """Whether GCE's server answers here."""
        answer = await self._request("GET", "/", {"Metadata-Flavor": "Google"})
        return answer.headers.get("Metadata-Flavor") == "Google"

    async def get(self, path: str, query: str = "", wait: float = 0.0) -> Answer:
        return await self._request("GET", self.ROOT + path + query, {"Metadata-Flavor": "Google"}, wait)

    async def attribute(self, key: str) -> str | None:
        """An instance attribute; None if it is not set."""
        return _value(await self.get(f"/instance/attributes/{key}"))

    async def identity(self) -> Identity:
        name, zone = await _text(self, "/instance/name"), (await _text(self, "/instance/zone")).rpartition("/")[2]
        address = await _text(self, "/instance/network-interfaces/0/ip")
        kind = (await _text(self, "/instance/machine-type")).rpartition("/")[2]
        return Identity(name, zone, address, machine=name, region=zone.rpartition("-")[0], type=kind)

    async def account(self) -> str:
        """The project's id."""
        return await _text(self, "/project/project-id")


class Ec2Metadata(Server):
    """Amazon EC2's server. The session token is renewed at half its life, and when the server refuses it."""

    PROVIDER = "aws"
    ROOT = "/latest/meta-data"
    DOCUMENT = "/latest/dynamic/instance-identity/document"

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self._token = ""
        self._renew_at = 0.0

    async def answers(self) -> bool:
        """Whether EC2's server answers here."""
        await self._renew()
        return bool(self._token)

    async def get(self, path: str) -> Answer:
        return await self._get(self.ROOT + path)

    async def _get(self, path: str) -> Answer:
        for _ in range(2):
            if time.monotonic() >= self._renew_at:
                await self._renew()
            answer = await self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._renew_at = 0.0
        return answer

    async def attribute(self, key: str) -> str | None:
        """An instance tag; None if it is not set, or if the instance does not allow tags in metadata."""
        return _value(await self.get(f"/tags/instance/{key}"))

    async def identity(self) -> Identity:
        # The machines of a scaling group share one Name. Only the instance's id is unique.
        instance = await _text(self, "/instance-id")
        zone, region = await _text(self, "/placement/availability-zone"), await _text(self, "/placement/region")
        address, kind = await _text(self, "/local-ipv4"), await _text(self, "/instance-type")
        return Identity(instance, zone, address, machine=instance, region=region, type=kind)

    async def account(self) -> str:
        """The account's id."""
        text = _value(await self._get(self.DOCUMENT))
        try:
            return str(json.loads(text or "")["accountId"])
        except (ValueError, KeyError, TypeError):
            raise aiohttp.ClientPayloadError(f"{self.DOCUMENT} has no accountId") from None

    async def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL)}
        answer = await self._request("PUT", "/latest/api/token", headers)
        if answer.status != 200 or not answer.text.isprintable():
            raise aiohttp.ClientPayloadError(f"no metadata token: status {answer.status}")
        self._token, self._renew_at = answer.text, time.monotonic() + TOKEN_TTL / 2


Metadata = GceMetadata | Ec2Metadata


async def detect() -> Metadata:
    """Wait until a server answers, and return it. The network may come up after the agent.

    GCE_METADATA_HOST (host:port) and AWS_EC2_METADATA_SERVICE_ENDPOINT (URL) name other places for the two servers. If
    only one variable is set, only that cloud's server is tried.
    """
    gce, ec2 = os.environ.get("GCE_METADATA_HOST", ""), os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")
    if not gce and not ec2:
        gce, ec2 = "metadata.google.internal", "http://169.254.169.254/"
    backoff = Backoff(*BACKOFF)
    while True:
        candidates: list[Metadata] = [GceMetadata(f"http://{gce}")] if gce else []
        candidates += [Ec2Metadata(ec2)] if ec2 else []
        results = await asyncio.gather(*(each.answers() for each in candidates), return_exceptions=True)
        chosen = next((each for each, result in zip(candidates, results, strict=True) if result is True), None)
        for each in candidates:
            if each is not chosen:
                await each.close()
        if chosen is not None:
            return chosen
        places = " and ".join(filter(None, [gce, ec2]))
        log.warning("no metadata server answers at %s; trying again: %s", places, "; ".join(map(repr, results)))
        await asyncio.sleep(backoff.next())


def clock_ahead(date: str, before: float, after: float) -> float | None:
    """Seconds that this clock is ahead of the Date of an HTTP answer; negative: it is behind; None: no valid Date.

    The server made the Date between `before`, when the request was sent, and `after`, when the answer came. A Date has
    whole seconds, rounded down (RFC 9110, 5.6.7). Of the differences that fit, the one closest to 0 is returned.
    """
    try:
        there = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    low, high = before - (there + 1), after - there
    return low if low > 0 else high if high < 0 else 0.0


def _value(answer: Answer) -> str | None:
    if answer.status == 200:
        return answer.text
    if answer.status == 404:
        return None
    raise aiohttp.ClientPayloadError(f"metadata: status {answer.status}")


async def _text(server: Metadata, path: str) -> str:
    """A value that every machine has."""
    value = _value(await server.get(path))
    if not value:
        raise aiohttp.ClientPayloadError(f"metadata has no {path}")
    return value
