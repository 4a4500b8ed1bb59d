"""How long each machine has run since the last look, and who pays for that. Pure.

The head looks several times a second, and asks the cloud less often. So it learns late that a machine began or ended.
Time counts from the moment when the machine started, as far as the cloud says so, else when the cloud made it. Once the
machine has ended, the time after the last sign of it is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spotrun.head.account import Rates, Use
from spotrun.head.view import FleetView, View

NOBODY = ""  # who pays for devices that no job has: the cluster itself


@dataclass(frozen=True)
class Counted:
    """A machine that runs, as far as its time has been counted."""

    pool: str  # its pool
    created: float  # since when it costs money: when it started, or when the cloud made it; 0: not known
    until: float  # its time is counted up to here
    seen: float  # the newest sign that it runs: the cloud listed it, or its agent was connected
    payers: Mapping[str, float]  # by job: the part that the job pays for; `NOBODY` for the cluster


@dataclass(frozen=True)
class Meter:
    """What one head has counted."""

    began: float = 0.0  # when the head began to count; 0: it has not
    machines: Mapping[str, Counted] = field(default_factory=dict)  # by name

    def read(
        self, view: FleetView, shares: Mapping[str, Mapping[str, float]], paid: Mapping[str, float]
    ) -> tuple[Meter, dict[str, list[Use]]]:
        """The meter as of now, and the machine time since the last reading, by payer.

        shares: by payer, the part of each machine that it pays for. The parts of a machine that costs money make 1.
        paid: by payer, up to when earlier heads have counted.
        """
        began, payers = self.began or view.now, _by_machine(shares)
        machines, created = running(view), {each.name: each.started or each.created for each in view.machines}
        uses: dict[str, list[Use]] = {payer: [] for payer in (*shares, NOBODY)}
        found: dict[str, Counted] = {}
        away = {machine.pool for machine in view.machines if machine.state == "unknown"}  # their zones do not answer
        for name, last in self.machines.items():
            another = created.get(name, 0.0) > last.created > 0
            if name not in machines and not another and (last.pool in away or not view.listed):
                found[name] = last
            elif name not in machines or another:
                for payer, share in last.payers.items():
                    back = Use(name, last.pool, last.until, min(last.until, last.seen), share)
                    uses[payer if payer in uses else NOBODY].append(back)
        for name, pool in machines.items():
            before = self.machines.get(name)
            made = created.get(name, 0.0) or (before.created if before else 0.0)
            if before is not None and made > before.created > 0:
                before = None  # another machine of that name
            mine = payers.get(name, {NOBODY: 1.0})
            for payer, share in mine.items():
                start = before.until if before else _start(made, began, paid.get(payer, 0.0), view.now)
                uses[payer].append(Use(name, pool, min(start, view.now), view.now, share))
            seen = max(_sign(view, name), before.seen if before else made)
            found[name] = Counted(pool, made, view.now, seen, mine)
        return Meter(began, found), uses

    def repriced(self, pool: str, old: float, new: float, at: float, known: float) -> dict[str, list[Use]]:
        """By payer: what changes if a pool had its new price since `at`. known: until then, the old one was counted."""
        found: dict[str, list[Use]] = {}
        for name, each in self.machines.items():
            since, until = max(at, each.created), min(known, each.until)
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
    return sum(use.share * rates.prices.get(use.pool, 0.0) for use in uses if use.end > use.start and use.price is None)


def _start(made: float, began: float, paid: float, now: float) -> float:
    """From when on a machine is counted that this head has not counted yet."""
    if made > began:
        return made
    return max(made, paid or now)  # earlier heads have counted it, up to `paid`


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
