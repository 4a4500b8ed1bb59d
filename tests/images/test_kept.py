"""`make images` and `make image PRUNE=n`: which images there are, what they cost, and which ones may go."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from images import build, kept
from spotrun.cloud.base import Image
from spotrun.errors import SpotrunError
from spotrun.spec import load_cluster
from tests.fakes import moto_server
from tests.fakes.moto_server import Moto

if TYPE_CHECKING:
    from tests.fakes.gce import FakeGce

ROOT = Path(__file__).parents[2]
GCP = """
name: demo
cloud: gcp
region: us-central1
project: my-project
pools: [{name: spot, zone: us-central1-a, machine: g2-standard-8}]
"""
AWS = """
name: demo
cloud: aws
region: us-east-1
pools: [{name: spot, zone: us-east-1a, machine: g5.2xlarge}]
"""


def image(name: str, *users: str) -> Image:
    return Image(name, f"id-{name}", 0.0, 1.0, users=users)


NEWEST_FIRST = [image("d"), image("c", "demo--spot"), image("b"), image("a")]


@pytest.mark.parametrize(
    ("keep", "named", "gone"),
    [
        (1, set(), "ba"),
        (2, set(), "ba"),
        (3, set(), "a"),
        (9, set(), ""),
        (1, {"b"}, "a"),
        (1, {"id-a", "b"}, ""),
    ],
    ids=["used", "newest two", "newest three", "fewer", "named", "named by id"],
)
def test_the_newest_and_those_in_use_stay(keep: int, named: set[str], gone: str) -> None:
    assert [each.name for each in kept.surplus(NEWEST_FIRST, keep, named)] == list(gone)


@pytest.mark.parametrize("typed", ["0", "-1", "two", "", "1.5"])
def test_how_many_to_keep_is_a_number(typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is baked or asked."""
    file = cluster(tmp_path, GCP)
    for program in (kept.main, build.main):
        assert program([file, f"--prune={typed}"] if program is kept.main else [file, "--prune", f" {typed}"]) == 2
        assert "allowed: 1 and more" in capsys.readouterr().err


