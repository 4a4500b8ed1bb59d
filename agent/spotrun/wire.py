"""What head and agents say to each other: two whole documents, re-sent whenever they change.

The head sends each agent an `Order`: everything that the agent should do. The agent sends a `Report`: everything that
it does. Both are complete, so nothing has to be replayed after a lost message, a new connection or a new head: the
newest document counts (as in a Kubernetes spec and status). Each is one JSON text frame over a WebSocket. No I/O here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from operator import attrgetter
from typing import Literal

from pydantic import Field, TypeAdapter, model_validator

from spotrun.document import FORMAT as FORMAT
from spotrun.document import Document as Document
from spotrun.document import Kept as Kept
from spotrun.document import problem as problem
from spotrun.folders import Input, Keeping
from spotrun.folders import Place as Place
from spotrun.readings import NONE, Readings

MAX_MESSAGE = 1 << 20  # bytes; a larger frame is refused and the connection closed
VERSION = 2  # of `Order` and `Report`; since 2, a node may have several jobs
NODE_HEADER = "Spotrun-Node"  # header of an agent's request to connect: the node's name. `Authorization` has its secret
REFUSAL_HEADER = "Spotrun-Refusal"  # header of the answer to a refused request: the reason


class StateRef(Document):
    """A saved training state, ordered by (generation, step): a later generation is newer, even with a smaller step."""

    generation: int = Field(ge=0, lt=1 << 63)
    step: int = Field(ge=0, lt=1 << 63)


class Member(Document):
    """One node of a generation. Its place in `Generation.members` is its node rank."""

    node: str
    boot: str  # id of the agent's process: a node that comes back is another member
    address: str
    devices: tuple[int, ...] = ()  # the node's devices that the job has; (): all of them
    share: float = 1.0  # which part of the node's devices these are


class Generation(Document):
    """A fixed set of nodes training together. A generation's number is never used twice in a job."""

    number: int = Field(ge=1)
    members: tuple[Member, ...]
    store: str  # "host:port" of an unused TCPStore, which the launcher of the first member has
    checkpoints: tuple[StateRef, ...] = ()  # complete ones in the bucket, newest first
    regroup: bool = False  # whether the members' workers, which wait for it, join it without a restart


class Bundle(Document):
    """The job as an agent needs it: what to run and how."""

    id: str
    code: str  # sha256 of the bundle at code/<sha256>.tar.zst
    job: dict[str, object]  # the job file, validated, as JSON (JobSpec.kept reads it)
    inputs: tuple[Input, ...] = ()  # folders of other jobs that its working folder has
    state_bytes: int = Field(default=0, ge=0)  # of its newest snapshot; 0: not known


class SaveOrder(Document):
    """A checkpoint to take at a step: this agent uploads part `index` of `parts`."""

    step: int = Field(ge=0)
    index: int = Field(ge=0)
    parts: int = Field(ge=1)


class JobOrder(Document):
    """What the agent should do for one job."""

    bundle: Bundle
    devices: tuple[int, ...] = ()  # the node's devices that the job may use, by index; (): all of them
    generation: Generation | None = None  # None: no workers, but be ready. Workers of others are ended, see `next`
    # With `generation` None: workers that wait for one stay. If there are none, others warm up for one, and wait.
    stand_by: bool = False
    stop_at: int | None = None  # every worker of `generation` stops after this step (drain)
    # The generation after a drain. Workers that wait, or have all stopped at `stop_at`, join it without another order.
    next: Generation | None = None
    save: SaveOrder | None = None  # checkpoint at this step of `generation`
    upload: StateRef | None = None  # with `generation` None: upload this local snapshot; `save` has the parts
    keep: int = 0  # upload the folders of `JobSpec.keep` as this generation has left them; 0: do not
    release: bool = False  # each worker of `generation` that can regroup leaves it now: a member is gone or silent
    dump: bool = False  # write the stacks of all workers to the log, then end them (they hang)


