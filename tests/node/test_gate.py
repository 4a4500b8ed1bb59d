"""The health gate: real agents connect before it has passed. What it does to their disk and the bucket."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spotrun.machine import gpus
from spotrun.machine.metadata import Identity, detect
from spotrun.machine.systemd import Systemd
from spotrun.node import network
from spotrun.node.agent import Agent, Settings
from spotrun.node.boot import _identify
from spotrun.node.health import gate, verdict
from spotrun.node.health.gate import Gate, check
from spotrun.node.health.verdict import Facts, Gpu
from spotrun.store import Store, checkpoint_key, host_key, unfit_key
from spotrun.wire import Order, Report, SaveOrder, UnfitRecord
from tests.fakes.head import FakeMetadata
from tests.fakes.node import Machine, World, changed, order_of, world
from tests.helpers import await_for

A = "node-a"
SMALL = Facts("e2-small", disk=1 << 40)
# An agent that looks again and again before its verdict, or after it, with next to no pause.
EVER_CHECKING = "from spotrun.node.health import gate; gate.PAUSES, gate.LONGEST = (0.05,) * 10**5, 3600.0"
SOON_AGAIN = "from spotrun.node.health import gate; gate.PAUSES, gate.AGAIN = (), 0.05"


async def test_what_passes_is_no_problem() -> None:
    seen = iter([replace(SMALL, clock=9.0), SMALL])

    async def look(until: float) -> Facts:
        return next(seen)

    assert await check(look, (0.0, 0.0), 60) == ()
    seen = iter([replace(SMALL, clock=9.0)] * 3)
    assert await check(look, (0.0, 0.0), 60) == ("the clock is 9 s ahead of the cloud's",)
    assert list(seen) == []


async def test_gpus_get_a_minute_to_register_with_their_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile each look takes as long as on an H200 (bench/RESULTS.md)."""
    now = 0.0
    facts = Facts("p5.48xlarge", smi=tuple(Gpu(index, "NVIDIA H100") for index in range(8)))

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def look(until: float) -> Facts:
        began = now
        await sleep(5.4)
        return facts if began >= 60 else replace(facts, product_error="CUDA error: system not yet initialized")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert await check(look, gate.PAUSES, gate.LONGEST) == ()


async def test_all_tries_share_one_deadline() -> None:
    given: list[float] = []

    async def look(until: float) -> Facts:
        given.append(until)
        if len(given) == 2:
            # A look that takes all of the time that is left, and the deadline is real.
            await asyncio.sleep(until - asyncio.get_running_loop().time())
        return replace(SMALL, clock=9.0)

    assert await check(look, (0.0,) * 10, 0.5) == ("the clock is 9 s ahead of the cloud's",)
    assert len(given) == 2
    assert given[0] == given[1]
    assert await check(look, (60.0,), 30) != (), "a pause that leaves no time is not begun"
    assert len(given) == 3


def machine(w: World, root: Path, before: str = "") -> Machine:
    """One that is not started yet; without a scratch folder it is not fit."""
    found = Machine(A, "127.0.9.2", root, root / "bucket")
    found.before = before
    w.machines.append(found)
    return found


def spoil(found: Machine) -> None:
    found.scratch.parent.mkdir(parents=True, exist_ok=True)
    found.scratch.write_text("in the folder's place")


async def test_what_goes_on_while_the_gate_does(tmp_path: Path) -> None:
    """Host keys, the connection and notices do not wait for the gate. An order waits until the checks have passed."""
    async with world(tmp_path) as w:
        found = machine(w, tmp_path, EVER_CHECKING)
        spoil(found)
        bundle = w.bundle("--steps", "3")
        await found.start()
        await w.head.wait(A, lambda r: r.phase == "checking", "that it checks")
        await await_for(lambda: w.store.find(host_key("test", A)), what="host keys")
        found.metadata.change(preempted="TRUE")
        await w.head.wait(A, lambda r: r.notice and r.phase == "checking", "the notice")
        found.metadata.change(preempted="FALSE")
        await w.head.order(A, order_of(bundle))
        before = len(w.head.history)
        await await_for(lambda: len(w.head.history) > before + 3, what="reports since the order")
        assert {(r.phase, r.jobs, r.unfit) for r in w.head.history} == {("checking", (), ())}
        assert len(found.processes()) == 1  # no launcher
        assert "workers' environment" not in found.log

        found.scratch.unlink()
        await w.ready(bundle, [A])
        assert next(r.jobs[0].phase for r in w.head.history if r.jobs) == "preparing"
        assert found.log.count("workers' environment: GLOO_SOCKET_IFNAME=lo") == 1
        await w.begin(bundle, 1, [A])
        await w.phase([A], 1, "succeeded")
        assert w.store.find(unfit_key("test", A)) is None


