"""Watch for the cloud's notice that it will take this machine.

GCE: a long poll on `instance/preempted` and `instance/maintenance-event`. GCE does not say how much time is left, so
`Terms` has it: 30 s or 120 s to a preemption (https://cloud.google.com/compute/docs/instances/spot#preemption-process),
an hour to maintenance with GPUs (https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance), a minute otherwise.
Without GPUs, GCE announces maintenance only to machines that it moves to another host:
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice.
EC2: a poll of `spot/instance-action`, as AWS advises. The answer has the time
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html). Less often, a poll of
`events/maintenance/scheduled`: AWS says days before that it will stop or reboot a machine
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitoring-instances-status-check_sched.html).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

import aiohttp

from spotrun.backoff import Backoff
from spotrun.machine.metadata import Ec2Metadata, GceMetadata, Metadata
from spotrun.spec import names
from spotrun.spec.notices import EC2_NOTICE, GCE_NOTICE, RETIRE_LEAD
from spotrun.wire import Notice

log = logging.getLogger(__name__)

GCE_MAINTENANCE_SECONDS = 60.0
LOOK = 30.0  # seconds until a notice's time is compared with the clock again: the clock may have been set
LONG_POLL_SECONDS = 10  # the longest time until a silent server is noticed
EC2_POLL_SECONDS = 1.0
EC2_EVENTS_SECONDS = 60.0
EC2_HORIZON = 86400.0  # seconds; the time of a notice that is further away is junk, or of an event that long ago
# Events that end or interrupt what runs on the machine.
EC2_EVENTS = {"instance-reboot", "instance-retirement", "instance-stop", "system-maintenance", "system-reboot"}
EC2_PATHS = {"preempt": "/spot/instance-action", "rebalance": "/events/recommendations/rebalance"}
EC2_SLOW_PATHS = {"maintenance": "/events/maintenance/scheduled"}
BACKOFF = (0.2, 5.0)  # seconds between tries while the server does not answer: the first pause, the longest
RANK = {"preempt": 2, "maintenance": 1, "rebalance": 0}  # the highest is the most serious

Callback = Callable[[Notice | None], None]
Put = Callable[[str, Notice | None], None]


@dataclass(frozen=True)
class Terms:
    """How long a notice of this machine's cloud is, and when a notice begins to count. In seconds."""

    preempt: float = GCE_NOTICE  # from the notice of preemption until GCE presses the power button, or ends the machine
    maintenance: float = GCE_MAINTENANCE_SECONDS  # from GCE's notice of maintenance until the machine stops
    lead: float = RETIRE_LEAD  # a notice counts from this long before the end; until then, it is only announced

    @classmethod
    def of(cls, attributes: Mapping[str, str]) -> Terms:
        """The terms in the machine's metadata. A value that is missing or junk gets its default."""

        def seconds(key: str, default: float) -> float:
            text = attributes.get(key, "")
            return float(text) if text.isascii() and text.isdecimal() and len(text) < 7 else default

        return cls(seconds(names.PREEMPT_NOTICE, cls.preempt), seconds(names.MAINTENANCE_NOTICE, cls.maintenance))

    @property
    def least(self) -> Terms:
        """The shortest terms that Google gives, for a notice that may be older than this agent."""
        return Terms(min(self.preempt, GCE_NOTICE), min(self.maintenance, GCE_MAINTENANCE_SECONDS), self.lead)

    def begins(self, notice: Notice) -> float:
        """When a notice begins to count, epoch seconds."""
        return notice.deadline - self.lead


USUAL = Terms()


class _Notices:
    """The notices that the cloud has not withdrawn."""

    def __init__(self, terms: Terms, on_now: Callback, on_coming: Callback) -> None:
        self._terms, self._on_now, self._on_coming = terms, on_now, on_coming
        self._found: dict[str, Notice] = {}
        self._now: Notice | None = None  # the most serious notice that counts
        self._coming: Notice | None = None  # the next notice that will count
        self._timer: asyncio.TimerHandle | None = None

    def put(self, kind: str, notice: Notice | None) -> None:
        """Take the newest notice of one kind; None: there is none."""
        if notice is None:
            self._found.pop(kind, None)
        else:
            self._found[kind] = notice
        self._tell()

    def put_first(self, kind: str, notice: Notice | None) -> None:
        """As `put`, but an earlier notice stays: GCE's deadline counts from the first time the notice was seen."""
        self.put(kind, notice and self._found.get(kind, notice))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        self.close()
        at = time.time()
        due = [notice for notice in self._found.values() if self._terms.begins(notice) <= at]
        later = [notice for notice in self._found.values() if notice not in due]
        now = max(due, key=lambda notice: RANK[notice.kind], default=None)
        coming = min(later, key=lambda notice: notice.deadline, default=None)
        if coming is not None:
            wait = min(LOOK, self._terms.begins(coming) - at)
            self._timer = asyncio.get_running_loop().call_later(wait, self._tell)
        before, self._now, self._coming = (self._now, self._coming), now, coming
        if coming != before[1]:
            self._on_coming(coming)
        if now != before[0]:
            self._on_now(now)


