"""A stand-in head and nodes over real SSH; an operator of a cloud, with programs in the place of the real tools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from scripts import stacks
from spotrun.spec.names import bucket_url
from tests.fakes import moto_server
from tests.fakes.cluster import Machines, machines
from tests.fakes.moto_server import Moto
from tests.scripts.cloud_files import TERRAFORM, Say, spec

if TYPE_CHECKING:
    from tests.fakes.gce import FakeGce


@pytest.fixture(autouse=True)
def without_mlflow() -> Iterator[None]:
    """No MLFLOW_* variables: an export sets some, and MLflow's client sets others."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            del os.environ[name]
        yield


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


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


@pytest.fixture
def gce(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGce]:
    from tests.fakes import gce  # not at the top: Google's library takes seconds to import

    with gce.running() as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        yield fake
