"""The local cloud's metadata server answers as GCE's and EC2's do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from spotrun.cloud.local.metadata import Facts, Flavour, Subject, build
from tests.helpers import await_for

GOOGLE = {"Metadata-Flavor": "Google"}
TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"


@dataclass
class Machine:
    subject: Subject
    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        """(status, text, etag)"""
        async with self.session.get(self.url + path, headers=headers, allow_redirects=False) as answer:
            return answer.status, await answer.text(), answer.headers.get("ETag", "")

    async def gce(self, path: str) -> tuple[int, str, str]:
        return await self.get(f"/computeMetadata/v1/{path}", **GOOGLE)

    async def token(self, **headers: str) -> tuple[int, str]:
        async with self.session.put(f"{self.url}/latest/api/token", headers=headers) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def serve(flavour: Flavour) -> AsyncIterator[Machine]:
    attributes = {"spotrun-cluster": "tiny", "spotrun-pool": "a"}
    facts = Facts("a-0", "42", "local-a", "local", "small", "127.0.0.1", "spot", attributes)
    subject = Subject(facts)
    app = build(flavour, lambda address: subject if address == "127.0.0.1" else None)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            yield Machine(subject, f"http://127.0.0.1:{runner.addresses[0][1]}", session)
    finally:
        await runner.cleanup()


@pytest.fixture
async def gce() -> AsyncIterator[Machine]:
    async with serve("gce") as machine:
        yield machine


@pytest.fixture
async def ec2() -> AsyncIterator[Machine]:
    async with serve("ec2") as machine:
        yield machine


async def waiting(poll: asyncio.Task[object], again: Callable[[], Awaitable[object]]) -> None:
    """Returns once the poll's request is surely at the server: others sent after it have been answered, it has not."""
    for _ in range(5):
        await again()
    assert not poll.done()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", "a-0"),
        ("id", "42"),
        ("zone", "projects/0/zones/local-a"),
        ("machine-type", "projects/0/machineTypes/small"),
        ("hostname", "a-0.c.local.internal"),
        ("preempted", "FALSE"),
        ("maintenance-event", "NONE"),
        ("attributes/spotrun-cluster", "tiny"),
        ("network-interfaces/0/ip", "127.0.0.1"),
        ("scheduling/preemptible", "TRUE"),
    ],
)
async def test_gce_values(gce: Machine, path: str, value: str) -> None:
    status, text, etag = await gce.gce(f"instance/{path}")
    assert (status, text) == (200, value)
    assert etag


async def test_gce_wants_its_header_and_says_it(gce: Machine) -> None:
    assert (await gce.get("/computeMetadata/v1/instance/name"))[0] == 403
    assert (await gce.get("/computeMetadata/v1/instance/name", **{"Metadata-Flavor": "google"}))[0] == 403
    assert (await gce.get("/computeMetadata/v1/instance/name", **GOOGLE, **{"X-Forwarded-For": "10.0.0.1"}))[0] == 403
    async with gce.session.get(gce.url, headers=GOOGLE) as answer:
        assert answer.headers["Metadata-Flavor"] == "Google"
        assert await answer.text() == "computeMetadata/\n"
    async with gce.session.post(f"{gce.url}/computeMetadata/v1/instance/name", headers=GOOGLE) as answer:
        assert answer.status == 405


async def test_gce_folders(gce: Machine) -> None:
    assert (await gce.gce("instance/nothing"))[0] == 404
    assert (await gce.gce("instance/name/"))[0] == 404
    assert (await gce.gce("instance/attributes"))[0] == 301
    assert (await gce.gce("instance/attributes/"))[1] == "spotrun-cluster\nspotrun-pool\n"
    assert "network-interfaces/\n" in (await gce.gce("instance/"))[1]
    found = json.loads((await gce.gce("instance/?recursive=true"))[1])
    assert found["id"] == 42
    assert found["networkInterfaces"][0]["ip"] == "127.0.0.1"
    assert found["attributes"]["spotrun-cluster"] == "tiny"


async def test_gce_long_poll_wakes_on_the_change(gce: Machine) -> None:
    _, _, etag = await gce.gce("instance/preempted")
    poll = asyncio.create_task(gce.gce(f"instance/preempted?wait_for_change=true&last_etag={etag}&timeout_sec=60"))
    without = asyncio.create_task(gce.gce("instance/preempted?wait_for_change=true"))
    other = asyncio.create_task(gce.gce("instance/maintenance-event?wait_for_change=true"))
    await waiting(poll, lambda: gce.gce("instance/name"))
    gce.subject.change(terminate_at=time.time() + 30)
    status, text, changed = await poll
    assert (status, text) == (200, "TRUE")
    assert changed != etag
    assert (await without)[1] == "TRUE"
    await waiting(other, lambda: gce.gce("instance/name"))  # another value's change is not its business
    other.cancel()


