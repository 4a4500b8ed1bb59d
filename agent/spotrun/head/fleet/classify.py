"""What is each machine's condition? `classify(view)` is pure, and its tests are data.

Each machine that the cloud lists has exactly one state:

- booting: its agent has not joined yet. checking: its agent checks whether the machine is fit.
- ready: its agent serves jobs. leaving: the cloud takes the machine.
- unfit: its agent says that the machine is not fit, but not for long enough for a replacement.
- silent: its agent had joined and does not report. unknown: in addition, its zone does not answer.
- replacing: another machine is expected in its place. abandoned: no job can use the machine, and no other
  machine is expected. Both are also said of a machine on which a job cannot be set up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from spotrun.head.fleet.record import Recreate, exhausted
from spotrun.head.job_state import JobState
from spotrun.head.planner import patience, silence
from spotrun.head.planner.liveness import had_joined, reports, silent
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import ENDING_STATES, FleetView, Machine, Node

State = Literal["booting", "checking", "ready", "leaving", "unfit", "silent", "replacing", "abandoned", "unknown"]
NOT_COMING = ("abandoned", "replacing", "unfit", "unknown")  # nobody expects a machine in these states to get ready


@dataclass(frozen=True)
class Condition:
    """A machine's state, and why the machine is in it."""

    machine: Machine
    state: State
    reason: str = ""
    since: float = 0.0  # since when, epoch seconds; of a machine that was never fit, when its time was over
    replacement: Recreate | None = None  # what the cloud should be asked for; None: nothing
    proven: bool = True  # of a leaving machine: whether it has shown that it is fit

    @property
    def unusable(self) -> bool:
        """Whether no job can count on it: it has never served, or the job that waits for it cannot be set up there."""
        return self.replacement is not None and self.replacement.unfit


def classify(view: FleetView) -> dict[str, Condition]:
    """The condition of each machine that the cloud lists, by name."""
    known = view.by_name
    reporting = [node for node in view.nodes if reports(view, node)]
    found = {}
    for machine in view.machines:
        node = known.get(machine.name)
        condition = _misfit(view, machine, node) or _ready(view, machine, node)
        if condition is None and machine.name not in view.kept:  # a person uses a kept machine
            condition = (
                _unknown(view, machine, node)
                or _never_served(view, machine, node)
                or _not_reporting(view, reporting, machine, node)
                or _retired(view, machine, node)
            )
        found[machine.name] = condition or _in_service(view, machine, node)
    return found


def boot_timeout(kind: str) -> float:
    """Seconds that a machine of this type may boot. Bare metal: `g4dn.metal`, `c7i.metal-24xl`, `c3-…-metal`."""
    return TIMEOUTS.boot_metal if "metal" in kind else TIMEOUTS.boot


def _misfit(view: FleetView, machine: Machine, node: Node | None) -> Condition | None:
    """A machine on which a job cannot be set up, while others are ready for the job and wait for one more."""
    if node is None or not node.misfits or machine.name in view.kept or _is_member(view, node):
        return None
    for job in view.jobs:
        misfit = node.misfits.get(job.id)
        if misfit is None or misfit.over(view.now) or misfit.at < machine.created or not _lacks_some(view, job):
            continue
        if all(work.job == job.id for work in node.report.jobs) and not _alone_holds_a_state(view, node):
            why = f"{job.id} cannot be set up on it, but on others"
            hopeless = machine.pool in exhausted(view.replaced, view.now)
            state: State = "abandoned" if hopeless else "replacing"
            return Condition(machine, state, why, misfit.at, _request(machine, why))
    return None


def _lacks_some(view: FleetView, job: JobState) -> bool:
    """Whether a job waits, and has some of the nodes that it needs, but not all."""
    return job.current is None and job.wants_nodes and 0 < _eligible(view, job) < job.spec.nodes.min


def _ready(view: FleetView, machine: Machine, node: Node | None) -> Condition | None:
    """A machine whose agent serves jobs. Most are, so this comes first."""
    if node is None or not machine.joined or machine.state in ENDING_STATES:
        return None
    serves = node.report.phase == "ready" and reports(view, node) and not node.leaving
    return Condition(machine, "ready", since=node.since) if serves else None


