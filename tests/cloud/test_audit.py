"""What an operator may do in an account, and what of a cluster is left in it: asked of moto, and of a fake Google."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from botocore.exceptions import ClientError
from google.cloud import compute_v1

from spotrun.cloud import Left
from spotrun.cloud.aws import audit as amazon
from spotrun.cloud.aws.api import Clients
from spotrun.cloud.gcp import audit as google
from spotrun.errors import CloudError, CredentialsError
from spotrun.spec import load_cluster
from tests.fakes import gce as fakegce
from tests.fakes import moto_server, serving

pytestmark = pytest.mark.clouds
ROOT = Path(__file__).parents[2]
G5 = load_cluster(ROOT / "clusters/aws-g5.yaml")
L4 = load_cluster(ROOT / "clusters/gcp-l4.yaml")


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[moto_server.Moto]:
    with moto_server.running() as account:
        for name, value in account.environment.items():
            monkeypatch.setenv(name, value)
        yield account


def test_dry_runs_make_nothing(aws: moto_server.Moto) -> None:
    allowed, refused = amazon.permissions(G5)
    assert {"ec2:CreateVpc", "ec2:AllocateAddress", "ec2:CreateLaunchTemplate", "iam:GetRole"} <= set(allowed)
    assert refused == []
    clients, asked = Clients(aws.region), {}

    def note(params: dict[str, object], model: Any, **_: object) -> None:
        asked[model.name] = params

    clients.ec2.meta.events.register("provide-client-params.ec2.*", note)
    for _, attempt in amazon._attempts(clients, G5):
        with contextlib.suppress(ClientError):
            attempt()
    clients.close()
    assert len(asked) == 5
    assert all(params["DryRun"] for params in asked.values())


@pytest.mark.parametrize(
    ("code", "may"),
    [("DryRunOperation", True), ("UnauthorizedOperation", False), ("AccessDenied", False), ("NoSuchEntity", True)],
)
def test_what_an_answer_says_of_a_right(code: str, may: bool) -> None:
    def attempt() -> None:
        raise ClientError({"Error": {"Code": code, "Message": "said"}}, "CreateVpc")

    assert amazon._may(attempt) is may


def test_no_login_is_not_a_refusal() -> None:
    def attempt() -> None:
        raise ClientError({"Error": {"Code": "ExpiredToken", "Message": "said"}}, "CreateVpc")

    with pytest.raises(CredentialsError, match="expired"):
        amazon._may(attempt)


def test_what_carries_the_tag_on_aws(aws: moto_server.Moto) -> None:
    ec2 = aws.client("ec2")

    def tagged(kind: str, cluster: str = "g5") -> list[dict[str, object]]:
        return [{"ResourceType": kind, "Tags": [{"Key": "spotrun-cluster", "Value": cluster}]}]

    zone = f"{aws.region}a"
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16", TagSpecifications=tagged("vpc"))["Vpc"]["VpcId"]
    disk = ec2.create_volume(AvailabilityZone=zone, Size=100, TagSpecifications=tagged("volume"))["VolumeId"]
    ec2.create_volume(AvailabilityZone=zone, Size=100, TagSpecifications=tagged("volume", "another"))
    made = {"ImageId": aws.image(), "MinCount": 1, "MaxCount": 1, "InstanceType": "g5.2xlarge"}
    run = [ec2.run_instances(**made, TagSpecifications=tagged("instance"))["Instances"][0] for _ in range(2)]
    ec2.terminate_instances(InstanceIds=[run[1]["InstanceId"]])
    found = {each.name: each for each in amazon.left(G5)}
    assert found.keys() == {vpc, disk, run[0]["InstanceId"]}
    assert found[vpc] == Left("network", vpc, stays=True)
    assert found[disk].hourly == pytest.approx(100 * 0.08 / 730)
    assert found[run[0]["InstanceId"]].hourly == pytest.approx(1.212)
    assert amazon.disk_keys(G5) == []
    key = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    ours = {"TagSpecifications": tagged("volume"), "Encrypted": True, "KmsKeyId": key}
    ec2.create_volume(AvailabilityZone=zone, Size=30, **ours)
    assert amazon.disk_keys(G5) == [key]


@pytest.fixture
def google_says(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Google's Resource Manager. granted: what is allowed. unknown: what it cannot be asked about. gce: Compute."""
    state: dict[str, Any] = {"granted": set(google.WANTED), "unknown": set(), "status": 200}

    async def answer(request: web.Request) -> web.Response:
        asked = (await request.json())["permissions"]
        if request.path != "/v1/projects/my-project:testIamPermissions" or state["status"] != 200:
            return web.json_response({"error": {"message": "no"}}, status=state["status"])
        if set(asked) & state["unknown"]:
            return web.json_response({"error": {"message": "Permission is not valid for this resource."}}, status=400)
        granted = [each for each in asked if each in state["granted"]]
        return web.json_response({"permissions": granted} if granted else {})

    async def build() -> web.Application:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        return app

    with serving.serve(build) as (_, url), fakegce.running() as gce:
        for name, value in {**gce.environment, google.ENDPOINT: f"{url}/v1/"}.items():
            monkeypatch.setenv(name, value)
        state["gce"] = gce
        yield state


def test_permissions_in_a_project(google_says: dict[str, Any]) -> None:
    assert google.permissions(L4) == (list(google.WANTED), [])
    google_says["granted"] = set(google.WANTED) - {"iam.roles.create"}
    assert google.permissions(L4)[1] == ["iam.roles.create"]
    google_says["granted"] = set()
    assert google.permissions(L4) == ([], list(google.WANTED))


def test_one_permission_that_a_project_does_not_know(google_says: dict[str, Any]) -> None:
    """Google refuses the whole question then; the others are asked one by one."""
    google_says["unknown"] = {"iap.tunnelInstances.accessViaIAP"}
    google_says["granted"] = set(google.WANTED) - {"storage.buckets.create"}
    allowed, refused = google.permissions(L4)
    assert refused == ["storage.buckets.create"]
    assert len(allowed) == len(google.WANTED) - 2


def test_a_project_that_cannot_be_asked(google_says: dict[str, Any]) -> None:
    google_says["status"] = 403
    with pytest.raises(CloudError, match="403"):
        google.permissions(L4)


def test_the_provisioning_models_of_a_clusters_templates(google_says: dict[str, Any]) -> None:
    pools = (*L4.pools, L4.pools[0].model_copy(update={"name": "later", "market": "flex"}))
    for name in ("l4", "another"):
        google_says["gce"].add_cluster(L4.model_copy(update={"name": name, "pools": pools}))
    expected = {"head": "STANDARD", "later": "FLEX_START", "spot-a": "SPOT", "spot-b": "SPOT", "steady": "STANDARD"}
    assert google.models(L4) == sorted(expected.items())


def test_what_carries_the_label_in_a_project(google_says: dict[str, Any]) -> None:
    labels = {"spotrun-cluster": "l4"}
    assert google.left(L4) == []
    google_says["gce"]._methods.disks += [
        compute_v1.Disk(name="forgotten", zone="us-central1-a", size_gb=100, labels=labels),
        compute_v1.Disk(name="another-cluster", zone="us-central1-a", size_gb=100, labels={"spotrun-cluster": "l5"}),
    ]
    google_says["gce"]._methods.addresses += [compute_v1.Address(name="out", region="us-central1", labels=labels)]
    disk, address = google.left(L4)
    assert (disk.kind, disk.name, disk.stays) == ("disk", "forgotten", False)
    assert disk.hourly == pytest.approx(0.0137, rel=0.01)
    assert address == Left("address", "out", 0.005)