async def test_gce_long_poll_answers_at_once_or_in_time(gce: Machine) -> None:
    _, _, etag = await gce.gce("instance/preempted")
    path = "instance/preempted?wait_for_change=true"
    assert (await gce.gce(f"{path}&last_etag=0"))[1:] == ("FALSE", etag)
    assert (await gce.gce(f"{path}&last_etag={etag}&timeout_sec=0"))[1:] == ("FALSE", etag)
    assert (await gce.gce(f"{path}&last_etag={etag}&timeout_sec=1"))[1:] == ("FALSE", etag)
    assert (await gce.gce(f"{path}&timeout_sec=soon"))[0] == 400


async def test_gce_long_poll_ends_with_the_machine(gce: Machine) -> None:
    poll = asyncio.create_task(gce.gce("instance/preempted?wait_for_change=true"))
    await waiting(poll, lambda: gce.gce("instance/name"))
    gce.subject.end()
    assert (await poll)[0] == 404


async def test_each_flavour_knows_only_its_own(gce: Machine, ec2: Machine) -> None:
    assert (await gce.token(**{TTL: "60"}))[0] in (403, 404)
    assert (await gce.get("/latest/meta-data/", **GOOGLE))[0] == 404
    _, token = await ec2.token(**{TTL: "60"})
    assert (await ec2.get("/computeMetadata/v1/instance/name", **{TOKEN: token}))[0] == 404
    assert "Metadata-Flavor" not in (await ec2.session.get(ec2.url, headers=GOOGLE)).headers


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("instance-id", "42"),
        ("local-ipv4", "127.0.0.1"),
        ("placement/availability-zone", "local-a"),
        ("placement/region", "local"),
        ("instance-type", "small"),
        ("instance-life-cycle", "spot"),
        ("tags/instance/spotrun-cluster", "tiny"),
        ("tags/instance/", "Name\nspotrun-cluster\nspotrun-pool"),
        ("tags", "instance/"),
    ],
)
async def test_ec2_values(ec2: Machine, path: str, value: str) -> None:
    _, token = await ec2.token(**{TTL: "60"})
    status, text, _ = await ec2.get(f"/latest/meta-data/{path}", **{TOKEN: token})
    assert (status, text) == (200, value)


@pytest.mark.parametrize("ttl", ["0", "21601", "-1", "1.5", "", "soon", "99999999999999999999"])
async def test_ec2_refuses_a_token_of_a_wrong_life(ec2: Machine, ttl: str) -> None:
    assert (await ec2.token(**{TTL: ttl}))[0] == 400


async def test_ec2_wants_a_token_that_is_valid_here(ec2: Machine) -> None:
    assert (await ec2.token())[0] == 400
    assert (await ec2.token(**{TTL: "60", "X-Forwarded-For": "10.0.0.1"}))[0] == 403
    assert (await ec2.get("/latest/api/token"))[0] == 405
    status, token = await ec2.token(**{TTL: "21600"})
    assert status == 200
    path = "/latest/meta-data/instance-id"
    assert (await ec2.get(path))[0] == 401
    for wrong in ("", "x", "-", "nan-", token + "0", "9" + token, token[:-1] + ("0" if token[-1] != "0" else "1")):
        assert (await ec2.get(path, **{TOKEN: wrong}))[0] == 401
    assert (await ec2.get(path, **{TOKEN: token}))[0] == 200
    async with serve("ec2") as another:
        assert (await another.get(path, **{TOKEN: token}))[0] == 401


async def test_ec2_token_expires(ec2: Machine) -> None:
    _, token = await ec2.token(**{TTL: "1"})

    async def refused() -> int | None:
        status = (await ec2.get("/latest/meta-data/instance-id", **{TOKEN: token}))[0]
        return status if status != 200 else None

    assert await await_for(refused, what="the token's end") == 401


async def test_ec2_notice_is_404_until_there_is_one(ec2: Machine) -> None:
    _, token = await ec2.token(**{TTL: "60"})
    paths = ["spot/instance-action", "spot/termination-time", "events/recommendations/rebalance"]
    for path in paths:
        assert (await ec2.get(f"/latest/meta-data/{path}", **{TOKEN: token}))[0] == 404
    ec2.subject.change(terminate_at=1_700_000_120.0, rebalance_at=1_700_000_000.0)
    action, end, rebalance = [(await ec2.get(f"/latest/meta-data/{path}", **{TOKEN: token}))[1] for path in paths]
    assert json.loads(action) == {"action": "terminate", "time": "2023-11-14T22:15:20Z"}
    assert end == "2023-11-14T22:15:20Z"
    assert json.loads(rebalance) == {"noticeTime": "2023-11-14T22:13:20Z"}
