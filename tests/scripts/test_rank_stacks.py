"""Stacks of ranks: what nodes answer is read, and equal stacks are grouped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts import stack_requests
from scripts.rank_stacks import (
    Found,
    Frame,
    Rank,
    Stack,
    document,
    grouped,
    grouped_others,
    read_node,
    read_stacks,
    script_part,
    spans,
    text,
)
from spotrun.errors import SpotrunError
from spotrun.text import tidy
from tests.fakes.cluster import Machines
from tests.scripts.statuses import status

WAIT = (Frame("/usr/lib/python3.11/threading.py", 327, "wait"),)
STUCK = (Frame("train.py", 12, "stuck"), Frame("train.py", 20, "<module>"))
LAUNCHER = (
    Frame("/opt/site-packages/spotrun/node/launch/worker.py", 160, "_run_as_main"),
    Frame("/opt/site-packages/spotrun/node/launch/server.py", 9, "<module>"),
)
STEP = (Frame("train.py", 30, "<module>"),)


def spy(number: int, *frames: Frame) -> dict[str, Any]:
    """A thread, as py-spy 0.4.1 prints it: the parts that are read."""
    calls = [{"name": each.function, "filename": each.file, "line": each.line, "module": None} for each in frames]
    return {"pid": 7, "os_thread_id": number, "thread_name": "", "frames": calls}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(json.dumps([spy(7, *STUCK), spy(8, *WAIT)]), (STUCK, (WAIT,)), id="the main thread is first"),
        pytest.param(json.dumps([spy(8, *WAIT), spy(7, *STUCK)]), (STUCK, (WAIT,)), id="the main thread is last"),
        pytest.param("[]", ((), ()), id="no thread"),
        pytest.param("{}", ((), ()), id="an object"),
        pytest.param("7", ((), ()), id="a number"),
        pytest.param("[7]", ((), ()), id="a list of numbers"),
        pytest.param('[{"frames": [{}]}]', ((), ()), id="a frame without keys"),
        pytest.param("[" * 100_000, ((), ()), id="nested too deep"),
        pytest.param(
            '[{"frames": [{"filename": "a", "line": Infinity, "name": "b"}]}]', ((), ()), id="an infinite line"
        ),
        pytest.param("Error", ((), ()), id="no JSON"),
    ],
)
def test_read_stacks(answer: str, expected: tuple[Stack, tuple[Stack, ...]]) -> None:
    assert read_stacks(answer) == expected


def told(*threads: Stack) -> str:
    return json.dumps([spy(7 + at, *stack) for at, stack in enumerate(threads)])


def line(rank: Any, **more: Any) -> str:
    return json.dumps({"rank": rank, "generation": 1, "pid": 7, "stacks": "", "problem": "", **more})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(line(3, stacks=told(STUCK + LAUNCHER)), [Rank(3, "n", STUCK)], id="only the script's calls"),
        pytest.param(line(3, stacks=told(STUCK, WAIT)), [Rank(3, "n", STUCK, (WAIT,))], id="two threads"),
        pytest.param(line(3, problem="gone"), [Rank(3, "n", problem="gone")], id="a problem"),
        pytest.param(line(3), [Rank(3, "n", problem="its answer has no stack")], id="no stack and no problem"),
        pytest.param(f"hello\n{line(0, stacks=told(STUCK))}\n{line(1, stacks=told(STUCK))}\n",
                     [Rank(0, "n", STUCK), Rank(1, "n", STUCK)], id="two ranks, and what a shell prints"),
        pytest.param(line("x"), [], id="a rank that is no number"),
        pytest.param('{"rank": 1', [], id="half a line"),
        pytest.param("", [], id="nothing"),
    ],
)  # fmt: skip
def test_read_node(answer: str, expected: list[Rank]) -> None:
    assert read_node("n", answer) == tuple(expected)


def test_a_worker_that_has_not_begun_its_script() -> None:
    assert script_part(LAUNCHER) == LAUNCHER


def test_equal_stacks_are_one_group() -> None:
    ranks = [Rank(0, "a", STEP, (WAIT, WAIT)), Rank(1, "a", STUCK), Rank(2, "b", STEP, (WAIT,)), Rank(3, "b", STEP)]
    assert [(each.ranks, each.stack) for each in grouped(ranks)] == [((0, 2, 3), STEP), ((1,), STUCK)]
    assert [(each.ranks, each.stack) for each in grouped_others(ranks)] == [((0, 2), WAIT)]
    assert grouped([Rank(0, "a", problem="gone")]) == ()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([5], "rank 5"),
        ([3, 0, 1, 2, 5], "ranks 0-3, 5"),
        ([0, 2, 4], "ranks 0, 2, 4"),
        ([0, 1], "ranks 0-1"),
        ([9, 10, 11, 1], "ranks 1, 9-11"),
    ],
)
def test_spans(ranks: list[int], expected: str) -> None:
    assert spans(ranks) == expected


def test_the_text() -> None:
    """A name from a machine has no control characters on the terminal, and no lines of its own."""
    evil = Frame("train.py\x1b[2J\nrank 9:", 0, "f")
    ranks = (Rank(0, "a", STEP, (WAIT,)), Rank(1, "a", STEP), Rank(2, "b", (evil,)), Rank(3, "b", problem="gone"))
    found = document("digits-1", Found(ranks, {"c": "no SSH connection"}))
    assert json.loads(json.dumps(found)) == found
    assert text(tidy(found)) == (
        "ranks 0-1:\n"
        "    train.py:30 <module>\n"
        "rank 2:\n"
        "    train.py rank 9::? f\n"
        "another thread of rank 0:\n"
        "    /usr/lib/python3.11/threading.py:327 wait\n"
        "rank 3 on b: no stacks: gone\n"
        "c: no stacks: no SSH connection"
    )


@pytest.mark.parametrize(
    ("phase", "words"), [("succeeded", "has succeeded"), ("failed", "has failed"), ("paused", "is paused")]
)
def test_a_job_without_workers(standin: Machines, phase: str, words: str) -> None:
    standin.write(status_json=status(phase=phase, members=[]))
    with pytest.raises(SpotrunError, match=f"digits-1 has no workers: it {words}"):
        stack_requests.members(standin.access, None, None)
