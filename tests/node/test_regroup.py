"""Agents whose workers join another generation without a restart, or warm up for one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotrun.node import generations
from spotrun.node.generations import Generations
from spotrun.node.workers import STARTING
from spotrun.state.control import Invitation
from spotrun.wire import Bundle, JobOrder, Order, StateRef
from tests.fakes.head import Seen
from tests.fakes.launchers import children
from tests.fakes.node import World, changed, order_of, world
from tests.helpers import await_for, gone

A, B, C = "node-a", "node-b", "node-c"
SET_UP = STARTING[1]

# `set up` is printed once by each process that runs the script from the top. The last argument may be a path: while
# the file PATH.hold is there, rank 1 stands between two steps, and makes PATH.held.
SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
import spotrun
from spotrun.train import regroup

if "gpu" in sys.argv:  # as on a GPU: nothing in its memory counts after a peer's failure
    regroup.survives_failure = lambda device: False
run = spotrun.init()
print("set up by", os.getpid(), "rank", run.rank, flush=True)
if "fail" in sys.argv and run.generation == 0:
    raise ValueError("no data here")
if "fail-once" in sys.argv and run.generation == 0 and not os.path.exists("tried"):
    open("tried", "w").close()
    raise ValueError("no data yet")
if "fail-1" in sys.argv and run.generation == 0 and run.rank == 1:
    raise ValueError("no data there")
dataset = torch.ones(100000, 4)
model = run.ddp(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
sampler = spotrun.ElasticSampler(dataset)
run.track(model=model, optimizer=optimizer, sampler=sampler)
for epoch in run.epochs(1):
    for x in run.steps(DataLoader(dataset, batch_size=1, sampler=sampler)):
        run.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        if run.rank == 1 and os.path.exists(sys.argv[-1] + ".hold"):
            open(sys.argv[-1] + ".held", "w").close()
            while os.path.exists(sys.argv[-1] + ".hold"):
                time.sleep(0.01)
        if run.step % 50 == 0:
            print("step", run.step, "rank", run.rank, "of", run.world_size, "generation", run.generation, flush=True)
        time.sleep(0.01)
"""

KILLS_ITS_LAUNCHER = """
import os, signal, time
forkserver = os.getppid()
launcher = int(open(f"/proc/{forkserver}/stat").read().rpartition(")")[2].split()[1])
os.kill(launcher, signal.SIGKILL)
time.sleep(60)
"""


def pids(report: Seen) -> list[int]:
    return [each.pid for each in report.workers]


async def training(w: World, names: list[str], *args: str) -> tuple[Bundle, Order, list[Seen]]:
    """Begin generation 1 with new workers. args: of the script. The job, its order, and reports after some steps."""
    bundle = w.bundle(*args, files={"train.py": SCRIPT})
    await w.ready(bundle, names)
    order = await w.begin(bundle, 1, names)
    return bundle, order, await w.steps(names, 1, 5)


async def waiting(w: World, name: str) -> Seen:
    return await w.head.wait(name, lambda r: r.regroup == "waiting", f"{name} waits")


async def drained(w: World, order: Order, names: list[str], number: int) -> int:
    """Have these nodes stop at a step, which is returned."""
    stop = max(w.head.reports[name].workers[0].step for name in names) + 60
    for name in names:
        await w.head.order(name, changed(order, stop_at=stop))
    for report in await w.phase(names, number, "drained"):
        assert report.regroup == "waiting"
        assert report.snapshot == StateRef(generation=number, step=stop)
    return stop


