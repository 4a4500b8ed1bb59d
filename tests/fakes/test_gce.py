"""The fake Compute Engine itself: what it refuses, and what an end-to-end test has of it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1

from spotrun.spec import described
from tests.fakes import gce as fakegce
from tests.fakes.gce import Event, FakeGce
from tests.fakes.on_gcp import CLUSTER, A
from tests.helpers import wait_for

pytestmark = pytest.mark.clouds
GROUPS = f"projects/my-project/zones/{A}/instanceGroupManagers"
GROUP = f"{GROUPS}/demo--spot-a"


@pytest.fixture
def gce(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGce]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with fakegce.running() as fake:
        yield fake


def ask(fake: FakeGce, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{fake.endpoint}/compute/v1/{path}", None if body is None else json.dumps(body).encode(), method=method
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=300) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", f"{GROUP}/nonsense", None, 404),
        ("GET", f"{GROUP}?nonsense=1", None, 400),
        ("POST", f"{GROUP}/resize?size=many", None, 400),
        ("POST", f"{GROUP}/resize?size=1", {"size": 1}, 400),
        ("POST", f"{GROUP}/resize?size=1&requestId=1", None, 400),
        ("POST", f"{GROUP}/deleteInstances", {"instances": [f"zones/{A}/instances/x"], "force": True}, 400),
        ("POST", f"{GROUP}/deleteInstances", {"instances": ["x"]}, 400),
        ("POST", f"{GROUP}/deleteInstances", [], 400),
        ("GET", f"projects/my-project/zones/{A}/instances?filter=name%3Dx", None, 501),
        ("PATCH", GROUP, {"name": "g"}, 501),
    ],
)
def test_what_is_not_of_the_api_fails_the_test(
    method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(fakegce.running())
        fake.add_cluster(CLUSTER)
        found, answer = ask(fake, method, path, body)
        assert found == status == answer["error"]["code"]
        with pytest.raises(AssertionError, match=method):
            stack.close()


@pytest.mark.parametrize(
    "path", ["projects/other/regions/r", f"{GROUPS}/nope", f"projects/my-project/zones/{A}/instances/x"]
)
def test_what_is_not_there_is_no_mistake(gce: FakeGce, path: str) -> None:
    status, answer = ask(gce, "GET", path)
    assert (status, answer["error"]["errors"][0]["reason"]) == (404, "notFound")


def test_groups_made_through_the_api(gce: FakeGce) -> None:
    """As Terraform's provider makes them."""
    how: dict[str, Any] = {
        "credentials": AnonymousCredentials(),
        "client_options": ClientOptions(api_endpoint=gce.endpoint),
    }
    template = compute_v1.InstanceTemplate(
        name="t", properties={"machine_type": "e2-small", "scheduling": {"provisioning_model": "SPOT"}}
    )
    compute_v1.RegionInstanceTemplatesClient(**how).insert_unary(
        project="my-project", region="us-central1", instance_template_resource=template
    )
    groups = compute_v1.InstanceGroupManagersClient(**how)
    link = "projects/my-project/regions/us-central1/instanceTemplates/t"
    group = compute_v1.InstanceGroupManager(
        name="g", base_instance_name="g", target_size=2, versions=[{"instance_template": link}]
    )
    where = {"project": "my-project", "zone": A}
    groups.insert_unary(**where, instance_group_manager_resource=group)
    assert [found.target_size for found in groups.list(**where)] == [2]
    machines = wait_for(lambda: [m for m in gce.machines() if m.status == "RUNNING"][1:] and gce.machines())
    assert {(m.machine_type, m.market) for m in machines} == {("e2-small", "spot")}
    listed = compute_v1.InstancesClient(**how).aggregated_list(project="my-project")
    assert [len(scoped.instances) for _, scoped in listed] == [2]
    groups.delete_unary(**where, instance_group_manager="g")
    wait_for(lambda: not gce.machines())


