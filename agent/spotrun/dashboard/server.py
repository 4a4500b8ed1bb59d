"""The dashboard's server: it answers an operator's browser, on a local address of the operator's computer.

`GET` reads and never writes. `POST /api/jobs/<id>/<verb>` asks the head for a change. `guard` refuses everything that
does not have the token. The pages are files in `pages/`: plain HTML, CSS and ES modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

from aiohttp import web

from spotrun.dashboard import guard, runs
from spotrun.dashboard.curves import Shelf
from spotrun.dashboard.live import Live
from spotrun.dashboard.logged import Logged
from spotrun.dashboard.machines import Machines
from spotrun.dashboard.records import MOST, Records
from spotrun.errors import JobNotFound, SpotrunError, StoreError
from spotrun.text import to_json

log = logging.getLogger(__name__)

PAGES = Path(__file__).parent / "pages"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
COOKIE = "spotrun"
VERBS = ("pause", "resume", "stop", "priority", "relaunch")
STREAMS = 64  # pages that are open at the same time
ALIVE_EVERY = 5.0  # seconds without a change after which a page gets a sign of life
BODY = 64 << 10  # bytes of a request
READERS = 16  # answers from the bucket at the same time
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Head(Protocol):
    """The head, as the dashboard uses it. All methods raise `SpotrunError` with the head's message."""

    async def change(self, verb: str, job: str, to: int | None) -> dict[str, Any]:
        """Change a job. verb: one of `VERBS`. to: the priority."""

    async def metrics(self) -> str:
        """The metrics of the cluster, in Prometheus' text format."""


