"""The benchmark's own judgement: phases from events, the report from phases, and that it cleans up after itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple, replace
from datetime import date
from pathlib import Path

import psutil
import pytest

from bench import record
from bench.phases import PARTS, Event, Phases, joining, medians, parse, phases, usual_step
from bench.rate_plots import curve
from bench.recovery import PREFIX, clear_stale, takes_part
from bench.report import dominant, render, summarize, write_section
from bench.rows import render as render_rows
from bench.rows import render_trainer
from bench.systems import SCENARIOS, Run, Workload, stepping
from bench.torchft_system import no_start
from bench.watch import Watch

ROOT = Path(__file__).parents[2]
STEADY = [
    Event(time, name, pid, node, step)
    for pid, node in ((1, "a"), (2, "b"))
    for time, name, step in ((1.0, "created", -1), (2.0, "entered", -1), (3.0, "grouped", -1), (3.5, "restored", 0))
] + [Event(4.0 + step / 10, "step", pid, node, step) for step in range(1, 51) for pid, node in ((1, "a"), (2, "b"))]
FAULT = 9.05  # after step 50, at 9.0


def process(pid: int, node: str, *times: float, restored: int, step: float) -> list[Event]:
    """A worker that passes all marks at these times and then makes one step."""
    names = ("created", "entered", "grouped", "restored")
    marks = [Event(time, name, pid, node) for time, name in zip(times, names, strict=True)]
    return [*marks[:3], replace(marks[3], step=restored), Event(step, "step", pid, node, restored + 1)]


def test_restart_by_fork_is_split_at_the_last_process_to_pass_each_mark() -> None:
    events = [
        *STEADY,
        Event(9.05, "ended", 2, "b"),
        Event(9.15, "failed", 1, "a"),
        Event(10.0, "ended", 1, "a"),
        *process(3, "a", 11.05, 12.05, 13.05, 13.25, restored=40, step=13.55),
        *process(4, "c", 12.05, 12.55, 13.05, 13.35, restored=40, step=13.56),
    ]
    found = phases(events, FAULT, "b")
    assert found is not None
    expected = Phases(0.1, 2.9, 0.5, 0.5, 0.3, 0.2, total=4.5, pause=4.55, steps_lost=10)
    assert astuple(found) == pytest.approx(astuple(expected))


def test_the_parts_add_up_to_the_total() -> None:
    events = [*STEADY, Event(9.4, "ended", 1, "a"), *process(3, "a", 9.2, 9.3, 9.5, 9.6, restored=50, step=9.7)]
    found = phases(events, FAULT, "b")
    assert found is not None
    assert min(astuple(found)) >= 0
    assert sum(getattr(found, part) for part in PARTS) == pytest.approx(found.total)
    assert found.steps_lost == 0


def test_steps_of_the_old_group_after_the_fault_are_not_its_recovery() -> None:
    """With notice the old group steps on until it drains: no step lost, and the pause is shorter than the total."""
    drained = [
        Event(9.1 + step / 10, "step", pid, node, 51 + step) for step in range(5) for pid, node in ((1, "a"), (2, "b"))
    ]
    events = [
        *STEADY,
        *drained,
        Event(9.6, "ended", 2, "b"),
        Event(9.6, "ended", 1, "a"),
        *process(3, "a", 9.7, 9.8, 9.9, 10.0, restored=55, step=10.05),
    ]
    assert phases(events[: len(STEADY) + len(drained)], FAULT, "b") is None
    found = phases(events, FAULT, "b")
    assert found is not None
    assert found.steps_lost == 0
    assert (found.total, found.pause, found.detection) == pytest.approx((1.0, 0.55, 0.55))


def test_a_group_that_falls_apart_before_a_step_is_part_of_the_recovery() -> None:
    short_lived = process(3, "a", 9.2, 9.3, 9.4, 9.5, restored=40, step=99.0)[:4]
    events = [
        *STEADY,
        Event(9.1, "ended", 1, "a"),
        *short_lived,
        Event(10.0, "ended", 3, "a"),
        *process(4, "a", 11.0, 11.5, 11.6, 11.7, restored=40, step=11.8),
    ]
    found = phases(events, FAULT, "b")
    assert found is not None
    assert found.total == pytest.approx(11.8 - FAULT)
    assert found.rendezvous == pytest.approx(1.9)


def test_a_regroup_in_the_same_process_has_no_process_start() -> None:
    regrouped = [Event(9.3, "grouped", 1, "a"), Event(9.4, "restored", 1, "a", 50), Event(9.5, "step", 1, "a", 51)]
    found = phases([*STEADY, Event(9.1, "failed", 1, "a"), *regrouped], FAULT, "b")
    assert found is not None
    expected = Phases(0.05, 0, 0, 0.2, 0.1, 0.1, total=0.45, pause=0.5, steps_lost=0)
    assert astuple(found) == pytest.approx(astuple(expected))


def test_the_survivor_counts_for_detection_and_the_victim_does_not() -> None:
    events = [
        *STEADY,
        Event(9.06, "ended", 2, "b"),
        Event(12.0, "ended", 1, "a"),
        *process(3, "b", 12.5, 13.0, 13.1, 13.2, restored=50, step=13.3),  # a replacement of the same name
    ]
    found = phases(events, FAULT, "b")
    assert found is not None
    assert found.detection == pytest.approx(12.0 - FAULT)


def test_no_step_is_no_recovery() -> None:
    assert phases(STEADY, FAULT, "b") is None


def test_a_line_half_written_is_left_out() -> None:
    line = json.dumps({"time": 1.0, "name": "step", "pid": 1, "node": "a", "step": 3}) + "\n"
    assert parse(line + line[:20]) == [Event(1.0, "step", 1, "a", 3)]


def test_stepping_wants_every_node() -> None:
    assert stepping(STEADY, nodes=2, steps=50)
    assert not stepping(STEADY, nodes=2, steps=51)
    assert not stepping(STEADY, nodes=3)


def sample(total: float, lost: float = 0) -> Phases:
    return Phases(0, total, 0, 0, 0, 0, total=total, pause=total, steps_lost=lost)


def test_a_replica_that_ended_is_not_reported_as_a_timeout() -> None:
    stepped, ended = Event(1.0, "step", 1, "node-0", 1), Event(2.0, "ended", 2, "node-1")
    assert no_start([stepped], 2) == "no step on all 2 replicas within 120 s"
    assert no_start([stepped, ended], 2) == "no step on all 2 replicas before a replica ended"


def test_medians_leave_hangs_out_and_the_report_counts_them() -> None:
    runs = [
        *(Run("plain", "spare", sample(total)) for total in (10.0, 12.0, 30.0)),
        Run("plain", "spare", None),
        Run("spotrun", "spare", sample(3.0, lost=2)),
        Run("stock", "spare", None),
        Run("stock", "spare", sample(9.0)),
    ]
    table = summarize(runs)
    assert medians([sample(1.0), sample(2.0), sample(9.0)]) == sample(2.0)
    assert table["spare", "plain"].total == 12.0
    assert dominant(table["spare", "plain"]) == ("rendezvous", 1.0)
    text = render(runs, "a machine", date(2030, 1, 2), timeout=300, stock_timeout=60)
    assert (
        "| plain | 0.00 | 12.00 | 0.00 | 0.00 | 0.00 | 0.00 | **12.00** | 10.00 to 30.00 | 12.00 | 0 | 4 | 1 |" in text
    )
    assert "| total at most 1/6 of plain | 3.00 / 12.00 = 1/4.0 | no |" in text
    assert "| total at most 1/3 of tuned | not measured | - |" in text
    assert "1 of 2 runs" in text


def test_watch_sees_marks_and_the_end_of_a_process(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = Watch(tmp_path / "events.jsonl")
    try:
        with watch.path.open("a") as file:
            file.write(json.dumps({"time": 1.0, "name": "step", "pid": child.pid, "node": "a", "step": 1}) + "\n")
        assert watch.until(lambda events: len(events) == 1, timeout=300)
        child.communicate(b"\n")
        assert watch.until(lambda events: events[-1].name == "ended", timeout=300)
        assert [event.pid for event in watch.events] == [child.pid] * 2
    finally:
        child.kill()
        child.wait()
        watch.close()


def test_a_sweep_finds_orphans_of_other_sessions(tmp_path: Path) -> None:
    """Runs in a process of its own, because it adopts orphans and kills every descendant."""
    code = """
