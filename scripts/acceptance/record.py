"""The state of an acceptance: the results of its steps. A later run continues from it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from spotrun.errors import SpotrunError
from spotrun.store import Store, acceptance_key
from spotrun.wire import Document

State = Literal["passed", "failed", "not run"]
Fact = float | int | str
Facts = dict[str, Fact]


class NotRun(SpotrunError):
    """A step cannot be tried here; the message says why. That is neither a success nor a failure."""


class Failed(SpotrunError):
    """A step failed, but it has measured these facts."""

    def __init__(self, reason: str, facts: Facts) -> None:
        super().__init__(reason)
        self.facts = facts


class Result(Document):
    """The result of a step."""

    state: State
    reason: str = ""  # why it did not pass
    facts: Facts = Field(default_factory=dict)  # what was measured or seen
    seconds: float = 0.0  # how long it took
    at: float = 0.0  # when it ended, epoch seconds


class Record(Document):
    """The state of an acceptance."""

    cluster: str  # its name
    digest: str  # of the cluster's description; with another description, the acceptance begins again
    results: dict[str, Result] = Field(default_factory=dict)  # by step
    standing: bool = False  # whether the acceptance has begun to bring the cluster up, and not taken it down since
    at: float = 0.0  # when this was written, epoch seconds

    def with_result(self, step: str, result: Result) -> Record:
        return self.replace(results={**self.results, step: result}, at=time.time())

    def with_standing(self, standing: bool) -> Record:
        return self.replace(standing=standing, at=time.time())

    @property
    def failed(self) -> list[str]:
        return [name for name, result in self.results.items() if result.state == "failed"]


def parse(data: bytes | None) -> Record | None:
    """A record; None if there is none that this version can read."""
    try:
        return Record.model_validate_json(data) if data else None
    except ValidationError:
        return None


def choose(found: list[Record | None], cluster: str, digest: str) -> Record:
    """The newest record of this cluster. If there is none, or the description has changed since: an empty record.

    `standing` is kept: the cluster of the older description may still have to be taken down.
    """
    known = [each for each in found if each is not None and each.cluster == cluster]
    newest = max(known, key=lambda each: each.at, default=Record(cluster=cluster, digest=digest))
    return newest if newest.digest == digest else Record(cluster=cluster, digest=digest, standing=newest.standing)


class Keeper:
    """Keeps a record and its reports in a folder of this computer and, once there is one, in the bucket."""

    def __init__(self, folder: Path, bucket: Callable[[], Store], cluster: str) -> None:
        self._folder, self._cluster = folder, cluster
        self._bucket = functools.cache(bucket)  # an error is not cached, so the next call tries again
        self._standing = False  # whether the cluster may be up, as the bucket has it

    def load(self, digest: str) -> Record:
        """The newest record in either place."""
        file = self._folder / "state.json"
        found = [parse(file.read_bytes() if file.exists() else None)]
        with contextlib.suppress(SpotrunError):  # no login yet, or no bucket yet: a step reports that
            found.append(parse(self._bucket().find(acceptance_key(self._cluster, "state.json"))))
        record = choose(found, self._cluster, digest)
        self._standing = record.standing
        return record

    def save(self, record: Record) -> None:
        """Write the record here, and into the bucket while the cluster may be up, and when it has been taken down."""
        text = record.model_dump_json(indent=1)
        self._write_here("state.json", text)
        if (record.standing or self._standing) and (self._write_there("state.json", text) or record.standing):
            self._standing = record.standing  # after a failed write of the end, the next call tries again

    def publish(self, **reports: str) -> list[str]:
        """Write the reports, such as report.md. Returns where they are."""
        writes = (self._write_here, self._write_there)
        return [place for name, text in reports.items() for write in writes for place in write(f"report.{name}", text)]

    def _write_here(self, name: str, text: str) -> list[str]:
        """Returns the place; none if it cannot be written."""
        with contextlib.suppress(OSError):  # a full disk must not keep the machines running
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / f".{name}"
            part.write_text(text)
            os.replace(part, self._folder / name)
            return [str(self._folder / name)]
        return []

    def _write_there(self, name: str, text: str) -> list[str]:
        key = acceptance_key(self._cluster, name)
        with contextlib.suppress(SpotrunError):
            store = self._bucket()
            store.put(key, text.encode())
            return [f"{store.url}/{key}"]
        return []