async def watch(
    metadata: Metadata, callback: Callback, terms: Terms = USUAL, coming: Callback = lambda notice: None
) -> None:
    """Call back with the most serious notice that counts whenever it changes; None: no notice counts. Never returns.

    coming: called in the same way with the next notice that does not count yet.
    """
    notices = _Notices(terms, callback, coming)
    try:
        if isinstance(metadata, GceMetadata):
            paths = ("preempted", "maintenance-event")
            await asyncio.gather(*(_watch_gce(metadata, path, terms, notices.put_first) for path in paths))
        else:
            often = _watch_ec2(metadata, EC2_PATHS, EC2_POLL_SECONDS, notices.put)
            await asyncio.gather(often, _watch_ec2(metadata, EC2_SLOW_PATHS, EC2_EVENTS_SECONDS, notices.put))
    finally:
        notices.close()


def parse_gce(path: str, text: str, now: float, terms: Terms = USUAL) -> Notice | None:
    """The notice in an answer of GCE's server; None: there is none. Raises ValueError for junk."""
    if path == "preempted":
        if text not in ("TRUE", "FALSE"):
            raise ValueError("neither TRUE nor FALSE")
        return Notice(kind="preempt", deadline=now + terms.preempt) if text == "TRUE" else None
    if text in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"):  # a migration pauses the machine and does not end it
        return None
    if text != "TERMINATE_ON_HOST_MAINTENANCE":
        raise ValueError("not a maintenance event")
    return Notice(kind="maintenance", deadline=now + terms.maintenance)


def parse_ec2(kind: str, text: str, now: float) -> Notice | None:
    """The notice in an answer of EC2's server; None: there is none. Raises ValueError for junk."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("lists too deep") from None
    if kind == "maintenance":
        return _first_event(value, now)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    if kind == "preempt" and value.get("action") not in ("terminate", "stop", "hibernate"):
        raise ValueError("not an instance action")
    at = _epoch(value.get("time" if kind == "preempt" else "noticeTime"))
    if abs(at - now) > EC2_HORIZON:
        raise ValueError("a time more than a day away")
    if kind == "preempt":
        return Notice(kind="preempt", deadline=at)
    return Notice(kind="rebalance", deadline=at + EC2_NOTICE)  # as if EC2's notice came at this time


def _first_event(events: object, now: float) -> Notice | None:
    """The notice of the scheduled event that begins first. Raises ValueError for junk."""
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("not a list of events")
    ours = [each for each in events if each.get("State") == "active" and str(each.get("Code")) in EC2_EVENTS]
    times = [_event_time(event.get("NotBefore")) for event in ours]
    deadline = min((at for at in times if at >= now - EC2_HORIZON), default=None)
    return None if deadline is None else Notice(kind="maintenance", deadline=deadline)


async def _watch_gce(metadata: GceMetadata, path: str, terms: Terms, put: Put) -> None:
    kind = "preempt" if path == "preempted" else "maintenance"
    etag = ""
    backoff = Backoff(*BACKOFF)
    while True:
        # The server answers the first request at once, and later requests when the value changes.
        query = f"?wait_for_change=true&timeout_sec={LONG_POLL_SECONDS}&last_etag={quote(etag)}" if etag else ""
        try:
            answer = await metadata.get(f"/instance/{path}", query, LONG_POLL_SECONDS if etag else 0.0)
            if answer.status != 200:
                raise aiohttp.ClientPayloadError(f"status {answer.status}")
            # The age of a notice in the first answer is not known.
            notice = parse_gce(path, answer.text, time.time(), terms if etag else terms.least)
        except (TimeoutError, OSError, aiohttp.ClientError, ValueError) as error:
            log.warning("metadata instance/%s: no usable answer, trying again: %r", path, error)
            etag = ""
            await asyncio.sleep(backoff.next())
            continue
        backoff.reset()
        put(kind, notice)
        etag = answer.headers.get("ETag", "")
        if not etag or etag == "0":
            await asyncio.sleep(EC2_POLL_SECONDS)  # a server without ETags answers every request at once


async def _watch_ec2(metadata: Ec2Metadata, paths: Mapping[str, str], pause: float, put: Put) -> None:
    backoff = Backoff(*BACKOFF)
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
            await asyncio.sleep(backoff.next())
            continue
        backoff.reset()
        await asyncio.sleep(pause)


def _event_time(text: object) -> float:
    """The time of a scheduled event, such as `21 Jan 2019 09:00:43 GMT`, epoch seconds. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("no time")
    return datetime.strptime(text, "%d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC).timestamp()


def _epoch(text: object) -> float:
    if not isinstance(text, str):
        raise ValueError("no time")
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
