"""The overview: one document about the whole cluster, which the dashboard draws. Pure.

It is the status document, with the markets of the pools, money, and what each job has promised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from spotrun.cloud.base import Advice, Instance, Problem, Said
from spotrun.head.capacity.history import Histories
from spotrun.head.costs.bill import HOUR, Rates
from spotrun.head.job_state import JobState
from spotrun.head.status import job_status, row
from spotrun.spec import ClusterSpec
from spotrun.spec.cluster import PoolSpec

if TYPE_CHECKING:
    from spotrun.head.head import Head

EVENTS = 100  # newest events that the overview has
PRICES = 48  # newest price changes of a pool that the overview has
_OF_JOB = (
    "generation",
    "goodput",
    "node_seconds",
    "started",
    "ended",
    "deadline",
    "budget",
    "hourly",
    "cost_to_end",
    "checkpoint",
    "metrics",
)


def of(head: Head) -> dict[str, Any]:
    """The overview of a head, as of now."""
    fleet = head.fleet
    markets = fleet.instances or (), fleet.problems, fleet.rates, fleet.advice, head.scaler.placer.histories
    found = overview(head.status(), head.cluster, head.states, head.events.newest(EVENTS), *markets)
    places = head.scaler.places
    for each in found["jobs"]:
        each["placement"] = places[each["id"]].reason if each["id"] in places else ""
    return found


def overview(
    document: Mapping[str, Any],
    cluster: ClusterSpec,
    jobs: Mapping[str, JobState],
    events: Iterable[Mapping[str, Any]],
    instances: Iterable[Instance] = (),
    problems: Iterable[Problem] = (),
    rates: Rates | None = None,
    advice: Mapping[str, Advice] | None = None,
    histories: Histories | None = None,
) -> dict[str, Any]:
    """document: the status document; its `job` is not used. jobs: those that the head runs. events: the newest ones.

    The other arguments are what the head knows of the pools. An argument that is left out is not known.
    """
    rates, known = rates or Rates(), histories or Histories()
    running = [each for each in instances if each.state == "running"]
    made = {each.name: each.started or each.created for each in instances}
    told = {pool["name"]: pool for pool in document["pools"]}
    pools = [
        _pool(spec, told.get(spec.name, {}), rates, (advice or {}).get(spec.name), known, problems)
        for spec in cluster.pools
    ]
    rows = [each | extras(jobs[each["id"]]) if each["id"] in jobs else each for each in document["jobs"]]
    kept = {key: value for key, value in document.items() if key not in ("job", "events", "pools", "jobs", "nodes")}
    return kept | {
        "cloud": cluster.cloud,
        "pools": pools,
        "nodes": [node | {"since": made.get(node["name"])} for node in document["nodes"]],
        "jobs": rows,
        "events": list(events),
        # Machines without a known price are left out, and counted.
        "hourly": sum(rates.prices.get(each.pool, 0.0) for each in running),
        "unpriced": sum(each.pool not in rates.prices for each in running),
    }


def job_row(job: JobState) -> dict[str, Any]:
    """A job that the head does not run, from its state in the bucket, with the keys of a job in the overview."""
    return row(job) | extras(job)


def extras(job: JobState) -> dict[str, Any]:
    """The keys that a job has in the overview, but not in the status document."""
    found = job_status(job)
    end = found["ended"] or found["eta"]
    interruptions = job.interruptions
    return {key: found[key] for key in _OF_JOB} | {
        "interruptions": len(interruptions),
        "steps_lost": sum(each.steps_lost or 0 for each in interruptions),
        "paused": bool(job.paused),
        # Whether the deadline is or will be met, at the present pace. None: no deadline, or the end is not known.
        "in_time": None if found["deadline"] is None or end is None else end <= found["deadline"],
    }


def _pool(
    spec: PoolSpec,
    told: Mapping[str, Any],
    rates: Rates,
    advice: Advice | None,
    histories: Histories,
    problems: Iterable[Problem],
) -> dict[str, Any]:
    problem = next((each for each in problems if each.pool == spec.name), None)
    history = histories.of().get(spec.name)
    said = advice or Advice()
    return {
        "name": spec.name,
        "zone": spec.zone,
        "machine": spec.machine,
        "market": spec.market,
        "max": spec.max,
        "target": told.get("target"),
        "running": told.get("running"),
        "price": rates.prices.get(spec.name),
        "on_demand": rates.on_demand.get(spec.name),
        "problem": told.get("problem"),
        "short": problem and {"kind": problem.kind, "since": problem.at},
        "advice": {
            "obtainability": _said(said.obtainability),
            "uptime": _said(said.uptime),
            "preemptions": _said(said.preemptions),
            "prices": [[each.at, each.value] for each in said.prices[-PRICES:]],
        },
        # What the head has seen itself. Old events count less.
        "seen": history
        and {
            "machine_hours": history.hours,
            "interruptions": history.interruptions,
            "short_at": history.short_at or None,
            "lifetime": history.lifetime / HOUR,
        },
    }


def _said(said: Said | None) -> dict[str, Any] | None:
    return None if said is None else {"value": said.value, "at": said.at, "source": said.source}
