"""What the stacks know of Google's machine types and images, and what they refuse before anything is written."""

from __future__ import annotations

from typing import Any

import pytest

from infra.gcp import options
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, PoolSpec

pytestmark = pytest.mark.clouds


def pool(machine: str, **keys: Any) -> PoolSpec:
    text = {"name": "x", "zone": "us-central1-a", "machine": machine, **keys}
    spec = {"name": "c", "cloud": "gcp", "region": "us-central1", "project": "my-project", "image": "of-mine"}
    return ClusterSpec.model_validate({**spec, "pools": [text]}).pools[0]


@pytest.mark.parametrize(
    ("machine", "gpus", "disk", "kind"),
    [
        ("g2-standard-8", True, "pd-balanced", "compact"),
        ("a2-highgpu-8g", True, "pd-balanced", "compact"),
        ("a3-highgpu-1g", True, "pd-balanced", "compact"),
        ("a3-highgpu-8g", True, "pd-balanced", "workload"),
        ("a3-megagpu-8g", True, "pd-balanced", "workload"),
        ("a3-ultragpu-8g", True, "hyperdisk-balanced", "workload"),
        ("a4-highgpu-8g", True, "hyperdisk-balanced", "workload"),
        ("c2-standard-60", False, "pd-balanced", "compact"),
        ("c4-standard-8", False, "hyperdisk-balanced", "compact"),
    ],
)
def test_machine_types(machine: str, gpus: bool, disk: str, kind: str) -> None:
    found = pool(machine)
    assert (options.has_gpus(found), options.boot_disk(machine), options.placement(found)) == (gpus, disk, kind)


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        ("g2-standard-8", None),
        ("a2-highgpu-8g", None),
        ("a3-highgpu-8g", None),
        ("a3-megagpu-8g", None),
        ("a3-ultragpu-8g", "workload"),
        ("a4-highgpu-8g", "workload"),
        ("n1-standard-8", None),
    ],
)
def test_flex_machines_have_no_policy_that_google_refuses_with_resize_requests(machine: str, kind: str | None) -> None:
    assert options.placement(pool(machine, market="flex")) == kind


@pytest.mark.parametrize("machine", ["n1-standard-8", "e2-standard-8"])
def test_machines_that_cannot_be_placed_are_refused(machine: str) -> None:
    with pytest.raises(SpotrunError, match=f"pool x: Google places no {machine} close to others"):
        options.placement(pool(machine))


@pytest.mark.parametrize("length", ["29s", "121d"])
def test_runs_that_google_does_not_take_are_refused(length: str) -> None:
    with pytest.raises(SpotrunError, match="Google allows 30s to 120d"):
        options.scheduling(pool("g2-standard-8", max_run_duration=length))


@pytest.mark.parametrize("length", ["9m", "30s"])
def test_runs_of_flex_machines_that_google_does_not_take_are_refused(length: str) -> None:
    with pytest.raises(SpotrunError, match="Google allows 10m to 7d for market flex"):
        options.scheduling(pool("g2-standard-8", market="flex", max_run_duration=length))


def test_a_flex_machine_runs_for_a_week_unless_the_file_says_otherwise() -> None:
    found = options.scheduling(pool("g2-standard-8", market="flex"))
    assert (found["provisioning_model"], found["max_run_duration"]) == ("FLEX_START", {"seconds": 604800})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, {"project": "p", "family": "spotrun"}),
        ("spotrun-20261121", {"project": "p", "name": "spotrun-20261121"}),
        ("projects/other/global/images/family/mine", {"project": "other", "family": "mine"}),
        ("projects/example.com:other/global/images/mine", {"project": "example.com:other", "name": "mine"}),
    ],
)
def test_images(name: str | None, expected: dict[str, str]) -> None:
    assert options.image(name, "p") == expected


@pytest.mark.parametrize("name", ["Mine", "family/mine", "../mine", "projects/p/global/images/", "mine/", "a b"])
def test_images_that_google_would_not_know_are_refused(name: str) -> None:
    with pytest.raises(SpotrunError, match="allowed: an image's name, or projects/"):
        options.image(name, "p")