async def test_the_same_processes_go_on_in_another_generation(tmp_path: Path) -> None:
    """At a stop step, and when a peer dies. A node that has warmed up takes its place."""
    async with world(tmp_path, A, B, C) as w:
        bundle = w.bundle(files={"train.py": SCRIPT})
        await w.ready(bundle, [A, B, C])
        order = await w.begin(bundle, 1, [A, B])
        first = await w.steps([A, B], 1, 5)
        assert [path.is_fifo() for path in tmp_path.rglob(f"{A}/**/control/wakeup")] == [True]
        assert all(report.regroup == "able" for report in first)
        stop = await drained(w, order, [A, B], 1)

        await w.begin(bundle, 2, [B, A], regroup=True)
        second = await w.steps([A, B], 2, stop + 5)
        assert [pids(report) for report in second] == [pids(report) for report in first]
        assert [report.workers[0].base for report in second] == [stop, stop]
        assert [report.workers[0].rank for report in second] == [1, 0]
        said = {(report.generation, report.doing) for report in map(Seen.of, w.head.history) if report.node in (A, B)}
        assert (2, SET_UP) not in said

        await w.head.order(C, order_of(bundle, stand_by=True))
        warm = await waiting(w, C)
        assert (warm.phase, warm.workers, warm.generation) == ("ready", (), 0)
        await w.machines[0].kill()
        lonely = await waiting(w, B)
        assert lonely.failure is not None
        assert (lonely.phase, lonely.failure.kind) == ("failed", "peer")
        await w.head.order(B, order_of(bundle, stand_by=True))  # too few nodes: the workers stay
        await w.begin(bundle, 3, [B, C], regroup=True)
        third = await w.steps([B, C], 3, stop + 10)
        assert pids(third[0]) == pids(second[1])
        text = await w.bucket_log(bundle, 3, B, 0, "generation 3")
        assert "set up" not in text
        first_text = w.store.get(f"jobs/{bundle.id}/logs/0001/{B}/1.log").decode()
        assert first_text.count("set up") == 1


async def test_workers_go_on_after_their_stop_without_another_order(tmp_path: Path) -> None:
    """A node that has warmed up joins first."""
    async with world(tmp_path, A, B, C) as w:
        bundle = w.bundle(files={"train.py": SCRIPT})
        await w.ready(bundle, [A, B, C])
        order = await w.begin(bundle, 1, [A, B])
        first = await w.steps([A, B], 1, 5)
        await w.head.order(C, order_of(bundle, stand_by=True))
        await waiting(w, C)
        following = w.generation(2, [A, B, C]).replace(regroup=True)
        await w.head.order(C, order_of(bundle, stand_by=True, next=following))
        await w.head.wait(C, lambda r: r.generation == 2 and r.phase == "starting", "C joins first")
        stop = max(w.head.reports[name].workers[0].step for name in (A, B)) + 60
        for name in (A, B):
            await w.head.order(name, changed(order, stop_at=stop, next=following))
        second = await w.steps([A, B, C], 2, stop + 3)
        assert [pids(report) for report in second[:2]] == [pids(report) for report in first]
        assert [report.workers[0].base for report in second] == [stop] * 3
        for report in second[:2]:
            assert [(each.step, each.rank) for each in report.before] == [(stop, report.workers[0].rank)]
        await w.begin(bundle, 2, [A, B, C], regroup=True)  # the head's own order says the same
        again = await w.head.wait(A, lambda r: r.workers and r.workers[0].step > stop + 10 and not r.before, "steps")
        assert pids(again) == pids(first[0])


@pytest.mark.parametrize("args", [[], ["gpu"]], ids=["on the CPU", "on a GPU"])
async def test_a_node_that_joined_first_is_called_back(tmp_path: Path, args: list[str]) -> None:
    """The generation does not begin. The node's workers join another one, and are not forked again."""
    async with world(tmp_path, A, C) as w:
        bundle = w.bundle(*args, files={"train.py": SCRIPT})
        await w.ready(bundle, [A, C])
        await w.begin(bundle, 1, [A])
        await w.steps([A], 1, 5)
        await w.head.order(C, order_of(bundle, stand_by=True))
        await waiting(w, C)
        await w.head.order(C, order_of(bundle, stand_by=True, next=w.generation(2, [A, C]).replace(regroup=True)))
        early = await w.head.wait(C, lambda r: r.generation == 2 and r.phase == "starting", "C joins first")
        await w.head.order(C, order_of(bundle, stand_by=True))
        await waiting(w, C)
        await w.begin(bundle, 3, [C], regroup=True)
        (alone,) = await w.steps([C], 3, 3)
        assert pids(alone) == pids(early)
        assert (await w.bucket_log(bundle, 0, C, 0, "set up")).count("set up") == 1


