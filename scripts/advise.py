"""Which machines suit a job: types, counts, markets and zones, ranked by expected cost and time to finish. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scripts.columns import aligned, duration
from scripts.job_table import money
from spotrun.head.capacity.observe import SCALING
from spotrun.head.speeds import Speed
from spotrun.text import tidy

SHOWN = 20  # the most options in the text and in the plot; JSON has all of them
RESTART = 192.0  # seconds from an interruption to the next step: boot and restart, as in `spotrun.simulate.costs`
Source = Literal["measured", "scaled", "given", "estimate", ""]
SOURCES = {
    "measured": "measured on as many of these machines",
    "scaled": f"measured on another number of these machines; n machines count as n ** {SCALING:g}",
    "given": "from RATE",
    "estimate": "a rough estimate: the speed on other GPUs, times the ratio of the GPUs' peak throughputs",
}


@dataclass(frozen=True)
class Kind:
    """One kind of machine that the job could train on."""

    pool: str  # the cluster's pool; empty: the cluster file has no such pool
    zone: str  # a zone, or a region
    machine: str  # the machine type
    market: str  # spot, flex or on-demand
    devices: int  # devices of the machine that the job would use
    max: int  # how many of these machines there can be
    price: float | None  # USD an hour for a machine; None: not known
    priced_at: str = ""  # the date of the price: 2026-11-21, or `now`; empty: the price is not known
    throughput: float = 0.0  # of the devices together: peak of the GPUs in TFLOPS; 0: not known
    interruptions: float | None = None  # of one machine in an hour, as this cluster has seen them; None: unknown
    obtained: float | None = None  # 0 to 1: the part of the time in which the pool had what was asked; None: unknown


@dataclass(frozen=True)
class Option:
    """A number of machines of one kind, and what the job would cost on them."""

    kind: Kind
    nodes: int  # machines
    rate: float | None  # samples per second of all of them; None: not known
    source: Source  # where `rate` is from
    hourly: float | None  # USD an hour for all of them
    per_dollar: float | None  # samples
    seconds: float | None  # to finish, with the expected interruptions; None: work or rate are not known
    cost: float | None  # USD to finish


def rank(
    kinds: Iterable[Kind],
    counts: Sequence[int],
    speeds: Sequence[Speed],
    work: float | None,
) -> list[Option]:
    """The options, the best first: by cost to finish, else by samples for a dollar; unknown ones last.

    counts: numbers of nodes that the job can train on. speeds: measurements of this job, or what the operator says.
    work: the samples of the whole run; None: not known.
    """
    kinds = list(kinds)
    found = [
        _option(kind, nodes, *_rate(kind, nodes, speeds, kinds), work)
        for kind in kinds
        for nodes in counts
        if nodes <= kind.max
    ]
    return sorted(found, key=_order)


def given(kind: Kind, rate: float, speeds: Iterable[Speed]) -> list[Speed]:
    """The speeds, with what the operator says instead of this kind's: samples per second of one machine."""
    said = Speed(pool=kind.pool, nodes=1, devices=kind.devices, samples_per_second=rate, samples=0.0, steps=0, at=0.0)
    return [*(each for each in speeds if each.pool != kind.pool), said]


def document(options: Sequence[Option], job: str, work: float | None, warnings: Sequence[str]) -> dict[str, Any]:
    """What `make advise JSON=1` prints."""
    return {
        "job": job,
        "samples": work,
        "options": [{**asdict(each.kind), **_numbers(each)} for each in options],
        "warnings": list(warnings),
    }


def text(found: Mapping[str, Any]) -> str:
    """The document for a person."""
    found = tidy(found)
    head = ["machines", "market", "zone", "$/h", "samples/s", "samples/$", "time", "cost", "interruptions", "got"]
    rows, more = [_row(each) for each in found["options"][:SHOWN]], len(found["options"]) - SHOWN
    work = "" if found["samples"] is None else f", {found['samples']:,.0f} samples"
    lines = [f"job {found['job']}{work}; the best first:", *aligned([head, *rows])]
    if more > 0:
        lines.append(f"and {more} more: JSON=1")
    used = dict.fromkeys(each["source"] for each in found["options"] if each["source"])
    lines += [f"{MARKS[source]} {SOURCES[source]}" for source in used if MARKS[source]]
    if any(each["rate"] is None for each in found["options"]):
        lines.append(
            "? not known: MEASURE=2m measures each pool of the cluster; RATE= gives the samples/s of one machine of the"
            " first pool"
        )
    return "\n".join([*lines, *found["warnings"]])


