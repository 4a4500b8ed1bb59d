"""The section on capacity: tables, goals and plots. Pure but for the plots that it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.plots import Line, plot
from spotrun.simulate.costs import Costs
from spotrun.simulate.replay import Outcome
from spotrun.simulate.statistics import Estimate, closed, geometric, mean, ratio

HOUR = 3600.0
NAMES = {
    "failover": "failover (rigid, as SkyPilot's managed jobs)",
    "own": "spotrun",
    "greedy": "greedy",
    "uniform_progress": "Uniform Progress with hysteresis",
    "static": "on-demand alone",
}


@dataclass(frozen=True)
class Compared:
    """A rigid cluster against an elastic one."""

    outcomes: Mapping[str, Sequence[Outcome]]  # by policy, one for each window
    bounds: Sequence[tuple[float, float]]  # the least cost and the earliest end
    zones: Sequence[str]  # of each window
    length: float  # of the windows, in seconds; a job that did not end counts as if it had ended then
    work: float  # seconds that it takes on all nodes

    def ends(self, policy: str) -> list[float]:
        """By window: seconds to the end."""
        return [self.length if each.finished is None else each.finished for each in self.outcomes[policy]]

    def factors(self) -> list[float]:
        """By zone: the time of failover over that of spotrun, as the geometric mean over its windows."""
        pairs = list(zip(self.ends("failover"), self.ends("own"), strict=True))
        of = {zone: [a / b for z, (a, b) in zip(self.zones, pairs, strict=True) if z == zone] for zone in self.zones}
        return [geometric(values).value for values in of.values()]

    def cost_factor(self) -> float:
        """The cost of the work done on spotrun over that on the rigid cluster, over all windows."""
        rigid, own = (self.outcomes[name] for name in ("failover", "own"))
        both = (sum(o.cost for o in each) / sum(o.done for o in each) for each in (own, rigid))
        return next(both) / next(both)

    def later(self) -> int:
        """In how many windows spotrun ended later."""
        return sum(a < b - 1 for a, b in zip(self.ends("failover"), self.ends("own"), strict=True))

    def dearer(self) -> int:
        """In how many windows both ended and spotrun cost more."""
        pairs = zip(self.outcomes["failover"], self.outcomes["own"], strict=True)
        return sum(o.cost > r.cost * 1.001 for r, o in pairs if None not in (r.finished, o.finished))


@dataclass(frozen=True)
class Deadlines:
    """Jobs of one node with a deadline."""

    outcomes: Mapping[float, Mapping[str, Sequence[Outcome]]]  # by fraction and policy
    bounds: Mapping[float, Sequence[float]]  # the least cost, by fraction
    zones: Sequence[str]  # of each window

    def closed(self, fraction: float) -> Estimate:
        """Which part of the gap between Uniform Progress and the optimum spotrun closes."""
        costs = {name: [o.cost for o in found] for name, found in self.outcomes[fraction].items()}
        return closed(costs["uniform_progress"], costs["own"], self.bounds[fraction])

    def spot_hours(self, policy: str, fraction: float) -> float:
        """The mean over the windows."""
        return mean([o.spot_hours for o in self.outcomes[fraction][policy]]).value


TITLES = {
    "zone": "16 nodes, machines of one zone alone",
    "zones": "16 nodes, all zones open",
    "single": "One node with a deadline",
}


def render(found: Mapping[str, Compared | Deadlines], about: str, took: Mapping[str, float], plots: Path) -> str:
    """The section. about: day, machine and time. took: seconds for each comparison."""
    lines = ["## Policies of capacity, on traces of spot markets", "", *_method(about), "", *goals(found), ""]
    lines += [f"{_speed(found, took)}", ""]
    for name, each in found.items():
        body = _compared(each, name == "zone") if isinstance(each, Compared) else _deadlines(each, plots)
        lines += [f"### {TITLES[name]}", "", *body, ""]
    return "\n".join(lines)


def goals(found: Mapping[str, Compared | Deadlines]) -> list[str]:
    """A table of the goals, and whether each holds."""
    rows: list[tuple[str, str, str, bool]] = []  # comparison, goal, measured, held
    for name, each in found.items():
        if isinstance(each, Deadlines):
            rows += [(TITLES[name], *row) for row in _deadline_goals(each)]
        elif name == "zone":
            factor, cost = geometric(each.factors()).value, each.cost_factor()
            rows.append((TITLES[name], "at least 1.2 times sooner, geometric mean", f"{factor:.2f}", factor >= 1.2))
            goal = "at no higher cost of the work done, over all windows"
            rows.append((TITLES[name], goal, f"{cost:.3f}", cost <= 1))
        else:
            later, dearer = each.later(), each.dearer()
            rows.append((TITLES[name], "never later", f"{later} of {len(each.zones)} windows", later == 0))
            rows.append((TITLES[name], "never dearer", f"{dearer} of {len(each.zones)} windows", dearer == 0))
    cells = [_row([*row[:3], "yes" if row[3] else "**no**"]) for row in rows]
    return [_row(["comparison", "goal", "measured", "held"]), _row(["---"] * 4), *cells]


def _deadline_goals(each: Deadlines) -> list[tuple[str, str, bool]]:
    met = sum(o.met for outcomes in each.outcomes.values() for o in outcomes["own"])
    total = len(each.zones) * len(each.outcomes)
    spot, other = each.spot_hours("uniform_progress", 0.8), each.spot_hours("greedy", 0.8)
    parts = {f: each.closed(f).value for f in each.outcomes}
    goal = "at least a quarter of the gap closed at"
    closings = [(f"{goal} {f:g}", f"{part:.0%}", part >= 0.25) for f, part in parts.items()]
    return [
        ("every deadline is met", f"{met} of {total}", met == total),
        *closings,
        ("Uniform Progress uses more spot hours than greedy at 0.8", f"{spot:.1f} and {other:.1f}", spot > other),
    ]


def _speed(found: Mapping[str, Compared | Deadlines], took: Mapping[str, float]) -> str:
    said = []
    for name, each in found.items():
        groups = [each.outcomes] if isinstance(each, Compared) else each.outcomes.values()
        count = sum(len(outcomes) for group in groups for outcomes in group.values())
        said.append(f"{count} in {took[name]:.0f} s ({60 * count / took[name]:.0f} a minute) for “{TITLES[name]}”")
    return f"Replays, the bounds included: {'; '.join(said)}."


def _method(about: str) -> list[str]:
    c = Costs()
    return [
        f"{about}. `make bench-capacity`. No cloud was used: the head's own decisions are replayed on recorded traces "
        "(bench/data/traces), in simulated time. Numbers in brackets are 95 % confidence intervals (bootstrap over "
        "windows).",
        "",
        f"Constants: a machine is ready after {c.boot:.0f} s (assumed). A generation's first step comes after "
        f"{c.restart:.0f} s with survivors, and after {c.restore:.0f} s from the bucket (from measurements with 100 M "
        f"parameters). Notice: {c.notice:.0f} s. n nodes are as fast as n to the power of {c.scaling} (assumed: 97 % "
        "for each doubling). failover saves state as spotrun does: only its placement is SkyPilot's.",
    ]


def _compared(each: Compared, by_zone: bool) -> list[str]:
    rigid, ours = each.outcomes["failover"], each.outcomes["own"]
    lines = [
        f"{len(rigid)} windows of {each.length / HOUR:.0f} h. The work takes {each.work / HOUR:.0f} h on 16 nodes. The "
        "job trains on at least 4 nodes. The bound knows the whole trace, and changes of machines cost it nothing.",
        "",
        _row(["policy", "ended", "hours to the end, mean", "USD for the whole work", "goodput", "moves, mean"]),
        _row(["---"] * 6),
    ]
    for policy, outcomes in each.outcomes.items():
        cost = ratio([o.cost for o in outcomes], [o.done for o in outcomes])
        lines.append(
            _row([
                NAMES[policy],
                f"{sum(o.finished is not None for o in outcomes)} of {len(outcomes)}",
                mean([end / HOUR for end in each.ends(policy)]).text(),
                cost.text(),
                mean([o.goodput for o in outcomes if o.cost > 0]).text(),
                mean([float(o.moves) for o in outcomes]).text(1),
            ])
        )  # fmt: skip
    known = [cost for cost, _ in each.bounds if cost < math.inf]
    ends = mean([min(end, each.length) / HOUR for _, end in each.bounds]).text()
    lines.append(_row(["bound", f"{len(known)} of {len(rigid)}", ends, mean(known).text() if known else "-", "-", "-"]))
    faster = [a / b for a, b in zip(each.ends("failover"), each.ends("own"), strict=True)]
    both = [r for r, o in zip(rigid, ours, strict=True) if r.finished is not None and o.finished is not None]
    lines += [
        "",
        f"Time to the end, failover / spotrun, geometric mean: **{geometric(faster).text()}**. Cost in the windows in "
        f"which both ended, spotrun / failover: **{_cost_ratio(rigid, ours)}**. spotrun ended later in "
        f"{each.later()} of {len(rigid)} windows, and was dearer (by more than 0.1 %) in {each.dearer()} of the "
        f"{len(both)} in which both ended.",
    ]
    return lines + (["", *_by_zone(each)] if by_zone else [])


def _cost_ratio(rigid: Sequence[Outcome], ours: Sequence[Outcome]) -> str:
    pairs = [(r, o) for r, o in zip(rigid, ours, strict=True) if r.finished is not None and o.finished is not None]
    return (
        ratio([o.cost for _, o in pairs], [r.cost for r, _ in pairs]).text() if pairs else "no window in which both end"
    )


def _by_zone(each: Compared) -> list[str]:
    lines = [_row(["zone", "windows", "failover / spotrun, time", "spotrun / failover, cost"]), _row(["---"] * 4)]
    for zone in dict.fromkeys(each.zones):
        mine = [index for index, name in enumerate(each.zones) if name == zone]
        ends = {policy: [each.ends(policy)[i] for i in mine] for policy in each.outcomes}
        factor = geometric([a / b for a, b in zip(ends["failover"], ends["own"], strict=True)])
        rigid, ours = ([each.outcomes[policy][i] for i in mine] for policy in ("failover", "own"))
        lines.append(_row([zone, str(len(mine)), factor.text(), _cost_ratio(rigid, ours)]))
    return [
        *lines,
        "",
        f"Geometric mean over the zones: **{geometric(each.factors()).value:.2f}** (goal: at least 1.2).",
    ]


def _deadlines(each: Deadlines, plots: Path) -> list[str]:
    count = len(each.zones)
    lines = [
        f"{count} windows of 48 h for each fraction, spot machines of one zone, on-demand machines at three times "
        "their price, 0.2 h from the order of a machine to its first step. Cost: an hour of spot is 1. Optimum: "
        "dynamic programming over the whole trace. Closed: the part of the gap from "
        "Uniform Progress to the optimum.",
        "",
        _row(["work / deadline", "policy", "deadlines met", "cost", "/ on-demand", "/ optimum", "spot hours",
              "on-demand hours", "goodput", "moves", "closed"]),
        _row(["---"] * 11),
    ]  # fmt: skip
    for fraction, outcomes in each.outcomes.items():
        best, static = each.bounds[fraction], [o.cost for o in outcomes["static"]]
        for policy, found in outcomes.items():
            costs = [o.cost for o in found]
            part = each.closed(fraction).text() if policy == "own" else ""
            others = [
                mean([getattr(o, name) for o in found])
                for name in ("spot_hours", "on_demand_hours", "goodput", "moves")
            ]
            cells = [f"{fraction:g}", NAMES[policy], f"{sum(o.met for o in found)} of {count}", mean(costs).text()]
            cells += [ratio(costs, static).text(), ratio(costs, best).text()]
            lines.append(_row([*cells, *(f"{each.value:.2f}" for each in others), part]))
        lines.append(
            _row([f"{fraction:g}", "optimum", "", mean(best).text(), ratio(best, static).text(), "1", *[""] * 5])
        )
    lines += ["", *_wins(each)]
    series = [
        Line(NAMES.get(policy, policy), [(f, mean([o.cost for o in each.outcomes[f][policy]])) for f in each.outcomes])
        for policy in next(iter(each.outcomes.values()))
    ]
    series.append(Line("optimum", [(f, mean(each.bounds[f])) for f in each.outcomes]))
    plots.mkdir(exist_ok=True)
    (plots / "capacity-deadline.svg").write_text(
        plot("Cost of 48 h jobs by work / deadline", "work / deadline", "cost", series)
    )
    return [*lines, "", "![cost by fraction](plots/capacity-deadline.svg)"]


def _wins(each: Deadlines) -> list[str]:
    lines = [
        _row(["work / deadline", "spotrun cheaper than Uniform Progress", "dearer", "worst: dearer by"]),
        _row(["---"] * 4),
    ]
    for fraction, outcomes in each.outcomes.items():
        pairs = list(zip(outcomes["uniform_progress"], outcomes["own"], strict=True))
        more = [o.cost / u.cost - 1 for u, o in pairs]
        lines.append(
            _row(
                [
                    f"{fraction:g}",
                    str(sum(x < -0.001 for x in more)),
                    str(sum(x > 0.001 for x in more)),
                    f"{max(more):.0%}",
                ]
            )
        )
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