async def test_workers_that_leave_between_two_looks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were called back, and have left when the agent has found that they do not wait yet."""
    bundle = Bundle(id="a", job={}, code="")
    group: Any = SimpleNamespace(number=1, regroup="able", forms=False, released_at=time.time(), workers=())
    group.generation = SimpleNamespace(members=(A, B))
    node: Any = Generations.__new__(Generations)

    def stays(*_: object) -> bool:
        group.regroup = "waiting"
        return False

    async def end(*_: object) -> None:
        raise AssertionError("the workers could go on")

    rank = ("_rank", lambda generation: -1)
    for name, call in (rank, ("_stays", stays), ("_has_devices", lambda job: True), ("end_group", end)):
        monkeypatch.setattr(node, name, call, raising=False)
    node.waiting = ("", 0.0)
    await node.apply(SimpleNamespace(group=group), JobOrder(bundle=bundle, stand_by=True))


def test_workers_that_leave_as_soon_as_they_are_called_back_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have left before the agent looks again."""
    group = SimpleNamespace(forms=True, released_at=0.0, generation=SimpleNamespace(members=()))

    def release(called_back: SimpleNamespace) -> None:
        called_back.forms, called_back.released_at = False, time.time()

    monkeypatch.setattr(generations, "release", release)
    call_back: Any = generations._call_back
    assert call_back(group)
    assert not call_back(group)


@pytest.mark.parametrize("args", [[], ["gpu"]], ids=["on the CPU", "as on a GPU"])
async def test_workers_of_a_generation_that_has_ended_without_them_are_called_back(
    tmp_path: Path, args: list[str]
) -> None:
    """B's worker stood still while the others left, so it has noticed nothing. It goes on with them in its process.

    It stood between two steps. In a collective, it may hang: see `connections.break_all`.
    """
    hold, held = tmp_path / "b.hold", tmp_path / "b.held"
    async with world(tmp_path, A, B) as w:
        bundle, order, before = await training(w, [A, B], *args, str(tmp_path / "b"))
        hold.touch()
        await await_for(held.exists)
        os.kill(before[1].workers[0].pid, signal.SIGSTOP)
        await w.head.order(A, changed(order, release=True))
        await waiting(w, A)
        await w.head.order(B, order_of(bundle, stand_by=True))
        os.kill(before[1].workers[0].pid, signal.SIGCONT)
        hold.unlink()
        await waiting(w, B)
        await w.begin(bundle, 2, [A, B], regroup=True)
        after = await w.steps([A, B], 2, max(report.workers[0].step for report in before) + 3)
        assert [pids(report) for report in after] == [pids(report) for report in before]


async def test_a_worker_that_does_not_leave_when_it_is_called_back_ends(tmp_path: Path) -> None:
    """It still stands still when its time is over. Another worker warms up."""
    async with world(tmp_path, A, B) as w:
        bundle, _, before = await training(w, [A, B])
        (stuck,) = pids(before[1])
        os.kill(stuck, signal.SIGSTOP)
        called_at = time.monotonic()
        await w.head.order(B, order_of(bundle, stand_by=True))
        await w.head.wait(B, lambda r: r.regroup == "waiting" and not r.workers, "another worker has warmed up")
        assert gone(stuck)
        assert time.monotonic() - called_at > generations.CALL_BACK


async def test_a_worker_that_has_no_peers_ends_with_its_generation(tmp_path: Path) -> None:
    """Nothing else would stop its training. Another worker warms up."""
    async with world(tmp_path, A) as w:
        bundle, _, (before,) = await training(w, [A])
        await w.head.order(A, order_of(bundle, stand_by=True))
        await w.head.wait(A, lambda r: r.regroup == "waiting" and not r.workers, "another worker has warmed up")
        await await_for(lambda: gone(before.workers[0].pid))


async def test_workers_on_gpus_are_released_from_a_collective(tmp_path: Path) -> None:
    """The report says that the head must release them. A's worker joins the next generation without a restart."""
    async with world(tmp_path, A, B) as w:
        bundle, order, before = await training(w, [A, B], "gpu")
        assert [(each.regroup, each.needs_release) for each in before] == [("able", True)] * 2
        os.kill(before[1].workers[0].pid, signal.SIGSTOP)  # so A's worker waits in a collective
        (stuck,) = before[0].workers
        await w.head.wait(A, lambda r: r.workers and time.time() - r.workers[0].stepped_at > 0.3, "A waits for B")
        await w.head.order(A, changed(order, release=True))
        await waiting(w, A)
        await w.begin(bundle, 2, [A], regroup=True)
        (after,) = await w.steps([A], 2, stuck.step + 3)
        assert pids(after) == pids(before[0])


