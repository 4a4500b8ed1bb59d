"""Several jobs share a cluster: machines and devices change hands, are taken, and no job disturbs another one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotrun.cloud.local.layout import Layout, remove_tree
from spotrun.errors import CloudError, SpotrunError
from spotrun.store import job_key
from tests.e2e.harness import Harness, Job, digest_of, running, sample_ids, undisturbed
from tests.fakes.node import small_memory
from tests.helpers import once, wait_for

MANY = 40  # jobs of one device each
SPEC: dict[str, Any] = {
    "name": "jobs",
    "cloud": "local",
    "pools": [
        {"name": "whole", "zone": "local-a", "max": 4},
        {"name": "parts", "zone": "local-b", "max": 3, "devices": 4},
    ],
    "local": {"boot_delay": 0.1, "recreate_delay": 0.5},
}
# The workers of many jobs share two cores, so an agent may be silent for a moment. A job with `slow` takes minutes to
# end by itself: until then the others have begun, also on a busy machine.
EACH: dict[str, Any] = {
    "epochs": 1,
    "samples": 1200,
    "batch": 4,
    "pause": 0.005,
    "step": 1.0,
    "snapshot_interval": 5,
    "heartbeat_timeout": 60,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """If this user may mount one, the machines share a small tmpfs, which a job can fill."""
    folder = tmp_path_factory.mktemp("jobs")
    with contextlib.ExitStack() as stack:
        memory = memory_of(folder)
        memory.mkdir(mode=0o700)
        stack.callback(remove_tree, memory)
        with contextlib.suppress(pytest.skip.Exception):
            stack.enter_context(small_memory(memory))
        yield stack.enter_context(running(folder, SPEC))


def memory_of(folder: Path) -> Path:
    """The folder in memory of the cluster's machines."""
    return Layout.of(folder / "home", SPEC["name"]).tmpfs


def expected(cluster: Harness, ranks: int, samples: int = EACH["samples"]) -> str:
    """The digest of the final state of a run of `EACH` that nothing disturbs."""
    out = cluster.folder / f"undisturbed-{ranks}-{samples}"
    options = {"epochs": EACH["epochs"], "samples": samples, "batch": EACH["batch"]}
    out.mkdir(exist_ok=True)
    return once(out.name, lambda: undisturbed(out, ranks, **options))


def ended(cluster: Harness, job: Job) -> dict[str, Any]:
    """What the status document says about the job when it has ended."""
    cluster.watch(job.id)
    return cluster.until_ended()


