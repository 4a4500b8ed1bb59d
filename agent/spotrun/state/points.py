"""What scripts log: blocks of lines, on a node's disk and in the bucket.

A block is JSON lines: a `Header`, then a `Call` for each call of run.log. In the bucket it is compressed with zstd
(jobs/<id>/metrics/<generation>/<block>.jsonl.zst), and is never rewritten. On a node's disk, rank 0's process appends
to `<block>.part`. The agent takes that file (`take`), and from then on the process appends to the next block.

Rank 0's last numbers are lost if its process or its machine is lost. So the first worker of the next two nodes writes
blocks too, into the folder `rank-<rank>` (`is_substitute`). At the end of a generation, their newest blocks go to the
bucket, and readers use what comes after rank 0's last number.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar, cast

import msgspec
import zstandard

from spotrun.errors import UnreadableError
from spotrun.locks import try_lock

FORMAT = 1  # of a block. It goes up only when readers of the older format would misread it
LONGEST = 8 << 20  # bytes of a block on a node's disk; then the next one begins
MOST = 64 << 20  # bytes of a block, not compressed; a job's code can write to its node's blocks
EXTRAS = "extras"  # the folder beside a generation's blocks of numbers
SUBSTITUTES = 2  # nodes that write blocks, in addition to that of rank 0
PART, TAKEN = ".part", ".jsonl"  # ends of file names: a block that grows, a block that the agent has taken
LEVEL = 3  # zstd: metrics become 5 to 10 times smaller, at 100 MB a second or more
_COUNT = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no such numbers
_NAME = re.compile(r"([0-9]{6,12})\.(part|jsonl)")


class Header(msgspec.Struct, frozen=True):
    """The first line of a block."""

    job: str
    generation: _COUNT
    rank: _COUNT  # of the process that logs
    base: _COUNT  # the step from which the generation went on
    base_epoch: _COUNT = 0  # the epoch of that state
    format: _COUNT = FORMAT


class Call(msgspec.Struct, omit_defaults=True):
    """One call of run.log."""

    step: _COUNT  # the step under way, counted from 1; between two steps: the one before
    time: float  # epoch seconds, by the node's clock
    values: dict[str, float | str]  # NaN and infinities as strings
    epoch: _COUNT = 0
    samples: float | None = None  # that the job has seen when the step is done; None: not known
    between: bool = False  # whether no step was under way


class Extra(msgspec.Struct, omit_defaults=True):
    """One call of run.log_text, run.log_image or run.log_histogram. `step`, `epoch`, `between` are as in `Call`."""

    step: _COUNT
    time: float
    kind: str  # text, image or histogram; a reader ignores other kinds
    name: str
    text: str = ""  # of an image: a PNG in base64
    edges: list[float] = []  # of a histogram's bins, one more than there are counts
    counts: list[int] = []
    epoch: _COUNT = 0
    between: bool = False


Line = TypeVar("Line", Call, Extra)


@dataclass(frozen=True)
class Block(Generic[Line]):
    """A block that was read."""

    header: Header
    calls: list[Line]
    missing: str = ""  # what of it could not be read, as a message; empty: nothing


_header = msgspec.json.Decoder(Header)
_calls = msgspec.json.Decoder(Call)
_extras = msgspec.json.Decoder(Extra)
_encoder = msgspec.json.Encoder()


def place(call: Call | Extra) -> tuple[int, int]:
    """Epoch, and steps completed: where in a job it was logged."""
    return (call.epoch, call.step - (0 if call.between else 1))


def line(item: Header | Call | Extra) -> bytes:
    """The header or the call as a line."""
    return _encoder.encode(item) + b"\n"


def to_json(value: float) -> float | str:
    """A number as a value of `Call.values`."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def all_to_json(values: dict[str, float]) -> dict[str, float | str]:
    """Numbers as `Call.values`. The sum is not finite if a number is not."""
    if math.isfinite(sum(values.values())):
        return cast(dict[str, float | str], values)
    return {name: to_json(each) for name, each in values.items()}


def from_json(value: float | str) -> float:
    """A value of `Call.values` as a number; a text that is not a number becomes NaN."""
    return _NUMBERS.get(value, math.nan) if isinstance(value, str) else value


