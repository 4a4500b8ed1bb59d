"""Where a job comes from: the repository, the person, the files. Written beside the job when it has been submitted."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spotrun.errors import StoreError
from spotrun.history.provenance import Git, Provenance
from spotrun.store import Store, provenance_key

LONGEST = 1 << 20  # characters of a diff
TIMEOUT = 20.0  # seconds for a git command
_SHOWN = 1000  # untracked files that are named


def gather(job_file: str, cluster_file: str, code: str, names: list[Path]) -> Provenance:
    """The provenance without the job's id. names: the bundle's files, relative to the job file's folder."""
    folder = Path(job_file).absolute().parent
    return Provenance(
        job="",
        at=time.time(),
        user=user(),
        host=socket.gethostname(),
        email=_git(folder, "config", "user.email").strip(),
        version=_version(),
        code=code,
        files=len(names),
        job_path=job_file,
        job_file=_text(job_file),
        cluster_path=cluster_file,
        cluster_file=_text(cluster_file),
        git=repository(folder, names),
    )


def again(found: Provenance | None, source: str, cluster_file: str, code: str) -> Provenance:
    """The provenance of a job that repeats another one. found: that of the other job `source`, if it is known."""
    base = found or Provenance(job="", at=0.0, code=code)
    return base.replace(
        at=time.time(),
        user=user(),
        host=socket.gethostname(),
        email=_git(Path.cwd(), "config", "user.email").strip(),
        version=_version(),
        cluster_path=cluster_file,
        cluster_file=_text(cluster_file),
        rerun_of=source,
    )


def write(store: Store, job: str, found: Provenance) -> str:
    """Write the provenance into the bucket. Returns a warning, or an empty text: the job runs in both cases."""
    try:
        store.put(provenance_key(job), found.replace(job=job).model_dump_json().encode())
    except StoreError as error:
        return f"job {job} runs, but its provenance is not in the bucket: {error}"
    return ""


def repository(folder: Path, names: list[Path]) -> Git | None:
    """The repository that a folder is in; None if there is none. Only the bundle's files count: no other file is sent.

    names: the bundle's files, relative to the folder.
    """
    if _git(folder, "rev-parse", "--is-inside-work-tree").strip() != "true":
        return None
    commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD").strip()
    sent = {name.as_posix() for name in names}
    changed = _names(_git(folder, "diff", "HEAD", "--relative", "--name-only", "-z", "--", ".")) if commit else []
    mine = [name for name in changed if name in sent or not (folder / name).exists()]
    options = ("--relative", "--no-color", "--no-ext-diff", "--no-textconv")
    diff = _git(folder, "diff", "HEAD", *options, "--", *mine[:_SHOWN]) if mine else ""
    others = _names(_git(folder, "ls-files", "--others", "-z", "--", "."))
    return Git(
        commit=commit,
        branch=_git(folder, "symbolic-ref", "--quiet", "--short", "HEAD").strip(),
        remote=without_secrets(_git(folder, "remote", "get-url", "origin").strip()),
        diff=diff[:LONGEST],
        cut=len(diff) > LONGEST or len(mine) > _SHOWN,
        untracked=tuple(sorted(sent & set(others)))[:_SHOWN],
    )


def without_secrets(url: str) -> str:
    """The URL without user name, password and query."""
    return re.sub(r"^([a-z+]+://)[^/@]*@", r"\1", url).partition("?")[0]


def _names(listed: str) -> list[str]:
    return [name for name in listed.split("\0") if name]


def _git(folder: Path, *words: str) -> str:
    """What a git command prints; empty if it fails or there is no git. Git asks no question and takes no lock."""
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, env=env, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def user() -> str:
    """The name of the person or the CI job at this machine."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _version() -> str:
    try:
        return version("spotrun")
    except PackageNotFoundError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")[:LONGEST]
    except OSError:
        return ""