import os, sys
from pathlib import Path
from bench.processes import launch, sweep
from spotrun.machine.processes import adopt_orphans
adopt_orphans()
folder = Path(sys.argv[1])
grandchild = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
first = launch(["-c", grandchild], dict(os.environ), folder / "node.log")
os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
sweep()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=300)
    assert not psutil.pid_exists(int((tmp_path / "node.log").read_text()))


def test_what_a_killed_bench_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, used = tmp_path / f"{PREFIX}{dead.pid}-abc", tmp_path / f"{PREFIX}{psutil.Process().pid}-abc"
    other = tmp_path / f"{PREFIX}notes"
    for folder in (stale, used, other):
        folder.mkdir()
    clear_stale()
    assert sorted(tmp_path.iterdir()) == sorted([used, other])


def test_sections_of_the_results_are_replaced_alone(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    write_section(path, "one", "first\n")
    write_section(path, "two", "second\n")
    write_section(path, "one", "third\n")
    text = path.read_text()
    assert [word for word in ("first", "second", "third") if word in text] == ["second", "third"]
    assert text.index("third") < text.index("second")


def test_a_newcomer_costs_the_others_their_longest_step() -> None:
    joined = [Event(12.0 + step / 10, "step", 3, "c", step) for step in range(40)]
    others = [Event(9.1 + 0.5 + step / 10, "step", pid, "x", 51 + step) for step in range(80) for pid in (1, 2)]
    assert joining([*STEADY, *others], FAULT, after=3.0) is None
    found = joining([*STEADY, *others, *joined], FAULT, after=3.0)
    assert found is not None
    assert (found.total, found.pause) == pytest.approx((12.0 - FAULT, 0.6))


def test_the_usual_step_is_that_before_the_fault() -> None:
    assert usual_step(STEADY, FAULT) == pytest.approx(0.1)
    assert usual_step(STEADY[:8], FAULT) is None


def test_rows_are_reported_with_their_goals() -> None:
    small, long = Workload("0.1M"), Workload("0.1M", 30.0)
    runs = [
        Run("plain", "spare", sample(18.0), small, 0.05),
        Run("spotrun", "spare", sample(0.5), small, 0.05),
        Run("spotrun", "spare", sample(1.2), long, 0.05),
        Run("spotrun", "spare", sample(3.0), Workload("100M"), 2.0),
        Run("spotrun", "spare", None, Workload("100M"), 2.0),
        Run("spotrun", "join", sample(9.0), small, 0.05),
        Run("torchft", "join", sample(8.0), small, 0.05),
        Run("torchft-tuned", "spare", sample(1.0), small, 0.05),
        Run("torchft-stock", "spare", None, small, 0.05),
    ]
    text = render_rows(runs, {"100M": 0.4}, "a machine", date(2030, 1, 2), 60)
    assert "| torchft-stock | - | - | - | - | - | - | - | - | - | 0.05 | - | 1 (1 hangs) |" in text
    assert "| 0.1 M: hard kill with a spare at most 1/30 of plain | 0.50 / 18.00 = 1/36.0 | yes |" in text
    assert (
        "| 100 M: hard kill with a spare at most 1.5 times a bare broadcast + 0.5 s | 3.00, limit 1.10 | no |" in text
    )
    assert "without the step itself | 1.00, limit 1.10 | yes |" in text
    assert "| 0.1 M: hard kill: the same with 30 s of set-up as without, within 0.5 s | 1.20 and 0.50 | no |" in text
    assert "| 2 (1 hangs) |" in text
    assert (
        "| 0.1 M, 0 s of set-up: SIGKILL, a spare stands by: total at most that of torchft-tuned | 0.50 and 1.00 |"
        in text
    )
    assert "| 0.1 M, 0 s of set-up: a third node joins: pause at most that of torchft |" in text


def test_a_notice_with_a_fixed_size_has_its_goal() -> None:
    runs = [Run("spotrun", "fixed", replace(sample(9.0), pause=1.0), Workload("25M"), 0.5)]
    text = render_rows(runs, {"25M": 0.2}, "a machine", date(2030, 1, 2), 60)
    goal = "25 M: with notice and fixed size a pause of at most a bare broadcast + 0.5 s"
    assert f"| {goal} | 1.00, limit 0.70 | no |" in text
    assert f"| {goal}, without the step itself | 0.50, limit 0.70 | yes |" in text


def test_scripts_with_a_trainer_have_a_table_of_their_own() -> None:
    runs = [
        Run("spotrun", "spare", sample(0.5), Workload(trainer="hugging_face"), 0.05),
        Run("plain", "spare", None, Workload(trainer="hugging_face"), 0.05),
    ]
    runs.append(Run("spotrun", "spare", sample(0.25), Workload(trainer="lightning"), 0.05))
    text = render_trainer(runs, "a machine", date(2030, 1, 2), 60)
    places = [text.index(each) for each in ("| plain | -", "| spotrun | ", "PyTorch Lightning", "**0.25**")]
    assert places == sorted(places)
    assert "**0.50** | 0.50 to 0.50 |" in text


@pytest.mark.parametrize(
    ("system", "scenario", "workload", "measured"),
    [
        pytest.param("plain", "spare", Workload("100M"), True, id="torchrun with a large model"),
        pytest.param("plain", "spare", Workload("0.1M", 8.0), False, id="torchrun with a set-up"),
        pytest.param("tuned", "join", Workload("0.1M"), False, id="torchrun when a node joins"),
        pytest.param("torchft", "join", Workload("25M"), True, id="torchft when a node joins"),
        pytest.param("torchft", "fixed", Workload("0.1M"), False, id="torchft with a notice"),
        pytest.param("torchft-stock", "spare", Workload("25M"), True, id="torchft as published"),
        pytest.param("torchft-stock", "join", Workload("25M"), False, id="torchft as published when a node joins"),
        pytest.param("spotrun", "fixed", Workload("25M"), True, id="spotrun with a notice"),
        pytest.param("tuned", "spare", Workload(trainer="hugging_face"), True, id="torchrun with a Trainer"),
        pytest.param("torchft", "spare", Workload(trainer="hugging_face"), False, id="torchft with a Trainer"),
    ],
)
def test_systems_take_part_in_their_rows(system: str, scenario: str, workload: Workload, measured: bool) -> None:
    assert takes_part(system, (SCENARIOS[scenario], workload)) == measured


def test_runs_in_a_file_are_those_that_were_measured(tmp_path: Path) -> None:
    runs = [Run("plain", "spare", sample(18.0), Workload("25M", 8.0), 0.05, (-1.0, 2.5)), Run("tuned", "cold", None)]
    for run in runs:
        record.append(tmp_path / "runs.jsonl", run)
    assert record.read(tmp_path / "runs.jsonl") == runs


def test_a_curve_ends_where_a_run_was_no_longer_followed() -> None:
    steps = tuple(at / 10 for at in [*range(-50, 0), *range(50, 100)])
    points = dict(curve([Run("spotrun", "spare", sample(5.0), Workload(), 0.1, steps)]))
    assert [points[at].value for at in (-0.5, 0.5, 4.5, 5.5)] == [1.0, 0.0, 0.0, 1.0]
    assert max(points) == 8.5
