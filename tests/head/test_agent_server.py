"""Which agents may connect to the head: a table of decisions, and real connections to a real server."""

from __future__ import annotations

import asyncio
import functools
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
from spotrun.head.server import agent_server, certificate
from spotrun.head.server.admission import Caller, decide
from spotrun.machine.metadata import Identity
from spotrun.node.connection import Connection
from spotrun.store import head_key, host_key
from spotrun.wire import (
    NODE_HEADER,
    REFUSAL_HEADER,
    Bundle,
    Generation,
    HeadRecord,
    HostRecord,
    JobOrder,
    Member,
    Order,
    Report,
    hash_of,
)
from tests.head.world import World
from tests.helpers import await_for

SPOT = Instance("spot-0", "p", "z", "10.0.0.4", "running", "spot", 1.0, "1")
OTHER = replace(SPOT, name="spot-1", address="10.0.0.5")
NEW = replace(SPOT, name="spot-2", address="", state="provisioning")
GOOD = Caller("spot-0", "secret", "10.0.0.4")


HASH = hash_of("secret")
DECISIONS: dict[str, tuple[Caller, list[Instance] | None, str | None, tuple[int, str, str] | None]] = {
    "right address and token": (GOOD, [SPOT], HASH, None),
    "IPv4 address written as IPv6": (replace(GOOD, address="::ffff:10.0.0.4"), [SPOT], HASH, None),
    "one of several machines": (GOOD, [OTHER, SPOT], HASH, None),
    "wrong secret": (GOOD, [SPOT], hash_of("other"), (401, "record", "wrong secret")),
    "record without a secret": (GOOD, [SPOT], "", (401, "record", "no record with the node's secret")),
    "hash that is not ASCII": (GOOD, [SPOT], "\u00fc", (401, "record", "wrong secret")),
    "record not read yet": (GOOD, [SPOT], None, (503, "record", "not been read yet")),
    "empty secret": (replace(GOOD, secret=""), [SPOT], "", (401, "record", "no record")),
    "cloud not asked yet": (GOOD, None, HASH, (503, "machines", "not listed its machines yet")),
    "no machine at all": (GOOD, [], HASH, (403, "machines", "lists no such machine")),
    "only another machine": (GOOD, [OTHER], HASH, (403, "machines", "lists no such machine")),
    "another node's address": (
        replace(GOOD, address="10.0.0.5"), [SPOT, OTHER], HASH, (403, "machines", "lists 10.0.0.4"),
    ),
    "machine without an address yet": (
        replace(GOOD, node="spot-2", address=""), [NEW], HASH, (403, "machines", "no address yet"),
    ),
    "no name of a node": (replace(GOOD, node=""), [SPOT], HASH, (401, "", "older than this head")),
    "path instead of a name": (replace(GOOD, node="../spot-0"), [SPOT], HASH, (401, "", "not a node's name")),
}  # fmt: skip


@pytest.mark.parametrize(("caller", "listed", "secret_hash", "said"), DECISIONS.values(), ids=DECISIONS.keys())
def test_decide(
    caller: Caller, listed: list[Instance] | None, secret_hash: str | None, said: tuple[int, str, str] | None
) -> None:
    found = decide(caller, listed, secret_hash)
    if said is None or found is None:
        assert (found, said) == (None, None)
        return
    assert (found.status, found.refresh) == said[:2]
    assert said[2] in found.reason


def publish(world: World, node: str, secret: str) -> None:
    record = HostRecord(node=node, address="127.0.0.1", port=22, keys=(), token_sha256=hash_of(secret))
    world.store.put(host_key("c", node), record.model_dump_json().encode())


