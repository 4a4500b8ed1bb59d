"""Submitting a job, following it to its end, and its logs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import bundle, control, faults
from scripts.display import ENDED, Display
from scripts.faults import Fault
from scripts.hint import make
from scripts.ssh import Access, Unreachable
from spotrun.errors import SpotrunError, StoreError
from spotrun.spec import ClusterSpec, JobSpec, check_fit, load_job

Status = dict[str, Any]
_PAUSE = 0.5  # seconds between two attempts to reach the head again
TAIL = 5  # lines of rank 0's log that close a followed job


@dataclass(frozen=True)
class Log:
    """A worker's log in the bucket: jobs/<job>/logs/<generation>/<node>/<rank>.log"""

    key: str
    generation: int
    node: str
    rank: str


def check(cluster: ClusterSpec, path: str) -> JobSpec:
    """The job at `path`, found fit to run on the cluster. Raises `SpecError`."""
    job = load_job(path)
    check_fit(job, cluster)
    return job


def submit(access: Access, cluster: ClusterSpec, path: str, say: Callable[[str], None]) -> str:
    """Bundle a job's folder and queue the job; its id. Raises `SpotrunError`."""
    job = check(cluster, path)
    packed = bundle.upload(access.store, Path(path).absolute().parent, job.script)
    known = "" if packed.sent else ", in the bucket already"
    say(f"bundle {packed.sha256[:12]}: {packed.files} files, {packed.size / 1024:.0f} kB{known}")
    answer = control.ask(access, "submit", data={"job": job.model_dump(mode="json"), "code": packed.sha256})
    say(f"job {answer['job']} submitted")
    return str(answer["job"])


def follow(access: Access, job: str | None, display: Display, plan: list[Fault] | None = None) -> Status:
    """Show a job until it ends, taking machines away as planned; its last state.

    The head may be gone for a while meanwhile: it is recreated, and training goes on without it.
    Raises `Unreachable` if it stays away, or the bucket, which says where it is.
    """
    todo, hit = list(plan or []), 0
    last: Status | None = None
    gone_since: float | None = None
    while True:
        try:
            with control.open_head(access) as head:
                for status in head.follow(job):
                    gone_since, last = None, status["job"]
                    display.show(status)
                    if last is None:
                        continue
                    job = last["id"]
                    fault = faults.due(todo, last, hit)
                    if fault is not None:
                        todo, hit = todo[1:], last["generation"]
                        _take(head, fault, status, display)
        except (Unreachable, StoreError) as error:
            if gone_since is None:
                display.say(f"the head is away ({error}); training goes on, trying again")
            gone_since = gone_since or time.monotonic()
            if time.monotonic() - gone_since > control.PATIENCE:
                raise Unreachable(f"the head has been away for {control.PATIENCE:.0f} s: {error}") from None
        if last is not None and last["phase"] in ENDED:
            return last
        time.sleep(_PAUSE)


def logs(access: Access, job: str | None, node: str | None, rank: str | None) -> list[Log]:
    """The logs of a job's newest generation that has any; of rank 0 unless a node or a rank is named."""
    if job is None:
        status = control.ask(access, "status")["job"]
        # A head that began after the last job had ended knows of it from the bucket only.
        newest_first = [status["id"]] if status else [each["job"] for each in control.ask(access, "jobs")]
        if not newest_first:
            raise SpotrunError(f"no job has run on this cluster yet; `{make(access.file, 'train')}` runs one")
        job = str(newest_first[0])
    found = [log for key in access.store.list(f"jobs/{job}/logs") if (log := _log(key))]
    ranks = rank if rank is not None or node is not None else "0"
    chosen = [log for log in found if node in (None, log.node) and ranks in (None, log.rank)]
    newest = max((log.generation for log in chosen), default=0)
    chosen = [log for log in chosen if log.generation == newest]
    if not chosen:
        has = ", ".join(sorted({f"{log.node} rank {log.rank}" for log in found})) or "none yet"
        asked = " ".join([f"node {node}" if node else "", f"rank {ranks}" if ranks is not None else ""]).strip()
        raise SpotrunError(f"job {job}: no log of {asked}; there are: {has}")
    return sorted(chosen, key=lambda log: (log.node, int(log.rank)))


def last_words(access: Access, job: str) -> list[str]:
    """The last lines of rank 0, as far as they are in the bucket."""
    try:
        newest = logs(access, job, None, "0")[-1]
        return access.store.get(newest.key).decode(errors="replace").splitlines()[-TAIL:]
    except SpotrunError:
        return []


def _take(head: control.Head, fault: Fault, status: Status, display: Display) -> None:
    node = faults.victim(status)
    if node is None:
        return
    display.say(f"taking {node} away: {faults.KINDS[fault.kind]}")
    try:
        head.ask(fault.kind, node)
    except Unreachable:
        raise
    except SpotrunError as error:
        display.say(f"could not take {node} away: {error}")


def _log(key: str) -> Log | None:
    match = re.fullmatch(r"jobs/[^/]+/logs/([0-9]+)/([^/]+)/([0-9]+)\.log", key)
    return Log(key, int(match[1]), match[2], match[3]) if match else None
