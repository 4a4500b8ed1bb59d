"""The report on models of several sizes and scripts with a set-up. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from statistics import median

from bench.phases import PARTS, Phases, medians
from bench.systems import NODES, SCENARIOS, SIZES, Run, Workload
from bench.torchft_system import DEFAULTS, STOCK, TUNED

SYSTEMS = ("plain", "tuned", "torchft", "torchft-tuned", "torchft-stock", "spotrun")
PLAIN_SHARE = 1 / 30  # of plain torchrun's total, at 0.1 M parameters
BROADCASTS, PLUS = 1.5, 0.5  # of a bare broadcast, and seconds
SAME = 0.5  # seconds by which a long set-up may change the pause
_HEADS = (
    "scenario",
    "parameters",
    "set-up",
    "system",
    *PARTS,
    "total",
    "(range)",
    "pause",
    "usual step",
    "lost",
    "runs",
)
Key = tuple[str, Workload, str]


def render(
    runs: Sequence[Run],
    reference: Mapping[str, float],
    machine: str,
    day: date,
    timeout: float,
    plots: Sequence[str] = (),
) -> str:
    """The section. reference: by size, seconds that a bare broadcast of the state takes. plots: names of SVG files."""
    table = summarize(runs)
    lines = ["## Recovery by size and set-up", "", f"{day.isoformat()}. {machine}.", ""]
    lines += [
        "As above, with models of other sizes, and with a set-up of the script that waits for some seconds before it "
        "builds the model. The pause is from the last old step to the end of the first new one, so it includes one "
        "step. The usual step is the time of a step before the fault. If a spare stands by, no machine replaces the "
        "lost one. All workers of a large model share the machine's cores. On a machine without GPUs, the workers of "
        "all systems ask for pages of 2 MB, as those of spotrun do by default. All times are medians, in seconds. "
        f"A hang is {timeout:g} s without a step, and is not in the medians.",
        "",
        "torchft has no spares. In both scenarios with SIGKILL, three replica groups train. One is killed, and two go "
        f"on (`min_replicas` {NODES}). torchft's "
        "recovery is shown as one part, which ends with the next step that is committed. When a third node joins, "
        "the total is the time until its first step (a machine of spotrun boots meanwhile), and the pause is the "
        "longest time between two steps of one of the other nodes.",
        "",
        *(f"* {each.name}: {each.what}" for each in (DEFAULTS, TUNED, STOCK)),
        "",
        *_table(table, runs),
        "",
        "A bare broadcast of the same state (parameters and what AdamW keeps) by gloo, from one process to another: "
        + ", ".join(f"{_name(size)}: {seconds:.2f} s" for size, seconds in reference.items())
        + ".",
        "",
        *_goals(table, reference),
        *(line for name in plots for line in ("", f"![steps around a fault](plots/{name})")),
    ]
    return "\n".join(lines)


def render_trainer(runs: Sequence[Run], machine: str, day: date, timeout: float) -> str:
    """The section on scripts with a Trainer: a table for each framework."""
    lines = ["## Recovery of scripts with a Trainer", "", f"{day.isoformat()}. {machine}.", ""]
    lines += [
        "The same script and model in all systems. Under torchrun, the Trainer saves a checkpoint every 20 steps, and "
        "goes on from the newest one. Under spotrun, the script calls `run.train` or `run.fit`. With a notice, it "
        "trains on until the new node is ready: the pause counts, not the total. A set-up adds its own time to each "
        "recovery under torchrun, so this is not measured. Columns as above. All times are medians, in seconds. "
        f"A hang is {timeout:g} s without a step, and is not in the medians.",
    ]
    for name, title in (("hugging_face", "Hugging Face"), ("lightning", "PyTorch Lightning")):
        if own := [run for run in runs if run.workload.trainer == name]:
            lines += ["", f"{title} (bench/train_{name}.py):", "", *_table(summarize(own), own)]
    return "\n".join(lines)


def _table(table: Mapping[Key, tuple[Phases | None, float | None]], runs: Sequence[Run]) -> list[str]:
    heads = [_row([head.replace("_", " ") for head in _HEADS]), _row(["---"] * len(_HEADS))]
    return [*heads, *(_row(_cells(key, table[key], runs)) for key in sorted(table, key=_place))]


def summarize(runs: Sequence[Run]) -> dict[Key, tuple[Phases | None, float | None]]:
    """(scenario, workload, system) → (medians of the runs that went on, usual step)."""
    found: dict[Key, tuple[Phases | None, float | None]] = {}
    for key in dict.fromkeys((run.scenario, run.workload, run.system) for run in runs if run.system in SYSTEMS):
        own = _own(runs, key)
        went_on = [run.phases for run in own if run.phases is not None]
        steps = [run.usual for run in own if run.usual is not None]
        found[key] = (medians(went_on) if went_on else None, median(steps) if steps else None)
    return found


def _own(runs: Sequence[Run], key: Key) -> list[Run]:
    return [run for run in runs if (run.scenario, run.workload, run.system) == key]


def _place(key: Key) -> tuple[int, int, float, int]:
    scenario, workload, system = key
    return list(SCENARIOS).index(scenario), SIZES[workload.size], workload.setup, SYSTEMS.index(system)


def _cells(key: Key, found: tuple[Phases | None, float | None], runs: Sequence[Run]) -> list[str]:
    scenario, workload, system = key
    phases, usual = found
    own = _own(runs, key)
    hangs = sum(run.phases is None for run in own)
    count = str(len(own)) + (f" ({hangs} hangs)" if hangs else "")
    names = [SCENARIOS[scenario].title, _name(workload.size), f"{workload.setup:g} s", system]
    step = "-" if usual is None else f"{usual:.2f}"
    if phases is None:
        return [*names, *["-"] * (len(PARTS) + 3), step, "-", count]
    totals = [run.phases.total for run in own if run.phases is not None]
    span = f"{min(totals):.2f} to {max(totals):.2f}"
    parts = [f"{getattr(phases, name):.2f}" for name in PARTS]
    return [
        *names,
        *parts,
        f"**{phases.total:.2f}**",
        span,
        f"{phases.pause:.2f}",
        step,
        f"{phases.steps_lost:g}",
        count,
    ]


def _goals(table: Mapping[Key, tuple[Phases | None, float | None]], reference: Mapping[str, float]) -> list[str]:
    lines = [_row(["goal", "measured", "held"]), _row(["---"] * 3)]

    def total(workload: Workload, system: str = "spotrun") -> tuple[float, float] | None:
        """(total, usual step)."""
        phases, usual = table.get(("spare", workload, system), (None, None))
        return None if phases is None else (phases.total, usual or 0.0)

    def add(goal: str, value: float | None, limit: float | None, text: str) -> None:
        known = value is not None and limit is not None
        held = "yes" if known and value <= limit else "no"  # type: ignore[operator]
        lines.append(_row([goal, text if known else "not measured", held if known else "-"]))

    small, plain = total(Workload("0.1M")), total(Workload("0.1M"), "plain")
    value = small[0] / plain[0] if small and plain else None
    text = f"{small[0]:.2f} / {plain[0]:.2f} = 1/{plain[0] / small[0]:.1f}" if small and plain else ""
    add("0.1 M: hard kill with a spare at most 1/30 of plain", value, PLAIN_SHARE, text)
    large, bare = total(Workload("100M")), reference.get("100M")
    limit = None if bare is None else BROADCASTS * bare + PLUS
    goal = "100 M: hard kill with a spare at most 1.5 times a bare broadcast + 0.5 s"
    add(goal, large and large[0], limit, f"{large[0]:.2f}, limit {limit:.2f}" if large and limit else "")
    beyond = large[0] - large[1] if large else None
    text = f"{beyond:.2f}, limit {limit:.2f}" if beyond is not None and limit else ""
    add(f"{goal}, without the step itself", beyond, limit, text)
    for size in SIZES:
        short, long = total(Workload(size)), total(Workload(size, 30.0))
        if long is not None:
            value = abs(long[0] - short[0]) if short else None
            text = f"{long[0]:.2f} and {short[0]:.2f}" if short else ""
            add(f"{_name(size)}: hard kill: the same with 30 s of set-up as without, within 0.5 s", value, SAME, text)
    for size in SIZES:
        phases, usual = table.get(("fixed", Workload(size), "spotrun"), (None, None))
        if phases is not None and size in reference:
            limit, pause = PLUS + reference[size], phases.pause - (usual or 0.0)
            goal = f"{_name(size)}: with notice and fixed size a pause of at most a bare broadcast + {PLUS:g} s"
            add(goal, phases.pause, limit, f"{phases.pause:.2f}, limit {limit:.2f}")
            add(f"{goal}, without the step itself", pause, limit, f"{pause:.2f}, limit {limit:.2f}")
    for (scenario, workload, system), (own, _) in table.items():
        if system != "spotrun" or own is None:
            continue
        pairs = [(name, table.get((scenario, workload, name), (None, None))[0]) for name in (DEFAULTS.name, TUNED.name)]
        for name, other in ((name, other) for name, other in pairs if other is not None):
            joins = SCENARIOS[scenario].fault == "join"
            mine, theirs = (own.pause, other.pause) if joins else (own.total, other.total)
            title = SCENARIOS[scenario].title
            goal = f"{_name(workload.size)}, {workload.setup:g} s of set-up: {title}: {'pause' if joins else 'total'}"
            add(f"{goal} at most that of {name}", mine, theirs, f"{mine:.2f} and {theirs:.2f}")
    return lines


def _name(size: str) -> str:
    return f"{size.removesuffix('M')} M"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
