"""The two files a user writes: the cluster file and the job file.

`load_cluster` and `load_job` read one and raise `SpecError` with a line for each problem: file, line, key, value,
what is allowed, and the nearest known key. The description of every field below is that "what is allowed", so it
is part of the messages (see `specfile`). Durations are stored in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    model_serializer,
    model_validator,
)

from spotrun.errors import SpecError
from spotrun.specfile import Conflict, File, Place, nearest, refuse

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DEFAULT_HEAD = {"local": "local", "gcp": "e2-small", "aws": "t3.small"}
_ZONE_FORMS = {"local": "{}-<name>", "gcp": "{}-<letter>", "aws": "{}<letter>"}
_BUCKET_FORMS = {"local": "a folder or file:///<folder>", "gcp": "gs://<bucket>", "aws": "s3://<bucket>"}
# Set by the launcher for each worker; a job that set them would break its own process group.
_RESERVED_ENV = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


def parse_duration(value: object) -> float:
    """Seconds from a number (seconds) or text such as 90s, 5m, 2h, 1d. Raises ValueError."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd])\s*", value)
        if match is None:
            raise ValueError("is not a duration")
        value = float(match[1]) * _UNITS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("is not a duration")
    if value < 0:
        raise ValueError("is negative")
    return float(value)


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("is not more than zero")
    return value


def _label(limit: int) -> Callable[[str], str]:
    def check(value: str) -> str:
        if len(value) > limit or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", value):
            raise ValueError("is not a valid name")
        return value

    return check