NO_ROOM = "from spotrun.node.health import verdict; gate.DISK = verdict.DISK = 1 << 62"


@pytest.mark.parametrize(("pace", "phase"), [(EVER_CHECKING, "checking"), (SOON_AGAIN, "unfit")])
async def test_a_state_is_not_lost_with_the_fitness(tmp_path: Path, pace: str, phase: str) -> None:
    """An agent that starts again says at once what it holds, and saves it, though it takes no job."""
    async with world(tmp_path) as w:
        found = machine(w, tmp_path)
        await found.start()
        bundle = w.bundle()
        await w.ready(bundle, [A])
        order = await w.begin(bundle, 1, [A])
        (stepping,) = await w.steps([A], 1, 3)
        await w.head.order(A, changed(order, stop_at=stepping.workers[0].step + 300))
        await w.head.wait(A, lambda r: r.phase == "drained" and r.snapshot, "a snapshot")
        await found.kill()

        w.head.history.clear()
        found.before = f"{pace}; {NO_ROOM}"
        await found.start()
        report = await w.head.wait(A, lambda r: r.phase == phase and r.snapshot, "what it holds")
        assert report.job == bundle.id
        assert all(r.jobs[0].snapshot for r in w.head.history if r.node == A), "from its first word on"
        ref = report.snapshot
        assert ref is not None
        assert ref.generation == 1
        save = SaveOrder(step=ref.step, index=0, parts=1)
        await w.head.order(A, order_of(bundle, upload=ref, save=save))
        report = await w.head.wait(A, lambda r: r.parts, "its part in the bucket")
        assert (report.phase, report.parts[0].step) == (phase, ref.step)
        assert w.store.exists(checkpoint_key(bundle.id, ref.step, report.parts[0].files[0].name))
        assert len(found.processes()) == 1, "no launcher"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_an_agent_that_ends_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    hanging_driver(tmp_path / "bin", monkeypatch)
    async with world(tmp_path) as w:
        found = machine(w, tmp_path)
        found.metadata.type = "a2-megagpu-16g"
        await found.start()
        await w.head.wait(A, lambda r: r.phase == "checking", "that it checks")
        await await_for(lambda: len(found.processes()) == 2, what="a program of the gate's")
        assert found.process is not None
        found.process.send_signal(number)
        await found.gone()
        assert found.process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL)


def hanging_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


async def test_an_unfit_machine_says_so_and_takes_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nvidia-smi fails; the gate's own pauses are waited for, as on a machine."""
    hanging_driver(tmp_path / "bin", monkeypatch)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'no driver'; exit 9\n")
    async with world(tmp_path) as w:
        found = machine(w, tmp_path)
        found.metadata.attributes["spotrun-gpus"] = "4"
        bundle = w.bundle()
        await found.start()
        report = await w.head.wait(A, lambda r: r.phase == "unfit", "that it is not fit")
        why = "this machine should have 4 GPUs, but nvidia-smi does not list them: no driver"
        assert report.unfit == (why,)
        record = UnfitRecord.model_validate_json(
            await await_for(lambda: w.store.find(unfit_key("test", A)), what="a record")
        )
        assert (record.node, record.boot, record.type, record.problems) == (A, report.boot, "small", (why,))
        assert f"this machine takes no job: {why}" in found.log
        await w.head.order(A, order_of(bundle))
        before = len(w.head.history)
        await await_for(lambda: len(w.head.history) > before + 2, what="reports since the order")
        assert phases(w.head.history) == ["checking", "unfit"]
        assert {r.jobs for r in w.head.history} == {()}
        assert len(found.processes()) == 1  # no launcher


def phases(history: list[Report]) -> list[str]:
    return [r.phase for n, r in enumerate(history) if n == 0 or history[n - 1].phase != r.phase]


async def test_a_machine_that_becomes_fit_takes_its_word_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        found = machine(w, tmp_path, SOON_AGAIN)
        spoil(found)
        await found.start()
        report = await w.head.wait(A, lambda r: r.phase == "unfit", "that it is not fit")
        assert report.unfit[0].startswith("the scratch folder cannot be used: ")
        await await_for(lambda: w.store.exists(unfit_key("test", A)), what="a record")
        await w.head.order(A, order_of(bundle := w.bundle()))
        found.scratch.unlink()
        await w.ready(bundle, [A])
        await await_for(lambda: not w.store.exists(unfit_key("test", A)), what="the record's end")
        assert w.head.reports[A].unfit == ()
        assert "this machine is fit now" in found.log


