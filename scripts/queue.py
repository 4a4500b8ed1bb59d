"""A cluster's queue in its bucket: for the time when the head is out of reach, or not up yet."""

from __future__ import annotations

import json
import time
import uuid

from scripts.control import ENDED
from spotrun.errors import SpotrunError, StoreError
from spotrun.store import Store, job_key, queue_key, up_key
from spotrun.wire import UpRecord, read_queue


def unfinished(store: Store, cluster: str, force: str) -> list[str]:
    """Jobs that the end of the cluster would interrupt. Held jobs do not run, so they are not among them.

    force: the command that takes the cluster down anyway. Raises `SpotrunError` if the bucket has no usable answer.
    """
    try:
        queue = read_queue(store.find(queue_key(cluster)))
        return [job for job in queue.jobs if not _ended(store.find(job_key(job, "state.json")))]
    except ValueError:
        raise SpotrunError(f"cluster {cluster}: its queue in the bucket is broken; `{force}` passes over it") from None
    except StoreError as error:
        raise SpotrunError(f"cluster {cluster}: what runs is not known: {error}; `{force}` passes over it") from None


def hold(store: Store, cluster: str) -> None:
    """Make the next head hold the jobs that are in the queue now: bringing a cluster up starts no job by itself."""
    if store.exists(queue_key(cluster)):
        record = UpRecord(id=uuid.uuid4().hex, at=time.time())
        store.put(up_key(cluster), record.model_dump_json().encode())


def _ended(state: bytes | None) -> bool:
    """Whether a job's state says that it has ended. A job whose state cannot be read may still run."""
    try:
        found = json.loads(state or b"")
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("phase") in ENDED
