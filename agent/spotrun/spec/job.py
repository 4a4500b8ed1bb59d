"""The job file: one training run. `load_job` reads one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    model_serializer,
    model_validator,
)

from spotrun.errors import SpecError
from spotrun.spec.cluster import ClusterSpec, PoolSpec, devices_of
from spotrun.spec.fields import (
    BOOL,
    DURATION,
    FOLDER,
    INTERVAL,
    LABEL,
    PRIORITY,
    Bool,
    Duration,
    Int,
    Interval,
    Spec,
    Text,
    folder,
    job_name,
    label,
)
from spotrun.spec.file import Conflict, File, nearest, refuse

PROCS = 1024  # the most workers of a job on one node

# The launcher sets these for each worker. A job that changed them would break its own process group.
_RESERVED_ENV = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


def _count_or_auto(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("")
    return value


def _procs(value: object) -> object:
    if _count_or_auto(value) != "auto" and isinstance(value, int) and value > PROCS:
        raise ValueError("")
    return value


def _requirement(value: str) -> str:
    if not value.strip() or value.lstrip().startswith("-") or "\n" in value:
        raise ValueError("is not a package requirement")
    return value


def _env_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("is not a valid name of an environment variable")
    if value in _RESERVED_ENV or value.startswith(("SPOTRUN_", "TORCHELASTIC_")):
        raise ValueError("is set by spotrun itself")
    return value


def _script(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("is outside the job file's folder, which is all that reaches the nodes")
    if path.suffix != ".py":
        raise ValueError("is not a Python file")
    return str(path)


def _input_name(value: str) -> str:
    if "/" in value:
        raise ValueError("is not the name of a folder")
    return folder(value)


def _source(value: str) -> str:
    job, slash, kept = value.partition("/")
    if not slash:
        raise ValueError("is not a job and a folder that the job keeps")
    return f"{job_name(job)}/{folder(kept)}"


Auto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
_Procs = Annotated[int | Literal["auto"], BeforeValidator(_procs)]

_PoolName = Annotated[str, Strict(), AfterValidator(label(20))]
_Label = Annotated[str, Strict(), AfterValidator(label(40))]
_JobName = Annotated[str, Strict(), AfterValidator(job_name)]
_Folder = Annotated[str, Strict(), AfterValidator(folder)]
_InputName = Annotated[str, AfterValidator(_input_name)]
_Source = Annotated[str, Strict(), AfterValidator(_source)]


class NodesSpec(Spec):
    """How many nodes a job trains on. `max` is `min` unless given; `spares` stand by, started but without workers."""

    min: Int = Field(default=1, ge=1, description="a whole number, at least 1")
    max: Int = Field(default=1, ge=1, description="a whole number, at least nodes.min")
    spares: Int = Field(default=0, ge=0, description="a whole number, 0 or more")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: object) -> object:
        """`nodes: 3` is a fixed number."""
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError("")
            return {"min": value, "max": value}
        least = value.get("min") if isinstance(value, dict) else None
        if isinstance(value, dict) and "max" not in value and isinstance(least, int) and least >= 1:
            return {**value, "max": least}
        return value


class JobSpec(Spec):
    """One training run. `script` is relative to the job file's folder, which is what reaches the nodes.

    MEANT: keys that other programs have, and what they are called here.
    """

    MEANT: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("gpu", "gpus", "accelerators"), "devices"),
        **dict.fromkeys(("command", "cmd", "entrypoint", "run"), "script"),
        **dict.fromkeys(("pip", "packages", "dependencies"), "requirements"),
    }

    name: Annotated[str, Strict(), AfterValidator(label(40))] = Field(default="job", description=LABEL.format(40))
    script: Annotated[str, Strict(), AfterValidator(_script)] = Field(
        description="a Python file in the job file's folder, such as train.py"
    )
    args: tuple[Text, ...] = Field(default=(), description="a list of texts, such as [--epochs=3]")
    nodes: NodesSpec = Field(default=NodesSpec(), description="a whole number, or keys min, max and spares")
    devices: Int | None = Field(default=None, ge=1, description="a whole number, at least 1")
    """Devices of each node. Other jobs may use the rest of a node. Default: all, and no other job is on the node."""
    priority: Int = Field(
        default=0, ge=-PRIORITY, le=PRIORITY, description=f"a whole number from {-PRIORITY} to {PRIORITY}"
    )
    """Jobs of a higher priority get their devices first."""
    pools: tuple[_PoolName, ...] = Field(default=(), description="a list of names of the cluster's pools")
    """The pools that the job may use. Default: all."""
    group: Annotated[str, Strict(), AfterValidator(label(40))] | None = Field(
        default=None, description=LABEL.format(40)
    )
    """Jobs with the same group are listed and stopped together."""
    labels: dict[_Label, _Label] = Field(default={}, description="a label: its value, " + LABEL.format(40))
    """`make cost` adds up what the jobs with the same label and value have cost."""
    after: tuple[_JobName, ...] = Field(default=(), description="a list of jobs' ids or names")
    """The job starts after these jobs. A name means the newest job of that name when this one is submitted."""
    on: Literal["success", "end"] = "success"
    """How the jobs of `after` must end: success, or in any way."""
    inputs: dict[_InputName, _Source] = Field(
        default={}, description="a folder's name: <a job's id or name>/<a folder that the job keeps>"
    )
    """Folders that the job finds in its working folder. The job starts after the success of the jobs they are from."""
    keep: tuple[_Folder, ...] = Field(
        default=(), description=f"a list of folders in the job's working folder: {FOLDER}"
    )
    """Folders that the job leaves in the bucket when it succeeds."""
    keep_on_failure: Interval | None = Field(default=None, description=INTERVAL)
    """Seconds for which the node whose script failed stays, for SSH, within the budget. Default: it does not stay."""
    procs_per_node: _Procs = Field(
        default="auto", description=f"a whole number from 1 to {PROCS}, or auto: one for each device"
    )
    snapshot_interval: Auto = Field(default="auto", description="steps, a whole number, at least 1, or auto")
    exact: Bool = Field(default=False, description=BOOL)
    """true: after a death, usually only the step under way is lost, also on GPUs and in short steps."""
    checkpoint_interval: Interval = Field(default=300.0, description=INTERVAL)
    keep_checkpoints: Int = Field(default=3, ge=1, description="a whole number, at least 1")
    deadline: Interval | None = Field(default=None, description=INTERVAL)
    budget: Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="dollars, a number more than zero"
    )
    policy: Literal["elastic", "cheapest"] = "elastic"
    """elastic: the fastest zone, with up to nodes.max machines. cheapest: nodes.min machines, at the least cost."""
    zones: Literal["one", "any"] = "one"
    """Whether a generation may have machines of several zones. Such traffic is slower, and clouds charge for it."""
    restart_time: Interval = Field(default=300.0, description=INTERVAL)
    """The most seconds from asking for machines to the first step on them. A deadline takes this time into account."""
    work: Interval | None = Field(default=None, description=INTERVAL)
    """Seconds that the whole job takes on one machine, as far as known. The head measures it once the job trains."""
    max_restarts: Int = Field(default=3, ge=0, description="a whole number, 0 or more")
    hang_timeout: Interval = Field(default=300.0, description=INTERVAL)
    start_timeout: Interval = Field(default=600.0, description=INTERVAL)
    grow_interval: Duration = Field(default=30.0, description=DURATION)
    hold_idle: Interval = Field(default=600.0, description=INTERVAL)
    heartbeat_timeout: Interval = Field(default=3.0, description=INTERVAL)
    env: dict[Annotated[str, AfterValidator(_env_name)], Text] = Field(
        default={}, description="a variable: its text; quote true, no, on"
    )
    requirements: tuple[Annotated[str, Strict(), AfterValidator(_requirement)], ...] = Field(
        default=(), description="a list of package requirements, such as scikit-learn>=1.5"
    )

    @property
    def sign_interval(self) -> float:
        """Seconds between a node's signs of life in the bucket."""
        return min(20.0, max(1.0, self.hang_timeout / 5))

    @property
    def silence_timeout(self) -> float:
        """Seconds for which every member of a generation must be silent before its machines count as lost."""
        return max(self.hang_timeout, 10 * self.heartbeat_timeout)

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Of each input: the job (its id or name), and the folder that the job keeps."""
        return {name: (job, kept) for name, source in self.inputs.items() for job, _, kept in [source.partition("/")]}

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: object) -> object:
        """Until version 0.1, `keep` was the number of checkpoints."""
        if not isinstance(value, dict) or "keep_checkpoints" in value:
            return value
        number = value.get("keep")
        if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
            return {("keep_checkpoints" if key == "keep" else key): each for key, each in value.items()}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(_job_conflicts(self))
        return self

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out an empty `keep`: to version 0.1, `keep` is a number."""
        values: dict[str, Any] = handler(self)
        if not self.keep:
            values.pop("keep", None)
        return values | (self.model_extra or {})


