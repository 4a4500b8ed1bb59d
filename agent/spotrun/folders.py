"""The folders that a job leaves in the bucket (`JobSpec.keep`), and that later jobs find (`JobSpec.inputs`). No I/O.

The node of rank 0 in the generation that ended well uploads the folders. The keys have the generation's number, so a
later try does not replace what an earlier one has uploaded. A list of all files is written last.
"""

from __future__ import annotations

from pydantic import Field

from spotrun.document import Document, Kept


class FoldersRef(Document):
    """Which folders count."""

    generation: int = Field(ge=0)  # of the job that left them
    sha256: str  # of the list of their files


class Input(Document):
    """A folder of another job, as a node fetches it."""

    name: str  # in the working folder
    job: str  # the id of the job that left it
    folder: str
    ref: FoldersRef


class Keeping(Document):
    """How far a node is with the folders of a job."""

    generation: int
    ref: FoldersRef | None = None  # once they are in the bucket
    problem: str = ""  # what is wrong with the folders; another try would fail the same way
    trouble: str = ""  # why the newest try failed; the node tries again


class KeptFile(Document):
    """A file, or a link within its folder."""

    name: str  # below the job's working folder
    size: int = 0
    xxh3: str = ""  # hex digest, 128 bits
    link: str = ""  # where a link leads, relative to its own folder; empty: a file
    at: str = ""  # the end of its key; empty: the name


class KeptFiles(Kept):
    """All files of a job's folders."""

    folders: tuple[str, ...]
    files: tuple[KeptFile, ...]


class Place(Document):
    """Where a job's things are on a node, as paths."""

    folder: str  # the working folder of its workers
    env: str  # a file for a shell: the environment of its workers
    logs: str  # the folder with what its workers of the newest generation have printed