def rows(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The jobs that have not ended, by id."""
    return {row["id"]: row for row in status["jobs"]}


def sizes(status: dict[str, Any], *jobs: Job) -> list[int]:
    """How many nodes each job trains on."""
    found = rows(status)
    return [len(found[job.id]["nodes"]) if training(status, job) else 0 for job in jobs]


def training(status: dict[str, Any], job: Job, step: int = 1) -> bool:
    row = rows(status).get(job.id)
    return row is not None and row["phase"] == "running" and row["step"] >= step


def places(status: dict[str, Any], *jobs: Job) -> set[str]:
    """The nodes of these jobs."""
    return {place["node"] for job in jobs for place in rows(status)[job.id]["nodes"]}


def interruptions_of(final: dict[str, Any]) -> list[tuple[str, int]]:
    return [(each["kind"], each["steps_lost"]) for each in final["interruptions"]]


def test_an_urgent_job_takes_machines_and_gives_them_back(cluster: Harness) -> None:
    """Two jobs shrink to their min without a lost step, and grow again."""
    elastic = {**EACH, "samples": 2400, "nodes": {"min": 1, "max": 2}, "grow_interval": 1, "slow": 20}
    low = [cluster.submit(**elastic, pools=("whole",)) for _ in range(2)]
    cluster.until(lambda s: sizes(s, *low) == [2, 2], "two jobs on all machines")
    urgent = cluster.submit(**EACH, nodes=2, pools=("whole",), priority=5, slow=20)
    cluster.until(lambda s: sizes(s, urgent, *low) == [2, 1, 1], "the urgent job on two machines")
    urgent.go()
    final = cluster.until_ended()
    assert (final["phase"], interruptions_of(final), digest_of(urgent.out)) == (
        "succeeded",
        [],
        expected(cluster, ranks=2),
    )
    cluster.watch(low[0].id)
    cluster.until(lambda s: sizes(s, *low) == [2, 2], "two jobs on all machines again")
    for job in low:
        job.go()
    for job in low:
        final = ended(cluster, job)
        # A job begins with one node, and grows, if a machine boots much later than the others.
        *earlier, move, grow = interruptions_of(final)
        assert (final["phase"], move, grow) == ("succeeded", ("move", 0), ("grow", 0))
        assert set(earlier) <= {("grow", 0)}
        assert sample_ids(job.out, 1) == {0: list(range(2400))}


def test_a_queued_job_is_stopped_before_it_begins(cluster: Harness) -> None:
    first = cluster.submit(**EACH, pools=("whole",), slow=10)
    cluster.until_step(5)
    second = cluster.submit(**EACH, nodes=4, pools=("whole",))
    why = "no room for 4 machines beside other jobs"  # so none is asked for, and paid, before the first job has ended
    cluster.until(lambda s: s["job"]["phase"] == "queued" and why in s["job"]["placement"], "the reason")
    cluster.ctl("stop", "--job", second.id)
    stopped = cluster.until_ended()
    assert (stopped["phase"], stopped["started"]) == ("stopped", None)
    first.go()
    final = ended(cluster, first)
    assert (final["phase"], interruptions_of(final), digest_of(first.out)) == (
        "succeeded",
        [],
        expected(cluster, ranks=1),
    )


def test_a_paused_job_continues_bit_for_bit(cluster: Harness) -> None:
    """Its state is in the bucket meanwhile, and its machines are gone."""
    job = cluster.submit(**EACH, nodes=2, pools=("whole",), slow=10)
    cluster.until_step(5)
    cluster.ctl("pause", "--job", job.id)
    paused = cluster.until(lambda s: s["job"]["phase"] == "paused" and not s["nodes"], "a pause without machines")
    assert paused["job"]["checkpoint"] == paused["job"]["step"] >= 5
    cluster.ctl("resume", "--job", job.id)
    job.go()
    final = cluster.until_ended()
    assert (final["phase"], interruptions_of(final)) == ("succeeded", [("pause", 0)])
    assert digest_of(job.out) == expected(cluster, ranks=2)


def test_four_jobs_share_a_machine_that_is_preempted(cluster: Harness) -> None:
    """Each stops at a step of its own within the notice, and continues on another machine."""
    jobs = [cluster.submit(**EACH, devices=1, pools=("parts",), slow=10 + 5 * index) for index in range(4)]
    status = cluster.until(lambda s: all(training(s, job, 10) for job in jobs), "four jobs that train")
    (node,) = places(status, *jobs)
    cluster.fault("preempt", node)
    for job in jobs:
        cluster.watch(job.id)
        cluster.until(lambda s: s["job"]["interruptions"], "the drain")
    for job in jobs:
        job.go()
    for job in jobs:
        final = ended(cluster, job)
        ((kind, lost),) = interruptions_of(final)
        # On a slow machine, a regroup can take too long. Then the workers restart, and still lose nothing.
        assert (final["phase"], kind.removesuffix("+start"), lost) == ("succeeded", "preempt", 0)
        assert digest_of(job.out) == expected(cluster, ranks=1)


def test_a_head_that_is_killed_whenever_machines_move_loses_nothing(cluster: Harness) -> None:
    """At the first change of each kind that it writes of each job. The script fails if a device is another job's."""
    elastic = {**EACH, "samples": 2400, "nodes": {"min": 1, "max": 2}, "grow_interval": 1, "slow": 20}
    low = [cluster.submit(**elastic, pools=("whole",)) for _ in range(2)]
    cluster.until(lambda s: sizes(s, *low) == [2, 2], "two jobs on all machines")
    urgent = cluster.submit(**EACH, nodes=2, pools=("whole",), priority=5, slow=20)
    seen = {step_of(cluster, job) for job in low}
    deaths = 0

    def settled() -> bool:
        """All jobs train as they should, and the head was not killed a moment ago."""
        nonlocal deaths
        new = {step_of(cluster, job) for job in (*low, urgent)} - seen
        if new:
            seen.update(new)
            with contextlib.suppress(CloudError):  # it is dead already
                cluster.kill_head()
                deaths += 1
        now = {job.id: state_of(cluster, job) for job in (*low, urgent)}
        trained = {job: len((each["current"] or {}).get("members", ())) for job, each in now.items()}
        return not new and [trained[job.id] for job in (urgent, *low)] == [2, 1, 1]

    wait_for(settled, what="the urgent job on two machines", timeout=120)
    assert deaths > 1
    urgent.go()
    final = ended(cluster, urgent)
    # A generation of which only one member has its order when the head dies may fail and begin again: no step is lost.
    assert (final["phase"], sum(lost for _, lost in interruptions_of(final))) == ("succeeded", 0)
    assert "is used by" not in str(final["failure"])
    assert digest_of(urgent.out) == expected(cluster, ranks=2)
    for job in low:
        job.go()
    for job in low:
        final = ended(cluster, job)
        assert final["phase"] == "succeeded"
        assert "is used by" not in str(final["failure"])
        assert sum(lost for _, lost in interruptions_of(final)) == 0
        assert sample_ids(job.out, 1) == {0: list(range(2400))}


def state_of(cluster: Harness, job: Job) -> dict[str, Any]:
    """What the bucket says of a job."""
    found: dict[str, Any] = json.loads(cluster.access.store.get(job_key(job.id, "state.json")))
    return found


def step_of(cluster: Harness, job: Job) -> tuple[object, ...]:
    """How far the job is in a change of its machines."""
    state = state_of(cluster, job)
    return job.id, state["phase"], bool(state["draining"]), bool(state["saving"])


def test_many_jobs_end_well_though_all_machines_are_lost(cluster: Harness) -> None:
    """Jobs of one device on three machines of four: two machines are killed, and one is preempted."""
    small = {**EACH, "samples": 400, "step": 3.0}
    jobs = [cluster.submit(**small, devices=1, pools=("parts",), group="search", slow=10) for _ in range(MANY)]
    devices = 4 * SPEC["pools"][1]["max"]
    status = cluster.until(lambda s: sum(training(s, job, 10) for job in jobs) == devices, "a job on each device")
    machines = sorted(places(status, *[job for job in jobs if training(status, job)]))
    for node, fault in zip(machines, ("kill", "preempt", "kill"), strict=False):
        cluster.fault(fault, node)
    for job in jobs:
        job.go()
    for job in jobs:
        final = ended(cluster, job)
        assert (final["phase"], final["restarts"]) == ("succeeded", 0), final
        assert [lost for kind, lost in interruptions_of(final) if kind == "preempt" and lost] == []
        assert digest_of(job.out) == expected(cluster, ranks=1, samples=400)


def test_jobs_that_misbehave_disturb_no_other(cluster: Harness) -> None:
    """Two quiet jobs, each on a machine with three that do not behave.

    A crash loop, a hang, 100,000 lines a second, a job that cannot write its snapshots, one that fills the memory of
    all, and a state that the head cannot read. The last one is no fault of the job: it trains on, and ends well once
    its state is readable.
    """
    part = {**EACH, "devices": 1, "pools": ("parts",)}
    quiet, unread = (cluster.submit(**part, slow=10) for _ in range(2))
    flood = cluster.submit(**part, flood=100_000)
    crash = cluster.submit(**part, fail="0@12", max_restarts=3)
    other = cluster.submit(**part, slow=10)
    hang = cluster.submit(**part, hang="0@12", hang_timeout=30)  # longer than any step of a busy machine
    full = cluster.submit(**part, largest=4096, max_restarts=1)
    cluster.watch(quiet.id)
    cluster.until(lambda s: all(training(s, job, 10) for job in (quiet, unread, other)), "three jobs that train")
    good = json.dumps(state_of(cluster, unread)).encode()
    key = job_key(unread.id, "state.json")
    cluster.access.store.put(key, b"{")
    cluster.kill_head()
    wait_for(lambda: phase_of(cluster, unread) == "parked", what="the new head to find what it cannot read", timeout=60)
    began = lines_of(unread)
    final = ended(cluster, crash)
    assert (final["phase"], final["restarts"], final["failure"]["kind"]) == ("failed", 4, "user")
    final = ended(cluster, hang)
    assert (final["phase"], [kind for kind, _ in interruptions_of(final)]) == ("succeeded", ["hang"])
    final = ended(cluster, flood)
    assert (final["phase"], interruptions_of(final)) == ("succeeded", [])
    assert max(text.count("says too much") for text in cluster.logs(flood.id, 1).values()) >= 100_000
    final = ended(cluster, full)
    assert (final["phase"], final["restarts"]) == ("failed", 2)
    assert "no room for a snapshot" in final["failure"]["message"]
    # Not earlier: for a moment the memory is full, and jobs that save often would fail to save.
    if memory_of(cluster.folder).is_mount():
        final = ended(cluster, cluster.submit(**part, fill=True, max_restarts=1))
        assert (final["phase"], final["restarts"]) == ("failed", 2)
        assert "MB beside its snapshots into" in final["failure"]["message"]
    wait_for(lambda: lines_of(unread) > began, what="a step of the job with the unreadable state")
    cluster.access.store.put(key, good)
    for job in (quiet, other, unread):
        job.go()
    for job in (quiet, other, unread):
        final = ended(cluster, job)
        assert (final["phase"], interruptions_of(final), final["restarts"]) == ("succeeded", [], 0)
    done = {digest_of(job.out) for job in (quiet, other, unread, flood, hang)}
    assert done == {expected(cluster, ranks=1)}


def phase_of(cluster: Harness, job: Job) -> str:
    """The phase of a job in the list of all; "" while no head answers."""
    with contextlib.suppress(SpotrunError):
        return "".join(row["phase"] for row in cluster.ctl("jobs") if row["id"] == job.id)
    return ""


def lines_of(job: Job) -> int:
    """How many steps the job has begun."""
    return sum(path.read_text().count("\n") for path in job.out.glob("steps-*"))
