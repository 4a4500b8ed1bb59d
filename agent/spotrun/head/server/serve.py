"""Run a head with its two servers: one for agents (TLS), and one for `spotrun ctl` (a Unix socket)."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from asyncio import sslproto
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web

from spotrun.head.fenced import FencedStore
from spotrun.head.head import Head
from spotrun.head.server import certificate
from spotrun.head.server.agent_server import AgentServer
from spotrun.head.server.control import ControlServer
from spotrun.spec.names import HEAD_PORT
from spotrun.store import head_key
from spotrun.wire import HeadRecord

log = logging.getLogger(__name__)


async def serve(
    head: Head,
    address: str,
    control: Path,
    port: int = HEAD_PORT,
    side_tasks: Sequence[Awaitable[None]] = (),
    on_serving: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the head until SIGTERM or SIGINT comes, or until the head or one of its side tasks ends.

    control: the path of the control socket. side_tasks: what runs beside the head, and ends the head when it ends.
    on_serving: called with the head's address once agents can find it.
    """
    _tune()
    context, fingerprint = await asyncio.to_thread(certificate.create)
    agents = web.AppRunner(AgentServer(head).app(), access_log=None)
    operators = web.AppRunner(ControlServer(head).app(), access_log=None)
    await agents.setup()
    await operators.setup()
    try:
        await web.TCPSite(agents, address, port, ssl_context=context).start()
        control.unlink(missing_ok=True)
        await web.UnixSite(operators, str(control)).start()
        control.chmod(0o600)
        record = HeadRecord(epoch=head.epoch, address=address, port=port, fingerprint=fingerprint)
        fenced, key = FencedStore(head.store), head_key(head.cluster.name)
        await fenced.find(key)
        await head.check_epoch()  # this process may have been suspended meanwhile
        await fenced.put(key, record.model_dump_json().encode())
        log.info("head %d of cluster %s listens on %s:%d", head.epoch, head.cluster.name, address, port)
        on_serving(f"{address}:{port}")
        await _until_stopped(head.run(), head.scaler.run(), *side_tasks)
    finally:
        await operators.cleanup()
        await agents.cleanup()
        control.unlink(missing_ok=True)


def _tune() -> None:
    """Settings of the interpreter for hundreds of connections, each of which reports twice a second."""
    # Reports and views hold no cycles. By default the collector would look at all of them several times in each turn.
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    # Each TLS connection of asyncio has a buffer of this size, in which it receives. It has 256 KiB by default.
    sslproto.SSLProtocol.max_size = 16 * 1024


async def _until_stopped(*work: Awaitable[None]) -> None:
    """Run all until one ends or fails, or until SIGTERM or SIGINT comes. Then cancel the others."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.ensure_future(each) for each in work] + [asyncio.ensure_future(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
