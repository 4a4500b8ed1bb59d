"""What head and agents say to each other: two whole documents, re-sent whenever they change.

The head sends each agent an `Order`: everything that agent should be doing. The agent answers with a `Report`:
everything that is. Both are complete in themselves, so a lost message, a new connection or a new head needs no
replay: the newest document counts (as in a Kubernetes spec and status). Each is one JSON text frame over a
WebSocket. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

MAX_MESSAGE = 1 << 20  # bytes; a larger frame is refused and the link closed
FORMAT = 1  # of the documents in the bucket: see `Kept`
NODE_HEADER = "Spotrun-Node"  # header of an agent's request for a link: the node's name; `Authorization` has its secret
REFUSAL_HEADER = "Spotrun-Refusal"  # header of the answer to a refused request: the reason


class Document(BaseModel):
    """A frozen message part. A loss may be NaN, for which JSON has no number.

    Unknown keys are ignored: the other side may be of another version.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    def replace(self, **changes: object) -> Self:
        """A copy with these fields changed; their values are not validated. Raises `TypeError` for an unknown field."""
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)


def _known(value: int) -> int:
    if value > FORMAT:
        raise ValueError(f"has format {value}; this version of spotrun reads format {FORMAT}: update it")
    return value


class Kept(Document):
    """A document that is kept in the bucket.

    format: of the document. A new key does not change the format. It goes up only when a reader of the older format
    would get the document wrong. A document of a higher format cannot be read.
    """

    format: Annotated[int, AfterValidator(_known)] = FORMAT


class StateRef(Document):
    """A saved training state, ordered by (generation, step): the later generation counts, whatever its step."""

    generation: int = Field(ge=0)
    step: int = Field(ge=0)


class Member(Document):
    """One node of a generation. Its place in `Generation.members` is its node rank."""

    node: str
    boot: str  # the agent's incarnation: a node that came back is another member
    address: str


class Generation(Document):
    """A fixed set of nodes training together. A generation's number is never used twice in a job."""

    number: int = Field(ge=1)
    members: tuple[Member, ...]
    store: str  # "host:port" of a TCPStore that the first member's launcher holds, never used before
    checkpoints: tuple[StateRef, ...] = ()  # complete ones in the bucket, newest first


class Bundle(Document):
    """The job as an agent needs it: what to run and how."""

    id: str
    code: str  # sha256 of the bundle at code/<sha256>.tar.zst
    job: dict[str, object]  # the job file, validated, as JSON (JobSpec.kept reads it)


class SaveOrder(Document):
    """A checkpoint to take at a step: this agent uploads part `index` of `parts`."""

    step: int = Field(ge=0)
    index: int = Field(ge=0)
    parts: int = Field(ge=1)


class Order(Document):
    """Head to agent: what the agent should be doing."""

    kind: Literal["order"] = "order"
    epoch: int  # of the head that speaks; an agent ignores a lower one than it has seen
    bundle: Bundle | None = None  # None: hold nothing, end everything
    generation: Generation | None = None  # None: no workers; be ready. Workers of any other generation are ended
    stop_at: int | None = None  # every worker of `generation` snapshots after this step and exits (drain)
    save: SaveOrder | None = None  # checkpoint at this step of `generation`
    upload: StateRef | None = None  # with `generation` None: put this local snapshot into the bucket (save has parts)
    dump: bool = False  # write the stacks of all workers to the log, then end them (they hang)


class Failure(Document):
    """Why a worker ended early."""

    kind: Literal["user", "peer", "signal", "hang", "setup"]  # peer: a collective failed, so someone else died
    rank: int
    at: float  # epoch seconds
    message: str  # one line
    traceback: str = ""


class Worker(Document):
    """One training process, as its control block shows it."""

    rank: int
    pid: int
    step: int  # steps completed since the job began; -1 before the state is restored
    base: int = -1  # the step at which it took up the work, this generation
    stepped_at: float  # epoch seconds of the last completed step, 0 before the first
    samples: float = 0.0  # seen by this process in this generation
    total_steps: int = 0  # the script's own estimate of the job's length; 0: unknown
    metrics: dict[str, float] = Field(default={})
    # Epoch seconds of: forked, init called, group formed, state restored, first step done. 0: not yet.
    phases: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    stall: float = 0.0  # seconds spent copying snapshots, this generation
    stepping: float = 0.0  # seconds spent in steps, this generation
    took: float = 0.0  # seconds from the beginning of the last snapshot until it counted; 0: none yet


class Part(Document):
    """One uploaded piece of a checkpoint: the head writes the manifest when it has all."""

    step: int
    generation: int
    index: int
    parts: int
    files: tuple[FileRef, ...]
    whole: str = ""  # xxh3 of the snapshot it was cut from: parts of different ones make no checkpoint


class FileRef(Document):
    """An object of a checkpoint, with what it must be."""

    name: str  # below the checkpoint's folder
    size: int
    xxh3: str  # hex digest, 128 bits


class Manifest(Kept):
    """Written last into a checkpoint's folder, create-only: the checkpoint is complete."""

    job: str
    generation: int
    step: int
    created: float
    files: tuple[FileRef, ...]


