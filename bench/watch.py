"""Follow a run's events as they happen: the workers' own marks, and their ends as the kernel tells them."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from bench.phases import Event, parse

POLL = 0.05  # seconds between two looks at the file; the end of a process is noticed at once


class Watch:
    """The events of one run so far (`events`), read from the file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self._offset = 0
        self._poll = select.poll()
        self._known: set[int] = set()
        self._open: dict[int, Event] = {}  # pidfd → the process's first event

    def until(self, happened: Callable[[list[Event]], bool], timeout: float) -> bool:
        """Follow until `happened(events)` is true. False if that takes more than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not happened(self.events):
            if time.monotonic() > deadline:
                return False
            self.step()
        return True

    def step(self) -> None:
        """Wait a moment for a process to end, then read what was written."""
        for handle, _ in self._poll.poll(POLL * 1000):
            self._ended(handle, self._open[handle])
        self._read()

    def close(self) -> None:
        for handle in self._open:
            os.close(handle)
        self._open.clear()
        self._poll = select.poll()

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for event in parse(data.decode()):
            self.events.append(event)
            if event.pid not in self._known:
                self._known.add(event.pid)
                self._watch(event)

    def _watch(self, event: Event) -> None:
        try:
            handle = os.pidfd_open(event.pid)
        except ProcessLookupError:
            self.events.append(Event(time.time(), "ended", event.pid, event.node))
            return
        self._open[handle] = event
        self._poll.register(handle, select.POLLIN)

    def _ended(self, handle: int, event: Event) -> None:
        self.events.append(Event(time.time(), "ended", event.pid, event.node))
        self._poll.unregister(handle)
        os.close(handle)
        del self._open[handle]
