"""Agents, their launchers and workers as real processes, against a head that says what the test wants."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import re
import shutil
import signal
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from spotrun.machine.metadata import Identity
from spotrun.machine.processes import OOM_SCORE
from spotrun.machine.systemd import Systemd
from spotrun.node.agent import Agent, Settings
from spotrun.node.connection import Connection
from spotrun.node.runner import Runner
from spotrun.spec.names import CLUSTER, POOL
from spotrun.state import shards, slots
from spotrun.store import Store, checkpoint_key, code_key, head_key, host_key
from spotrun.wire import MAX_MESSAGE, Bundle, HostRecord, Notice, Order, Report, SaveOrder, StateRef, hash_of
from tests.fakes.head import FakeHead, Seen
from tests.fakes.launchers import children
from tests.fakes.node import HELPER, TOY, Machine, World, changed, order_of, put_code, wheel, world
from tests.helpers import await_for, gone

A, B = "node-a", "node-b"


def worker(report: Seen) -> int:
    return report.workers[0].pid


async def test_a_generation_runs_to_its_end(tmp_path: Path) -> None:
    async with world(tmp_path, A, B) as w:
        machine = w.machines[0]
        idle = await w.head.wait(A, lambda r: r.phase == "idle", "idle")
        assert (idle.pool, idle.zone, idle.address, idle.ssh_port) == ("pool", "zone-a", machine.address, 2222)
        record = HostRecord.model_validate_json(w.store.get(host_key("test", A)))
        ((name, address, given),) = [visit for visit in w.head.visits if visit[0] == A]
        secret = given.removeprefix("Bearer ")
        assert (name, address) == (A, machine.address), "it comes from the address that the cloud lists for it"
        assert len(secret) > 40
        assert record == HostRecord(
            node=A,
            address=machine.address,
            port=2222,
            keys=(f"ssh-ed25519 AAAA{A}",),
            machine=A,
            zone="zone-a",
            token_sha256=hash_of(secret),
        )

        bundle = w.bundle("--steps", "40", env={"TONE": "blue"})
        ready = await w.ready(bundle, [A, B])
        await w.begin(bundle, 1, [B, A])  # the first member is rank 0, whatever its name
        ended = await w.phase([B, A], 1, "succeeded")
        assert [each.workers[0].rank for each in ended] == [0, 1]
        assert [each.workers[0].step for each in ended] == [40, 40]
        assert ended[0].store != ready[1].store  # used up: another is there for the next generation
        assert ended[1].store == ready[0].store
        phases = ended[0].workers[0].phases
        assert 0 < phases[0] <= phases[1] <= phases[2] <= phases[3]
        order = [Seen.of(r).phase for r in w.head.history if r.node == A]
        changes = [phase for n, phase in enumerate(order) if n == 0 or order[n - 1] != phase]
        assert [phase for phase in changes if phase not in ("checking", "running")] == [
            "idle", "preparing", "ready", "starting", "succeeded"
        ]  # fmt: skip
        assert "checking" not in changes[1:], "it is the first or none"
        doing = {(r.phase, r.doing) for r in map(Seen.of, w.head.history) if r.node == A}
        assert ("preparing", "importing torch") in doing
        assert {text for phase, text in doing if phase in ("idle", "ready", "running", "succeeded")} == {""}
        text = await w.bucket_log(bundle, 1, B, 0, "done at 40")
        script = r"/src/train.py', '--steps', '40'\]"
        assert re.search(rf"hello from 0 of 2 cwd \S+/{bundle.code} argv \['\S+/{bundle.code}{script}", text)
        assert "tone blue restart 0 name __main__" in text

        await w.head.order(A, Order(epoch=1))
        await w.head.wait(A, lambda r: r.phase == "idle" and r.job is None, "idle again")
        await await_for(lambda: len(machine.processes()) == 1, what="only the agent left")
        assert list(machine.tmpfs.iterdir()) == []


async def test_the_folder_for_temporary_files_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local machine has it beside the jobs' folders. What a killed agent has left there goes."""
    tmpfs = tmp_path / "tmpfs"
    for name in ("tmp", "old-job"):
        (tmpfs / name).mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(tmpfs / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    store = Store(str(tmp_path))
    settings = Settings(tmpfs=tmpfs, scratch=tmp_path / "scratch", ssh_port=22, name=A)
    agent = Agent(settings, Identity(A, "zone-a", "127.0.9.2", A), {CLUSTER: "c", POOL: "p"}, store, Systemd())
    await agent._clean(order_of(Bundle(id="j", code="0" * 64, job={})))
    assert [path.name for path in tmpfs.iterdir()] == ["tmp"]


async def test_a_machine_with_a_worker_that_cannot_be_ended_is_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reports = Store(str(tmp_path)), list[Any]()
    settings = Settings(tmpfs=tmp_path / "tmpfs", scratch=tmp_path / "scratch", ssh_port=22, name=A)
    agent = Agent(settings, Identity(A, "zone-a", "127.0.9.2", A), {CLUSTER: "c", POOL: "p"}, store, Systemd())
    monkeypatch.setattr(agent.connection, "publish", reports.append)
    agent.set_problems(())
    agent._runners["j"] = agent._runner("j")
    agent._publish()
    monkeypatch.setattr(Runner, "stuck", True)
    agent._publish()
    monkeypatch.setattr(Runner, "stuck", False)
    agent._publish()
    assert [each.phase for each in reports] == ["ready", "unfit", "ready"]
    assert reports[1].unfit == ("a worker of job j cannot be ended: a GPU or a disk may not answer",)


async def test_a_rebalance_recommendation_makes_no_small_blocks(tmp_path: Path) -> None:
    """EC2 may leave the machine for days after it. At a notice, each block has a second's values."""
    store = Store(str(tmp_path))
    settings = Settings(tmpfs=tmp_path / "tmpfs", scratch=tmp_path / "scratch", ssh_port=22, name=A)
    agent = Agent(settings, Identity(A, "zone-a", "127.0.9.2", A), {CLUSTER: "c", POOL: "p"}, store, Systemd())
    first = agent._runners["first"] = agent._runner("first")
    agent.notify(Notice(kind="rebalance", deadline=time.time() + 120))
    second = agent._runner("second")
    assert not any([agent.under_notice, first._metrics._hurries, second._metrics._hurries])
    agent.notify(Notice(kind="preempt", deadline=time.time() + 120))
    assert agent.under_notice
    assert first._metrics._hurries


async def test_an_agent_is_small_and_quiet(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        await w.head.wait(A, lambda r: True, "a report")
        pid = w.machines[0].processes()[0]
        status = Path(f"/proc/{pid}/status").read_text()
        assert int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) < 80 * 1024
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


async def test_drain_regroup_and_loss(tmp_path: Path) -> None:
    async with world(tmp_path, A, B) as w:
        bundle = w.bundle()
        await w.ready(bundle, [A, B])
        order = await w.begin(bundle, 1, [A, B])
        running = await w.steps([A, B], 1, 5)

        # A step that has gone by: refused, and training goes on.
        for name in (A, B):
            await w.head.order(name, changed(order, stop_at=3))
        for name in (A, B):
            await w.head.wait(name, lambda r: r.late == 3, "late")
        await w.steps([A, B], 1, max(w.head.reports[name].workers[0].step for name in (A, B)) + 5)

        stop = w.head.reports[A].workers[0].step + 150
        for name in (A, B):
            await w.head.order(name, changed(order, stop_at=stop))
        drained = await w.phase([A, B], 1, "drained")
        assert [r.snapshot for r in drained] == [StateRef(generation=1, step=stop)] * 2
        assert [r.workers[0].step for r in drained] == [stop, stop]
        assert [(r.late, r.failure) for r in drained] == [(None, None)] * 2

        # The next one with the ranks the other way round goes on from there.
        await w.begin(bundle, 2, [B, A])
        going = await w.steps([B, A], 2, stop + 5)
        assert [r.workers[0].base for r in going] == [stop, stop]
        assert {worker(r) for r in going}.isdisjoint({worker(r) for r in running})
        assert all(gone(worker(r)) for r in running)

        # An order from before is refused. An older head too.
        await w.head.order(A, order)
        await w.head.order(A, Order(epoch=0))
        await w.steps([B, A], 2, stop + 20)
        log = w.machines[0]
        await await_for(lambda: "generation 1 was ordered after 2: refused" in log.log, what="a refusal")
        await await_for(lambda: "order of head 0 came after an order of head 1: refused" in log.log, what="another")

        # A machine dies without notice: the other machine's collective fails, and its report says so.
        await w.machines[1].kill()
        (failed,) = await w.phase([A], 2, "failed")
        assert failed.failure is not None
        assert (failed.failure.kind, failed.failure.rank) == ("peer", 1)
        await w.begin(bundle, 3, [A])
        await w.steps([A], 3, 5)

        await refuses_what_has_ended(w, bundle)


async def refuses_what_has_ended(w: World, bundle: Bundle) -> None:
    """Workers whose generation is taken away end, and the node is ready for another. It does not take the ended one
    up again, and uses no store that is not there."""
    pid = worker(w.head.reports[A])
    await w.head.order(A, order_of(bundle))
    ready = await w.head.wait(A, lambda r: r.phase == "ready", "ready")
    assert (ready.workers, ready.generation, ready.failure) == ((), 3, None)
    assert gone(pid)
    await w.head.order(A, order_of(bundle, generation=w.generation(3, [A])))
    missed = await w.head.wait(A, lambda r: r.phase == "failed", "failed")
    assert missed.failure is not None
    assert "has ended on this node already" in missed.failure.message
    stale = w.generation(4, [A]).model_copy(update={"store": "127.0.9.2:9"})
    await w.head.order(A, order_of(bundle, generation=stale))
    (refused,) = await w.phase([A], 4, "failed")
    assert refused.failure is not None
    assert "generation 4 cannot start: its store is gone" in refused.failure.message


async def test_user_errors_and_hangs(tmp_path: Path) -> None:
    async with world(tmp_path, A, B) as w:
        bundle = w.bundle("--fail", "1@7@1", "--hang", "0@7@2")
        await w.ready(bundle, [A, B])
        await w.begin(bundle, 1, [A, B])
        peer, user = await w.phase([A, B], 1, "failed")
        assert user.failure is not None
        assert (user.failure.kind, user.failure.rank) == ("user", 1)
        assert user.failure.message == "ValueError: bad luck on rank 1"
        assert user.failure.traceback.startswith('Traceback (most recent call last):\n  File "')
        assert "train.py" in user.failure.traceback.splitlines()[1]
        assert peer.failure is not None
        assert (peer.failure.kind, peer.failure.rank) == ("peer", 0)
        assert peer.failure.at > user.failure.at
        await w.bucket_log(bundle, 1, B, 1, "ValueError: bad luck on rank 1")

        order = await w.begin(bundle, 2, [A, B])
        await w.steps([A, B], 2, 7)
        for name in (A, B):
            await w.head.order(name, changed(order, dump=True))
        hung = await w.phase([A, B], 2, "failed")
        for report, rank in zip(hung, (0, 1), strict=True):
            assert report.failure is not None
            assert (report.failure.kind, report.failure.rank) == ("hang", rank)
            assert report.failure.message.startswith("no step was completed for 300 s (hang_timeout in the job file); ")
            assert gone(worker(report))
            text = w.store.get(report.stacks).decode()
            assert f"rank {rank}:" in text
            assert ("wedge" if rank == 0 else "all_reduce") in text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "the script has not called spotrun.init in the first 600 s"),
        (
            "import spotrun\nspotrun.init()\n",
            "none of run.track, run.train and run.fit was called, or no state was restored, in the first 600 s",
        ),
    ],
)
async def test_a_script_without_steps(script: str, said: str, tmp_path: Path) -> None:
    """For example, one that trains with another library, or one that prepares data."""
    async with world(tmp_path, A) as w:
        bundle = w.bundle(files={"train.py": f"{script}import time\ntime.sleep(600)"})
        await w.ready(bundle, [A])
        order = await w.begin(bundle, 1, [A])
        await w.head.wait(A, lambda r: r.workers and r.workers[0].phases[1 if script else 0], "the set-up")
        await w.head.order(A, changed(order, dump=True))
        (report,) = await w.phase([A], 1, "failed")
        assert report.failure is not None
        assert report.failure.message.startswith(f"{said} (start_timeout in the job file); stacks of")


