"""Up, plan and down around Terraform: jobs that still run, checkpoints, interruptions, machines that are left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import cloud_site, stacks
from scripts import site as sites
from scripts.ssh import Unreachable
from scripts.transports import Iap, Ssm
from spotrun.errors import CloudError, SpotrunError, StoreError
from spotrun.store import (
    Store,
    checkpoint_key,
    cluster_key,
    head_key,
    host_key,
    kept_key,
    log_key,
    queue_key,
    replaced_key,
    unfit_key,
    up_key,
)
from tests.fakes.moto_server import Moto
from tests.helpers import wait_for
from tests.scripts.cloud_files import AWS, GCP, TERRAFORM, VPC, Say, at, bucket, calls, file, images, known, spec


def test_not_up(aws: Moto, tmp_path: Path) -> None:
    with pytest.raises(SpotrunError, match="cluster c is not up; `make up CLUSTER="):
        at(tmp_path).access()


def test_no_bucket(aws: Moto, tmp_path: Path) -> None:
    """As before the first `make up`."""
    other = spec(tmp_path, AWS.replace("name: c", "name: other"))
    with pytest.raises((StoreError, SpotrunError), match="other"):
        sites.site(other, file(tmp_path)).access()


def test_a_bucket_says_itself_what_is_wrong(aws: Moto, tmp_path: Path) -> None:
    """Such as SlowDown, RequestTimeTooSkewed, or which key may not be used. A number such as 403 says nothing."""
    with pytest.raises(StoreError) as caught:
        Store(f"{bucket(tmp_path).url}-2").put("a", b"x")
    assert str(caught.value).endswith("cannot write a: NoSuchBucket: The specified bucket does not exist")


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
    monkeypatch.setenv("STATE", VPC)
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


def test_down_from_a_checkout_that_knows_nothing_empties_no_bucket(
    aws: Moto, made: stacks.Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster was made with the state of another checkout. So Terraform here removes neither network nor bucket."""
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    store = bucket(tmp_path)
    store.put("jobs/job-1/state.json", b"{}")
    assert "is not up, and Terraform knows of no part of it here" in sites.take_down(at(tmp_path), force=False)
    with pytest.raises(SpotrunError, match=r"Terraform knows nothing of it and of its network"):
        sites.take_down(at(tmp_path), force=False, everything=True)
    assert store.list("") == ["jobs/job-1/state.json"]


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


@pytest.mark.parametrize("state", ["stopping", "running"])
def test_down_waits_for_machines_that_shut_down(
    state: str,
    aws: Moto,
    made: stacks.Stacks,
    machine: str,
    programs: Say,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Their placement group cannot be deleted before. A machine that runs is no reason to wait."""
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    monkeypatch.setenv("STATE", VPC)
    monkeypatch.setattr(cloud_site, "PAUSE", 0.0501)  # a time for which nothing else sleeps
    once = 'if [ "$1" = destroy ] && [ ! -e "$CALLS.once" ]; then touch "$CALLS.once"; exit 1; fi'
    programs(terraform=TERRAFORM.replace("exit 0\n", f"{once}\nexit 0\n"))
    client, pause = aws.client("ec2"), time.sleep
    if state == "stopping":
        client.stop_instances(InstanceIds=[machine])  # moto's machines shut down in no time: this one does not end

    def sleep(seconds: float) -> None:
        if seconds == cloud_site.PAUSE:  # on a busy machine, `subprocess` sleeps, too
            client.terminate_instances(InstanceIds=[machine])
        pause(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    if state == "running":
        with pytest.raises(CloudError, match="terraform destroy of stack c-pools failed"):
            sites.take_down(at(tmp_path), force=True)
    else:
        assert sites.take_down(at(tmp_path), force=True).startswith("cluster c is down; ")
        assert f"waits up to 20 minutes for machines that shut down ({machine}): AWS keeps" in capfd.readouterr().err
    assert len([call for call in calls(tmp_path) if "destroy" in call]) == (2 if state == "stopping" else 1)


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


@pytest.mark.parametrize("document", [b'{"format": 2}', b'{"name": "c"}'])
def test_up_of_a_cluster_of_another_version(
    document: bytes, aws: Moto, made: stacks.Stacks, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would change is not known, and Terraform ends machines without asking."""
    monkeypatch.setattr(stacks, "synthesize", lambda *_: made)
    monkeypatch.setattr(cloud_site, "BOOT", 0.0)  # no head comes up here
    monkeypatch.setenv("STATE", known("aws_autoscaling_group", name="c--head"))
    (made.folder / "stacks/c-pools/cdk.tf.json").write_text(json.dumps(images(owners=["self"])))
    aws.image("spotrun-up")
    for code in ("L-3819A6DF", "L-DB2E81BA"):
        aws.quota(code, 64)
    bucket(tmp_path).put(cluster_key("c"), document)
    said = rf"cluster c has machines \({machine}\), and `make up .*` may end them at once, because the cluster's desc"
    with pytest.raises(SpotrunError, match=said):
        at(tmp_path).up()
    assert not any("apply" in call for call in calls(tmp_path))
    aws.client("ec2").terminate_instances(InstanceIds=[machine])
    with pytest.raises(Unreachable, match="the head of cluster c does not come up"):
        at(tmp_path).up()
    assert any("apply" in call for call in calls(tmp_path))


def test_what_jobs_have_kept_is_never_deleted(aws: Moto, tmp_path: Path) -> None:
    """The results of a job that has no checkpoint, such as one whose script does not use `spotrun`."""
    store = bucket(tmp_path)
    for key in (kept_key("eval-1", 3), kept_key("eval-1", 3, "out/model.safetensors")):
        store.put(key, b"{}")
    with pytest.raises(SpotrunError, match=r"holds kept folders of eval-1, which spotrun never deletes"):
        sites.take_down(at(tmp_path), force=True, everything=True)
    store.put(checkpoint_key("job-1", 7), b"{}")
    with pytest.raises(SpotrunError, match=r"holds checkpoints of job-1 and kept folders of eval-1, which"):
        sites.take_down(at(tmp_path), force=True, everything=True)
    assert not any("destroy" in call for call in calls(tmp_path))


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
    said = "terraform apply of stack c-base failed, see above; Terraform knows what it has done"
    with pytest.raises(CloudError, match=said):
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


def test_each_cloud_has_its_transport(tmp_path: Path) -> None:
    assert isinstance(cloud_site.transport(spec(tmp_path, GCP), tmp_path), Iap)
    assert isinstance(cloud_site.transport(spec(tmp_path), tmp_path), Ssm)
