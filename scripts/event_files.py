"""Event files, which TensorBoard reads. The library is optional, and imported only when a file is begun."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from spotrun.errors import SpotrunError
from spotrun.history.curves import Points
from spotrun.text import line

SUFFIX = ".spotrun"
GLOB = f"events.out.tfevents.*{SUFFIX}"  # event files of this module: other programs may write into the same folder


class EventFile:
    """A new event file in a folder. number: files of one second are read in the order of their numbers.

    purge: TensorBoard forgets what earlier files of this folder say about this step and later ones. It does so only if
    the folder's first file has such a step, too. Raises `SpotrunError` if the library is missing.
    """

    def __init__(self, folder: Path, purge: int | None = None, number: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        library("tensorboardX", "tensorboard")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventsWriter(str(folder / "events"), f".{number:06d}{SUFFIX}")
        self.path = Path(self._writer._file_name)
        if purge is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.write_event(event_pb2.Event(step=purge, session_log=start))

    def add(self, name: str, points: Points, start: int = 0) -> int:
        """Write the points of a curve, from row `start` on. Returns how many."""
        tag, kind = _tag(name), self._summaries.Summary
        for row in range(start, len(points)):
            summary = kind(value=[kind.Value(tag=tag, simple_value=points.values[row])])
            event = self._events.Event(step=points.steps[row], wall_time=points.times[row], summary=summary)
            self._writer.write_event(event)
        return max(0, len(points) - start)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _tag(name: str) -> str:
    """A name without control characters. Different names get different tags: TensorBoard would mix their curves."""
    return "".join(each if line(each) == each else json.dumps(each)[1:-1] for each in name)


def library(name: str, extra: str, what: str = "") -> Any:
    """An optional library. what: that needs it. Raises `SpotrunError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpotrunError(
            f"{what or f'TO={extra}'}: needs a package that is not installed ({error}); `.venv/bin/pip install"
            f" -c constraints.txt -e '.[{extra}]'` installs it"
        ) from None