class Order(Document):
    """Head to agent: what the agent should be doing."""

    kind: Literal["order"] = "order"
    version: int = VERSION  # of the documents that the head writes and reads
    epoch: int  # of the head that speaks; an agent ignores an epoch lower than the highest that it has seen
    number: int = 0  # within its connection; 0: the head does not number its orders
    jobs: tuple[JobOrder, ...] = ()  # at most one for each job; the agent ends everything of other jobs
    # Left as they are unless `jobs` has them: jobs that the head cannot read or plan; all, until it sees all nodes.
    parked: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _first_version(cls, values: object) -> object:
        """Version 1 had the keys of one `JobOrder` beside `epoch`, and no job if `bundle` was null."""
        if not isinstance(values, dict) or "jobs" in values or "bundle" not in values:
            return values
        found = [{key: values[key] for key in JobOrder.model_fields if key in values}] if values["bundle"] else []
        return {"version": 1, **values, "jobs": found}

    def job(self, job: str) -> JobOrder | None:
        """What the order says about a job."""
        return next((each for each in self.jobs if each.bundle.id == job), None)

    def text(self, version: int) -> str:
        """The JSON for an agent that reads this version. An agent of version 1 has one job, and ignores `jobs`."""
        if version > 1:
            return self.model_dump_json()
        first = self.jobs[0].model_dump(mode="json") if self.jobs else {"bundle": None}
        return json.dumps(self.model_dump(mode="json") | first)


class Failure(Document):
    """Why a worker ended early."""

    kind: Literal["user", "peer", "signal", "hang", "setup"]  # peer: a collective failed, so another worker died
    rank: int
    at: float  # epoch seconds
    message: str  # one line
    traceback: str = ""
    repeats: bool = False  # of a set-up or a script: other nodes and other tries would fail too. False: not known


class Worker(Document):
    """One training process, as its control block shows it."""

    rank: int
    pid: int
    step: int = Field(lt=1 << 63)  # steps completed since the job began; -1 before the state is restored
    base: int = Field(default=-1, lt=1 << 63)  # the step at which it began in this generation
    stepped_at: float  # epoch seconds of the last completed step, 0 before the first
    samples: float = 0.0  # seen by this process in this generation
    total_steps: int = Field(default=0, lt=1 << 63)  # the script's own estimate of the job's length; 0: unknown
    metrics: dict[str, float] = Field(default={})
    # Epoch seconds of: forked, init called, group formed, state restored, first step done. 0: not yet.
    phases: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    stall: float = 0.0  # seconds spent copying snapshots, this generation
    stepping: float = 0.0  # seconds spent in steps, this generation
    took: float = 0.0  # seconds from the beginning of the last snapshot to its commit; 0: none yet
    alone: float = 0.0  # as in `state.control`: seconds in steps before their first gradients were due


class FileRef(Document):
    """An object of a checkpoint, with its size and checksum."""

    name: str  # below the checkpoint's folder
    size: int = Field(ge=0, lt=1 << 63)
    xxh3: str  # hex digest, 128 bits


class Part(Document):
    """One uploaded part of a checkpoint. The head writes the manifest when all parts are uploaded."""

    step: int = Field(ge=0, lt=1 << 63)
    generation: int = Field(ge=0, lt=1 << 63)
    index: int = Field(ge=0, lt=1 << 63)
    parts: int = Field(ge=1, lt=1 << 63)
    files: tuple[FileRef, ...]
    whole: str = ""  # xxh3 of the whole snapshot: it must be the same for all parts
    sketch: dict[str, str] = Field(default={})  # as from `state.shards.sketch`, if the checkpoint has several parts
    took: float = Field(default=0.0, ge=0)  # seconds of its copy and upload; 0: the agent cannot say it


class Manifest(Kept):
    """Written last into a checkpoint's folder, create-only: the checkpoint is complete."""

    job: str
    generation: int = Field(ge=0, lt=1 << 63)
    step: int = Field(ge=0, lt=1 << 63)
    created: float
    files: tuple[FileRef, ...]