def test_ctrl_c_while_the_cloud_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        login = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "NO_PROXY": "127.0.0.1"}
        environment = {**os.environ, **login, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with subprocess.Popen(
            [sys.executable, "-m", "images.kept", cluster(tmp_path, AWS)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
            connection.close()
    assert (process.returncode, said) == (130, "spotrun: interrupted\n")


def test_a_cluster_file_that_names_an_image_keeps_it(tmp_path: Path) -> None:
    cluster(tmp_path, GCP)
    (tmp_path / "other.yaml").write_text(GCP + "image: projects/my-project/global/images/spotrun-1\n")
    assert kept.names(tmp_path / "cluster.yaml") == {"spotrun-1"}
    (tmp_path / "broken.yaml").write_text("name: [")
    with pytest.raises(SpotrunError, match=r"broken\.yaml"):
        kept.names(tmp_path / "cluster.yaml")


def test_a_local_cluster_has_no_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert kept.main(["clusters/local.yaml"]) == 2
    assert "cloud local has no images" in capsys.readouterr().err


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGce]:
    """Four images, of which a cluster that is up uses the oldest, and one that is none of spotrun's."""
    from tests.fakes import gce  # not at the top: Google's library takes seconds to import

    with gce.running(page=2) as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        fake.set_images(mine="other", **{f"spotrun-{number}": "spotrun" for number in (1, 2, 3, 4)})
        fake.add_stack(STACK)
        yield fake


STACK: dict[str, Any] = {
    "data": {"google_compute_image": {"image": {"project": "my-project", "name": "spotrun-1"}}},
    "resource": {
        "google_compute_region_instance_template": {
            "t": {
                "machine_type": "g2-standard-8",
                "labels": {},
                "metadata": {},
                "scheduling": {},
                "disk": [{"source_image": "${data.google_compute_image.image.self_link}"}],
            }
        },
        "google_compute_instance_group_manager": {
            "g": {
                "name": "demo--spot",
                "zone": "us-central1-a",
                "target_size": 0,
                "version": [{"instance_template": "${google_compute_region_instance_template.t.self_link}"}],
            }
        },
    },
}


def test_images_of_a_project(google: FakeGce, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = cluster(tmp_path, GCP)
    assert kept.main([file]) == 0
    said = capsys.readouterr().out
    rows = [re.split(" +", line) for line in said.splitlines()[1:5]]
    assert [row[:4] for row in rows] == [
        [f"spotrun-{number}", str(age), "6.0", "0.30"] for number, age in ((4, 1), (3, 2), (2, 3), (1, 4))
    ]
    assert [row[4].startswith("demo--spot-") for row in rows] == [False, False, False, True]
    assert said.endswith("4 images: 1.20 dollars a month\n")

    assert kept.main([file, "--json", "--prune", " 2"]) == 0
    out, err = capsys.readouterr()
    assert [each["name"] for each in json.loads(out)] == ["spotrun-4", "spotrun-3", "spotrun-1"]
    assert re.search(r"spotrun-1 stays: demo--spot-\w+ uses it", err)
    assert "spotrun-2 is removed: 0.30 dollars a month less" in err
    assert google.calls.count("images.delete") == 1
    assert kept.main([file]) == 0
    assert "spotrun-2" not in capsys.readouterr().out


def test_a_slow_deletion_is_no_error(
    google: FakeGce, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    google.times.operation = 600.0
    monkeypatch.setattr("spotrun.cloud.gcp.api._SETTLE", 0.2)
    assert kept.main([cluster(tmp_path, GCP), "--prune", "2"]) == 0
    assert google.calls.count("images.delete") == google.calls.count("global_operations.wait") == 1
    assert "is removed: 0.30 dollars a month less" in capsys.readouterr().err


@pytest.fixture
def amazon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    with moto_server.running() as aws:
        for name, value in aws.environment.items():
            monkeypatch.setenv(name, value)
        yield aws


def test_images_of_an_account(amazon: Moto, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template and a machine of clusters that are up; a snapshot goes with its image."""
    file, ec2 = cluster(tmp_path, AWS), amazon.client("ec2")
    foreign = amazon.image("mine")
    made = [bake(ec2, f"spotrun-{number}") for number in (1, 2, 3, 4)]
    ec2.create_launch_template(LaunchTemplateName="demo--spot", LaunchTemplateData={"ImageId": made[0][0]})
    (machine,) = ec2.run_instances(ImageId=made[1][0], MinCount=1, MaxCount=1)["Instances"]
    # moto makes all of them at one moment; the order of equals is that of the list.
    found = {each.name: each for each in kept.baked(load_cluster(file), file)}
    assert sorted(found) == [f"spotrun-{number}" for number in (1, 2, 3, 4)]
    assert (found["spotrun-1"].users, found["spotrun-2"].users) == (("demo--spot",), (machine["InstanceId"],))
    assert found["spotrun-3"].users == ()
    assert (found["spotrun-3"].gigabytes, found["spotrun-3"].snapshots) == (15.0, (made[2][1],))

    assert kept.main([file, "--json", "--prune", "1"]) == 0
    out, err = capsys.readouterr()
    left = {each["name"] for each in json.loads(out)}
    assert {"spotrun-1", "spotrun-2"} <= left
    gone = {name for name in found if name not in left}
    assert gone
    assert gone <= {"spotrun-3", "spotrun-4"}
    for name in gone:
        assert f"{name} is removed: 0.75 dollars a month less" in err
    images = {each["ImageId"] for each in ec2.describe_images(Owners=["self"])["Images"]}
    snapshots = {each["SnapshotId"] for each in ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]}
    assert foreign in images
    for name, (identity, snapshot) in zip(sorted(found), made, strict=True):
        assert (identity in images, snapshot in snapshots) == (name in left, name in left)


def bake(ec2: Any, name: str) -> tuple[str, str]:
    """An image as Packer leaves one, and its snapshot, which moto makes."""
    made = ec2.register_image(Name=name, Architecture="x86_64", RootDeviceName="/dev/xvda")["ImageId"]
    ec2.create_tags(Resources=[made], Tags=[{"Key": "spotrun-commit", "Value": "0123456789ab"}])
    (found,) = ec2.describe_images(ImageIds=[made])["Images"]
    return str(made), str(found["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"])


@pytest.mark.parametrize(
    ("words", "own", "packers"),
    [
        ([], {}, []),
        (["-debug"], {}, ["-debug"]),
        (["--public", "--prune", " 3", "-debug"], {"--public": "", "--prune": " 3"}, ["-debug"]),
        (["-var", "a=b", "--public"], {}, ["-var", "a=b", "--public"]),
        (["--prune"], {"--prune": ""}, []),
    ],
)
def test_own_options_come_before_packers(words: list[str], own: dict[str, str], packers: list[str]) -> None:
    assert build._own(words) == (own, packers)


def cluster(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)
