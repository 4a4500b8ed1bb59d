"""The server for agents: a WebSocket over TLS for each node. `admission` decides which connections are accepted.

Each message is validated. A bad message is refused and logged. Several bad messages in a row close their connection and
no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from aiohttp import WSMsgType, web
from pydantic import ValidationError

from spotrun.changes import Texts
from spotrun.errors import StoreError
from spotrun.head.head import Head
from spotrun.head.server.admission import NAME, Caller, Refusal, decide
from spotrun.head.server.outbox import Outbox
from spotrun.store import RECORD, host_key
from spotrun.wire import MAX_MESSAGE, NODE_HEADER, REFUSAL_HEADER, HostRecord, Report, problem

log = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between WebSocket pings; reports themselves come twice a second
BAD_MESSAGES = 5  # in a row; then the connection is closed
PATIENCE = 3.0  # seconds that a caller waits here for a new list from the cloud; an agent waits 8 s for an answer
WAITING = 256  # the most callers that wait for a list at the same time
LOOK_EVERY = 1.0  # seconds at least between two lists that callers cause
READ_EVERY = 0.25  # seconds at least between two reads of one node's record
EVENT_EVERY = 60.0  # seconds at least between two events about the same refusal
EVENTS_AT_MOST = 10  # events about refusals in EVENT_EVERY


class AgentServer:
    """The server of one head. It reads the hash of a node's secret when the node first connects, and keeps it."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._secret_hashes: dict[str, str] = {}  # by node, as in the nodes' records
        self._read_at: dict[str, float] = {}  # by node, monotonic
        self._looked_at = -LOOK_EVERY
        self._waiting = 0  # callers that wait for a list
        self._refused_at: dict[tuple[str, ...], float] = {}  # refusals with an event in the last EVENT_EVERY
        self._texts = Texts()
        self._left_out = 0  # refusals without an event since the last one

    def app(self) -> web.Application:
        """The web application that agents connect to."""
        app = web.Application(client_max_size=MAX_MESSAGE)
        app.router.add_get("/agent", self._open)
        return app

    async def admit(self, caller: Caller) -> Refusal | None:
        """None if the caller may connect. Asks the cloud and reads the bucket again if that may change the answer."""
        deadline, read = time.monotonic() + PATIENCE, False
        while True:
            refusal = decide(caller, self._head.fleet.last_list, self._secret_hashes.get(caller.node))
            if refusal is None:
                return None
            if refusal.refresh == "machines" and await self._look(deadline):
                continue
            if refusal.refresh == "record" and not read and await self._read(caller.node):
                read = True
                continue
            return refusal

    async def _open(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        caller = Caller(request.headers.get(NODE_HEADER, ""), given, request.remote or "")
        refusal = await self.admit(caller)
        if refusal is not None:
            self._add_event(caller, refusal)
            return web.Response(status=refusal.status, headers={REFUSAL_HEADER: refusal.reason})
        return await _connect(self._head, self._texts, caller.node, request)

    async def _look(self, deadline: float) -> bool:
        """Wait until the cloud has been asked once more; False if that took too long."""
        now = time.monotonic()
        if now >= deadline or self._waiting >= WAITING:
            return False
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._head.scaler.look_now.set()
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline - now), self._head.fleet.looked:
                await self._head.fleet.looked.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    async def _read(self, node: str) -> bool:
        """Read the node's record, unless it was read a moment ago. Called only for nodes that the cloud lists."""
        now = time.monotonic()
        if now - self._read_at.get(node, -READ_EVERY) < READ_EVERY:
            return False
        self._read_at[node] = now
        key = host_key(self._head.cluster.name, node)
        try:
            data = await asyncio.to_thread(self._head.store.find, key, RECORD)
            self._secret_hashes[node] = HostRecord.model_validate_json(data).token_sha256 if data else ""
        except StoreError as error:
            log.warning("%s", error)
            return False
        except ValidationError as error:
            log.warning("%s is not a node's record: %s", key, problem(error))
            self._secret_hashes[node] = ""
        return True

    def _add_event(self, caller: Caller, refusal: Refusal) -> None:
        """Add an event about the refusal. Repeats within EVENT_EVERY are left out, and so are too many events."""
        now = time.monotonic()
        self._refused_at = {key: at for key, at in self._refused_at.items() if now - at < EVENT_EVERY}
        node = caller.node if NAME.fullmatch(caller.node) else "an agent"
        key = (node, caller.address, refusal.reason)
        if key in self._refused_at or len(self._refused_at) >= EVENTS_AT_MOST:
            self._left_out += key not in self._refused_at
            return
        self._refused_at[key] = now
        more = f" ({self._left_out} others are not shown)" if self._left_out else ""
        self._left_out = 0
        self._head.add_event("refused", f"{node} from {caller.address}: {refusal.reason}{more}")


async def _connect(head: Head, texts: Texts, node: str, request: web.Request) -> web.WebSocketResponse:
    """One node's connection, until it closes."""
    connection = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, heartbeat=HEARTBEAT)
    await connection.prepare(request)
    outbox = Outbox(texts)
    send = outbox.put  # one object for as long as the connection lasts
    sender = asyncio.create_task(_send(connection, outbox))
    connected, bad = False, 0
    try:
        async for message in connection:
            report = _report(message.data) if message.type is WSMsgType.TEXT else "not a text frame"
            if isinstance(report, Report) and report.node != node:
                report = f"it is about {report.node!r}"
            if isinstance(report, str):
                bad += 1
                log.warning("refused a message from %s (%s): %s", node, request.remote, report)
                if bad >= BAD_MESSAGES:
                    await connection.close(code=1008, message=b"too many bad messages")
                continue
            connected, bad = True, 0
            outbox.taken(report.order, report.version)
            head.receive(report, send)
    except ConnectionError:
        pass  # it was lost while a pong was sent
    finally:
        sender.cancel()
        if connected:
            head.disconnect(node, send)
        await asyncio.gather(sender, return_exceptions=True)
    return connection


async def _send(connection: web.WebSocketResponse, outbox: Outbox) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await connection.send_str(await outbox.next())


def _report(text: str) -> Report | str:
    """The report, or one line about what is wrong with it."""
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        return problem(error)
