"""The clouds' metadata: who this machine is, and that it will be taken; with servers that fail in every way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from spotrun.head.agents import Agents
from spotrun.machine import metadata as metadata_module
from spotrun.machine.metadata import Ec2Metadata, GceMetadata, Metadata, detect
from spotrun.node import notice as notice_module
from spotrun.node.notice import Terms, parse_ec2, parse_gce, watch
from spotrun.spec.notices import RETIRE_LEAD
from spotrun.wire import Notice, Order, Report
from tests.fakes.head import FakeMetadata
from tests.helpers import await_for

ATTRIBUTES = {"spotrun-cluster": "c", "spotrun-bucket": "/b", "spotrun-pool": "p"}


@contextlib.asynccontextmanager
async def served(flavour: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeMetadata, Metadata]]:
    """A server and the client that detects it."""
    server = FakeMetadata(flavour, ATTRIBUTES, name="w-0", address="10.0.0.7")
    place = await server.start()
    monkeypatch.setenv("GCE_METADATA_HOST", place)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{place}/")
    client = await detect()
    try:
        yield server, client
    finally:
        await client.close()
        await server.stop()


@contextlib.asynccontextmanager
async def watching(client: Metadata) -> AsyncIterator[list[Notice | None]]:
    received: list[Notice | None] = []
    task = asyncio.create_task(watch(client, received.append))
    try:
        yield received
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program with shorter pauses."""
    monkeypatch.setattr(notice_module, "EC2_POLL_SECONDS", 0.05)
    monkeypatch.setattr(notice_module, "EC2_EVENTS_SECONDS", 0.05)
    monkeypatch.setattr(notice_module, "BACKOFF", (0.02, 0.1))
    monkeypatch.setattr(metadata_module, "BACKOFF", (0.2, 0.2))


