"""The head's server: its certificate, its Unix socket for `spotrun ctl`, and what runs these and the door."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
import math
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import ValidationError

from spotrun.errors import SpotrunError, StoreError
from spotrun.head import parking
from spotrun.head.head import Head
from spotrun.head.job_state import JobState, Stop, apply
from spotrun.head.server.agent_server import Door
from spotrun.head.status import job_status
from spotrun.machine import private_paths
from spotrun.spec.names import HEAD_PORT
from spotrun.store import Store, epoch_key, head_key
from spotrun.text import to_json
from spotrun.wire import HeadRecord

log = logging.getLogger(__name__)

FOLLOW_EVERY = 0.2  # seconds between two lines of `ctl follow` at the least
ALIVE_EVERY = 5.0  # seconds after which a line that has nothing new is an empty one: the head is there
NEWEST = 10  # jobs that are listed when all of them would be too many
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(
    head: Head,
    address: str,
    control: Path,
    port: int = HEAD_PORT,
    also: Sequence[Awaitable[None]] = (),
    on_serving: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the head until SIGTERM, until another head takes over, or until one of `also` is done.

    `on_serving` is called with the address when agents can find it.
    """
    context, fingerprint = await asyncio.to_thread(_certificate)
    agents = web.AppRunner(Door(head).app(), access_log=None)
    operators = web.AppRunner(_control_app(head), access_log=None)
    await agents.setup()
    await operators.setup()
    try:
        await web.TCPSite(agents, address, port, ssl_context=context).start()
        control.unlink(missing_ok=True)
        await web.UnixSite(operators, str(control)).start()
        control.chmod(0o600)
        record = HeadRecord(epoch=head.epoch, address=address, port=port, fingerprint=fingerprint)
        await asyncio.to_thread(head.store.put, head_key(head.cluster.name), record.model_dump_json().encode())
        log.info("head %d of cluster %s listens on %s:%d", head.epoch, head.cluster.name, address, port)
        on_serving(f"{address}:{port}")
        await _until_stopped(head.run(), head.watch_cloud(), *also)
    finally:
        await operators.cleanup()
        await agents.cleanup()
        control.unlink(missing_ok=True)


def claim_epoch(store: Store, cluster: str) -> int:
    """The number of this head: one more than the last one's. Whoever creates the key has it."""
    prefix = epoch_key(cluster, 0).rsplit("/", 1)[0]
    names = [key.rsplit("/", 1)[1] for key in store.list(prefix)]
    taken = [int(name) for name in names if name.isdecimal()]
    epoch = max(taken, default=0) + 1
    while not store.create(epoch_key(cluster, epoch), socket.gethostname().encode()):
        epoch += 1
    return epoch


async def _until_stopped(*work: Awaitable[None]) -> None:
    """Run all until one fails or SIGTERM comes; then none is left."""
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


