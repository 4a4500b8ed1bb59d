"""What the head keeps in the bucket: the queue, and the state and the events of each job. A new head reads them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

from spotrun.errors import BadKeyError, JobNotFound, StoreError, UnreadableError
from spotrun.head.events import Event, read_events
from spotrun.head.fenced import FencedStore
from spotrun.head.job_state import ENDED, JobState, by_clock
from spotrun.head.timeline import Timeline, read
from spotrun.state import checkpoints
from spotrun.store import Store, epoch_key, job_key, queue_key, up_key
from spotrun.wire import Manifest, QueueRecord, StateRef, problem, read_queue

log = logging.getLogger(__name__)

PROGRESS = (
    "progress",
    "reached",
    "pace",
    "speeds",
    "slow",
    "node_seconds",
    "timeline",
    "spent",
    "cost",
    "account",
    "unpriced",
    "hourly",
    "counted_at",
)
EMPTY = Timeline()
TIMELINE_EVERY = 10.0  # seconds between writes of a timeline
PROGRESS_EVERY = 2.0  # seconds between writes of a state in which only progress changed
_STAMPED = r"(?P<id>[^/]+-(?P<stamp>[0-9]{8}-[0-9]{6})(?:-(?P<number>[0-9]+))?)"
_ID = re.compile(_STAMPED)
STATE_KEY = re.compile(rf"jobs/{_STAMPED}/state\.json")
NEWEST = 5  # ids in a message


@dataclass(frozen=True)
class Unreadable:
    """A job whose state cannot be read."""

    id: str
    reason: str  # why not


@dataclass(frozen=True)
class _Written:
    """What this head has written of a job."""

    job: JobState | None = None
    at: float = 0.0
    event: Event | None = None  # the newest one
    timeline: Timeline = EMPTY
    timeline_at: float = 0.0  # when the timeline was written


class Journal:
    """The records of one cluster. All methods raise `StoreError` when the bucket does not answer."""

    def __init__(self, store: Store, cluster: str) -> None:
        self.store = store
        self._queue: QueueRecord | None = None  # None: not read yet
        self._cluster = cluster
        self._fenced = FencedStore(store)
        self._queueing = asyncio.Lock()  # otherwise an older queue could reach the bucket last
        self._written: dict[str, _Written] = {}  # by job, since this head took it up
        # By job: otherwise an older state could reach the bucket last.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def queue(self) -> list[str] | None:
        """Ids of the jobs that have not ended, or keep a node, in order of submission; None: not read yet."""
        return None if self._queue is None else list(self._queue.jobs)

    @property
    def held(self) -> list[str]:
        """Ids of the jobs that wait for the operator."""
        return [] if self._queue is None else list(self._queue.held)

    async def read_queue(self) -> list[str]:
        """Ids of the jobs in the queue. Reads the bucket the first time."""
        async with self._queueing:
            return list((await self._known_queue()).jobs)

    async def enqueue(self, job: str) -> None:
        """Add a job. If it was held, it no longer is."""
        async with self._queueing:
            queue = await self._known_queue()
            kept = without(queue, job)
            await self._write_queue(kept.replace(jobs=(*kept.jobs, job)))

    async def dequeue(self, job: str) -> None:
        """Remove a job from the queue, or from the held jobs."""
        async with self._queueing:
            await self._write_queue(without(await self._known_queue(), job))

    async def _known_queue(self) -> QueueRecord:
        if self._queue is None:
            data = await self._fenced.find(queue_key(self._cluster))
            found, queue = await asyncio.to_thread(self._parse_queue, data)
            if found != queue:
                await self._write_queue(queue)
            self._queue = queue
        return self._queue

    async def _write_queue(self, queue: QueueRecord) -> None:
        await self._fenced.put(queue_key(self._cluster), queue.model_dump_json().encode())
        self._queue = queue

    def _parse_queue(self, data: bytes | None) -> tuple[QueueRecord | None, QueueRecord]:
        """The queue as the bucket has it, and the queue as this head continues with it. The first head writes one."""
        document = self.store.find(up_key(self._cluster))
        up = hashlib.sha256(document).hexdigest()[:16] if document else ""
        try:
            if data is None and self._was_led():
                raise ValueError("it has been deleted")
            found = read_queue(data)
        except ValueError as error:
            what = f"{queue_key(self._cluster)} is not readable: {problem(error)}"
            log.warning("%s; the queue is rebuilt from the jobs' states", what)
            found = QueueRecord(jobs=tuple(self._unended()), up=up)
        if data is None:
            return None, found
        if up in ("", found.up):
            return found, found
        states = {job: _state(self.store.find(job_key(job, "state.json"))) for job in found.jobs}
        left = [job for job, state in states.items() if not (state and state.ended_already)]
        log.info("the cluster was brought up again: held: %s", ", ".join(left) or "no job")
        return found, QueueRecord(jobs=(), held=(*found.held, *left), up=up)

    def _was_led(self) -> bool:
        """Whether the cluster has had a head before this one."""
        return len(self.store.list(epoch_key(self._cluster, 0).rsplit("/", 1)[0])) > 1

    def _unended(self) -> list[str]:
        """Ids of the cluster's jobs that have not ended, or keep a node; those that had begun come first."""
        waiting: list[tuple[bool, float, str]] = []
        for job, data in self._documents():
            if state := _state(data):
                if state.cluster == self._cluster and not state.over:
                    waiting.append((state.phase == "queued", state.submitted, job))
            # A job whose state cannot be read may be training now.
            elif _unended_here(data, self._cluster):
                waiting.append((False, 0.0, job))
        return [job for _, _, job in sorted(waiting)]

    async def newest(self, count: int) -> list[JobState | Unreadable]:
        """The jobs of the cluster that were submitted last, newest first."""
        found = (self._own(job, data) for job, data in self._documents())
        own = (each for each in found if each is not None)
        return await asyncio.to_thread(lambda: list(islice(own, count)))

    def _own(self, job: str, data: bytes) -> JobState | Unreadable | None:
        """A job of the cluster; None if the state is of another cluster's job."""
        try:
            state = self._parse(job, data)
        except UnreadableError as error:
            return Unreadable(job, str(error)) if _values(data).get("cluster") == self._cluster else None
        return state if state.cluster == self._cluster else None

    def _documents(self) -> Iterator[tuple[str, bytes]]:
        """Each job of the bucket with the bytes of its state, newest first by the time in the job's id."""
        for _, _, job in stamped(state_keys(self.store)):
            if (data := self.store.find(job_key(job, "state.json"))) is not None:
                yield job, data

    async def ids(self) -> dict[str, str]:
        """The ids of all jobs in the bucket, newest first by the time in the id; for each the job's name."""
        return await asyncio.to_thread(names, self.store)

    async def create(self, state: JobState) -> JobState:
        """Write a new job's file, but not its state; its id gets a number if it is taken."""
        stem, number = state.id, 1
        spec = state.spec.model_dump_json(indent=2).encode()
        while not await asyncio.to_thread(self.store.create, job_key(state.id), spec):
            number += 1
            state = state.replace(id=f"{stem}-{number}")
        return state

    async def replace(self, state: JobState) -> None:
        """Write a job's state."""
        async with self._lock(state.id):
            await self._replace(state)

    async def _replace(self, state: JobState) -> None:
        await self._fenced.put(job_key(state.id, "state.json"), state.model_dump_json().encode())

    def _lock(self, job: str) -> asyncio.Lock:
        """Held while a job's state or events are read or written as this head's own."""
        return self._locks.setdefault(job, asyncio.Lock())

    async def read(self, job: str, own: bool = False) -> JobState:
        """A job's state. Raises `JobNotFound`, or `UnreadableError` if the state cannot be read.

        own: this head is going to replace the state.
        """
        if not own:
            return await self._read(job, own=False)
        async with self._lock(job):
            return await self._read(job, own=True)

    async def _read(self, job: str, own: bool) -> JobState:
        return self._parse(job, await self._find(job, own))

    async def _find(self, job: str, own: bool) -> bytes:
        data, key = None, job_key(job, "state.json")
        if re.fullmatch(r"[a-z0-9][a-z0-9-]*", job):  # anything else could name another object
            data = await (self._fenced.find(key) if own else asyncio.to_thread(self.store.find, key))
        if data is None:
            known = "" if own else await asyncio.to_thread(namesakes, self.store, job)
            raise JobNotFound(f"there is no job {job} in {self.store.url}{known}")
        return data

    def _parse(self, job: str, data: bytes) -> JobState:
        try:
            return JobState.model_validate_json(data)
        except ValueError as error:
            key = job_key(job, "state.json")
            raise UnreadableError(f"{self.store.url}: {key} is not readable: {problem(error)}") from None

    async def take_up(self, job: str, epoch: int, now: float) -> tuple[JobState, list[Event], list[str]]:
        """A job that head `epoch` takes over, with the checkpoints that are in the bucket, and its events.

        The last value: keys of the state that this version does not know. The next write leaves them out.
        A checkpoint is not under way any more if the last head died between completing it and writing that down. For
        the clock of the last head, see `job_state.by_clock`.
        """
        async with self._lock(job):
            data = await self._find(job, own=True)
            state, unknown = self._parse(job, data), sorted(json.loads(data).keys() - JobState.model_fields.keys())
            events = read_events(await self._fenced.find(job_key(job, "events.jsonl")))
            timeline = read(await self._fenced.find(job_key(job, "timeline.json")), state.counted_at)
        try:
            complete = await asyncio.to_thread(checkpoints.list_complete, self.store, job, strict=True)
        except BadKeyError as error:  # no other try would help, and the other jobs must not wait for this one
            raise UnreadableError(str(error)) from None
        self._written.pop(job, None)
        # If none is complete any more, the workers are told of those that were: they say what cannot be read. Otherwise
        # the job would begin again at step 0, and its next checkpoint would remove what can be repaired.
        complete = complete or list(state.checkpoints)
        # With the new epoch this state differs from the last one, so an older head that still runs cannot replace it.
        state = state.replace(checkpoints=tuple(complete), epoch=epoch, timeline=timeline)
        if (kept := state.kept_node) and (most := state.spec.keep_on_failure):
            state = state.replace(kept_node=kept.replace(until=min(kept.until, now + most)))
        if (saving := state.saving) and (saving.ref.generation, saving.ref.step) <= state.newest:
            state = state.replace(saving=None)
        return by_clock(state, now), events, unknown

    async def events(self, job: str) -> list[Event]:
        """The events of a job as the bucket has them."""
        return read_events(await asyncio.to_thread(self.store.find, job_key(job, "events.jsonl")))

    async def write(self, job: JobState, events: list[Event], now: float) -> None:
        """Write the job's state if it has changed. If only progress has changed, write every PROGRESS_EVERY."""
        async with self._lock(job.id):
            if self.urgent(job) or self.due(job, now):
                await self._write(job, events, now)

    async def write_progress(
        self, find: Callable[[], JobState | None], job: str, events: list[Event], now: float
    ) -> None:
        """Write the job's state unless more than progress has changed. find: the state at that moment."""
        async with self._lock(job):
            state = find()
            if state is not None and not self.urgent(state) and self.due(state, now):
                await self._write(state, events, now)

    async def _write(self, job: JobState, events: list[Event], now: float) -> None:
        last = self._written.get(job.id) or _Written()
        newest, events_write = events[-1] if events else None, list[tuple[str, bytes]]()
        if newest is not last.event:
            events_write = [(job_key(job.id, "events.jsonl"), "".join([event.line for event in events]).encode())]
        if job.ended_already:  # events first: after the end of a job is written, no head writes its events any more
            await self._put_all(events_write)
            events_write = []
        # Orders wait for an urgent write. So it leaves the timeline out, and writes the others at the same time.
        rests = not self.urgent(job) and now - last.timeline_at >= TIMELINE_EVERY
        if (rests or job.ended_already) and job.timeline != last.timeline:
            await self._fenced.put(job_key(job.id, "timeline.json"), job.timeline.text())
            last = replace(last, timeline=job.timeline, timeline_at=now)
        await self._put_all([*events_write, (job_key(job.id, "state.json"), job.model_dump_json().encode())])
        self._written[job.id] = replace(last, event=newest, job=job, at=now)

    async def _put_all(self, objects: list[tuple[str, bytes]]) -> None:
        """Write objects at the same time. Raises the error of the first one that failed, after all have ended."""
        for failed in await asyncio.gather(*(self._fenced.put(*each) for each in objects), return_exceptions=True):
            if failed is not None:
                raise failed

    def due(self, job: JobState, now: float) -> bool:
        """Whether progress is new, and none has been written for PROGRESS_EVERY."""
        last = self._written.get(job.id) or _Written()
        return job != last.job and now - last.at >= PROGRESS_EVERY

    def urgent(self, job: JobState) -> bool:
        """Whether a change that is more than progress is not in the bucket yet."""
        last = self._written.get(job.id)
        if last is None or last.job is None:
            return True
        return last.job is not job and _essence(last.job) != _essence(job)

    def has(self, job: JobState) -> bool:
        """Whether exactly this state is in the bucket."""
        last = self._written.get(job.id)
        return last is not None and last.job == job

    def ended(self, job: str) -> bool:
        """Whether this head has written that the job has ended."""
        last = self._written.get(job)
        return last is not None and last.job is not None and last.job.ended_already

    def forget(self, job: str) -> None:
        """Keep nothing of a job any more: another head, or a later relaunch, may have written it."""
        self._written.pop(job, None)

    async def complete(self, manifest: Manifest, keep: int) -> list[StateRef]:
        """Write a checkpoint's manifest and prune older checkpoints. Returns those that count now, newest first.

        The checkpoint counts even if the bucket refuses to remove older ones.
        """
        await asyncio.to_thread(checkpoints.publish, self.store, manifest)
        try:
            await asyncio.to_thread(checkpoints.prune, self.store, manifest.job, keep)
        except StoreError as error:
            log.warning("job %s: older checkpoints stay until the next one is complete: %s", manifest.job, error)
        return await asyncio.to_thread(checkpoints.list_complete, self.store, manifest.job)


