"""A simulated head: its decisions are the same pure functions as in the real head, in the same order.

In the real head, other work lies between the decisions: the bucket, orders to nodes, calls to the cloud. Here this work
takes no time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace

from spotrun.head.allocation.assignment import Assignment, assign, job_view
from spotrun.head.allocation.demand import Question, question, wish
from spotrun.head.capacity.history import LONGEST, Histories, learn
from spotrun.head.capacity.observe import situation
from spotrun.head.capacity.place import hourly as cost
from spotrun.head.capacity.place import place
from spotrun.head.capacity.situation import History, Placement, Policy
from spotrun.head.capacity.sizes import Pool
from spotrun.head.costs import job_totals
from spotrun.head.costs.bill import Rates, Use
from spotrun.head.costs.meter import hourly, running
from spotrun.head.fleet.classify import NOT_COMING, Condition, classify
from spotrun.head.fleet.decide import decide
from spotrun.head.job_state import JobState, apply
from spotrun.head.planner import departure, idle, spending
from spotrun.head.planner.plan import plan
from spotrun.head.status import event
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import FleetView, Machine, Node, View
from spotrun.simulate.job_nodes import JobNodes
from spotrun.simulate.market import Machine as MarketMachine
from spotrun.simulate.market import Market
from spotrun.spec import ClusterSpec, devices_of
from spotrun.wire import Notice, Report

SETTLED = 40  # the most turns until nothing changes any more


class SimulatedHead:
    """What the simulated head knows and has decided."""

    def __init__(
        self, cluster: ClusterSpec, market: Market, job_nodes: Mapping[str, JobNodes], policy: Policy | None
    ) -> None:
        """policy: for all jobs; None: each job has the policy that its keys choose."""
        self.cluster, self.market, self.job_nodes = cluster, market, job_nodes
        self._devices = {pool.name: devices_of(pool, cluster) or 1 for pool in cluster.pools}
        self.jobs: dict[str, JobState] = {}
        self.placements: dict[str, Placement] = {}
        self.log: list[tuple[float, str, str]] = []  # time, kind and text of each event
        self.asked = 0  # how often policies were asked
        self.turns = 0
        self._policy, self._began, self._observed = policy, market.now, market.now
        self._histories, self._learned = Histories(), (0.0, -1)
        self._known_of_pools: Mapping[str, History] = {}
        self._last: tuple[tuple[Pool, ...], dict[str, dict[str, float]]] = ((), {})
        self._question: Question | None = None
        self.assignment = Assignment()
        self._machines: dict[str, Machine] = {}  # as the head saw them last
        self._nodes: dict[str, tuple[Node, bool, bool]] = {}
        self._seen: object = None  # a summary of what the last placements were made from
        self._last_view: tuple[FleetView, Mapping[str, Condition]] = FleetView(market.now, (), ()), {}
        self._paid: dict[str, list[Use]] = {}  # by job: what it pays for since the last turn; the end is not set yet
        self._prices: dict[str, float] = {}  # by pool: since the last turn
        self._spent: dict[str, float] = {}  # by job: when its budget may be spent
        self._stops: dict[str, float] = {}  # by job: when it stops because of a notice, at the latest
        # Machines whose agents have joined. A machine leaves once it is gone and is not a member any more.
        self._known: dict[str, MarketMachine] = {}

    def settle(self, now: float) -> None:
        """Take turns until nothing changes."""
        self._seen = None
        for _ in range(SETTLED):
            if not self._turn(now):
                self._paid, self._prices = self._uses(*self._last_view), self.market.prices
                return
        raise RuntimeError(f"the head does not settle at {now}: {self.log[-6:]}")

    @property
    def next(self) -> float:
        """When the head would decide something although nothing changes."""
        now = self.market.now
        times = [each for job in self.jobs.values() for each in _timers(job)]
        times += [machine.ready_at + TIMEOUTS.gather + 1e-3 for machine in self._known.values()]
        times += [wake for each in self.placements.values() if (wake := each.wake)]
        for nodes in self.job_nodes.values():
            if len(nodes.machines) < len(self._known):  # the others may hold a state until the bucket has a newer one
                times.append(nodes.saves(now))
        times += [time for job, time in self._spent.items() if not self.jobs[job].ended_already]
        times += [time + 1e-3 for time in self._stops.values()]
        return min((time for time in times if time > now + 1e-6), default=math.inf)

    def _turn(self, now: float) -> bool:
        """One turn of the head, and what its nodes and its cloud do then. Whether anything has changed."""
        self.turns += 1
        for nodes in self.job_nodes.values():
            nodes.look(now)
        view, looks = self._view(now), self.market.looks
        conditions = classify(view)
        if now > self._observed:  # the real head has taken many turns since the last one
            self._observed = now
            for job in view.jobs:
                self.jobs[job.id] = self._observe(job, view, conditions)
            view = replace(view, jobs=tuple(self.jobs[job.id] for job in view.jobs))
        self._place(view, conditions)
        asked = self._ask(view, conditions)
        if asked != self._question:
            self._question, self.assignment = asked, assign(asked)
        acted = [self._advance(job, view, conditions) for job in view.jobs]
        view = replace(view, jobs=tuple(job for job in self.jobs.values() if not job.ended_already))
        if not any(acted):  # else the nodes report first, so that no node is removed that holds a state
            self._scale(view, conditions)
        self._last_view = view, conditions
        if any(acted) or looks != self.market.looks:
            return True
        # Only the assignment may have changed. The next question depends on it, and all decisions on that question.
        return asked != self._ask(view, conditions)

    def _ask(self, view: FleetView, conditions: Mapping[str, Condition]) -> Question:
        out = {name for name, each in conditions.items() if each.state in NOT_COMING}
        return question(view, self.cluster, self.market.sizes, self.assignment.held, self.placements, out)

    def _place(self, view: FleetView, conditions: Mapping[str, Condition]) -> None:
        """Ask where each job may train if the time, the cloud, jobs or nodes have changed, as the real head does."""
        jobs = [(job.id, job.wants_nodes, job.generation, job.current is None) for job in view.jobs]
        states = {name: each.state for name, each in conditions.items()}
        summary = (self.market.looks, jobs, states)
        if summary == self._seen:
            return
        self._seen = summary
        pools = tuple(
            replace(pool, states={name: conditions[name].state for name in pool.states if name in conditions})
            for pool in self.market.pools()
        )
        if self._policy is None:
            self._learn(view)
        held = self.assignment.held
        seen = situation(view, self.cluster, pools, self.market.prices, self._known_of_pools, holders=held)
        self.asked += 1
        seen = replace(seen, demands=tuple(self.job_nodes[d.job].fill(d) for d in seen.demands))
        if self._policy is None:
            self.placements = dict(place(seen, self.placements))
        else:
            asked = [(d, self._policy(seen, d, self.placements.get(d.job))) for d in seen.demands]
            self.placements = {d.job: replace(each, hourly=cost(seen, d, each)) for d, each in asked}

    def _learn(self, view: FleetView) -> None:
        """Count what the head has seen of its pools. Between two turns nothing changes, but time has to be counted."""
        if (view.now, self.market.looks) == self._learned:
            return
        self._learned = view.now, self.market.looks
        while self._histories.at and view.now - self._histories.at > LONGEST:
            self._histories = learn(self._histories, self._histories.at + LONGEST, *self._last)
        leaving = {node.name for node in view.nodes if node.leaving}
        running: dict[str, dict[str, float]] = {}
        for machine in view.machines:
            if machine.name not in leaving:
                running.setdefault(machine.pool, {})[machine.name] = machine.created
        self._last = self.market.pools(), running
        self._histories = learn(self._histories, view.now, *self._last)
        self._known_of_pools = self._histories.of()

    def _observe(self, job: JobState, fleet: FleetView, conditions: Mapping[str, Condition]) -> JobState:
        """The job with its progress, its costs and its checkpoints as of now."""
        now, rates = fleet.now, Rates(self.market.prices)
        # The machines since the last turn, at the prices of that time. The real head counts all the time.
        paid = [replace(use, end=now) for use in self._paid.get(job.id, ())]
        view = self._view_of(job, fleet, conditions)
        job = job_totals.count(job_totals.observe(job, view), view, paid, Rates(self._prices))
        there = [replace(use, end=now + 1.0) for use in self._uses(fleet, conditions)[job.id]]
        job = job.replace(hourly=hourly(there, rates))
        return self.job_nodes[job.id].save(job, now)

    def _uses(self, fleet: FleetView, conditions: Mapping[str, Condition]) -> dict[str, list[Use]]:
        """The machines that each job pays from now on."""
        now, pools = fleet.now, running(fleet)
        found = job_totals.shares(fleet, self.assignment.expected, conditions, self.placements, self._devices)
        return {job: [Use(name, pools[name], now, now, part) for name, part in of.items()] for job, of in found.items()}

    def _view_of(self, job: JobState, fleet: FleetView, conditions: Mapping[str, Condition]) -> View:
        ready_at = max((node.since for node in fleet.nodes), default=0.0)
        placed = self.placements.get(job.id)
        return job_view(fleet, job, self.assignment, conditions, ready_at, placed=placed)

    def _advance(self, job: JobState, fleet: FleetView, conditions: Mapping[str, Condition]) -> bool:
        """Save, plan, apply, for one job. Whether it has decided anything."""
        now, nodes, view = fleet.now, self.job_nodes[job.id], self._view_of(job, fleet, conditions)
        job = nodes.save(idle.observe(job, view), now)
        actions = plan(replace(view, job=job)).actions
        for action in actions:
            if said := event(job, action):
                self.log.append((now, *said))
            job = apply(job, action, now)
        self.jobs[job.id] = job
        view = replace(view, job=job)
        self._spent[job.id] = _spent_at(view)
        leaving = departure.decide(view) if job.current and not job.draining else None
        self._stops[job.id] = leaving.last if leaving else math.inf
        nodes.obey(job, self._known, now)
        return bool(actions)

    def _scale(self, view: FleetView, conditions: Mapping[str, Condition]) -> None:
        wanted = wish(view, self.cluster, self.assignment.expected, self.placements)
        found = decide(view, conditions, self.market.pools(), wanted)
        if found.resize or found.remove:
            self.market.resize(found.resize, found.remove)

    def _view(self, now: float) -> FleetView:
        machines = list(self.market.machines())
        for machine in machines:
            if machine.ready_at <= now:
                self._known[machine.name] = machine
        members = {member.node for job in self.jobs.values() for member in job.members}
        for name in [name for name, machine in self._known.items() if machine.gone <= now and name not in members]:
            del self._known[name]
        kinds = {pool.name: pool.machine for pool in self.cluster.pools}
        return FleetView(
            now=now,
            jobs=tuple(job for job in self.jobs.values() if not job.ended_already),
            nodes=tuple(self._node(machine, now) for machine in self._known.values()),
            expected=sum(self.market.sizes.values()),
            began=self._began,
            awake_since=self._began - 1000.0,
            machines=tuple(self._machine(machine, now, kinds) for machine in machines),
        )

    def _machine(self, machine: MarketMachine, now: float, kinds: Mapping[str, str]) -> Machine:
        joined = machine.ready_at <= now
        found = self._machines.get(machine.name)
        if found is None or found.joined != joined:
            answered = machine.ready_at if joined else 0.0
            found = Machine(machine.name, machine.pool, "running", machine.created, answered, kinds[machine.pool])
            self._machines[machine.name] = found
        return found

    def _node(self, machine: MarketMachine, now: float) -> Node:
        """The node of a machine. Its agent has just reported, whenever the head asks."""
        jobs = tuple(nodes.report(machine, now) for nodes in self.job_nodes.values())
        there = machine.gone > now
        known = self._nodes.get(machine.name)
        same = known is not None and known[1:] == (machine.noticed, there)
        if known is not None and same and all(map(operator.is_, known[0].report.jobs, jobs)):
            return known[0]
        notice = Notice.model_construct(kind="preempt", deadline=machine.ends) if machine.noticed else None
        report = Report.model_construct(
            node=machine.name, boot="boot", pool=machine.pool, zone="", address=machine.name,
            devices=self._devices[machine.pool], jobs=jobs, notice=notice,
        )  # fmt: skip
        cloud = "running" if there else "gone"
        node = Node(report, connected=there, reported_at=math.inf, cloud=cloud, since=machine.ready_at)
        self._nodes[machine.name] = (node, machine.noticed, there)
        return node


def _spent_at(view: View) -> float:
    """When the planner may stop the job to keep its budget, if nothing else happens."""
    job, budget = view.job, view.job.cost_limit
    hourly = job.hourly + view.dearest  # at most
    if budget is None or job.stopping or job.ending is not None or not hourly:
        return math.inf
    return view.now + max(1.0, (budget - job.cost - spending.reserve(view)) / hourly * 3600)


def _timers(job: JobState) -> list[float]:
    """When a rule about the job may decide something although nothing has changed."""
    found = []
    if len(job.members) < job.spec.nodes.max:
        found.append(job.ordered_at + job.spec.grow_interval)
    if job.idle is not None:
        found += [job.idle.next, job.idle.until] if job.idle.next else [job.idle.since + job.spec.hold_idle]
    if job.draining is not None:
        found.append(job.draining.deadline + 0.001)
    return found
