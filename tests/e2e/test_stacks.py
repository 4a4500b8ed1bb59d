"""`make stacks`: where each rank is now, while training goes on."""

from __future__ import annotations

from scripts import rank_stacks, stack_requests
from scripts.rank_stacks import Found
from tests.e2e.harness import Harness
from tests.helpers import wait_for


def functions(found: Found) -> list[tuple[tuple[int, ...], list[str]]]:
    return [(group.ranks, [frame.function for frame in group.stack]) for group in rank_stacks.grouped(found.ranks)]


def test_one_rank_hangs(cluster: Harness) -> None:
    """The stacks show where rank 1 hangs, and that rank 0 waits for it in a collective."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, samples=600, hang="1@30", hang_timeout=3000)
    cluster.until(lambda s: s["job"]["step"] == 29 and (job.out / "hung").exists(), "rank 1 hangs")
    name, nodes = stack_requests.members(cluster.access, None, None)
    assert name == job.id

    def in_collective() -> Found | None:
        found = stack_requests.ask(cluster.access, name, nodes)
        return found if "backward" in dict(functions(found)).get((0,), ()) else None

    found = wait_for(in_collective, what="rank 0 in a collective")
    assert not found.nodes
    assert [(each.rank, each.problem) for each in found.ranks] == [(0, ""), (1, "")]
    assert dict(functions(found))[1,] == ["hang", "<module>"]
    [mine] = stack_requests.ask(cluster.access, name, nodes[1:]).ranks
    assert mine == found.ranks[1]


def test_training_goes_on(cluster: Harness) -> None:
    """However often it is asked. A node that does not answer is named, the other one is shown."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=1, samples=1600, slow=20)
    cluster.until_step(10)
    name, nodes = stack_requests.members(cluster.access, job.id, None)
    for _ in range(5):
        found = stack_requests.ask(cluster.access, name, nodes)
        assert not found.nodes
        assert [(each.rank, each.problem) for each in found.ranks] == [(0, ""), (1, "")]
        assert all(each.main[-1].file == "train.py" for each in found.ranks)
    lost = stack_requests.ask(cluster.access, name, [nodes[0], "spot-nobody"])
    assert [each.rank for each in lost.ranks] == [0]
    assert "there is no such machine" in lost.nodes["spot-nobody"]
    job.go()
    final = cluster.until_ended()
    assert (final["phase"], final["restarts"], final["interruptions"]) == ("succeeded", 0, [])
