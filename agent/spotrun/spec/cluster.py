"""The cluster file: what exists in a cloud. `load_cluster` reads one."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    model_serializer,
    model_validator,
)

from spotrun.errors import SpecError
from spotrun.spec.fields import BOOL, DURATION, INTERVAL, LABEL, Bool, Duration, Int, Interval, Spec, Str, label
from spotrun.spec.file import Conflict, File, Place, nearest, refuse
from spotrun.spec.machine_types import EFA_ISLAND, EFAS, GPUS, NVLINK_5, OLD_GPUS
from spotrun.spec.names import is_refused
from spotrun.spec.notices import GCE_LONG_NOTICE

FORMAT = 1  # of the description in the bucket; a new key does not change it
_DEFAULT_HEAD = {"local": "local", "gcp": "e2-small", "aws": "t3.small"}
_ZONE_FORMS = {"local": "{}-<name>", "gcp": "{}-<letter>", "aws": "{}<letter>"}
_BUCKET_FORMS = {"local": "a folder or file:///<folder>", "gcp": "gs://<bucket>", "aws": "s3://<bucket>"}
_SCHEMES = {"local": "file", "gcp": "gs", "aws": "s3"}
_MACHINE_FORMS = {"local": r".+", "gcp": r"[a-z][a-z0-9]*-[a-z0-9-]+", "aws": r"[a-z][a-z0-9-]*\.[a-z0-9-]+"}
_MACHINES = {"local": "anything", "gcp": "such as g2-standard-8", "aws": "such as g5.2xlarge"}


def _cidr(value: str) -> str:
    network = ipaddress.IPv4Network(value)  # raises ValueError; host bits are an error too
    private = any(network.subnet_of(each) for each in _PRIVATE)
    if not private or not 16 <= network.prefixlen <= 20:
        raise ValueError("is not a private range of that size")
    return value


# https://www.rfc-editor.org/rfc/rfc1918
_PRIVATE = tuple(ipaddress.IPv4Network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
_Label = Annotated[str, Strict(), AfterValidator(label(40))]
# GB of spotrun's own image (disk_gb in images/variables.pkr.hcl). No cloud starts a machine with a smaller disk.
IMAGE_GB = 30
_LOCAL = "keys metadata, boot_delay, recreate_delay, capacity, queue_delay, market and share_torch"
_WEEK = 7 * 86400.0  # the longest that Google lets a flex machine run
_POLICY = "arn:aws:iam::<account>:policy/<name>"
_STATE = "a folder in a bucket, gs://<bucket>/<folder> or s3://<bucket>/<folder>"


class HeadSpec(Spec):
    """The head's machine, always on-demand. Default: a small machine in the first pool's zone."""

    machine: Str = Field(default="", description="a machine type, such as e2-small or t3.small")
    zone: Str = Field(default="", description="a zone of the region")


class AcceleratorSpec(Spec):
    """GPUs attached to a machine of Google's N1 family. Every other machine type has its own GPUs, or none."""

    type: Str = Field(description="an accelerator type, such as nvidia-tesla-t4")
    count: Int = Field(default=1, ge=1, le=8, description="a whole number from 1 to 8")


class PoolSpec(Spec):
    """A group of equal machines. The head sets its size, from 0 to `max`."""

    name: Annotated[str, Strict(), AfterValidator(label(20))] = Field(description=LABEL.format(20))
    zone: Str = Field(description="a zone of the region")
    machine: Str = Field(default="", description="a machine type, such as g2-standard-8 or g5.2xlarge")
    market: Literal["spot", "flex", "on-demand"] = "spot"
    """flex: Google's Flex-start. Machines may be waited for, are not preempted, and end after `max_run_duration`."""
    max: Int = Field(default=1, ge=1, description="a whole number, at least 1")
    devices: Int | None = Field(default=None, ge=1, le=64, description="a whole number from 1 to 64")
    """Devices of each machine of the local cloud. Default: 1. See `devices_of` for the other clouds."""
    disk: Int = Field(default=100, ge=20, description="the boot disk in GB, a whole number, at least 20")
    accelerator: AcceleratorSpec | None = Field(default=None, description="keys type and count")
    max_run_duration: Interval | None = Field(default=None, description=INTERVAL)
    """Seconds after which the cloud ends a machine. The head replaces machines before that, one after the other.
    Default for market flex: a week; for the others: never.
    https://cloud.google.com/compute/docs/instances/limit-vm-runtime"""
    notice: Interval | None = Field(default=None, description="120s")
    """Seconds between Google's notice of a preemption and the power button. Default: both at once, 30 s before the end.
    https://cloud.google.com/compute/docs/instances/spot#preemption-process"""