async def test_what_one_before_it_has_written_goes(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        stale = UnfitRecord(
            node=A, boot="b", pool="pool", zone="z", type="t", machine="m", at=time.time(), problems=("no driver",)
        )
        w.store.put(unfit_key("test", A), stale.model_dump_json().encode())
        await machine(w, tmp_path).start()
        await w.head.wait(A, lambda r: r.phase == "idle", "that it is fit")
        await await_for(lambda: not w.store.exists(unfit_key("test", A)), what="the record's end")


ATTRIBUTES = {"spotrun-cluster": "test", "spotrun-bucket": "b", "spotrun-pool": "p"}


def agent(root: Path) -> tuple[Agent, Settings]:
    settings = Settings(root / "tmpfs", root / "scratch", 22, "")
    identity = Identity("n", "z", "127.0.9.2", "n", type="small")
    return Agent(settings, identity, ATTRIBUTES, Store(str(root / "bucket")), Systemd()), settings


async def look(root: Path, found: Agent, settings: Settings, **attributes: str) -> Facts:
    metadata = FakeMetadata("gce", {})
    place = await metadata.start()
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("GCE_METADATA_HOST", place)
            patched.delenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", raising=False)
            async with await detect() as server:
                until = asyncio.get_running_loop().time() + 60
                return await Gate(found, settings, server, attributes)._probe(until)
    finally:
        await metadata.stop()


KEPT = ("code/mine/train.py", "logs/job-1/0001/0.log", "packages/abc/module.py")
OLD = ("code/other/train.py", "logs/job-0/0001/0.log")


@pytest.mark.parametrize(
    ("short", "ordered", "left"),
    [
        (False, False, (*KEPT, *OLD)),
        (True, False, (*KEPT, *OLD)),  # it may all be of the job that goes on
        (True, True, KEPT[:2]),
    ],
)
async def test_what_is_left_over_makes_no_machine_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool, ordered: bool, left: tuple[str, ...]
) -> None:
    found, settings = agent(tmp_path)
    mine = "a" * 64
    names = (*KEPT, *OLD)
    for name in names:
        path = settings.scratch / name.replace("mine", mine)
        path.parent.mkdir(parents=True)
        path.write_text("x")
    memory = settings.tmpfs / "job-0" / "slots" / "0"
    memory.parent.mkdir(parents=True)
    memory.write_text("the only copy of a state")
    if ordered:
        bundle = {"id": "job-1", "code": mine, "job": {}}
        found.obey(Order.model_validate({"epoch": 1, "bundle": bundle}))
    if short:
        for module in (verdict, gate):
            monkeypatch.setattr(module, "DISK", 1 << 62)
    facts = await look(tmp_path, found, settings)
    assert bool(verdict.judge(facts)) == short
    there = {str(path.relative_to(settings.scratch)) for path in settings.scratch.rglob("*") if path.is_file()}
    assert there == {name.replace("mine", mine) for name in left}
    assert memory.exists()


async def test_what_workers_are_told_is_what_there_is_when_the_gate_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's device files may come after the agent."""
    count = 0
    for module in (gpus, network):
        monkeypatch.setattr(module, "gpu_count", lambda: count)
    found, _ = agent(tmp_path)
    count = 8
    found.set_problems(("no driver",))
    assert (found._node.devices, found._node.environment) == (1, {})
    found.set_problems(())
    assert (found._node.devices, found._node.environment["NCCL_SOCKET_IFNAME"]) == (8, "=lo")


@pytest.mark.parametrize("flavour", ["gce", "ec2"])
async def test_the_metadata_say_what_there_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavour: str
) -> None:
    metadata = FakeMetadata(flavour, {**ATTRIBUTES, "spotrun-gpus": "4"})
    place = await metadata.start()
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.delenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", raising=False)
    variable = "GCE_METADATA_HOST" if flavour == "gce" else "AWS_EC2_METADATA_SERVICE_ENDPOINT"
    monkeypatch.setenv(variable, place if flavour == "gce" else f"http://{place}/")
    async with await detect() as server:
        _, attributes = await _identify(server)
    await metadata.stop()
    unset = dict.fromkeys(("spotrun-efas", "spotrun-preempt-notice", "spotrun-maintenance-notice"), "")
    assert attributes == {**ATTRIBUTES, "spotrun-gpus": "4", **unset}


@pytest.mark.parametrize(
    ("gpus", "efas", "expected"),
    [("4", "", (4, 0)), ("8", "32", (8, 32)), ("", "", (0, 0)), ("-1", "many", (0, 0)), ("9" * 5000, "1.5", (0, 0))],
)
async def test_junk_in_the_metadata_is_passed_over(
    tmp_path: Path, gpus: str, efas: str, expected: tuple[int, int]
) -> None:
    found, settings = agent(tmp_path)
    facts = await look(tmp_path, found, settings, **{"spotrun-gpus": gpus, "spotrun-efas": efas})
    assert (facts.gpus, facts.efas) == expected
