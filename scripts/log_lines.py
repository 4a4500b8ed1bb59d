"""Lines of the logs of all ranks of a job, in the order of their times; live, and of nodes that are gone.

A worker's output has no times. So the agent writes down now and then how long each log is, in a text beside the log
(`node.log_uploader`). A line gets the time of the first note that has it. Only a piece of each log is in memory.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts import console, inputs, logs, runs
from scripts.logs import Log
from scripts.make_command import make_command
from scripts.site import Site
from spotrun.errors import JobNotFound, NotFound, SpotrunError, TooLargeError, UnreadableError
from spotrun.head.job_state import JobState
from spotrun.head.journal import stamped, state_keys
from spotrun.store import Store, queue_key
from spotrun.store.keys import times_key
from spotrun.wire import read_queue

ALL = "all"
LOOK = 2.0  # seconds between looks at the bucket while logs are followed
MEMORY = 32 << 20  # bytes of all logs together that are in memory
PIECE = (16 << 10, 4 << 20)  # bytes of one log that are read at once, at least and at most
LINE = 64 << 10  # bytes after which an unfinished line is shown
TIMES = 4 << 20  # bytes of the text about one log's lengths that are read
LATE = 6.0  # seconds after a job's end in which its nodes may still upload the ends of logs
_END = re.compile(rb"(\r\n|\r|\n)")
_NOTE = re.compile(rb"^([0-9]{1,16}\.[0-9]{1,16}) ([0-9]{1,16})$", re.MULTILINE)


@dataclass(frozen=True)
class Wanted:
    """What was typed. Empty: not given."""

    job: str | None
    node: str = ""
    rank: str = ""
    grep: str = ""
    since: str = ""
    gen: str = ""
    tail: str = ""


class Line(NamedTuple):
    """A line of a log. It sorts by time, then by rank."""

    at: float  # epoch seconds; 0: not known
    rank: int
    number: int  # the bytes of its log before it
    generation: int
    node: str
    text: str


def show(site: Site, wanted: Wanted, follow: bool, raw: bool, json: bool) -> None:
    """Print the lines that are wanted; follow: until the job has ended. Raises `SpotrunError`."""
    store, cluster = site.bucket(), site.cluster.name
    pattern, since = _pattern(wanted.grep), inputs.interval("SINCE", wanted.since)
    tail = inputs.number("TAIL", wanted.tail, least=1)
    job = wanted.job or _chosen(store, site)
    runs.state(store, cluster, job)
    begin = time.time() - since if since is not None else 0.0
    places: dict[str, int] = {}
    first, ended = True, math.inf
    while True:
        ended = _ended(runs.state(store, cluster, job), ended)  # asked first: the loop reads what was printed before
        over = not follow or time.monotonic() - ended > LATE
        chosen = choose(store, job, wanted, site.file, live=follow, known=None if first else places)
        lines = merged(store, chosen, begin, places, final=over)
        found: Iterator[Line] = (each for each in lines if pattern is None or pattern.search(each.text))
        if first and tail:
            found = iter(_last(found, int(tail)))
        for each in found:
            _print(each, raw, json)
        if over:
            return
        first = False
        time.sleep(LOOK)


def choose(
    store: Store, job: str, wanted: Wanted, file: str, live: bool = False, known: Container[str] | None = None
) -> list[Log]:
    """The logs that are wanted. Raises `SpotrunError` if there are none, unless `live`: logs may still come.

    known: the logs that were read before; then all generations since these are wanted, because several may have begun.
    """
    found = logs.every(store, job)
    node, rank = wanted.node, inputs.number("RANK", wanted.rank) if wanted.rank not in ("", ALL) else ""
    if node:
        inputs.node(node, file)
    mine = [each for each in found if node in ("", each.node) and rank in ("", each.rank)]
    if wanted.gen and wanted.gen != ALL:
        number = int(inputs.number("GEN", wanted.gen, least=0) or 0)
        mine = [each for each in mine if each.generation == number]
    elif not wanted.gen and not wanted.since:
        if known is None:
            first = max((each.generation for each in mine), default=0)
        else:
            first = min((each.generation for each in mine if each.key in known), default=0)
        mine = [each for each in mine if each.generation >= first]
    if not found and not live:
        raise SpotrunError(logs.NOTHING.format(job))
    if not mine and not live:
        has = ", ".join(sorted({f"generation {each.generation} {each.node} rank {each.rank}" for each in found}))
        raise SpotrunError(f"job {job}: no such log; there are: {has}")
    return mine


def merged(store: Store, chosen: list[Log], begin: float, places: dict[str, int], final: bool = True) -> Iterator[Line]:
    """The lines of the logs by time. places: the bytes of each log that were read before; updated here.

    begin: epoch seconds; of logs that were not read before, earlier lines are left out. final: also a last line without
    a line break.
    """
    piece = min(PIECE[1], max(PIECE[0], MEMORY // max(1, len(chosen))))
    yield from heapq.merge(*(_lines(store, log, begin, places, piece, final) for log in chosen))


def _lines(store: Store, log: Log, begin: float, places: dict[str, int], piece: int, final: bool) -> Iterator[Line]:
    """The lines of one log, up to its present end. Their times never fall."""
    times = _times(store, log)
    try:
        size = store.size(log.key)
    except NotFound:
        return
    at, since = places.get(log.key, 0), 0.0 if log.key in places or not times else begin
    if size < at:
        at = 0  # the log was too long, and has begun again
    cut = bool(begin) and log.key not in places and (at := _start(times, begin)) > 0
    at, rest, newest = at - cut, b"", 0.0
    ends, rank = [end for _, end in times], int(log.rank)
    while at < size or (rest and final):
        data = store.part(log.key, at, min(at + piece, size)) if at < size else b"\n"
        start, at = at - len(rest), min(at + len(data), size)
        whole, rest = _whole(rest + data)
        for text, end in whole:
            if cut:  # the rest of a line that begins before
                cut = False
            else:
                note = min(bisect_left(ends, start + len(text)), len(times) - 1)
                newest = max(newest, times[note][0] if times else 0.0)
                if newest >= since:  # the notes may lack the end of a log: then it has the time of the last note
                    yield Line(newest, rank, start, log.generation, log.node, text.decode(errors="replace"))
            start += len(text) + len(end)
        places[log.key] = at - len(rest)
    places.setdefault(log.key, at)


def _whole(data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The whole lines of a piece, each with its end, and the rest. A progress bar ends lines with a carriage return."""
    *found, rest = _END.split(data)
    if len(found) > 1 and not rest and found[-1] == b"\r":  # a line feed may follow
        *found, last, _ = found
        rest = last + b"\r"
    if len(rest) > LINE:
        return [*zip(found[::2], found[1::2], strict=True), (rest, b"")], b""
    return list(zip(found[::2], found[1::2], strict=True)), rest


