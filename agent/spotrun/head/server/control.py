"""The head's control socket, which `spotrun ctl` uses. Only root and the user that the head runs as may use it.

Two things keep other users out: the modes of the socket and its folder, and a check of who sends each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from spotrun.errors import SpotrunError, StoreError
from spotrun.head import job_queue, overview, turn_timing
from spotrun.head.head import Head
from spotrun.head.job_state import JobState, Stop, apply
from spotrun.head.journal import Unreadable
from spotrun.head.requests import Change
from spotrun.head.status import job_status, row
from spotrun.machine import private_paths
from spotrun.spec.fields import PRIORITY
from spotrun.text import to_json

log = logging.getLogger(__name__)

ALIVE_EVERY = 5.0  # seconds without a change after which `ctl follow` gets an empty line, as a sign that the head runs
NEWEST = 10  # jobs in a list of the newest ones
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Look = Callable[[], Awaitable[tuple[dict[str, Any], bool]]]  # a document as of now, and whether it is the last one


class ControlServer:
    """The control socket of one head."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def app(self) -> web.Application:
        """The web application behind the socket."""
        app = web.Application(middlewares=[_same_user, _explain, self._read_queue])
        app.router.add_post("/submit", self._submit)
        app.router.add_post("/stop", self._stop)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/priority", self._priority)
        app.router.add_post("/budget", self._budget)
        app.router.add_post("/relaunch", self._relaunch)
        app.router.add_post("/preempt", self._preempt)
        app.router.add_get("/status", self._status)
        app.router.add_get("/jobs", self._jobs)
        app.router.add_get("/follow", self._follow)
        app.router.add_get("/live", self._live)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _read_queue(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Before each request, read the queue, unless this head has read it. Every answer needs the queue."""
        await self._head.journal.read_queue()
        return await handler(request)

    async def _submit(self, request: web.Request) -> web.Response:
        asked = await _body(request)
        return web.json_response({"job": await self._head.submit(asked["job"], str(asked["code"]))})

    async def _stop(self, request: web.Request) -> web.Response:
        asked = await _body(request)
        job, group = asked.get("job"), asked.get("group")
        if group is not None:
            return web.json_response({"group": group, "jobs": await self._stop_group(str(group))})
        if job is not None:
            job = str(job)
            if await job_queue.take_out(self._head, job):
                return web.json_response({"job": job})
            state = await self._head.load(job)
            if kept := state.kept_node if job in self._head.states else None:
                await self._head.change(_stopped, job, kept=True)
                return web.json_response({"job": job, "kept": kept.member.node})
            if state.ended_already:
                how = f"{state.phase} ({state.reason})" if state.reason else state.phase
                raise SpotrunError(f"job {job} has already ended: {how}")
        return web.json_response({"job": (await self._head.change(_stopped, job)).id})

    async def _stop_group(self, group: str) -> list[str]:
        """Stop the jobs of a group that have not ended. Let go of nodes that ended ones keep. Returns all their ids."""
        jobs = [job.id for job in self._head.states.values() if job.spec.group == group and not job.over]
        aside = await job_queue.aside_in(self._head, group)
        if not jobs and not aside:
            raise SpotrunError(f"group {group} has no job that has not ended; `make jobs` lists the groups")
        changes = [self._head.change(_stopped, job, kept=True) for job in jobs]
        changed = await asyncio.gather(*changes, return_exceptions=True)  # one may have ended meanwhile
        stopped = [state.id for state in changed if isinstance(state, JobState)]
        return stopped + [job for job in aside if await job_queue.take_out(self._head, job)]

    async def _pause(self, request: web.Request) -> web.Response:
        def pause(job: JobState, _: float) -> JobState:
            if job.ending is not None or job.stopping:
                raise SpotrunError(f"job {job.id} is about to end")
            return job.replace(paused="paused by the operator")

        return await self._change(request, pause)

    async def _resume(self, request: web.Request) -> web.Response:
        def resume(job: JobState, now: float) -> JobState:
            if not job.paused:
                raise SpotrunError(f"job {job.id} is not paused")
            return job.replace(paused="", resumed_at=now)

        return await self._change(request, resume)

    async def _priority(self, request: web.Request) -> web.Response:
        wanted = (await _body(request))["to"]
        if type(wanted) is not int or abs(wanted) > PRIORITY:
            raise SpotrunError(
                f"priority {wanted!r} is not allowed: give a whole number from {-PRIORITY} to {PRIORITY}"
            )
        return await self._change(request, lambda job, _: job.replace(priority=wanted))

    async def _budget(self, request: web.Request) -> web.Response:
        asked = await _body(request)
        wanted, job = asked["to"], asked.get("job")
        if type(wanted) not in (int, float) or not 0 < wanted < math.inf:  # NaN is refused too
            raise SpotrunError(f"budget {wanted!r} is not allowed: give dollars, a number more than zero")
        job = await job_queue.set_budget(self._head, None if job is None else str(job), float(wanted))
        return web.json_response({"job": job})

    async def _change(self, request: web.Request, change: Change) -> web.Response:
        """Change the job that the request names, or the only one that has not ended."""
        job = (await _body(request)).get("job")
        return web.json_response({"job": (await self._head.change(change, None if job is None else str(job))).id})

    async def _relaunch(self, request: web.Request) -> web.Response:
        job = str((await _body(request)).get("job") or await self._current_job(alone=True))
        await self._head.relaunch(job)
        return web.json_response({"job": job})

    async def _preempt(self, request: web.Request) -> web.Response:
        asked = await _body(request)
        notice = asked.get("notice")
        if notice is not None and not 0 <= float(notice) < math.inf:  # NaN is refused too
            raise SpotrunError(f"notice {notice} is not allowed: give a number of seconds, 0 or more")
        await self._head.fleet.preempt(str(asked["node"]), None if notice is None else float(notice))
        return web.json_response({"node": asked["node"]})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._document(request.query.get("job")), dumps=to_json)

    async def _jobs(self, _: web.Request) -> web.Response:
        head = self._head
        unended = [*head.jobs, *head.journal.held]
        known = {each["id"]: each for each in head.status()["jobs"]}
        found = [known.get(job) or await job_queue.brief(head, job) for job in unended]
        ended = [each for each in await head.journal.newest(NEWEST) if each.id not in unended]
        found += [_unreadable(each) if isinstance(each, Unreadable) else row(each) for each in ended]
        # Operators of version 0.1 read `job`.
        return web.json_response([{"job": each["id"], **each} for each in found], dumps=to_json)

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        """Send a status document in one line whenever it has changed. Stop after the job has ended."""
        head = self._head
        job = request.query.get("job") or await self._current_job()
        if job in head.journal.held:
            raise SpotrunError(
                f"job {job} has been held since the cluster was brought up; `make relaunch ID={job}` continues it"
            )
        await head.load(job)

        async def look() -> tuple[dict[str, Any], bool]:
            document = await self._document(job)
            return document, bool(document["job"]["ended"])

        return await self._send_changes(request, look)

    async def _metrics(self, _: web.Request) -> web.Response:
        from spotrun.head import exposition  # loads a library that most heads never need

        return web.json_response({"text": exposition.text(self._head)})

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Send the overview in one line whenever it has changed, until the connection closes."""
        rows: dict[str, dict[str, Any]] = {}  # of held jobs, which do not change while they are held

        async def look() -> tuple[dict[str, Any], bool]:
            held = list(self._head.journal.held)
            for job in [each for each in held if each not in rows]:
                rows[job] = await job_queue.brief(self._head, job)
            found = overview.of(self._head)
            parked = [each.row for each in self._head.parked.values()]
            known = {each["id"] for each in found["jobs"]}
            found["jobs"] += [each for each in (*(rows[job] for job in held), *parked) if each["id"] not in known]
            return found, False

        return await self._send_changes(request, look)

    async def _send_changes(self, request: web.Request, look: Look) -> web.StreamResponse:
        """Send a document in one line whenever it has changed; an empty line after ALIVE_EVERY s without change."""
        response = web.StreamResponse()
        await response.prepare(request)
        last, written = "", 0.0
        # If the bucket does not answer, stop sending. The operator's next request gets an answer that says why.
        with contextlib.suppress(ConnectionError, StoreError):
            while True:
                began = time.thread_time()
                document, over = await look()
                text = to_json(document)
                took = time.thread_time() - began
                if text != last or time.monotonic() - written >= ALIVE_EVERY:
                    await response.write((text if text != last else "").encode() + b"\n")
                    last, written = text, time.monotonic()
                if over:
                    break
                await asyncio.sleep(turn_timing.follow(took))  # the next line has all changes
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_EVERY / 2), self._head.published:
                        await self._head.published.wait()
        return response

    async def _document(self, job: str | None) -> dict[str, Any]:
        """The status document about `job`. None: about the active job."""
        head = self._head
        document = head.status(job)
        if job is not None and job not in head.states:
            found = job_status(await head.load(job))
            if job in head.journal.held:
                found |= {"phase": "held", "members": []}
            document |= {"job": found, "events": await head.journal.events(job)}
        return document

    async def _current_job(self, alone: bool = False) -> str:
        """The job that a request without an id is about: see `Head.job`. alone: refuse if there are several.

        Raises `SpotrunError` if this head has had no job.
        """
        head = self._head
        if alone and len(head.jobs) > 1:
            names = ", ".join(head.jobs)
            raise SpotrunError(f"{len(head.jobs)} jobs have not ended: {names}; name one of them with ID=")
        if head.job is not None:
            return head.job.id
        if head.journal.held:
            held = ", ".join(head.journal.held)
            raise SpotrunError(
                f"no job runs; these jobs have been held since the cluster was brought up: {held}; name one of them"
                " with ID="
            )
        ids = [each.id for each in await head.journal.newest(NEWEST)]
        if not ids:
            raise SpotrunError("no job has run on this cluster yet")
        raise SpotrunError(f"no job has run since this head began; name one of these: {', '.join(ids)}")


