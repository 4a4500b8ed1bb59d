"""Read the nodes' signs of life in the bucket, while no node reports to the head.

This runs beside the head's turns, in separate threads: a slow bucket delays nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spotrun.errors import SpotrunError
from spotrun.head.agents import AddEvent
from spotrun.head.planner import silence
from spotrun.head.view import Sign, View
from spotrun.store import RECORD, Store, alive_key
from spotrun.wire import AliveRecord

T = TypeVar("T")
log = logging.getLogger(__name__)

PAUSE = 1.0  # seconds between two looks
AT_ONCE = 4  # objects that are read at the same time
SWEEP = 600.0  # seconds between two looks for signs of machines that are gone


class Signs:
    """The signs of one cluster. machines: names that the cloud lists; None while the cloud does not answer."""

    def __init__(
        self, store: Store, cluster: str, machines: Callable[[], set[str] | None], clock: Callable[[], float]
    ) -> None:
        self._store, self._cluster, self._machines, self._clock = store, cluster, machines, clock
        self._found: dict[str, Sign] = {}
        self._wanted: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="signs")
        self._warned = ""
        self._last_event: dict[str, str] = {}  # by job whose nodes are silent: the event's kind, as in `silence.news`

    @property
    def found(self) -> Mapping[str, Sign]:
        """The signs of the wanted nodes, as last read."""
        return dict(self._found)

    def update(self, view: View, add_event: AddEvent) -> frozenset[str]:
        """The nodes whose signs a job needs (see `want`). Add an event when the news about its silent nodes changes."""
        kind, text = silence.news(view) or ("", "nodes report again")
        if kind != self._last_event.get(view.job.id, "") and (kind or view.job.current is not None):
            add_event("silence", text)
        if kind:
            self._last_event[view.job.id] = kind
        else:
            self._last_event.pop(view.job.id, None)  # a head may have thousands of jobs, one after the other
        return silence.watched(view)

    def want(self, nodes: frozenset[str]) -> None:
        """From now on, read the signs of these nodes and of no others."""
        if nodes != self._wanted:
            self._wanted = nodes
            self._found = {name: sign for name, sign in self._found.items() if name in nodes}
            self._wake.set()

    async def run(self) -> None:
        """Read signs until cancelled."""
        try:
            swept = time.monotonic()
            while True:
                self._wake.clear()
                try:
                    if self._wanted:
                        await self.look()
                    if time.monotonic() - swept > SWEEP:
                        swept = time.monotonic()
                        await self.sweep()
                    self._warned = ""
                except SpotrunError as error:
                    if str(error) != self._warned:
                        log.warning("signs of life: %s", error)
                    self._warned = str(error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE if self._wanted else SWEEP):
                        await self._wake.wait()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def look(self) -> None:
        """Read each wanted sign once. Raises `SpotrunError`; a sign that cannot be read stays as it was."""
        names = sorted(self._wanted)
        for error in await asyncio.gather(*map(self._look_for, names), return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def sweep(self) -> None:
        """Remove the signs of machines that are gone. Raises `StoreError`."""
        prefix = alive_key(self._cluster, "").rsplit("/", 1)[0]
        keys = await self._in_thread(self._store.list, prefix)
        known = self._machines()
        if known is not None:
            kept = {alive_key(self._cluster, name) for name in known}
            await self._in_thread(self._store.delete, [key for key in keys if key not in kept])

    async def _look_for(self, name: str) -> None:
        key = alive_key(self._cluster, name)
        record = _record(key, await self._in_thread(self._store.find, key, RECORD))
        if name in self._wanted:
            self._found[name] = silence.seen(self._found.get(name), record, self._clock())

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _record(key: str, data: bytes | None) -> AliveRecord | None:
    """The sign, if there is one. Raises `SpotrunError` if it cannot be read: another version may have written it."""
    try:
        return AliveRecord.model_validate_json(data) if data is not None else None
    except ValueError as error:
        raise SpotrunError(f"{key} is not readable: {' '.join(str(error).split())[:200]}") from None
