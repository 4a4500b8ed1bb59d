"""The closing report: how a job ended, what its interruptions cost, and where its node time went. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from scripts import cost, kept
from scripts.columns import duration
from scripts.control import Status
from scripts.display import idle, understood, values
from scripts.make_command import LOCAL
from scripts.ssh import Outcome
from spotrun.text import count, tidy

NODE_TIME = {  # the kinds of `spotrun.head.costs.node_time`, for the report
    "counted": "steps that counted",
    "lost": "steps lost, and the time from the last step of a generation to its end",
    "starting": "starting: machines boot, are checked, install packages, import torch",
    "waiting": "waiting: ready, but fewer machines than the job needs",
    "recovery": "recovery: from an interruption to the next step",
    "spare": "idle spares: ready, not needed now",
    "leaving": "leaving: under notice, or not connected any more, while training goes on without them",
    "unfit": "unfit: failed the health checks",
    "kept": "kept for SSH after the job had failed",
    "saving": "saving the last state to the bucket",
    "unknown": "not known: counted by an older version of the head",
}


@understood
def report(job: Status, idle_cost: float | None = None, file: str = LOCAL) -> str:
    """The report of a job from its last status, without control characters.

    idle_cost: see `display.listing`. file: the cluster file, which commands name.
    """
    job = tidy(job)
    lines = [_verdict(job)]
    if job["failure"] and not _says_all(job):
        lines += _failure(job["failure"])
    if job["phase"] == "succeeded" and job["step"] <= 0:
        lines.append("  spotrun has seen no step. If the script trains, have it call run.track, run.train or run.fit:")
        lines.append("  otherwise nothing is saved, and each worker may train for itself (docs/training.md)")
    lines += [f"  {line}" for line in kept.lines(job, file)]
    if job["metrics"]:
        lines.append("  last values: " + ", ".join(values(job["metrics"])))
    lines += _interruptions(job["interruptions"])
    if job["goodput"] is not None:
        lines.append(f"  goodput {job['goodput']:.1%} (share of node time that went into steps that counted)")
    machines = f"  node time {duration(job['node_seconds'])}"
    if job["cost"] is not None:
        machines += f", cost ${job['cost']:.2f}"
    split = _node_time(job)
    unknown = "; where it went is not known" if job["node_seconds"] > 0 else ""
    lines += [machines + (", of which:" if split else unknown), *split]
    lines += cost.by_pool(job.get("account") or [], job.get("budget"))
    lines += [f"  {line}" for line in idle(idle_cost)]
    return "\n".join(lines)


def failures(outcomes: Sequence[Outcome], nodes: int) -> str:
    """The nodes that failed a command: 2 of 3 nodes failed: a (exit status 3), b (not reached)"""
    why = [f"exit status {each.code}" if each.reached else "not reached, see above" for each in outcomes]
    told = [f"{each.node} ({reason})" for each, reason in zip(outcomes, why, strict=True)]
    return f"{len(told)} of {count(nodes, 'node')} failed: {', '.join(told)}"


def _verdict(job: Status) -> str:
    steps = f"{job['step']} of {job['total_steps']} steps" if job["total_steps"] else f"{job['step']} steps"
    reason = f": {job['reason']}" if job["reason"] else ""
    took = f" in {duration(job['ended'] - job['started'])}" if job["ended"] and job["started"] else ""
    generations = count(job["generation"], "generation")
    return f"job {job['id']} {job['phase']}{reason}: {steps}{took}, {generations}"


def _says_all(job: Status) -> bool:
    """Whether the reason is the message of a failure that each worker has in each try, so its place says nothing."""
    failure = job["failure"]
    return bool(failure.get("repeats")) and failure["message"] == job["reason"]  # an older head may have no `repeats`


def _failure(failure: Status) -> list[str]:
    lines = [f"  rank {failure['rank']} on {failure['node']}: {failure['message']}"]
    lines += [f"    {line}" for line in (failure["traceback"] or "").rstrip().splitlines()]
    if failure["message"].startswith("ModuleNotFoundError"):
        lines.append("  a package must be in `requirements` of the job file, and your own modules in its folder")
    if failure["stacks"]:
        lines.append(f"  the stacks of all ranks are in the bucket at {failure['stacks']}")
    return lines


def _node_time(job: Status) -> list[str]:
    """Where the node time went, the largest share first. Heads up to version 0.1 do not send it."""
    split = job.get("node_time")
    if not split or job["node_seconds"] <= 0:
        return []
    rows = sorted(split.items(), key=lambda item: -item[1])
    shares = [(f"{seconds / job['node_seconds']:.1%}", _told(kind, job)) for kind, seconds in rows]
    return [f"  {share:>7}  {text}" for share, text in shares if share != "0.0%"]


def _told(kind: str, job: Status) -> str:
    if kind == "lost" and not job["interruptions"]:
        return "after the last step: the end of the script"
    text = NODE_TIME.get(kind, kind)
    if kind != "counted" or not job.get("snapshot_seconds"):
        return text
    return f"{text}; of it copying snapshots {job['snapshot_seconds'] / job['node_seconds']:.2%}"


def _interruptions(interruptions: list[Status]) -> list[str]:
    if not interruptions:
        return ["  no interruptions"]
    rows = [("interruption", "node", "seconds to the next step", "steps lost")]
    for each in interruptions:
        seconds = "" if each["seconds"] is None else f"{each['seconds'] - each.get('held', 0.0):.1f}"
        lost = "" if each["steps_lost"] is None else str(each["steps_lost"])
        rows.append((each["kind"], each["node"] or "", seconds, lost))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
