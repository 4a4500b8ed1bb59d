"""Checks around Terraform, and their messages: tools, quotas, jobs that still run, checkpoints in the bucket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from scripts import cloud_site, preflight, stacks
from scripts import site as sites
from scripts.ssh import Unreachable
from scripts.stacks import Place
from scripts.transports import Iap, Ssm
from spotrun.cloud import asking
from spotrun.errors import CloudError, CredentialsError, QuotaError, SpotrunError, StoreError
from spotrun.spec import ClusterSpec
from spotrun.spec.names import bucket_url
from spotrun.store import (
    Store,
    checkpoint_key,
    cluster_key,
    head_key,
    host_key,
    log_key,
    queue_key,
    replaced_key,
    unfit_key,
    up_key,
)
from tests.fakes import moto_server
from tests.fakes.moto_server import Moto
from tests.helpers import wait_for

if TYPE_CHECKING:
    from tests.fakes.gce import FakeGce

AWS = """
name: c
cloud: aws
region: us-east-1
pools:
- {name: spot, zone: us-east-1a, machine: g5.2xlarge, max: 4}
- {name: steady, zone: us-east-1b, machine: g5.2xlarge, market: on-demand, max: 1}
"""
GCP = """
name: c
cloud: gcp
project: my-project
region: us-central1
pools:
- {name: spot, zone: us-central1-a, machine: g2-standard-8, max: 4}
"""
# A program instead of Terraform, which only notes what it is asked to do.
TERRAFORM = """
[ "$1" = version ] && echo "Terraform v1.11.4" || echo "$(basename "$PWD") $*" >> "$CALLS"
[ "$1 $REFUSE" = "$REFUSE $1" ] && { echo "no way" >&2; exit 1; }
[ "$1" = state ] && [ -n "$STATE" ] && echo "$STATE"
[ "$1" = plan ] && exit "${PLAN:-0}"
exit 0
"""
# What Terraform knows once stack base has been begun.
VPC = '{"resources": [{"mode": "managed", "type": "aws_vpc", "name": "x", "instances": [{"attributes": {}}]}]}'
Say = Callable[..., None]


@pytest.fixture(scope="module")
def account() -> Iterator[Moto]:
    with moto_server.running() as aws:
        yield aws


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """An empty PATH, and a function that puts programs on it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("TERRAFORM", raising=False)

    def put(**scripts: str) -> None:
        for name, script in scripts.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
            path.chmod(0o755)

    return put