def _unreadable(job: Unreadable) -> dict[str, Any]:
    """The row of a job that has ended, as far as is known, and whose state a later version may have written."""
    return {"id": job.id, "phase": "unreadable", "reason": job.reason}


def _stopped(job: JobState, now: float) -> JobState:
    return apply(job, Stop("stopped by the operator"), now)


async def _body(request: web.Request) -> dict[str, Any]:
    found = await request.json()
    if not isinstance(found, dict):
        raise SpotrunError("the request is not a JSON object")
    return found


@web.middleware
async def _same_user(request: web.Request, handler: Handler) -> web.StreamResponse:
    peer = request.transport.get_extra_info("socket") if request.transport else None
    if peer is None or not private_paths.is_own_peer(peer):
        log.warning("refused a request on the control socket: another user sent it")
        return web.json_response(
            {"error": "this socket is for root and for the user that the head runs as"}, status=403
        )
    return await handler(request)


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an error with one line. Status 503: the same request may succeed later; 400: it is wrong."""
    try:
        return await handler(request)
    except StoreError as error:
        return web.json_response({"error": str(error)}, status=503)
    except SpotrunError as error:
        return web.json_response({"error": str(error)}, status=400)
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return web.json_response({"error": f"not a valid request: {lines}"}, status=400)
    except (KeyError, TypeError, ValueError) as error:
        return web.json_response({"error": f"not a valid request: {error}"}, status=400)