def _start(times: list[tuple[float, int]], begin: float) -> int:
    """Where a log's lines from that time on begin, or the line before them; 0: not known."""
    before = [end for at, end in times if at < begin]
    return before[-1] if before else 0


def _times(store: Store, log: Log) -> list[tuple[float, int]]:
    """When a log had which size. Lines that cannot be read are left out: a job's code can write there."""
    try:
        data = store.find(times_key(log.key), TIMES) or b""
    except TooLargeError:
        data = b""
    found = [(float(match[1]), int(match[2])) for match in _NOTE.finditer(data)]
    rising: list[tuple[float, int]] = []
    for at, end in found:
        if not rising or (at >= rising[-1][0] and end >= rising[-1][1]):
            rising.append((at, end))
    return rising


def _last(lines: Iterator[Line], count: int) -> list[Line]:
    """The last lines, of which at most `count` are in memory."""
    return list(deque(lines, maxlen=count))


def _print(each: Line, raw: bool, json: bool) -> None:
    if json:
        found: dict[str, Any] = {"time": each.at or None, "generation": each.generation, "node": each.node}
        console.answer(found | {"rank": each.rank, "text": each.text})
        return
    at = time.strftime("%H:%M:%S", time.localtime(each.at)) if each.at else "--:--:--"
    console.say(f"{at} {each.generation} {each.node} {each.rank} | {each.text}", raw=raw)


def _ended(job: JobState, seen: float) -> float:
    """When the job ended, in monotonic seconds; infinity: it has not. seen: the last answer. Clocks may differ."""
    if not job.ended_already:
        return math.inf
    return min(seen, time.monotonic() - max(0.0, time.time() - (job.ended or 0.0)))


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise SpotrunError(f"GREP: {text!r}: is not a regular expression: {error}") from None


def _chosen(store: Store, site: Site) -> str:
    """The job that trains, or else one that waits, or else the cluster's newest job. The head chooses alike."""
    cluster = site.cluster.name
    try:
        queue = read_queue(store.find(queue_key(cluster))).jobs
    except ValueError:  # it is not readable
        queue = ()
    waiting = ""
    for job in _states(store, cluster, queue):
        if job.ended_already:
            continue
        if job.current:
            return job.id
        waiting = waiting or job.id
    if waiting:
        return waiting
    for job in _states(store, cluster, (id for _, _, id in stamped(state_keys(store)))):
        return job.id
    raise SpotrunError(f"no job has run on this cluster yet; `{make_command(site.file, 'train')}` runs one")


def _states(store: Store, cluster: str, jobs: Iterable[str]) -> Iterator[JobState]:
    """The states of these jobs, without those that cannot be read, and those of other clusters."""
    for job in jobs:
        with contextlib.suppress(JobNotFound, UnreadableError):
            yield runs.state(store, cluster, job)