def test_machines_come_and_go_before_a_harness(gce: FakeGce) -> None:
    gce.add_cluster(CLUSTER, bucket="gs://bucket")
    wait_for(lambda: [m.status for m in gce.machines()] == ["RUNNING"])
    events: queue.Queue[Event] = queue.Queue()
    gce.watch(events.put)
    assert [events.get(timeout=300).kind for _ in range(2)] == ["created", "running"]
    head = gce.machines()[0]
    assert head.metadata == {
        "spotrun-cluster": "demo",
        "spotrun-pool": "head",
        "spotrun-role": "head",
        "spotrun-bucket": "gs://bucket",
    }
    gce.vanish(head.name)
    assert [events.get(timeout=300).kind for _ in range(3)] == ["gone", "created", "running"]
    new = gce.machines()[0]
    assert (new.name, new.id != head.id) == (head.name, True)
    gce.remove_all()
    assert gce.machines() == []
    assert events.get(timeout=300).kind == "gone"


def test_a_notice_comes_before_the_end(gce: FakeGce) -> None:
    gce.add_cluster(CLUSTER)
    wait_for(lambda: [m.status for m in gce.machines()] == ["RUNNING"])
    events: queue.Queue[Event] = queue.Queue()
    gce.watch(lambda event: events.put(event) if event.kind in ("notice", "gone") else None)
    gce.preempt(gce.machines()[0].name, notice=0.1)
    notice, gone = events.get(timeout=300), events.get(timeout=10)
    assert (notice.kind, gone.kind) == ("notice", "gone")
    assert notice.machine.due is not None
    assert notice.machine.id == gone.machine.id


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stack pools, as Terraform reads it."""
    folder = tmp_path_factory.mktemp("stack")
    file = folder / "demo.yaml"
    file.write_text(CLUSTER.model_dump_json(exclude={"local"}))  # JSON is YAML
    environment = {**os.environ, "CLUSTER": str(file), "CDKTF_OUTDIR": str(folder / "out")}
    subprocess.run([sys.executable, "-m", "infra"], env=environment, check=True, timeout=300)
    found: dict[str, Any] = json.loads((folder / "out/stacks/demo-pools/cdk.tf.json").read_text())
    return found


def test_the_stack_that_is_synthesized(gce: FakeGce, stack: dict[str, Any]) -> None:
    """What Terraform would be given is what the fake is given."""
    gce.add_stack(stack)
    gce.add_stack(stack)  # a second `make up` makes nothing twice
    head = wait_for(lambda: [m for m in gce.machines() if m.status == "RUNNING"])[0]
    assert (head.labels["spotrun-pool"], head.market, head.zone) == ("head", "on-demand", A)
    assert head.metadata["spotrun-bucket"] == "gs://spotrun-demo-my-project"
    assert {name: gce.size(f"demo--{name}") for name in ("head", "spot-a", "spot-b", "steady")} == {
        "head": 1,
        "spot-a": 0,
        "spot-b": 0,
        "steady": 0,
    }
    assert described(stack["resource"]["google_storage_bucket_object"]["cluster"]["content"].encode()) == CLUSTER


def test_a_replaced_machine_starts_from_the_image_of_its_peers(gce: FakeGce, stack: dict[str, Any]) -> None:
    """Though `make image` has baked a newer one since; the next `make up` takes that one."""
    gce.add_stack(stack)
    head = wait_for(lambda: [m for m in gce.machines() if m.status == "RUNNING"])[0]
    gce.set_images(**{"spotrun-1": "spotrun", "spotrun-2": "spotrun"})
    gce.vanish(head.name)
    successor = wait_for(lambda: [m for m in gce.machines() if m.id != head.id])[0]
    assert (head.image, successor.image) == ("spotrun-1", "spotrun-1")
    gce.remove_all()
    gce.add_stack(stack)
    assert wait_for(gce.machines)[0].image == "spotrun-2"
