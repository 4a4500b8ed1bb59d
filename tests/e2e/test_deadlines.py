"""Jobs with deadlines while zones dry up, prices change, and machines come from three markets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spotrun.head.speeds import LEAST
from tests.e2e import billing, harness
from tests.e2e.harness import Harness, Job, sample_ids, undisturbed

NOTICE = 8.0  # seconds: longer than two slow steps
LATE, SOON = 1.5, 0.2  # seconds of a step, with which the job would miss its deadline, and would have much spare time
# EC2 says how long a notice is.
LOCAL = {"boot_delay": 0.1, "recreate_delay": 0.5, "queue_delay": 0, "metadata": "ec2"}
SIZE = {"epochs": 1, "batch": 4}  # of the toy script
# A step takes 0.3 s until the test says something else: that is 10 minutes of work. A start may take most of a minute.
EACH: dict[str, Any] = {
    **SIZE,
    "pause": 0.002,
    "slow": 1,
    "stretch": 0.0,
    "heartbeat_timeout": 60,
    "checkpoint_interval": 10,
    "restart_time": 60,
}
URGENT: dict[str, Any] = {**EACH, "samples": 8000, "work": 600.0, "deadline": 1230.0}


@contextmanager
def cluster(folder: Path, name: str, pools: list[dict[str, Any]], prices: dict[str, float]) -> Iterator[Harness]:
    market = [{"where": pool, "price": price} for pool, price in prices.items()]
    spec = {"name": name, "cloud": "local", "pools": pools, "local": {**LOCAL, "market": market}}
    (folder / "cluster.yaml").write_text(json.dumps(spec))  # YAML, too
    with harness.running(folder, spec) as found:
        yield found


def dry(cluster: Harness, where: str) -> None:
    """The zone or pool takes its spot machines after a notice, and gives none."""
    cluster.cloud(lambda cloud: cloud.market(where, capacity=0, notice=NOTICE))


def restock(cluster: Harness, where: str, machines: int = 9) -> None:
    """The zone or pool has so many machines."""
    cluster.cloud(lambda cloud: cloud.market(where, capacity=machines))


def price(cluster: Harness, pool: str, dollars: float) -> None:
    cluster.cloud(lambda cloud: cloud.market(pool, price=dollars))


def until_on(cluster: Harness, pool: str) -> str:
    """Why the watched job is there, once it trains on a machine of the pool."""
    found = cluster.until(lambda s: _pools(s) == {pool} and s["job"]["phase"] == "running", f"training on {pool}")
    return str(found["job"]["placement"])


def leaves_spot(reason: str) -> bool:
    """Whether this is a reason to train on safe machines. Which of the two it is depends on how long the test took."""
    return "the point of no return" in reason or "safe machines cost less than waiting for spot" in reason


def until_late(cluster: Harness, job: Job) -> None:
    """Make the job's steps longer, until it would miss its deadline at that pace."""
    cluster.watch(job.id)
    steps = cluster.until(lambda s: s["job"]["phase"] == "running", "training")["job"]["step"] + LEAST
    cluster.until(lambda s: s["job"]["phase"] == "running" and s["job"]["step"] >= steps, "a measured pace")
    job.step(LATE)
    cluster.until(lambda s: s["job"]["eta"] and s["job"]["eta"] > s["job"]["deadline"], "little spare time")


def _pools(status: dict[str, Any]) -> set[str]:
    """The pools of the job's machines."""
    return {name.rpartition("-")[0] for name in status["job"]["members"]}


def placements(cluster: Harness) -> list[str]:
    """Why the watched job was sent where it trained, in order."""
    return [event["text"] for event in cluster.status()["events"] if event["kind"] == "machines"]


def in_time(final: dict[str, Any]) -> bool:
    return final["phase"] == "succeeded" and final["ended"] <= final["deadline"]


