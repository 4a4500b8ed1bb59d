"""Several jobs on one node: each has its own devices, workers, folders and logs, and none disturbs another."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path

import pytest

from spotrun.machine.processes import ZYGOTE
from spotrun.store import alive_key
from spotrun.wire import AliveRecord, Bundle, Generation, JobOrder, Member, Order, StateRef
from tests.fakes.head import Seen
from tests.fakes.node import World, small_memory, world
from tests.helpers import await_for

A = "node-a"
DEVICES = {"SPOTRUN_DEVICES": "4"}


class Jobs:
    """The orders of one node's jobs. Each change is sent at once."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.orders: dict[str, JobOrder] = {}
        self.parked: tuple[str, ...] = ()

    async def change(self, bundle: Bundle, /, **values: object) -> None:
        before = self.orders.get(bundle.id) or JobOrder(bundle=bundle)
        self.orders[bundle.id] = before.replace(**values)
        await self.send()

    async def remove(self, bundle: Bundle) -> None:
        del self.orders[bundle.id]
        await self.send()

    async def send(self) -> None:
        await self.w.head.order(A, Order(epoch=1, jobs=tuple(self.orders.values()), parked=self.parked))

    async def begin(self, bundle: Bundle, number: int) -> None:
        """Order a generation of this node once the node is ready for it."""
        seen = await self.see(bundle, lambda r: r.store, "ready")
        member = Member(node=A, boot=seen.boot, address=seen.address)
        generation = Generation(number=number, members=(member,), store=seen.store)
        await self.change(bundle, generation=generation, stop_at=None, dump=False)

    async def see(self, bundle: Bundle, look: object, what: str) -> Seen:
        return await self.w.head.wait(A, look, f"{bundle.id}: {what}", job=bundle.id)  # type: ignore[arg-type]

    async def step(self, bundle: Bundle, more: int = 3) -> Seen:
        """Wait until the job has done more steps."""
        report = self.w.head.newest.get(A)
        work = report.of(bundle.id) if report else None
        goal = more + max((worker.step for worker in work.workers), default=0) if work else more
        return await self.see(bundle, lambda r: r.workers and all(w.step >= goal for w in r.workers), f"step {goal}")

    async def drain(self, bundle: Bundle) -> Seen:
        """Stop the job a little later; it leaves a snapshot."""
        stop = (await self.step(bundle)).workers[0].step + 150
        await self.change(bundle, stop_at=stop)
        return await self.see(bundle, lambda r: r.phase == "drained" and r.snapshot, "drained")

    def assert_devices_were_never_shared(self) -> None:
        for report in self.w.head.history:
            held = [device for work in report.jobs for device in work.devices]
            assert len(held) == len(set(held)), report


def pids(seen: Seen) -> list[int]:
    return [worker.pid for worker in seen.workers]


def working_folder(log: str) -> tuple[str, ...]:
    """The last three names of the folder in which a worker of this log runs."""
    found = re.search(r"cwd (\S+) ", log)
    assert found is not None
    return Path(found[1]).parts[-3:]


async def test_two_jobs_train_side_by_side_and_one_drains(tmp_path: Path) -> None:
    async with world(tmp_path, A, environment=DEVICES) as w:
        jobs, machine = Jobs(w), w.machines[0]
        one, two = w.bundle(hang_timeout=5), w.bundle()
        assert one.code == two.code
        await jobs.change(one, devices=(1,))
        await jobs.change(two, devices=(0, 3))
        await jobs.begin(one, 1)
        await jobs.begin(two, 4)
        first, second = await jobs.step(one), await jobs.step(two)
        assert (first.work.devices, second.work.devices) == ((1,), (0, 3))
        assert (len(first.workers), len(second.workers)) == (1, 2), "a process for each device"
        assert first.report.devices == 4
        text = await w.bucket_log(one, 1, A, 0, "devices 1 restarts 0")
        assert working_folder(text) == ("work", one.id, one.code)
        text = await w.bucket_log(two, 4, A, 1, "devices 0,3 restarts 3")
        assert working_folder(text) == ("work", two.id, two.code), "what a job writes there is its own"

        def sign() -> AliveRecord | None:
            found = AliveRecord.model_validate_json(w.store.get(alive_key("test", A)))
            return found if [each.generation for each in found.jobs] == [1, 4] else None

        found = await await_for(sign, what="a sign of life of both")
        assert found is not None
        assert (found.of(one.id), found.of(two.id)) == found.jobs
        assert (found.job, found.generation) == (one.id, 1), "a head that knows one job reads the first"

        drained = await jobs.drain(one)
        assert drained.snapshot == StateRef(generation=1, step=drained.workers[0].step)
        assert drained.work.devices == ()
        assert pids(await jobs.step(two)) == pids(second)
        await jobs.remove(one)
        await await_for(lambda: not (machine.tmpfs / one.id).exists(), what="the files of the job that left")
        assert (machine.tmpfs / two.id).exists()
        assert pids(await jobs.step(two)) == pids(second)
        await await_for(
            lambda: w.head.newest[A].of(one.id) is None, what="a report without the store of the old launcher"
        )
        # The same job comes back beside the other one.
        await jobs.change(one, devices=(2,))
        await jobs.begin(one, 2)
        assert (await jobs.step(one)).work.devices == (2,)
        assert pids(await jobs.step(two)) == pids(second)
        jobs.assert_devices_were_never_shared()


