"""Who is let in at the head's door: a table of the decision, and real connections to a real door."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from spotrun.cloud.base import Instance
from spotrun.head.server import agent_server
from spotrun.head.server.admission import Visitor, decide
from spotrun.store import head_key, host_key
from spotrun.wire import NODE_HEADER, REFUSAL_HEADER, HeadRecord, HostRecord, Report, hash_of
from tests.fakes.head import certificate
from tests.head.world import World
from tests.helpers import await_for

SPOT = Instance("spot-0", "p", "z", "10.0.0.4", "running", "spot", 1.0, "1")
OTHER = replace(SPOT, name="spot-1", address="10.0.0.5")
NEW = replace(SPOT, name="spot-2", address="", state="provisioning")
GOOD = Visitor("spot-0", "secret", "10.0.0.4")


@pytest.mark.parametrize(
    ("visitor", "listed", "digest", "said"),
    [
        pytest.param(GOOD, [SPOT], hash_of("secret"), None, id="a node"),
        pytest.param(replace(GOOD, peer="::ffff:10.0.0.4"), [SPOT], hash_of("secret"), None, id="IPv4 as IPv6"),
        pytest.param(GOOD, [OTHER, SPOT], hash_of("secret"), None, id="one of several"),
        pytest.param(GOOD, [SPOT], hash_of("other"), (401, "read", "wrong token"), id="wrong token"),
        pytest.param(GOOD, [SPOT], "", (401, "read", "no record with its token"), id="no record"),
        pytest.param(GOOD, [SPOT], "\u00fc", (401, "read", "wrong token"), id="junk in the record"),
        pytest.param(GOOD, [SPOT], None, (503, "read", "not been read yet"), id="record not read yet"),
        pytest.param(replace(GOOD, token=""), [SPOT], "", (401, "read", "no record"), id="nothing is no token"),
        pytest.param(GOOD, None, hash_of("secret"), (503, "look", "not told yet"), id="cloud not asked yet"),
        pytest.param(GOOD, [], hash_of("secret"), (403, "look", "lists no such machine"), id="no machine"),
        pytest.param(GOOD, [OTHER], hash_of("secret"), (403, "look", "lists no such machine"), id="not this machine"),
        pytest.param(
            replace(GOOD, peer="10.0.0.5"), [SPOT, OTHER], hash_of("secret"), (403, "look", "lists 10.0.0.4"),
            id="from another node's address",
        ),
        pytest.param(
            replace(GOOD, node="spot-2", peer=""), [NEW], hash_of("secret"), (403, "look", "no address yet"),
            id="no address yet",
        ),
        pytest.param(replace(GOOD, node=""), [SPOT], hash_of("secret"), (401, "", "older than this head"), id="older"),
        pytest.param(
            replace(GOOD, node="../spot-0"), [SPOT], hash_of("secret"), (401, "", "no node's name"), id="a path"
        ),
    ],
)  # fmt: skip
def test_decide(
    visitor: Visitor, listed: list[Instance] | None, digest: str, said: tuple[int, str, str] | None
) -> None:
    found = decide(visitor, listed, digest)
    if said is None or found is None:
        assert (found, said) == (None, None)
        return
    assert (found.status, found.cure) == said[:2]
    assert said[2] in found.reason


def publish(world: World, node: str, secret: str) -> None:
    record = HostRecord(node=node, address="127.0.0.1", port=22, keys=(), token_sha256=hash_of(secret))
    world.store.put(host_key("c", node), record.model_dump_json().encode())


class Street:
    """In front of a door."""

    def __init__(self, world: World, port: int) -> None:
        self.world, self.port = world, port

    async def knock(self, node: str, token: str, address: str = "127.0.0.1", about: str = "") -> tuple[int, str]:
        """(101, "") once the head has this node's report; else the status, and why. about: of whom it reports."""
        report = Report(node=about or node, boot="b", pool="p", zone="z", address=address)
        headers = {"Authorization": f"Bearer {token}", **({NODE_HEADER: node} if node else {})}
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connector = aiohttp.TCPConnector(local_addr=(address, 0))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"wss://127.0.0.1:{self.port}/agent"
            try:
                async with session.ws_connect(url, headers=headers, ssl=context) as link:
                    if about:
                        for _ in range(agent_server.BAD_MESSAGES):
                            await link.send_str(report.model_dump_json())
                        while not link.closed:
                            await link.receive()
                        return link.close_code or 0, ""
                    await link.send_str(report.model_dump_json())
                    await await_for(lambda: node in self.world.head.agents.known, what="the report")
                    return 101, ""
            except aiohttp.WSServerHandshakeError as error:
                return error.status, str((error.headers or {}).get(REFUSAL_HEADER, ""))

    def told(self) -> list[str]:
        return [event["text"] for event in self.world.head.events if event["kind"] == "refused"]


