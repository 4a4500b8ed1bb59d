"""The cloud's metadata server, which tells a machine who it is: GCE's, or EC2's in its second version (IMDSv2).

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
from types import TracebackType
from typing import Self

import aiohttp

from spotrun.backoff import Backoff

log = logging.getLogger(__name__)

TIMEOUT = 3.0  # seconds for a whole answer
TOKEN_TTL = 21600  # seconds, the longest that IMDSv2 allows
MAX_ANSWER = 1 << 16  # bytes; more is junk
BACKOFF = (0.2, 5.0)  # seconds between tries to find the server: the first pause, the longest


@dataclass(frozen=True)
class Identity:
    """Which machine this is. `name` is what the cloud module's list of nodes calls it.

    machine: what the cloud's own way in (IAP, SSM) knows it by. type: its machine type, such as g2-standard-8.
    """

    name: str
    zone: str
    address: str
    machine: str
    region: str = ""
    type: str = ""


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    etag: str = ""


class Server:
    """What both kinds share: one HTTP session, answers of bounded size.

    ahead: seconds that this machine's clock is ahead of the server's, as of the last answer; None if it does not say.
    """

    def __init__(self, base: str) -> None:
        self.base = base.rstrip("/")
        self.ahead: float | None = None
        self._session = aiohttp.ClientSession(trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def _request(
        self, method: str, path: str, headers: dict[str, str], wait: float = 0.0
    ) -> tuple[Answer, Mapping[str, str]]:
        """`wait`: seconds that the server may take beyond the usual."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT + wait)
        before = time.time()
        async with self._session.request(
            method, self.base + path, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if not wait:  # of an answer that was long in coming nothing follows
                self.ahead = clock_ahead(response.headers.get("Date", ""), before, time.time())
            data = bytearray()
            async for chunk in response.content.iter_chunked(MAX_ANSWER):
                data += chunk
                if len(data) > MAX_ANSWER:
                    raise aiohttp.ClientPayloadError(f"{path}: more than {MAX_ANSWER} bytes")
            text = data.decode(errors="replace").strip()
            return Answer(response.status, text, response.headers.get("ETag", "")), response.headers


class GceMetadata(Server):
    """Google Compute Engine's."""

    PROVIDER = "gcp"
    ROOT = "/computeMetadata/v1"

    async def answers(self) -> bool:
        """Whether this is such a server."""
        _, headers = await self._request("GET", "/", {"Metadata-Flavor": "Google"})
        return headers.get("Metadata-Flavor") == "Google"

    async def get(self, path: str, query: str = "", wait: float = 0.0) -> Answer:
        answer, _ = await self._request("GET", self.ROOT + path + query, {"Metadata-Flavor": "Google"}, wait)
        return answer

    async def attribute(self, key: str) -> str | None:
        """An instance attribute; None if it is not set."""
        return _value(await self.get(f"/instance/attributes/{key}"))

    async def identity(self) -> Identity:
        async def text(path: str) -> str:
            return _need(path, await self.get(path))

        name, zone = await text("/instance/name"), (await text("/instance/zone")).rpartition("/")[2]
        address = await text("/instance/network-interfaces/0/ip")
        kind = (await text("/instance/machine-type")).rpartition("/")[2]
        return Identity(name, zone, address, machine=name, region=zone.rpartition("-")[0], type=kind)

    async def account(self) -> str:
        """The project's id."""
        return _need("/project/project-id", await self.get("/project/project-id"))


class Ec2Metadata(Server):
    """Amazon EC2's. A session token is fetched when needed and renewed at half its life, or when it is refused."""

    PROVIDER = "aws"
    ROOT = "/latest/meta-data"
    DOCUMENT = "/latest/dynamic/instance-identity/document"

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self._token = ""
        self._renew_at = 0.0

    async def answers(self) -> bool:
        """Whether this is such a server."""
        await self._renew()
        return bool(self._token)

    async def get(self, path: str) -> Answer:
        return await self._get(self.ROOT + path)

    async def _get(self, path: str) -> Answer:
        for _ in range(2):
            if time.monotonic() >= self._renew_at:
                await self._renew()
            answer, _headers = await self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._renew_at = 0.0
        return answer

    async def attribute(self, key: str) -> str | None:
        """An instance tag; None if it is not set, or tags are not allowed in metadata."""
        return _value(await self.get(f"/tags/instance/{key}"))

    async def identity(self) -> Identity:
        async def text(path: str) -> str:
            return _need(path, await self.get(path))

        instance = await text("/instance-id")
        zone, region = await text("/placement/availability-zone"), await text("/placement/region")
        # Every machine of a scaling group carries the same Name: the instance's id is what tells them apart.
        address, kind = await text("/local-ipv4"), await text("/instance-type")
        return Identity(instance, zone, address, machine=instance, region=region, type=kind)

    async def account(self) -> str:
        """The account's id."""
        text = _need(self.DOCUMENT, await self._get(self.DOCUMENT))
        try:
            return str(json.loads(text)["accountId"])
        except (ValueError, KeyError, TypeError):
            raise aiohttp.ClientPayloadError(f"{self.DOCUMENT} does not tell the account") from None

    async def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL)}
        answer, _ = await self._request("PUT", "/latest/api/token", headers)
        if answer.status != 200 or not answer.text.isprintable():
            raise aiohttp.ClientPayloadError(f"no metadata token: status {answer.status}")
        self._token, self._renew_at = answer.text, time.monotonic() + TOKEN_TTL / 2


Metadata = GceMetadata | Ec2Metadata


async def detect() -> Metadata:
    """The server that answers here; waits until one does (the network may come up after the agent).

    The variables GCE_METADATA_HOST (host:port) and AWS_EC2_METADATA_SERVICE_ENDPOINT (URL) move them, and if one alone
    is set, the other cloud's server is not looked for.
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
    """Seconds that this clock is surely ahead of the one in an HTTP answer's Date, negative: behind; None without one.

    before, after: when the request was sent and the answer came. A Date is whole seconds, cut off (RFC 9110, 5.6.7).
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


def _need(path: str, answer: Answer) -> str:
    value = _value(answer)
    if not value:
        raise aiohttp.ClientPayloadError(f"metadata has no {path}")
    return value