def load_job(path: Path | str) -> JobSpec:
    """The job file at `path`; its script must exist. Raises `SpecError` that lists every problem."""
    file, folder = File(Path(path), "job file"), Path(path).absolute().parent
    if "name" not in file.data:
        word = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).lstrip("-0123456789")
        file.data["name"] = word[:40].rstrip("-") or "job"
    job = file.parse(JobSpec)
    script = folder / job.script
    if not script.is_file():
        hint = nearest(job.script, sorted(each.name for each in folder.glob("*.py")))
        raise SpecError(file.say(("script",), f"there is no such file in {folder}{hint}"))
    if not script.resolve().is_relative_to(folder.resolve()):
        message = "is a link to outside the job file's folder, which is all that reaches the nodes"
        raise SpecError(file.say(("script",), message))
    return job


def check_fit(job: JobSpec, cluster: ClusterSpec) -> None:
    """Raise `SpecError` if the job can never run on the cluster."""
    names = [pool.name for pool in cluster.pools]
    for name in job.pools:
        if name not in names:
            hint = f"allowed: {', '.join(names)}{nearest(name, names)}"
            raise SpecError(f"pools: {name!r}: cluster {cluster.name} has no such pool; {hint}")
    allowed = [pool for pool in cluster.pools if not job.pools or pool.name in job.pools]
    counts = [devices_of(pool, cluster) for pool in allowed]
    where = f" in pools {', '.join(job.pools)}" if job.pools else ""
    wanted = job.devices or 1
    fit = [pool for pool, count in zip(allowed, counts, strict=True) if count is None or count >= wanted]
    if not fit:
        largest = max(count for count in counts if count is not None)
        raise SpecError(f"devices: {wanted}: cluster {cluster.name} has at most {largest} a machine{where}; lower it")
    most, such = sum(pool.max for pool in fit), f" with {wanted} devices" if len(fit) < len(allowed) else ""
    if job.nodes.min > most:
        raise SpecError(
            f"nodes: {job.nodes.min}: cluster {cluster.name} has at most {most} nodes{such}{where}; lower it, or raise"
            " max of the pools"
        )
    if not may_cross_zones(job, cluster):
        _check_zones(job, cluster, fit, f"{such}{where}")


