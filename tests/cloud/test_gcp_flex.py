"""Flex pools: requests that wait in Google's queue, over real HTTP, and the decisions about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from spotrun.cloud.base import Problem
from spotrun.cloud.gcp import GcpCloud, api, flex
from spotrun.cloud.gcp.flex import Request, plan_change
from spotrun.errors import CloudError, QuotaError
from spotrun.spec import ClusterSpec
from tests.fakes.gce import FakeGce
from tests.fakes.mig import stamp
from tests.fakes.on_gcp import A, project, running
from tests.helpers import await_for

pytestmark = pytest.mark.clouds

CLUSTER = ClusterSpec.model_validate(
    {
        "name": "demo",
        "cloud": "gcp",
        "project": "my-project",
        "region": "us-central1",
        "pools": [{"name": "flex", "zone": A, "machine": "a3-highgpu-8g", "max": 5, "market": "flex"}],
    }
)
GROUP = "demo--flex"


@pytest.fixture
def gcp_cluster() -> ClusterSpec:
    return CLUSTER


async def test_a_pool_grows_by_requests_and_its_machines_have_an_end(cloud: GcpCloud, gce: FakeGce) -> None:
    await cloud.resize("flex", 2)
    found = await running(cloud, "flex", 2)
    assert {node.market for node in found} == {"flex"}
    assert all(node.ends == pytest.approx(node.created + 7 * 86400) for node in found)
    await cloud.resize("flex", 3)
    assert {node.id for node in await running(cloud, "flex", 3)} > {node.id for node in found}
    assert gce.calls.count("instance_group_manager_resize_requests.insert") == 2
    assert "instance_group_managers.resize" not in gce.calls
    with pytest.raises(CloudError, match="is flex, and the cloud preempts only spot machines"):
        await cloud.preempt(found[0].name)
    await cloud.resize("flex", 0)
    await running(cloud, "flex", 0)


async def test_machines_that_are_not_flex_start_do_not_go_unnoticed(cloud: GcpCloud, gce: FakeGce) -> None:
    """As if Terraform had made a standard template."""
    await cloud.resize("flex", 1)
    [right] = await running(cloud, "flex", 1)
    assert await cloud.problems() == []
    for vm in gce._methods.vms():
        vm.resource.scheduling.provisioning_model = "STANDARD"
    [wrong] = await running(cloud, "flex", 1)
    [problem] = await cloud.problems()
    assert (problem.pool, problem.kind, problem.at) == ("flex", "other", right.created)
    assert f"not Flex-start machines, at another price: {wrong.name} (on-demand)" in problem.message


async def test_a_request_waits_until_all_its_machines_are_there(cloud: GcpCloud, gce: FakeGce) -> None:
    gce.limit(GROUP, 1)
    await cloud.resize("flex", 2)
    assert await cloud.sizes() == {"flex": 2}
    [problem] = await cloud.problems()
    assert (problem.kind, problem.message) == (
        "queue",
        f"the request for 2 flex a3-highgpu-8g waits for its turn in zone {A}",
    )
    assert await cloud.problems() == [problem]
    await cloud.resize("flex", 2)  # a head that restarts asks for the same
    assert await cloud.sizes() == {"flex": 2}
    await running(cloud, "flex", 0)
    gce.limit(GROUP, None)
    await running(cloud, "flex", 2)
    assert await cloud.problems() == []


async def test_a_smaller_size_cancels_what_waits_and_asks_anew(cloud: GcpCloud, gce: FakeGce) -> None:
    await cloud.resize("flex", 1)
    before = await running(cloud, "flex", 1)
    gce.limit(GROUP, 1)
    await cloud.resize("flex", 4)
    await cloud.resize("flex", 3)
    assert await cloud.sizes() == {"flex": 3}
    await cloud.resize("flex", 1)
    assert await cloud.sizes() == {"flex": 1}
    assert await cloud.problems() == []
    assert await running(cloud, "flex", 1) == before


async def test_a_request_that_failed_is_not_sent_again_at_once(cloud: GcpCloud, gce: FakeGce) -> None:
    gce.limit(GROUP, 0)
    await cloud.resize("flex", 2)
    gce.fail_requests(GROUP, "QUOTA_EXCEEDED", "Quota 'PREEMPTIBLE_NVIDIA_H100_GPUS' exceeded.")
    assert await cloud.sizes() == {"flex": 0}
    [problem] = await cloud.problems()
    assert problem.kind == "quota"
    assert "the request for 2 flex a3-highgpu-8g failed: QUOTA_EXCEEDED: Quota" in problem.message
    with pytest.raises(QuotaError, match="pool flex: the last request for machines: QUOTA_EXCEEDED"):
        await cloud.resize("flex", 2)
    assert gce.calls.count("instance_group_manager_resize_requests.insert") == 1


async def test_a_replacement_is_requested_and_the_size_stays(cloud: GcpCloud, gce: FakeGce) -> None:
    await cloud.resize("flex", 2)
    first, second = await running(cloud, "flex", 2)
    gce.limit(GROUP, 1)
    await cloud.recreate([first.name])
    assert await cloud.sizes() == {"flex": 2}
    assert await running(cloud, "flex", 1) == [second]
    assert [problem.kind for problem in await cloud.problems()] == ["queue"]
    gce.limit(GROUP, None)
    assert second in await running(cloud, "flex", 2)


async def test_two_changes_at_once_count_no_missing_machine_twice(cloud: GcpCloud, gce: FakeGce) -> None:
    """The head asks for several replacements at a time, and sets sizes meanwhile."""
    await cloud.resize("flex", 4)
    first, second, third, last = await running(cloud, "flex", 4)
    gce.times.operation = 0.2
    await asyncio.gather(cloud.recreate([first.name]), cloud.recreate([second.name]), cloud.resize("flex", 4))
    assert gce.size(GROUP) == 4
    await asyncio.gather(cloud.recreate([third.name]), cloud.remove([last.name]))
    assert gce.size(GROUP) == 3


@pytest.mark.parametrize("visible", [True, False], ids=["Google lists it", "Google does not list it yet"])
async def test_a_request_that_google_makes_slowly_is_not_sent_twice(
    cloud: GcpCloud, gce: FakeGce, monkeypatch: pytest.MonkeyPatch, visible: bool
) -> None:
    """The head looks again before the operation has ended, and the target size is still the old one."""
    monkeypatch.setattr(api, "_SETTLE", 0.05)
    gce.times.operation = 60.0
    methods, held = gce._methods, []
    insert, known = methods._instance_group_manager_resize_requests_insert, methods._requests

    def accept(request: Any) -> Any:
        held.append(request)
        if visible:
            wanted = request.instance_group_manager_resize_request_resource
            wanted.creation_timestamp, wanted.state = stamp(time.time()), "CREATING"
            known(request).made[wanted.name] = wanted
        return methods._operation(request.zone)

    monkeypatch.setattr(methods, "_instance_group_manager_resize_requests_insert", accept)
    for _ in range(3):
        await cloud.resize("flex", 2)
    [request] = held
    assert await cloud.sizes() == {"flex": 0}
    known(request).made.clear()
    gce._the_loop.do(lambda: insert(request))
    await running(cloud, "flex", 2)
    monkeypatch.setattr(methods, "_instance_group_manager_resize_requests_insert", insert)
    await cloud.resize("flex", 3)
    await running(cloud, "flex", 3)


async def test_a_request_that_never_arrives_is_sent_again(
    cloud: GcpCloud, gce: FakeGce, monkeypatch: pytest.MonkeyPatch
) -> None:
    gce.fail_operation("instance_group_manager_resize_requests.insert", "INTERNAL_ERROR", "Internal error")
    methods = gce._methods
    insert = methods._instance_group_manager_resize_requests_insert
    monkeypatch.setattr(
        methods,
        "_instance_group_manager_resize_requests_insert",
        lambda request: methods._operation(request.zone),
    )
    with pytest.raises(CloudError, match="INTERNAL_ERROR"):
        await cloud.resize("flex", 2)
    monkeypatch.setattr(methods, "_instance_group_manager_resize_requests_insert", insert)
    await cloud.resize("flex", 2)
    assert gce.size(GROUP) == 0
    monkeypatch.setattr(flex, "_MAKING", 0.0)
    await cloud.resize("flex", 2)
    await running(cloud, "flex", 2)


@pytest.mark.parametrize("end", [FakeGce.stop, FakeGce.vanish], ids=["it has stopped", "Google has deleted it"])
async def test_a_machine_that_has_ended_makes_room_for_another(
    cloud: GcpCloud, gce: FakeGce, end: Callable[[FakeGce, str], None]
) -> None:
    """Its group counts it and does nothing, because Google demands that of flex groups."""
    await cloud.resize("flex", 2)
    first, second = await running(cloud, "flex", 2)
    end(gce, first.name)

    async def one() -> bool:
        return await cloud.sizes() == {"flex": 1}

    await await_for(one, what="the smaller size")
    assert [node.name for node in await cloud.nodes() if node.pool == "flex"] == [second.name]
    await cloud.resize("flex", 2)
    names = {node.name for node in await running(cloud, "flex", 2)}
    assert second.name in names
    assert first.name not in names
    assert gce.size(GROUP) == 2


async def test_a_list_that_is_late_gets_no_second_machine(
    cloud: GcpCloud, gce: FakeGce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group goes on listing the ended machine after its deletion."""
    await cloud.resize("flex", 2)
    first, _ = await running(cloud, "flex", 2)
    gce.stop(first.name)
    late = await cloud._members("flex")

    async def members(pool: str) -> list[Any]:
        return late

    monkeypatch.setattr(cloud, "_members", members)
    await cloud.resize("flex", 2)
    assert gce.size(GROUP) == 2