class Client:
    """Connects to the server of a head as agents do."""

    def __init__(self, world: World, port: int, fingerprint: str) -> None:
        self.world, self.port, self.fingerprint = world, port, fingerprint

    async def connect(self, node: str, token: str, address: str = "127.0.0.1", about: str = "") -> tuple[int, str]:
        """(101, "") once the head has this node's report; else the HTTP status and the reason.

        about: the node that the report names, if it is another one.
        """
        report = Report(node=about or node, boot="b", pool="p", zone="z", address=address)
        headers = {"Authorization": f"Bearer {token}", **({NODE_HEADER: node} if node else {})}
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connector = aiohttp.TCPConnector(local_addr=(address, 0))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"wss://127.0.0.1:{self.port}/agent"
            try:
                async with session.ws_connect(url, headers=headers, ssl=context) as connection:
                    if about:
                        for _ in range(agent_server.BAD_MESSAGES):
                            await connection.send_str(report.model_dump_json())
                        while not connection.closed:
                            await connection.receive()
                        return connection.close_code or 0, ""
                    await connection.send_str(report.model_dump_json())
                    await await_for(lambda: node in self.world.head.agents.known, what="the report")
                    return 101, ""
            except aiohttp.WSServerHandshakeError as error:
                return error.status, error.headers.get(REFUSAL_HEADER, "") if error.headers else ""

    def refusals(self) -> list[str]:
        return [event["text"] for event in self.world.events() if event["kind"] == "refused"]


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[Client]:
    """The server of a head whose cloud lists the machines p-0 and p-1, at 127.0.0.1."""
    world = World(root)
    world.cloud.size["p"] = 2
    context, fingerprint = certificate.create()
    runner = web.AppRunner(agent_server.AgentServer(world.head).app(), shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    watching = asyncio.create_task(world.head.scaler.run())
    try:
        yield Client(world, runner.addresses[0][1], fingerprint)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait a second for a list; reads and lists may follow at once."""
    for name, value in (("PATIENCE", 1.0), ("LOOK_EVERY", 0.0), ("READ_EVERY", 0.0)):
        monkeypatch.setattr(agent_server, name, value)


async def test_a_node_connects(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        publish(client.world, "p-0", "secret")
        assert await client.connect("p-0", "secret") == (101, "")
        assert client.refusals() == []


async def test_orders_come_as_differences_until_the_connection_is_lost(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        world, orders = client.world, list[Order]()
        record = HeadRecord(epoch=1, address="127.0.0.1", port=client.port, fingerprint=client.fingerprint)
        world.store.put(head_key("c"), record.model_dump_json().encode())
        agent = Connection(world.store, "c", Identity("p-0", "z", "127.0.0.1", "p-0"), orders.append)
        agent.publish(Report(node="p-0", boot="b", pool="p", zone="z", address="127.0.0.1"))
        generation = Generation(number=1, members=(Member(node="p-0", boot="b", address="h"),), store="h:1")
        order = JobOrder(bundle=Bundle(id="j", code="c", job={}), generation=generation)

        def told(stop_at: int) -> Order | None:
            """The order with this stop step, once the head knows that the agent has it."""
            known = world.head.agents.known.get("p-0")
            if known is None or known.send is None:
                return None
            if orders and orders[-1].jobs[0].stop_at == stop_at:
                return orders[-1] if known.report.order == orders[-1].number else None
            if known.sent is None:
                known.sent = Order(epoch=1, jobs=(order.replace(stop_at=stop_at),))
                known.send(known.sent)
            return None

        for stop_at in (1, 2):
            running = asyncio.create_task(agent.run())
            first = await await_for(functools.partial(told, stop_at), what="a whole order")
            world.head.agents.known["p-0"].sent = None
            second = await await_for(functools.partial(told, stop_at + 10), what="a difference")
            assert first
            assert second
            assert second.jobs[0].generation == generation
            assert second.jobs[0].generation is first.jobs[0].generation, "it was not sent again"
            assert first.number == 1, "the first order of a connection is a whole one"
            running.cancel()
            await asyncio.wait([running])
            await await_for(lambda: world.head.agents.known["p-0"].send is None, what="the end of the connection")


REFUSALS = {
    "wrong secret": ({"node": "p-0", "token": "wrong"}, 401, "wrong secret"),
    "no secret": ({"node": "p-0", "token": ""}, 401, "wrong secret"),
    "another node's secret": ({"node": "p-1", "token": "secret"}, 401, "no record with the node's secret"),
    "another address": ({"node": "p-0", "token": "secret", "address": "127.0.0.9"}, 403, "lists 127.0.0.1"),
    "no such machine": ({"node": "p-7", "token": "secret"}, 403, "no such machine"),
    "no name of a node": ({"node": "", "token": "secret"}, 401, "older than this head"),
    "path instead of a name": ({"node": "../hosts/p-0", "token": "secret"}, 401, "not a node's name"),
}


@pytest.mark.parametrize(("request_", "status", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
async def test_another_caller_is_refused(tmp_path: Path, request_: dict[str, str], status: int, reason: str) -> None:
    async with serving(tmp_path) as client:
        publish(client.world, "p-0", "secret")
        found = await client.connect(**request_)
        assert found[0] == status
        assert reason in found[1]
        assert client.world.head.agents.known == {}
        (event,) = client.refusals()
        assert reason in event


async def test_head_json_has_nothing_that_lets_an_agent_connect(tmp_path: Path) -> None:
    """Local users can read head.json. It once held a token with which they could join as a node."""
    record = HeadRecord(epoch=1, address="127.0.0.1", port=1, fingerprint="0" * 64)
    async with serving(tmp_path) as client:
        client.world.store.put(head_key("c"), record.model_dump_json().encode())
        publish(client.world, "p-0", "secret")
        public = (client.world.store.get(head_key("c")), client.world.store.get(host_key("c", "p-0")))
        assert not any(b"secret" in each for each in public)
        assert (await client.connect("p-0", record.token))[0] == 401
        assert (await client.connect("p-0", hash_of("secret")))[0] == 401, "the hash is not the secret"


async def test_a_node_can_only_report_about_itself(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        publish(client.world, "p-0", "secret")
        assert await client.connect("p-0", "secret", about="p-1") == (1008, "")
        assert client.world.head.agents.known == {}


async def test_a_restarted_agent_connects_with_its_new_secret_only(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for secret in ("first", "second"):
            publish(client.world, "p-0", secret)
            assert await client.connect("p-0", secret) == (101, "")
        assert (await client.connect("p-0", "first"))[0] == 401


async def test_a_record_that_cannot_be_read_lets_no_agent_connect(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        client.world.store.put(host_key("c", "p-0"), b'{"token_sha256": 3}')
        assert (await client.connect("p-0", ""))[0] == 401
        publish(client.world, "p-0", "secret")
        assert await client.connect("p-0", "secret") == (101, "")


async def test_a_machine_that_the_cloud_does_not_list_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has the head ask the cloud, and accepts the agent when the cloud lists the machine."""
    monkeypatch.setattr(agent_server, "PATIENCE", 60.0)
    monkeypatch.setattr(agent_server, "LOOK_EVERY", 0.05)
    async with serving(tmp_path) as client:
        publish(client.world, "p-3", "secret")
        await await_for(lambda: client.world.head.fleet.last_list, what="a list")
        connecting = asyncio.create_task(client.connect("p-3", "secret"))
        lists: list[Any] = []
        while len(lists) < 3:
            async with client.world.head.fleet.looked:
                await client.world.head.fleet.looked.wait()
            lists.append(connecting.done())
        assert not any(lists)
        client.world.cloud.size["p"] = 4
        assert await connecting == (101, "")


async def test_no_agent_connects_before_the_cloud_has_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        client.world.cloud.out["p"] = "zone is out"
        client.world.head.fleet.last_list = None
        publish(client.world, "p-0", "secret")
        status, reason = await client.connect("p-0", "secret")
        assert status in (403, 503)
        assert reason


async def test_a_node_reconnects_while_the_cloud_does_not_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        publish(client.world, "p-0", "secret")
        assert await client.connect("p-0", "secret") == (101, "")
        client.world.cloud.out.update(p="zone is out", q="zone is out")
        await client.world.head.fleet.look()
        assert await client.connect("p-0", "secret") == (101, "")


async def test_refusals_make_a_limited_number_of_events(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        publish(client.world, "p-0", "secret")
        for _ in range(3):
            await client.connect("p-0", "wrong")
        assert client.refusals() == ["p-0 from 127.0.0.1: wrong secret"]
        await asyncio.gather(*(client.connect("", "x", f"127.0.0.{host}") for host in range(10, 40)))
        assert len(client.refusals()) == agent_server.EVENTS_AT_MOST
