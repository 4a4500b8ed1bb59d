"""The agent's connection to the head: a WebSocket over TLS, pinned to the certificate named in the bucket.

The head recognises this node by its address and its secret. The hash of the secret is in the node's record in the
bucket. Both sides send whole documents, and the newest one counts. So the connection may break and come back at any
time, and training continues without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable

import aiohttp

from spotrun.backoff import Backoff
from spotrun.changes import Inbox
from spotrun.errors import LinkError, SpotrunError
from spotrun.machine import host_keys
from spotrun.machine.metadata import Identity
from spotrun.store import Store, head_key
from spotrun.wire import MAX_MESSAGE, NODE_HEADER, REFUSAL_HEADER, HeadRecord, Order, Report

log = logging.getLogger(__name__)

HEARTBEAT = 0.5  # seconds between reports when nothing changes
COALESCE = 0.02  # seconds to gather changes before a report goes out
PING = 4.0  # seconds between WebSocket pings; half of it without a pong ends the connection
SEND_TIMEOUT = 4.0  # seconds for one report
CONNECT_TIMEOUT = 4.0  # seconds for TCP; with TLS and the WebSocket handshake: twice this
BACKOFF = (0.1, 2.0)  # seconds between tries: the first pause, the longest


class Connection:
    """Sends reports to the head. on_order: gets its orders. on_joined: called when a connection has sent a report."""

    make_inbox = Inbox

    def __init__(
        self,
        store: Store,
        cluster: str,
        identity: Identity,
        on_order: Callable[[Order], None],
        on_joined: Callable[[], None] = lambda: None,
    ) -> None:
        self.connected = False
        self.joined = ""  # address of the newest head that has received a report; empty: none has
        self._store, self._cluster, self._identity = store, cluster, identity
        self._key = head_key(cluster)
        self._secret = secrets.token_urlsafe(32)  # the same until this agent ends
        self._record_written = False  # whether the bucket has this node's record with the secret's hash
        self._on_order, self._on_joined = on_order, on_joined
        self.newest_report: Report | None = None  # whether it has been sent or not
        self._changed = asyncio.Event()
        self._epoch = 0  # highest epoch of a head that has sent an order
        self._head_reads = 0  # the version of the reports that the head reads; 0: it has sent no order yet
        self._inbox = self.make_inbox()  # of the connection

    def publish(self, report: Report) -> None:
        """Make this the newest report. It is sent at once, or with the next heartbeat if only progress is new."""
        before, self.newest_report = self.newest_report, report
        if before is None or before.essence != report.essence:
            self._changed.set()

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until cancelled."""
        backoff = Backoff(*BACKOFF)
        said = ""
        while True:
            began = time.monotonic()
            try:
                # Together, as each is a round trip to the bucket.
                record, _ = await asyncio.gather(self._find_head(), self._write_record())
                await self._serve(record)
                problem, said = "the connection to the head was lost", ""
            except aiohttp.ServerFingerprintMismatch as error:
                found = error.got.hex()
                problem = f"{error.host}:{error.port} shows certificate {found}, not the one in {self._key}: refused"
            except aiohttp.WSServerHandshakeError as error:
                # The record may have been removed, for example by a `make down` that was interrupted.
                self._record_written = self._record_written and error.status != 401
                reason = error.headers.get(REFUSAL_HEADER) if error.headers else None
                reason = reason or "it does not say why"
                problem = f"no connection: the head refuses this node: {reason} (status {error.status})"
            except (SpotrunError, aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = f"no connection to the head: {error!r}" if not isinstance(error, SpotrunError) else str(error)
            if problem != said:
                log.warning("%s; trying again", problem)
            said = problem
            if time.monotonic() - began > BACKOFF[1]:
                backoff.reset()
            await asyncio.sleep(backoff.next())

    async def _write_record(self) -> None:
        """Publish this machine's host keys, for operators, and the hash of its secret, for the head."""
        if not self._record_written:
            publish, identity = host_keys.publish, self._identity
            await asyncio.to_thread(publish, self._store, self._cluster, identity.name, identity, self._secret)
            self._record_written = True

    async def _find_head(self) -> HeadRecord:
        data = await asyncio.to_thread(self._store.find, self._key)
        if data is None:
            raise LinkError(f"there is no {self._key} in {self._store.url}; has the head started?")
        try:
            record = HeadRecord.model_validate_json(data)
            if len(bytes.fromhex(record.fingerprint)) != 32:
                raise ValueError("the fingerprint is not a sha256")
        except ValueError as error:
            raise LinkError(f"{self._key} is not a head's record: {_first_line(error)}") from None
        return record

    async def _serve(self, record: HeadRecord) -> None:
        """Serve one connection until it ends. The certificate is compared before anything is sent."""
        url = f"https://{record.address}:{record.port}/agent"
        pin = aiohttp.Fingerprint(bytes.fromhex(record.fingerprint))
        identity = self._identity
        headers = {"Authorization": f"Bearer {record.token or self._secret}", NODE_HEADER: identity.name}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        # Connect from the address that the cloud lists for this machine: the machine may have others too.
        connector = aiohttp.TCPConnector(local_addr=(identity.address, 0) if identity.address else None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT):
                socket = await session.ws_connect(
                    url,
                    ssl=pin,
                    headers=headers,
                    heartbeat=PING,
                    max_msg_size=MAX_MESSAGE,
                    compress=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
            log.info("connected to the head at %s:%s", record.address, record.port)
            self.connected, self._head_reads, self._inbox = True, 0, self.make_inbox()
            sender = asyncio.create_task(self._send(socket, f"{record.address}:{record.port}"))
            try:
                await self._receive(socket)
            finally:
                self.connected = False
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)  # a cancellation of this task still arrives
                await socket.close()

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, head: str) -> None:
        reported = False
        try:
            while not socket.closed:
                self._changed.clear()
                if self.newest_report is not None:
                    async with asyncio.timeout(SEND_TIMEOUT):
                        report = self.newest_report.replace(order=self._inbox.newest)
                        await socket.send_str(report.text(self._head_reads))
                    if not reported:
                        reported, self.joined = True, head
                        self._on_joined()
                await asyncio.sleep(COALESCE)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT - COALESCE):
                        await self._changed.wait()
        finally:
            if not socket.closed:
                await socket.close()

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                log.warning("a %s frame from the head: ignored", message.type.name)
                continue
            try:
                order = self._inbox.read(message.data)
            except ValueError as error:
                log.warning("a message from the head is not an order, ignored: %s", _first_line(error))
                continue
            if order.epoch < self._epoch:
                log.warning("an order of head %s came after an order of head %s: refused", order.epoch, self._epoch)
                continue
            self._epoch, self._head_reads = order.epoch, order.version
            self._on_order(order)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
