"""A head acts on the cluster that its own machine's metadata names, and on no other, whatever the bucket describes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from spotrun.cloud.local import metadata
from spotrun.errors import SpotrunError
from spotrun.head.identity import ClusterIdentity, check
from spotrun.spec import ClusterSpec
from spotrun.store import Store, cluster_key
from tests.fakes import gcs, moto_server, serving

GCP: dict[str, Any] = {
    "name": "mine",
    "cloud": "gcp",
    "region": "us-central1",
    "project": "my-project",
    "pools": [{"name": "spot", "zone": "us-central1-b", "machine": "g2-standard-8"}],
}
AWS: dict[str, Any] = {
    "name": "mine",
    "cloud": "aws",
    "region": "us-east-1",
    "pools": [{"name": "spot", "zone": "us-east-1a", "machine": "g5.xlarge"}],
}
LOCAL: dict[str, Any] = {"name": "mine", "cloud": "local", "pools": [{"name": "spot", "zone": "local-a"}]}
ON_GCP = ClusterIdentity("mine", "gs://spotrun-mine-my-project", "gcp", "my-project", "us-central1")
ON_AWS = ClusterIdentity("mine", "s3://spotrun-mine-123456789012-us-east-1", "aws", "123456789012", "us-east-1")
HERE = ClusterIdentity("mine", "file:///state/bucket", "gcp", "local", "local")
OTHER_ZONE = {"name": "spot", "zone": "us-east1-b", "machine": "g2-standard-8"}
# own, what is described, and what is said of it; None: it is accepted
CASES: dict[str, tuple[ClusterIdentity, dict[str, Any], str | None]] = {
    "gcp": (ON_GCP, GCP, None),
    "gcp: its bucket named": (ON_GCP, GCP | {"bucket": ON_GCP.bucket}, None),
    "gcp: another name": (
        ON_GCP,
        GCP | {"name": "victim", "bucket": ON_GCP.bucket},
        "name is victim there, and mine in the machine's metadata",
    ),
    "gcp: another project": (
        ON_GCP,
        GCP | {"project": "victims", "bucket": ON_GCP.bucket},
        "project is victims there, and my-project in",
    ),
    "gcp: another region": (
        ON_GCP,
        GCP | {"region": "us-east1", "pools": [OTHER_ZONE]},
        "region is us-east1 there, and us-central1 in",
    ),
    "gcp: another bucket": (
        ON_GCP,
        GCP | {"bucket": "gs://victims"},
        "bucket is gs://victims there, and gs://spotrun-mine-my-project in",
    ),
    "gcp: another cloud": (ON_GCP, AWS, "cloud is aws there, and gcp in"),
    "gcp: no cloud": (ON_GCP, LOCAL, "cloud is local there, and gcp in"),
    "aws": (ON_AWS, AWS, None),
    "aws: another name": (ON_AWS, AWS | {"name": "victim"}, "name is victim there, and mine in"),
    "aws: another region": (
        ON_AWS,
        AWS | {"region": "us-west-2", "pools": [AWS["pools"][0] | {"zone": "us-west-2a"}], "bucket": ON_AWS.bucket},
        "region is us-west-2 there, and us-east-1 in",
    ),
    "aws: another account's bucket": (
        ClusterIdentity("mine", ON_AWS.bucket, "aws", "210987654321", "us-east-1"),
        AWS,
        "bucket is s3://spotrun-mine-210987654321-us-east-1 there, and s3://spotrun-mine-123456789012-us-east-1 in",
    ),
    "local": (HERE, LOCAL, None),
    "local: EC2's metadata": (ClusterIdentity("mine", HERE.bucket, "aws", "000000000000", "local"), LOCAL, None),
    "local: a folder for a bucket": (
        ClusterIdentity("mine", "/state/b", "gcp", "local", "local"),
        LOCAL | {"bucket": "/state/b"},
        None,
    ),
    "local: another folder": (
        HERE,
        LOCAL | {"bucket": "/victims"},
        "bucket is /victims there, and file:///state/bucket in",
    ),
    "local: another name": (HERE, LOCAL | {"name": "victim"}, "name is victim there, and mine in"),
    "local: a cloud": (HERE, GCP, "cloud is gcp there, and local in"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_description_of_another_cluster_is_refused(case: str) -> None:
    own, described, refusal = CASES[case]
    cluster = ClusterSpec.model_validate(described)
    if refusal is None:
        assert check(cluster, own) is cluster
        return
    with pytest.raises(SpotrunError) as raised:
        check(cluster, own)
    said = str(raised.value)
    assert refusal in said
    assert "clusters/mine/cluster.json describes another cluster than this head's" in said
    assert said.endswith("`make up` with the cluster file of mine writes it again")
    assert "\n" not in said


def facts(own: ClusterIdentity) -> metadata.Facts:
    about = {"spotrun-cluster": own.cluster, "spotrun-bucket": own.bucket, "spotrun-pool": "head"}
    zone = own.region + ("-b" if own.provider == "gcp" else "a")
    kind = "small"
    return metadata.Facts("h", "42", zone, own.region, kind, "127.0.0.1", "on-demand", about, account=own.account)


@pytest.fixture(
    params=["gce", pytest.param("ec2", marks=pytest.mark.clouds)],
)
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ClusterIdentity, Mapping[str, str]]]:
    """A head's machine of either cloud: what its metadata say, and the environment of its processes."""
    own, flavour = (ON_GCP, "gce") if request.param == "gce" else (ON_AWS, "ec2")
    subject = metadata.Subject(facts(own))

    async def build() -> web.Application:
        return metadata.build("gce" if flavour == "gce" else "ec2", lambda _: subject)

    with serving.serve(build) as (_, url):
        place = {"GCE_METADATA_HOST": url.removeprefix("http://")}
        if flavour == "ec2":
            place = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": url}
        with gcs.running(own.bucket[5:]) if flavour == "gce" else moto_server.running() as cloud:
            environment = dict(cloud.environment) | place
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            if isinstance(cloud, moto_server.Moto):
                cloud.client("s3").create_bucket(Bucket=own.bucket[5:])
            yield own, environment


def test_a_head_does_not_act_under_another_name(
    machine: tuple[ClusterIdentity, Mapping[str, str]], tmp_path: Path
) -> None:
    own, environment = machine
    store = Store(own.bucket, own.region)
    described = ClusterSpec.model_validate((GCP if own.provider == "gcp" else AWS) | {"name": "victim"})
    store.put(cluster_key("mine"), described.document().encode())
    done = subprocess.run(
        [sys.executable, "-m", "spotrun.cli", "head"],
        env={**os.environ, **environment, "SPOTRUN_CONTROL": str(tmp_path / "control")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert "name is victim there, and mine in the machine's metadata" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    written = store.list("clusters")
    assert "clusters/mine/hosts/head.json" in written, "an operator can look at it"
    assert json.loads(store.get("clusters/mine/hosts/head.json"))["node"] == "head"
    assert not [key for key in written if "victim" in key or (key.endswith("/head.json") and "/hosts/" not in key)]
    assert not [key for key in written if "/epochs/" in key]
