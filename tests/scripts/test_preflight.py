"""What is checked before Terraform makes anything: tools, credentials, zones, quotas, images, what cannot change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from botocore.exceptions import ClientError

from scripts import cloud_site, preflight, stacks
from scripts import site as sites
from scripts.stacks import Place
from spotrun.cloud import Shortfall, asking
from spotrun.cloud.aws import api
from spotrun.errors import CloudError, CredentialsError, QuotaError, SpotrunError
from spotrun.store import (
    cluster_key,
)
from tests.fakes.moto_server import Moto
from tests.scripts.cloud_files import AWS, GCP, VPC, Say, at, bucket, calls, file, images, known, spec

if TYPE_CHECKING:
    from tests.fakes.gce import FakeGce


def check_quotas(folder: Path) -> None:
    with asking(spec(folder)) as ask:
        preflight.check_quotas(spec(folder), ask)


@pytest.mark.parametrize(
    ("scripts", "said"),
    [
        ({}, "there is no `terraform` on this machine: install Terraform 1.10 or newer"),
        (
            {"terraform": "echo Terraform v1.9.8", "node": "echo v20.0.0"},
            "is version 1.9; spotrun needs Terraform 1.10",
        ),
        ({"terraform": "echo Terraform v1.11.4"}, "there is no `node` on this machine: install Node.js 20 or newer"),
        ({"terraform": "echo Terraform v1.11.4", "node": "echo v18.20.2"}, "is version 18.20; CDKTF needs Node.js 20"),
        ({"terraform": "exit 1", "node": "echo v20.0.0"}, "is version 0; spotrun needs Terraform 1.10 or newer"),
        ({"terraform": "echo Terraform v1.11.4", "node": "echo v20.0.0"}, "there is no `aws` on this machine"),
        (
            {"terraform": "echo Terraform v1.11.4", "node": "echo v20.0.0", "aws": "exit 0"},
            "there is no `session-manager-plugin` on this machine",
        ),
    ],
)
def test_missing_tools(scripts: dict[str, str], said: str, programs: Say, tmp_path: Path) -> None:
    programs(**scripts)
    with pytest.raises(SpotrunError) as caught:
        preflight.check_tools(spec(tmp_path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_terraform(programs: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tofu="echo OpenTofu v1.9.0", node="echo v20.0.0")
    monkeypatch.setenv("TERRAFORM", "tofu")
    stacks.check_tools()


def test_no_credentials(aws: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command reports that before it runs Terraform."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    described, path = spec(tmp_path), file(tmp_path)
    for ask in (
        lambda: sites.site(described, path).up(),
        lambda: sites.take_down(sites.site(described, path), force=False),
        lambda: sites.site(described, path).plan(),
        lambda: sites.site(described, path).access(),
    ):
        with pytest.raises(CredentialsError) as caught:
            ask()
        assert "\n" not in str(caught.value)
        assert "sign in" in str(caught.value)
    assert calls(tmp_path) == []


def test_a_zone_that_does_not_offer_a_machine_type_on_aws(aws: Moto, tmp_path: Path) -> None:
    """Zone e of us-east-1 has no G5. The error comes before quotas are read, and before anything is made."""
    preflight.check_offers(spec(tmp_path), file(tmp_path))
    text = AWS.replace("us-east-1b", "us-east-1e").replace("machine: g5.2xlarge, max", "machine: p9.big, max")
    with pytest.raises(SpotrunError) as caught:
        at(tmp_path, text).up()
    one, other = str(caught.value).splitlines()
    assert "pool spot: zone us-east-1a does not offer machine type p9.big; no zone of the region does" in one
    assert "pool steady: zone us-east-1e does not offer machine type g5.2xlarge; zones of the region that do: " in other
    assert other.endswith("us-east-1a, us-east-1b, us-east-1c, us-east-1d, us-east-1f")
    assert calls(tmp_path) == []


def test_a_zone_that_does_not_offer_a_type_on_google(gce: FakeGce, tmp_path: Path) -> None:
    t4 = "- {name: t4, zone: us-central1-b, machine: n1-standard-4, accelerator: {type: nvidia-tesla-t4}}\n"
    described, path = spec(tmp_path, GCP + t4), file(tmp_path, GCP + t4)
    small = {"e2-small", "g2-standard-8", "n1-standard-4"}
    preflight.check_offers(described, path)
    gce.set_offers(us_central1_a=small, us_central1_b=small | {"nvidia-tesla-t4"})
    preflight.check_offers(described, path)
    gce.set_offers(
        us_central1_a=small - {"g2-standard-8"},
        us_central1_b=small,
        us_central1_f=small | {"nvidia-tesla-t4"},
        us_east1_b=small,
    )
    with pytest.raises(SpotrunError) as caught:
        preflight.check_offers(described, path)
    one, other = str(caught.value).splitlines()
    g2 = "zone us-central1-a does not offer machine type g2-standard-8"
    assert one.endswith(f"pool spot: {g2}; zones of the region that do: us-central1-b, us-central1-f")
    gpu = "zone us-central1-b does not offer accelerator type nvidia-tesla-t4"
    assert other.endswith(f"pool t4: {gpu}; zones of the region that do: us-central1-f")
    gce.fail(403, reason="forbidden", message="Required 'compute.machineTypes.get' permission for 'x'")
    with pytest.raises(CredentialsError, match=r"type .* in us-central1-.: .*a role with compute\.machineTypes\.get"):
        preflight.check_offers(described, path)


def test_a_quota_that_is_too_small(aws: Moto, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a single machine: an error. For all of them: a word, because fewer may do."""
    aws.quota("L-3819A6DF", 20)
    aws.quota("L-DB2E81BA", 64)
    check_quotas(tmp_path)
    assert capsys.readouterr().err.count("pool spot: quota ") == 1
    aws.quota("L-3819A6DF", 7)
    aws.quota("L-DB2E81BA", 0)
    with pytest.raises(QuotaError) as caught:
        check_quotas(tmp_path)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["pool spot", "pool steady"]
    assert "us-east-1 is 7; the pool's max takes 32: ask for more at console.aws.amazon.com/servicequotas" in lines[0]
    with pytest.raises(QuotaError):
        at(tmp_path).up()
    assert calls(tmp_path) == []


