"""Two clouds that are not there, as an operator meets them: all of spotrun's own code, and processes for machines.

AWS: real Terraform with the real provider makes the stacks on moto's server; the head resizes moto's scaling groups;
the bucket is moto's S3. Google: there is no provider here, so the groups are made from the synthesized JSON by what
stands in for `terraform`; the head asks a server that parses each request into google-cloud-compute's own types.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from aiohttp import web

from spotrun.cloud.local.layout import ensure_key
from spotrun.spec import load_cluster
from spotrun.spec.names import BUCKET, CLUSTER, POOL, PREEMPT_NOTICE, bucket, group
from spotrun.store import Store
from tests.e2e import tools
from tests.e2e.mirror import PROCESSES, Listed, Mirror
from tests.fakes import gce as fakegce
from tests.fakes import gcs as fakegcs
from tests.fakes import moto_server, serving
from tests.infra.terraform import Tools

ROOT = Path(__file__).parents[2]
Listing = Callable[[], list[Listed]]
NOTICE = 15.0  # seconds between a notice and the end, instead of 30 or 120
# Machines without GPUs, as what stands in for them has none either, and would be found unfit.
POOLS = """
pools:
- {{name: spot, zone: {zone}, machine: {machine}, max: 4}}
- {{name: steady, zone: {zone}, machine: {machine}, market: on-demand, max: 1}}
"""


class Site(Protocol):
    """A cloud and an operator's machine. file: the cluster file. environment: of the operator's commands."""

    @property
    def file(self) -> Path: ...
    @property
    def environment(self) -> Mapping[str, str]: ...

    def size(self, pool: str) -> int:
        """How many machines a pool's group was told to have."""

    def store(self) -> Store:
        """The bucket, as it is in the cloud."""

    def left(self) -> list[str]:
        """What of the stack `pools` is still there."""


class Operator:
    """Runs the tasks as `make` does."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def fab(self, *words: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(words), cwd=ROOT, env=self._environment(), capture_output=True, text=True, timeout=timeout
        )

    def started(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command(words),
            cwd=ROOT,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def phase(self) -> str:
        """The active job's; empty if there is none, or no head."""
        status = self.fab("status", "--json")
        job = json.loads(status.stdout)["job"] if status.returncode == 0 else None
        return str(job["phase"]) if job else ""

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [str(Path(sys.executable).with_name("fab")), words[0], "--cluster", str(self.site.file), *words[1:]]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_"))}
        return kept | dict(self.site.environment)


class Aws:
    def __init__(self, aws: moto_server.Moto, folder: Path, variables: Mapping[str, str]) -> None:
        self._aws = aws
        self.file = folder / "cluster.yaml"
        self.file.write_text(
            f"name: e2e\ncloud: aws\nregion: {aws.region}\nimage: {aws.image()}\n"
            + POOLS.format(zone=f"{aws.region}a", machine="c5.2xlarge")
        )
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        home = str(folder / "home")
        self.environment = {**aws.environment, **variables, "PATH": path, "SPOTRUN_HOME": home}

    def listing(self) -> list[Listed]:
        ends = {notice["instance"]: float(notice["at"]) for notice in self._aws.notices()}
        states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        found: list[Listed] = []
        for page in self._aws.client("ec2").get_paginator("describe_instances").paginate(Filters=states):
            for machine in (each for reservation in page["Reservations"] for each in reservation["Instances"]):
                tags = {tag["Key"]: tag["Value"] for tag in machine.get("Tags", [])}
                name, zone = machine["InstanceId"], machine["Placement"]["AvailabilityZone"]
                market = "spot" if machine.get("InstanceLifecycle") == "spot" else "on-demand"
                kind, end = machine["InstanceType"], ends.get(name)
                if CLUSTER in tags:
                    found.append(Listed(name, name, tags[POOL], zone, kind, market, tags, end))
        return found

    def size(self, pool: str) -> int:
        name = group("e2e", pool)
        found = self._aws.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
        return int(found["AutoScalingGroups"][0]["DesiredCapacity"])

    def store(self) -> Store:
        with _set(self._aws.environment):
            return Store(f"s3://{bucket(load_cluster(self.file), moto_server.ACCOUNT)}", self._aws.region)

    def left(self) -> list[str]:
        groups = self._aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        placements = self._aws.client("ec2").describe_placement_groups()["PlacementGroups"]
        found = [each["AutoScalingGroupName"] for each in groups] + [each["GroupName"] for each in placements]
        return found + [each.name for each in self.listing()]