def may_cross_zones(job: JobSpec, cluster: ClusterSpec) -> bool:
    """Whether machines of several zones can train together.

    EFA's traffic stays within a zone (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits). NCCL
    uses one network for all ranks, so a job that crosses zones must choose TCP. NCCL ignores the case of the name.
    """
    return not cluster.network.efa or job.env.get("NCCL_NET", "").lower() == "socket"


def largest_zone(pools: Iterable[PoolSpec]) -> int:
    """The most machines that these pools have in one zone."""
    zones: Counter[str] = Counter()
    for pool in pools:
        zones[pool.zone] += pool.max
    return max(zones.values(), default=0)


def _check_zones(job: JobSpec, cluster: ClusterSpec, pools: list[PoolSpec], which: str) -> None:
    """Raise `SpecError` if the job asks for one generation in several zones, which these pools cannot give it."""
    why, tcp = f"cluster {cluster.name} uses EFA, which does not cross zones", "env: {NCCL_NET: Socket} for TCP"
    if job.zones == "any" and len({pool.zone for pool in pools}) > 1:
        raise SpecError(f"zones: any: {why}; set zones: one, or {tcp}")
    most = largest_zone(pools)
    if job.nodes.min > most:
        raise SpecError(
            f"nodes: {job.nodes.min}: {why}, and has at most {most} nodes a zone{which}; lower it, raise max of the"
            f" pools, or set {tcp}"
        )


def _job_conflicts(spec: JobSpec) -> Iterator[Conflict]:
    if spec.nodes.min > spec.nodes.max:
        yield ("nodes", "max"), f"is less than nodes.min, which is {spec.nodes.min}"
    if spec.on == "end" and not spec.after:
        yield ("on",), "says how the jobs of after must end, and after is empty"
    if spec.deadline is not None and spec.deadline <= spec.checkpoint_interval:
        yield (
            ("deadline",),
            f"is not more than checkpoint_interval, which is {spec.checkpoint_interval:g} s:"
            " the job would end before its first checkpoint",
        )