def test_a_quota_that_is_too_small_for_the_head(tmp_path: Path) -> None:
    """It is in no pool of the cluster file, and has no `max`."""
    with pytest.raises(QuotaError) as caught:
        preflight.check_quotas(spec(tmp_path), lambda _: [Shortfall("head", "vCPUs", 1, 2)])
    where = "console.aws.amazon.com/servicequotas"
    assert str(caught.value) == f"head: quota vCPUs in us-east-1 is 1; its machine takes 2: ask for more at {where}"


def test_a_quota_that_the_cloud_may_not_apply_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check_quotas(spec(tmp_path), lambda _: [Shortfall("spot", "LOCAL_SSD", 500, 6000, certain=False)])
    assert "pool spot: quota LOCAL_SSD in us-east-1 is 500; the pool's max takes 6000" in capsys.readouterr().err


def test_disks_that_auto_scaling_may_be_unable_to_encrypt(
    aws: Moto, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word, and not an error: nobody but the key's policy knows."""
    preflight.check_disk_key(spec(tmp_path))
    assert capsys.readouterr().err == ""
    key = aws.client("kms").create_key()["KeyMetadata"]["Arn"]
    aws.client("ec2").modify_ebs_default_kms_key_id(KmsKeyId=key)
    preflight.check_disk_key(spec(tmp_path))
    said = capsys.readouterr().err
    assert said.startswith(f"spotrun: the account's default key for disks in us-east-1 is {key}, not alias/aws/ebs. ")
    assert "allow role AWSServiceRoleForAutoScaling" in said
    monkeypatch.setattr(api.Clients, "ec2", property(lambda _: _denied()))
    preflight.check_disk_key(spec(tmp_path))
    assert capsys.readouterr().err == ""


def _denied() -> NoReturn:
    raise ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "GetEbsDefaultKmsKeyId")