async def test_what_two_jobs_left_in_memory_is_reported_until_an_order_decides(tmp_path: Path) -> None:
    async with world(tmp_path, A, environment=DEVICES) as w:
        jobs, machine = Jobs(w), w.machines[0]
        bundles = [w.bundle(), w.bundle()]
        left = {}
        for device, bundle in enumerate(bundles):
            await jobs.change(bundle, devices=(device,))
            await jobs.begin(bundle, 1)
            left[bundle.id] = (await jobs.drain(bundle)).snapshot
        await machine.kill()
        w.head.orders.clear()
        w.head.history.clear()
        w.head.newest.clear()
        await machine.start()
        report = (await w.head.wait(A, lambda r: r.report.phase == "ready", "a report", job="any")).report
        assert {work.job: work.snapshot for work in report.jobs} == left
        assert {work.phase for work in report.jobs} == {"idle"}

        kept, other = bundles
        await jobs.remove(other)
        await jobs.see(kept, lambda r: r.store and r.snapshot == left[kept.id], "ready, with its snapshot")
        assert sorted(path.name for path in machine.tmpfs.iterdir()) == [kept.id]
        assert [work.job for work in w.head.newest[A].jobs] == [kept.id]


async def test_a_parked_job_trains_on_and_keeps_its_files(tmp_path: Path) -> None:
    """The head cannot say what it should do. The other job is ordered as before, also after a restart of the agent."""
    async with world(tmp_path, A, environment=DEVICES) as w:
        jobs, machine = Jobs(w), w.machines[0]
        parked, other = w.bundle(), w.bundle()
        for device, bundle in enumerate((parked, other)):
            await jobs.change(bundle, devices=(device,))
            await jobs.begin(bundle, 1)
        running = await jobs.step(parked)
        order, jobs.parked = jobs.orders.pop(parked.id), (parked.id,)
        await jobs.drain(other)
        await jobs.begin(other, 2)
        await jobs.step(other)
        assert pids(await jobs.step(parked)) == pids(running)
        jobs.orders[parked.id], jobs.parked = order, ()
        left = await jobs.drain(parked)
        assert pids(left) == pids(running)

        await machine.kill()
        w.head.orders.clear()
        w.head.newest.clear()
        await machine.start()
        await w.head.wait(A, lambda r: r.report.phase == "ready", "a report", job="any")
        del jobs.orders[parked.id]
        jobs.parked = (parked.id,)
        await jobs.change(other, generation=None)
        await jobs.see(other, lambda r: r.store, "ready")
        assert w.head.newest[A].of(parked.id).snapshot == left.snapshot
        assert (machine.tmpfs / parked.id).exists()


async def test_a_job_begins_though_its_zygote_dies(tmp_path: Path) -> None:
    """The zygote takes the request, and forks nothing: nothing is wrong with the job."""
    asked = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zygote:
        zygote.bind(str(tmp_path / "zygote"))
        zygote.listen()
        zygote.setblocking(False)

        async def die() -> None:
            nonlocal asked
            while True:
                asking, _ = await asyncio.get_running_loop().sock_accept(zygote)
                asked += 1
                asking.close()

        dying = asyncio.create_task(die())
        try:
            async with world(tmp_path, A, environment={ZYGOTE: str(tmp_path / "zygote")}) as w:
                jobs, bundle = Jobs(w), w.bundle()
                await jobs.change(bundle)
                await jobs.begin(bundle, 1)
                await jobs.step(bundle)
                seen = [work for report in w.head.history for work in report.jobs]
        finally:
            dying.cancel()
    assert asked == 1
    assert {work.failure for work in seen} == {None}


