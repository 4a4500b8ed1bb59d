"""The simulated head and the real one go through the same events, and decide the same."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from spotrun.simulate.costs import Costs
from spotrun.simulate.market import Fault
from spotrun.simulate.replay import Job, Supply, play
from spotrun.spec.notices import GCE_NOTICE
from tests.e2e.harness import Harness

NODES = {"min": 2, "max": 3}
GROW = 2.0  # seconds
STEP = 0.3  # seconds, of a slow step of the toy script
NOTICE = GCE_NOTICE  # the machines' agents count on it; a successor boots meanwhile
POLL = 5.0  # seconds between two looks of the real head at its cloud
SERVING = ("ready", "starting", "running", "drained")


class Witness:
    """What happened to the machines of a real cluster."""

    def __init__(self, cluster: Harness) -> None:
        self.cluster = cluster
        self.ready: dict[str, float] = {}  # when each machine, by id, could first take the job
        self.created: dict[str, float] = {}
        self._ids: dict[str, str] = {}

    def until(self, good: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """As `Harness.until`; it notes meanwhile when machines become ready."""
        found = self.cluster.until(lambda status: self._note(status) and good(status), what)
        for each in self.cluster.cloud(lambda cloud: cloud.nodes()):
            if each.pool == "spot":
                self.created.setdefault(each.id, each.created)
                self.ready.setdefault(each.id, self._first.get(each.name, 0.0))
        return found

    _first: dict[str, float]

    def _note(self, status: dict[str, Any]) -> bool:
        self._first = getattr(self, "_first", {})
        for node in status["nodes"]:
            if node["phase"] in SERVING:
                self._first.setdefault(node["name"], time.time())
            else:
                self._first.pop(node["name"], None)
        return True


def decisions(events: list[tuple[float, str, str]]) -> list[tuple[float, str]]:
    """When the head began a generation, and of how many nodes; when it drained one; and why."""
    found = []
    for at, kind, text in events:
        why = re.search(r"\((\w+)(: [^)]*)?\)$", text)
        nodes = re.search(r"\d+ nodes?", text)
        if kind in ("generation", "drain"):
            cause = why[1] if why and not why[1].startswith("spot") else ""
            found.append((at, f"{kind} {nodes[0] if nodes else ''} {cause}".strip()))
    return found


def order(found: list[tuple[float, str]]) -> list[str]:
    """What was decided. Whether a successor is ready just before a drain's end, or joins just after it, is chance."""
    late = ["generation 2 nodes preempt", "drain  grow", "generation 3 nodes grow"]
    said = [what for _, what in found]
    for at in range(len(said)):
        if said[at : at + 3] == late:
            said[at : at + 3] = ["generation 3 nodes preempt"]
    return said


def test_the_simulated_head_decides_as_the_real_one(cluster: Harness) -> None:
    """Order of decisions equal, and times within the poll interval: a loss in a dry zone, growth, a preemption."""
    witness = Witness(cluster)
    cluster.submit(nodes=NODES, epochs=99, samples=3000, batch=4, grow_interval=GROW, slow=1)
    began = witness.until(lambda s: len(s["job"]["members"]) == 3 and s["job"]["step"] > 5, "three nodes train")
    cluster.fault("stockout", "local-a")
    killed = time.time()
    cluster.fault("kill", began["job"]["members"][2])
    witness.until(lambda s: len(s["job"]["members"]) == 2 and s["job"]["phase"] == "running", "two go on")
    restocked = time.time()
    cluster.fault("restock", "local-a")
    witness.until(lambda s: _members(s) == 3, "three train again")
    step = cluster.status()["job"]["step"] + 10
    grown = witness.until(lambda s: s["job"]["step"] > step, "they have made some steps")
    noticed = time.time()
    cluster.cloud(lambda cloud: cloud.preempt(grown["job"]["members"][0], NOTICE))
    last = grown["job"]["generation"]
    witness.until(lambda s: s["job"]["generation"] > last and _members(s) == 3, "a successor joins")
    events = witness.until(lambda _: True, "the events")["events"]

    zero = min(witness.created.values())
    real = decisions([(event["at"] - zero, event["kind"], event["text"]) for event in events])
    machines = sorted(witness.created, key=witness.created.__getitem__)
    boots = [witness.ready[each] - witness.created[each] for each in machines if witness.ready[each]]
    outcome = play(
        cluster.spec,
        {"spot": Supply(((0.0, 5.0), (killed - zero, 2.0), (restocked - zero, 5.0)))},
        Job(work=1e6, min=2, max=3, step=STEP, more={"grow_interval": GROW}),
        None,
        Costs(boot=boots[-1], restart=1.0, restore=1.0, notice=0.0, again=0.5, snapshot=1.0, scaling=0.0),
        length=real[-1][0] + POLL,
        faults=[Fault(noticed - zero, "spot", NOTICE)],
        boots=boots,
    )
    simulated = decisions(list(outcome.log))
    story = f"real: {real}\nsimulated: {simulated}\nboots: {boots}"
    wanted = order(real)
    assert order(simulated)[: len(wanted)] == wanted, story
    assert all(abs(a - b) <= POLL for (a, _), (b, _) in zip(real, simulated, strict=False)), story


def _members(status: dict[str, Any]) -> int:
    return len(status["job"]["members"]) if status["job"]["phase"] == "running" else 0
