"""`make image`: what Packer is told, and how it ends when it is interrupted."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from images import build, lint
from spotrun.cloud.aws import images
from spotrun.spec import load_cluster
from tests.fakes import moto_server
from tests.helpers import wait_for

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"


PACKER = """#!/bin/sh
[ "$1" = version ] && { echo Packer v1.11.2; exit; }
echo "$*" >>"$CALLS/calls"
[ "$1" = build ] && [ -e "$CALLS/slow" ] || exit 0
cleanup() { # longer than anyone waits for a program that was interrupted
    touch "$CALLS/interrupted"
    while [ ! -e "$CALLS/go" ]; do sleep 0.05; done
    touch "$CALLS/cleaned"
    exit 1
}
trap cleanup INT
touch "$CALLS/started"
while :; do sleep 0.05; done
"""


@pytest.fixture
def bake(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python -m images.build` as a terminal would, with a program in Packer's place."""
    packer = tmp_path / "packer"
    packer.write_text(PACKER)
    packer.chmod(packer.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path)}
    for name in ("aws_subnet", "aws_public"):
        environment.pop(f"PKR_VAR_{name}", None)
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "images.build", *words]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_packer_is_told_of_the_cluster(bake: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = bake("clusters/gcp-l4.yaml", "-debug")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert re.fullmatch(r"spotrun-\d{8}-\d{6}\n", out)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first == "init images"
    for word in (f"build -only {lint.SOURCES['gcp']} ", "-var gcp_project=my-project ", " -debug images"):
        assert word in second
    assert re.search(r"-var commit=[0-9a-f]{40}(-dirty)? ", second)
    (made,) = (ROOT / "build/image/wheel").iterdir()
    assert re.fullmatch(r"spotrun-.*\.whl", made.name)


def test_an_interrupted_build_waits_until_packer_has_cleaned_up(
    bake: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    process = bake("clusters/gcp-l4.yaml")
    wait_for((tmp_path / "started").exists, 60, "Packer's start")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
    wait_for((tmp_path / "interrupted").exists, 30, "Packer's interruption")
    assert process.stderr is not None
    assert "packer is cleaning up, wait for it" in process.stderr.readline()
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=300)
    assert (tmp_path / "cleaned").exists()
    assert (process.returncode, out, err) == (130, "", "spotrun: interrupted\n")


def test_a_module_that_is_gone_is_in_no_wheel(tmp_path: Path) -> None:
    """setuptools builds in build/lib of the folder that it is given, and takes along what lies there."""
    old = ROOT / "build/lib/spotrun/gone_long_ago.py"
    old.parent.mkdir(parents=True, exist_ok=True)
    old.touch()
    try:
        build.wheel(tmp_path)
    finally:
        old.unlink()
    (made,) = tmp_path.glob("spotrun-*.whl")
    found = zipfile.ZipFile(made).namelist()
    assert {"spotrun/cli.py", "spotrun/cloud/prices.csv"} <= set(found)
    assert "spotrun/gone_long_ago.py" not in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage: python -m images.build CLUSTER"),
        (("clusters/local.yaml",), "cloud local has no images"),
        (("clusters/none.yaml",), "there is no such cluster file"),
        (
            ("clusters/aws-g5.yaml", "-debug"),
            "`make image CLUSTER=clusters/aws-g5.yaml PUBLIC=1` builds in the default",
        ),
        (("clusters/gcp-l4.yaml", "--public"), "PUBLIC=1 is for AWS"),
        (("clusters/aws-g5.yaml", "-var-file=images/none.pkrvars.hcl"), "none.pkrvars.hcl: No such file"),
    ],
)
def test_what_cannot_be_built(
    words: tuple[str, ...], said: str, bake: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    if words == ("clusters/aws-g5.yaml",) and list(IMAGES.glob("*.auto.pkrvars.*")):
        pytest.skip("a subnet may be named in images/*.auto.pkrvars.hcl here")
    process = bake(*words)
    _, err = process.communicate()
    assert process.returncode == 2
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("options", "environment", "settings", "expected"),
    [
        ([], {}, [], False),
        (["-var", "aws_subnet=subnet-0a"], {}, [], True),
        (["-var=aws_subnet=subnet-0a"], {}, [], True),
        (["-var", "aws_subnet="], {}, ['aws_subnet = ""\n'], False),
        (["-var", "gcp_subnetwork=subnet-0a"], {}, [], False),
        ([], {"PKR_VAR_aws_subnet": "subnet-0a"}, [], True),
        ([], {}, ['disk_gb = 40\naws_subnet     = "subnet-0a"\n'], True),
        ([], {}, ['# aws_subnet = "subnet-0a"\n', 'my_aws_subnet = "subnet-0a"'], False),
        ([], {}, ['{\n "aws_subnet": "subnet-0a"\n}'], True),
        ([], {}, ['{"disk_gb": 40, "aws_subnet": "subnet-0a"}'], True),
    ],
)
def test_where_a_subnet_may_be_named(
    options: list[str], environment: dict[str, str], settings: list[str], expected: bool
) -> None:
    assert build.names_subnet(options, environment, settings) is expected


@pytest.mark.parametrize(
    ("options", "environment", "settings", "expected"),
    [
        ([], {}, [], False),
        (["-var", "aws_public=true"], {}, [], True),
        (["-var", "aws_public=false"], {}, [], False),
        ([], {"PKR_VAR_aws_public": "true"}, [], True),
        ([], {}, ["aws_public = true\n"], True),
        ([], {}, ['{"aws_public": true}'], True),
        ([], {}, ["# aws_public = true\n"], False),
    ],
)
def test_where_a_public_build_may_be_asked_for(
    options: list[str], environment: dict[str, str], settings: list[str], expected: bool
) -> None:
    assert build.told("aws_public", "true", options, environment, settings) is expected


def test_a_public_build_needs_the_accounts_default_network(
    bake: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = load_cluster(ROOT / "clusters/aws-g5.yaml")
    assert build.variables(cluster, "0" * 40, datetime.now(UTC), public=True)["aws_public"] == "true"
    assert "aws_public" not in build.variables(cluster, "0" * 40, datetime.now(UTC))
    with moto_server.running() as aws:
        for name, value in aws.environment.items():
            monkeypatch.setenv(name, value)
        assert images.has_default_network(cluster.region)
        ec2 = aws.client("ec2")
        for subnet in ec2.describe_subnets()["Subnets"]:
            ec2.delete_subnet(SubnetId=subnet["SubnetId"])
        process = bake("clusters/aws-g5.yaml", "--public", **aws.environment)
        out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert "`aws ec2 create-default-vpc --region us-east-1` makes one" in err
    assert not (tmp_path / "calls").exists()
