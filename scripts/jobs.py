"""Submitting a job, and following it to its end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

from scripts import bundle, control, faults, provenance
from scripts.control import ENDED, Status
from scripts.display import Display
from scripts.faults import Fault
from scripts.ssh import Access, Unreachable
from spotrun.errors import SpecError, SpotrunError, StoreError
from spotrun.spec import ClusterSpec, JobSpec, check_fit, load_job

_PAUSE = 0.5  # seconds between two attempts to reach the head again


def check(cluster: ClusterSpec, path: str) -> JobSpec:
    """The job at `path`, checked: it can run on the cluster, and its folder can be sent. Raises `SpotrunError`."""
    job = load_job(path)
    try:
        check_fit(job, cluster)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    folder = Path(path).absolute().parent
    bundle.check(folder, job.script)
    if cluster.image is None:  # another image may have a newer Python than this computer
        _compile(folder / job.script)
    return job


def _compile(script: Path) -> None:
    """Raises `SpotrunError` if a node would find no Python in it. spotrun's images have the oldest Python allowed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), script.name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # before 3.12, a zero byte is a ValueError
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else error
        raise SpotrunError(f"{script}{line}: {type(error).__name__}: {text}") from None
    except (OSError, MemoryError, RecursionError):
        return  # packing it says so, or the worker does


def submit(access: Access, cluster: ClusterSpec, path: str, say: Callable[[str], None]) -> str:
    """Bundle a job's folder and queue the job. Returns its id. Raises `SpotrunError`."""
    job = check(cluster, path)
    folder = Path(path).absolute().parent
    packed = bundle.upload(access.store, folder, job.script)
    say(str(packed))
    # Gathered before the head has the job. A file that is just being written may be refused: then no job must run.
    origin = provenance.gather(path, access.file, packed.sha256, bundle.files(folder))
    try:
        submitted = control.submit(access, {"job": job.model_dump(mode="json"), "code": packed.sha256})
    except Unreachable:
        raise
    except SpotrunError as error:
        raise SpecError(f"{path}: {error}") from None
    say(f"job {submitted} submitted")
    if warning := provenance.write(access.store, submitted, origin):
        say(warning)
    return submitted


def follow(
    access: Access,
    job: str | None,
    display: Display,
    plan: list[Fault] | None = None,
    look: Callable[[], object] = lambda: None,
) -> Status:
    """Show a job until it ends, and take machines away as planned. Returns the last status document.

    look: raises `Unreachable` if the cluster has been taken down: then there is nothing to wait for. The head may be
    away for a while: training goes on without it. Raises `Unreachable` if the head, or the bucket, stays away.
    """
    todo, hit = list(plan or []), 0
    last: Status | None = None
    document: Status = {}
    absence = Absence(display.say, look)
    while True:
        try:
            with control.open_head(access) as head:
                for status in head.follow(job):
                    absence.over()
                    document, last = status, status["job"]
                    display.show(status)
                    if last is None:
                        continue
                    job = last["id"]
                    if fault := faults.due(todo, last, hit):
                        todo, hit = todo[1:], last["generation"]
                        _take(head, fault, status, display)
        except (Unreachable, StoreError) as error:
            absence.endure(error)
        if last is not None and last["phase"] in ENDED:
            if todo and last["phase"] == "succeeded":
                display.say(f"these faults did not come, because the job ended first: {', '.join(map(str, todo))}")
            return document
        time.sleep(_PAUSE)


class Absence:
    """The time for which the head has been away. look: see `follow`."""

    def __init__(self, say: Callable[[str], None], look: Callable[[], object]) -> None:
        self._say, self._look = say, look
        self._since: float | None = None

    def over(self) -> None:
        """The head has answered."""
        self._since = None

    def endure(self, error: SpotrunError) -> None:
        """Say once that the head is away. Raises `Unreachable` if it stays away or the cluster was taken down."""
        try:
            self._look()
        except Unreachable:
            raise
        except SpotrunError:
            pass  # whether the cluster is up is not known
        if self._since is None:
            self._say(f"the head is away ({error}); training goes on, trying again")
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > control.PATIENCE:
            raise Unreachable(f"the head has been away for {control.PATIENCE:.0f} s: {error}") from None


def _take(head: control.Head, fault: Fault, status: Status, display: Display) -> None:
    node = faults.victim(status)
    if node is None:
        return
    display.say(f"taking {node} away: {faults.KINDS[fault.kind]}")
    try:
        head.ask(fault.kind, node)
    except Unreachable:
        raise
    except SpotrunError as error:
        display.say(f"could not take {node} away: {error}")
