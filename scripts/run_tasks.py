"""The tasks about runs: list, show, compare, repeat, remark, remove, export. Most work while the cluster is down."""

from __future__ import annotations

import time

from invoke.context import Context

from scripts import console, export_runs, inputs, run_changes, run_diff, run_show
from scripts import runs as table
from scripts import site as sites
from scripts.make_command import LOCAL, here, make_command
from scripts.tasks import command
from spotrun.text import count, tidy


@command
def runs(_: Context, cluster: str = LOCAL, where: str = "", sort: str = "", json: bool = False) -> None:
    """All runs of the cluster, the newest first. Also works while the cluster is down.

    where: conditions such as "phase=succeeded loss<0.5 tag=best". sort: a column; with - in front: the greatest first.
    """
    asked = [*(name for name, _, _ in table.conditions(where)), sort.removeprefix("-")]
    site = sites.of_file(cluster)
    found = table.filtered(table.rows(site.bucket(), site.cluster.name), where, sort)
    _print(found, json, "" if json else here(table.text(tidy(found), time.time(), asked), cluster))


@command
def show(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Everything about a run: where it came from, its generations, machines, cost, results, and what it has left."""
    site, job = sites.of_file(cluster), inputs.run("ID", id, cluster)
    found = run_show.document(site.bucket(), site.cluster.name, job)
    _print(found, json, "" if json else run_show.text(tidy(found)))


@command
def diff(_: Context, cluster: str = LOCAL, first: str = "", second: str = "", json: bool = False) -> None:
    """What differs between runs A and B: code, job file, packages, machines, results."""
    jobs = inputs.run("A", first, cluster), inputs.run("B", second, cluster)
    site = sites.of_file(cluster)
    found = run_diff.document(site.bucket(), site.cluster.name, *jobs)
    _print(found, json, "" if json else run_diff.text(tidy(found)))


@command
def rerun(_: Context, cluster: str = LOCAL, id: str = "", json: bool = False) -> None:
    """Submit a run's job again, with the same bundle; says what differs."""
    found = run_changes.rerun(sites.of_file(cluster), inputs.run("ID", id, cluster))
    follow = make_command(cluster, "follow", f"ID={found['job']}")
    lines = [f"job {found['job']} submitted, a rerun of {found['rerun_of']}; follow it with: {follow}"]
    lines += [f"  differs: {each}" for each in found["differs"]] or ["  nothing differs, as far as is known"]
    _print(found, json, "\n".join(lines))


@command
def tag(_: Context, cluster: str = LOCAL, id: str = "", tag: str = "", json: bool = False) -> None:
    """Add tags to a run; a tag with - in front is removed."""
    site, job = sites.of_file(cluster), inputs.run("ID", id, cluster)
    said = run_changes.tag(site.bucket(), site.cluster.name, job, tag)
    _print({"job": job, "tags": said.tags}, json, f"{job}: tags: {', '.join(said.tags) or 'none'}")


@command
def note(_: Context, cluster: str = LOCAL, id: str = "", text: str = "", json: bool = False) -> None:
    """Add a note to a run."""
    site, job = sites.of_file(cluster), inputs.run("ID", id, cluster)
    said = run_changes.note(site.bucket(), site.cluster.name, job, text)
    notes = [each.model_dump(mode="json") for each in said.notes]
    _print({"job": job, "notes": notes}, json, f"{job} has {count(len(notes), 'note')}")


@command
def rm(_: Context, cluster: str = LOCAL, id: str = "", force: bool = False, json: bool = False) -> None:
    """Remove all that the bucket has of a run that has ended. Asks first.

    force: without a question.
    """
    found = run_changes.remove(sites.of_file(cluster), inputs.run("ID", id, cluster), force)
    _print(found, json, "\n".join([f"{found['job']} is removed:", *run_changes.removal(found["removed"])]))


@command
def export(_: Context, cluster: str = LOCAL, id: str = "", to: str = "", out: str = "", json: bool = False) -> None:
    """Write a run's metrics for other programs: TO=csv, parquet, tensorboard or mlflow.

    out: a folder; default: exports/ID. For mlflow: a tracking URI; default: MLFLOW_TRACKING_URI.
    """
    site, job = sites.of_file(cluster), inputs.run("ID", id, cluster)
    found = export_runs.export(site.bucket(), site.cluster.name, job, to, out)
    _print(found, json, f"{job}: {found['points']} points in {found['where']}")


@command
def tensorboard(
    _: Context, cluster: str = LOCAL, id: str = "", group: str = "", port: str = "", json: bool = False
) -> None:
    """Open TensorBoard on runs, until Ctrl-C: those of ID, or of a group, or those that have not ended."""
    from scripts import tensorboards

    names, wanted = inputs.several("ID", id, cluster), inputs.group(group, id, cluster)
    number = int(inputs.number("PORT", port, most=65535) or 0)
    site = sites.of_file(cluster)
    jobs = tensorboards.chosen(site, names, wanted)

    def say(url: str) -> None:
        count = "1 run" if len(jobs) == 1 else f"{len(jobs)} runs"
        _print({"url": url, "runs": jobs}, json, f"open {url} ({count})\nCtrl-C ends TensorBoard, and nothing else.")

    tensorboards.serve(site.bucket(), site.cluster.name, jobs, number, say)


def _print(document: object, json: bool, text: str) -> None:
    console.answer(document) if json else console.say(text)