def name(each: Mapping[str, Any]) -> str:
    """An option in a few words."""
    devices = f" with {each['devices']} devices" if each["devices"] > 1 else ""
    return f"{each['nodes']} x {each['machine']}{devices}, {each['market']}, {each['pool'] or each['zone']}"


def markdown(found: Mapping[str, Any]) -> str:
    """The options as a table for a document, the most samples for a dollar first."""
    rows = [
        "| machines | devices | market | pool | zone | USD/h | samples/s | samples for a dollar | the speed is |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    known = [each for each in found["options"] if each["per_dollar"] is not None]
    for each in sorted(known, key=lambda option: -option["per_dollar"]):
        cells = [
            f"{each['nodes']} x {each['machine']}",
            *(str(each[key]) for key in ("devices", "market", "pool", "zone")),
        ]
        cells += [f"{each['hourly']:.2f}", f"{each['rate']:,.4g}", f"{each['per_dollar']:,.0f}", each["source"]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


MARKS = {"measured": "", "scaled": "~", "given": "=", "estimate": "≈"}


def _rate(kind: Kind, nodes: int, speeds: Sequence[Speed], kinds: Sequence[Kind]) -> tuple[float | None, Source]:
    own = {each.nodes: each for each in speeds if kind.pool and (each.pool, each.devices) == (kind.pool, kind.devices)}
    if own:
        near = own[min(own, key=lambda count: abs(count - nodes))]
        source: Source = "given" if not near.steps else "measured" if near.nodes == nodes else "scaled"
        return near.samples_per_second * (nodes / near.nodes) ** SCALING, source
    for each in sorted(speeds, key=lambda each: -each.at):
        other = next((k for k in kinds if k.pool and (k.pool, k.devices) == (each.pool, each.devices)), None)
        if other and other.throughput and kind.throughput:
            one = each.samples_per_second / each.nodes**SCALING
            return one * kind.throughput / other.throughput * nodes**SCALING, "estimate"
    return None, ""


def _option(kind: Kind, nodes: int, rate: float | None, source: Source, work: float | None) -> Option:
    hourly = None if kind.price is None else kind.price * nodes
    # When one of the machines is interrupted, all of them lose the time of a restart.
    lost = min(0.9, (kind.interruptions or 0.0) * nodes * RESTART / 3600)
    seconds = None if rate is None or work is None else work / rate / (1 - lost)
    return Option(
        kind=kind,
        nodes=nodes,
        rate=rate,
        source=source,
        hourly=hourly,
        per_dollar=None if rate is None or not hourly else rate * (1 - lost) * 3600 / hourly,
        seconds=seconds,
        cost=None if seconds is None or hourly is None else seconds * hourly / 3600,
    )


def _order(option: Option) -> tuple[bool, float, bool, float, float]:
    per_dollar = option.per_dollar or 0.0
    return (option.cost is None, option.cost or 0.0, option.rate is None, -per_dollar, option.hourly or float("inf"))


def _numbers(option: Option) -> dict[str, Any]:
    keys = ("nodes", "rate", "source", "hourly", "per_dollar", "seconds", "cost")
    return {key: getattr(option, key) for key in keys}


def _row(each: Mapping[str, Any]) -> list[str]:
    devices = f" with {each['devices']} devices" if each["devices"] > 1 else ""
    what = f"{each['nodes']} x {each['machine']}{devices}" + (f", {each['pool']}" if each["pool"] else "")
    rate = "?" if each["rate"] is None else f"{MARKS[each['source']]}{each['rate']:,.4g}"
    return [
        what,
        each["market"],
        each["zone"],
        "?" if each["hourly"] is None else f"{each['hourly']:.2f}",
        rate,
        "?" if each["per_dollar"] is None else f"{each['per_dollar']:,.0f}",
        "?" if each["seconds"] is None else duration(each["seconds"]),
        money(each["cost"]) or "?",
        "unknown" if each["interruptions"] is None else f"{each['interruptions']:.2f}/h",
        "unknown" if each["obtained"] is None else f"{each['obtained']:.0%}",
    ]
