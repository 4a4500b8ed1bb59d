"""The door for agents: a WebSocket over TLS. `head.admission` decides which connections may enter.

Each message is validated. A bad message is refused and logged; several in a row close the link that they came from, and
no other link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from aiohttp import WSMsgType, web
from pydantic import ValidationError

from spotrun.errors import StoreError
from spotrun.head.head import Head
from spotrun.head.server.admission import NAME, Refusal, Visitor, decide
from spotrun.store import RECORD, host_key
from spotrun.wire import MAX_MESSAGE, NODE_HEADER, REFUSAL_HEADER, HostRecord, Order, Report, problem

log = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between WebSocket pings; reports themselves come twice a second
BAD_MESSAGES = 5  # in a row from one link before it is closed
PATIENCE = 3.0  # seconds that a visitor waits here for a new list from the cloud; an agent waits 8 s for an answer
WAITING = 256  # the most visitors that wait for a list at the same time
LOOK_EVERY = 1.0  # seconds at least between two lists that visitors cause
READ_EVERY = 0.25  # seconds at least between two reads of one node's record
SAY_EVERY = 60.0  # seconds at least between two events about the same refusal
SAY_AT_MOST = 10  # events about refusals in SAY_EVERY


class Door:
    """The door of one head. It reads the hash of a node's secret when the node first connects, and keeps it."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._digests: dict[str, str] = {}  # node: the hash of its secret, as in its record
        self._read_at: dict[str, float] = {}
        self._looked_at = -LOOK_EVERY
        self._waiting = 0
        self._said: dict[tuple[str, ...], float] = {}
        self._unsaid = 0

    def app(self) -> web.Application:
        """The web application that agents connect to."""
        app = web.Application(client_max_size=MAX_MESSAGE)
        app.router.add_get("/agent", self._open)
        return app

    async def admit(self, visitor: Visitor) -> Refusal | None:
        """None if the visitor is let in. Asks the cloud and reads the bucket again if that may change the answer."""
        deadline, read = time.monotonic() + PATIENCE, False
        while True:
            refusal = decide(visitor, self._head.fleet.last_list, self._digests.get(visitor.node))
            if refusal is None:
                return None
            if refusal.cure == "look" and await self._look(deadline):
                continue
            if refusal.cure == "read" and not read and await self._read(visitor.node):
                read = True
                continue
            return refusal

    async def _open(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        visitor = Visitor(request.headers.get(NODE_HEADER, ""), given, request.remote or "")
        refusal = await self.admit(visitor)
        if refusal is not None:
            self._say(visitor, refusal)
            return web.Response(status=refusal.status, headers={REFUSAL_HEADER: refusal.reason})
        return await _link(self._head, visitor.node, request)

    async def _look(self, deadline: float) -> bool:
        """Wait until the cloud has been asked once more; False if that took too long."""
        now = time.monotonic()
        if now >= deadline or self._waiting >= WAITING:
            return False
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._head.look()
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
            self._digests[node] = HostRecord.model_validate_json(data).token_sha256 if data else ""
        except StoreError as error:
            log.warning("%s", error)
            return False
        except ValidationError as error:
            log.warning("%s is not a node's record: %s", key, problem(error))
            self._digests[node] = ""
        return True

    def _say(self, visitor: Visitor, refusal: Refusal) -> None:
        """Make an event of the refusal. Repeats within a minute, and too many in a minute, are left out."""
        now = time.monotonic()
        self._said = {key: at for key, at in self._said.items() if now - at < SAY_EVERY}
        node = visitor.node if NAME.fullmatch(visitor.node) else "an agent"
        key = (node, visitor.peer, refusal.reason)
        if key in self._said or len(self._said) >= SAY_AT_MOST:
            self._unsaid += key not in self._said
            return
        self._said[key] = now
        more = f" ({self._unsaid} others are not shown)" if self._unsaid else ""
        self._unsaid = 0
        self._head.add_event("refused", f"{node} from {visitor.peer}: {refusal.reason}{more}")


async def _link(head: Head, node: str, request: web.Request) -> web.WebSocketResponse:
    """One node's link, until it closes. Orders go out through a queue that keeps only the newest."""
    socket_ = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, heartbeat=HEARTBEAT)
    await socket_.prepare(request)
    orders: asyncio.Queue[Order] = asyncio.Queue()

    def send(order: Order) -> None:
        while not orders.empty():
            orders.get_nowait()
        orders.put_nowait(order)

    sender = asyncio.create_task(_send(socket_, orders))
    heard, bad = False, 0
    try:
        async for message in socket_:
            report = _report(message.data) if message.type is WSMsgType.TEXT else "not a text frame"
            if isinstance(report, Report) and report.node != node:
                report = f"it is about {report.node!r}"
            if isinstance(report, str):
                bad += 1
                log.warning("refused a message from %s (%s): %s", node, request.remote, report)
                if bad >= BAD_MESSAGES:
                    await socket_.close(code=1008, message=b"too many bad messages")
                continue
            heard, bad = True, 0
            head.receive(report, send)
    finally:
        sender.cancel()
        if heard:
            head.disconnect(node, send)
        await asyncio.gather(sender, return_exceptions=True)
    return socket_


async def _send(link: web.WebSocketResponse, orders: asyncio.Queue[Order]) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await link.send_str((await orders.get()).model_dump_json())


def _report(text: str) -> Report | str:
    """The report, or one line about what is wrong with it."""
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        return problem(error)
