"""`make stacks`: ask all nodes of a job for the Python stacks of its workers, over SSH."""

from __future__ import annotations

import shlex

from scripts import console, control, ssh
from scripts.job_table import job_id
from scripts.make_command import make_command
from scripts.rank_stacks import Found, Rank, document, read_node, text
from scripts.ssh import Access, Outcome
from spotrun.errors import SpotrunError
from spotrun.text import line, tidy

PATIENCE = 30.0  # seconds that a node may take; its workers have 3 s, py-spy has 5 s


def show(access: Access, job: str | None, node: str | None, json: bool) -> int:
    """Print the stacks. Returns the exit status: 1 if a rank, 3 if a node is missing. Raises `SpotrunError`."""
    job, nodes = members(access, job, node)
    found = ask(access, job, nodes)
    answer = document(job, found)
    console.answer(answer) if json else console.say(text(tidy(answer)))
    return 3 if found.nodes else 1 if any(each.problem for each in found.ranks) else 0


def members(access: Access, job: str | None, node: str | None) -> tuple[str, list[str]]:
    """The job, and its nodes or only the named one. Raises `SpotrunError` if there is nothing to ask."""
    found = control.ask(access, "status", *(["--job", job] if job else []))["job"]
    if found is None:
        raise SpotrunError(f"no job has run on this cluster yet; `{make_command(access.file, 'train')}` runs one")
    name, nodes = job_id(found), list(found["members"])
    if found["ended"] or not nodes:
        reason = f": {found['reason']}" if found["reason"] else ""
        verb = "has" if found["phase"] in ("succeeded", "failed") else "is"
        raise SpotrunError(line(f"{name} has no workers: it {verb} {found['phase']}{reason}"))
    if node and node not in nodes:
        raise SpotrunError(line(f"{node}: does not train {name}; these nodes do: {', '.join(nodes)}"))
    return name, [node] if node else nodes


def ask(access: Access, job: str, nodes: list[str]) -> Found:
    """What the nodes answer. A node that does not answer within `PATIENCE` seconds is named."""
    ranks: list[Rank] = []
    missing: dict[str, str] = {}

    def take(outcome: Outcome) -> None:
        found = read_node(outcome.node, outcome.output) if outcome.reached else ()
        ranks.extend(found)
        if not outcome.reached or outcome.code:
            missing[outcome.node] = why(outcome)
        elif not found:
            missing[outcome.node] = "it has no workers with a rank now"

    ssh.run(access, nodes, shlex.join(["spotrun", "stacks", job]), PATIENCE, take)
    return Found(tuple(sorted(ranks, key=lambda each: each.rank)), missing)


def why(outcome: Outcome, command: str = "stacks") -> str:
    """Why `spotrun <command>` has failed on a node."""
    said = [each for each in outcome.output.strip().splitlines() if not each.startswith("{")]
    if any(f"invalid choice: '{command}'" in each for each in said):
        return f"it runs an older version of spotrun, which has no `spotrun {command}`"
    return (said[-1] if said else f"exit status {outcome.code}")[:500]
