"""The workers' logs in the bucket: find them, and read their text piece by piece.

A log may be larger than the operator's memory: it is read in ranges, of which at most two are in memory.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scripts import console, control
from scripts.job_table import job_id
from scripts.make_command import make_command
from scripts.ssh import Access
from spotrun.errors import SpotrunError
from spotrun.head.journal import namesakes
from spotrun.store import Store, job_key

RANGE = 4 << 20  # bytes of a log that are read at once
LAST = 5  # lines of rank 0's log that are shown at the end of a followed job
NOTHING = "job {}: the bucket has no output of its workers"
_END = 64 << 10  # bytes at a log's end that are searched for these lines
_NAME = re.compile(r"jobs/[^/]+/logs/([0-9]+)/([^/]+)/([0-9]+)\.log")  # the groups: generation, node, rank


@dataclass(frozen=True)
class Log:
    """A worker's log in the bucket."""

    key: str
    generation: int
    node: str
    rank: str


def find(access: Access, job: str | None, node: str | None, rank: str | None) -> list[Log]:
    """The logs of the newest generation that has any: rank 0's, unless a node or a rank is named."""
    if job is None:
        status = control.ask(access, "status")["job"]
        # If the head began after the last job had ended, only the list of jobs has this job.
        newest_first = [status["id"]] if status else [job_id(each) for each in control.ask(access, "jobs")]
        if not newest_first:
            raise SpotrunError(f"no job has run on this cluster yet; `{make_command(access.file, 'train')}` runs one")
        job = str(newest_first[0])
    found = every(access.store, job)
    if not found and not access.store.exists(job_key(job, "state.json")):
        named = namesakes(access.store, job)
        raise SpotrunError(
            f"there is no job {job}{named}; `{make_command(access.file, 'status')}` names the newest jobs"
        )
    ranks = rank if rank is not None or node is not None else "0"
    chosen = [log for log in found if node in (None, log.node) and ranks in (None, log.rank)]
    newest = max((log.generation for log in chosen), default=0)
    chosen = [log for log in chosen if log.generation == newest]
    if not found:
        raise SpotrunError(NOTHING.format(job))
    if not chosen:
        has = ", ".join(sorted({f"{log.node} rank {log.rank}" for log in found}))
        asked = " ".join([f"node {node}" if node else "", f"rank {ranks}" if ranks is not None else ""]).strip()
        raise SpotrunError(f"job {job}: no log of {asked}; there are: {has}")
    return sorted(chosen, key=lambda log: (log.node, int(log.rank)))


def every(store: Store, job: str) -> list[Log]:
    """All logs of a job's workers that are in the bucket."""
    return named(store.list(f"jobs/{job}/logs"))


def named(keys: Iterable[str]) -> list[Log]:
    """The logs among these keys."""
    found = ((key, _NAME.fullmatch(key)) for key in keys)
    return [Log(key, int(match[1]), match[2], match[3]) for key, match in found if match]


def read(store: Store, key: str, lines: int | None = None) -> Iterator[str]:
    """A log's text in pieces. A piece ends at a line's end, if possible. lines: only this many lines at the log's end.

    Raises `StoreError`. Text that is written during the call is left out.
    """
    size = store.size(key)
    start = 0 if lines is None else _begin(store, key, size, lines)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    for at in range(start, size, RANGE):
        text = rest + decoder.decode(store.part(key, at, min(at + RANGE, size)))
        if at + RANGE >= size:
            rest = text
            break
        # If there is no line's end, yield all of the text, so that `rest` is never longer than a range.
        cut = text.rfind("\n", len(rest)) + 1 or len(text)
        yield text[:cut]
        rest = text[cut:]
    yield rest + decoder.decode(b"", final=True)


def show(access: Access, logs: list[Log], lines: int | None, raw: bool, json: bool) -> None:
    """Print the logs. lines: see `read`. raw: with escape sequences. json: a line of JSON for each piece of a log."""
    for log in logs:
        if not json:
            console.say(f"generation {log.generation}, {log.node}, rank {log.rank}:")
        end = "\n"
        for text in read(access.store, log.key, lines):
            if json:
                console.answer({"generation": log.generation, "node": log.node, "rank": int(log.rank), "text": text})
            elif text:
                console.say(text, raw=raw, end="")
                end = text[-1]
        if not json and end != "\n":
            console.say("")


def last_words(access: Access, job: str) -> list[str]:
    """The last lines of rank 0's log that are in the bucket."""
    try:
        key = find(access, job, None, "0")[-1].key
        size = access.store.size(key)
        end = access.store.part(key, max(0, size - _END), size) if size else b""
    except SpotrunError:
        return []
    return end.decode(errors="replace").splitlines()[-LAST:]


def _begin(store: Store, key: str, size: int, lines: int) -> int:
    """Where the last lines of a log begin, found by reading from its end."""
    end, missing = size, lines + 1
    while end > 0:
        start = max(0, end - RANGE)
        # A progress bar ends lines with a carriage return. The bytes stay at their places.
        block = store.part(key, start, end).replace(b"\r\n", b" \n").replace(b"\r", b"\n")
        if end == size and not block.endswith(b"\n"):
            missing -= 1  # the last line is not complete
        at = len(block)
        while missing and (found := block.rfind(b"\n", 0, at)) >= 0:
            at, missing = found, missing - 1
        if not missing:
            return start + at + 1
        end = start
    return 0
