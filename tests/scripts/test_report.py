"""What is shown of a job: lines, JSON, the live display, the closing report."""

from __future__ import annotations

import io
import json

from rich.console import Console

from scripts import display, report
from scripts.columns import duration
from tests.scripts.statuses import FAILURE, SUCCEEDED, status


def test_plain_lines() -> None:
    out = io.StringIO()
    with display.opened(False, out) as view:
        view.show(status(step=10))
        view.show(status(step=11))
        view.show(status(step=12, generation=2))
    lines = [line[9:] for line in out.getvalue().splitlines()]
    assert lines == [
        "node        spot-1 joined",
        "progress    digits-1 running, generation 1, step 10/100, 812 samples/s, loss 0.3123, snapshot 9, checkpoint 5",
        "progress    digits-1 running, generation 2, step 12/100, 812 samples/s, loss 0.3123, snapshot 9, checkpoint 5",
    ]


def test_json_lines() -> None:
    out = io.StringIO()
    with display.opened(True, out) as view:
        view.show(status(step=10))
    assert json.loads(out.getvalue()) == status(step=10)


def test_the_live_display() -> None:
    out = io.StringIO()
    view = display.Terminal(Console(file=out, force_terminal=True, width=120))
    with view.live:
        view.show(status(step=10))
        view.say("taking spot-1 away [here]")
        view.show(status(step=20, **{"phase": "draining"}))
    for piece in ("digits-1", "draining", "20/100", "812 samples/s", "loss 0.3123", "taking spot-1 away [here]"):
        assert piece in out.getvalue()


def test_a_status_as_text() -> None:
    text = display.text(status(step=10, reason="preempt: spot-0"))
    for piece in ("cluster c", "spot 1/2", "preempt: spot-0", "10/100", "spot-1", "no such machine in local-a now"):
        assert piece in text
    assert "no job" in display.text(status())
    assert "failures 0, at most 1 restart\n" in display.text(status(max_restarts=1))
    assert "failures 4, at most 3 restarts" in display.text(status(phase="failed", restarts=4)), "it said 4 of 3"


def test_machines_that_take_no_job_are_shown_with_the_reason() -> None:
    document = status(step=10)
    why = "spot-1 takes no job: g2-standard-8 has 1 GPU, but nvidia-smi lists 0"
    document["nodes"][0] |= {"phase": "unfit", "step": None}
    document["pools"][0]["problem"] = why
    document["events"] = [{"at": 100.0, "kind": "unfit", "text": why}]
    text = display.text(document)
    assert f"pool spot: {why}" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("spot-1 ")] == ["unfit"]
    out = io.StringIO()
    with display.opened(False, out) as view:  # where there is no terminal
        view.show(document)
    assert f"unfit       {why}" in out.getvalue()


def test_the_closing_report() -> None:
    interruptions = [
        {"kind": "preempt", "node": "spot-2", "seconds": 0.43, "steps_lost": 0, "at": 1.0, "generation": 1},
        {"kind": "pause", "node": "", "seconds": 36000.0, "held": 35997.0, "steps_lost": 0, "at": 1.5, "generation": 2},
        {"kind": "kill", "node": "spot-1", "seconds": None, "steps_lost": None, "at": 2.0, "generation": 2},
    ]
    text = report.report(status(**SUCCEEDED, interruptions=interruptions, generation=3, cost=0.5)["job"])
    assert text.splitlines() == [
        "job digits-1 succeeded: 100 of 100 steps in 1 min 30 s, 3 generations",
        "  last values: loss 0.3123",
        "  interruption  node    seconds to the next step  steps lost",
        "  preempt       spot-2  0.4                       0",
        "  pause                 3.0                       0",
        "  kill          spot-1",
        "  goodput 91.2% (share of node time that went into steps that counted)",
        "  node time 12.0 s, cost $0.50; where it went is not known",  # a head of version 0.1 does not say
    ]
    failed = report.report(status(phase="failed", reason="ValueError: no", failure=FAILURE)["job"])
    assert "  rank 1 on spot-1: ValueError: no\n    Traceback\n      line\n" in failed
    assert [duration(each) for each in (0, 61, 7260)] == ["0.0 s", "1 min 1 s", "2 h 1 min"]


def test_a_failure_that_repeats_takes_one_line() -> None:
    """Each worker has it, so the report names no rank. A job may still fail for another reason."""
    message = "train.py:3: run.track() tracks nothing"
    failure = FAILURE | {"message": message, "traceback": "", "repeats": True}
    lines = report.report(status(phase="failed", reason=message, failure=failure)["job"]).splitlines()
    assert lines[:2] == [
        f"job digits-1 failed: {message}: 10 of 100 steps, 1 generation",
        "  last values: loss 0.3123",
    ]
    other = report.report(status(phase="stopped", reason="stopped by the operator", failure=failure)["job"])
    assert f"  rank 1 on spot-1: {message}\n" in other


def test_a_job_without_steps_gets_advice() -> None:
    """Such as a script that still calls `trainer.fit`."""
    advice = "have it call run.track, run.train or run.fit"
    assert advice in report.report(status(**{**SUCCEEDED, "step": 0})["job"])
    assert advice not in report.report(status(**SUCCEEDED)["job"])
    assert advice not in report.report(status(phase="stopped", step=0)["job"])


def test_a_job_that_had_no_machine_has_no_node_time() -> None:
    text = report.report(status(phase="stopped", reason="stopped by the operator", node_seconds=0.0, cost=None)["job"])
    assert text.splitlines()[-1] == "  node time 0.0 s"


def test_the_closing_report_says_where_the_node_time_went() -> None:
    times = {"counted": 6.0, "lost": 0.6, "starting": 3.6, "recovery": 0.6, "spare": 1.2, "unfit": 0.0, "napping": 0.0}
    lost = [{"kind": "kill", "node": "spot-1", "seconds": 0.4, "steps_lost": 2, "at": 2.0, "generation": 2}]
    job = status(**SUCCEEDED, node_time=times, snapshot_seconds=0.06, interruptions=lost)["job"]
    assert report.report(job).splitlines()[-6:] == [
        "  node time 12.0 s, of which:",
        "    50.0%  steps that counted; of it copying snapshots 0.50%",
        "    30.0%  starting: machines boot, are checked, install packages, import torch",
        "    10.0%  idle spares: ready, not needed now",
        "     5.0%  steps lost, and the time from the last step of a generation to its end",
        "     5.0%  recovery: from an interruption to the next step",
    ]
    calm = report.report({**job, "interruptions": []}).splitlines()
    assert "  no interruptions" in calm
    assert "     5.0%  after the last step: the end of the script" in calm
    newer = report.report({**job, "node_time": {"napping": 12.0}})
    assert newer.endswith("\n   100.0%  napping"), "a kind that this version does not know"


def test_the_closing_report_says_where_a_missing_module_must_be() -> None:
    failure = FAILURE | {"message": "ModuleNotFoundError: No module named 'einops'"}
    shown = report.report(status(phase="failed", failure=failure)["job"])
    assert "a package must be in `requirements` of the job file, and your own modules in its folder" in shown