async def test_a_generation_whose_store_is_gone_does_not_start(tmp_path: Path) -> None:
    """The launcher has ended since the head knew its store. The next generation has the new launcher's."""
    async with world(tmp_path, A) as w:
        jobs, bundle = Jobs(w), w.bundle()
        await jobs.change(bundle)
        seen = await jobs.see(bundle, lambda r: r.store, "ready")
        member = Member(node=A, boot=seen.boot, address=seen.address)
        await jobs.change(bundle, generation=Generation(number=1, members=(member,), store="127.0.0.9:1"))
        refused = await jobs.see(bundle, lambda r: r.failure, "a refusal")
        assert (refused.work.generation, refused.phase, refused.workers) == (1, "failed", ())
        assert refused.failure.kind == "peer"
        assert refused.failure.message == "generation 1 cannot start: its store is gone"
        await jobs.begin(bundle, 2)
        taken = jobs.orders[bundle.id].generation.store  # type: ignore[union-attr]
        assert (await jobs.step(bundle)).failure is None
        # A store that a generation has got is for no other one.
        await jobs.change(bundle, generation=Generation(number=3, members=(member,), store=taken))
        refused = await jobs.see(bundle, lambda r: r.failure, "another refusal")
        assert (refused.work.generation, refused.failure.message) == (3, "generation 3 cannot start: its store is gone")
        await jobs.begin(bundle, 4)
        assert (await jobs.see(bundle, lambda r: r.workers, "workers")).work.generation == 4


async def test_a_device_never_has_workers_of_two_jobs(tmp_path: Path) -> None:
    """Whatever the head orders: the second one waits until the device is free."""
    async with world(tmp_path, A, environment=DEVICES) as w:
        jobs = Jobs(w)
        one, two, all_devices = w.bundle("--slow-commit", "0.5"), w.bundle(), w.bundle(procs_per_node=1)
        await jobs.change(one, devices=(1, 2))
        await jobs.begin(one, 1)
        running = await jobs.step(one)
        await jobs.change(two, devices=(2, 3))
        await jobs.begin(two, 1)
        waits = await jobs.see(two, lambda r: r.doing, "that it waits")
        assert (waits.phase, waits.failure, waits.workers) == ("ready", None, ())
        assert waits.doing == f"waiting for device 2, which workers of {one.id} use"
        assert pids(await jobs.step(one)) == pids(running)
        await jobs.drain(one)
        assert (await jobs.step(two)).work.devices == (2, 3)

        await jobs.change(all_devices)
        await jobs.begin(all_devices, 1)
        await jobs.see(all_devices, lambda r: r.doing, "that it waits")
        await jobs.remove(two)
        assert (await jobs.step(all_devices)).work.devices == (0, 1, 2, 3)
        jobs.assert_devices_were_never_shared()

        lost = w.bundle()
        await jobs.change(lost, devices=(4,))
        await jobs.begin(lost, 1)
        failed = await jobs.see(lost, lambda r: r.failure, "a failure")
        assert failed.failure.message.endswith("the order names device 4, and the node has 4")


async def test_a_job_whose_snapshots_do_not_fit_does_not_start(tmp_path: Path) -> None:
    async with world(tmp_path, A, environment=DEVICES) as w:
        jobs = Jobs(w)
        small, large = w.bundle(), w.bundle().replace(state_bytes=1 << 50)
        await jobs.change(small, devices=(0,))
        await jobs.begin(small, 1)
        running = await jobs.step(small)
        await jobs.change(large, devices=(1,))
        await jobs.begin(large, 1)
        failed = await jobs.see(large, lambda r: r.failure, "a failure")
        assert (failed.phase, failed.failure.kind, failed.workers) == ("failed", "setup", ())
        assert re.search(r"cannot start on this node: \d{9,} MB of memory are missing in", failed.failure.message)
        assert pids(await jobs.step(small)) == pids(running)
        # Its size is no part of what it is: the head learns it while the job runs.
        await jobs.change(small, bundle=small.replace(state_bytes=1 << 10))
        assert pids(await jobs.step(small)) == pids(running)


FLOOD = """
import os, sys
line = b"a line of a script that says too much\\n" * 1000
while True:
    os.write(1, line)
"""


WRECK = """
import shutil, time
from pathlib import Path
from spotrun.state.control import Context
shutil.rmtree(Path(Context.from_env().slots).parent)
time.sleep(3600)
"""


async def flooded(jobs: Jobs, bundle: Bundle) -> None:
    """Its script writes as many lines as it can."""
    await jobs.begin(bundle, 1)
    log = jobs.w.machines[0].scratch / "logs" / bundle.id / "0001" / "0.log"
    await await_for(lambda: log.exists() and log.stat().st_size > 64 << 20, what="a long log")
    await jobs.remove(bundle)
    await await_for(lambda: not (jobs.w.machines[0].tmpfs / bundle.id).exists(), what="its end")


async def crashed(jobs: Jobs, bundle: Bundle) -> None:
    """Its script fails again and again."""
    for number in range(1, 4):
        await jobs.begin(bundle, number)
        failed = await jobs.see(bundle, lambda r, n=number: r.generation == n and r.failure, "a failure")
        assert failed.failure.kind == "user"