def state_keys(store: Store) -> list[str]:
    """The keys of the states of all jobs in the bucket. A state may be missing while its job is made or removed."""
    return [job_key(job, "state.json") for job in store.folders("jobs")]


def names(store: Store) -> dict[str, str]:
    """The ids of all jobs in the bucket, newest first by the time in the id; for each the job's name."""
    return {id: id[: id.index(f"-{stamp}")] for stamp, _, id in stamped(state_keys(store))}


def namesakes(store: Store, name: str) -> str:
    """For the end of a message that no job has this id: the newest jobs that have it as their name; empty: none."""
    found = [] if _ID.fullmatch(name) else [id for id, each in names(store).items() if each == name]
    return f"; {name} is a job's name; give an id: {', '.join(found[:NEWEST])}" if found else ""


def stamped(keys: Iterable[str]) -> list[tuple[str, int, str]]:
    """Time, number and id of each job with a state, newest first."""
    found = (STATE_KEY.fullmatch(key) for key in keys)
    return sorted(((m["stamp"], int(m["number"] or 1), m["id"]) for m in found if m), reverse=True)


# All values of a job but its progress. If a head dies, the last seconds of progress may be missing in the bucket.
_essence: Callable[[JobState], tuple[object, ...]] = attrgetter(
    *(name for name in JobState.model_fields if name not in PROGRESS)
)


def without(queue: QueueRecord, job: str) -> QueueRecord:
    """The queue without a job."""
    jobs, held = (tuple(each for each in ids if each != job) for ids in (queue.jobs, queue.held))
    return queue.replace(jobs=jobs, held=held)


def _state(data: bytes | None) -> JobState | None:
    """A job's state; None if it cannot be read."""
    try:
        return JobState.model_validate_json(data or b"")
    except ValueError:
        return None


def _unended_here(data: bytes, cluster: str) -> bool:
    """Whether an unreadable state still shows that its job belongs to the cluster and has not ended."""
    found = _values(data)
    return found.get("cluster") == cluster and found.get("phase") not in ENDED


def _values(data: bytes) -> dict[str, Any]:
    """What a state that cannot be read has all the same; empty if it is no JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
