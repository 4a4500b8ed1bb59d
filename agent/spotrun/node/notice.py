"""Watching for the cloud's word that this machine will be taken.

GCE: a long poll on `instance/preempted` and `instance/maintenance-event`; 30 s are left from then on
(https://cloud.google.com/compute/docs/instances/preemptible, "Preemption process"; the minute of a maintenance event:
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice).
EC2: `spot/instance-action` is polled, as AWS advises, and says when
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import quote

import aiohttp

from spotrun.node.metadata import Ec2Metadata, GceMetadata, Metadata
from spotrun.wire import Notice

log = logging.getLogger(__name__)

GCE_PREEMPT_SECONDS = 30.0
GCE_MAINTENANCE_SECONDS = 60.0
EC2_REBALANCE_SECONDS = 120.0  # a recommendation names no end; the notice, when it comes, leaves two minutes
LONG_POLL_SECONDS = 10  # a server that has gone silent is noticed that soon
EC2_POLL_SECONDS = 1.0
EC2_HORIZON = 86400.0  # seconds; a time further away than this is junk
BACKOFF = (0.2, 5.0)  # seconds between tries while the server is away: the first pause, the longest
RANK = {"preempt": 2, "maintenance": 1, "rebalance": 0}

Callback = Callable[[Notice | None], None]


async def watch(metadata: Metadata, callback: Callback) -> None:
    """Call back with the gravest notice whenever it changes, and with None when none is left. Never returns."""
    found: dict[str, Notice] = {}

    def put(kind: str, notice: Notice | None) -> None:
        before = _gravest(found)
        if notice is None:
            found.pop(kind, None)
        else:
            found.setdefault(kind, notice)  # the deadline counts from the first time it was seen
        if _gravest(found) != before:
            callback(_gravest(found))

    if isinstance(metadata, GceMetadata):
        await asyncio.gather(_watch_gce(metadata, "preempted", put), _watch_gce(metadata, "maintenance-event", put))
    else:
        await _watch_ec2(metadata, put)


def parse_gce(path: str, text: str, now: float) -> Notice | None:
    """The notice in an answer of GCE's server. Raises ValueError for junk."""
    if path == "preempted":
        if text not in ("TRUE", "FALSE"):
            raise ValueError("neither TRUE nor FALSE")
        return Notice(kind="preempt", deadline=now + GCE_PREEMPT_SECONDS) if text == "TRUE" else None
    if text in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"):  # a migration pauses the machine, it does not end it
        return None
    if text != "TERMINATE_ON_HOST_MAINTENANCE":
        raise ValueError("not a maintenance event")
    return Notice(kind="maintenance", deadline=now + GCE_MAINTENANCE_SECONDS)


def parse_ec2(kind: str, text: str, now: float) -> Notice:
    """The notice in an answer of EC2's server. Raises ValueError for junk."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("lists too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    if kind == "preempt" and value.get("action") not in ("terminate", "stop", "hibernate"):
        raise ValueError("not an instance action")
    at = _epoch(value.get("time" if kind == "preempt" else "noticeTime"))
    if abs(at - now) > EC2_HORIZON:
        raise ValueError("a time more than a day away")
    if kind == "preempt":
        return Notice(kind="preempt", deadline=at)
    return Notice(kind="rebalance", deadline=at + EC2_REBALANCE_SECONDS)


async def _watch_gce(metadata: GceMetadata, path: str, put: Callable[[str, Notice | None], None]) -> None:
    kind = "preempt" if path == "preempted" else "maintenance"
    etag = ""
    pause = _Pause()
    while True:
        # The first answer is the state as it is; from then on the server answers when it is another.
        query = f"?wait_for_change=true&timeout_sec={LONG_POLL_SECONDS}&last_etag={quote(etag)}" if etag else ""
        try:
            answer = await metadata.get(f"/instance/{path}", query, LONG_POLL_SECONDS if etag else 0.0)
            if answer.status != 200:
                raise aiohttp.ClientPayloadError(f"status {answer.status}")
            notice = parse_gce(path, answer.text, time.time())
        except (TimeoutError, OSError, aiohttp.ClientError, ValueError) as error:
            log.warning("metadata instance/%s: no usable answer, trying again: %r", path, error)
            etag = ""
            await pause()
            continue
        pause.reset()
        put(kind, notice)
        if not answer.etag or answer.etag == "0":
            await asyncio.sleep(EC2_POLL_SECONDS)  # a server without ETags would answer at once for ever
        etag = answer.etag


async def _watch_ec2(metadata: Ec2Metadata, put: Callable[[str, Notice | None], None]) -> None:
    paths = {"preempt": "/spot/instance-action", "rebalance": "/events/recommendations/rebalance"}
    pause = _Pause()
    junk: dict[str, str] = {}
    while True:
        try:
            for kind, path in paths.items():
                answer = await metadata.get(path)
                if answer.status not in (200, 404):
                    raise aiohttp.ClientPayloadError(f"{path}: status {answer.status}")
                try:
                    put(kind, parse_ec2(kind, answer.text, time.time()) if answer.status == 200 else None)
                except ValueError as error:
                    if junk.get(kind) != answer.text:
                        log.warning("metadata %s: ignored, %s: %.200r", path, error, answer.text)
                    junk[kind] = answer.text
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            log.warning("metadata server: no answer, trying again: %r", error)
            await pause()
            continue
        pause.reset()
        await asyncio.sleep(EC2_POLL_SECONDS)


class _Pause:
    """Waits longer each time it is called, until it is reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._seconds = BACKOFF[0]

    async def __call__(self) -> None:
        await asyncio.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, BACKOFF[1])


def _gravest(found: dict[str, Notice]) -> Notice | None:
    return max(found.values(), key=lambda notice: RANK[notice.kind], default=None)


def _epoch(text: object) -> float:
    if not isinstance(text, str):
        raise ValueError("no time")
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
