"""Google Cloud's module over real HTTP, against a Compute Engine that takes only what its own library can say."""

from __future__ import annotations

import asyncio
import queue
import re
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import cloud_site
from scripts.cloud_site import CloudSite
from spotrun.cloud import asking, prices
from spotrun.cloud.base import Shortfall
from spotrun.cloud.gcp import GcpCloud, api
from spotrun.errors import CloudError, PartialError
from spotrun.head.capacity.sizes import Need, Observation, decide
from spotrun.head.fleet.pools import Fleet
from spotrun.spec import ClusterSpec
from spotrun.store import Store, host_key
from tests.fakes import gce as fakegce
from tests.fakes.gce import Event, FakeGce
from tests.fakes.on_gcp import CLUSTER, A, B, pool_of, running, successor
from tests.helpers import await_for

pytestmark = pytest.mark.clouds

LIST = "instances.list"


async def test_what_a_cluster_has(cloud: GcpCloud, gce: FakeGce) -> None:
    before = time.time()
    await pool_of(cloud, "steady", 1)
    node = (await pool_of(cloud, "spot-b", 1))[0]
    assert re.fullmatch("demo--spot-b-[a-z0-9]{4}", node.name)
    assert (node.zone, node.market, node.state) == (B, "spot", "running")
    assert before - 0.001 <= node.created <= time.time()
    assert node.id.isdecimal()
    gce.assign_address(node.name, "127.1.2.3")
    found = {each.pool: each for each in await cloud.nodes()}
    assert found["spot-b"].address == "127.1.2.3"
    assert {pool: each.market for pool, each in found.items()} == {
        "head": "on-demand",
        "steady": "on-demand",
        "spot-b": "spot",
    }
    assert await cloud.sizes() == {"spot-a": 0, "spot-b": 1, "steady": 1}


async def test_another_cluster_of_the_project_is_not_ours(cloud: GcpCloud, gce: FakeGce) -> None:
    gce.add_cluster(CLUSTER.model_copy(update={"name": "demo-2"}))
    mine = await running(cloud, "head", 1)
    await await_for(lambda: [m.status for m in gce.machines()] == ["RUNNING"] * 2)
    assert await cloud.nodes() == mine


async def test_grow_and_shrink(cloud: GcpCloud, gce: FakeGce) -> None:
    await pool_of(cloud, "spot-a", 3)
    await pool_of(cloud, "spot-a", 5)
    assert (await cloud.sizes())["spot-a"] == 5
    await pool_of(cloud, "spot-a", 0)
    assert gce.size("demo--spot-a") == 0


async def test_every_page_is_read(cloud: GcpCloud, gce: FakeGce) -> None:
    names = {node.name for node in await pool_of(cloud, "spot-a", 5)}
    gce.calls.clear()
    assert {node.name for node in await cloud.nodes()} >= names
    assert gce.calls.count(LIST) == 4  # six machines in one zone, none in the other
    await cloud.remove(sorted(names))
    assert gce.size("demo--spot-a") == 0


@pytest.mark.parametrize(
    ("pool", "size", "message"),
    [
        ("spot-a", 6, "pool spot-a: size 6 is not allowed; its cluster file says 0 to 5"),
        ("spot-a", -1, "pool spot-a: size -1 is not allowed"),
        ("nope", 1, "there is no pool 'nope' to resize; pools: spot-a, spot-b, steady"),
        ("head", 0, "there is no pool 'head' to resize"),
    ],
)
async def test_sizes_that_are_not_allowed(cloud: GcpCloud, gce: FakeGce, pool: str, size: int, message: str) -> None:
    with pytest.raises(CloudError, match=re.escape(message)):
        await cloud.resize(pool, size)
    assert gce.calls == []


async def test_what_was_never_born_goes_first(cloud: GcpCloud, gce: FakeGce) -> None:
    """A group that shrinks by its size takes whom it likes, and this fake likes those that run."""
    gce.limit("demo--spot-a", 2)
    await cloud.resize("spot-a", 5)
    before = await running(cloud, "spot-a", 2)
    for size in (3, 2):
        await cloud.resize("spot-a", size)
        assert gce.size("demo--spot-a") == size
    gce.limit("demo--spot-a", None)
    assert await running(cloud, "spot-a", 2) == before
    assert await cloud.problems() == []


