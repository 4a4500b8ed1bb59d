"""`make tensorboard`: TensorBoard on runs, also while they train. All points come from the bucket."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scripts import console, ctrl_c, runs
from scripts.event_files import EventFile, library
from scripts.make_command import make_command
from scripts.site import Site
from spotrun.errors import CorruptError, SpotrunError
from spotrun.folders import KeptFiles
from spotrun.head.job_state import JobState
from spotrun.history.curves import Points
from spotrun.history.reader import Reader
from spotrun.node.event_files import NAMED
from spotrun.node.kept_folders import LIST, is_plain
from spotrun.store import Store, event_files_folder, kept_key

EVERY = 5.0  # seconds between two looks into the bucket, and between TensorBoard's looks into the files
SHARE = 0.1  # part of this process's time that looks may take: they take longer with very many points
SHOWN = 5000  # points of a curve that TensorBoard shows; it drops points of longer curves at random
LAST = 30.0  # seconds after a job's end in which its nodes may still upload
PIECE = 16 << 20  # bytes of an event file that are read at once


class Board:
    """The event files of one run. `update` brings them up to date."""

    def __init__(self, store: Store, cluster: str, job: str, folder: Path) -> None:
        self.job = job
        self.over = False  # whether there is nothing more to come, unless the job is relaunched
        self.problem = ""  # why the last update has failed
        self._store, self._cluster, self._folder = store, cluster, folder
        self._reader = Reader(store, job)
        self._written: dict[str, Points] = {}
        self._file: EventFile | None = None
        self._files = 0
        self._due = False  # whether points have been read that are not written yet
        self._fetched: dict[str, int] = {}  # bytes of each of the script's own event files, by key

    def update(self) -> int:
        """Write what is new. Returns how many points. Raises `SpotrunError`, and `OSError` for a full disk."""
        state = runs.state(self._store, self._cluster, self.job)
        if self.over and state.ended_already:
            return 0
        self.over = False  # it may have been relaunched
        self._due = self._reader.update() or self._due
        count = self._write_all() if self._due else 0
        self._due = False
        self._fetch()
        if state.ended_already and time.time() - (state.ended or 0.0) > LAST:
            if not self._fetched:  # agents of older versions upload no event files while the job runs
                fetch_kept(self._store, state, self._folder)
            self.over = True
        return count

    def _write_all(self) -> int:
        """Write the points that are not written yet; all of them again if that fails now. Raises `OSError`."""
        try:
            return self._write({name: self._reader.curve(name).counting() for name in self._reader.names})
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            self._file, self._written = None, {}
            raise

    def _fetch(self) -> None:
        """Fetch what is new in the script's own event files. A file that has become shorter is fetched again.

        TensorBoard takes all files of a folder for one run, so files of all nodes lie together.
        """
        prefix = event_files_folder(self.job) + "/"
        for key, size in self._store.sizes(prefix).items():
            node, _, name = key.removeprefix(prefix).partition("/")
            if size == self._fetched.get(key, 0) or not is_plain(name):
                continue
            path = self._folder / f"{name}.{node}"
            path.parent.mkdir(parents=True, exist_ok=True)
            have = self._fetched.get(key, 0)
            have = have if have < size else 0
            with path.open("r+b" if have else "wb") as file:
                file.seek(have)  # an earlier fetch may have failed after it had written more
                for start in range(have, size, PIECE):
                    file.write(self._store.part(key, start, min(start + PIECE, size)))
            self._fetched[key] = size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, found: Mapping[str, Points]) -> int:
        purge = first_change(self._written, found)
        if self._file is None or purge is not None:
            self.close()
            self._files += 1
            self._file = EventFile(self._folder, purge or 0, self._files)
        count = 0
        for name, points in found.items():
            before = len(self._written[name]) if name in self._written else 0
            count += self._file.add(name, points, before if purge is None else bisect_left(points.steps, purge))
        self._file.flush()
        self._written = dict(found)
        return count


def first_change(written: Mapping[str, Points], found: Mapping[str, Points]) -> int | None:
    """The first step whose points a newer generation has replaced; None: points were only added.

    written, found: the points that count, before and now.
    """
    changed = []
    for name, before in written.items():
        now = found.get(name, Points())
        count = min(len(before), len(now))
        if before.steps[:count] == now.steps[:count] and before.times[:count] == now.times[:count]:
            same = count
        else:
            pairs = zip(before.steps, now.steps, before.times, now.times, strict=False)
            same = next(row for row, (a, b, c, d) in enumerate(pairs) if (a, c) != (b, d))
        if same < len(before):
            changed.append(min(before.steps[same], now.steps[same]) if same < len(now) else before.steps[same])
    return min(changed, default=None)


def fetch_kept(store: Store, job: JobState, folder: Path) -> int:
    """Fetch the event files that the script has left in a folder of `keep`. Returns how many.

    A job's code can write the list of these files. So a name that leads out of `folder` is left out. Raises
    `SpotrunError`.
    """
    if job.folders is None:
        return 0
    number, count = job.folders.generation, 0
    try:
        files = KeptFiles.model_validate_json(store.get(kept_key(job.id, number), LIST)).files
    except ValueError as error:
        raise CorruptError(f"{kept_key(job.id, number)}: is not readable: {error}") from None
    for each in files:
        if NAMED in each.name.rpartition("/")[2] and not each.link and is_plain(each.name):
            path = folder / each.name
            path.parent.mkdir(parents=True, exist_ok=True)
            store.fetch(kept_key(job.id, number, each.at or each.name), path)
            count += 1
    return count


def chosen(site: Site, ids: Sequence[str], group: str | None) -> list[str]:
    """The runs to show: those that are named, those of a group, or those that have not ended, or else the newest one.

    Raises `SpotrunError` if there are none.
    """
    store, cluster = site.bucket(), site.cluster.name
    if ids:
        return [runs.state(store, cluster, each).id for each in dict.fromkeys(ids)]
    found = [each for each in runs.rows(store, cluster) if each["phase"] != "unreadable"]
    if group:
        found = [each for each in found if each["group"] == group]
    else:
        found = [each for each in found if each["ended"] is None] or found[:1]
    if not found:
        what = f"group {group} has no runs" if group else "no job has run on this cluster yet"
        raise SpotrunError(f"{what}; `{make_command(site.file, 'runs')}` lists the runs")
    return [str(each["id"]) for each in found]


def serve(store: Store, cluster: str, jobs: Sequence[str], port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. port: 0: any free one. say: gets the address, once. Raises `SpotrunError`."""
    library("tensorboard", "tensorboard", "make tensorboard")
    with ctrl_c.all_ends(), tempfile.TemporaryDirectory(prefix="spotrun-tensorboard-") as folder:
        boards = [Board(store, cluster, job, Path(folder, job)) for job in jobs]
        try:
            took = _update(boards)
            say(launch(Path(folder), port))
            over = threading.Event()  # never set: Ctrl-C ends the loop
            while not over.wait(max(EVERY, took / SHARE)):
                took = _update(boards)
        except KeyboardInterrupt:
            return
        finally:
            for board in boards:
                board.close()