class NetworkSpec(Spec):
    """What the machines' network offers."""

    efa: Bool = Field(default=False, description=BOOL)  # Elastic Fabric Adapters, on AWS
    placement: Bool | None = Field(default=None, description=BOOL)
    """Whether a pool's machines are close to each other. Default: true on AWS, false on Google Cloud."""
    nat: Bool = Field(default=True, description=BOOL)
    """A way out to the internet, for example for a job's requirements. Without it: only the cloud's own endpoints."""
    cidr: Annotated[str, Strict(), AfterValidator(_cidr)] = Field(
        default="10.77.0.0/16", description="a private IPv4 range from /16 to /20, such as 10.77.0.0/16"
    )


class MarketSpec(Spec):
    """A change of the local cloud's market, at `after`. Keys that are absent change nothing."""

    where: Str = Field(description="a pool or a zone")
    after: Duration = Field(default=0.0, description=DURATION)  # seconds after the start of the local cloud
    price: float | None = Field(default=None, ge=0, description="dollars an hour")  # of one machine
    capacity: Int | None = Field(default=None, ge=0, description="a whole number, 0 or more")
    """The most machines. If there are more, the cloud takes spot machines."""
    notice: Duration | None = Field(default=None, description=DURATION)  # before machines are taken for `capacity`
    dry: Bool | None = Field(default=None, description=BOOL)
    """Whether no machine is given. Present machines stay."""
    obtainability: float | None = Field(default=None, ge=0, le=1, description="a number from 0 to 1")
    """What the cloud says: how likely a pool gets its `max` machines."""
    uptime: Interval | None = Field(default=None, description=INTERVAL)
    """What the cloud says: how long it expects a machine to run."""
    preemptions: float | None = Field(default=None, ge=0, le=1, description="a number from 0 to 1")
    """What the cloud says: of the machines that ended lately, the share that it took."""


class LocalSpec(Spec):
    """How the local cloud behaves."""

    metadata: Literal["gce", "ec2"] = "gce"
    boot_delay: Duration = Field(default=0.2, description=DURATION)
    recreate_delay: Duration = Field(default=1.0, description=DURATION)
    capacity: dict[str, Annotated[int, Strict(), Field(ge=0)]] = Field(
        default={}, description="a zone or pool: a whole number, 0 or more"
    )
    """The most machines that a zone or pool gives. One that is absent has no limit."""
    queue_delay: Duration = Field(default=1.0, description=DURATION)
    """Seconds until a request for flex machines has its turn. Then it gets all of them at once, or goes on waiting."""
    market: tuple[MarketSpec, ...] = Field(default=(), description="a list of changes of the market")
    share_torch: Bool = Field(default=True, description=BOOL)
    """Whether the machines share one import of torch. A machine of a cloud imports torch for itself."""