def _certificate() -> tuple[ssl.SSLContext, str]:
    """A fresh self-signed certificate and its SHA-256; agents trust exactly this one, by head.json."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "spotrun head")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:  # the ssl module reads keys from files only
        path = Path(folder) / "head.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.touch(mode=0o600)
        path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(path)
    return context, hashlib.sha256(der).hexdigest()


def _control_app(head: Head) -> web.Application:
    """What `spotrun ctl` talks to. Two guards: the modes of the socket and its folder; the user at the other end."""

    @web.middleware
    async def knowing(request: web.Request, handler: Handler) -> web.StreamResponse:
        await head.journal.read_queue()  # a head that has just begun has not read yet which jobs are queued or held
        return await handler(request)

    app = web.Application(middlewares=[_of_this_user, _explain, knowing])

    async def body(request: web.Request) -> dict[str, Any]:
        found = await request.json()
        if not isinstance(found, dict):
            raise SpotrunError("the request is not a JSON object")
        return found

    async def submit(request: web.Request) -> web.Response:
        asked = await body(request)
        return web.json_response({"job": await head.submit(asked["job"], str(asked["code"]))})

    async def status(request: web.Request) -> web.Response:
        return web.json_response(await _status(head, request.query.get("job")), dumps=to_json)

    async def jobs(request: web.Request) -> web.Response:
        waiting = [*head.jobs, *head.journal.held]
        found = [{"job": job, "phase": await parking.phase(head, job)} for job in waiting]
        newest = await head.journal.newest(NEWEST)
        found += [{"job": state.id, "phase": state.phase} for state in newest if state.id not in waiting]
        return web.json_response(found)

    async def stop(request: web.Request) -> web.Response:
        asked = (await body(request)).get("job")

        def ask(job: JobState, now: float) -> JobState:
            return apply(job, Stop("stopped by the operator"), now)

        if asked and await parking.take_out(head, str(asked)):
            return web.json_response({"job": asked})
        return web.json_response({"job": (await head.change(ask, asked)).id})

    async def relaunch(request: web.Request) -> web.Response:
        job = (await body(request)).get("job") or await _active(head)
        await head.relaunch(str(job))
        return web.json_response({"job": job})

    async def preempt(request: web.Request) -> web.Response:
        asked = await body(request)
        notice = asked.get("notice")
        if notice is not None and not 0 <= float(notice) < math.inf:  # nor NaN
            raise SpotrunError(f"notice: {notice}: allowed: seconds, a number, 0 or more")
        await head.fleet.preempt(str(asked["node"]), None if notice is None else float(notice))
        return web.json_response({"node": asked["node"]})

    async def follow(request: web.Request) -> web.StreamResponse:
        return await _follow(head, request)

    app.router.add_post("/submit", submit)
    app.router.add_post("/stop", stop)
    app.router.add_post("/relaunch", relaunch)
    app.router.add_post("/preempt", preempt)
    app.router.add_get("/status", status)
    app.router.add_get("/jobs", jobs)
    app.router.add_get("/follow", follow)
    return app


@web.middleware
async def _of_this_user(request: web.Request, handler: Handler) -> web.StreamResponse:
    peer = request.transport.get_extra_info("socket") if request.transport else None
    if peer is None or not private_paths.is_own_peer(peer):
        log.warning("refused a request of another user on the control socket")
        return web.json_response({"error": "this socket is for the user that the head runs as"}, status=403)
    return await handler(request)


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A user's mistake becomes one line, never a traceback."""
    try:
        return await handler(request)
    except StoreError as error:  # nobody's mistake: worth another try
        return web.json_response({"error": str(error)}, status=503)
    except SpotrunError as error:
        return web.json_response({"error": str(error)}, status=400)
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return web.json_response({"error": f"not a valid request: {lines}"}, status=400)
    except (KeyError, TypeError, ValueError) as error:
        return web.json_response({"error": f"not a valid request: {error}"}, status=400)


async def _active(head: Head) -> str:
    if head.job is not None:
        return head.job.id
    if head.journal.held:
        raise SpotrunError(
            f"no job runs; held since the cluster was brought up: {', '.join(head.journal.held)}; name one"
        )
    ids = [state.id for state in await head.journal.newest(NEWEST)]
    if not ids:
        raise SpotrunError("no job has run on this cluster yet")
    raise SpotrunError(f"no job has run since this head began; name one: {', '.join(ids)}")


async def _status(head: Head, job: str | None) -> dict[str, Any]:
    document = head.status()
    if job is not None and (head.job is None or head.job.id != job):
        state = await head.load(job)
        document["job"] = job_status(state)
        # The document has the events of the active job; a job that has not begun has none.
        document["events"] = await head.journal.events(job) if state.generation or state.ended else []
        if job in head.journal.held:
            document["job"] |= {"phase": "held", "members": []}
        elif job in head.jobs[1:]:
            document["job"]["reason"] = f"after {', '.join(head.jobs[: head.jobs.index(job)])}"
    return document


async def _follow(head: Head, request: web.Request) -> web.StreamResponse:
    """A status document a line whenever something changed, until the job has ended; else empty lines now and then."""
    job = request.query.get("job") or (head.jobs[0] if head.jobs else await _active(head))
    if job in head.journal.held:
        raise SpotrunError(f"job {job} is held since the cluster was brought up; `make relaunch ID={job}` runs it on")
    await head.load(job)
    response = web.StreamResponse()
    await response.prepare(request)
    last, written = "", 0.0
    # Without the bucket the lines end: whoever asks again is told the reason.
    with contextlib.suppress(ConnectionError, StoreError):
        while True:
            document = await _status(head, job)
            text = to_json(document)
            if text != last or time.monotonic() - written >= ALIVE_EVERY:
                await response.write((text if text != last else "").encode() + b"\n")
                last, written = text, time.monotonic()
            if document["job"]["ended"]:
                break
            # Not more often than a person can read; changes meanwhile are in the next line.
            await asyncio.sleep(FOLLOW_EVERY)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_EVERY / 2), head.published:
                    await head.published.wait()
    return response
