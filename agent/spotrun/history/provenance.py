"""Where a job came from, what its nodes had, and what people say about it: documents beside the job's state."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from spotrun.document import Kept

MOST = 4 << 20  # bytes of a provenance that are read
RECORD = 1 << 20  # bytes of a node's record that are read; a job's code could write a longer one


class Git(Kept):
    """The state of the repository that the job's folder is in."""

    commit: str  # empty: the repository has no commit yet
    branch: str = ""
    remote: str = ""  # without user name and password
    diff: str = ""  # of the bundle's files, against the commit
    cut: bool = False  # whether the diff was too long, and ends early
    untracked: tuple[str, ...] = ()  # files of the bundle that git does not know


class Provenance(Kept):
    """jobs/<id>/provenance.json: who submitted what. The operator's command writes it after the head has the job."""

    job: str  # id
    at: float  # epoch seconds, by the operator's clock
    user: str = ""
    host: str = ""  # the operator's machine
    email: str = ""  # as git knows it
    version: str = ""  # of the operator's spotrun
    code: str  # sha256 of the bundle
    files: int = 0  # in the bundle
    job_path: str = ""  # as it was typed
    job_file: str = ""  # its text
    cluster_path: str = ""
    cluster_file: str = ""
    git: Git | None = None  # None: the folder is in no repository, or there is no git
    rerun_of: str = ""  # the job that this one repeats


class NodeRecord(Kept):
    """jobs/<id>/system/<node>/about-<boot>.json: what a node had when it trained."""

    node: str
    boot: str  # as in wire.Report
    at: float
    zone: str = ""
    type: str = ""  # machine type
    devices: int = 0
    cpus: int = 0
    memory: int = 0  # bytes
    gpus: tuple[str, ...] = ()  # their models
    driver: str = ""  # NVIDIA's version
    kernel: str = ""
    python: str = ""
    image: dict[str, Any] = Field(default={})  # commit, built and versions of the image's manifest; empty: no image
    seed: int | None = None  # that the script gave to `spotrun.init`; None: not known
    packages: dict[str, str] = Field(default={})  # versions by name, of the workers' environment


class Note(Kept):
    """One note."""

    at: float
    user: str
    text: str


class Remarks(Kept):
    """jobs/<id>/remarks.json: what people say about a job."""

    tags: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
