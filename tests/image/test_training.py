"""A local cluster whose machines run the head and the agent of an image: what was baked trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import bundle, control
from scripts import site as sites
from scripts.ssh import Access
from spotrun.cloud.local import cloud
from spotrun.cloud.local.layout import Layout
from spotrun.spec import ClusterSpec, JobSpec
from spotrun.store import Store, cluster_key
from tests.helpers import wait_for
from tests.image.conftest import Image

TOY = Path(__file__).parent.parent / "jobs" / "toy"
SPEC = ClusterSpec.model_validate(
    {"name": "baked", "cloud": "local", "pools": [{"name": "spot", "zone": "local-a", "max": 2}]}
)


@pytest.fixture
def access(image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Access]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("SPOTRUN_HOME", str(home))
    layout = Layout.of(home, SPEC.name)
    same = {place: place for place in (str(home), str(layout.tmpfs))}
    role = image.root.enter("/opt/spotrun/venv/bin/spotrun", "{role}", bind=same)
    Store(str(layout.bucket)).put(cluster_key(SPEC.name), SPEC.document().encode())
    cloud.up(SPEC, home, role)
    try:
        found = sites.site(SPEC).access()
        control.await_head(found, SPEC.digest)
        yield found
    finally:
        cloud.down(SPEC.name, home)


def test_the_image_trains(access: Access, image: Image, tmp_path: Path) -> None:
    out = tmp_path / "home" / "out"  # the machines see this folder
    out.mkdir()
    args = ("--out", str(out), "--epochs", "1", "--samples", "64", "--pause", "0")
    job = JobSpec(name="toy", script="train.py", args=args, nodes={"min": 2, "max": 2})  # type: ignore[arg-type]
    code = bundle.upload(access.store, TOY, "train.py").sha256
    name = control.ask(access, "submit", data={"job": job.model_dump(mode="json"), "code": code})["job"]

    def ended() -> dict[str, Any] | None:
        found: dict[str, Any] = control.ask(access, "status", "--job", name)["job"]
        return found if found["ended"] else None

    found = wait_for(ended, 300, "the end of the job")
    assert found["phase"] == "succeeded", json.dumps(found, indent=1)
    assert found["step"] == 64 // 4 // 2
    digests = {json.loads(path.read_text())["digest"] for path in out.glob("final-*.json")}
    assert len(list(out.glob("final-*.json"))) == 2
    assert len(digests) == 1
