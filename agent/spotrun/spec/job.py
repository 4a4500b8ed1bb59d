"""The job file: one training run. `load_job` reads one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator

from spotrun.errors import SpecError
from spotrun.spec.cluster import ClusterSpec
from spotrun.spec.fields import DURATION, INTERVAL, LABEL, Duration, Int, Interval, Spec, Text, label
from spotrun.spec.file import Conflict, File, nearest, refuse

# The launcher sets these for each worker. A job that changed them would break its own process group.
_RESERVED_ENV = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


def _count_or_auto(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
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


Auto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]


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

    name: Annotated[str, Strict(), AfterValidator(label(40))] = Field(default="job", description=LABEL.format(40))
    script: Annotated[str, Strict(), AfterValidator(_script)] = Field(
        description="a Python file in the job file's folder, such as train.py"
    )
    args: tuple[Text, ...] = Field(default=(), description="a list of texts")
    nodes: NodesSpec = Field(default=NodesSpec(), description="a whole number, or keys min, max and spares")
    procs_per_node: Auto = Field(default="auto", description="a whole number, at least 1, or auto: one for each GPU")
    snapshot_interval: Auto = Field(default="auto", description="steps, a whole number, at least 1, or auto")
    checkpoint_interval: Interval = Field(default=300.0, description=INTERVAL)
    keep: Int = Field(default=3, ge=1, description="checkpoints to keep, a whole number, at least 1")
    deadline: Interval | None = Field(default=None, description=INTERVAL)
    budget: Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="dollars, a number more than zero"
    )
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(_job_conflicts(self))
        return self


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
    most = sum(pool.max for pool in cluster.pools)
    if job.nodes.min > most:
        raise SpecError(
            f"nodes: {job.nodes.min}: cluster {cluster.name} has at most {most} nodes; lower it, or raise"
            " max of the pools"
        )


def _job_conflicts(spec: JobSpec) -> Iterator[Conflict]:
    if spec.nodes.min > spec.nodes.max:
        yield ("nodes", "max"), f"is less than nodes.min, which is {spec.nodes.min}"
    if spec.deadline is not None and spec.deadline <= spec.checkpoint_interval:
        yield (
            ("deadline",),
            f"is not more than checkpoint_interval, which is {spec.checkpoint_interval:g} s:"
            " the job would end before its first checkpoint",
        )
