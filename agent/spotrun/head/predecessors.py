"""The jobs that a job waits for: their names at its submission, and later how they ended.

A job waits for jobs that were submitted before it, and `JobState.after` has their ids. So no two jobs wait for each
other. The end of a job counts once it is in the bucket: the job has then left the queue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from spotrun.errors import JobNotFound, SpecError, UnreadableError
from spotrun.folders import Input
from spotrun.head.job_state import JobState, Stop, apply
from spotrun.head.journal import Journal
from spotrun.spec import JobSpec
from spotrun.spec.file import nearest

TRY_EVERY = 10.0  # seconds between two tries to read a job whose end is not known


class End(NamedTuple):
    """What is known of a job that has left the queue."""

    job: JobState | None  # None: its state has been deleted
    unread: str = ""  # why its end is not known; empty: it is known
    at: float = 0.0  # when the head read it


class Predecessors:
    """The ends of the jobs that others wait for. Each is read once: it does not change while the job is ended."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ends: dict[str, End] = {}

    async def resolve(self, spec: JobSpec, cluster: str) -> JobSpec:
        """The job file with ids in the place of names. Raises `SpecError` if there is no such job."""
        after = [(await self._find("after", name, cluster)).id for name in spec.after]
        inputs = {}
        for name, (job, folder) in spec.sources.items():
            found, key = await self._find(f"inputs.{name}", job, cluster), f"inputs.{name}: {job}/{folder}"
            if folder not in found.spec.keep:
                kept = f"it keeps {', '.join(found.spec.keep)}" if found.spec.keep else "it keeps none"
                raise SpecError(f"{key}: {found.id} does not keep that folder; {kept}")
            inputs[name] = f"{found.id}/{folder}"
        return spec.model_copy(update={"after": tuple(after), "inputs": inputs})

    async def read(self, jobs: Iterable[JobState], unended: Collection[str], now: float) -> Mapping[str, End]:
        """The ends of the jobs that these jobs wait for. unended: jobs that have not left the queue."""
        awaited = {id for job in jobs if not job.ended_already for id in job.after} - set(unended)
        self._ends = {id: end for id, end in self._ends.items() if id in awaited}
        for id in awaited:
            known = self._ends.get(id)
            if known is None or (known.unread and now - known.at >= TRY_EVERY):
                self._ends[id] = await self._read(id, now)
        return self._ends

    async def _read(self, id: str, now: float) -> End:
        try:
            job = await self._journal.read(id)
        except JobNotFound:
            return End(None)
        except UnreadableError as error:
            return End(None, str(error), now)
        # A job's state and the queue are two objects. Between their writes, a relaunched job is not in the queue.
        return End(job, "" if job.ended_already else f"{id} is not in the queue", now)

    async def _find(self, key: str, name: str, cluster: str) -> JobState:
        """The job of that id, or the newest job of that name."""
        ids = await self._journal.ids()
        known = [name] if name in ids else [id for id, stem in ids.items() if stem == name]
        for id in known:
            try:
                if (job := await self._journal.read(id)).cluster == cluster:
                    return job
            except (JobNotFound, UnreadableError):
                continue
        hint = nearest(name, sorted({*ids, *ids.values()} - {name}))
        raise SpecError(f"{key}: {name!r}: cluster {cluster} has no job of that name or id{hint}")


def awaited(spec: JobSpec) -> tuple[str, ...]:
    """The ids of all jobs that a job with this job file waits for."""
    return tuple(dict.fromkeys([*spec.after, *(job for job, _ in spec.sources.values())]))


def settle(job: JobState, ends: Mapping[str, End], now: float) -> JobState:
    """The job without the predecessors that have ended as they should. Any other end stops the job. Pure."""
    if job.ended_already or job.stopping or not (job.after or job.blocked):
        return job
    waiting = []
    for id in job.after:
        end = ends.get(id)
        if end is None or end.unread:
            waiting.append(f"{id} to {_wanted(job, id)}" + (f" ({end.unread})" if end else ""))
        elif why := _broken(job, id, end.job):
            return apply(job, Stop(why), now)
    left = tuple(id for id in job.after if ends.get(id) is None or ends[id].unread)
    known = {id: ends[id].job for id in job.after if id not in left}
    more = [
        Input(name=name, job=id, folder=folder, ref=found.folders)
        for name, (id, folder) in job.spec.sources.items()
        if (found := known.get(id)) is not None and found.folders is not None
    ]
    return job.replace(
        after=left, inputs=(*job.inputs, *more), blocked=f"waits for {' and for '.join(waiting)}" if waiting else ""
    )


def _wanted(job: JobState, id: str) -> str:
    return "succeed" if job.spec.on == "success" or _gives(job, id) else "end"


def _gives(job: JobState, id: str) -> list[str]:
    """The folders of job `id` that this job needs."""
    return [folder for source, folder in job.spec.sources.values() if source == id]


def _broken(job: JobState, id: str, found: JobState | None) -> str:
    """Why the end of this predecessor is not what the job waits for; empty: it is."""
    if found is not None and found.phase == "succeeded":
        needs = "" if found.folders else ", ".join(_gives(job, id))
        return f"{id} has not left the folder {needs} in the bucket" if needs else ""
    if job.spec.on == "end" and not _gives(job, id):
        return ""
    if found is None:
        return f"{id}, which this job comes after, has been deleted"
    why = f": {found.reason}" if found.reason else ""
    return f"{id}, which this job comes after, has {_ENDS[found.phase]}{why}"


_ENDS = {"failed": "failed", "stopped": "been stopped"}