async def test_remove_lowers_the_size(cloud: GcpCloud, gce: FakeGce) -> None:
    first, *others = await pool_of(cloud, "spot-a", 3)
    other = (await pool_of(cloud, "spot-b", 1))[0]
    await cloud.remove([first.name, other.id])
    assert await running(cloud, "spot-a", 2) == others
    assert await running(cloud, "spot-b", 0) == []
    assert await cloud.sizes() == {"spot-a": 2, "spot-b": 0, "steady": 0}


async def test_remove_twice_is_remove_once(cloud: GcpCloud, gce: FakeGce) -> None:
    gce.times.stop = 60.0
    first, other, _ = await pool_of(cloud, "spot-a", 3)
    await cloud.remove([first.name])
    await cloud.remove([first.name, other.name])
    assert gce.size("demo--spot-a") == 1
    assert {n.name for n in await cloud.nodes() if n.state == "stopping"} == {first.name, other.name}


async def test_remove_one_that_is_not_there_at_the_moment(cloud: GcpCloud, gce: FakeGce) -> None:
    """Preempted, and waiting for a machine in its place: the group alone knows it."""
    node = (await pool_of(cloud, "spot-a", 1))[0]
    gce.limit("demo--spot-a", 0)
    gce.vanish(node.name)
    await running(cloud, "spot-a", 0)
    await cloud.remove([node.name])
    assert gce.size("demo--spot-a") == 0


async def test_nothing_is_recreated_if_one_is_unknown(cloud: GcpCloud) -> None:
    node = (await pool_of(cloud, "spot-a", 1))[0]
    with pytest.raises(CloudError, match=rf"there is no machine 'nope'; machines: demo--head-\w+, {node.name}$"):
        await cloud.recreate([node.name, "nope"])
    assert await running(cloud, "spot-a", 1) == [node]


