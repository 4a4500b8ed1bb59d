"""How long each machine has run since the last look, and who pays for that. Pure.

The head counts several times a second, and asks the cloud less often. So it learns late that a machine began or ended.

- Time counts from the moment when the machine started, if the cloud says it, else from when the cloud made the machine.
- It counts until the machine ended. The cloud may say this moment late or never. Until then, time counts up to the
  newest sign of the machine. Time that was counted after that sign is taken back.
- A machine may run again after the cloud has left it out of a list, or has repaired its host. Its time goes on then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from spotrun.cloud.base import Ended
from spotrun.head.costs.bill import Rates, Use
from spotrun.head.view import FleetView, View

NOBODY = ""  # who pays for devices that no job has: the cluster itself
LATE = 3600.0  # seconds after the last sign of a machine in which the cloud may still say when it ended

_Key = tuple[str, float]  # a machine: its name, and when the cloud made it


@dataclass(frozen=True)
class Counted:
    """A machine that runs or ran, as far as its time has been counted."""

    pool: str  # its pool
    created: float  # when the cloud made it; 0: not known
    since: float  # since when it costs money, as far as is known
    first: float  # this head has counted its time from here on
    until: float  # its time is counted up to here
    seen: float  # the newest sign that it runs: the cloud listed it, or its agent was connected
    payers: Mapping[str, float]  # by job: the part that the job pays for; `NOBODY` stands for the cluster
    stood: float = 0.0  # of a machine that is gone: when the cloud last listed it, in a state that costs nothing


@dataclass(frozen=True)
class Meter:
    """What one head has counted."""

    began: float = 0.0  # when the head began to count; 0: it has not begun
    machines: Mapping[str, Counted] = field(default_factory=dict)  # those that run, by name
    gone: Mapping[_Key, Counted] = field(default_factory=dict)  # those of which the cloud has not said when they ended
    settled: frozenset[_Key] = frozenset()  # ended machines whose time is counted; the cloud still reports their ends

    def read(
        self, view: FleetView, shares: Mapping[str, Mapping[str, float]], paid: Mapping[str, float]
    ) -> tuple[Meter, dict[str, list[Use]]]:
        """The meter as of now, and the machine time since the last reading, by payer.

        shares: by payer, the part of each machine that it pays for. Parts of a machine that costs money add up to 1.
        paid: by payer, up to when earlier heads have counted.
        """
        uses: dict[str, list[Use]] = {payer: [] for payer in (*shares, NOBODY)}
        began, told = self.began or view.now, {(each.machine, each.created): each for each in view.ended}
        self._settle(told, began, uses)
        kept, gone = self._leave(view, told, uses)
        found = self._count(view, told, _by_machine(shares), began, paid, uses)
        return Meter(began, {**kept, **found}, gone, frozenset(told)), uses

    def _settle(self, told: Mapping[_Key, Ended], began: float, uses: dict[str, list[Use]]) -> None:
        """Correct the time of machines whose ends the cloud says now."""
        for (name, created), end in told.items():
            running = self.machines.get(name)
            last = running if running and running.created == created else self.gone.get((name, created))
            if last is not None:
                _correct(uses, name, last, last.until, max(end.until, last.first))
                _correct(uses, name, last, end.since, min(last.first, end.since))
            elif (name, created) not in self.settled and end.since > began:
                # It began and ended between two looks at the cloud, so its time was not counted.
                uses[NOBODY].append(Use(name, end.pool, end.since, end.until, late=True))

    def _leave(
        self, view: FleetView, told: Mapping[_Key, Ended], uses: dict[str, list[Use]]
    ) -> tuple[dict[str, Counted], dict[_Key, Counted]]:
        """The machines that are out of sight, and those that are gone. Takes back their time after the last sign."""
        machines, made = running(view), {each.name: each.created for each in view.machines}
        away = {machine.pool for machine in view.machines if machine.state == "unknown"}  # their zones do not answer
        stands = {(name, created) for name, created in made.items() if name not in machines}
        known = ((key, replace(each, stood=view.now) if key in stands else each) for key, each in self.gone.items())
        gone = {
            key: each
            for key, each in known
            if key not in told and view.now - max(each.until, each.stood) < LATE
            if made.get(key[0]) != key[1] or key in stands  # else it runs again
        }
        kept: dict[str, Counted] = {}
        for name, last in self.machines.items():
            another = made.get(name, 0.0) > last.created > 0
            if (name, last.created) in told or (name in machines and not another):
                continue
            if not another and (last.pool in away or not view.listed):
                kept[name] = last
                continue
            end = min(last.until, last.seen, max(made[name], last.first) if another else last.until)
            _correct(uses, name, last, last.until, end)
            gone[name, last.created] = replace(last, until=end)
        return kept, gone

    def _count(
        self,
        view: FleetView,
        told: Mapping[_Key, Ended],
        payers: Mapping[str, Mapping[str, float]],
        began: float,
        paid: Mapping[str, float],
        uses: dict[str, list[Use]],
    ) -> dict[str, Counted]:
        """Count the machines that run."""
        listed, over = {each.name: each for each in view.machines}, {name for name, _ in told}
        found: dict[str, Counted] = {}
        for name, pool in running(view).items():
            before, machine = self.machines.get(name), listed.get(name)
            created = (machine.created if machine else 0.0) or (before.created if before else 0.0)
            if (name, created) in told or (not created and name in over):
                continue
            if before is not None and created > before.created > 0:
                before = None  # another machine of that name
            if before is None and created:
                before = self.gone.get((name, created))  # it runs again
            since = (machine.started if machine else 0.0) or created
            # It was counted from its first report on, because the cloud was silent then. It booted before that.
            known = (before is not None and before.created > 0) or (name, created) in self.gone
            early = before is not None and not known and began < since < before.first
            if before is not None and (early or since > before.first):  # the cloud says only now when it started
                _correct(uses, name, before, since, before.first)
            mine, first = payers.get(name, {NOBODY: 1.0}), view.now
            for payer, share in mine.items():
                start = _start(since, began, paid.get(payer, 0.0), view.now)
                start = max(before.until, before.stood) if before else min(start, view.now)
                uses[payer].append(Use(name, pool, start, view.now, share))
                first = min(first, start)
            first = (since if early else max(before.first, since)) if before else first
            seen = max(_sign(view, name), before.seen if before else since)
            found[name] = Counted(pool, created, since, first, view.now, seen, mine)
        return found

    def repriced(self, pool: str, old: float, new: float, at: float, known: float) -> dict[str, list[Use]]:
        """By payer: what changes if a pool had its new price from `at` on. known: up to when the old one counted."""
        found: dict[str, list[Use]] = {}
        for name, each in [*self.machines.items(), *((name, each) for (name, _), each in self.gone.items())]:
            since, until = max(at, each.since), min(known, each.until)
            if each.pool == pool and since < until:
                for payer, share in each.payers.items():
                    both = [Use(name, pool, until, since, share, old), Use(name, pool, since, until, share, new)]
                    found.setdefault(payer, []).extend(both)
        return found


def running(view: View | FleetView) -> dict[str, str]:
    """The machines that cost money, with their pools.

    Each machine that the cloud lists as running costs money: also while it boots, is checked or is unfit. While the
    cloud does not answer, each machine with a connected agent counts.
    """
    pools = {node.name: node.report.pool for node in view.nodes if node.connected or node.cloud == "running"}
    return pools | {machine.name: machine.pool for machine in view.machines if machine.state == "running"}


def hourly(uses: Iterable[Use], rates: Rates) -> float:
    """USD an hour for the machines that still run. Machines without a known price are left out."""
    present = [use for use in uses if use.end > use.start and use.price is None and not use.late]
    newest = max((use.end for use in present), default=0.0)
    return sum(use.share * rates.prices.get(use.pool, 0.0) for use in present if use.end == newest)


def _correct(uses: dict[str, list[Use]], name: str, last: Counted, counted: float, end: float) -> None:
    """Have the payers of a machine pay up to `end`, instead of up to `counted`."""
    for payer, share in last.payers.items() if counted != end else ():
        uses[payer if payer in uses else NOBODY].append(Use(name, last.pool, counted, end, share, late=True))


def _start(since: float, began: float, paid: float, now: float) -> float:
    """From when on this head counts a machine that is new to it. since: when the machine began to cost money."""
    if since > began:
        return since
    return max(since, paid or now)  # earlier heads have counted it, up to `paid`


def _sign(view: FleetView, name: str) -> float:
    """The newest sign that a machine runs; 0: the head has none."""
    node = view.by_name.get(name)
    return view.now if node is not None and node.connected else view.listed_at


def _by_machine(shares: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By machine: the part that each payer pays for."""
    found: dict[str, dict[str, float]] = {}
    for payer, parts in shares.items():
        for name, share in parts.items():
            found.setdefault(name, {})[payer] = share
    return found
