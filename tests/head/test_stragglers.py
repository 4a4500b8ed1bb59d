"""Slow ranks: who is slow, from when on, and what operators are told. Tables over simulated steps."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from spotrun.head.speeds import Slow
from spotrun.head.stragglers import PARTS, SECONDS, STEPS, Count, Window, counts, factors, judge, look
from spotrun.readings import Readings
from spotrun.wire import Worker
from tests.head.views import node
from tests.head.world import World

STEP = 0.1  # seconds: with it, a part has 60 steps
ENOUGH = 1.05 * PARTS * SECONDS
SLOW = "rank 1 (n1) is slow: it takes {} times as long as the others before its gradients"


def told(*phases: tuple[float, tuple[float, ...]], step: float = STEP) -> list[str]:
    """The texts, when each rank has these own times for so long. phases: seconds, own seconds a step by rank."""
    window, slow, texts, now = Window(), tuple[Slow, ...](), list[str](), 0.0
    done, whole, own = 0, 0.0, [0.0] * len(phases[0][1])
    for seconds, times in phases:
        end = now + seconds
        while now < end:
            pace = max(step, max(times))
            done, whole, now = done + 1, whole + pace, now + pace
            own = [before + each for before, each in zip(own, times, strict=True)]
            found = {(f"n{rank}", 0): Count(rank, "", done, whole, each) for rank, each in enumerate(own)}
            newer = look(window, 1, now, found)
            if newer is not window:
                window = newer
                slow, said = judge(slow, window)
                texts += [text.partition(", in ")[0] for text in said]
    return texts


EVEN = (0.03, 0.03, 0.03)
LATE = (0.03, 0.09, 0.03)
BACK = "rank 1 (n1) is not slower than the others any more"


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        pytest.param([(1000, EVEN)], [], id="all are equal"),
        pytest.param([(1000, LATE)], [SLOW.format("3.0")], id="told once"),
        pytest.param([(0.9 * ENOUGH - SECONDS, LATE), (500, EVEN)], [], id="not for long enough"),
        pytest.param([(60, EVEN), (12, (0.03, 2.0, 0.03)), (500, EVEN)], [], id="a long pause in a few steps"),
        pytest.param(
            [(200, LATE), (200, EVEN), (200, LATE)], [SLOW.format("3.0"), BACK, SLOW.format("3.0")], id="twice"
        ),
        pytest.param(
            [(200, LATE), (0.8 * ENOUGH - SECONDS, EVEN), (200, LATE)], [SLOW.format("3.0")], id="a short rest"
        ),
        pytest.param([(200, LATE), (500, (0.03, 0.042, 0.03)), (200, LATE)], [SLOW.format("3.0")], id="in between"),
        pytest.param([(500, (0.03, 0.042, 0.03))], [], id="a little slower"),
        pytest.param([(500, (0.002, 0.006, 0.002))], [], id="it matters too little for the step"),
        pytest.param([(500, (0.0, 0.05, 0.0))], [], id="the others need no time at all"),
        pytest.param([(500, (0.03, 0.09))], [SLOW.format("3.0")], id="two ranks"),
        pytest.param([(500, (0.09,))], [], id="one rank"),
        pytest.param([(500, (0.09, 0.09, 0.03, 0.09, 0.09))], [], id="most of them are as slow"),
        pytest.param(
            [(500, (0.03, 0.09, 0.03, 0.06, 0.03))],
            [SLOW.format("3.0"), SLOW.format("2.0").replace("1", "3")],
            id="two of five",
        ),
    ],
)
def test_what_operators_are_told(phases: list[tuple[float, tuple[float, ...]]], expected: list[str]) -> None:
    assert told(*phases) == expected


def test_it_takes_a_least_number_of_steps_and_of_seconds() -> None:
    assert told((PARTS * SECONDS * 0.9, (0.001, 0.004, 0.001)), step=0.005) == []
    assert len(told((2 * ENOUGH, (0.001, 0.004, 0.001)), step=0.005)) == 1
    assert told((30 * 0.9 * PARTS * STEPS, (9.0, 30.0, 9.0)), step=30) == []
    assert len(told((30 * 1.1 * PARTS * STEPS, (9.0, 30.0, 9.0)), step=30)) == 1


def test_a_factor_is_about_the_median_of_the_others() -> None:
    times = [0.5, 0.2, 0.9, 0.3, 0.2, 0.7]
    found = factors({(f"n{n}", 0): each for n, each in enumerate(times)}, 0.1)
    for n, each in enumerate(times):
        assert found[f"n{n}", 0] == pytest.approx(each / median(times[:n] + times[n + 1 :]))


def slow(name: str = "n1", rank: int = 1) -> Slow:
    return Slow(node=name, process=0, rank=rank, factor=3.0, at=1.0)


def test_a_rank_that_was_told_stays_known_in_the_next_generation() -> None:
    """Ranks may change. A node that is not there any more is not slow any more."""
    there = {("n1", 0): Count(0, "", 1, 0.1, 0.1), ("n2", 0): Count(1, "", 1, 0.1, 0.1)}
    window = look(Window(1, 0.0, {}), 2, 5.0, there)
    assert judge((slow(), slow("n7", 2)), window) == ((slow(rank=0),), ["rank 2 (n7) was slow, and has left"])
    assert judge((slow(),), Window(2)) == ((slow(),), [])  # nobody has reported yet


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        pytest.param({"readings": Readings(gpus=((1.0,), (1.0,)))}, ["GPU 0", "GPU 1"], id="a GPU for each"),
        pytest.param({}, ["", ""], id="no GPUs"),
        pytest.param({"readings": Readings(gpus=((1.0,),)), "devices": 4}, ["", ""], id="two GPUs for each"),
    ],
)
def test_the_device(changes: dict[str, Any], devices: list[str]) -> None:
    workers = tuple(Worker(rank=4 + n, pid=1, step=9, base=2, stepped_at=1.0, stepping=7.0, alone=3.0) for n in (0, 1))
    found = counts([node("a", workers=workers, **{"devices": 2, **changes})])
    assert found == {("a", n): Count(4 + n, device, 7, 7.0, 3.0) for n, device in enumerate(devices)}


def test_nobody_is_judged_while_a_member_is_missing() -> None:
    worker = Worker(rank=0, pid=1, step=9, base=2, stepped_at=1.0)
    assert counts([node("a", workers=(worker,))])
    assert counts([node("a", workers=(worker,)), None]) == {}
    assert counts([node("a", workers=(worker,)), node("b", workers=(worker,), connected=False)]) == {}
    assert counts([node("a", workers=(worker,)), node("b", workers=(worker,), phase="starting")]) == {}
    assert counts([node("a", workers=(worker,)), node("b", workers=(worker.replace(step=2),))]) == {}
    assert counts([]) == {}


async def test_the_head_tells_it_once(tmp_path: Path) -> None:
    """Also the head after it; and the status says it as long as it lasts."""
    now = [1e9]
    world = World(tmp_path)
    world.clock = lambda: now[0]
    world.new_head()
    job = await world.started()
    own = [0.0, 0.0]

    async def train(parts: int, factor: float) -> None:
        for _ in range(parts):
            now[0] += SECONDS + 1
            done = int((now[0] - 1e9) / STEP)
            for rank, seconds in enumerate((1.0, factor)):
                own[rank] += seconds
                worker = Worker(
                    rank=rank, pid=1, step=done, base=0, stepped_at=now[0], stepping=done * STEP, alone=own[rank]
                )
                world.receive("ab"[rank], job=job.id, phase="running", generation=1, workers=(worker,))
            await world.turn()

    def texts() -> list[str]:
        return [each["text"] for each in world.head.events.of(job.id) if each["kind"] == "slow"]

    def shown() -> list[str]:
        return [each["text"] for each in world.head.status(job.id)["job"]["conditions"]]

    await train(PARTS + 1, 4.0)
    [text] = texts()
    said = "rank 1 (b) is slow: it takes 4.0 times as long as the others before its gradients"
    assert text == f"{said}, in 350 steps; `make profile RANK=1` says what it does"
    assert shown() == [said]
    await world.head.journal.write(world.head.states[job.id], world.head.events.of(job.id), now[0])
    world.new_head(epoch=2)
    await world.look()
    await train(2 * PARTS, 4.0)
    assert texts() == [text]
    assert shown() == [said]
    await train(PARTS + 1, 1.0)
    assert texts() == [text, "rank 1 (b) is not slower than the others any more"]
    assert shown() == []
