"""Read a cluster's queue in the bucket, and have its jobs held. No head is needed: it may be away, or not up yet."""

from __future__ import annotations

import json
import time
import uuid

from scripts.control import ENDED, Unfinished
from spotrun.errors import SpotrunError, StoreError
from spotrun.store import Store, job_key, queue_key, up_key
from spotrun.wire import UpRecord, read_queue


def unfinished(store: Store, cluster: str, force: str) -> list[Unfinished]:
    """Jobs that `make down` would interrupt, or that keep a node. Held jobs do not run, so they are left out.

    force: the command that takes the cluster down anyway. Raises `SpotrunError` if the bucket has no usable answer.
    """
    try:
        queue = read_queue(store.find(queue_key(cluster)))
        found = (_unfinished(job, store.find(job_key(job, "state.json"))) for job in queue.jobs)
        return [each for each in found if each is not None]
    except ValueError:
        raise SpotrunError(f"cluster {cluster}: its queue in the bucket is broken; `{force}` ignores it") from None
    except StoreError as error:
        raise SpotrunError(f"cluster {cluster}: which jobs run is not known: {error}; `{force}` ends them") from None


def hold(store: Store, cluster: str) -> None:
    """Make the next head hold the jobs that are in the queue now: bringing a cluster up starts no job by itself."""
    if store.exists(queue_key(cluster)):
        record = UpRecord(id=uuid.uuid4().hex, at=time.time())
        store.put(up_key(cluster), record.model_dump_json().encode())


def _unfinished(job: str, state: bytes | None) -> Unfinished | None:
    """The job, unless its state says that it has ended and keeps no node. A state that cannot be read may still run."""
    try:
        found = json.loads(state or b"")
        if not (isinstance(found, dict) and found.get("phase") in ENDED):
            return Unfinished(job)
        kept = found.get("kept_node")
        return Unfinished(job, str(kept["member"]["node"])) if kept else None
    except (ValueError, RecursionError, LookupError, TypeError):
        return Unfinished(job)