async def test_one_that_cannot_be_removed_does_not_keep_the_others(
    cloud: GcpCloud, gce: FakeGce, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, other, third = await pool_of(cloud, "spot-a", 3)
    with pytest.raises(CloudError, match="there is no machine 'nope'; machines: "):
        await cloud.remove(["nope", other.name])
    assert gce.size("demo--spot-a") == 2

    async def members(pool: str, whole: Any = cloud._members) -> list[Any]:
        return [each for each in await whole(pool) if each.name != taken.name]

    monkeypatch.setattr(cloud, "_members", members)  # a person has taken it out of its group
    said = f"machine {taken.name} is running but is in no group of the cluster: delete it by hand"
    with pytest.raises(CloudError, match=said):
        await cloud.remove([taken.name, third.name])
    assert gce.size("demo--spot-a") == 1


async def test_the_head_is_not_removed(cloud: GcpCloud) -> None:
    head = (await running(cloud, "head", 1))[0]
    for name in ("head", head.name, head.id):
        with pytest.raises(CloudError, match="`make down` ends the cluster"):
            await cloud.remove([name])
    assert await running(cloud, "head", 1) == [head]


async def test_recreate_keeps_the_name(cloud: GcpCloud) -> None:
    old, other = await pool_of(cloud, "spot-a", 2)
    await cloud.recreate([old.name])
    new = await successor(cloud, old)
    assert new.created > old.created
    assert other in await running(cloud, "spot-a", 2)
    head = (await running(cloud, "head", 1))[0]
    await cloud.recreate(["head"])
    await successor(cloud, head)


async def test_one_that_is_being_replaced_is_left_to_its_group(cloud: GcpCloud, gce: FakeGce) -> None:
    node = (await pool_of(cloud, "spot-a", 1))[0]
    gce.limit("demo--spot-a", 0)
    gce.vanish(node.name)
    await running(cloud, "spot-a", 0)
    await cloud.recreate([node.name])
    assert "instance_group_managers.recreate_instances" not in gce.calls


async def test_a_preemption_gives_notice(cloud: GcpCloud, gce: FakeGce) -> None:
    events: queue.Queue[Event] = queue.Queue()
    node = (await pool_of(cloud, "spot-a", 1))[0]
    gce.watch(lambda event: events.put(event) if event.kind == "notice" else None)
    await cloud.preempt(node.name)
    event = await asyncio.to_thread(events.get, timeout=300)
    assert event.machine.name == node.name
    assert event.machine.due == pytest.approx(time.time() + 30, abs=5)
    assert [n.state for n in await cloud.nodes() if n.id == node.id] == ["stopping"]
    await cloud.preempt(node.name, 30)  # it is under way
    assert gce.calls.count("instances.simulate_maintenance_event") == 1
    await cloud.kill(node.name)  # which cuts it short
    await successor(cloud, node)
    assert gce.size("demo--spot-a") == 1


async def test_the_notice_is_the_pools_own(cloud: GcpCloud, gce: FakeGce) -> None:
    pools = [pool.model_copy(update={"notice": 120.0}) if pool.name == "spot-a" else pool for pool in CLUSTER.pools]
    early = GcpCloud(CLUSTER.model_copy(update={"pools": tuple(pools)}))
    node = (await pool_of(early, "spot-a", 1))[0]
    with pytest.raises(CloudError, match="notice 30 is not possible: Google gives 120 s of notice, or none"):
        await early.preempt(node.name, 30)
    await early.preempt(node.name, 120)
    assert gce.calls.count("instances.simulate_maintenance_event") == 1
    await early.close()


async def test_a_kill_gives_none(cloud: GcpCloud, gce: FakeGce) -> None:
    events: queue.Queue[Event] = queue.Queue()
    node = (await pool_of(cloud, "steady", 1))[0]
    gce.watch(events.put)
    await cloud.preempt(node.id, 0)
    await successor(cloud, node)
    head = (await running(cloud, "head", 1))[0]
    await cloud.kill("head")
    await successor(cloud, head)
    assert "notice" not in {event.kind for event in events.queue}


async def test_preemptions_that_there_are_not(cloud: GcpCloud, gce: FakeGce) -> None:
    steady, spot = (await pool_of(cloud, "steady", 1))[0], (await pool_of(cloud, "spot-b", 1))[0]
    for name, notice, message in [
        (steady.name, None, "is on-demand, and the cloud preempts only spot machines; kill it instead"),
        ("head", None, "is on-demand"),
        (spot.name, 5.0, "notice 5 is not possible: Google gives 30 s of notice, or none"),
        ("nope", None, "there is no machine 'nope'"),
        ("nope", 0, "there is no machine 'nope'"),
    ]:
        with pytest.raises(CloudError, match=message):
            await cloud.preempt(name, notice)
    gce.times.boot = 60.0
    await cloud.resize("spot-a", 1)
    young = next(n for n in await cloud.nodes() if n.pool == "spot-a")
    with pytest.raises(CloudError, match=f"machine {young.name} is provisioning; wait until it is running"):
        await cloud.preempt(young.name)


# What keeps a pool from its size.


@pytest.mark.parametrize(
    ("code", "message", "kind", "says"),
    [
        (fakegce.STOCKOUT, "", "stockout", f"zone {A} has no more spot g2-standard-8 at present: 2 missing"),
        (
            "QUOTA_EXCEEDED",
            "Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.  Limit: 1.0 in region us-central1.",
            "quota",
            "2 missing: QUOTA_EXCEEDED: Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded. Limit: 1.0 in region us-central1",
        ),
        ("INVALID_FIELD_VALUE", "no such image", "other", "2 missing: INVALID_FIELD_VALUE: no such image"),
    ],
)
async def test_a_pool_short_of_machines(
    cloud: GcpCloud, gce: FakeGce, code: str, message: str, kind: str, says: str
) -> None:
    gce.limit("demo--spot-a", 1, code, message)
    began = time.time()
    await cloud.resize("spot-a", 3)
    first = (await await_for(cloud.problems))[0]
    assert (first.pool, first.kind) == ("spot-a", kind)
    assert first.message.startswith(says)
    assert began - 0.001 <= first.at <= time.time()
    assert await cloud.problems() == [first]  # the same moment, the same words: nothing new
    gce.limit("demo--spot-a", None)
    await running(cloud, "spot-a", 3)
    assert await cloud.problems() == []


async def scale(fleet: Fleet, needed: int, keep: Collection[str], silent: Collection[str] = ()) -> None:
    """What the head does. keep: members. silent: machines that do not report, in a zone that does not answer."""
    known = ({name: state for name, state in pool.states.items() if name not in silent} for pool in fleet.pools())
    pools = tuple(replace(pool, states=states) for pool, states in zip(fleet.pools(), known, strict=True))
    found = decide(Observation(pools, (Need(needed),), frozenset(keep)))
    await fleet.scale(found.sizes, found.remove)


async def test_the_head_turns_to_another_zone_and_back(cloud: GcpCloud, gce: FakeGce) -> None:
    """The whole way: the head's own decisions over this cloud, while a zone runs dry and recovers."""
    fleet, keep = Fleet(CLUSTER, cloud), ["unknown"]
    gce.limit("demo--spot-a", 1)

    async def turn(wanted: dict[str, int]) -> bool:
        await fleet.look()
        await scale(fleet, 3, keep)
        found = [i.pool for i in fleet.instances or () if i.state == "running"]
        return {pool: found.count(pool) for pool in set(found)} == wanted

    await await_for(lambda: turn({"spot-a": 1, "spot-b": 2}))
    assert [problem.kind for problem in fleet.problems] == ["stockout"]
    members = [i for i in fleet.instances or () if i.pool == "spot-a" or i.pool == "spot-b"][:2]
    keep += [member.name for member in members]
    gce.limit("demo--spot-a", None)
    await await_for(lambda: turn({"spot-a": 2, "spot-b": 1}))
    assert {m.id for m in members} <= {i.id for i in fleet.instances or ()}
    await scale(fleet, 0, [])
    await await_for(lambda: [m.name.startswith("demo--head-") for m in gce.machines()] == [True])


async def test_a_machine_that_came_after_the_head_looked_costs_no_member(cloud: GcpCloud, gce: FakeGce) -> None:
    """The head takes one of three for missing, and gives it up. By then, all three run."""
    fleet = Fleet(CLUSTER, cloud)
    gce.limit("demo--spot-a", 2)
    await cloud.resize("spot-a", 3)
    members = await running(cloud, "spot-a", 2)
    await fleet.look()
    gce.limit("demo--spot-a", None)
    await running(cloud, "spot-a", 3)
    await scale(fleet, 2, [member.name for member in members])
    assert {member.id for member in members} < {each.id for each in await running(cloud, "spot-a", 3)}
    await fleet.look()
    await scale(fleet, 2, [member.name for member in members])
    assert await running(cloud, "spot-a", 2) == members


async def test_the_head_turns_to_another_zone_while_a_host_is_repaired(cloud: GcpCloud, gce: FakeGce) -> None:
    """The group counts a machine under repair, and makes no other one. The repair may take an hour."""
    fleet = Fleet(CLUSTER, cloud)
    member, broken = await pool_of(cloud, "spot-a", 2)

    def say(status: str) -> None:
        gce._the_loop.do(lambda: setattr(gce._vm(broken.name).resource, "status", status))

    say("REPAIRING")
    before = time.time()
    [problem] = await fleet.look()
    assert (problem.pool, problem.kind) == ("spot-a", "other")
    assert problem.message == f"Google repairs the host of {broken.name} in zone {A}, which may take an hour"
    assert before - 0.001 <= problem.at <= time.time()
    assert await fleet.look() == []
    assert fleet.problems == [problem]
    pools = [replace(p, ending=frozenset({broken.name} & p.states.keys())) for p in fleet.pools()]
    found = decide(Observation(tuple(pools), (Need(2),), frozenset({member.name})))
    assert found.sizes == {"spot-b": 1}
    say("RUNNING")
    await fleet.look()
    assert fleet.problems == []


# A zone is out: each has endpoints of its own.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api.OPTIONS, "retry", api.OPTIONS["retry"].with_timeout(0.1))


async def test_a_zone_that_does_not_answer(cloud: GcpCloud, gce: FakeGce, impatient: None) -> None:
    """The others go on: what they have is told, and changed."""
    first, second = await pool_of(cloud, "spot-a", 2)
    await pool_of(cloud, "spot-b", 1)
    gce.limit("demo--spot-b", 1)
    await cloud.resize("spot-b", 2)
    problems = await await_for(cloud.problems)
    gce.out = {B}
    with pytest.raises(PartialError, match=f"^machines in {B}: .*zone {B} is out") as caught:
        await cloud.nodes()
    assert {node.pool for node in caught.value.known} == {"head", "spot-a"}
    assert caught.value.missing.keys() == {"spot-b"}
    with pytest.raises(PartialError, match="pool spot-b: ") as caught:
        await cloud.sizes()
    assert caught.value.known == {"spot-a": 2, "steady": 0}
    assert await cloud.problems() == problems
    await cloud.recreate([first.name])
    await successor(cloud, first)
    await cloud.remove([second.name])
    assert gce.size("demo--spot-a") == 1
    await cloud.preempt(first.name)
    with pytest.raises(CloudError, match=f"zone {B} is out"):
        await cloud.remove(["demo--spot-b-0"])
    with pytest.raises(CloudError, match=f"zone {B} is out"):
        await cloud.kill("demo--spot-b-0")
    gce.out = {A, B}
    for question in (cloud.nodes, cloud.sizes, cloud.problems):
        with pytest.raises(CloudError) as refused:
            await question()
        assert type(refused.value) is CloudError


async def test_the_head_turns_to_another_zone_while_one_is_out(cloud: GcpCloud, gce: FakeGce, impatient: None) -> None:
    """Two of three machines there do not report any more. When the zone answers, all is as it was."""
    fleet = Fleet(CLUSTER, cloud)
    names = [node.name for node in await pool_of(cloud, "spot-a", 3)]
    gce.out = {A}
    fresh = Fleet(CLUSTER, cloud)
    assert [problem.pool for problem in await fresh.look()] == ["spot-a", "steady"]
    gce.out = set()
    await fleet.look()
    gce.out = {A}
    found = await fleet.look()
    assert [problem.message.partition(":")[0] for problem in found] == [f"zone {A} does not answer"] * 2
    await scale(fleet, 3, names[:1], names[1:])
    await running(cloud, "spot-b", 2)
    await fleet.look()
    await scale(fleet, 3, names[:1], names[1:])
    assert (gce.size("demo--spot-a"), gce.size("demo--spot-b")) == (3, 2)
    assert fleet.names("spot-a") == set(names)
    gce.out = set()
    assert await fleet.look() == fleet.problems == []
    await scale(fleet, 3, names[:1])
    assert (gce.size("demo--spot-a"), gce.size("demo--spot-b")) == (3, 0)


def test_an_operator_takes_no_zone_for_empty_that_does_not_answer(
    gce: FakeGce, impatient: None, tmp_path: Path
) -> None:
    store = Store(str(tmp_path))
    store.put(host_key("demo", "demo--spot-b-0"), b"{}")
    gce.out = {B}
    with asking(CLUSTER) as ask:
        with pytest.raises(CloudError, match=f"zone {B} is out"):
            cloud_site._machines(ask)
        cloud_site._forget_gone(CLUSTER, store, ask)
    assert store.exists(host_key("demo", "demo--spot-b-0"))
    a, b, steady = CLUSTER.pools
    elsewhere = a.model_copy(update={"zone": f"{A[:-1]}f"})
    CloudSite(CLUSTER.model_copy(update={"pools": (elsewhere, b)}), "c.yaml")._refuse_ends(CLUSTER)
    said = f"c.yaml: pool spot-b: this change may end .*: machines in {B}: .*zone {B} is out.*another zone can be added"
    with pytest.raises(CloudError, match=said):
        CloudSite(CLUSTER.model_copy(update={"pools": (a, steady)}), "c.yaml")._refuse_ends(CLUSTER)


# Prices, quotas, and what an agent does not load.


async def test_prices_are_the_shipped_ones(cloud: GcpCloud) -> None:
    spot, steady = prices.spot("gcp", A, "g2-standard-8"), prices.on_demand("gcp", A, "g2-standard-8")
    found = await cloud.prices()
    assert (found["spot-a"], found["steady"]) == (spot, steady)
    pools = [
        {"name": "t4", "zone": A, "machine": "n1-standard-8", "accelerator": {"type": "nvidia-tesla-t4", "count": 1}},
        {"name": "odd", "zone": A, "machine": "zz-standard-8"},
    ]
    other = ClusterSpec.model_validate({**CLUSTER.model_dump(), "pools": pools})
    assert await GcpCloud(other).prices() == {"t4": prices.spot("gcp", A, "n1-standard-8", "nvidia-tesla-t4", 1)}


async def test_quotas_too_small(cloud: GcpCloud, gce: FakeGce) -> None:
    await pool_of(cloud, "spot-a", 2)
    gce.set_quotas({"PREEMPTIBLE_NVIDIA_L4_GPUS": (5, 3), "NVIDIA_L4_GPUS": (1, 0)}, "us-central1")
    gce.set_quotas({"GPUS_ALL_REGIONS": (16, 2)})
    assert await cloud.shortfalls() == [  # two of the three are the cluster's own
        Shortfall("spot-a", "PREEMPTIBLE_NVIDIA_L4_GPUS", has=5, needs=5, used=1),
        Shortfall("spot-b", "PREEMPTIBLE_NVIDIA_L4_GPUS", has=5, needs=5, used=1),
        Shortfall("steady", "NVIDIA_L4_GPUS", has=1, needs=2, used=0),
    ]


async def test_clients_are_made_once(cloud: GcpCloud) -> None:
    await cloud.nodes()
    made = cloud.api._made
    await asyncio.gather(cloud.sizes(), cloud.nodes(), cloud.problems())
    assert made is not None
    assert cloud.api._made is made


@pytest.mark.parametrize("module", ["spotrun.cli", "spotrun.node.boot", "spotrun.head.server.serve", "spotrun.cloud"])
def test_only_a_head_in_google_cloud_loads_googles_library(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name.startswith('google') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
