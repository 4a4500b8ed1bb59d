"""The report of an acceptance: Markdown for people, JSON for programs. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from scripts.acceptance.plan import dollars, missing, total
from scripts.acceptance.record import Fact, Facts, Record, Result
from scripts.acceptance.steps import Step
from scripts.columns import duration
from spotrun.spec import ClusterSpec
from spotrun.text import clean

_LONGEST = 300  # characters of a reason in a table
_NOT_YET = Result(state="not run", reason="it was not reached")


def announce(step: Step, cluster: ClusterSpec) -> str:
    """The line before a step is done: what it proves, how long it takes, what it costs at most."""
    return f"{step.name}: {step.proves} (about {duration(60 * step.minutes)}, {price(dollars(step, cluster))})"


def outcome(step: Step, result: Result) -> str:
    """The lines after a step."""
    facts = f"  {_facts(result.facts)}" if result.facts else ""
    if result.state == "passed":
        return f"  passed after {duration(result.seconds)}{facts}"
    if result.state == "not run":
        return f"  not run: {clean(result.reason)}"
    return f"  FAILED after {duration(result.seconds)}: {clean(result.reason)}\n  what to do: {step.remedy}{facts}"


def overview(steps: Sequence[Step], cluster: ClusterSpec) -> str:
    """What a run is about to do, step by step, and what all of it costs at most."""
    rows = [("step", "takes", "at most", "needs", "proves")]
    rows += [
        (step.name, duration(60 * step.minutes), price(dollars(step, cluster)), step.needs, step.proves)
        for step in steps
        if not missing(step, cluster)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    most, known = total(steps, cluster)
    rest = "" if known else ", and what is not in the price table"
    return "\n".join([*lines, f"all of it: {f'at most {price(most)}' if most else 'costs nothing'}{rest}"])


def verdict(steps: Sequence[Step], record: Record) -> str:
    """12 passed, 1 failed (kill), 20 not run"""
    states = {name: [s.name for s in steps if _result(s, record).state == name] for name in ("passed", "failed")}
    rest = len(steps) - len(states["passed"]) - len(states["failed"])
    failed = f"{len(states['failed'])} failed" + (f" ({', '.join(states['failed'])})" if states["failed"] else "")
    return f"{len(states['passed'])} passed, {failed}, {rest} not run"


def not_run(steps: Sequence[Step], record: Record) -> dict[str, list[str]]:
    """The steps that were not run, by the reason."""
    found: dict[str, list[str]] = {}
    for step in steps:
        result = _result(step, record)
        if result.state == "not run":
            found.setdefault(clean(result.reason), []).append(step.name)
    return found


def markdown(steps: Sequence[Step], record: Record, cluster: ClusterSpec) -> str:
    """The whole report."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.at))
    about = f"{when}, cloud {cluster.cloud}, region {cluster.region}: {verdict(steps, record)}."
    head = [f"# Acceptance of cluster {cluster.name}", "", about, ""]
    failed = [step for step in steps if _result(step, record).state == "failed"]
    if failed:
        told = [f"- **{s.name}**: {_cell(_result(s, record).reason)}. To do: {s.remedy}." for s in failed]
        head += ["## What failed, and what to do", "", *told, ""]
    table = ["## Steps", "", "| step | needs | result | took | costs at most | proves |", "|---|---|---|---|---|---|"]
    table += [_row(step, _result(step, record), cluster) for step in steps]
    measured = [(s.name, _result(s, record).facts) for s in steps if _result(s, record).facts]
    if measured:
        table += ["", "## What was measured", "", "| step | what | value |", "|---|---|---|"]
        table += [
            f"| {name} | {_cell(key)} | {_value(value)} |" for name, facts in measured for key, value in facts.items()
        ]
    return "\n".join([*head, *table, ""])


def document(steps: Sequence[Step], record: Record, cluster: ClusterSpec) -> dict[str, Any]:
    """The same as JSON values."""
    found = []
    for step in steps:
        result = _result(step, record)
        about = {"step": step.name, "stage": step.stage, "needs": step.needs, "proves": step.proves}
        cost = {"minutes": step.minutes, "dollars_at_most": dollars(step, cluster)}
        remedy = {"remedy": step.remedy} if result.state == "failed" else {}
        found.append(about | cost | result.model_dump(mode="json") | remedy)
    whole = {"cluster": cluster.name, "cloud": cluster.cloud, "region": cluster.region, "at": record.at}
    return {**whole, "verdict": verdict(steps, record), "failed": record.failed, "steps": found}


def price(dollars: float | None) -> str:
    if dollars is None:
        return "price not known"
    return "free" if dollars == 0 else f"${max(dollars, 0.01):.2f}"


def _result(step: Step, record: Record) -> Result:
    return record.results.get(step.name, _NOT_YET)


def _row(step: Step, result: Result, cluster: ClusterSpec) -> str:
    state = f"**{result.state}**" if result.state == "failed" else result.state
    reason = f": {_cell(result.reason)}" if result.reason else ""
    took = duration(result.seconds) if result.seconds else ""
    cost = price(dollars(step, cluster))
    return f"| {step.name} | {step.needs} | {state}{reason} | {took} | {cost} | {step.proves} |"


def _facts(facts: Facts) -> str:
    return "; ".join(f"{clean(key)} {_value(value)}" for key, value in facts.items())


def _value(value: Fact) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _cell(str(value))


def _cell(text: str) -> str:
    """A text from elsewhere, in one line of a table."""
    line = " ".join(clean(text).split()).replace("|", "\\|")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
