"""The head's own command, `spotrun ctl`, over SSH: JSON in, JSON out."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import paramiko

from scripts import console
from scripts.job_table import job_id
from scripts.make_command import LOCAL, here, make_command
from scripts.ssh import EXIT_TIMEOUT, TIMEOUT, Access, StrictConnection, Unreachable, connect
from spotrun.errors import CredentialsError, SpotrunError
from spotrun.head.server.ctl import NO_ANSWER, SILENCE

Status = dict[str, Any]  # the status document
PATIENCE = 180.0  # seconds to wait for a head that is away; its cloud recreates it in less
_PAUSE = 0.25  # seconds between two questions to a head that does not answer yet
ACTIVE = ("queued", "starting", "running", "draining", "waiting", "finishing", "parked")
ENDED = ("succeeded", "failed", "stopped")
_READS = ("status", "jobs", "metrics", "follow", "live")  # verbs that change nothing


class NoHead(Unreachable):
    """The head's machine has answered, but no head runs there. So the head has not got the question."""


class Unfinished(NamedTuple):
    """A job that `make down` would interrupt, or whose kept node it would take."""

    job: str
    node: str = ""  # the node that a failed job keeps


class Head:
    """An open connection to the head. file: the cluster file, which messages name."""

    def __init__(self, connection: StrictConnection, file: str = LOCAL) -> None:
        self._connection, self._file = connection, file

    def ask(self, verb: str, *arguments: str, data: object = None, timeout: float = 60.0) -> Any:
        """The answer of `spotrun ctl <verb>`. Raises `SpotrunError` with the head's words, or `Unreachable`."""
        with self._started(f"timeout -k 5 {timeout:g} {_command(verb, *arguments)}", timeout + 10) as channel:
            if data is not None:
                channel.sendall(json.dumps(data).encode())
            channel.shutdown_write()
            output = b"".join(iter(lambda: channel.recv(65536), b""))
            _check_exit(channel, verb, self._file)
        if not output.strip():
            return None
        try:
            return json.loads(output)
        except (ValueError, RecursionError):
            raise Unreachable(f"the head's answer to {verb} is not JSON: {output[:200]!r}") from None

    def follow(self, job: str | None) -> Iterator[Status]:
        """Status documents, until the job has ended or the head is gone."""
        return self._documents("follow", *(["--job", job] if job else []))

    def close(self) -> None:
        """End the connection. Another thread that waits for an answer gets `Unreachable`."""
        self._connection.close()

    def live(self) -> Iterator[Status]:
        """Overviews of the cluster, until the head is gone."""
        return self._documents("live")

    def _documents(self, verb: str, *arguments: str) -> Iterator[Status]:
        with self._started(_command(verb, *arguments), SILENCE) as channel:
            rest = b""
            while block := channel.recv(65536):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _parsed(line)
            _check_exit(channel, verb, self._file)

    @contextlib.contextmanager
    def _started(self, command: str, timeout: float) -> Iterator[paramiko.Channel]:
        try:
            with self._connection.transport.open_session(timeout=TIMEOUT) as channel:
                channel.settimeout(timeout)
                channel.exec_command(command)
                yield channel
        except (paramiko.SSHException, EOFError, OSError) as error:
            reason = "no answer in time" if isinstance(error, socket.timeout) else error or type(error).__name__
            raise Unreachable(f"the connection to the head broke: {reason}") from None


@contextlib.contextmanager
def open_head(access: Access) -> Iterator[Head]:
    """The head. Raises `Unreachable` if it cannot be reached now."""
    with connect(access) as connection:
        yield Head(connection, access.file)


def ask(access: Access, verb: str, *arguments: str, data: object = None) -> Any:
    """As `Head.ask`, over a new connection."""
    with open_head(access) as head:
        return head.ask(verb, *arguments, data=data)


def submit(access: Access, data: Status) -> str:
    """Give a job to the head. Returns its id. Raises as `Head.ask` does.

    If no answer comes, the head may have got the job. Then this says so, because a second submission would cost twice.
    """
    look = f"the head may have got the job; before you submit it again, look: `{make_command(access.file, 'jobs')}`"
    with open_head(access) as head:
        try:
            return str(head.ask("submit", data=data)["job"])
        except NoHead:
            raise
        except Unreachable as error:
            raise Unreachable(f"{error}; {look}") from None
        except KeyboardInterrupt:
            console.warn(f"\nspotrun: interrupted; {look}")
            raise


def await_head(
    access: Access, description: str, patience: float = PATIENCE, look: Callable[[], object] = lambda: None
) -> Status:
    """The first status of a head that knows this description (its digest). Raises `Unreachable` after `patience` s.

    look: raises `Unreachable` if the cluster has been taken down: then no head comes.
    """
    deadline, told = time.monotonic() + patience, ""
    while True:
        try:
            found: Status = ask(access, "status")
            problem = "it has not read the cluster's new description yet"
            if found["head"].get("description") == description:
                return found
        except CredentialsError:
            raise
        except SpotrunError as error:
            look()
            problem = str(error)
        if patience > PATIENCE and problem != told:  # the wait may be long, so say why
            console.warn(f"spotrun: waiting for the head: {problem}")
            told = problem
        if time.monotonic() > deadline:
            raise Unreachable(f"the head of cluster {access.cluster} does not come up: {problem}") from None
        time.sleep(_PAUSE)


def unfinished(access: Access) -> list[Unfinished]:
    """The jobs that have not ended, or keep a node, the active one first."""
    jobs: list[Status] = ask(access, "jobs")
    kept = {job_id(job): str(found["node"]) for job in jobs if (found := job.get("kept"))}
    return [
        Unfinished(job_id(job), kept.get(job_id(job), ""))
        for job in jobs
        if job["phase"] in ACTIVE or job_id(job) in kept
    ]


def _command(*words: str) -> str:
    return shlex.join(["spotrun", "ctl", *words])


def _check_exit(channel: paramiko.Channel, verb: str, file: str) -> None:
    """Raise unless the command succeeded: `SpotrunError` for a mistake of the operator, `Unreachable` for the rest."""
    code = channel.recv_exit_status()
    if code == 0:
        return
    said = b"".join(iter(lambda: channel.recv_stderr(65536), b"")).decode(errors="replace").strip()
    ended = f"spotrun ctl {verb} ended with status {code}" if code >= 0 else "the connection to the head broke"
    text = said.removeprefix("spotrun: ") or ended
    if code == EXIT_TIMEOUT:
        later = "" if verb in (*_READS, "submit") else "; it may have got the request, and still do what was asked"
        raise Unreachable(f"{NO_ANSWER} in time{later}")
    if code == 2 and text.startswith("usage: spotrun"):
        what = text.splitlines()[-1].rpartition(" error: ")[2]
        raise SpotrunError(f"the head runs another version of spotrun, which does not know this command: {what[:200]}")
    if code == 127:
        raise NoHead(f"the head has no `spotrun` command: {text}")
    if code == 2 and text.startswith("no head runs"):
        raise NoHead(text)
    if code == 2 and not text.startswith(NO_ANSWER):
        # The next command is added here: the head does not know the operator's cluster file.
        known = text.startswith("there is no job")
        hint = f"; `{make_command(file, 'status')}` names the newest jobs" if known else ""
        raise SpotrunError(here(text, file) + hint)
    raise Unreachable(text)


def _parsed(line: bytes) -> Status:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreachable(f"this answer of the head is not a status document: {line[:200]!r}")
    return found
