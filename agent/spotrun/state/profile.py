"""A request to profile a worker, and its answer: two files between `spotrun profile` on a node and the worker.

The request lies beside the worker's control block. The block's number `profile` says that there is a request. Standard
library only.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

TRACE = "trace.json"  # in a request's folder: the trace, in Chrome's format
_ANSWER = "answer.json"


@dataclass(frozen=True)
class Request:
    """Which steps a worker should record. Set `Control.profile` after `write`."""

    steps: int  # how many
    folder: str  # for the trace and the answer; on the node's disk
    until: float  # epoch seconds; no step is recorded that begins later

    @staticmethod
    def path_for(control: str | Path) -> Path:
        """The request to the worker with that control block."""
        return Path(f"{control}.profile")

    def write(self, control: str | Path) -> None:
        _write(self.path_for(control), asdict(self))

    @classmethod
    def read(cls, control: str | Path) -> Request:
        return cls(**json.loads(cls.path_for(control).read_text()))


@dataclass(frozen=True)
class Answer:
    """What a worker has recorded."""

    steps: int = 0  # how many are in the trace
    first: int = 0  # the number of the first one
    problem: str = ""  # why there is no trace
    node: str = ""  # its name
    bucket: str = ""  # URL of the job's bucket
    region: str = ""  # of a bucket in AWS

    def write(self, folder: str | Path) -> None:
        _write(Path(folder, _ANSWER), asdict(self))

    @classmethod
    def find(cls, folder: Path) -> Answer | None:
        """The answer in a request's folder; None: not yet. Raises `ValueError` if it is malformed."""
        try:
            found = json.loads((folder / _ANSWER).read_text())
        except FileNotFoundError:
            return None
        try:
            return cls(int(found["steps"]), int(found["first"]), *(str(found[name]) for name in _TEXTS))
        except (TypeError, KeyError) as error:
            raise ValueError(f"not an answer: {error!r}") from None


_TEXTS = ("problem", "node", "bucket", "region")


def _write(path: Path, values: dict[str, object]) -> None:
    partial = Path(f"{path}.part")
    partial.write_text(json.dumps(values))
    os.replace(partial, path)
