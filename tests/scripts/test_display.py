"""What an operator sees of jobs that share a cluster, and of a node that does not train yet."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from scripts import report
from scripts.display import listing, opened, text
from tests.scripts.statuses import row, shared, status


def test_lines_say_what_a_node_does_when_that_changes() -> None:
    out, found = io.StringIO(), status(phase="waiting")
    (node,) = found["nodes"]
    with opened(False, out) as display:
        for doing in ("importing torch", "importing torch", "importing the script's modules", ""):
            node |= {"doing": doing, "doing_seconds": 4.2 if doing else None}
            display.show(found)
    said = [line.partition("spot-1: ")[2] for line in out.getvalue().splitlines() if "spot-1: " in line]
    assert said == ["importing torch", "importing the script's modules"]


def test_the_picture_shows_what_a_node_does_and_for_how_long() -> None:
    found = status(phase="waiting")
    found["nodes"][0] |= {"doing": "importing torch", "doing_seconds": 4.2}
    assert "importing torch, 4 s" in text(found)


def test_of_very_many_numbers_a_few_are_shown() -> None:
    """A number for each layer must not push the nodes out of the picture."""
    found = status(metrics={f"grad/layer {n}": 0.5 for n in range(300)})
    for shown in (text(found), report.report(found["job"])):
        assert "grad/layer 7 0.5" in shown
        assert "… 292 more" in shown
        assert "grad/layer 8 " not in shown


def lines(shown: str) -> list[list[str]]:
    """Each line's cells; two spaces are between two cells."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in shown.splitlines()]


def test_a_status_shows_all_jobs_and_whose_each_device_is() -> None:
    shown = lines(text(shared(), [{"job": "old-1", "phase": "succeeded"}]))
    for wanted in (
        ["digits-1", "0", "running", "2 of 1-3", "4", "10/100", "$0.50"],
        ["eval-1", "0", "paused", "0 of 2", "0", "paused by the operator"],
        ["search", "1", "1", "$0.12", "1 running, 1 queued"],
        ["trial-1", "-5", "running", "1 of 1", "1", "7", "$0.12"],
        ["trial-2", "-5", "queued", "0 of 1", "0", "waits for 2 devices on 1 node, behind trial-1"],
        ["spot-1", "spot", "local-a", "127.0.0.1", "running", "0-1: digits-1", "running", "10"],
        ["2: trial-1", "starting"],
        ["3: idle"],
        ["spot-2", "spot", "local-a", "127.0.0.1", "running", "0-1: digits-1", "running", "10"],
        ["spot-3", "spot", "local-a", "127.0.0.1", "running", "0-1: idle", "ready"],
        ["devices that no job held: $0.25 so far"],
        ["other jobs: old-1 succeeded"],
    ):
        assert wanted in shown
    order = [line[0] for line in shown if line[0] in ("digits-1", "eval-1", "search", "trial-1", "trial-2")]
    assert order == ["digits-1", "eval-1", "search", "trial-1", "trial-2"], "a group's jobs are together"


def test_a_status_of_a_job_that_has_saved_nothing_says_so() -> None:
    found = shared()
    found["job"] |= {"snapshot": None, "checkpoint": None, "goodput": 0.5}
    assert "saved snapshot none checkpoint none goodput 50%" in " ".join(text(found).split())


def test_a_status_says_what_a_node_does_for_each_job() -> None:
    document = shared()
    document["nodes"][0]["jobs"][1] |= {"doing": "importing torch", "doing_seconds": 4.2}
    assert ["2: trial-1", "starting", "importing torch, 4 s"] in lines(text(document))


def test_a_status_of_one_job_shows_no_table_of_jobs() -> None:
    document = shared()
    document["jobs"] = document["jobs"][:1]
    assert "priority" not in text(document)


def test_a_list_of_jobs_of_an_older_head_has_ids_and_phases() -> None:
    shown = lines(listing([{"job": "digits-2", "phase": "queued"}, {"job": "digits-1", "phase": "succeeded"}]))
    assert shown[1:] == [["digits-2", "queued"], ["digits-1", "succeeded"]]
    assert listing([]) == "no job has run on this cluster yet"