@pytest.fixture
def aws(account: Moto, programs: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Moto:
    """An account, an operator's credentials, and all tools. `TERRAFORM` is in the place of Terraform."""
    for name, value in account.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    programs(terraform=TERRAFORM, node="echo v20.1.0", aws="exit 1", session_manager_plugin="exit 0")
    client = account.client("s3")
    bucket = bucket_url(spec(tmp_path), moto_server.ACCOUNT).removeprefix("s3://")
    client.create_bucket(Bucket=bucket)
    for item in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        client.delete_object(Bucket=bucket, Key=item["Key"])
    return account


@pytest.fixture
def made(tmp_path: Path) -> stacks.Stacks:
    """Stacks as if they had been synthesized."""
    for name in ("c-base", "c-pools"):
        (tmp_path / "stacks" / name).mkdir(parents=True)
    return stacks.Stacks("c", tmp_path)


def file(folder: Path, text: str = AWS) -> str:
    path = folder / "c.yaml"
    path.write_text(text)
    return str(path)


def spec(folder: Path, text: str = AWS) -> ClusterSpec:
    return sites.load(file(folder, text))


def at(folder: Path, text: str = AWS) -> sites.Site:
    return sites.of_file(file(folder, text))


def bucket(folder: Path) -> Store:
    return Store(bucket_url(spec(folder), moto_server.ACCOUNT), "us-east-1")


def check_quotas(folder: Path) -> None:
    with asking(spec(folder)) as ask:
        preflight.check_quotas(spec(folder), ask)


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


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


@pytest.fixture
def gce(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGce]:
    from tests.fakes import gce  # not at the top: Google's library takes seconds to import

    with gce.running() as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        yield fake


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
    """For a single machine: an error. For all of them: a word, since fewer may do."""
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


def test_a_wrong_cluster_file_never_reaches_terraform(aws: Moto, tmp_path: Path) -> None:
    with pytest.raises(SpotrunError, match="max"):
        sites.load(file(tmp_path, AWS.replace("max: 4", "max: 0")))
    with pytest.raises(SpotrunError, match="cloud local has no plan"):
        sites.site(spec(tmp_path, "name: c\ncloud: local\npools:\n- {name: p, zone: local-a}\n"), file(tmp_path)).plan()
    assert calls(tmp_path) == []


def test_not_up(aws: Moto, tmp_path: Path) -> None:
    with pytest.raises(SpotrunError, match="cluster c is not up; `make up CLUSTER="):
        at(tmp_path).access()


def test_no_bucket(aws: Moto, tmp_path: Path) -> None:
    """As before the first `make up`."""
    other = spec(tmp_path, AWS.replace("name: c", "name: other"))
    with pytest.raises((StoreError, SpotrunError), match="other"):
        sites.site(other, file(tmp_path)).access()


def test_logs_can_be_told_from_checkpoints(aws: Moto, tmp_path: Path) -> None:
    """By the tag that the bucket's rule for old logs looks for."""
    store = bucket(tmp_path)
    store.put(log_key("job-1", 1, "i-1", 0), b"x")
    store.put(checkpoint_key("job-1", 1), b"x")
    client, name = aws.client("s3"), store.url.removeprefix("s3://")
    tags = {key: client.get_object_tagging(Bucket=name, Key=key)["TagSet"] for key in store.list("jobs")}
    assert tags == {
        log_key("job-1", 1, "i-1", 0): [{"Key": "spotrun-kind", "Value": "log"}],
        checkpoint_key("job-1", 1): [],
    }


def test_down_refuses_while_jobs_run(aws: Moto, tmp_path: Path) -> None:
    """Also when the head is out of reach: the bucket has the list."""
    bucket(tmp_path).put(queue_key("c"), b'["digits-1", "digits-2"]')
    with pytest.raises(SpotrunError, match=r"not ended yet: digits-1, digits-2; `make stop CLUSTER=.* FORCE=1`"):
        sites.take_down(at(tmp_path), force=False)
    bucket(tmp_path).put(queue_key("c"), b"{")
    with pytest.raises(SpotrunError, match="its queue in the bucket is broken"):
        sites.take_down(at(tmp_path), force=False)
    assert not any("destroy" in call for call in calls(tmp_path))


def test_checkpoints_are_never_deleted(aws: Moto, tmp_path: Path) -> None:
    store = bucket(tmp_path)
    for job in range(12):
        store.put(checkpoint_key(f"job-{job:02d}", 7), b"{}")
    with pytest.raises(SpotrunError, match=r"holds checkpoints of job-00, .*job-09 and 2 more, which spotrun never"):
        sites.take_down(at(tmp_path), force=True, everything=True)
    assert not any("destroy" in call for call in calls(tmp_path))
    assert store.exists(checkpoint_key("job-11", 7))


def test_down(aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools go and what pointed to them; then, with ALL=1, the rest."""
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)  # it is slow, and has tests of its own
    store = bucket(tmp_path)
    own = (head_key("c"), replaced_key("c"), host_key("c", "head"), host_key("c", "i-1"), unfit_key("c", "i-1"))
    for key in (*own, "jobs/job-1/state.json"):
        store.put(key, b"{}")
    said = sites.take_down(at(tmp_path), force=False)
    assert said.startswith(
        "cluster c is down; its network and its bucket stay, s3://spotrun-c-123456789012-us-east-1; "
    )
    assert store.list("") == ["jobs/job-1/state.json"]
    assert [call for call in calls(tmp_path) if "destroy" in call] == [
        "c-pools destroy -input=false -auto-approve -refresh=false -no-color"
    ]
    assert sites.take_down(at(tmp_path), force=False, everything=True) == "nothing is left of cluster c"
    assert store.list("") == []
    assert [call.split()[0] for call in calls(tmp_path) if "destroy" in call] == ["c-pools", "c-pools", "c-base"]


@pytest.fixture
def machine(aws: Moto) -> Iterator[str]:
    """A machine of the cluster, made here or elsewhere."""
    tags = [{"Key": "spotrun-cluster", "Value": "c"}, {"Key": "spotrun-pool", "Value": "spot"}]
    client = aws.client("ec2")
    made = client.run_instances(
        ImageId=aws.image("spotrun-left"),
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )["Instances"][0]["InstanceId"]
    yield made
    client.terminate_instances(InstanceIds=[made])


def test_up_deletes_what_gone_machines_have_left(
    aws: Moto, made: stacks.Stacks, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    monkeypatch.setattr(cloud_site, "BOOT", 0.0)  # no head comes up here
    monkeypatch.setenv("STATE", VPC)
    aws.image("spotrun-up")
    (made.folder / "stacks/c-pools/cdk.tf.json").write_text(json.dumps(images(owners=["self"])))
    for code in ("L-3819A6DF", "L-DB2E81BA"):
        aws.quota(code, 64)
    store = bucket(tmp_path)
    stay = [host_key("c", "head"), host_key("c", machine), unfit_key("c", machine), "jobs/job-1/state.json"]
    for key in (*stay, host_key("c", "i-gone"), unfit_key("c", "i-gone")):
        store.put(key, b"{}")
    with pytest.raises(Unreachable, match="the head of cluster c does not come up"):
        at(tmp_path).up()
    assert [call.split()[:2] for call in calls(tmp_path) if "apply" in call] == [
        ["c-base", "apply"],
        ["c-pools", "apply"],
    ]
    assert store.list("") == sorted(stay)


@pytest.mark.parametrize(("name", "held"), [("c--spot", True), ("c--head", False)])
def test_up_without_a_head_holds_the_queue(
    name: str, held: bool, aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a `down` that was broken off: Terraform still has some of the cluster, but nothing runs a job."""
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    monkeypatch.setattr(cloud_site, "BOOT", 0.0)  # no head comes up here
    monkeypatch.setenv("STATE", known("aws_autoscaling_group", name=name))
    aws.image("spotrun-up")
    (made.folder / "stacks/c-pools/cdk.tf.json").write_text(json.dumps(images(owners=["self"])))
    for code in ("L-3819A6DF", "L-DB2E81BA"):
        aws.quota(code, 64)
    store = bucket(tmp_path)
    store.put(queue_key("c"), b'{"jobs": ["job-1"]}')
    with pytest.raises(Unreachable, match="the head of cluster c does not come up"):
        at(tmp_path).up()
    assert store.exists(up_key("c")) == held


def test_down_that_finds_machines_left(
    aws: Moto, made: stacks.Stacks, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another checkout, whose state knows nothing: what leads to the cluster stays."""
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    store = bucket(tmp_path)
    store.put(head_key("c"), b"{}")
    with pytest.raises(CloudError, match=rf"still has machines \({machine}\), and Terraform knows nothing of them"):
        sites.take_down(at(tmp_path), force=True)
    assert store.exists(head_key("c"))


def test_up_of_a_cluster_that_another_checkout_made(
    aws: Moto, made: stacks.Stacks, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    for code in ("L-3819A6DF", "L-DB2E81BA"):
        aws.quota(code, 64)
    with pytest.raises(
        SpotrunError, match=r"is up, but Terraform knows nothing of it here: its state is in .*second cluster"
    ):
        at(tmp_path).up()
    assert not any("apply" in call for call in calls(tmp_path))


def test_what_users_put_into_the_bucket_stays(aws: Moto, tmp_path: Path) -> None:
    bucket(tmp_path).put("data/train.parquet", b"x")
    with pytest.raises(SpotrunError, match=r"holds what spotrun did not write \(data/train.parquet\), which spotrun"):
        sites.take_down(at(tmp_path), force=True, everything=True)


def test_down_continues_after_an_interruption(
    aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket went, the network did not."""
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    aws.client("s3").delete_bucket(Bucket=bucket(tmp_path).url.removeprefix("s3://"))
    assert "nothing is left" in sites.take_down(at(tmp_path), force=False, everything=True)


def test_terraform_that_could_not_save(made: stacks.Stacks, aws: Moto, tmp_path: Path) -> None:
    (tmp_path / "stacks" / "c-base" / "errored.tfstate").touch()
    with pytest.raises(CloudError, match=r"could not save its state of stack c-base.* state push errored.tfstate"):
        made.apply()
    assert not any("apply" in call for call in calls(tmp_path))


def test_control_c_lets_terraform_save(programs: Say, made: stacks.Stacks, tmp_path: Path) -> None:
    """It stops in good order, and is waited for."""
    saving = "trap 'sleep 0.5; touch saved; exit 1' INT; touch started; while :; do sleep 0.05; done"
    programs(terraform=f'[ "$1" = init ] && exit 0\n[ "$1" = version ] && exit 0\n{saving}')
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    code += "from scripts.stacks import Stacks; from pathlib import Path;"
    code += f"Stacks('c', Path({str(tmp_path)!r})).apply()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    folder = tmp_path / "stacks" / "c-base"
    wait_for((folder / "started").exists, what="terraform's start")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert "Terraform stops and saves what it knows" in said
    assert (folder / "saved").exists()


def test_terraform_that_fails(aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSE", "init")
    with pytest.raises(CloudError, match="terraform init of stack c-base failed"):
        made.apply()
    monkeypatch.setenv("REFUSE", "apply")
    with pytest.raises(CloudError, match="terraform apply of stack c-base failed, see above; what it has done stays"):
        made.apply()
    assert not any(call.startswith("c-pools") for call in calls(tmp_path))


@pytest.mark.parametrize(
    ("state", "code", "changes"),
    [("", "2", True), ("", "0", False), (VPC, "0", False), (VPC, "2", True)],
)
def test_plan(
    state: str,
    code: str,
    changes: bool,
    aws: Moto,
    made: stacks.Stacks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pools look up things of the base: they can be planned once it exists."""
    monkeypatch.setenv("STATE", state)
    monkeypatch.setenv("PLAN", code)
    assert made.plan() == changes
    planned = [call.split()[0] for call in calls(tmp_path) if call.split()[1] == "plan"]
    assert planned == (["c-base"] if changes and not state else ["c-base", "c-pools"])


def known(type: str, **attributes: str) -> str:
    """A state as `terraform state pull` prints it."""
    read = {"mode": "data", "type": "aws_caller_identity", "name": "account", "instances": [{"attributes": {}}]}
    made = {"mode": "managed", "type": type, "name": "x", "instances": [{"attributes": attributes}]}
    return json.dumps({"version": 4, "resources": [read, made]}, indent=2)


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


def test_another_region_is_refused_before_terraform_is_asked(aws: Moto, tmp_path: Path) -> None:
    """As on Google, whose buckets' names do not tell the region."""
    elsewhere = spec(tmp_path, AWS.replace("us-east-1", "us-west-2"))
    bucket(tmp_path).put(cluster_key("c"), elsewhere.document().encode())
    with pytest.raises(SpotrunError, match="region is us-east-1 and was us-west-2: a cluster does not move"):
        at(tmp_path).up()
    assert calls(tmp_path) == []


def images(architecture: str = "x86_64", name: str = "spotrun-*", **more: Any) -> dict[str, Any]:
    """What of AWS's stack pools is about images."""
    wanted = {"image-id" if name.startswith("ami-") else "name": [name], "architecture": [architecture]}
    filters = [{"name": key, "values": values} for key, values in wanted.items()]
    return {"data": {"aws_ami": {"image": {"filter": filters, **more}}}}


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
    ],
)
def test_changes_that_a_cluster_that_is_up_cannot_take(change: str, said: list[str], tmp_path: Path) -> None:
    text = {
        "": AWS,
        "max: 4": AWS.replace("max: 4", "max: 8"),
        "zone: us-east-1a": AWS.replace("us-east-1b", "us-east-1a"),
    }.get(change, f"{AWS}{change}\n")
    assert cloud_site.rebuilds(spec(tmp_path), spec(tmp_path, text)) == said


def test_up_refuses_what_cannot_change(aws: Moto, tmp_path: Path) -> None:
    bucket(tmp_path).put(cluster_key("c"), spec(tmp_path).document().encode())
    changed = AWS + "network: {nat: false}\n"
    with pytest.raises(
        SpotrunError, match=r"network\.nat: this cannot change while the cluster is up; run `make down CLUSTER="
    ):
        at(tmp_path, changed).up()
    assert calls(tmp_path) == []


def test_each_cloud_has_its_transport(tmp_path: Path) -> None:
    assert isinstance(cloud_site.transport(spec(tmp_path, GCP), tmp_path), Iap)
    assert isinstance(cloud_site.transport(spec(tmp_path), tmp_path), Ssm)