def launch(folder: Path, port: int) -> str:
    """Start TensorBoard in this process, in threads that end with it. Returns the address.

    TensorBoard's fast loader, which is another program, is not used: it does not know that repeated steps replace
    earlier ones. TensorBoard reads all files of a run when they grow, because each node has files of its own. By
    default, it would read only the last file.
    """
    from tensorboard import program

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = program.TensorBoard()
    flags = {
        "load_fast": "false",
        "reload_multifile": True,
        "reload_interval": EVERY,
        "samples_per_plugin": {"scalars": SHOWN},
    }
    try:
        server.configure(argv=["tensorboard"], logdir=str(folder), host="127.0.0.1", port=port, **flags)
        return str(server.launch())
    except program.TensorBoardServerException as error:
        raise SpotrunError(f"TensorBoard does not start: {error.msg}") from None


def _update(boards: Sequence[Board]) -> float:
    """Bring all event files up to date. Returns the seconds that took. A run that cannot be read stays as it is."""
    began = time.monotonic()
    for board in boards:
        problem = ""
        try:
            board.update()
        except (SpotrunError, OSError) as error:  # the disk may be full
            problem = str(error)
        if problem and problem != board.problem:
            console.warn(f"spotrun: tensorboard: {board.job}: {problem}")
        board.problem = problem
    return time.monotonic() - began