class Notice(Document):
    """The cloud's word that this node will be taken."""

    kind: Literal["preempt", "rebalance", "maintenance"]
    # Epoch seconds when the node may be gone. At most the end of year 9999, the last one that Python can print.
    deadline: float = Field(ge=0, le=253402300799)


class Trouble(Document):
    """Why this node's part of a checkpoint is not in the bucket yet; the node tries again by itself."""

    step: int  # of the checkpoint that failed last
    message: str  # one line
    since: float  # epoch seconds of the first failure after the last success, by the node's clock
    at: float  # of the newest failure
    tries: int = 1


class Report(Document):
    """Agent to head: what is."""

    kind: Literal["report"] = "report"
    node: str
    boot: str
    pool: str
    zone: str
    address: str
    ssh_port: int = 22
    devices: int = 1  # worker processes this node takes when the job says "auto"
    job: str | None = None
    # checking: whether this machine is fit is not known yet. unfit: something is wrong with it. Neither takes a job.
    # idle: no job. preparing: code, packages, forkserver. ready: could start at once. starting/running: workers live.
    # drained: all workers stopped at stop_at. failed: a worker ended early. succeeded: all workers exited 0.
    # Phases from starting on are about `generation`.
    phase: Literal[
        "checking", "unfit", "idle", "preparing", "ready", "starting", "running", "drained", "failed", "succeeded"
    ] = "idle"
    doing: str = ""  # the step that the node is at, such as "importing torch"; empty unless it prepares or starts
    doing_since: float = 0.0  # epoch seconds when that step began, by the node's clock
    unfit: tuple[str, ...] = ()  # what is wrong with the machine, a line each
    generation: int = 0  # the newest one this agent took part in, of this job
    store: str = ""  # "host:port" for a generation to come in which this node is first
    workers: tuple[Worker, ...] = ()
    failure: Failure | None = None  # the first of this node's workers to fail in `generation`, or the set-up's
    snapshot: StateRef | None = None  # the newest committed one in this node's memory
    parts: tuple[Part, ...] = ()  # uploaded, manifest not yet seen
    late: int | None = None  # stop or save step that came too late for a worker here: choose a later one
    trouble: Trouble | None = None  # with uploads of parts to the bucket; None after one has succeeded
    notice: Notice | None = None
    coming: Notice | None = None  # a notice whose end is far: the node trains on, and says it as `notice` in time
    stacks: str = ""  # bucket key of the stacks written on `dump`


class HeadRecord(Kept):
    """clusters/<name>/head.json: how agents find and trust the head. It holds no secret."""

    epoch: int
    address: str
    port: int
    fingerprint: str  # sha256 of the TLS certificate, hex
    token: str = ""  # empty; heads up to version 0.1 wrote a secret here that all agents shared


class QueueRecord(Kept):
    """clusters/<name>/queue.json: ids of the jobs not yet ended, the active one first.

    held: ids of jobs that had not ended when the cluster went down. They wait for the operator.
    up: the hash of the `UpRecord` that was in the bucket when the other jobs were queued; "": there was none.
    """

    jobs: tuple[str, ...]
    held: tuple[str, ...] = ()
    up: str = ""


class UpRecord(Kept):
    """clusters/<name>/up.json. When a head first reads a new one, it holds the jobs that are in the queue."""

    id: str
    at: float


class HostRecord(Kept):
    """clusters/<name>/hosts/<node>.json: how operators reach and trust a node over SSH.

    The head uses it too: to check the secret of the node's agent.
    """

    node: str
    address: str
    port: int
    keys: tuple[str, ...]  # "ssh-ed25519 AAAA…" lines
    machine: str = ""  # what the cloud's own way in knows it by: GCE's name, EC2's instance id
    zone: str = ""
    token_sha256: str = ""  # `hash_of` the secret that this node's agent shows to the head; "" in the head's record


class AliveRecord(Kept):
    """clusters/<name>/alive/<node>.json: a node's sign of life, written again and again while it has a job."""

    node: str
    boot: str
    at: float  # by the node's clock; only used to see that a sign is new
    every: float  # seconds between two signs
    job: str
    generation: int  # as in Report
    step: int  # the newest step that a worker of this node has completed; -1: none yet


class UnfitRecord(Kept):
    """clusters/<name>/unfit/<node>.json: why a machine of that name was last not fit to train."""

    node: str
    boot: str
    pool: str
    zone: str
    type: str  # machine type
    machine: str  # as in HostRecord
    at: float
    problems: tuple[str, ...]


def read_queue(data: bytes | None) -> QueueRecord:
    """The queue; an empty one if there is no document. Raises `ValueError`."""
    if data is None:
        return QueueRecord(jobs=())
    if data.lstrip().startswith(b"["):  # spotrun 0.1 stored only the ids
        return QueueRecord(jobs=TypeAdapter(tuple[str, ...]).validate_json(data))
    return QueueRecord.model_validate_json(data)


def problem(error: ValueError) -> str:
    """One line about what is wrong with a document."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())[:300]
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")


def hash_of(secret: str) -> str:
    """The SHA-256 of an agent's secret, in hex. It may be public: nobody can compute the secret from it."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


Part.model_rebuild()