def test_a_wrong_cluster_file_never_reaches_terraform(aws: Moto, tmp_path: Path) -> None:
    with pytest.raises(SpotrunError, match="max"):
        sites.load(file(tmp_path, AWS.replace("max: 4", "max: 0")))
    with pytest.raises(SpotrunError, match="cloud local has no plan"):
        sites.site(spec(tmp_path, "name: c\ncloud: local\npools:\n- {name: p, zone: local-a}\n"), file(tmp_path)).plan()
    assert calls(tmp_path) == []


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Place("gcp", "us-east1", "gs://b", "p"), []),
        (Place("gcp", "us-west1", "gs://b", "p"), ["region is us-west1 and was us-east1"]),
        (Place("gcp", "us-east1", "gs://other", "p"), ["bucket is gs://other and was gs://b"]),
        (Place("gcp", "us-east1", "gs://b", "q"), ["project is q and was p"]),
        (
            Place("aws", "us-east-1", "s3://b"),
            [
                *("cloud is aws and was gcp", "region is us-east-1 and was us-east1"),
                *("bucket is s3://b and was gs://b", "project is None and was p"),
            ],
        ),
    ],
)
def test_moves(wanted: Place, said: list[str]) -> None:
    assert cloud_site.moves(Place("gcp", "us-east1", "gs://b", "p"), wanted) == said


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ("", None),
        (VPC, None),
        (
            known("google_storage_bucket", name="b", location="US-EAST1", project="p"),
            Place("gcp", "us-east1", "gs://b", "p"),
        ),
        (known("aws_s3_bucket", bucket="b", region="us-east-1"), Place("aws", "us-east-1", "s3://b")),
        (
            known("aws_s3_bucket", bucket="b", region="us-east-1").replace(
                '"attributes": {}', '"attributes": {"account_id": "1"}'
            ),
            Place("aws", "us-east-1", "s3://b", account="1"),
        ),
    ],
)
def test_the_place_of_a_cluster_in_terraforms_state(
    state: str, place: Place | None, aws: Moto, made: stacks.Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE", state)
    assert made.place() == place


def test_a_state_that_cannot_be_read(aws: Moto, made: stacks.Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for an empty one, which would have everything made once more."""
    monkeypatch.setenv("REFUSE", "state")
    with pytest.raises(CloudError, match="terraform state pull of stack c-pools failed, see above"):
        made.exists("pools")


@pytest.mark.parametrize("where", [{"bucket": "mine", "region": "us-east-1"}, {"region": "us-west-2"}])
def test_a_cluster_does_not_move(
    where: dict[str, str], aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terraform would find nothing in the new place, and forget the machines in the old one: `down` is no better."""
    monkeypatch.setattr(cloud_site, "BOOT", 0.0)  # not to wait for a head if it goes on
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    standing = {"bucket": bucket(tmp_path).url.removeprefix("s3://"), **where}
    monkeypatch.setenv("STATE", known("aws_s3_bucket", **standing))
    for code in ("L-3819A6DF", "L-DB2E81BA"):
        aws.quota(code, 64)
    asks: tuple[Callable[[], Any], ...] = (
        lambda: at(tmp_path).up(),
        lambda: sites.take_down(at(tmp_path), force=True, everything=True),
        lambda: at(tmp_path).plan(),
    )
    for ask in asks:
        with pytest.raises(
            SpotrunError, match=r"(region|bucket) is .* and was .*: a cluster does not move\. .* ALL=1`"
        ):
            ask()
    assert {call.split()[1] for call in calls(tmp_path)} == {"init", "state"}


def test_another_account_is_refused(
    aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that the cluster file names is the same in every account. `down` would forget the machines."""
    monkeypatch.setattr(cloud_site, "BOOT", 0.0)  # not to wait for a head if it goes on
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    state = json.loads(known("aws_s3_bucket", bucket="mine", region="us-east-1"))
    state["resources"][0]["instances"][0]["attributes"]["account_id"] = "111111111111"
    monkeypatch.setenv("STATE", json.dumps(state))
    for code in ("L-3819A6DF", "L-DB2E81BA"):
        aws.quota(code, 64)
    aws.client("s3").create_bucket(Bucket="mine")
    text = AWS + "bucket: s3://mine\n"
    asks: tuple[Callable[[], Any], ...] = (
        lambda: at(tmp_path, text).up(),
        lambda: sites.take_down(at(tmp_path, text), force=True),
        lambda: sites.take_down(at(tmp_path, text), force=True, everything=True),
        lambda: at(tmp_path, text).plan(),
    )
    for ask in asks:
        with pytest.raises(SpotrunError, match=r"signed in to account 123456789012, and account 111111111111 has the"):
            ask()
    assert {call.split()[1] for call in calls(tmp_path)} == {"init", "state"}


def test_another_region_is_refused_before_terraform_is_asked(aws: Moto, tmp_path: Path) -> None:
    """As on Google, whose buckets' names do not tell the region."""
    elsewhere = spec(tmp_path, AWS.replace("us-east-1", "us-west-2"))
    bucket(tmp_path).put(cluster_key("c"), elsewhere.document().encode())
    with pytest.raises(SpotrunError, match="region is us-east-1 and was us-west-2: a cluster does not move"):
        at(tmp_path).up()
    assert calls(tmp_path) == []


def test_up_without_an_image(aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before Terraform makes anything."""
    monkeypatch.setattr(cloud_site, "BOOT", 0.0)  # not to wait for a head if it goes on
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    (made.folder / "stacks/c-pools/cdk.tf.json").write_text(json.dumps(images(name="none-*", owners=["self"])))
    for code in ("L-3819A6DF", "L-DB2E81BA"):
        aws.quota(code, 64)
    said = r"there is no image none-\* for x86_64 in us-east-1 of this account: `make image CLUSTER=.*c.yaml` bakes one"
    with pytest.raises(SpotrunError, match=said):
        at(tmp_path).up()
    assert {call.split()[1] for call in calls(tmp_path)} == {"init", "state"}


def test_images_on_aws(aws: Moto, tmp_path: Path) -> None:
    image, described, path = aws.image("mine-1"), spec(tmp_path), file(tmp_path)
    named = described.model_copy(update={"image": "mine-2"})
    for there in (images(name="mine-*", owners=["self"]), images(name="mine-1", owners=["self"]), images(name=image)):
        preflight.check_images(described, there, path)
    for absent, about, said in (
        (
            images(name="mine-2", owners=["self"]),
            named,
            "no image mine-2 for x86_64 .*: fix key image, or leave it",
        ),
        (
            images(name="ami-0123456789abcdef0"),
            named,
            "no image ami-0123456789abcdef0 for x86_64 in us-east-1: fix",
        ),
        (images("arm64", "mine-1", owners=["self"]), described, "for arm64 .*`make image .*` bakes none for ARM"),
    ):
        with pytest.raises(SpotrunError, match=said):
            preflight.check_images(about, absent, path)


def endpoints(*services: str) -> dict[str, Any]:
    """The part of AWS's stack pools that is about endpoints."""
    made = {name: {"service_name": f"com.amazonaws.us-east-1.{name}"} for name in services}
    return {"resource": {"aws_vpc_endpoint": made}}


AB, BC = frozenset({"z-a", "z-b"}), frozenset({"z-b", "z-c"})


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"x": AB, "y": AB, "other": BC}, ""),
        (
            {"x": AB, "y": BC},
            "zone z-a has no endpoint of y, and network.nat is false: set head.zone to a zone with all endpoints (z-b),"
            " or network.nat to true",
        ),
        (
            {"other": AB},
            "zone z-a has no endpoint of x, y, and network.nat is false: no zone of the region has all endpoints, so"
            " set network.nat to true",
        ),
    ],
    ids=["the zone has all", "another zone has all", "the region does not have them"],
)
def test_endpoints_that_the_heads_zone_lacks(known: dict[str, frozenset[str]], said: str) -> None:
    assert preflight.missing_endpoints("z-a", ["x", "y"], known) == said


