"""What the bucket knows about the jobs of a cluster. Callers in an event loop use a thread."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spotrun.errors import JobNotFound, UnreadableError
from spotrun.head.job_state import JobState
from spotrun.head.journal import namesakes, stamped
from spotrun.head.overview import job_row
from spotrun.store import Store, job_key
from spotrun.store.keys import JOBS
from spotrun.wire import problem

AT_ONCE = 16  # states that are read at the same time
KEPT = 5000  # rows of ended jobs that are kept in memory, about 2 KB each
FRESH = 60.0  # seconds for which they are kept: the budget of an ended job may change
MOST = 500  # rows that are read for one request
ID = re.compile(r"[a-z0-9][a-z0-9-]{0,120}")


class Records:
    """The jobs of one cluster, as the bucket has them. Rows of jobs that have ended are kept for some time."""

    def __init__(self, store: Store, cluster: str) -> None:
        self.store, self.cluster = store, cluster
        # When each row was read, in monotonic seconds, and the row. None: a job of another cluster.
        self._rows: OrderedDict[str, tuple[float, dict[str, Any] | None]] = OrderedDict()
        self._lock = threading.Lock()

    def ids(self) -> list[str]:
        """Ids of the jobs in the bucket, newest first by the time in the id."""
        keys = (job_key(folder, "state.json") for folder in self.store.folders(JOBS))
        return [job for _, _, job in stamped(keys)]

    def rows(self, before: str = "", most: int = 100) -> tuple[list[dict[str, Any]], bool]:
        """The newest jobs of the cluster, as in the overview, and whether there are older ones.

        before: only jobs older than this one. Jobs of other clusters in the same bucket are left out.
        """
        ids, found = self.ids(), list[dict[str, Any]]()
        start = ids.index(before) + 1 if before in ids else 0
        wanted = min(most, MOST)
        for first in range(start, len(ids), AT_ONCE):
            found += [row for row in self._read(ids[first : first + AT_ONCE]) if row is not None]
            if len(found) > wanted:
                return found[:wanted], True
        return found, False

    def state(self, job: str) -> JobState:
        """A job's state. Raises `JobNotFound`, `UnreadableError`, or `StoreError` if the bucket does not answer."""
        data = self.store.find(job_key(job, "state.json")) if ID.fullmatch(job) else None
        if data is None:
            raise JobNotFound(f"there is no job {job[:120]} in {self.store.url}{namesakes(self.store, job)}")
        try:
            return JobState.model_validate_json(data)
        except ValueError as error:
            key = job_key(job, "state.json")
            raise UnreadableError(f"{self.store.url}: {key} is not readable: {problem(error)}") from None

    def _read(self, jobs: Sequence[str]) -> list[dict[str, Any] | None]:
        with ThreadPoolExecutor(min(AT_ONCE, max(1, len(jobs)))) as pool:
            return list(pool.map(self._row, jobs))

    def _row(self, job: str) -> dict[str, Any] | None:
        now = time.monotonic()
        with self._lock:
            at, row = self._rows.get(job, (-FRESH, None))
            if now - at < FRESH:
                return row
        try:
            state = self.state(job)
        except UnreadableError as error:
            return {"id": job, "phase": "unreadable", "reason": str(error)}
        except JobNotFound:
            return None
        row = job_row(state) if state.cluster == self.cluster else None
        if state.over or row is None:
            with self._lock:
                self._rows[job] = now, row
                while len(self._rows) > KEPT:
                    self._rows.popitem(last=False)
        return row

    def forget(self, job: str) -> None:
        """Read a job again: it is about to change."""
        with self._lock:
            self._rows.pop(job, None)