class ClusterSpec(Spec):
    """What a cluster file describes. Keys whose default depends on other keys are filled in."""

    name: Annotated[str, Strict(), AfterValidator(label(20))] = Field(description=LABEL.format(20))
    cloud: Literal["local", "gcp", "aws"]
    region: Str = Field(default="", description="a region of the cloud, such as us-central1 or us-east-1")
    project: Str | None = Field(default=None, description="a Google Cloud project's id")
    bucket: Str | None = Field(default=None, description="the bucket's URL")
    head: HeadSpec = Field(default=HeadSpec(), description="keys machine and zone")
    pools: tuple[PoolSpec, ...] = Field(min_length=1, description="a list of at least one pool")
    image: Str | None = Field(default=None, description="a machine image's name")
    network: NetworkSpec = Field(default=NetworkSpec(), description="keys efa, placement, nat and cidr")
    state: Str | None = Field(default=None, description=_STATE)
    """Where Terraform keeps its state. Default: in the operator's checkout."""
    permissions_boundary: Str | None = Field(
        default=None, description="a policy's ARN, such as arn:aws:iam::123456789012:policy/spotrun-boundary"
    )
    """An AWS policy that limits the rights of every role of the cluster."""
    labels: dict[_Label, _Label] = Field(default={}, description="a label: its value, " + LABEL.format(40))
    """On everything that the stacks make."""
    local: LocalSpec = Field(default=LocalSpec(), description=_LOCAL)

    def pool(self, name: str) -> PoolSpec | None:
        """The pool of that name."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def document(self) -> str:
        """The description of the cluster for the bucket. `described` reads it."""
        return json.dumps({"format": FORMAT, **self.model_dump(mode="json")}, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """Tells two descriptions apart."""
        return digest(self.document().encode())

    @model_validator(mode="after")
    def _complete(self) -> Self:
        region = self.region or ("local" if self.cloud == "local" else "")
        refuse(_cluster_conflicts(self, region))
        head = HeadSpec(
            machine=self.head.machine or _DEFAULT_HEAD[self.cloud], zone=self.head.zone or self.pools[0].zone
        )
        pools = tuple(_completed(pool) for pool in self.pools)
        near = self.cloud == "aws" if self.network.placement is None else self.network.placement
        network = self.network.model_copy(update={"placement": near})
        self.__dict__.update(region=region, head=head, pools=pools, network=network)  # frozen: only this validator may
        return self

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what does not belong to this cloud, so that the result can be read again."""
        values: dict[str, Any] = handler(self)
        values.pop("network" if self.cloud == "local" else "local", None)
        if self.permissions_boundary is None:
            values.pop("permissions_boundary", None)
        return values


def _completed(pool: PoolSpec) -> PoolSpec:
    life = pool.max_run_duration or (_WEEK if pool.market == "flex" else None)
    return pool.model_copy(update={"machine": pool.machine or "local", "max_run_duration": life})


def load_cluster(path: Path | str) -> ClusterSpec:
    """The cluster file at `path`. Raises `SpecError` that lists every problem."""
    return File(Path(path), "cluster file").parse(ClusterSpec)


def described(document: bytes) -> ClusterSpec:
    """The cluster from its description in the bucket. Ignores keys of other versions. Raises `SpecError`."""
    try:
        values = json.loads(document)
        if isinstance(values, dict) and (found := values.pop("format", FORMAT)) != FORMAT:
            problem = f"it has format {found!r}; this version of spotrun reads format {FORMAT}: update it"
        else:
            return ClusterSpec.kept(values)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise SpecError(f"the cluster's description in the bucket is not valid: {problem}")


def devices_of(pool: PoolSpec, cluster: ClusterSpec) -> int | None:
    """How many devices each machine of the pool has; None if spotrun does not know the machine type."""
    if cluster.cloud == "local":
        return pool.devices or 1
    return pool.accelerator.count if pool.accelerator else GPUS.get(pool.machine)


def digest(document: bytes) -> str:
    """A hash of a description in the bucket, also of the keys that this version does not know."""
    return hashlib.sha256(document).hexdigest()[:16]


def _cluster_conflicts(spec: ClusterSpec, region: str) -> Iterator[Conflict]:
    forms = {"local": r"[a-z][-a-z0-9]*", "gcp": r"[a-z]+-[a-z]+[0-9]+", "aws": r"[a-z]{2}(-[a-z]+)+-[0-9]+"}
    if not region:
        yield ("region",), f"is missing; cloud {spec.cloud} needs one, such as us-central1 or us-east-1"
    elif spec.cloud == "aws" and region.startswith("cn-"):
        yield ("region",), "is in China, where AWS is a separate cloud that spotrun does not support"
        region = ""
    elif not re.fullmatch(forms[spec.cloud], region):
        yield ("region",), f"is not a region of cloud {spec.cloud}"
        region = ""
    yield from _misplaced(spec)
    yield from _address_conflicts(spec)
    if region and spec.head.zone:
        yield from _zone_conflict(spec.cloud, region, spec.head.zone, ("head", "zone"))
    if spec.head.machine:
        yield from _machine_conflict(spec.cloud, spec.head.machine, ("head", "machine"))
    seen: dict[str, int] = {}
    for index, pool in enumerate(spec.pools):
        if region:
            yield from _zone_conflict(spec.cloud, region, pool.zone, ("pools", index, "zone"))
        yield from _pool_conflicts(spec, pool, ("pools", index))
        if pool.name in seen:
            yield ("pools", index, "name"), f"is already the name of pools[{seen[pool.name]}]"
        seen.setdefault(pool.name, index)
    yield from _efa_conflicts(spec)
    yield from _market_conflicts(spec)


