"""Machines whose end is known, as those of market flex, are handed over before it, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from scripts.home import home
from spotrun.cloud.local.layout import Layout
from tests.e2e.harness import Harness, running, sample_ids

LIFE = 60.0
SPEC = {
    "name": "ends",
    "cloud": "local",
    "pools": [{"name": "flex", "zone": "local-a", "market": "flex", "max": 3, "max_run_duration": LIFE}],
    "local": {"boot_delay": 0.1, "recreate_delay": 0.5, "queue_delay": 2},
}


@pytest.fixture
def flex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with running(tmp_path_factory.mktemp("ends"), SPEC) as harness:
        yield harness


def test_flex_machines_are_handed_over_before_their_end(flex: Harness) -> None:
    """Both first machines retire and end before the cloud would end them, and their successors wait in the queue."""
    job = flex.submit(nodes={"min": 1, "max": 2}, epochs=2, samples=2400, batch=4, grow_interval=1, slow=20)
    flex.until(lambda s: len(s["job"]["members"]) == 2 and s["job"]["phase"] == "running", what="two nodes train")
    first = {node["name"] for node in flex.status()["nodes"]}
    flex.until(lambda s: len(ended(flex)) >= 2, what="the end of the first machines")
    job.go()
    final = flex.until_ended()
    assert final["phase"] == "succeeded", final
    assert sample_ids(job.out, 2) == {epoch: list(range(2400)) for epoch in range(2)}
    assert {name for name, _ in ended(flex)[:2]} == first
    assert all(lived < LIFE for _, lived in ended(flex)[:2]), "the cloud would end them at that age"
    assert final["interruptions"]
    assert all(each["steps_lost"] == 0 for each in final["interruptions"]), final["interruptions"]


def ended(flex: Harness) -> list[tuple[str, float]]:
    """The machines that have ended, and how long they lived."""
    made: dict[str, float] = {}
    found = []
    for line in Layout.of(home(), flex.spec.name).ledger.read_text().splitlines():
        said = json.loads(line)
        if said["what"] == "created":
            made[said["id"]] = said["at"]
        elif said["what"] == "ended":
            found.append((said["machine"], said["at"] - made[said["id"]]))
    return found


@pytest.fixture
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """The job needs all machines that its pool may have."""
    pool = {"name": "full", "zone": "local-a", "max": 2, "max_run_duration": 40.0}
    with running(tmp_path_factory.mktemp("full"), {**SPEC, "name": "full", "pools": [pool]}) as harness:
        yield harness


def test_the_head_asks_for_successors_of_machines_that_stayed_until_their_end(full: Harness) -> None:
    """As with Google's groups: their pool becomes smaller at their end."""
    job = full.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=2400, batch=4, grow_interval=1, slow=20)
    full.until(lambda s: len(s["job"]["members"]) == 2 and s["job"]["phase"] == "running", what="two nodes train")
    full.until(lambda s: len(ended(full)) >= 2, what="the end of the first machines")
    job.go()
    final = full.until_ended()
    assert final["phase"] == "succeeded", final
    assert sample_ids(job.out, 2) == {epoch: list(range(2400)) for epoch in range(2)}
    assert all(each["steps_lost"] == 0 for each in final["interruptions"]), final["interruptions"]