async def test_a_smaller_size_ends_no_machine_that_runs(cloud: GcpCloud, gce: FakeGce) -> None:
    await cloud.resize("flex", 2)
    before = await running(cloud, "flex", 2)
    await cloud.resize("flex", 1)
    assert await running(cloud, "flex", 2) == before
    await cloud.resize("flex", 0)
    await running(cloud, "flex", 0)


def waiting(machines: int, at: float) -> Request:
    return Request(f"r{at:g}", machines, "waiting", at)


CHANGES = {
    "more are requested": (2, 5, [], [], 3),
    "nothing changes": (3, 3, [waiting(3, 1)], [], 0),
    "the newest request is cancelled": (5, 3, [waiting(2, 2), waiting(3, 1)], [2], 0),
    "a request that is too large is made again": (5, 4, [waiting(3, 1)], [1], 2),
    "requests that have their machines stay": (3, 1, [Request("r", 3, "over", 1)], [], 0),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_plan_for_another_size(case: str) -> None:
    target, size, known, cancelled, asked = CHANGES[case]
    found = plan_change(target, size, known)
    assert ([each.at for each in found.cancel], found.ask) == (cancelled, asked)


NOW = time.time()
SAID = {
    "nothing without requests": ([], None),
    "nothing of a request that has its machines": ([Request("r", 3, "over", NOW)], None),
    "all machines that wait, since the first request": (
        [waiting(2, NOW), waiting(3, NOW - 60)],
        ("queue", "the request for 5 flex a3-highgpu-8g waits for its turn", NOW - 60),
    ),
    "a quota that a request waits for": (
        [Request("r", 2, "waiting", NOW, "QUOTA_EXCEEDED", "too small")],
        ("quota", "waits for its turn in zone us-central1-a: QUOTA_EXCEEDED: too small", NOW),
    ),
    "nothing of a failure of long ago": ([Request("r", 2, "failed", NOW - 3600, "X", "y")], None),
}


@pytest.mark.parametrize("case", SAID)
def test_problems(case: str) -> None:
    known, expected = SAID[case]
    found = flex.diagnose(CLUSTER.pools[0], known, ())
    if expected is None:
        assert found == []
        return
    [problem] = found
    kind, text, at = expected
    assert (problem.kind, problem.at) == (kind, at)
    assert text in problem.message
    later = [Problem(problem.pool, problem.kind, problem.message, at - 5)]
    assert flex.diagnose(CLUSTER.pools[0], known, later) == later, "the time when it was first seen stays"


@pytest.mark.parametrize("market", ["spot", "on-demand", "flex"])
async def test_the_end_of_a_machines_time_makes_its_pool_smaller(market: str) -> None:
    """Google's groups make no successor: the head asks for it."""
    pool = {"name": "brief", "zone": A, "machine": "a3-highgpu-8g", "max": 2, "market": market, "max_run_duration": 1}
    cluster = ClusterSpec.model_validate({**CLUSTER.model_dump(exclude_defaults=True), "pools": [pool]})
    with project(cluster) as gce:
        cloud = GcpCloud(cluster)
        await cloud.resize("brief", 1)
        [first] = await running(cloud, "brief", 1)
        assert first.ends == pytest.approx(first.created + 1)
        await await_for(lambda: gce.size("demo--brief") == 0, what="the end of its time")
        assert await cloud.sizes() == {"brief": 0}
        await cloud.resize("brief", 1)
        [second] = await running(cloud, "brief", 1)
        assert second.id != first.id
        await cloud.close()