@pytest.mark.parametrize(
    ("away", "shown"),
    [(120.0, "%H:%M:%S"), (3 * 86400.0, "%Y-%m-%d %H:%M")],
    ids=["an end soon has a time", "an end in days has a date"],
)
def test_when_a_job_will_end(away: float, shown: str) -> None:
    at = time.time() + away
    assert time.strftime(shown, time.localtime(at)) in listing([row("digits-1", eta=at)])


def test_following_a_job_shows_nothing_of_the_nodes_of_others() -> None:
    out, document = io.StringIO(), shared()
    said = {"doing": "importing torch", "doing_seconds": 1.0}
    for node in document["nodes"]:
        node |= said
    document["nodes"][0]["jobs"][0] |= {**said, "doing": "forming the process group"}
    document["nodes"][1]["jobs"] = [{"job": "trial-1", "devices": [0], "phase": "starting", "step": -1, **said}]
    with opened(False, out) as display:
        display.show(document)
    assert [line[21:] for line in out.getvalue().splitlines() if line[9:13] == "node"] == [
        "spot-1 joined",
        "spot-1: forming the process group",  # for the job; spot-2 works for another one
        "spot-3: importing torch",  # for no job yet
    ]


def test_the_closing_report_has_a_line_for_idle_devices() -> None:
    document: dict[str, Any] = shared()
    assert report.report(document["job"], document["idle_cost"]).endswith("\n  devices that no job held: $0.25 so far")
    for small in (None, 0.0, 0.004):
        assert "devices" not in report.report(document["job"], small)


KEPT = {
    "node": "spot-1",
    "devices": [0],
    "until": 1795390205.0,
    "folder": "/var/lib/spotrun/work/digits-1/0123",
    "env": "/var/lib/spotrun/work/digits-1/env.sh",
    "logs": "/var/lib/spotrun/logs/digits-1/0004",
    "run": "cd /var/lib/spotrun/work/digits-1/0123 && . /var/lib/spotrun/work/digits-1/env.sh && python train.py -q",
}


@pytest.mark.parametrize("show", ["report", "status"])
def test_what_a_person_needs_to_know_about_a_kept_node(show: str) -> None:
    document = status(phase="failed", reason="boom", ended=200.0, kept=KEPT, budget=40.0)
    file = "clusters/gcp-l4.yaml"
    shown = report.report(document["job"], file=file) if show == "report" else text(document, file=file)
    told = [line.strip() for line in shown.splitlines()]
    first = told.index("node spot-1 is kept until 2026-11-22 23:30:05 UTC, within the job's budget")
    assert told[first + 1 : first + 5] == [
        f"log in:       make ssh CLUSTER={file} NODE=spot-1",
        f"run it again: {KEPT['run']}",
        "logs:         /var/lib/spotrun/logs/digits-1/0004",
        f"let it go:    make stop CLUSTER={file} ID=digits-1",
    ]


def test_a_kept_node_of_an_older_agent_has_no_folders() -> None:
    kept = {key: KEPT[key] for key in ("node", "devices", "until")}
    shown = report.report(status(phase="failed", kept=kept)["job"])
    assert "kept until 2026-11-22 23:30:05 UTC\n" in shown  # the job has no budget
    assert "make ssh NODE=spot-1" in shown
    assert "run it again" not in shown


def test_the_id_of_a_job_is_whole_beside_a_long_reason() -> None:
    """A person copies it into a command."""
    job = "a-name-of-thirty-characters-or-20261129-081415"
    assert job in listing([row(job, phase="failed", reason="a reason of some words " * 20)])


def test_a_list_of_jobs_says_who_keeps_a_node() -> None:
    shown = " ".join(listing([row("digits-1", phase="failed", reason="boom", kept=KEPT)]).split())
    assert "boom; keeps spot-1 until 2026-11-22 23:30:05 UTC" in shown
