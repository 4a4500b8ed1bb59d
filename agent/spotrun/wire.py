"""What head and agents say to each other: two whole documents, re-sent whenever they change.

The head sends each agent an `Order`: everything that the agent should do. The agent sends a `Report`: everything that
it does. Both are complete, so nothing has to be replayed after a lost message, a new connection or a new head: the
newest document counts (as in a Kubernetes spec and status). Each is one JSON text frame over a WebSocket. No I/O here.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

MAX_MESSAGE = 1 << 20  # bytes; a larger frame is refused and the connection closed
FORMAT = 1  # of the documents in the bucket: see `Kept`
NODE_HEADER = "Spotrun-Node"  # header of an agent's request to connect: the node's name. `Authorization` has its secret
REFUSAL_HEADER = "Spotrun-Refusal"  # header of the answer to a refused request: the reason


class Document(BaseModel):
    """A frozen message part. A logged number may be NaN, for which JSON has no number.

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
    """A document in the bucket."""

    # It goes up only when readers of the older format would misread the document, not for each new key.
    format: Annotated[int, AfterValidator(_known)] = FORMAT  # a higher one cannot be read


class StateRef(Document):
    """A saved training state, ordered by (generation, step): a later generation is newer, even with a smaller step."""

    generation: int = Field(ge=0)
    step: int = Field(ge=0)


class Member(Document):
    """One node of a generation. Its place in `Generation.members` is its node rank."""

    node: str
    boot: str  # id of the agent's process: a node that comes back is another member
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
    bundle: Bundle | None = None  # None: no job, end everything
    generation: Generation | None = None  # None: no workers, but be ready. Workers of other generations are ended
    stop_at: int | None = None  # every worker of `generation` snapshots after this step and exits (drain)
    save: SaveOrder | None = None  # checkpoint at this step of `generation`
    upload: StateRef | None = None  # with `generation` None: upload this local snapshot; `save` has the parts
    dump: bool = False  # write the stacks of all workers to the log, then end them (they hang)


class Failure(Document):
    """Why a worker ended early."""

    kind: Literal["user", "peer", "signal", "hang", "setup"]  # peer: a collective failed, so another worker died
    rank: int
    at: float  # epoch seconds
    message: str  # one line
    traceback: str = ""


class Worker(Document):
    """One training process, as its control block shows it."""

    rank: int
    pid: int
    step: int  # steps completed since the job began; -1 before the state is restored
    base: int = -1  # the step at which it began in this generation
    stepped_at: float  # epoch seconds of the last completed step, 0 before the first
    samples: float = 0.0  # seen by this process in this generation
    total_steps: int = 0  # the script's own estimate of the job's length; 0: unknown
    metrics: dict[str, float] = Field(default={})
    # Epoch seconds of: forked, init called, group formed, state restored, first step done. 0: not yet.
    phases: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    stall: float = 0.0  # seconds spent copying snapshots, this generation
    stepping: float = 0.0  # seconds spent in steps, this generation
    took: float = 0.0  # seconds from the beginning of the last snapshot to its commit; 0: none yet


class FileRef(Document):
    """An object of a checkpoint, with its size and checksum."""

    name: str  # below the checkpoint's folder
    size: int
    xxh3: str  # hex digest, 128 bits


class Part(Document):
    """One uploaded part of a checkpoint. The head writes the manifest when all parts are uploaded."""

    step: int
    generation: int
    index: int
    parts: int
    files: tuple[FileRef, ...]
    whole: str = ""  # xxh3 of the snapshot that it was cut from: all parts must have the same one


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
    """Why this node's part of a checkpoint is not in the bucket yet. The node retries."""

    step: int  # of the checkpoint that failed last
    message: str  # one line
    since: float  # epoch seconds of the first failure after the last success, by the node's clock
    at: float  # of the newest failure
    tries: int = 1


class Report(Document):
    """Agent to head: what the agent does."""

    kind: Literal["report"] = "report"
    node: str
    boot: str
    pool: str
    zone: str
    address: str
    ssh_port: int = 22
    devices: int = 1  # worker processes this node takes when the job says "auto"
    job: str | None = None
    # checking: the machine is being checked. unfit: a check has failed. Neither takes a job.
    # idle: no job. preparing: code, packages, fork server. ready: can start at once. starting, running: workers live.
    # drained: all workers stopped at stop_at. failed: a worker ended early. succeeded: all workers exited 0.
    # Phases from starting on are about `generation`.
    phase: Literal[
        "checking", "unfit", "idle", "preparing", "ready", "starting", "running", "drained", "failed", "succeeded"
    ] = "idle"
    doing: str = ""  # the step that the node is at, such as "importing torch"; empty unless it prepares or starts
    # Epoch seconds when that step began, by the node's clock.
    doing_since: float = Field(default=0.0, ge=0, le=253402300799)
    unfit: tuple[str, ...] = ()  # what is wrong with the machine, one line each
    generation: int = 0  # the newest generation of this job that this agent took part in
    store: str = ""  # "host:port" for the next generation, if this node is its first member
    workers: tuple[Worker, ...] = ()
    failure: Failure | None = None  # the first of this node's workers to fail in `generation`, or the set-up's
    snapshot: StateRef | None = None  # the newest committed snapshot in this node's memory
    parts: tuple[Part, ...] = ()  # uploaded, but the manifest has not been seen
    late: int | None = None  # stop or save step that arrived too late for a worker here: choose a later one
    trouble: Trouble | None = None  # with uploads of parts to the bucket; None after one has succeeded
    notice: Notice | None = None
    coming: Notice | None = None  # a notice with a distant deadline: the node trains on, and reports `notice` later
    stacks: str = ""  # bucket key of the stacks written on `dump`


class HeadRecord(Kept):
    """clusters/<name>/head.json: how agents find and trust the head. It holds no secret."""

    epoch: int
    address: str
    port: int
    fingerprint: str  # sha256 of the TLS certificate, hex
    token: str = ""  # empty; heads up to version 0.1 wrote a secret here that all agents shared


class QueueRecord(Kept):
    """clusters/<name>/queue.json: the jobs that have not ended."""

    jobs: tuple[str, ...]  # ids, the active job first
    held: tuple[str, ...] = ()  # ids of jobs that had not ended when the cluster went down: they wait for the operator
    up: str = ""  # hash of the `UpRecord` that was in the bucket when `jobs` were queued; "": there was none


class UpRecord(Kept):
    """clusters/<name>/up.json. A head that reads a new one holds the jobs in the queue."""

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
    machine: str = ""  # its id for the cloud's own access: GCE's name, EC2's instance id
    zone: str = ""
    token_sha256: str = ""  # `hash_of` the secret of this node's agent; "" in the head's record


class AliveRecord(Kept):
    """clusters/<name>/alive/<node>.json: a node's sign of life, written repeatedly while the node has a job."""

    node: str
    boot: str
    at: float  # by the node's clock; only used to see that a sign is new
    every: float  # seconds between two signs
    job: str
    generation: int  # as in Report
    step: int  # the newest step that a worker of this node has completed; -1: none


class UnfitRecord(Kept):
    """clusters/<name>/unfit/<node>.json: why the newest unfit machine of that name was not fit to train."""

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