@asynccontextmanager
async def street(root: Path) -> AsyncIterator[Street]:
    """A door behind which a head looks at a cloud with machines p-0 and p-1, at 127.0.0.1."""
    world = World(root)
    world.cloud.size["p"] = 2
    context, _ = certificate()
    runner = web.AppRunner(agent_server.Door(world.head).app(), shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    watching = asyncio.create_task(world.head.watch_cloud())
    try:
        yield Street(world, runner.addresses[0][1])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here is on the way for long; reads and looks are as often as they are asked for."""
    for name, value in (("PATIENCE", 1.0), ("LOOK_EVERY", 0.0), ("READ_EVERY", 0.0)):
        monkeypatch.setattr(agent_server, name, value)


async def test_a_node_is_let_in(tmp_path: Path) -> None:
    async with street(tmp_path) as s:
        publish(s.world, "p-0", "secret")
        assert await s.knock("p-0", "secret") == (101, "")
        assert s.told() == []


@pytest.mark.parametrize(
    ("visit", "status", "reason"),
    [
        pytest.param({"node": "p-0", "token": "wrong"}, 401, "wrong token", id="wrong token"),
        pytest.param({"node": "p-0", "token": ""}, 401, "wrong token", id="no token"),
        pytest.param({"node": "p-1", "token": "secret"}, 401, "no record with its token", id="another node's token"),
        pytest.param({"node": "p-0", "token": "secret", "address": "127.0.0.9"}, 403, "lists 127.0.0.1", id="address"),
        pytest.param({"node": "p-7", "token": "secret"}, 403, "no such machine", id="no such machine"),
        pytest.param({"node": "", "token": "secret"}, 401, "older than this head", id="an agent of before"),
        pytest.param({"node": "../hosts/p-0", "token": "secret"}, 401, "no node's name", id="a path for a name"),
    ],
)
async def test_a_stranger_is_refused(tmp_path: Path, visit: dict[str, str], status: int, reason: str) -> None:
    async with street(tmp_path) as s:
        publish(s.world, "p-0", "secret")
        found = await s.knock(**visit)
        assert found[0] == status
        assert reason in found[1]
        assert s.world.head.agents.known == {}
        (told,) = s.told()
        assert reason in told


async def test_what_is_in_head_json_opens_nothing(tmp_path: Path) -> None:
    """A local user could read it, and joined as a node with the token in it."""
    record = HeadRecord(epoch=1, address="127.0.0.1", port=1, fingerprint="0" * 64)
    async with street(tmp_path) as s:
        s.world.store.put(head_key("c"), record.model_dump_json().encode())
        publish(s.world, "p-0", "secret")
        seen = (s.world.store.get(head_key("c")), s.world.store.get(host_key("c", "p-0")))
        assert not any(b"secret" in each for each in seen)
        assert (await s.knock("p-0", record.token))[0] == 401
        assert (await s.knock("p-0", hash_of("secret")))[0] == 401, "the hash is not the secret"


async def test_a_node_speaks_of_itself_only(tmp_path: Path) -> None:
    async with street(tmp_path) as s:
        publish(s.world, "p-0", "secret")
        assert await s.knock("p-0", "secret", about="p-1") == (1008, "")
        assert s.world.head.agents.known == {}


async def test_an_agent_that_starts_again_has_another_secret(tmp_path: Path) -> None:
    async with street(tmp_path) as s:
        for secret in ("first", "second"):
            publish(s.world, "p-0", secret)
            assert await s.knock("p-0", secret) == (101, "")
        assert (await s.knock("p-0", "first"))[0] == 401


async def test_a_junk_record_lets_nobody_in(tmp_path: Path) -> None:
    async with street(tmp_path) as s:
        s.world.store.put(host_key("c", "p-0"), b'{"token_sha256": 3}')
        assert (await s.knock("p-0", ""))[0] == 401
        publish(s.world, "p-0", "secret")
        assert await s.knock("p-0", "secret") == (101, "")


async def test_a_machine_that_the_cloud_has_not_told_of_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The door has the head look, and opens when the cloud lists the machine."""
    monkeypatch.setattr(agent_server, "PATIENCE", 60.0)
    monkeypatch.setattr(agent_server, "LOOK_EVERY", 0.05)
    async with street(tmp_path) as s:
        publish(s.world, "p-3", "secret")
        await await_for(lambda: s.world.head.fleet.last_list, what="a look")
        knocking = asyncio.create_task(s.knock("p-3", "secret"))
        looks: list[Any] = []
        while len(looks) < 3:
            async with s.world.head.fleet.looked:
                await s.world.head.fleet.looked.wait()
            looks.append(knocking.done())
        assert not any(looks)
        s.world.cloud.size["p"] = 4
        assert await knocking == (101, "")


async def test_a_cloud_that_never_answered_opens_nothing(tmp_path: Path) -> None:
    async with street(tmp_path) as s:
        s.world.cloud.out["p"] = "zone is out"
        s.world.head.fleet.last_list = None
        publish(s.world, "p-0", "secret")
        status, reason = await s.knock("p-0", "secret")
        assert status in (403, 503)
        assert reason


async def test_a_cloud_that_does_not_answer_any_more_changes_nothing(tmp_path: Path) -> None:
    """A node whose link broke comes back while the cloud is away."""
    async with street(tmp_path) as s:
        publish(s.world, "p-0", "secret")
        assert await s.knock("p-0", "secret") == (101, "")
        s.world.cloud.out.update(p="zone is out", q="zone is out")
        await s.world.head.fleet.look()
        assert await s.knock("p-0", "secret") == (101, "")


async def test_refusals_are_told_but_not_without_end(tmp_path: Path) -> None:
    async with street(tmp_path) as s:
        publish(s.world, "p-0", "secret")
        for _ in range(3):
            await s.knock("p-0", "wrong")
        assert s.told() == ["p-0 from 127.0.0.1: wrong token"]
        await asyncio.gather(*(s.knock("", "x", f"127.0.0.{host}") for host in range(10, 40)))
        assert len(s.told()) == agent_server.SAY_AT_MOST
