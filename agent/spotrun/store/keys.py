"""The keys of the bucket: what lies where. Pure."""

from __future__ import annotations

# The folders of the bucket. The stacks of `infra` use these names to give nodes their rights.
CODE, DATA, JOBS = "code/", "data/", "jobs/"  # code bundles, operators' files for jobs to read, a folder for each job
CHECKPOINTS, KEPT, LOGS, METRICS, SYSTEM = (
    "checkpoints",
    "kept",
    "logs",
    "metrics",
    "system",
)  # folders within a job's folder
RECORD = 64 << 10  # bytes: limit for a node's record, which a job's code could overwrite with a larger one
LOG_TAG = {"spotrun-kind": "log"}  # on S3, whose rules cannot tell logs by the end of their keys


def lease_key(cluster: str) -> str:
    """Which process is the head (`head.lease`)."""
    return f"clusters/{cluster}/lease.json"


def head_key(cluster: str) -> str:
    return f"clusters/{cluster}/head.json"


def cluster_key(cluster: str) -> str:
    """The cluster's description (`ClusterSpec` as JSON): `make up` writes it, the head reads it."""
    return f"clusters/{cluster}/cluster.json"


def epoch_key(cluster: str, epoch: int) -> str:
    """Never replaced. The head that creates it is head number `epoch`."""
    return f"clusters/{cluster}/epochs/{epoch:06d}"


def queue_key(cluster: str) -> str:
    """Ids of the jobs that have not ended (`wire.QueueRecord`)."""
    return f"clusters/{cluster}/queue.json"


def up_key(cluster: str) -> str:
    """Written when the cluster is brought up or taken down (`wire.UpRecord`)."""
    return f"clusters/{cluster}/up.json"


def host_key(cluster: str, node: str) -> str:
    return f"clusters/{cluster}/hosts/{node}.json"


def unfit_key(cluster: str, node: str) -> str:
    """Why the newest unfit machine of that name took no job (`wire.UnfitRecord`)."""
    return f"clusters/{cluster}/unfit/{node}.json"


def alive_key(cluster: str, node: str) -> str:
    """A node's sign of life (`wire.AliveRecord`), while it has a job."""
    return f"clusters/{cluster}/alive/{node}.json"


def idle_key(cluster: str) -> str:
    """What machines cost while no job had their devices (`head.costs.job_totals.Idle`)."""
    return f"clusters/{cluster}/idle.json"


def history_key(cluster: str) -> str:
    """What the head has learned about each pool (`head.capacity.history.Histories`)."""
    return f"clusters/{cluster}/history.json"


def replaced_key(cluster: str) -> str:
    """Machines whose replacement was requested lately (`head.fleet.replacements`)."""
    return f"clusters/{cluster}/replaced.json"


def acceptance_key(cluster: str, name: str) -> str:
    """Files of `make acceptance`: state.json, report.md, report.json."""
    return f"clusters/{cluster}/acceptance/{name}"


def code_key(sha256: str) -> str:
    return f"{CODE}{sha256}.tar.zst"


def job_key(job: str, name: str = "job.yaml") -> str:
    """`name`: job.yaml, state.json, events.jsonl, timeline.json."""
    return f"{JOBS}{job}/{name}"


def checkpoints_key(job: str) -> str:
    return f"{JOBS}{job}/{CHECKPOINTS}"


def checkpoint_key(job: str, step: int, name: str = "manifest.json") -> str:
    return f"{JOBS}{job}/{CHECKPOINTS}/{step:010d}/{name}"


def kept_key(job: str, generation: int, name: str = "") -> str:
    """A file of a folder that a job leaves for others; without a name: the list of all of them (`KeptFiles`)."""
    return f"{JOBS}{job}/{KEPT}/{generation:04d}" + (f"/{name}" if name else ".json")


def log_key(job: str, generation: int, node: str, rank: int | str) -> str:
    return f"{JOBS}{job}/{LOGS}/{generation:04d}/{node}/{rank}.log"


def event_file_key(job: str, node: str, name: str) -> str:
    """An event file of TensorBoard. name: of the file, below the job's working folder."""
    return f"{event_files_folder(job)}/{node}/{name}"


def event_files_folder(job: str) -> str:
    return f"{JOBS}{job}/{LOGS}/tensorboard"


def metrics_key(job: str, generation: int, block: int) -> str:
    """A block of what rank 0 of a generation has logged (`state.points`)."""
    return f"{metrics_folder(job)}/{generation:04d}/{block:06d}.jsonl.zst"


def substitute_key(job: str, generation: int, rank: str, block: int) -> str:
    """A block of what another rank has logged last (`state.points`). rank: as in `points.rank_folder`."""
    return f"{metrics_folder(job)}/{generation:04d}/{rank}/{block:06d}.jsonl.zst"


def extras_key(job: str, generation: int, block: int) -> str:
    """A block of the texts, images and histograms that rank 0 of a generation has logged."""
    return f"{metrics_folder(job)}/{generation:04d}/extras/{block:06d}.jsonl.zst"


def system_key(job: str, node: str, at: int) -> str:
    """A block of what a node has measured of its machine. at: epoch milliseconds of its first reading."""
    return f"{system_folder(job)}/{node}/{at:013d}.jsonl.zst"


def profile_key(job: str, node: str, generation: int, rank: int, step: int) -> str:
    """A trace of some steps (`make profile`). step: the first one."""
    return f"{system_folder(job)}/{node}/profile-{generation:04d}-{rank}-{step}.json.gz"


def system_folder(job: str) -> str:
    return f"{JOBS}{job}/{SYSTEM}"


def metrics_folder(job: str) -> str:
    return f"{JOBS}{job}/{METRICS}"


def provenance_key(job: str) -> str:
    """Where a job came from (`history.provenance.Provenance`)."""
    return job_key(job, "provenance.json")


def remarks_key(job: str) -> str:
    """The tags and notes of people (`history.provenance.Remarks`)."""
    return job_key(job, "remarks.json")


def about_key(job: str, node: str, boot: str) -> str:
    """What a node had when it trained (`history.provenance.NodeRecord`). boot: as in `wire.Report`."""
    return f"{system_folder(job)}/{node}/about-{boot}.json"


def is_log(key: str) -> bool:
    """Whether an object is a log of a job, which the bucket removes after some time."""
    return key.startswith(JOBS) and key.split("/")[2:3] == [LOGS] and key.endswith(".log")


def times_key(log: str) -> str:
    """Beside a log: when it had which size (`node.log_uploader`)."""
    return log.removesuffix(".log") + ".times.log"