def _market_conflicts(spec: ClusterSpec) -> Iterator[Conflict]:
    """Zones and pools that are not in the file."""
    places = sorted({place for pool in spec.pools for place in (pool.zone, pool.name)})
    named: dict[Place, str] = {("local", "capacity", where): where for where in spec.local.capacity}
    named |= {("local", "market", i, "where"): change.where for i, change in enumerate(spec.local.market)}
    for place, where in named.items():
        if where not in places:
            yield place, f"is neither a zone of a pool nor a pool; allowed: {', '.join(places)}{nearest(where, places)}"


def _misplaced(spec: ClusterSpec) -> Iterator[Conflict]:
    """Keys that mean nothing on this cloud."""
    cloud = spec.cloud
    if cloud != "gcp" and spec.project is not None:
        yield ("project",), f"is only for cloud gcp, this is {cloud}"
    if cloud != "aws" and spec.permissions_boundary is not None:
        yield ("permissions_boundary",), f"is only for cloud aws, this is {cloud}"
    if cloud != "local" and "local" in spec.model_fields_set:
        yield ("local",), f"is only for cloud local, this is {cloud}"
    if spec.network.efa and cloud != "aws":
        yield ("network", "efa"), f"is only for cloud aws, this is {cloud}"
    if cloud == "local":
        for key in sorted(spec.network.model_fields_set & {"placement", "nat", "cidr"}):
            yield ("network", key), "is only for clouds gcp and aws, this is local"
        if spec.state is not None:
            yield ("state",), "is only for clouds gcp and aws, this is local"


def _address_conflicts(spec: ClusterSpec) -> Iterator[Conflict]:
    """Names and URLs that the cloud would refuse."""
    if spec.cloud == "gcp" and spec.project is None:
        yield ("project",), "is missing; cloud gcp needs the project's id"
    elif spec.cloud == "gcp" and not re.fullmatch(r"([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]", spec.project or ""):
        yield ("project",), "is not a project's id (not its name and not its number)"
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateSecurityGroup.html
    if spec.cloud == "aws" and f"{spec.name}-".startswith("sg-"):
        yield ("name",), "would begin the names of security groups with sg-, which EC2 refuses; choose another"
    scheme = spec.bucket.partition("://")[0] if spec.bucket and "://" in spec.bucket else "file"
    bucket = rf"{_SCHEMES[spec.cloud]}://[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9]"
    if spec.bucket and (
        scheme != _SCHEMES[spec.cloud] or (spec.cloud != "local" and not re.fullmatch(bucket, spec.bucket))
    ):
        yield ("bucket",), f"does not fit cloud {spec.cloud}; allowed: {_BUCKET_FORMS[spec.cloud]}"
    elif spec.bucket and is_refused(spec.bucket):
        yield ("bucket",), "is against the cloud's rules for the names of buckets; choose another"
    elif spec.cloud == "gcp" and not spec.bucket and is_refused(f"gs://spotrun-{spec.name}"):
        yield ("name",), "would be in the name of the bucket, which Google refuses; choose another, or set bucket"
    boundary = spec.permissions_boundary
    if spec.cloud == "aws" and boundary is not None and not _is_policy(boundary, spec.region):
        yield ("permissions_boundary",), "is not the ARN of a policy in this region's part of AWS; allowed: " + _POLICY
    if spec.state is not None and not re.fullmatch(r"(gs|s3)://[a-z0-9][a-z0-9._-]+[a-z0-9]/[\w./-]*\w", spec.state):
        yield ("state",), f"is not a folder in a bucket; allowed: {_STATE}"


def _is_policy(arn: str, region: str) -> bool:
    """https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html#identifiers-arns"""
    partition = "aws-us-gov" if region.startswith("us-gov-") else "aws"
    form = rf"arn:{partition}:iam::(\d{{12}}|aws):policy/([\w+=,.@-]+/)*[\w+=,.@-]+"
    return re.fullmatch(form, arn, re.ASCII) is not None