@pytest.mark.parametrize(("flavour", "kind"), [("gce", GceMetadata), ("ec2", Ec2Metadata)])
async def test_detects_the_cloud_and_tells_who_it_is(flavour: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(flavour, monkeypatch) as (_, client):
        assert type(client) is kind
        identity = await client.identity()
        assert (identity.zone, identity.address) == ("zone-a", "10.0.0.7")
        assert identity.name == ("w-0" if flavour == "gce" else "i-0123")
        assert identity.region == ("zone" if flavour == "gce" else "region")
        assert await client.attribute("spotrun-cluster") == "c"
        assert await client.attribute("spotrun-nonsense") is None


async def test_detection_waits_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeMetadata("ec2", ATTRIBUTES)
    server.fault = "down"
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{await server.start()}")
    found = asyncio.create_task(detect())
    await await_for(lambda: server.asked >= 3, what="tries while the server is down")
    assert not found.done()
    server.fault = ""
    client = await found
    assert type(client) is Ec2Metadata
    await client.close()
    await server.stop()


async def test_gce_preemption_and_maintenance(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("gce", monkeypatch) as (server, client), watching(client) as received:
        server.change(maintenance_event="MIGRATE_ON_HOST_MAINTENANCE")
        server.change(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
        await await_for(lambda: received, what="the maintenance")
        assert received[-1] is not None
        assert received[-1].kind == "maintenance"
        server.change(maintenance_event="NONE")
        await await_for(lambda: received[-1] is None, what="its end")
        before = time.time()
        server.change(preempted="TRUE")
        await await_for(lambda: received[-1], what="the preemption")
        assert received[-1] is not None
        assert received[-1].kind == "preempt"
        assert before + 29 <= received[-1].deadline <= time.time() + 30
        count = len(received)
        server.change(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
        asked = server.asked
        await await_for(lambda: server.asked > asked, what="another poll")
        assert len(received) == count  # less grave than what is known


async def test_an_hour_of_notice_counts_shortly_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's maintenance of on-demand machines with GPUs: no node drains an hour before it."""
    monkeypatch.setattr(metadata_module, "TIMEOUT", 60.0)  # a first look that is tried again is none
    terms, said = Terms(maintenance=3600.0, lead=3599.5), list[tuple[str, Notice | None]]()

    async with served("gce", monkeypatch) as (server, client):

        def now(notice: Notice | None) -> None:
            said.append(("now", notice))

        task = asyncio.create_task(watch(client, now, terms, lambda notice: said.append(("coming", notice))))
        asked = server.asked
        await await_for(lambda: server.asked >= asked + 4, what="the first looks and the long polls")
        before = time.time()
        server.change(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
        await await_for(lambda: len(said) == 3, what="the notice, when it counts")
        assert time.time() >= before + 0.5
        notice = said[0][1]
        assert notice is not None
        assert notice.deadline >= before + 3600
        assert said == [("coming", notice), ("coming", None), ("now", notice)]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_notice_that_is_withdrawn_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "TIMEOUT", 60.0)
    coming: list[Notice | None] = []
    async with served("gce", monkeypatch) as (server, client):
        received: list[Notice | None] = []
        task = asyncio.create_task(watch(client, received.append, Terms(maintenance=3600.0), coming.append))
        asked = server.asked
        await await_for(lambda: server.asked >= asked + 4, what="the first looks and the long polls")
        server.change(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
        await await_for(lambda: coming, what="the announcement")
        server.change(maintenance_event="NONE")
        await await_for(lambda: coming[-1] is None, what="its end")
        server.change(preempted="TRUE")
        await await_for(lambda: received, what="a preemption, which counts at once")
        assert [notice and notice.kind for notice in received] == ["preempt"]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_maintenance_that_was_announced_before_the_agent_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says how much of the hour is left."""
    async with served("gce", monkeypatch) as (server, client):
        server.change(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
        received: list[Notice | None] = []
        task = asyncio.create_task(watch(client, received.append, Terms(maintenance=3600.0, preempt=120.0)))
        await await_for(lambda: received, what="the notice")
        assert received[0] is not None
        assert received[0].deadline <= time.time() + 60
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_the_terms_of_a_machine_are_in_its_metadata() -> None:
    assert Terms.of({}) == Terms(30.0, 60.0, RETIRE_LEAD)
    found = Terms.of({"spotrun-preempt-notice": "120", "spotrun-maintenance-notice": "3600"})
    assert found == Terms(120.0, 3600.0, RETIRE_LEAD)
    assert Terms.of({"spotrun-preempt-notice": "-5", "spotrun-maintenance-notice": "1e9"}) == Terms()
    assert parse_gce("preempted", "TRUE", 100.0, found) == Notice(kind="preempt", deadline=220.0)
    assert parse_gce("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", 100.0, found) == Notice(
        kind="maintenance", deadline=3700.0
    )


def test_operators_are_told_at_once_of_a_notice_that_counts_later() -> None:
    said: list[tuple[str, str]] = []

    def send(order: Order) -> None:
        """A link."""

    agents = Agents(lambda kind, text: said.append((kind, text)))
    report = Report(node="a", boot="1", pool="p", zone="z", address="10.0.0.1")
    later = Notice(kind="maintenance", deadline=datetime(2026, 11, 22, 14, 5, tzinfo=UTC).timestamp())
    agents.receive(report, send, 0.0)
    for _ in range(2):
        assert not agents.receive(report.model_copy(update={"coming": later}), send, 1.0)
        assert agents.known["a"].report.notice is None, "the node is not leaving yet"
    assert [text for kind, text in said if kind == "notice"] == [
        "a will be taken at 2026-11-22 14:05 UTC: maintenance; it trains on until shortly before"
    ]
    assert agents.receive(report.model_copy(update={"notice": later}), send, 2.0)
    assert agents.known["a"].report.notice == later


async def test_gce_preempted_before_the_agent_began(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("gce", monkeypatch) as (server, client):
        server.change(preempted="TRUE")
        async with watching(client) as received:
            await await_for(lambda: received, what="the preemption")


async def test_ec2_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("ec2", monkeypatch) as (server, client), watching(client) as received:
        server.files["events/recommendations/rebalance"] = json.dumps({"noticeTime": utc(time.time())})
        await await_for(lambda: received, what="the recommendation")
        assert received[-1] is not None
        assert received[-1].kind == "rebalance"
        at = float(int(time.time()) + 120)
        server.files["spot/instance-action"] = json.dumps({"action": "terminate", "time": utc(at)})
        await await_for(lambda: len(received) == 2, what="the notice")
        assert received[-1] == Notice(kind="preempt", deadline=at)


def event(at: float, code: str = "instance-retirement", state: str = "active") -> dict[str, str]:
    """As in https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/viewing_scheduled_events.html."""
    shown = datetime.fromtimestamp(at, UTC).strftime("%d %b %Y %H:%M:%S GMT")
    return {"Code": code, "State": state, "NotBefore": shown, "EventId": "instance-event-0d59", "Description": "d"}


DAY = 86400.0
NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
LATER = event(NOW + 3 * DAY)


@pytest.mark.parametrize(
    ("events", "deadline"),
    [
        ([], None),
        ([{**LATER, "NotBefore": "04 Jan 2026 00:00:00 GMT"}], NOW + 3 * DAY),
        ([LATER, event(NOW + 2 * DAY, "system-reboot"), event(NOW + 5 * DAY, "instance-stop")], NOW + 2 * DAY),
        ([event(NOW + DAY, state="completed"), event(NOW + DAY, state="canceled"), LATER], NOW + 3 * DAY),
        ([event(NOW + DAY, "instance-celebration"), {}, {**LATER, "Code": []}, LATER], NOW + 3 * DAY),
        ([event(NOW - 600.0, "instance-reboot"), LATER], NOW - 600.0),
        ([event(NOW - 2 * DAY), LATER], NOW + 3 * DAY),
        ([event(NOW - 2 * DAY)], None),
    ],
    ids=["none", "one", "the first of three", "over", "of another kind", "begun", "long past", "only long past"],
)
def test_the_scheduled_event_that_begins_first_is_the_notice(
    events: list[dict[str, str]], deadline: float | None
) -> None:
    expected = None if deadline is None else Notice(kind="maintenance", deadline=deadline)
    assert parse_ec2("maintenance", json.dumps(events), NOW) == expected


async def test_ec2_maintenance_counts_shortly_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS announces it days before, and may move it or call it off."""
    path, at = "events/maintenance/scheduled", float(int(time.time()))
    received, coming = list[Notice | None](), list[Notice | None]()
    async with served("ec2", monkeypatch) as (server, client):
        task = asyncio.create_task(watch(client, received.append, Terms(), coming.append))
        for days in (3, 5):
            coming.clear()
            server.files[path] = json.dumps([event(at + days * DAY)])
            await await_for(lambda: coming, what=f"maintenance in {days} days")
            assert coming == [Notice(kind="maintenance", deadline=at + days * DAY)]
        assert received == []
        server.files[path] = json.dumps([event(at + RETIRE_LEAD)])
        await await_for(lambda: received, what="maintenance, now that it counts")
        assert received == [Notice(kind="maintenance", deadline=at + RETIRE_LEAD)]
        assert coming[-1] is None
        server.files[path] = "[]"
        await await_for(lambda: received[-1] is None, what="its end")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("fault", ["down", "junk", "hang"])
@pytest.mark.parametrize("flavour", ["gce", "ec2"])
async def test_a_server_that_fails_for_a_while(flavour: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "TIMEOUT", 0.5)
    monkeypatch.setattr(notice_module, "LONG_POLL_SECONDS", 1)
    async with served(flavour, monkeypatch) as (server, client):
        server.fault = fault
        async with watching(client) as received:
            asked = server.asked
            await await_for(lambda: server.asked > asked + 1, what="tries while it fails")
            assert received == []
            server.tokens.clear()  # the server has restarted: tokens from before are unknown to it
            server.fault = ""
            server.files["spot/instance-action"] = json.dumps({"action": "stop", "time": utc(time.time() + 120)})
            server.change(preempted="TRUE")
            await await_for(lambda: received, what="the notice after all")


async def test_ec2_token_that_is_refused_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("ec2", monkeypatch) as (server, client):
        server.tokens.clear()
        assert await client.attribute("spotrun-pool") == "p"
        assert len(server.tokens) == 1


@pytest.mark.parametrize("text", ["", "true", "TRUE\nFALSE", "<html>", "1"])
def test_gce_junk(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_gce("preempted", text, 0.0)
    with pytest.raises(ValueError, match=r"."):
        parse_gce("maintenance-event", text, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"action": "dance", "time": "2026-01-01T00:00:00Z"}',
        '{"action": "terminate"}',
        '{"action": "terminate", "time": 5}',
        '{"action": "terminate", "time": "soon"}',
        '{"action": "terminate", "time": "1999-01-01T00:00:00Z"}',
    ],
)
def test_ec2_junk(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_ec2("preempt", text, datetime(2026, 1, 1, tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "[1]",
        "[" * 100_000,
        json.dumps([{**LATER, "NotBefore": "soon"}]),
        json.dumps([{**LATER, "NotBefore": 5}]),
        json.dumps([{**LATER, "NotBefore": "2026-01-01T00:00:00Z"}]),
    ],
    ids=["nothing", "an object", "null", "a number", "lists too deep", "a word", "no text", "another form"],
)
def test_junk_for_scheduled_events(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_ec2("maintenance", text, NOW)


async def test_ec2_junk_does_not_hide_the_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("ec2", monkeypatch) as (server, client), watching(client) as received:
        server.files["events/recommendations/rebalance"] = "junk"
        server.files["events/maintenance/scheduled"] = "junk"
        server.files["spot/instance-action"] = json.dumps({"action": "terminate", "time": utc(time.time() + 60)})
        await await_for(lambda: received, what="the notice")


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), -1.0, 1e300])
def test_an_end_that_no_clock_shows_is_refused(deadline: float) -> None:
    """The head says in an event when a node will be taken."""
    with pytest.raises(ValidationError, match="deadline"):
        Notice(kind="maintenance", deadline=deadline)