def test_endpoints_on_aws(aws: Moto, tmp_path: Path) -> None:
    described, path = spec(tmp_path), file(tmp_path)
    preflight.check_endpoints(described, {}, path)
    preflight.check_endpoints(described, endpoints("ec2", "ssm"), path)


def test_up_without_an_endpoint(
    aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told before Terraform makes anything."""
    monkeypatch.setattr(cloud_site, "BOOT", 0.0)  # not to wait for a head if it goes on
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    aws.image("mine-1")
    document = images(name="mine-1", owners=["self"]) | endpoints("nothing")
    (made.folder / "stacks/c-pools/cdk.tf.json").write_text(json.dumps(document))
    for code in ("L-3819A6DF", "L-DB2E81BA"):
        aws.quota(code, 64)
    with pytest.raises(SpotrunError, match=r"no endpoint of com\.amazonaws\.us-east-1\.nothing"):
        at(tmp_path).up()
    assert {call.split()[1] for call in calls(tmp_path)} == {"init", "state"}


def test_images_on_google(gce: FakeGce, tmp_path: Path) -> None:
    def taking(image: str) -> dict[str, Any]:
        family, _, name = image.rpartition("/")
        asked = {"project": "my-project", family or "name": name}
        return {"data": {"google_compute_image": {"image": asked}}}

    described, path = spec(tmp_path, GCP), file(tmp_path, GCP)
    for there in ("family/spotrun", "spotrun-1"):
        preflight.check_images(described, taking(there), path)
    gce.set_images(**{"other-1": "other"})
    for absent in ("family/spotrun", "spotrun-1"):
        said = f"no image projects/my-project/global/images/{absent}: `make image CLUSTER=.*c.yaml` bakes one"
        with pytest.raises(SpotrunError, match=said):
            preflight.check_images(described, taking(absent), path)
    gce.fail(403, reason="forbidden", message="Required 'compute.images.get' permission for 'x'")
    with pytest.raises(CredentialsError, match=r"image projects/.*/other-1: .*a role with compute\.images\.get"):
        preflight.check_images(described, taking("other-1"), path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", []),
        ("max: 4", []),
        ("network: {nat: false}", ["network.nat"]),
        ("network: {cidr: 10.9.0.0/16}", ["network.cidr"]),
        ("zone: us-east-1a", ["zone us-east-1b is not used any more"]),
        ("head: {zone: us-east-1b}", ["head.zone is us-east-1b and was us-east-1a"]),
    ],
)
def test_changes_that_a_cluster_that_is_up_cannot_take(change: str, said: list[str], tmp_path: Path) -> None:
    text = {
        "": AWS,
        "max: 4": AWS.replace("max: 4", "max: 8"),
        "zone: us-east-1a": AWS.replace("us-east-1b", "us-east-1a"),
    }.get(change, f"{AWS}{change}\n")
    assert cloud_site.rebuilds(spec(tmp_path), spec(tmp_path, text)) == said


LIMITS: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "nothing changes": (AWS, "max: 4", "max: 4", {}),
    "a pool may have more machines": (AWS, "max: 4", "max: 8", {}),
    "a pool may have fewer machines": (AWS, "max: 4", "max: 2", {"spot": 2}),
    "a pool may have fewer machines on Google Cloud, where only the head counts them": (GCP, "max: 4", "max: 2", {}),
    "a pool has another name": (AWS, "name: spot", "name: other", {"spot": 0}),
    "a pool gets another market": (AWS, "max: 4", "max: 4, market: on-demand", {"spot": 0}),
    "a pool gets another zone on Google Cloud": (GCP, "us-central1-a", "us-central1-b", {"spot": 0}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_how_many_machines_a_change_leaves(name: str, tmp_path: Path) -> None:
    text, old, new, expected = LIMITS[name]
    assert cloud_site.limits(spec(tmp_path, text), spec(tmp_path, text.replace(old, new, 1))) == expected


def test_up_refuses_what_cannot_change(aws: Moto, tmp_path: Path) -> None:
    bucket(tmp_path).put(cluster_key("c"), spec(tmp_path).document().encode())
    changed = AWS + "network: {nat: false}\n"
    with pytest.raises(
        SpotrunError, match=r"network\.nat: this cannot change while the cluster is up; run `make down CLUSTER="
    ):
        at(tmp_path, changed).up()
    assert calls(tmp_path) == []
