"""Several jobs on one machine, and what operators do with them: over SSH, on the local cloud."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotrun.errors import SpotrunError
from tests.e2e import harness
from tests.e2e.harness import Harness, Job
from tests.helpers import wait_for

SPEC = {
    "name": "shared",
    "cloud": "local",
    "pools": [{"name": "spot", "zone": "local-a", "max": 1, "devices": 4}],
    "local": {"boot_delay": 0.1, "recreate_delay": 0.5},
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Harness]:
    with harness.running(tmp_path, SPEC) as found:
        yield found


def rows(cluster: Harness) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in cluster.ctl("jobs")}


def phases(cluster: Harness, *jobs: Job) -> list[str]:
    found = rows(cluster)
    return [found[job.id]["phase"] for job in jobs]


def running(cluster: Harness, *jobs: Job) -> None:
    wait_for(lambda: set(phases(cluster, *jobs)) == {"running"}, what="all to run", timeout=240)


def devices(cluster: Harness) -> dict[str, set[int]]:
    """The devices of each job on the only node. AssertionError if two jobs have one."""
    nodes = cluster.status()["nodes"]
    found = [(each["job"], device) for node in nodes for each in node["jobs"] for device in each["devices"]]
    assert len({device for _, device in found}) == len(found), found
    return {job: {device for other, device in found if other == job} for job, _ in found}


def test_four_devices_change_hands_as_operators_say(cluster: Harness) -> None:
    """Two jobs of a group and two others; one waits, one is paused and resumed, one gets a higher priority."""
    endless: dict[str, Any] = {
        "epochs": 1,
        "samples": 8000,
        "batch": 4,
        "slow": 10,
        "pause": 0,
        "heartbeat_timeout": 60,
    }
    pair, single = (cluster.submit(devices=count, group="search", **endless) for count in (2, 1))
    third = cluster.submit(devices=1, **endless)
    running(cluster, pair, single, third)
    wanted = {pair.id: 2, single.id: 1, third.id: 1}
    wait_for(lambda: {job: len(each) for job, each in devices(cluster).items()} == wanted, what="four devices in use")
    assert rows(cluster)[pair.id]["group"] == "search"

    last = cluster.submit(devices=1, **endless)
    wait_for(lambda: phases(cluster, last) == ["queued"], what="the last to wait")
    assert rows(cluster)[last.id]["reason"]

    assert cluster.ctl("pause", "--job", third.id) == {"job": third.id}
    running(cluster, last)
    assert phases(cluster, third) == ["paused"]
    with pytest.raises(SpotrunError, match="4 jobs have not ended"):
        cluster.ctl("pause")

    cluster.ctl("resume", "--job", third.id)
    cluster.ctl("priority", "--job", third.id, "--to", "5")
    running(cluster, third)
    assert phases(cluster, last) != ["running"]
    assert rows(cluster)[third.id]["priority"] == 5

    assert set(cluster.ctl("stop", "--group", "search")["jobs"]) == {pair.id, single.id}
    wait_for(lambda: phases(cluster, pair, single) == ["stopped", "stopped"], what="the group to stop")
    running(cluster, third, last)
    for job in (third, last):
        job.go()
    wait_for(lambda: phases(cluster, third, last) == ["succeeded", "succeeded"], what="the ends", timeout=240)
    with pytest.raises(SpotrunError, match="group search has no job that has not ended"):
        cluster.ctl("stop", "--group", "search")