@pytest.mark.parametrize("args", [[], ["gpu"]], ids=["on the CPU", "on GPUs"])
async def test_a_stop_that_comes_too_late_for_one_of_two_nodes_is_told_and_ends(
    tmp_path: Path, args: list[str]
) -> None:
    """The other node says that it stops there. Both workers are released, and go on from the state after that stop."""
    async with world(tmp_path, A, B) as w:
        bundle, order, first = await training(w, [A, B], *args)
        stop = max(w.head.reports[name].workers[0].step for name in (A, B)) + 60
        await w.head.order(A, changed(order, stop_at=1))
        await w.head.order(B, changed(order, stop_at=stop))
        await w.head.wait(A, lambda r: (r.late, r.stops) == (1, None), "A is late")
        await w.head.wait(B, lambda r: (r.late, r.stops) == (None, stop), "B will stop")
        stopped = await w.head.wait(B, lambda r: r.snapshot == StateRef(generation=1, step=stop), "B has stopped")
        assert stopped.phase == "running"
        released_at = time.time()
        for name in (A, B):
            await w.head.order(name, changed(order, release=True))
        for name in (A, B):
            await waiting(w, name)
        assert time.time() - released_at < 3  # by itself, B would wait for A for 5 s
        await w.begin(bundle, 2, [A, B], regroup=True)
        second = await w.steps([A, B], 2, stop + 3)
        assert [pids(report) for report in second] == [pids(report) for report in first]
        assert [report.workers[0].base for report in second] == [stop, stop]


@pytest.mark.parametrize("args", [[], ["gpu"]], ids=["on the CPU", "on GPUs"])
async def test_several_workers_of_a_node_go_on_together(tmp_path: Path, args: list[str]) -> None:
    async with world(tmp_path, A, B) as w:
        bundle = w.bundle(*args, files={"train.py": SCRIPT}, procs_per_node=2)
        await w.ready(bundle, [A, B])
        await w.begin(bundle, 1, [A])
        (first,) = await w.steps([A], 1, 5)
        await w.head.order(B, order_of(bundle, stand_by=True))
        await waiting(w, B)
        order = order_of(bundle, generation=w.generation(1, [A]))
        stop = await drained(w, order, [A], 1)
        await w.begin(bundle, 2, [A, B], regroup=True)
        both = await w.steps([A, B], 2, stop + 3)
        assert pids(both[0]) == pids(first)
        assert [[each.rank for each in report.workers] for report in both] == [[0, 1], [2, 3]]
        # One of a node's workers dies: no worker of this node can go on, and none is left.
        os.kill(both[0].workers[1].pid, signal.SIGKILL)
        failed = await w.head.wait(A, lambda r: r.failure and r.failure.kind == "signal", "the signal")
        assert failed.regroup == "no"
        await await_for(lambda: all(gone(pid) for pid in pids(both[0])), what="the workers' end")