async def test_python_looks_for_modules_in_the_bundle(tmp_path: Path) -> None:
    """As it does with such a variable in the folder of the job file."""
    files = {"src/train.py": "import model\nprint('found', model.x)", "lib/model.py": "x = 7"}
    async with world(tmp_path, A) as w:
        bundle = w.bundle(files=files, env={"PYTHONPATH": f"lib{os.pathsep}/none"})
        await w.ready(bundle, [A])
        await w.begin(bundle, 1, [A])
        await w.phase([A], 1, "succeeded")
        await w.bucket_log(bundle, 1, A, 0, "found 7")


async def test_several_workers_on_a_node(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        bundle = w.bundle("--fail", "1@30@1", "--slow-commit", "0.5", procs_per_node=2)
        await w.ready(bundle, [A])
        await w.begin(bundle, 1, [A])
        (running,) = await w.steps([A], 1, 3)
        assert [each.rank for each in running.workers] == [0, 1]
        failed = await w.head.wait(A, lambda r: r.failure and r.failure.kind == "user", "the cause")
        assert failed.failure is not None
        assert failed.failure.rank == 1
        await await_for(lambda: all(gone(each.pid) for each in failed.workers), what="workers gone")

        # All drain although one is slow to save; the other leaves at once.
        order = await w.begin(bundle, 2, [A])
        (running,) = await w.steps([A], 2, 3)
        stop = running.workers[0].step + 100
        await w.head.order(A, changed(order, stop_at=stop))
        (drained,) = await w.phase([A], 2, "drained")
        assert drained.snapshot == StateRef(generation=2, step=stop)

        # One killed from outside: said so, and it is not the agent's own killing of the other that shows.
        await w.begin(bundle, 3, [A])
        (running,) = await w.steps([A], 3, stop + 3)
        os.kill(running.workers[1].pid, signal.SIGKILL)
        failed = await w.head.wait(A, lambda r: r.failure and r.failure.kind == "signal", "the signal")
        assert failed.failure is not None
        assert failed.failure.rank == 1
        assert "SIGKILL" in failed.failure.message


async def test_checkpoint_parts(tmp_path: Path) -> None:
    async with world(tmp_path, A, B) as w:
        bundle = w.bundle()
        await w.ready(bundle, [A, B])
        order = await w.begin(bundle, 1, [A, B])
        await w.steps([A, B], 1, 3)

        async def save(step: int) -> list[Seen]:
            for index, name in enumerate((A, B)):
                wanted = SaveOrder(step=step, index=index, parts=2)
                await w.head.order(name, changed(order, save=wanted))
            return [
                await w.head.wait(name, lambda r: r.late == step or any(p.step == step for p in r.parts), "saved")
                for name in (A, B)
            ]

        assert [report.late for report in await save(2)] == [2, 2]
        step = w.head.reports[A].workers[0].step + 150
        reports = await save(step)
        assert [report.late for report in reports] == [None, None]
        files = [file for report in reports for file in report.parts[0].files]
        assert {file.name for file in files} == {
            shards.shard_name(1, 0, 2),
            shards.shard_name(1, 1, 2),
            shards.state_name(1, 2),
            shards.index_name(1, 2),
        }
        for file in files:
            assert len(w.store.get(checkpoint_key(bundle.id, step, file.name))) == file.size
        state = json.loads(w.store.get(checkpoint_key(bundle.id, step, shards.state_name(1, 2))))
        assert state["record"]["step"] == step
        for name in (A, B):
            await w.head.order(name, order)
        await w.head.wait(A, lambda r: not r.parts, "the part forgotten")

        # No workers: what a node holds in memory goes into the bucket.
        stop = max(w.head.reports[name].workers[0].step for name in (A, B)) + 150
        for name in (A, B):
            await w.head.order(name, changed(order, stop_at=stop))
        await w.phase([A, B], 1, "drained")
        ref = StateRef(generation=1, step=stop)
        upload = order_of(bundle, upload=ref, save=SaveOrder(step=stop, index=0, parts=1))
        await w.head.order(A, upload)
        report = await w.head.wait(A, lambda r: r.parts, "uploaded")
        assert (report.parts[0].generation, report.parts[0].step, report.phase) == (1, stop, "ready")
        lost = StateRef(generation=1, step=stop + 1)
        upload = order_of(bundle, upload=lost, save=SaveOrder(step=stop + 1, index=0, parts=1))
        await w.head.order(B, upload)
        await w.head.wait(B, lambda r: r.late == stop + 1 and not r.parts, "that it has no such snapshot")


async def test_the_head_goes_away_and_training_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        bundle = w.bundle()
        await w.ready(bundle, [A])
        order = await w.begin(bundle, 1, [A])
        (before,) = await w.steps([A], 1, 3)
        await w.head.stop()

        # An impostor at the head's place: its certificate is not the one in the bucket, so it never sees the token.
        impostor = FakeHead(w.store, epoch=1, refusal="wrong secret")
        record = await impostor.start(publish=False)
        impostor.publish(record.model_copy(update={"fingerprint": "ab" * 32}))
        await await_for(lambda: "not the one in clusters/test/head.json: refused" in w.machines[0].log, what="refusal")
        assert impostor.visits == []
        # Junk in the bucket; then the right certificate, and a head that does not know the token.
        w.store.put(head_key("test"), b"{junk")
        await await_for(lambda: "clusters/test/head.json is not a head's record" in w.machines[0].log, what="refusal")
        impostor.publish(record)
        await await_for(
            lambda: "the head refuses this node: wrong secret (status 401)" in w.machines[0].log, what="refusal"
        )
        assert all(visit[2] != "Bearer " for visit in impostor.visits)
        assert impostor.reports == {}
        await impostor.stop()

        w.head = FakeHead(w.store, epoch=2)
        w.head.orders[A] = order.model_copy(update={"epoch": 2})
        await w.head.start()
        after = await w.head.wait(A, lambda r: r.workers and r.workers[0].step > 0, "a report")
        assert after.boot == before.boot
        assert worker(after) == worker(before)  # it has trained on
        assert after.workers[0].step > before.workers[0].step
        assert after.generation == 1

        # Junk is ignored. A message that is too large ends the connection, and the agent connects again.
        socket = w.head.sockets[A]
        for junk in ("", "{", "[]", '{"kind": "report"}', '{"epoch": "x"}', '{"epoch": 3, "jobs": [{}]}'):
            await socket.send_str(junk)
        await socket.send_bytes(b"\0" * 100)
        evil = bundle.model_copy(update={"id": "../../evil"})
        await socket.send_str(order_of(evil, 2).model_dump_json())
        await socket.send_str(" " * (MAX_MESSAGE + 1))
        await await_for(lambda: w.head.sockets.get(A) not in (None, socket), what="a new link")
        log = w.machines[0].log
        assert log.count("is not an order, ignored") == 6
        assert "a BINARY frame from the head: ignored" in log
        assert "an order for job '../../evil'" in log
        step = w.head.reports[A].workers[0].step
        (still,) = await w.steps([A], 1, step + 10)
        assert worker(still) == worker(before)


async def test_hostile_bundles_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        template = w.bundle()

        async def refusal(code: str) -> str:
            bundle = template.model_copy(update={"id": f"bad-{code[:8]}", "code": code})
            await w.head.order(A, order_of(bundle))
            report = await w.head.wait(A, lambda r: r.job == bundle.id and r.failure, "a failure")
            assert report.failure is not None
            assert (report.phase, report.failure.kind) == ("failed", "setup")
            assert report.store == ""
            return report.failure.message

        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo("../../evil.py")
            tar.addfile(info, io.BytesIO())
        assert "'../../evil.py' leads out of" in await refusal(put_code(w.store, zstandard.compress(buffer.getvalue())))
        assert "cannot be unpacked" in await refusal(put_code(w.store, b"this is no archive"))
        w.store.put(code_key(template.code), w.store.get(code_key(template.code))[:-1])
        assert "is damaged: its sha256 is" in await refusal(template.code)
        assert not list(tmp_path.rglob("evil.py"))
        # It is not the worse for it.
        await w.ready(w.bundle(), [A])


async def test_packages_and_launcher(tmp_path: Path) -> None:
    script = TOY.replace("import torch\n", "import tiny_package, torch\n", 1)
    files = {"train.py": script, "helper_module.py": HELPER}
    async with world(tmp_path, A) as w:
        bundle = w.bundle(files=files, requirements=[f"tiny-package @ file://{wheel(tmp_path)}"])
        (ready,) = await w.ready(bundle, [A])
        await w.begin(bundle, 1, [A])
        (running,) = await w.steps([A], 1, 3)
        assert Path(f"/proc/{worker(running)}/oom_score_adj").read_text().strip() == OOM_SCORE

        # The launcher or its template dies, and the workers with it; the agent starts another.
        for number in (1, 2):
            (template,) = children(w.machines[0].process.pid)
            (launcher,) = children(template)
            os.kill(launcher if number == 1 else template, signal.SIGKILL)
            (failed,) = await w.phase([A], number, "failed")
            assert failed.failure is not None
            assert failed.failure.kind == "signal"
            assert "launcher" in failed.failure.message
            await await_for(functools.partial(gone, worker(running)), what="the worker gone with the launcher")
            again = await w.head.wait(A, lambda r: r.store, "another launcher")
            assert again.store != ready.store
            await w.begin(bundle, number + 1, [A])
            (running,) = await w.steps([A], number + 1, 3)

        # A package that is not there.
        bundle = w.bundle(files=files, requirements=["tiny-package @ file:///nowhere/tiny_package-1-py3-none-any.whl"])
        await w.head.order(A, order_of(bundle))
        report = await w.head.wait(A, lambda r: r.job == bundle.id and r.failure, "a failure")
        assert report.failure is not None
        assert report.failure.kind == "setup"
        assert "pip failed" in report.failure.message


@pytest.mark.parametrize("frozen", ["launcher", "forkserver"])
async def test_a_worker_whose_end_nobody_reports(frozen: str, tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        bundle = w.bundle()
        await w.ready(bundle, [A])
        await w.begin(bundle, 1, [A])
        (running,) = await w.steps([A], 1, 3)
        (template,) = children(w.machines[0].process.pid)
        (launcher,) = children(template)
        (forkserver,) = [pid for pid in children(launcher) if worker(running) in children(pid)]
        os.kill(launcher if frozen == "launcher" else forkserver, signal.SIGSTOP)
        os.kill(worker(running), signal.SIGKILL)
        (failed,) = await w.phase([A], 1, "failed")
        assert failed.failure is not None
        assert failed.failure.kind == "signal"
        assert "launcher" in failed.failure.message
        await w.head.wait(A, lambda r: r.store, "another launcher")
        await w.begin(bundle, 2, [A])
        await w.steps([A], 2, 3)


async def test_no_room_for_a_generation_and_what_a_killed_agent_left(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        bundle = w.bundle()
        scratch = tmp_path / A / "scratch"
        left = [scratch / "parts" / "part-old", scratch / "work" / bundle.id / "new-old"]
        for each in left:
            each.mkdir(parents=True)
        await w.add(A)
        await w.ready(bundle, [A])
        assert [each for each in left if each.exists()] == []
        control = w.machines[0].tmpfs / bundle.id / "control"
        shutil.rmtree(control)
        control.write_text("in the way")
        await w.begin(bundle, 1, [A])
        failed = await w.head.wait(A, lambda r: r.failure, "a failure")
        assert failed.failure is not None
        assert (failed.phase, failed.failure.kind, failed.generation) == ("failed", "setup", 0)
        assert "generation 1 cannot start on this node: " in failed.failure.message
        assert str(control) in failed.failure.message
        control.unlink()
        await w.begin(bundle, 2, [A])
        (running,) = await w.steps([A], 2, 3)
        assert running.failure is None


async def test_a_connection_ends_when_it_is_cancelled_while_the_head_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = asyncio.Event()

    async def send(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            leaving.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(Connection, "_send", send)
    store = Store(str(tmp_path))
    head = FakeHead(store)
    await head.start()
    connection = Connection(store, "test", Identity(A, "zone-a", "127.0.9.2", A), lambda order: None)
    task = asyncio.create_task(connection.run())
    await await_for(lambda: connection.connected, what="a connection")
    await head.stop()
    await asyncio.wait_for(leaving.wait(), 100)
    task.cancel()
    await asyncio.wait([task], timeout=100)
    assert task.cancelled()


async def test_an_agent_connects_again_for_a_whole_order_if_it_lacks_the_base_of_a_difference(tmp_path: Path) -> None:
    store, orders = Store(str(tmp_path)), list[Order]()
    head = FakeHead(store)
    await head.start()
    connection = Connection(store, "test", Identity(A, "zone-a", "127.0.9.2", A), orders.append)
    connection.publish(Report(node=A, boot="b", pool="p", zone="z", address="127.0.9.2"))
    task = asyncio.create_task(connection.run())
    await await_for(lambda: A in head.sockets, what="a report")
    head.orders[A] = Order(epoch=1, number=1)
    await head.sockets[A].send_str('{"kind": "change", "base": 7, "number": 8, "version": 2, "epoch": 1, "jobs": []}')
    await await_for(lambda: orders, what="the whole order")
    assert (len(head.visits), orders) == (2, [head.orders[A]])
    task.cancel()
    await asyncio.wait([task])
    await head.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_nothing_outlives_the_agent(tmp_path: Path, number: int) -> None:
    async with world(tmp_path, A) as w:
        bundle = w.bundle(procs_per_node=2)
        await w.ready(bundle, [A])
        await w.begin(bundle, 1, [A])
        await w.steps([A], 1, 3)
        machine = w.machines[0]
        assert len(machine.processes()) >= 6  # agent, template, launcher, forkserver, two workers
        assert machine.process is not None
        machine.process.send_signal(number)
        await machine.gone()
        assert machine.process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL)


async def test_notices_are_reported(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        await w.head.wait(A, lambda r: r.notice is None, "a report")
        w.machines[0].metadata.change(preempted="TRUE")
        report = await w.head.wait(A, lambda r: r.notice, "the notice")
        assert report.notice is not None
        assert report.notice.kind == "preempt"


async def test_a_job_that_is_ordered_under_notice_pauses_little_between_tries_to_upload(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        machine = Machine(A, "127.0.9.2", tmp_path, w.url)
        machine.before = "from spotrun.node import part_uploader; part_uploader.PAUSE = (3600.0, 3600.0)"
        machine.metadata.change(preempted="TRUE")
        w.machines.append(machine)
        await machine.start()
        await w.head.wait(A, lambda r: r.notice and r.report.phase == "ready", "the notice")
        bundle = w.bundle()
        folder = machine.tmpfs / bundle.id / "slots"
        folder.mkdir(parents=True)
        data = slots.data_path(folder, 0)
        data.write_bytes(shards.header(shards.layout([("weight", "F32", (4,))])) + bytes(16))
        slots.commit(folder, 0, slots.Record(bundle.id, 1, 5, *slots.digest(data), {}))
        bucket = Path(w.url) / "jobs" / bundle.id
        bucket.mkdir(parents=True)
        (bucket / "checkpoints").write_text("a file where a folder has to be")
        upload = {"upload": StateRef(generation=1, step=5), "save": SaveOrder(step=5, index=0, parts=1)}
        await w.head.order(A, order_of(bundle, **upload))
        await w.head.wait(A, lambda r: r.trouble and r.trouble.tries >= 3, "three failures")
        (bucket / "checkpoints").unlink()
        await w.head.wait(A, lambda r: r.parts, "the part")


async def test_the_agent_waits_for_all_it_needs(tmp_path: Path) -> None:
    async with world(tmp_path, head=False) as w:
        machine = Machine(A, "127.0.9.2", tmp_path, tmp_path / "bucket")
        bucket = machine.metadata.attributes.pop("spotrun-bucket")
        w.machines.append(machine)
        await machine.start()
        await await_for(lambda: "the machine's metadata has no spotrun-bucket" in machine.log, what="a complaint")
        machine.metadata.attributes["spotrun-bucket"] = bucket
        await await_for(lambda: "there is no clusters/test/head.json" in machine.log, what="another")
        await w.head.start()
        await w.head.wait(A, lambda r: r.phase == "idle", "a report")