class Notice(Document):
    """The cloud's word that this node will be taken."""

    kind: Literal["preempt", "rebalance", "maintenance"]
    deadline: float = Field(ge=0, le=253402300799)  # epoch seconds when the node may be gone, until the year 9999


class Trouble(Document):
    """Why this node's part of a checkpoint is not in the bucket yet. The node retries."""

    step: int  # of the checkpoint that failed last
    message: str  # one line
    since: float  # epoch seconds of the first failure after the last success, by the node's clock
    at: float  # of the newest failure
    tries: int = 1


class JobReport(Document):
    """What the agent does for one job."""

    job: str = ""  # id
    # idle: no order about the job, but its snapshot is in memory. preparing: code, packages, fork server. ready: can
    # start at once. starting, running: workers live. drained: all workers stopped at stop_at. failed: a worker ended
    # early. succeeded: all workers exited 0. Phases from starting on are about `generation`.
    phase: Literal["idle", "preparing", "ready", "starting", "running", "drained", "failed", "succeeded"] = "idle"
    devices: tuple[int, ...] = ()  # those that its living workers use; (): no worker lives
    doing: str = ""  # what the job is at while it prepares or starts. In phase ready: what it waits for
    doing_since: float = Field(default=0.0, ge=0, le=253402300799)  # since when, epoch seconds by the node's clock
    generation: int = Field(default=0, lt=1 << 63)  # the newest generation of this job that this agent took part in
    store: str = ""  # "host:port" for the next generation, if this node is its first member
    workers: tuple[Worker, ...] = ()
    before: tuple[Worker, ...] = ()  # `workers` at the end of the last generation, until `generation` is ordered
    # Whether its workers could join another generation without a restart, or wait for it. no: there are none, or they
    # could not. failed: they ended while they warmed up. unknown: from an agent that cannot say it.
    regroup: Literal["unknown", "no", "able", "waiting", "failed"] = "unknown"
    needs_release: bool = False  # its workers may not notice that a peer is gone: release them
    failure: Failure | None = None  # the first of this node's workers to fail in `generation`, or the set-up's
    snapshot: StateRef | None = None  # the newest committed snapshot in this node's memory
    parts: tuple[Part, ...] = ()  # uploaded, but the manifest has not been seen
    late: int | None = None  # stop or save step that arrived too late for a worker here: choose a later one
    stops: int | None = None  # stop step that arrived in time for all workers here; None also from older agents
    trouble: Trouble | None = None  # with uploads of parts to the bucket; None after one has succeeded
    keeping: Keeping | None = None  # the folders that the order says to keep
    stacks: str = ""  # bucket key of the stacks written on `dump`
    place: Place | None = None  # of a job whose node may be kept for a person; None: no worker has started here

    @property
    def essence(self) -> tuple[object, ...]:
        """The values of the report without progress, which changes all the time."""
        return _work_essence(self)