async def test_workers_that_wait_end_when_nobody_needs_them(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        bundle, order, (first,) = await training(w, [A])
        stop = await drained(w, order, [A], 1)
        # A generation with new workers, although the old ones wait.
        await w.begin(bundle, 2, [A])
        (second,) = await w.steps([A], 2, stop + 3)
        assert pids(second) != pids(first)
        assert gone(pids(first)[0])
        order = order_of(bundle, generation=w.generation(2, [A]))
        await drained(w, order, [A], 2)
        await w.head.order(A, order_of(bundle))  # the job has no devices here any more
        await w.head.wait(A, lambda r: r.phase == "ready" and r.regroup == "no", "no worker waits")
        assert gone(pids(second)[0])


async def test_a_place_that_cannot_be_written_down_ends_the_workers(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        bundle, order, (first,) = await training(w, [A])
        (control,) = [path for path in tmp_path.rglob("1.0") if path.parent.name == "control"]
        blocked = Path(f"{Invitation.path_for(control)}.part")
        blocked.mkdir()  # writing to this path fails, also for root
        stop = await drained(w, order, [A], 1)
        await w.begin(bundle, 2, [A], regroup=True)
        (refused,) = await w.phase([A], 2, "failed")
        assert refused.failure is not None
        assert refused.failure.message == "no workers of this node wait for generation 2"
        await await_for(lambda: gone(pids(first)[0]), what="the worker's end")
        await w.begin(bundle, 3, [A])
        (again,) = await w.steps([A], 3, stop + 3)
        assert pids(again) != pids(first)


async def test_a_launcher_that_dies_in_a_warm_up_is_not_the_scripts_fault(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        bundle = w.bundle(files={"train.py": SCRIPT})
        await w.ready(bundle, [A])
        await w.head.order(A, order_of(bundle, stand_by=True))
        await waiting(w, A)
        (template,) = children(w.machines[0].process.pid)
        (launcher,) = children(template)
        os.kill(launcher, signal.SIGKILL)
        await await_for(lambda: gone(launcher), what="the launcher's end")
        await w.head.wait(A, lambda r: r.regroup != "waiting", "the workers' end")
        await w.head.wait(A, lambda r: r.regroup == "waiting", "workers that wait again")
        await w.begin(bundle, 1, [A], regroup=True)
        await w.steps([A], 1, 3)


async def test_launchers_that_die_again_and_again_in_warm_ups_are_told(tmp_path: Path) -> None:
    """The script's set-up may be the reason. The head then begins a generation with new workers."""
    async with world(tmp_path, A) as w:
        bundle = w.bundle(files={"train.py": KILLS_ITS_LAUNCHER})
        await w.ready(bundle, [A])
        await w.head.order(A, order_of(bundle, stand_by=True))
        await w.head.wait(A, lambda r: r.regroup == "failed", "the failure")
        await w.head.wait(A, lambda r: "the launcher of the workers ended" in r.doing, "its reason")


async def test_a_worker_that_fails_in_a_warm_up_on_gpus_ends_the_wait_of_the_other(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        bundle = w.bundle("gpu", "fail-1", files={"train.py": SCRIPT}, procs_per_node=2)
        await w.ready(bundle, [A])
        await w.head.order(A, order_of(bundle, stand_by=True))
        failed = await w.head.wait(A, lambda r: r.regroup == "failed", "the failure")
        assert failed.doing == "its workers ended while they warmed up: ValueError: no data there"
        await w.begin(bundle, 1, [A])
        await w.steps([A], 1, 3)


async def test_a_failed_warm_up_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "AGAIN", (0.5, 0.5))
    async with world(tmp_path, A) as w:
        bundle = w.bundle("fail-once", files={"train.py": SCRIPT})
        await w.ready(bundle, [A])
        await w.head.order(A, order_of(bundle, stand_by=True))
        failed = await w.head.wait(A, lambda r: r.regroup == "failed", "the failure")
        assert failed.doing == "its workers ended while they warmed up: ValueError: no data yet"
        await waiting(w, A)
        await w.begin(bundle, 1, [A], regroup=True)
        await w.steps([A], 1, 3)


async def test_a_failed_warm_up_is_told_and_not_repeated_at_once(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        bundle = w.bundle("fail", files={"train.py": SCRIPT})
        await w.ready(bundle, [A])
        await w.head.order(A, order_of(bundle, stand_by=True))
        failed = await w.head.wait(A, lambda r: r.regroup == "failed", "the failure")
        assert failed.phase == "ready"
        assert failed.doing == "its workers ended while they warmed up: ValueError: no data here"
        assert (await w.bucket_log(bundle, 0, A, 0, "no data here")).count("set up") == 1
        # A generation that needs such workers is refused; the next one begins with new workers.
        await w.begin(bundle, 1, [A], regroup=True)
        (refused,) = await w.phase([A], 1, "failed")
        assert refused.failure is not None
        assert refused.failure.message == "no workers of this node wait for generation 1"
        await w.begin(bundle, 2, [A])
        await w.steps([A], 2, 3)
