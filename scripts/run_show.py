"""One run: where it came from, what happened to it, on which machines, what it cost, what it has left."""

from __future__ import annotations

from typing import Any

from scripts import logs, runs
from scripts.columns import aligned, duration
from scripts.job_table import money
from scripts.kept import utc
from spotrun.errors import SpotrunError
from spotrun.head import events
from spotrun.head.job_state import JobState
from spotrun.history.provenance import RECORD, NodeRecord
from spotrun.history.reader import read_headers
from spotrun.store import Store, job_key, system_folder

Found = dict[str, Any]


def document(store: Store, cluster: str, job: str) -> Found:
    """What `make show JSON=1` prints. Raises `SpotrunError` if there is no such run."""
    state, origin, said = runs.state(store, cluster, job), runs.provenance(store, job), runs.remarks(store, job)
    sizes = store.sizes(f"jobs/{job}")
    records = nodes(store, job, list(sizes))
    return {
        **runs.row(state, origin, said),
        "job": state.spec.model_dump(mode="json"),
        "code": state.code,
        "provenance": origin.model_dump(mode="json") if origin else None,
        "remarks": said.model_dump(mode="json")["notes"],
        "generation_members": generations(store, job, state, sizes),
        "interruption_list": [each.model_dump(mode="json") for each in state.interruptions],
        "account": [line.model_dump(mode="json") for line in state.account],
        "nodes": [each.model_dump(mode="json") for each in records],
        "failure": state.failure.model_dump(mode="json") if state.failure else None,
        "checkpoints": [ref.step for ref in state.checkpoints],
        "objects": objects(job, sizes),
    }


def nodes(store: Store, job: str, keys: list[str]) -> list[NodeRecord]:
    """What each node of the run had, in the order in which they began. A record that cannot be read is left out."""
    found = []
    for key in keys:
        if key.startswith(f"{system_folder(job)}/") and "/about-" in key:
            try:
                found.append(NodeRecord.model_validate_json(store.get(key, RECORD)))
            except (SpotrunError, ValueError):
                continue
    return sorted(found, key=lambda each: each.at)


def generations(store: Store, job: str, state: JobState, sizes: dict[str, int]) -> list[Found]:
    """Each generation that has begun: its members in rank order, its base, and what ended it.

    The events say which have begun, and with which members. Those of a very long job do not go back to its beginning:
    of earlier generations, the members are those that have left a log.
    """
    told, logged = events.members(events.read_events(store.find(job_key(job, "events.jsonl")))), _logged(sizes)
    headers = read_headers(store, job)
    ended = {each.generation: each for each in state.interruptions}
    found = []
    for number in range(1, state.generation + 1):
        header, end = headers.get(number), ended.get(number)
        if number not in told and number > min(told, default=number) and not header and not end:
            continue  # a drain has named it, and then another one has begun
        found.append(
            {
                "generation": number,
                "members": told.get(number) or logged.get(number, []),
                "base": header.base if header else None,
                "ended_by": end.kind if end else None,
                "node": end.node if end else None,
                "step": end.step if end else None,
            }
        )
    return found


def _logged(sizes: dict[str, int]) -> dict[int, list[str]]:
    """The nodes with logs of each generation, in rank order. A worker that prints nothing has no log."""
    ranks: dict[int, dict[str, int]] = {}
    for log in logs.named(sizes):
        mine = ranks.setdefault(log.generation, {})
        mine[log.node] = min(int(log.rank), mine.get(log.node, int(log.rank)))
    return {generation: sorted(mine, key=mine.__getitem__) for generation, mine in ranks.items()}


def objects(job: str, sizes: dict[str, int]) -> dict[str, Found]:
    """What the bucket holds of a run: objects and bytes, by folder."""
    found: dict[str, Found] = {}
    for key, size in sizes.items():
        name = key.removeprefix(f"jobs/{job}/")
        folder = name.partition("/")[0] if "/" in name else name
        each = found.setdefault(folder, {"objects": 0, "bytes": 0})
        each["objects"] += 1
        each["bytes"] += size
    return dict(sorted(found.items()))


def text(found: Found) -> str:
    """The document for a person."""
    lines = [f"{found['id']}: {found['phase']}{': ' + found['reason'] if found['reason'] else ''}"]
    if found["tags"]:
        lines.append(f"  tags: {', '.join(found['tags'])}")
    lines += [f"  {utc(each['at'])[:16]} UTC {each['user']}: {each['text']}" for each in found["remarks"]]
    lines += ["", *_origin(found), "", *_course(found), "", *_machines(found), "", "values at the end:"]
    numbers = found["metrics"]
    lines += aligned([[name, runs.number(value)] for name, value in numbers.items()]) if numbers else ["  none"]
    rows = [[name, f"{each['objects']}", size(each["bytes"])] for name, each in found["objects"].items()]
    return "\n".join([*lines, "", "in the bucket (objects, bytes):", *aligned(rows)])


def size(count: int) -> str:
    """Bytes as a person reads them: 1.2 MB."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:.1f} {unit}"
    return f"{count} bytes"


def _origin(found: Found) -> list[str]:
    origin, spec = found["provenance"], found["job"]
    command = " ".join([spec["script"], *spec["args"]])
    lines = [f"script:     {command}", f"code:       bundle {found['code'][:12]}"]
    if origin is None:
        return [*lines, "no provenance: this run was submitted by an older version, or without make"]
    if git := origin["git"]:
        changed = " + changes" if git["diff"] else ""
        more = f", {len(git['untracked'])} files that git does not know" if git["untracked"] else ""
        lines.append(f"commit:     {git['commit'][:12] or 'none'} {git['branch']}{changed}{more}")
    by = f"{origin['user']}@{origin['host']}" + (f" <{origin['email']}>" if origin["email"] else "")
    if (seed := next((each["seed"] for each in found["nodes"]), None)) is not None:
        lines.append(f"seed:       {seed}")
    lines.append(f"by:         {by}, {utc(origin['at'])}, spotrun {origin['version']}")
    lines.append(f"files:      {origin['job_path']}, {origin['cluster_path']}")
    return [*lines, *([f"repeats:    {origin['rerun_of']}"] if origin["rerun_of"] else [])]


def _course(found: Found) -> list[str]:
    took = f", {duration(found['seconds'])} from submission to end" if found["seconds"] is not None else ""
    lines = [f"step {found['step']}{took}, goodput {_share(found['goodput'])}, {found['steps_lost']} steps lost"]
    rows = [["generation", "base", "ended by", "at step", "members"]]
    for each in found["generation_members"]:
        end = " ".join(filter(None, [each["ended_by"], each["node"]]))
        cells = ["" if each[key] is None else str(each[key]) for key in ("base", "step")]
        rows.append([str(each["generation"]), cells[0], end, cells[1], " ".join(each["members"])])
    return [*lines, *(aligned(rows) if len(rows) > 1 else ["  no generation has begun"])]


def _machines(found: Found) -> list[str]:
    lines = [f"cost: {money(found['cost'])}"]
    rows = [
        [f"{line['month']} {line['pool']}", line["market"], duration(line["seconds"]), money(line["cost"])]
        for line in found["account"]
    ]
    lines += aligned(rows) if rows else []
    for each in found["nodes"]:
        gpus = f", {len(each['gpus'])} x {each['gpus'][0]}" if each["gpus"] else ""
        image = f", image of {str(each['image'].get('commit', ''))[:12]}" if each["image"] else ""
        torch = each["packages"].get("torch", "")
        lines.append(f"  {each['node']}: {each['type'] or 'machine'} in {each['zone']}{gpus}{image}, torch {torch}")
    return lines


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{value:.0%}"
