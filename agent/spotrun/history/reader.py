"""Read from the bucket what a job has logged. Of a live job, only the new blocks are read each time."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from itertools import chain

from spotrun.errors import NotFound, TooLargeError, UnreadableError
from spotrun.history.curves import Curve, Place, Points, continued, merge, pieces, thin
from spotrun.state import points
from spotrun.state.points import Block, Call, Header
from spotrun.store import Store, metrics_folder
from spotrun.store.threads import at_once

AT_ONCE = 16  # blocks that are downloaded at once
LARGEST = 32 << 20  # bytes of a block's object that are read
PROBLEMS = 100  # messages about unreadable blocks that are kept
NAMES = 1000  # names that are read at most, with `most`
GENERATIONS = 4  # that have `most` points of a name; if there are more, they have fewer
_KEY = re.compile(r".*/metrics/([0-9]{4,9})/(?:rank-([0-9]{4,9})/)?([0-9]{6,12})\.jsonl\.zst")
Source = tuple[int, int]  # generation, rank


class Reader:
    """The curves of a job. One thread at a time uses it.

    headers: of each generation that has logged, by number. problems: what could not be read, and why. unread: blocks
    that the last update has left for the next one.
    """

    def __init__(self, store: Store, job: str, names: Iterable[str] | None = None, most: int = 0) -> None:
        """names: read only these; None: all. most: points of each name and generation in memory; 0: all points.

        With `most`, points are thinned while they are read (`curves.thin`), so that memory is bounded: about 100 bytes
        for each of these points, and only the first `NAMES` names are read. A job may have hundreds of generations: if
        a name has many, each of them gets a part of `GENERATIONS` times `most`. After an interruption, the least or the
        greatest value of the range of steps around the base may then belong to the void part, and be missing in the
        part that counts.
        """
        self.headers: dict[int, Header] = {}
        self.problems: list[str] = []
        self.unread = 0
        self._store, self._job, self._most = store, job, most
        self._only = None if names is None else frozenset(names)
        self._read: dict[Source, list[int]] = {}  # numbers of the blocks that were read
        self._points: dict[str, dict[Source, Points]] = {}  # by name. Of other ranks: those after rank 0's last one
        self._too_many = False  # whether there are more names than are read
        self._last: dict[int, Place] = {}  # of rank 0's last number of any name, by generation

    @property
    def names(self) -> list[str]:
        """The names that were logged, in alphabetical order."""
        return sorted(name for name, mine in self._points.items() if any(mine.values()))

    def update(self, only_first: bool = False, seconds: float = math.inf) -> bool:
        """Read the blocks that are new. Returns whether there were any. Raises `StoreError`.

        only_first: only the first block of each generation, which is enough for `headers`. seconds: after this time,
        leave the rest for the next update. Each update reads some blocks.
        """
        began = time.monotonic()
        found = self._find()
        if only_first:
            least = dict(sorted(found, reverse=True))  # the lowest rank of each generation
            found = {source: dict([min(found[source].items())]) for source in least.items()}
        for source, numbers in found.items():
            before = self._read.get(source)
            if before and set(numbers) - set(before) and min(set(numbers) - set(before)) < before[-1]:
                self._forget(source)  # an older block has arrived late
        have = {source: set(numbers) for source, numbers in self._read.items()}
        new = [
            (source, number, key)
            for source, numbers in sorted(found.items())
            for number, key in sorted(numbers.items())
            if number not in have.get(source, ())
        ]
        start = 0
        while start < len(new) and (size := _next_size(start, time.monotonic() - began, seconds)):
            part = new[start : start + size]  # a few blocks in memory at a time
            start += len(part)
            for (source, number, _), block in zip(part, at_once(self._get, part, AT_ONCE), strict=True):
                self._read.setdefault(source, []).append(number)
                if isinstance(block, Block):
                    self._add(block)
                problem = block.missing if isinstance(block, Block) else block
                if problem and len(self.problems) < PROBLEMS:
                    self.problems.append(problem)
        self.unread = len(new) - start
        if new:
            self._drop_repeated()
        return bool(new)

    def curve(self, name: str) -> Curve:
        """All points of a name, with those marked that do not count. Empty if the name was never logged."""
        mine: dict[int, Points] = {}
        others: dict[int, list[Points]] = {}
        for (generation, rank), each in self._points.get(name, {}).items():
            if rank == 0:
                mine[generation] = each
            elif each:
                others.setdefault(generation, []).append(each)
        mine |= {number: continued(mine.get(number, Points()), each) for number, each in others.items()}
        return merge(name, mine, self.headers.values())

    def _find(self) -> dict[Source, dict[int, str]]:
        """The keys of all blocks in the bucket, by number."""
        found: dict[Source, dict[int, str]] = {}
        for key in self._store.list(metrics_folder(self._job)):
            if match := _KEY.fullmatch(key):
                found.setdefault((int(match[1]), int(match[2] or 0)), {})[int(match[3])] = key
        return found

    def _get(self, place: tuple[Source, int, str]) -> Block[Call] | str:
        """A block, or why the block cannot be read; empty: the block is gone. Called in other threads."""
        (generation, rank), _, key = place
        try:
            block = points.read(self._store.get(key, LARGEST), key)
        except NotFound:
            return ""  # removed since it was listed
        except (UnreadableError, TooLargeError) as error:  # a job's code can write to its node's blocks
            return str(error)
        of = (block.header.job, block.header.generation, block.header.rank)
        if of != (self._job, generation, rank):
            return f"{key} says that it is of {of[0]}, generation {of[1]}, rank {of[2]}: left out"
        return block

    def _add(self, block: Block[Call]) -> None:
        header, calls = block.header, block.calls
        source = (header.generation, header.rank)
        if header.rank == 0 or header.generation not in self.headers:
            self.headers[header.generation] = header
        if header.rank == 0 and calls:
            self._last[header.generation] = points.place(calls[-1])
        for name, piece in pieces(block, self._wanted(block)).items():
            mine = self._points.setdefault(name, {})
            if source in mine:
                mine[source].extend(piece)
            else:
                self._make_room(mine)
                mine[source] = piece.part(0, len(piece))  # names of a block share columns
            if self._most and len(mine[source]) > 2 * self._most:
                mine[source] = thin(mine[source], self._most)

    def _make_room(self, mine: dict[Source, Points]) -> None:
        """Thin the points of all generations, if they are too many together."""
        total, most = sum(map(len, mine.values())), GENERATIONS * self._most
        for source, each in mine.items() if most and total > 2 * most else ():
            mine[source] = thin(each, max(2, most * len(each) // total))

    def _wanted(self, block: Block[Call]) -> Iterable[str] | None:
        """The names of a block that are read; None: all. A script may log a new name in each step."""
        if not self._most or self._only is not None:
            return self._only
        names = dict.fromkeys(chain.from_iterable(call.values for call in block.calls))
        new = [name for name in names if name not in self._points]
        room = NAMES - len(self._points)
        if len(new) <= room:
            return None
        if not self._too_many:
            self._too_many = True
            self.problems.append(f"{self._job} has logged more than {NAMES} names: only the first {NAMES} are read")
        return self._points.keys() | new[:room]

    def _drop_repeated(self) -> None:
        """Of other ranks' numbers, keep only those after rank 0's last step."""
        for mine in self._points.values():
            for generation, rank in mine:
                if rank and generation in self._last:
                    each, (epoch, step) = mine[generation, rank], self._last[generation]
                    if repeated := each.valid((epoch, step + 1)):
                        mine[generation, rank] = each.part(repeated, len(each))

    def _forget(self, source: Source) -> None:
        self._read.pop(source, None)
        for mine in self._points.values():
            mine.pop(source, None)


def _next_size(done: int, took: float, seconds: float) -> int:
    """How many blocks to read at once now. done: blocks that were read in `took` seconds. seconds: as in `update`."""
    if seconds == math.inf:
        return AT_ONCE
    if not done:
        return 1
    return max(0, min(AT_ONCE, 2 * done, int((seconds - took) / max(took, 1e-3) * done)))


def read_curves(store: Store, job: str, *names: str, most: int = 0) -> dict[str, Curve]:
    """The curves of these names, or of all. most: as in `Reader`. Raises `StoreError`."""
    reader = Reader(store, job, names or None, most)
    reader.update()
    return dict(_curves(reader, names))


def read_headers(store: Store, job: str) -> dict[int, Header]:
    """The header of each generation that has logged, from its first block. Raises `StoreError`."""
    reader = Reader(store, job, names=())
    reader.update(only_first=True)
    return reader.headers


def _curves(reader: Reader, names: tuple[str, ...]) -> Iterator[tuple[str, Curve]]:
    for name in names or reader.names:
        yield name, reader.curve(name)
