"""Python stacks of a job's ranks: read what the nodes answered, and group equal stacks. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LAUNCHER = "spotrun/node/launch/worker.py"  # it calls the script


@dataclass(frozen=True)
class Frame:
    """One call. A line of 0 is not known."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]  # the innermost call first


@dataclass(frozen=True)
class Rank:
    """The stacks of one rank."""

    rank: int
    node: str
    main: Stack = ()  # of the main thread
    others: tuple[Stack, ...] = ()  # of its other threads
    problem: str = ""  # why there are no stacks


@dataclass(frozen=True)
class Group:
    """Ranks that are at the same place."""

    ranks: tuple[int, ...]
    stack: Stack


@dataclass(frozen=True)
class Found:
    """What a job's nodes answered. nodes: those that did not answer, and why."""

    ranks: tuple[Rank, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)


def read_node(node: str, output: str) -> tuple[Rank, ...]:
    """The ranks in a node's answer: a line of JSON for each. Other lines are left out."""
    found = (_rank(node, line) for line in output.splitlines() if line.startswith("{"))
    return tuple(each for each in found if each is not None)


def read_stacks(text: str) -> tuple[Stack, tuple[Stack, ...]]:
    """The stacks of the main thread and of the others, as `py-spy dump --json` prints them, and workers tell them.

    Empty if the text is something else.
    """
    try:
        threads = json.loads(text)
        stacks = [
            tuple(Frame(str(each["filename"]), int(each["line"]), str(each["name"])) for each in thread["frames"])
            for thread in threads
        ]
        main = [thread.get("os_thread_id", "unknown") == thread.get("pid") for thread in threads]
    except (ValueError, OverflowError, RecursionError, TypeError, KeyError, AttributeError):
        return (), ()
    return _split(stacks, main.index(True) if True in main else len(stacks) - 1)


def script_part(stack: Stack) -> Stack:
    """The stack without the calls that lead to the script. All of the stack if the script has not begun."""
    cut = next((at for at, frame in enumerate(stack) if frame.file.endswith(_LAUNCHER)), len(stack))
    return stack[:cut] or stack


def grouped(ranks: Iterable[Rank]) -> tuple[Group, ...]:
    """Ranks whose main threads are at the same place, the largest group first."""
    return _groups((each.rank, each.main) for each in ranks if each.main)


def grouped_others(ranks: Iterable[Rank]) -> tuple[Group, ...]:
    """The same for all other threads. A rank with two equal threads is in the group once."""
    return _groups((each.rank, stack) for each in ranks for stack in each.others)


def spans(ranks: Sequence[int]) -> str:
    """Ranks as text: `rank 3`, or `ranks 0-3, 5`."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ", ".join("-".join(map(str, part)) for part in parts)
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {text}"


def document(job: str, found: Found) -> dict[str, Any]:
    """All of it as JSON values."""
    return {
        "job": job,
        "stacks": [_plain(each) for each in grouped(found.ranks)],
        "other_threads": [_plain(each) for each in grouped_others(found.ranks)],
        "missing": [
            {"node": each.node, "rank": each.rank, "reason": each.problem} for each in found.ranks if each.problem
        ]
        + [{"node": node, "rank": None, "reason": reason} for node, reason in found.nodes.items()],
    }


def text(found: Mapping[str, Any]) -> str:
    """The document, tidied, for a person. Innermost calls come first."""
    lines = []
    for name, what in (("stacks", ""), ("other_threads", "another thread of ")):
        for group in found[name]:
            lines.append(f"{what}{spans(group['ranks'])}:")
            lines += [f"    {each['file']}:{each['line'] or '?'} {each['function']}" for each in group["frames"]]
    for each in found["missing"]:
        who = each["node"] if each["rank"] is None else f"rank {each['rank']} on {each['node']}"
        lines.append(f"{who}: no stacks: {each['reason']}")
    return "\n".join(lines)


def _rank(node: str, line: str) -> Rank | None:
    try:
        found = json.loads(line)
        rank = int(found["rank"])
        text, problem = str(found.get("stacks", "")), str(found.get("problem", ""))
    except (ValueError, OverflowError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    main, others = read_stacks(text)
    if not main and not problem:
        problem = "its answer has no stack"
    return Rank(rank, node, script_part(main), others, problem)


def _split(stacks: list[Stack], main: int) -> tuple[Stack, tuple[Stack, ...]]:
    if not stacks:
        return (), ()
    return stacks[main], tuple(stack for at, stack in enumerate(stacks) if at != main and stack)


def _groups(found: Iterable[tuple[int, Stack]]) -> tuple[Group, ...]:
    together: dict[Stack, set[int]] = {}
    for rank, stack in found:
        together.setdefault(stack, set()).add(rank)
    groups = [Group(tuple(sorted(ranks)), stack) for stack, ranks in together.items()]
    return tuple(sorted(groups, key=lambda each: (-len(each.ranks), each.ranks, each.stack[0].file)))


def _plain(group: Group) -> dict[str, Any]:
    frames = [{"file": each.file, "line": each.line, "function": each.function} for each in group.stack]
    return {"ranks": list(group.ranks), "frames": frames}
