"""`make profile`: have ranks of a job record some steps, fetch the traces, and say what took the time."""

from __future__ import annotations

import gzip
import json
import shlex
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts import console, ssh, stack_requests, trace_table
from scripts.export_runs import FOLDER
from scripts.ssh import Access, Outcome
from scripts.trace_table import Row
from spotrun.errors import SpotrunError
from spotrun.node.profiles import LARGEST, LAST, SECONDS, Answer
from spotrun.store import Store, profile_key
from spotrun.text import tidy

PATIENCE = SECONDS + LAST + 120.0  # seconds that a node may take, with compressing and uploading its traces
ROWS = 30  # of all tables together: a screenful
LEAST = 5  # rows of a table
KEPT = 50  # rows of a table in JSON
FEWER = "the loop of run.steps ended, or more would be too large or take too long"


@dataclass(frozen=True)
class Trace:
    """One rank's trace."""

    rank: int
    node: str
    generation: int
    steps: int = 0
    first: int = 0
    key: str = ""  # in the bucket
    path: str = ""  # here
    problem: str = ""  # why there is no trace
    operations: list[Row] = field(default_factory=list)  # on the processor
    kernels: list[Row] = field(default_factory=list)  # on GPUs


def show(access: Access, job: str | None, node: str | None, rank: int | None, steps: int, json: bool) -> int:
    """Print what took the time. Returns the exit status: 1 if a trace is missing. Raises `SpotrunError`."""
    job, nodes = stack_requests.members(access, job, node)
    rank = 0 if rank is None and node is None else rank
    if not json:
        console.warn(
            f"spotrun: profile: asks {job} for {steps} steps; this ends after {SECONDS + LAST:g} s at the latest"
        )
    traces, missing = ask(access, job, nodes, rank, steps)
    if rank is not None and traces:
        missing = {}  # the node that has the rank has answered
    elif rank is not None and not missing:
        raise SpotrunError(f"RANK: {rank}: {node or job} has no such rank now; `make stacks` lists the ranks")
    found = [fetch(access.store, job, each) for each in traces]
    answer = document(access.store, job, steps, found, missing)
    console.answer(answer) if json else console.say(text(tidy(answer)))
    return 1 if missing or any(each.problem for each in found) else 0


def ask(access: Access, job: str, nodes: list[str], rank: int | None, steps: int) -> tuple[list[Trace], dict[str, str]]:
    """The traces, not fetched yet, and the nodes that did not answer, with the reason. rank: only this one."""
    traces: list[Trace] = []
    missing: dict[str, str] = {}

    def take(outcome: Outcome) -> None:
        found = read_node(outcome.node, job, outcome.output) if outcome.reached else []
        traces.extend(found)
        if not outcome.reached or outcome.code:
            missing[outcome.node] = stack_requests.why(outcome, "profile")
        elif not found and rank is None:
            missing[outcome.node] = "it has no workers with a rank now"

    only = [] if rank is None else ["--rank", str(rank)]
    command = shlex.join(["spotrun", "profile", job, "--steps", str(steps), *only])
    ssh.run(access, nodes, command, PATIENCE, take)
    return sorted(traces, key=lambda each: each.rank), missing


def read_node(node: str, job: str, output: str) -> list[Trace]:
    """A node's answer: a line of JSON for each rank. A node can name only the keys that its traces must have."""
    found = []
    for line in output.splitlines():
        try:
            each = Answer(**json.loads(line))
            key = profile_key(job, node, int(each.generation), int(each.rank), int(each.first))
            trace = Trace(int(each.rank), node, int(each.generation), problem=str(each.problem))
            steps, first = int(each.steps), int(each.first)
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
        if not each.problem and each.key == key:
            trace = replace(trace, steps=steps, first=first, key=key)
        elif not each.problem:
            trace = replace(trace, problem="the node names a trace that is not its own")
        found.append(trace)
    return found


def fetch(store: Store, job: str, trace: Trace) -> Trace:
    """Download a trace into `exports/<id>/`, and read it."""
    if trace.problem:
        return trace
    path = Path(FOLDER, job, f"{trace.node}-{trace.key.rpartition('/')[2]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(trace.key, path)
        with gzip.open(path) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"more than {LARGEST >> 20} MiB")
        found = json.loads(data)
        operations, kernels = trace_table.processor(found), trace_table.gpu(found)
    except (SpotrunError, OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        return replace(trace, problem=f"{path}: cannot be read: {error}")
    return replace(trace, path=str(path), operations=operations, kernels=kernels)


def document(store: Store, job: str, steps: int, traces: list[Trace], missing: dict[str, str]) -> dict[str, Any]:
    """All of it as JSON values."""
    good = [each for each in traces if not each.problem]
    return {
        "job": job,
        "steps": steps,
        "traces": [
            asdict(each)
            | {
                "url": f"{store.url.rstrip('/')}/{each.key}",
                "operations": [asdict(row) for row in each.operations[:KEPT]],
                "kernels": [asdict(row) for row in each.kernels[:KEPT]],
            }
            for each in good
        ],
        "missing": [{"node": each.node, "rank": each.rank, "reason": each.problem} for each in traces if each.problem]
        + [{"node": node, "rank": None, "reason": reason} for node, reason in missing.items()],
    }


def text(found: dict[str, Any]) -> str:
    """The document, tidied, for a person."""
    lines = []
    tables = sum(bool(each[kind]) for each in found["traces"] for kind in ("operations", "kernels"))
    most = max(LEAST, ROWS // max(1, tables))
    for each in found["traces"]:
        fewer = each["steps"] < found["steps"]
        steps = f"{each['steps']} of {found['steps']} steps" if fewer else f"{each['steps']} steps"
        why = f" ({FEWER})" if fewer else ""
        lines.append(f"rank {each['rank']} on {each['node']}: {steps}, from step {each['first']} on{why}")
        for kind, title in (("operations", "operation, own time"), ("kernels", "on the GPU")):
            lines += trace_table.table(title, [Row(**row) for row in each[kind]], most)
        lines.append(f"trace: {each['path']}, in the bucket: {each['url']}")
    for each in found["missing"]:
        who = each["node"] if each["rank"] is None else f"rank {each['rank']} on {each['node']}"
        lines.append(f"{who}: no trace: {each['reason']}")
    if found["traces"]:
        lines.append(
            "To see a trace, open https://ui.perfetto.dev or chrome://tracing in a browser, and load the file."
        )
    return "\n".join(lines)