def _unknown(view: FleetView, machine: Machine, node: Node | None) -> Condition | None:
    """Neither its zone nor its agent answers. A member of a generation never counts as unknown."""
    if machine.state != "unknown" or machine.name in view.members:
        return None
    # A new head first waits until agents have found it.
    quiet = silent(view, node) if node is not None else view.now - view.awake_since > TIMEOUTS.rejoin
    since = node.reported_at if node is not None else view.awake_since
    if not quiet:
        return None
    fault = _fault(view, machine, node)
    reason, wanted = (fault[0], _request(machine, fault[0])) if fault else ("its zone does not answer", None)
    return Condition(machine, "unknown", reason, since, wanted)


def _never_served(view: FleetView, machine: Machine, node: Node | None) -> Condition | None:
    """A machine that was never fit. Another one is expected in its place, but not for ever."""
    fault = _fault(view, machine, node)
    if fault is None:
        return None
    why, since = fault
    hopeless = (
        machine.state == "unknown"  # nothing can be asked of its zone
        or view.now - since >= boot_timeout(machine.kind)
        or machine.pool in exhausted(view.replaced, view.now)
    )
    state: State = "abandoned" if hopeless else "replacing"
    return Condition(machine, state, why, since, _request(machine, why))


def _fault(view: FleetView, machine: Machine, node: Node | None) -> tuple[str, float] | None:
    """What keeps a machine from serving, and since when."""
    connected = node is not None and node.connected
    if node is not None and machine.joined:
        if node.phase == "unfit":  # also if the node is disconnected: it may be shutting down
            why = "; ".join(node.report.unfit) or "unfit"
            holder = node.connected and _alone_holds_a_state(view, node)
            patience = TIMEOUTS.unfit_holder if holder else TIMEOUTS.unfit
            return (why, node.since) if view.now - node.since >= patience else None
        if not connected or node.phase != "checking":
            return None  # a machine that served: see `_not_reporting`
    if machine.state != "running" or had_joined(view, machine):
        return None
    reporting = any(n.connected for n in view.nodes)  # if none is, this head may be the one that is cut off
    since = max(machine.created, machine.answered, view.began) + boot_timeout(machine.kind)
    since += 0.0 if reporting or node is not None else TIMEOUTS.alone
    # After a gap, agents get only the time that they need to report again, not the whole time-out a second time.
    if view.now <= max(since, view.awake_since + (TIMEOUTS.rejoin if reporting else TIMEOUTS.alone)):
        return None
    minutes = f"within {boot_timeout(machine.kind) / 60:.0f} minutes"
    if connected and node is not None and node.phase == "checking":
        return f"it could not tell {minutes} whether it is fit", since
    return f"its agent has not joined {minutes}", since


def _alone_holds_a_state(view: FleetView, node: Node) -> bool:
    """Whether the node alone holds the newest state of a job, and the bucket does not have it."""
    others = [n for n in view.nodes if n.connected and n.name != node.name]
    return any(_is_alone(view, patience.held(work), job, others) for job, work in view.work(node))


def _is_alone(view: FleetView, state: tuple[int, int], job: JobState, others: list[Node]) -> bool:
    """Whether neither the bucket has this state of a job, nor one of the other nodes a state of the same generation."""
    return state > job.newest and all(_held_by(view, n, job)[0] < state[0] for n in others)


def _held_by(view: FleetView, node: Node, job: JobState) -> tuple[int, int]:
    """The newest snapshot of a job that a node holds; (-1, -1) if it holds none."""
    work = node.report.of(job.id) if view.believes(node, job.id) else None
    return patience.held(work) if work else (-1, -1)


def _not_reporting(view: FleetView, reporting: list[Node], machine: Machine, node: Node | None) -> Condition | None:
    """A machine that served, and whose agent has not reported for longer than the head waits."""
    if machine.state != "running":
        return None
    if node is not None:
        served = machine.joined and node.phase != "unfit"
        if not served or not silent(view, node) or _is_member(view, node):
            return None
        since = node.reported_at
    else:
        if machine.name in view.members or not had_joined(view, machine):
            return None
        since = view.began
    since = max(since, view.awake_since)
    if view.now - since <= _patience(view, reporting, machine.name, node):
        return None
    return Condition(machine, "replacing", "its agent does not report", since, _request(machine))