def _pool_conflicts(spec: ClusterSpec, pool: PoolSpec, place: Place) -> Iterator[Conflict]:
    cloud = spec.cloud
    if cloud != "local" and not pool.machine:
        yield (*place, "machine"), f"is missing; cloud {cloud} needs a machine type"
    elif pool.machine:
        yield from _machine_conflict(cloud, pool.machine, (*place, "machine"))
    if pool.name == "head":
        yield (*place, "name"), "is reserved for the head; choose another"
    for key, only in (("accelerator", "gcp"), ("notice", "gcp"), ("devices", "local")):
        if getattr(pool, key) is not None and cloud != only:
            yield (*place, key), f"is only for cloud {only}, this is {cloud}"
    if cloud == "aws" and pool.max_run_duration is not None:
        yield (*place, "max_run_duration"), "is only for clouds gcp and local, this is aws"
    if cloud == "aws" and pool.market == "flex":
        yield (*place, "market"), "is only for clouds gcp and local, this is aws; allowed: spot, on-demand"
    if pool.market == "flex" and (pool.max_run_duration or 0) > _WEEK:
        yield (*place, "max_run_duration"), "is more than 7d, the longest that a flex machine runs"
    if cloud == "gcp" and pool.notice is not None:
        yield from _notice_conflict(pool, place)
    if cloud == "gcp" and pool.accelerator and not pool.machine.startswith("n1-"):
        yield (*place, "accelerator"), f"is only for n1 machines; {pool.machine} has its own GPUs or none"
    if cloud != "local" and spec.image is None:
        yield from _unfit_for_the_image(pool, place)
    if cloud == "aws" and spec.network.efa and pool.machine and pool.machine not in EFAS:
        family = pool.machine.partition(".")[0] + "."
        near = sorted(EFAS, key=lambda each: not each.startswith(family))
        yield (*place, "machine"), f"has no EFA, and network.efa is true; those that have one: {', '.join(near)}"


def _efa_conflicts(spec: ClusterSpec) -> Iterator[Conflict]:
    """Machine types of one zone that EFA does not connect. A generation may have machines of all pools of a zone."""
    first: dict[str, int] = {}
    for index, pool in enumerate(spec.pools if spec.network.efa else ()):
        other = spec.pools[first.setdefault(pool.zone, index)]
        if (pool.machine.partition(".")[0] in EFA_ISLAND) != (other.machine.partition(".")[0] in EFA_ISLAND):
            what = f"EFA does not connect it with {other.machine} of pool {other.name}, which is in the same zone"
            yield ("pools", index, "machine"), f"{what}; put one of the two into another zone or another cluster"


def _notice_conflict(pool: PoolSpec, place: Place) -> Iterator[Conflict]:
    if pool.market != "spot":
        yield (*place, "notice"), f"is only for spot machines, this pool is {pool.market}"
    elif pool.notice != GCE_LONG_NOTICE:
        allowed = f"{GCE_LONG_NOTICE:.0f}s, or no key for the usual 30s"
        yield (*place, "notice"), f"is not a notice that Google gives; allowed: {allowed}"


def _unfit_for_the_image(pool: PoolSpec, place: Place) -> Iterator[Conflict]:
    """What spotrun's own image cannot run on, though another image may."""
    if pool.disk < IMAGE_GB:
        yield (*place, "disk"), f"is smaller than spotrun's own image of {IMAGE_GB} GB"
    if pool.machine.startswith(NVLINK_5):
        what = "has GPUs with NVLink 5, which need NVIDIA's subnet manager"
        yield (*place, "machine"), f"{what}; spotrun's own image does not have it; set image, or take another machine"
    accelerator = pool.accelerator.type.removesuffix("-vws") if pool.accelerator else ""
    for key, kind in (("machine", pool.machine.partition(".")[0]), ("accelerator", accelerator)):
        if kind in OLD_GPUS:
            gpu = OLD_GPUS[kind]
            yield (*place, key), f"has GPUs older than Turing ({gpu}); spotrun's own image cannot use them; set image"


def _machine_conflict(cloud: str, machine: str, place: Place) -> Iterator[Conflict]:
    if not re.fullmatch(_MACHINE_FORMS[cloud], machine):
        yield place, f"is not a machine type of cloud {cloud}; allowed: {_MACHINES[cloud]}"


def _zone_conflict(cloud: str, region: str, zone: str, place: Place) -> Iterator[Conflict]:
    forms = {"local": r"-[a-z0-9]+", "gcp": r"-[a-z]", "aws": r"[a-z]"}
    if not re.fullmatch(re.escape(region) + forms[cloud], zone):
        yield place, f"is not in region {region}; allowed: {_ZONE_FORMS[cloud].format(region)}"
