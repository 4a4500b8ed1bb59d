"""The workers' logs: a list, a piece of one log, and a search. A log may be larger than the memory.

All functions wait for the bucket: callers in an event loop use a thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spotrun.dashboard.records import Records
from spotrun.errors import SpotrunError
from spotrun.store.keys import JOBS, LOGS, log_key
from spotrun.text import clean

PIECE = 256 << 10  # bytes of a log that one answer covers at most
RANGE = 4 << 20  # bytes that a search reads at once
SEARCHED = 64 << 20  # bytes that one request searches; the page asks for more
HITS = 500  # lines that one answer of a search has
LINE = 2000  # characters of a line that are shown
_NAME = re.compile(rf"{JOBS}[^/]+/{LOGS}/(?P<generation>[0-9]+)/(?P<node>[^/]+)/(?P<rank>[0-9]+)\.log")


def listed(records: Records, job: str, _: Mapping[str, str]) -> list[dict[str, Any]]:
    """The job's logs: generation, node, rank and bytes; the newest generation first."""
    records.state(job)
    found = []
    for key, size in records.store.sizes(f"{JOBS}{job}/{LOGS}").items():
        if match := _NAME.fullmatch(key):
            rank, generation = int(match["rank"]), int(match["generation"])
            found.append({"generation": generation, "node": match["node"], "rank": rank, "bytes": size})
    return sorted(found, key=lambda log: (-log["generation"], log["rank"], log["node"]))


def read(records: Records, job: str, query: Mapping[str, str]) -> dict[str, Any]:
    """A piece of a log, as clean text. Query: generation, node, rank; `end`: the byte before which the piece ends.

    With `grep`: lines that have this text, in upper or lower case, from the byte `from` on. `next`: the byte at which
    the search goes on; null: the search has reached the end of the log.
    """
    records.state(job)
    node = query["node"]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}", node):
        raise SpotrunError(f"{node[:40]!r} is not a node's name")
    key = log_key(job, int(query["generation"]), node, int(query["rank"]))
    size = records.store.size(key)
    if query.get("grep"):
        return _search(records, key, size, query["grep"], max(0, int(query.get("from", 0))))
    end = min(size, int(query.get("end", size)))
    start = max(0, end - PIECE)
    data = records.store.part(key, start, end) if end > start else b""
    if start and 0 < (cut := data.find(b"\n") + 1) < len(data):
        start, data = start + cut, data[cut:]  # begin at the beginning of a line
    return {"text": clean(data.decode(errors="replace")), "start": start, "end": end, "size": size}


def _search(records: Records, key: str, size: int, text: str, start: int) -> dict[str, Any]:
    wanted, hits, rest = text.lower(), list[dict[str, Any]](), b""
    at, stop = start, min(size, start + SEARCHED)  # all bytes before `at` have been read
    while at < stop:
        data = rest + records.store.part(key, at, min(stop, at + RANGE))
        begin, at = at - len(rest), min(stop, at + RANGE)
        # Whole lines. The last line of the log, and one that is longer than a range, are searched as they are.
        cut = len(data) if at >= size else data.rfind(b"\n") + 1 or len(data)
        for line in data[:cut].splitlines(keepends=True):
            if len(hits) >= HITS:
                return {"hits": hits, "next": begin, "size": size}
            shown = line.decode(errors="replace")
            if wanted in shown.lower():
                hits.append({"at": begin, "text": clean(shown.rstrip("\r\n"))[:LINE]})
            begin += len(line)
        rest = data[cut:]
    return {"hits": hits, "next": at - len(rest) if at < size else None, "size": size}