def _patience(view: FleetView, reporting: list[Node], name: str, node: Node | None) -> float:
    """Seconds to wait for a silent agent. node: None if it has not reported to this head.

    Longer if the newest state of a waiting job may be on this machine only.
    """
    least = TIMEOUTS.silent if reporting else _alone(view, name)
    if silence.stopped(view, name):
        return least  # the machine is dead, and its states are lost
    if node is not None:
        states = [(job, patience.held(work)) for job, work in view.work(node) if view.believes(node, job.id)]
    else:  # nobody knows which states it holds
        states = [(job, (job.generation, job.reached)) for job in view.last.get(name, ())]
    waiting = [(job, state) for job, state in states if job.current is None and not job.ended_already]
    others = [each for each in reporting if not each.leaving]
    only = [job for job, state in waiting if _is_alone(view, state, job, others)]
    return max([least, *(patience.patience(job, TIMEOUTS.last_holder) for job in only)])


def _alone(view: FleetView, node: str) -> float:
    """Seconds to wait for a silent node while no other reports: the head may be the one that is cut off."""
    stopped = [min(TIMEOUTS.alone, job.spec.silence_timeout) for job in view.last.get(node, ())]
    return max(stopped, default=TIMEOUTS.alone) if silence.stopped(view, node) else TIMEOUTS.alone


def _eligible(view: FleetView, job: JobState) -> int:
    """How many nodes could be in a generation of the job that begins now."""
    return sum(
        reports(view, node) and not node.leaving and node.cloud not in ENDING_STATES and _serves(node, job)
        for node in view.nodes
    )


def _serves(node: Node, job: JobState) -> bool:
    work = node.report.of(job.id)
    serves = work is not None and bool(work.store) and work.phase not in ("idle", "preparing")
    return serves and (job.id not in node.misfits or node.misfits[job.id].times == 0)


def _retired(view: FleetView, machine: Machine, node: Node | None) -> Condition | None:
    """A machine that has retired: generations go on without it, and others or the bucket hold its states too."""
    if node is None or not node.due or not node.connected or node.cloud != "running" or _is_member(view, node):
        return None
    staying = [n for n in view.nodes if n.connected and not n.leaving]
    for job, work in view.work(node):
        uploading = job.saving is not None and node.name in job.saving.holders
        if uploading or patience.held(work) > max([job.newest, *(_held_by(view, n, job) for n in staying)]):
            return None
    if view.now - node.since < TIMEOUTS.last_logs:
        return None
    why = f"its cloud ends it at {time.strftime('%H:%M UTC', time.gmtime(node.due))}"
    return Condition(machine, "replacing", why, node.since, _request(machine, why, planned=True))


def _is_member(view: FleetView, node: Node) -> bool:
    """Whether the node is in a generation of a job."""
    return any(member.boot == node.report.boot for _, member in view.memberships.get(node.name, ()))


def _request(machine: Machine, why: str = "", planned: bool = False) -> Recreate:
    return Recreate(node=machine.name, pool=machine.pool, why=why, created=machine.created, planned=planned)


def _in_service(view: FleetView, machine: Machine, node: Node | None) -> Condition:
    """The condition of a machine that is not ready, and about which the cloud is asked for nothing."""
    proven = machine.joined and (node is None or node.phase not in ("checking", "unfit"))
    if machine.state in ENDING_STATES:
        return Condition(machine, "leaving", "the cloud ends it", proven=proven)
    if node is None or (not machine.joined and node.phase != "checking"):
        if node is None and (machine.joined or had_joined(view, machine)):
            return Condition(machine, "silent", "its agent has not reported to this head", view.began)
        return Condition(machine, "booting", since=machine.created)
    if node.leaving:
        return Condition(machine, "leaving", "it retires" if node.due else "under notice", node.since, proven=proven)
    if node.phase == "unfit":
        return Condition(machine, "unfit", "; ".join(node.report.unfit), node.since)
    if node.phase == "checking":
        return Condition(machine, "checking", since=node.since)
    return Condition(machine, "silent", "its agent does not report", node.reported_at)