def _count_or_auto(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("")
    return value


def _text(value: object) -> object:
    """Numbers become text, as a shell would have them; YAML's yes, no, on, off are too easily meant as text."""
    if isinstance(value, bool):
        raise ValueError("YAML reads this as a boolean: put it in quotes")
    return str(value) if isinstance(value, int | float) else value


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


Duration = Annotated[float, BeforeValidator(parse_duration)]
Interval = Annotated[float, BeforeValidator(parse_duration), AfterValidator(_positive)]
Int = Annotated[int, Strict()]
Bool = Annotated[bool, Strict()]
Str = Annotated[str, Strict(), Field(min_length=1)]
Text = Annotated[str, BeforeValidator(_text)]
Auto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
_DURATION = "seconds, or a number with s, m, h or d, such as 90s or 5m"
_INTERVAL = _DURATION + ", more than zero"
_LABEL = "lower-case letters, digits and inner hyphens, a letter first, at most {} characters"


class Spec(BaseModel):
    """Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadSpec(Spec):
    """The head's machine; it is always on-demand. Defaults: a small machine in the first pool's zone."""

    machine: Str = Field(default="", description="a machine type, such as e2-small or t3.small")
    zone: Str = Field(default="", description="a zone of the region")


class PoolSpec(Spec):
    """A group of equal machines. The head sets how many there are, from 0 to `max`."""

    name: Annotated[str, Strict(), AfterValidator(_label(20))] = Field(description=_LABEL.format(20))
    zone: Str = Field(description="a zone of the region")
    machine: Str = Field(default="", description="a machine type, such as g2-standard-8 or g5.2xlarge")
    market: Literal["spot", "on-demand"] = "spot"
    max: Int = Field(default=1, ge=1, description="a whole number, at least 1")


class NetworkSpec(Spec):
    """What the machines' network should offer."""

    efa: Bool = Field(default=False, description="true or false")
    placement: Bool = Field(default=False, description="true or false")


class LocalSpec(Spec):
    """How the local cloud should behave.

    capacity: machines that a zone has at most; a zone that is absent has as many as are asked for.
    """

    metadata: Literal["gce", "ec2"] = "gce"
    boot_delay: Duration = Field(default=0.2, description=_DURATION)
    recreate_delay: Duration = Field(default=1.0, description=_DURATION)
    capacity: dict[str, Annotated[int, Strict(), Field(ge=0)]] = Field(
        default={}, description="a zone: a whole number, 0 or more"
    )


class ClusterSpec(Spec):
    """What a cluster file describes. `region`, `head.machine` and `head.zone` are filled in if they have a default."""

    name: Annotated[str, Strict(), AfterValidator(_label(20))] = Field(description=_LABEL.format(20))
    cloud: Literal["local", "gcp", "aws"]
    region: Str = Field(default="", description="a region of the cloud, such as us-central1 or us-east-1")
    project: Str | None = Field(default=None, description="a Google Cloud project's id")
    bucket: Str | None = Field(default=None, description="the bucket's URL")
    head: HeadSpec = Field(default=HeadSpec(), description="keys machine and zone")
    pools: tuple[PoolSpec, ...] = Field(min_length=1, description="a list of at least one pool")
    image: Str | None = Field(default=None, description="a machine image's name")
    network: NetworkSpec = Field(default=NetworkSpec(), description="keys efa and placement")
    local: LocalSpec = Field(default=LocalSpec(), description="keys metadata, boot_delay, recreate_delay and capacity")

    def pool(self, name: str) -> PoolSpec | None:
        """The pool of that name."""
        return next((pool for pool in self.pools if pool.name == name), None)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        region = self.region or ("local" if self.cloud == "local" else "")
        refuse(_cluster_conflicts(self, region))
        head = HeadSpec(
            machine=self.head.machine or _DEFAULT_HEAD[self.cloud], zone=self.head.zone or self.pools[0].zone
        )
        pools = tuple(pool.model_copy(update={"machine": pool.machine or "local"}) for pool in self.pools)
        self.__dict__.update(region=region, head=head, pools=pools)  # frozen: only this validator may
        return self

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`local` is left out where it does not belong, so that what is written can be read."""
        values: dict[str, Any] = handler(self)
        if self.cloud != "local":
            values.pop("local", None)
        return values


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
    """One training run. `script` is relative to the job file's folder, which is what reaches the nodes."""

    name: Annotated[str, Strict(), AfterValidator(_label(40))] = Field(default="job", description=_LABEL.format(40))
    script: Annotated[str, Strict(), AfterValidator(_script)] = Field(
        description="a Python file in the job file's folder, such as train.py"
    )
    args: tuple[Text, ...] = Field(default=(), description="a list of texts")
    nodes: NodesSpec = Field(default=NodesSpec(), description="a whole number, or keys min, max and spares")
    procs_per_node: Auto = Field(default="auto", description="a whole number, at least 1, or auto: one for each GPU")
    snapshot_interval: Auto = Field(default="auto", description="steps, a whole number, at least 1, or auto")
    checkpoint_interval: Interval = Field(default=300.0, description=_INTERVAL)
    keep: Int = Field(default=3, ge=1, description="checkpoints to keep, a whole number, at least 1")
    deadline: Interval | None = Field(default=None, description=_INTERVAL)
    budget: Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="dollars, a number more than zero"
    )
    max_restarts: Int = Field(default=3, ge=0, description="a whole number, 0 or more")
    hang_timeout: Interval = Field(default=300.0, description=_INTERVAL)
    start_timeout: Interval = Field(default=600.0, description=_INTERVAL)
    grow_interval: Duration = Field(default=30.0, description=_DURATION)
    heartbeat_timeout: Interval = Field(default=3.0, description=_INTERVAL)
    env: dict[Annotated[str, AfterValidator(_env_name)], Text] = Field(default={}, description="a variable: its text")
    requirements: tuple[Annotated[str, Strict(), AfterValidator(_requirement)], ...] = Field(
        default=(), description="a list of package requirements, such as scikit-learn>=1.5"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(_job_conflicts(self))
        return self


def load_cluster(path: Path | str) -> ClusterSpec:
    """The cluster file at `path`. Raises `SpecError` that lists every problem."""
    return File(Path(path), "cluster file").parse(ClusterSpec)


def load_job(path: Path | str) -> JobSpec:
    """The job file at `path`; its script must exist. Raises `SpecError` that lists every problem."""
    file, folder = File(Path(path), "job file"), Path(path).absolute().parent
    if "name" not in file.data:
        word = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-0123456789")
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
    most = sum(pool.max for pool in cluster.pools)
    if job.nodes.min > most:
        raise SpecError(
            f"job {job.name}: nodes.min: {job.nodes.min}: the pools of cluster {cluster.name} have at most {most}"
            " nodes in all; lower nodes.min or raise the pools' max"
        )


def _cluster_conflicts(spec: ClusterSpec, region: str) -> Iterator[Conflict]:
    cloud = spec.cloud
    forms = {"local": r"[a-z][-a-z0-9]*", "gcp": r"[a-z]+-[a-z]+[0-9]+", "aws": r"[a-z]{2}(-[a-z]+)+-[0-9]+"}
    if not region:
        yield ("region",), f"is missing; cloud {cloud} needs one, such as us-central1 or us-east-1"
    elif not re.fullmatch(forms[cloud], region):
        yield ("region",), f"is not a region of cloud {cloud}"
        region = ""
    if cloud == "gcp" and spec.project is None:
        yield ("project",), "is missing; cloud gcp needs the project's id"
    if cloud != "gcp" and spec.project is not None:
        yield ("project",), f"is only for cloud gcp, this is {cloud}"
    if cloud != "local" and "local" in spec.model_fields_set:
        yield ("local",), f"is only for cloud local, this is {cloud}"
    if spec.network.efa and cloud != "aws":
        yield ("network", "efa"), f"is only for cloud aws, this is {cloud}"
    if spec.network.placement and cloud == "local":
        yield ("network", "placement"), "is only for clouds gcp and aws, this is local"
    scheme = spec.bucket.partition("://")[0] if spec.bucket and "://" in spec.bucket else "file"
    if spec.bucket and scheme != {"local": "file", "gcp": "gs", "aws": "s3"}[cloud]:
        yield ("bucket",), f"does not fit cloud {cloud}; allowed: {_BUCKET_FORMS[cloud]}"
    if region and spec.head.zone:
        yield from _zone_conflict(cloud, region, spec.head.zone, ("head", "zone"))
    seen: dict[str, int] = {}
    for index, pool in enumerate(spec.pools):
        if region:
            yield from _zone_conflict(cloud, region, pool.zone, ("pools", index, "zone"))
        if cloud != "local" and not pool.machine:
            yield ("pools", index, "machine"), f"is missing; cloud {cloud} needs a machine type"
        if pool.name == "head":
            yield ("pools", index, "name"), "is the head's own name; choose another"
        if pool.name in seen:
            yield ("pools", index, "name"), f"is already the name of pools[{seen[pool.name]}]"
        seen.setdefault(pool.name, index)
    zones = sorted({pool.zone for pool in spec.pools})
    for zone in spec.local.capacity if cloud == "local" else ():
        if zone not in zones:
            allowed = f"allowed: {', '.join(zones)}{nearest(zone, zones)}"
            yield ("local", "capacity", zone), f"no pool is in this zone; {allowed}"


def _zone_conflict(cloud: str, region: str, zone: str, place: Place) -> Iterator[Conflict]:
    forms = {"local": r"-[a-z0-9]+", "gcp": r"-[a-z]", "aws": r"[a-z]"}
    if not re.fullmatch(re.escape(region) + forms[cloud], zone):
        yield place, f"is not in region {region}; allowed: {_ZONE_FORMS[cloud].format(region)}"


def _job_conflicts(spec: JobSpec) -> Iterator[Conflict]:
    if spec.nodes.min > spec.nodes.max:
        yield ("nodes", "max"), f"is less than nodes.min, which is {spec.nodes.min}"
    if spec.deadline is not None and spec.deadline <= spec.checkpoint_interval:
        yield (
            ("deadline",),
            f"is not more than checkpoint_interval, which is {spec.checkpoint_interval:g} s:"
            " the job would end before its first checkpoint",
        )