class Gcp:
    """Plays Terraform too: `apply` and `destroy` come in over HTTP from the program that stands in for it."""

    def __init__(self, gce: fakegce.FakeGce, gcs: fakegcs.FakeGcs, folder: Path, notice: float) -> None:
        self._gce, self._gcs = gce, gcs
        self._told = {PREEMPT_NOTICE: f"{notice:.0f}"}  # Google does not say it, so machines read it there
        self.file = folder / "cluster.yaml"
        self.file.write_text(
            "name: e2e\ncloud: gcp\nregion: us-central1\nproject: my-project\n"
            + POOLS.format(zone="us-central1-b", machine="n2-standard-8")
        )
        self._gce.set_quotas({"PREEMPTIBLE_CPUS": (99, 0), "N2_CPUS": (99, 0), "CPUS": (99, 0)}, "us-central1")
        self.environment: dict[str, str] = {
            **gce.environment,
            **gcs.environment,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SPOTRUN_HOME": str(folder / "home"),
        }

    async def terraform(self, request: web.Request) -> web.Response:
        """Words on the command line, and the stack's JSON where it is run."""
        asked = await request.json()
        stack, verb = asked["stack"], asked["words"][0]
        if verb == "apply" and "google_compute_instance_group_manager" in stack["resource"]:
            for written in stack["resource"]["google_storage_bucket_object"].values():
                self.store().put(written["name"], written["content"].encode())
            await asyncio.to_thread(self._gce.add_stack, stack)
        if verb == "destroy" and "google_compute_instance_group_manager" in stack["resource"]:
            await asyncio.to_thread(self._gce.remove_all)
        return web.json_response({})

    def listing(self) -> list[Listed]:
        return [
            Listed(
                m.name, m.id, m.metadata[POOL], m.zone, m.machine_type, m.market, {**m.metadata, **self._told}, m.due
            )
            for m in self._gce.machines()
            if (m.status == "RUNNING" or m.due is not None) and m.metadata.get(BUCKET)
        ]

    def size(self, pool: str) -> int:
        return self._gce.size(group("e2e", pool))

    def store(self) -> Store:
        with _set(self._gcs.environment):
            return Store(f"gs://{bucket(load_cluster(self.file), 'my-project')}")

    def left(self) -> list[str]:
        return [each.name for each in self._gce.machines()]


@contextlib.contextmanager
def aws(folder: Path, terraform: Tools, notice: float = NOTICE, machines: Sequence[str] = PROCESSES) -> Iterator[Aws]:
    """notice: seconds from it to a machine's end. machines: the program that plays them, as for `Mirror`."""
    with moto_server.running(notice=notice) as account:
        site = Aws(account, folder, tools.install_real_terraform(folder / "bin", terraform))
        with _machines(
            folder, "ec2", account.region, account.environment, site.listing, account.assign_address, machines
        ) as table:
            tools.install(folder / "bin", "aws", table)
            yield site


@contextlib.contextmanager
def gcp(folder: Path, notice: float = NOTICE, machines: Sequence[str] = PROCESSES) -> Iterator[Gcp]:
    """As `aws`."""
    name = "spotrun-e2e-my-project"
    times = fakegce.Times(notice=notice)
    with fakegce.running(times=times) as gce, fakegcs.running(name) as gcs:
        site = Gcp(gce, gcs, folder, notice)

        async def build() -> web.Application:
            app = web.Application(client_max_size=1 << 24)
            app.router.add_post("/", site.terraform)
            return app

        with (
            serving.serve(build) as (_, url),
            _machines(
                folder,
                "gce",
                "us-central1",
                {**gce.environment, **gcs.environment},
                site.listing,
                gce.assign_address,
                machines,
            ) as table,
        ):
            tools.install(folder / "bin", "gcp", table)
            tools.install_terraform(folder / "bin", url)
            yield site


@contextlib.contextmanager
def _machines(
    folder: Path,
    flavour: str,
    region: str,
    environment: Mapping[str, str],
    listing: Listing,
    assign: Callable[[str, str], None],
    machines: Sequence[str],
) -> Iterator[Path]:
    key = folder / "home" / "id_ed25519"
    key.parent.mkdir(parents=True)
    ensure_key(key)
    mirror = Mirror(folder / "mirror", flavour, region, key, environment, listing, assign, machines)
    try:
        yield mirror.table
    finally:
        mirror.close()


@contextlib.contextmanager
def _set(values: Mapping[str, str]) -> Iterator[None]:
    """The environment that obstore reads when a store is opened."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