class Dashboard:
    """The web application of one dashboard.

    All ports of a host share cookies, but a cookie is only for the paths below its own. So the pages are below a path
    that no other server on this computer can know, and the cookie never leaves this dashboard.
    """

    def __init__(self, records: Records, live: Live, head: Head, token: str) -> None:
        self.path = "/" + hashlib.sha256(f"path {token}".encode()).hexdigest()[:32]
        self._records, self._live, self._head, self._token = records, live, head, token
        self._shelf, self._machines, self._logged = Shelf(records), Machines(records), Logged(records)
        # Own threads: while a slow bucket keeps all of them busy, changes still reach the head.
        self._readers = ThreadPoolExecutor(READERS, "bucket")
        self._streams = 0

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=BODY, middlewares=[self._guard, _explain])
        app.router.add_get("/", self._door)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(f"{self.path}/", self._page)
        app.router.add_get(self.path + "/pages/{name:[A-Za-z0-9./-]+}", self._file)
        app.router.add_get(f"{self.path}/api/live", self._stream)
        app.router.add_get(f"{self.path}/api/jobs", self._jobs)
        app.router.add_post(self.path + "/api/jobs/{job}/{verb}", self._change)
        cached: dict[str, runs.Answer] = {
            "curves": lambda _, job, query: self._shelf.read(job, query),
            "machines": lambda _, job, query: self._machines.read(job, query),
            "logged": lambda _, job, query: self._logged.read(job, query),
        }
        for name, answer in (runs.ANSWERS | cached).items():
            app.router.add_get(self.path + "/api/runs/{job}" + (f"/{name}" if name else ""), self._run(answer))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = guard.Asked(
            method=request.method,
            host=request.headers.get("Host", ""),
            origin=request.headers.get("Origin", ""),
            site=request.headers.get("Sec-Fetch-Site", ""),
            mode=request.headers.get("Sec-Fetch-Mode", ""),
            kind=request.content_type,
            token=self._token_of(request),
        )
        refusal = guard.refusal(asked, self._token)
        if refusal is not None:
            return web.Response(status=refusal.status, text=refusal.reason + "\n", headers=guard.HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:  # there is no such page
            return web.Response(status=error.status, text=f"{error.reason}\n", headers=guard.HEADERS)
        if not response.prepared:
            response.headers.update(guard.HEADERS)
        return response

    def _token_of(self, request: web.Request) -> str:
        """The token that the request has. Only the first page takes it from the URL."""
        bearer = request.headers.get("Authorization", "")
        if bearer.startswith("Bearer "):
            return bearer.removeprefix("Bearer ").strip()
        if request.path == "/" and (given := parse_qs(request.query_string).get("token")):
            return given[0]
        return request.cookies.get(COOKIE, "")

    async def _door(self, _: web.Request) -> web.Response:
        """Give the browser the cookie, and send it to the pages. Their URL has no token."""
        response = web.Response(status=303, headers={"Location": f"{self.path}/"})
        # Strict: the browser sends the cookie only with requests of this page.
        response.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict", path=f"{self.path}/")
        return response

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(body=(PAGES / "index.html").read_bytes(), content_type="text/html", charset="utf-8")

    async def _file(self, request: web.Request) -> web.Response:
        path = PAGES / request.match_info["name"]
        kind = TYPES.get(path.suffix)
        # If the URL has two slashes before the name, the name is an absolute path.
        if kind is None or ".." in path.parts or not path.is_relative_to(PAGES) or not path.is_file():
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type=kind, charset="utf-8")

    async def _metrics(self, _: web.Request) -> web.Response:
        text = await self._head.metrics()
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the newest overview, whenever it has changed. A slow page misses some."""
        if self._streams >= STREAMS:
            raise SpotrunError(f"{STREAMS} pages are open already: close some")
        headers = guard.HEADERS | {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        self._streams += 1
        try:
            await response.prepare(request)
            await response.write(b"retry: 1000\n\n")
            seen = -1
            while True:
                try:
                    seen, text = await self._live.next(seen, ALIVE_EVERY)
                    await response.write(f"data: {text}\n\n".encode())
                except TimeoutError:
                    await response.write(b"event: alive\ndata: {}\n\n")
        except ConnectionError:
            pass  # the page is closed
        finally:
            self._streams -= 1
        return response

    async def _jobs(self, request: web.Request) -> web.Response:
        """The jobs in the bucket, newest first. before: an id; most: how many."""
        most = min(MOST, max(1, _whole(request.query.get("most", "100"), "most")))
        before = request.query.get("before", "")
        for job in self._live.listed:  # these jobs change, or have changed since the last look: rows are not kept
            self._records.forget(job)
        self._live.listed = {str(row["id"]) for row in (self._live.overview or {}).get("jobs", ())}
        rows, more = await self._read(self._records.rows, before, most)
        return _json({"rows": rows, "more": more})

    async def _change(self, request: web.Request) -> web.Response:
        job, verb = request.match_info["job"], request.match_info["verb"]
        if verb not in VERBS:
            raise SpotrunError(f"{verb[:40]!r} is not allowed; allowed: {', '.join(VERBS)}")
        body = await request.json()
        to = body.get("to") if isinstance(body, dict) else None
        if verb == "priority" and type(to) is not int:
            raise SpotrunError("to: give the priority as a whole number")
        self._records.forget(job)
        return _json(await self._head.change(verb, job, to if verb == "priority" else None))

    def _run(self, answer: runs.Answer) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return _json(await self._read(answer, self._records, request.match_info["job"], dict(request.query)))

        return handle

    async def _read(self, answer: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._readers, answer, *arguments)


@contextlib.asynccontextmanager
async def serving(dashboard: Dashboard, port: int = 0) -> Any:
    """Serve on 127.0.0.1 while the context is open; yields the port. port: 0: any free one. Raises `OSError`."""
    runner = web.AppRunner(dashboard.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an error with one line of JSON. 503: the same request may succeed later. 404, 400: it is wrong."""
    try:
        return await handler(request)
    except JobNotFound as error:
        return _json({"error": str(error)}, 404)
    except StoreError as error:
        return _json({"error": str(error)}, 503)
    except SpotrunError as error:
        return _json({"error": str(error)}, 400)
    except (ValueError, KeyError, TypeError) as error:
        return _json({"error": f"not a valid request: {error}"}, 400)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(text=to_json(value), status=status, content_type="application/json")


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SpotrunError(f"{name}: {text[:40]!r} is not a whole number") from None
