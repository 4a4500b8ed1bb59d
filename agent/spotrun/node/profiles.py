"""`spotrun profile`: have workers of this node record some steps, and put the traces into the bucket.

The request goes the way of `spotrun stacks`: an operator runs this program over SSH. The worker finds the request in
its control block, and this program does all that does not need the worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spotrun.errors import SpotrunError
from spotrun.node import stacks
from spotrun.state import profile
from spotrun.state.control import NONE, Control
from spotrun.state.profile import Request
from spotrun.store import Store, profile_key

SECONDS = 120.0  # for the steps: no step is recorded that begins later
LAST = 60.0  # seconds for the step under way then, and for the worker to write the trace
LARGEST = 512 << 20  # bytes of a trace before it is compressed; 100,000 events have 26 MB
POLL = 0.1
MOST_STEPS = 1000
NICE = 10  # this program must not slow the training down


@dataclass(frozen=True)
class Answer:
    """What came of one worker's profile."""

    rank: int
    generation: int
    steps: int = 0  # in the trace
    first: int = 0  # the number of the first one
    key: str = ""  # of the trace in the bucket
    problem: str = ""  # why there is no trace


def add_parser(commands: Any) -> None:
    """Add `profile`."""
    parser = commands.add_parser("profile", help="record some steps of a job's workers (on a node)")
    parser.add_argument("job")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", type=int, help="default: all ranks of this node")
    parser.set_defaults(run=lambda args: show(args.job, args.steps, args.rank))


def show(job: str, steps: int, rank: int | None) -> int:
    """Print a line of JSON for each worker: the fields of `Answer`. Raises `SpotrunError`."""
    stacks.check(job)
    if not 1 <= steps <= MOST_STEPS:
        raise SpotrunError(f"--steps: {steps}: allowed: 1 to {MOST_STEPS}")
    os.nice(NICE)
    found = [each for each in stacks.workers(stacks.tmpfs() / job / "control") if rank in (None, each[1].rank)]
    with ThreadPoolExecutor(max(1, len(found))) as pool:
        for answer in pool.map(lambda each: ask(each[0], each[1], job, steps), found):
            print(json.dumps(asdict(answer)), flush=True)
    return 0


def ask(path: Path, worker: stacks.Answer, job: str, steps: int) -> Answer:
    """Have a worker record steps, and upload the trace. path: of its control block."""
    rank, generation = worker.rank, worker.generation
    try:
        with _folder(stacks.scratch() / "profiles" / job / str(rank)) as folder:
            said = _record(path, worker, Request(steps, str(folder), time.time() + SECONDS))
            if said.problem:
                return Answer(rank, generation, problem=said.problem)
            key = profile_key(job, said.node, generation, rank, said.first)
            Store(said.bucket, said.region).put(key, _compressed(folder / profile.TRACE))
    except (SpotrunError, OSError, ValueError) as error:
        return Answer(rank, generation, problem=str(error)[:500] or repr(error))
    return Answer(rank, generation, said.steps, said.first, key)


def _record(path: Path, worker: stacks.Answer, request: Request) -> profile.Answer:
    """Ask, and wait for the answer. Afterwards, the worker has no request of ours."""
    with contextlib.closing(Control(path)) as control:
        if not _lives(worker, path):
            return profile.Answer(problem=stacks.ENDED)
        control.checked()
        request.write(path)
        control.profile = request.steps
        try:
            return _wait(control, path, worker, request)
        finally:
            if control.generation == worker.generation:
                control.profile = NONE
            Request.path_for(path).unlink(missing_ok=True)


def _wait(control: Control, path: Path, worker: stacks.Answer, request: Request) -> profile.Answer:
    deadline = time.monotonic() + SECONDS + LAST
    while time.monotonic() < deadline:
        if (found := profile.Answer.find(Path(request.folder))) is not None:
            return found
        if not _lives(worker, path):
            return profile.Answer(problem=stacks.ENDED)
        if control.generation != worker.generation:
            return profile.Answer(problem="the generation has ended; ask again when the job trains")
        time.sleep(POLL)
    return profile.Answer(
        problem=f"no step has ended in {SECONDS + LAST:g} s, or the script does not use run.steps; `make stacks` says "
        "where the worker is"
    )


def _lives(worker: stacks.Answer, path: Path) -> bool:
    try:
        return stacks.maps(worker.pid, path)
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """An empty folder for one request at a time. It is removed at the end."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpotrunError("somebody else is profiling this rank; try again in a few minutes") from None
        for each in path.iterdir():  # of a request that was killed
            each.unlink()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def _compressed(trace: Path) -> Path:
    size = trace.stat().st_size
    if size > LARGEST:
        raise SpotrunError(f"the trace has {size >> 20} MiB, more than {LARGEST >> 20} MiB: ask for fewer steps")
    found = trace.with_suffix(".json.gz")
    with trace.open("rb") as source, gzip.open(found, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return found