class Report(Document):
    """Agent to head: what the agent does."""

    kind: Literal["report"] = "report"
    version: int = VERSION  # of the documents that the agent writes and reads
    code: str = ""  # digest of the agent's code: workers with different code may not understand each other
    node: str
    boot: str
    pool: str
    zone: str
    address: str
    ssh_port: int = 22
    devices: int = Field(default=1, ge=0, le=1024)  # GPUs, or 1 on a machine without GPUs
    # checking: the machine is being checked. unfit: a check has failed. Neither takes a job. ready: takes jobs.
    phase: Literal["checking", "unfit", "ready"] = "ready"
    since: float = Field(default=0.0, ge=0, le=253402300799)  # when the checks began, epoch seconds; 0: not checking
    unfit: tuple[str, ...] = ()  # what is wrong with the machine, one line each
    notice: Notice | None = None
    coming: Notice | None = None  # a notice with a distant deadline: the node trains on, and reports `notice` later
    jobs: tuple[JobReport, ...] = ()
    readings: Readings = NONE  # what the node measured last while it had a job
    order: int = Field(default=0, ge=0)  # number of the newest order that came over this connection; 0: none has

    @model_validator(mode="before")
    @classmethod
    def _first_version(cls, values: object) -> object:
        """Version 1 had the keys of one `JobReport` beside those of the node, and one phase for both."""
        if not isinstance(values, dict) or not ("job" in values or "workers" in values):
            return values
        phase = values.get("phase", "idle")
        own = phase in ("checking", "unfit")
        if "jobs" in values:  # from `text`, with the keys of both versions
            return {**values, "phase": phase if own else "ready"}
        found = {key: values[key] for key in JobReport.model_fields if key in values and key != "devices"}
        found |= {"phase": "idle"} if own else {}
        workers, count = found.get("phase") in ("starting", "running"), values.get("devices", 1)
        found["devices"] = range(count) if workers and isinstance(count, int) and count <= 1024 else ()
        jobs = [found] if values.get("job") else []
        since = values.get("doing_since", 0.0) if own else 0.0
        return {"version": 1, **values, "phase": phase if own else "ready", "since": since, "jobs": jobs}

    @property
    def essence(self) -> tuple[object, ...]:
        """The values of the report without progress, which changes all the time."""
        return (_node_essence(self), *map(_work_essence, self.jobs))

    def of(self, job: str) -> JobReport | None:
        """What the report says about a job."""
        return next((each for each in self.jobs if each.job == job), None)

    def text(self, version: int) -> str:
        """The JSON for a head that reads this version; 0: the version is not known yet."""
        if version > 1:
            return self.model_dump_json()
        # A head of version 1 knows one job. It ignores `jobs`.
        work = self.jobs[0] if self.jobs else None
        first = work.model_dump(mode="json", exclude={"devices"}) if work else {"job": None, "phase": "idle"}
        own = {} if self.phase == "ready" else {"phase": self.phase}
        return json.dumps(self.model_dump(mode="json") | first | own)


_work_essence: Callable[[JobReport], tuple[object, ...]] = attrgetter(
    *(name for name in JobReport.model_fields if name not in ("workers", "before", "snapshot"))
)
_node_essence: Callable[[Report], tuple[object, ...]] = attrgetter(
    *(name for name in Report.model_fields if name not in ("jobs", "order", "readings"))
)


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
    """clusters/<name>/hosts/<node>.json: how to reach and trust a node by SSH, and the hash of its agent's secret."""

    node: str
    address: str
    port: int
    keys: tuple[str, ...]  # "ssh-ed25519 AAAA…" lines
    machine: str = ""  # its id for the cloud's own access: GCE's name, EC2's instance id
    zone: str = ""
    token_sha256: str = ""  # `hash_of` the secret of this node's agent; "" in the head's record


class AliveJob(Document):
    """One job in a node's sign of life."""

    job: str  # id
    generation: int  # as in JobReport
    step: int  # the newest step that a worker of this node has completed; -1: none


class AliveRecord(Kept):
    """clusters/<name>/alive/<node>.json: a node's sign of life, written repeatedly while the node has a job."""

    node: str
    boot: str
    at: float  # by the node's clock; only used to see that a sign is new
    every: float  # seconds between two signs
    job: str  # this, `generation` and `step` are of the first of `jobs`: a head of an older version knows one job
    generation: int
    step: int
    jobs: tuple[AliveJob, ...] = ()  # all of them; an agent of an older version writes none

    @property
    def every_job(self) -> tuple[AliveJob, ...]:
        """The node's jobs, of a sign of any version."""
        return self.jobs or (AliveJob(job=self.job, generation=self.generation, step=self.step),)

    def of(self, job: str) -> AliveJob | None:
        """What the sign says about a job."""
        return next((each for each in self.every_job if each.job == job), None)


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


def hash_of(secret: str) -> str:
    """The SHA-256 of an agent's secret, in hex. It may be public: nobody can compute the secret from it."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