async def hung(jobs: Jobs, bundle: Bundle) -> None:
    """Its script completes no step, and the head has its stacks written."""
    await jobs.begin(bundle, 1)
    await jobs.step(bundle, 1)
    await jobs.change(bundle, dump=True)
    failed = await jobs.see(bundle, lambda r: r.phase == "failed" and not r.work.devices, "its end")
    assert failed.failure.kind == "hang"


async def wrecked(jobs: Jobs, bundle: Bundle) -> None:
    """Its script removes the folder that it shares with the agent, which begins the job again."""
    await jobs.begin(bundle, 1)
    failed = await jobs.see(bundle, lambda r: r.failure and r.generation == 1, "a failure")
    assert failed.failure.kind == "setup"
    assert "unexpected error on this node: FileNotFoundError" in failed.failure.message
    await jobs.see(bundle, lambda r: r.store and not r.work.devices, "ready again")


async def never_prepared(jobs: Jobs, bundle: Bundle) -> None:
    """The installation of its packages never ends."""
    await jobs.see(bundle, lambda r: r.doing == "installing requirements", "that it installs")


@pytest.mark.parametrize("misbehave", [flooded, crashed, hung, wrecked, never_prepared])
async def test_a_job_that_misbehaves_disturbs_no_other(tmp_path: Path, misbehave: object) -> None:
    pipe = tmp_path / "tiny_package-1-py3-none-any.whl"
    os.mkfifo(pipe)
    async with world(tmp_path, A, environment=DEVICES) as w:
        jobs, good = Jobs(w), w.bundle()
        bad = {
            flooded: lambda: w.bundle(files={"train.py": FLOOD}),
            crashed: lambda: w.bundle(files={"train.py": "raise SystemExit(3)\n"}),
            wrecked: lambda: w.bundle(files={"train.py": WRECK}),
            hung: lambda: w.bundle("--hang", "0@1@1"),
            never_prepared: lambda: w.bundle(requirements=[f"tiny-package @ file://{pipe}"]),
        }[misbehave]()  # type: ignore[index]
        await jobs.change(good, devices=(0,))
        await jobs.begin(good, 1)
        running = await jobs.step(good)
        await jobs.change(bad, devices=(1,))
        doing = asyncio.create_task(misbehave(jobs, bad))  # type: ignore[operator]
        while not doing.done():
            assert pids(await jobs.step(good)) == pids(running)
        await doing
        # The other one is still drained in time, leaves and comes back.
        drained = await jobs.drain(good)
        assert drained.failure is None
        await jobs.begin(good, 2)
        await jobs.step(good)
        jobs.assert_devices_were_never_shared()


async def test_an_unexpected_error_does_not_hide_a_state(tmp_path: Path) -> None:
    """The files stay. If the report did not name the state, the head would have the machine replaced."""
    async with world(tmp_path, A) as w:
        jobs, bundle = Jobs(w), w.bundle()
        await jobs.change(bundle)
        await jobs.begin(bundle, 1)
        drained = await jobs.drain(bundle)
        await jobs.begin(bundle, 2)
        await jobs.step(bundle)
        folder = w.machines[0].tmpfs / bundle.id
        folder.rename(folder.with_name("away"))
        failed = await jobs.see(bundle, lambda r: r.failure and "unexpected" in r.failure.message, "an error")
        assert failed.snapshot == drained.snapshot


GREEDY = """
import time
from pathlib import Path
from spotrun.state.control import Context
folder, number = Path(Context.from_env().slots).parent, 0
while True:
    try:
        (folder / f"file{number}").write_bytes(bytes(1 << 20))
        number += 1
    except OSError:
        time.sleep(0.01)
"""


async def test_a_job_that_fills_the_memory_is_ended(tmp_path: Path) -> None:
    """The snapshots of the other job still find room."""
    folder = tmp_path / A / "tmpfs"
    folder.mkdir(parents=True)
    with small_memory(folder):
        async with world(tmp_path, A, environment=DEVICES) as w:
            jobs, good, bad = Jobs(w), w.bundle(), w.bundle(files={"train.py": GREEDY})
            await jobs.change(good, devices=(0,))
            await jobs.begin(good, 1)
            running = await jobs.step(good)
            await jobs.change(bad, devices=(1,))
            await jobs.begin(bad, 1)
            failed = await jobs.see(bad, lambda r: r.failure and not r.work.devices, "a failure")
            assert failed.failure.kind == "user"
            assert "MB beside its snapshots into" in failed.failure.message
            await await_for(lambda: not list((folder / bad.id).glob("file*")), what="the memory free again")
            assert pids(await jobs.step(good)) == pids(running)
            drained = await jobs.drain(good)
            assert drained.snapshot == StateRef(generation=1, step=drained.workers[0].step)