def test_a_job_changes_zone_falls_back_returns_to_spot_and_meets_its_deadline(tmp_path: Path) -> None:
    """Spot in zone a, spot in zone b, on-demand, spot, flex, spot: the weights are as without all that."""
    pools: list[dict[str, Any]] = [
        {"name": "spot-a", "zone": "local-a", "max": 1},
        {"name": "spot-b", "zone": "local-b", "max": 1},
        {"name": "flex", "zone": "local-c", "market": "flex", "max": 1},
        {"name": "steady", "zone": "local-c", "market": "on-demand", "max": 1},
    ]
    with cluster(tmp_path, "dry", pools, {"spot-a": 4.0, "spot-b": 6.0, "flex": 10.0, "steady": 20.0}) as found:
        restock(found, "flex", machines=0)
        job = found.submit(**URGENT)
        assert "trains on spot" in until_on(found, "spot-a")
        dry(found, "local-a")
        assert "trains on spot" in until_on(found, "spot-b")
        price(found, "spot-b", 9.0)

        until_late(found, job)
        dry(found, "local-b")
        assert leaves_spot(until_on(found, "steady"))
        told = placements(found)
        assert any(map(leaves_spot, told)), told
        price(found, "steady", 25.0)
        price(found, "spot-b", 5.0)

        job.step(SOON)
        restock(found, "local-a")
        assert "trains on spot" in until_on(found, "spot-a")

        restock(found, "flex")
        found.cloud(lambda cloud: cloud.market("steady", dry=True))
        until_late(found, job)
        dry(found, "local-a")
        assert leaves_spot(until_on(found, "flex"))
        job.step(SOON)
        restock(found, "local-b")
        assert "trains on spot" in until_on(found, "spot-b")
        job.go()
        final = found.until_ended()
        assert in_time(final), final
        report = billing.check(found)
        assert {row["pool"] for row in report["pools"]} == {"spot-a", "spot-b", "steady", "flex"}
    assert sample_ids(job.out, 1) == {0: list(range(URGENT["samples"]))}
    alone = tmp_path / "alone"
    alone.mkdir()
    assert harness.digest_of(job.out) == undisturbed(alone, 1, **SIZE, samples=URGENT["samples"])


def test_two_jobs_with_deadlines_and_one_without_share(tmp_path: Path) -> None:
    """The jobs with deadlines get machines first, and leave the spot machines when time is short; one gets the rest."""
    pools: list[dict[str, Any]] = [
        {"name": "spot", "zone": "local-a", "max": 3},
        {"name": "steady", "zone": "local-b", "market": "on-demand", "max": 2},
    ]
    with cluster(tmp_path, "share", pools, {"spot": 4.0, "steady": 20.0}) as found:
        rest = found.submit(**EACH, samples=16000, nodes={"min": 1, "max": 3}, grow_interval=1, pools=("spot",))
        rest.step(0.5)
        until(found, lambda now: len(now[rest.id]) == 3, "three nodes")
        urgent = [found.submit(**URGENT) for _ in range(2)]
        jobs = [rest, *urgent]
        each = until(found, lambda now: [len(now[job.id]) for job in jobs] == [1, 1, 1], "a machine for each job")
        assert set.union(*each.values()) == {"spot-0", "spot-1", "spot-2"}

        for job in urgent:
            until_late(found, job)
        until(found, lambda now: on(now, urgent, "steady") == 2, "safe machines for those with a deadline")
        until(found, lambda now: len(now[rest.id]) == 3, "the rest for the other job")
        price(found, "spot", 7.0)
        found.cloud(lambda cloud: cloud.market("local-a", capacity=1, notice=NOTICE))
        until(found, lambda now: len(now[rest.id]) == 1, "the other job on the last spot machine")

        for job in urgent:
            job.step(SOON)
        restock(found, "local-a")
        until(found, lambda now: on(now, urgent, "spot") == 2 and len(now[rest.id]) == 1, "all on spot machines")
        for job in urgent:
            job.go()
        for job in urgent:
            found.watch(job.id)
            final = found.until_ended()
            assert in_time(final), final
        found.watch(rest.id)
        until(found, lambda now: len(now[rest.id]) == 3, "the other job on all machines")
        rest.go()
        assert found.until_ended()["phase"] == "succeeded"
        billing.check(found)
    for job, samples in ((rest, 16000), *((job, URGENT["samples"]) for job in urgent)):
        assert sample_ids(job.out, 1) == {0: list(range(samples))}


def machines(status: dict[str, Any]) -> dict[str, set[str]]:
    """The machines on which each job trains that has not ended."""
    return {
        row["id"]: {each["node"] for each in row["nodes"]} if row["phase"] == "running" else set()
        for row in status["jobs"]
    }


def on(now: dict[str, set[str]], jobs: list[Job], pool: str) -> int:
    """How many of these jobs train in the pool."""
    return sum(any(name.startswith(f"{pool}-") for name in now[job.id]) for job in jobs)


def until(cluster: Harness, good: Callable[[dict[str, set[str]]], bool], what: str) -> dict[str, set[str]]:
    """The first machines of all jobs that are good."""
    return machines(cluster.until(lambda s: good(machines(s)), what))