def compress(lines: bytes) -> bytes:
    """A block as an object of the bucket."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(lines)


def read(data: bytes, what: str) -> Block[Call]:
    """A block of numbers from the bytes of its object. what: its key, for messages. Raises `UnreadableError`."""
    return _read(data, what, _calls)


def read_extras(data: bytes, what: str) -> Block[Extra]:
    """A block of texts, images and histograms, as `read`."""
    return _read(data, what, _extras)


def _read(data: bytes, what: str, decoder: msgspec.json.Decoder[Line]) -> Block[Line]:
    try:
        lines = zstandard.ZstdDecompressor().stream_reader(data).read(MOST + 1)
        whole = zstandard.frame_content_size(data)  # below 0: the object does not give its size; `compress` does
    except zstandard.ZstdError as error:
        raise UnreadableError(f"{what} is not readable: {error}") from None
    if len(lines) > MOST:
        raise UnreadableError(f"{what} is not readable: it has more than {MOST >> 20} MiB")
    first, _, rest = lines.partition(b"\n")
    try:
        header = _header.decode(first)
    except ValueError as error:  # msgspec's errors, and bytes that are not UTF-8
        raise UnreadableError(f"{what} is not readable: {error}") from None
    if header.format > FORMAT:
        raise UnreadableError(f"{what} has format {header.format}; this version of spotrun reads {FORMAT}: update it")
    cut = f"{what} is cut: {len(lines)} of its {whole} bytes can be read" if len(lines) < whole else ""
    try:
        return Block(header, decoder.decode_lines(rest), cut)
    except ValueError:
        return _in_part(header, rest, what, decoder, cut)


def _in_part(header: Header, rest: bytes, what: str, decoder: msgspec.json.Decoder[Line], cut: str) -> Block[Line]:
    """The lines that can be read. An incomplete last line is not reported: its process was killed."""
    complete, _, last = rest.rpartition(b"\n")
    texts = [text for text in complete.splitlines() if text]
    calls = list(_readable(texts, decoder))
    if not cut and (junk := len(texts) - len(calls)):
        cut = f"{what}: {junk} of its lines cannot be read; they are left out"
    calls += _readable([last], decoder)
    return Block(header, calls, cut)


def _readable(lines: Iterable[bytes], decoder: msgspec.json.Decoder[Line]) -> Iterator[Line]:
    for line in lines:
        try:
            yield decoder.decode(line)
        except ValueError:
            continue


def is_substitute(rank: int, local_rank: int, workers: int) -> bool:
    """Whether a worker keeps numbers in case those of rank 0 are lost. workers: of its node."""
    return local_rank == 0 < rank <= SUBSTITUTES * max(1, workers)


def rank_folder(rank: int) -> str:
    """The folder of a substitute, beside rank 0's blocks."""
    return f"rank-{rank:04d}"


def substitutes(folder: Path) -> list[Path]:
    """The folders of substitutes in that of a generation."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if re.fullmatch("rank-[0-9]{4,9}", name))
    except OSError:
        return []


class BlockWriter:
    """Appends lines to the newest block in a folder, which only this process writes. One thread at a time uses it."""

    def __init__(self, folder: Path, header: bytes) -> None:
        """header: the first line of each block, with its line break."""
        self._folder, self._header = folder, header
        self._number = 0  # not known yet
        self._begun = False  # whether this process has made the file of `_number`

    def append(self, lines: bytes) -> None:
        """Write whole lines, all or none. Raises OSError, such as for a full disk."""
        while True:
            try:
                handle = self._open()
            except FileNotFoundError:  # the agent has taken the file
                self._number, self._begun = self._number + 1, False
                continue
            self._begun = True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)  # the agent holds the lock only while it renames the file
                if _is_at(handle, self._path):
                    if _write(handle, lines, self._header) > LONGEST:
                        self._path.rename(self._path.with_suffix(TAKEN))
                    return
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile has the same lock
                os.close(handle)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._number:06d}{PART}"

    def _open(self) -> int:
        if not self._number:
            self._number = max((number for number, _ in blocks(self._folder)), default=0) + 1
        if self._begun:
            return os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._folder.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def take(path: Path, insist: bool = False) -> Path | None:
    """End a block that grows, and return its new path; None: it is empty, or its process writes to it at the moment.

    insist: even if the process writes, because the process has ended or will not go on. Raises OSError.
    """
    with _opened(path) as handle:
        if not (try_lock(handle) or insist) or not os.fstat(handle).st_size:
            return None
        new = path.with_suffix(TAKEN)
        path.rename(new)
        return new


def blocks(folder: Path) -> list[tuple[int, Path]]:
    """Number and path of each block in a folder, in order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), folder / name) for name in names if (match := _NAME.fullmatch(name)))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # The folder is open to the job's code: the path may be a link or a pipe.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield handle
    finally:
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file still has this path."""
    try:
        there, mine = os.stat(path), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _write(handle: int, lines: bytes, header: bytes) -> int:
    """Append to an open file; return its size."""
    size = os.fstat(handle).st_size
    rest = memoryview(lines if size else header + lines)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except OSError:
        os.ftruncate(handle, size)
        raise
    return os.fstat(handle).st_size
