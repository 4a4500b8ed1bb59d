"""Following a job, and the faults that are planned for it, against a stand-in head over real SSH."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from scripts import control, faults, jobs, ssh
from scripts import site as sites
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError, StoreError
from spotrun.head.head import Head
from spotrun.head.job_state import JobState
from spotrun.head.server import control as head_control
from spotrun.head.server import ctl
from spotrun.spec import ClusterSpec, load_cluster
from spotrun.store import Store, job_key
from tests.fakes.cluster import Machines
from tests.helpers import await_for
from tests.scripts.commands import fab
from tests.scripts.statuses import SUCCEEDED, status


class Recorder:
    """A display that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.said: list[str] = []

    def show(self, status: Any) -> None:
        self.shown.append(status)

    def say(self, text: str) -> None:
        self.said.append(text)


def test_follow_outlives_the_head(standin: Machines) -> None:
    standin.write(follow_1=[status(step=10)], follow_2=[status(step=60), status(**SUCCEEDED)])
    seen = Recorder()
    last = jobs.follow(standin.access, None, seen)
    assert last["job"]["phase"] == "succeeded"
    assert [each["job"]["step"] for each in seen.shown] == [10, 60, 100]
    assert standin.calls() == ["follow", "follow --job digits-1"]
    assert seen.said[0].startswith("the head is away (")


def test_a_log_gets_lines_whatever_rich_is_told(standin: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that is redrawn five times a second fills the log of a CI job, and shows no event that was before."""
    standin.write(follow_1=[status(step=50), status(**SUCCEEDED)])
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    done = fab(standin, "follow")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "progress    digits-1 running" in done.stdout


def test_follow_ends_when_the_cluster_is_taken_down(standin: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would wait three minutes for the head, and say that training goes on."""
    monkeypatch.setenv("SPOTRUN_HOME", str(standin.home))
    standin.write(follow_1=[status(step=10)], follow_2=[status(step=60)])
    layout = Layout.of(standin.home, "c")

    class Down(Recorder):
        def show(self, status: Any) -> None:
            super().show(status)
            layout.record.unlink()

    look = sites.site(load_cluster(standin.cluster), str(standin.cluster)).access
    look()
    seen = Down()
    with pytest.raises(ssh.Unreachable, match="cluster c is not up; `make up"):
        jobs.follow(standin.access, None, seen, look=look)
    assert seen.said == []


def test_follow_outlives_a_bucket_that_is_away(standin: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.write(follow_1=[status(step=10)], follow_2=[status(**SUCCEEDED)])
    find, asked = Store.find, 0

    def flaky(store: Store, key: str) -> bytes | None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise StoreError("the bucket is away")
        return find(store, key)

    monkeypatch.setattr(Store, "find", flaky)
    assert jobs.follow(standin.access, None, Recorder())["job"]["phase"] == "succeeded"
    assert asked == 3


def test_a_head_that_says_nothing_is_gone(standin: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.write(follow_1=[status(step=10)], hang="")
    monkeypatch.setattr(control, "SILENCE", 0.5)
    with control.open_head(standin.access) as head, pytest.raises(ssh.Unreachable, match="no answer in time"):
        list(head.follow(None))


def test_faults_take_the_last_member_once_a_generation(standin: Machines) -> None:
    documents = [
        status(step=10),
        status(step=26),
        status(step=70),  # the second is due as well, but the first one's generation still runs
        status(step=70, generation=2, phase="starting"),
        status(step=71, generation=2, members=["spot-1", "spot-0"]),
        status(**SUCCEEDED),
    ]
    standin.write(follow_1=documents)
    seen = Recorder()
    jobs.follow(standin.access, "digits-1", seen, faults.parse("preempt@25%,kill@60"))
    assert standin.calls() == ["follow --job digits-1", "preempt spot-1", "kill spot-0"]
    assert seen.said == [
        "taking spot-1 away: preempt with notice",
        "taking spot-0 away: hard kill, no notice",
    ]


def test_a_refused_fault_is_reported(standin: Machines) -> None:
    standin.write(follow_1=[status(step=90), status(**SUCCEEDED)], refuse="spotrun: there is no node spot-1")
    seen = Recorder()
    jobs.follow(standin.access, None, seen, faults.parse("kill@1"))
    assert seen.said[1] == "could not take spot-1 away: there is no node spot-1"


def test_faults_that_did_not_come_are_named(standin: Machines) -> None:
    """The script may end early. Then a trial of faults has shown nothing."""
    standin.write(follow_1=[status(**SUCCEEDED)])
    seen = Recorder()
    jobs.follow(standin.access, None, seen, faults.parse("preempt@25.5%,kill@600"))
    assert seen.said == ["these faults did not come, because the job ended first: preempt@25.5%, kill@600"]


@pytest.mark.parametrize("text", ["kill", "kill@", "kill@-1", "freeze@3", "kill@120%", "kill@3 preempt@4", "kill@3,"])
def test_malformed_faults(text: str) -> None:
    with pytest.raises(SpotrunError, match=r"FAULTS: .*allowed: kind@step or kind@share%"):
        faults.parse(text)


def test_shares_wait_until_the_length_is_known() -> None:
    plan = faults.parse("kill@50%")
    job = {"phase": "running", "generation": 1, "step": 60, "interruptions": []}
    assert faults.due(plan, {**job, "total_steps": 0}, 0) is None
    assert faults.due(plan, {**job, "total_steps": 100}, 0) == plan[0]
    assert faults.parse("none") == []


def test_a_fault_waits_until_the_last_interruption_is_over() -> None:
    """One that comes before the next step would be counted with it, in one row of the report."""
    plan = faults.parse("kill@5")
    job = {"phase": "running", "generation": 2, "step": 60, "total_steps": 100}
    assert faults.due(plan, {**job, "interruptions": [{"kind": "grow", "seconds": None}]}, 1) is None
    assert faults.due(plan, {**job, "interruptions": [{"kind": "grow", "seconds": 0.1}]}, 1) == plan[0]


@contextlib.asynccontextmanager
async def new_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Head]:
    """A head that has just begun, behind its control socket."""
    spec = ClusterSpec(name="c", cloud="local", pools=({"name": "p", "zone": "local-a"},))
    head = Head(spec, Store(str(folder / "bucket")), cast(Any, None), 1)
    monkeypatch.setenv("SPOTRUN_TMPFS", str(folder))
    runner = web.AppRunner(head_control.ControlServer(head).app())
    await runner.setup()
    await web.UnixSite(runner, str(ctl.control_path())).start()
    try:
        yield head
    finally:
        await runner.cleanup()


async def ctl_(*words: str) -> int:
    parser = argparse.ArgumentParser()
    ctl.add_parser(parser.add_subparsers())
    return await ctl._run(parser.parse_args(["ctl", *words]))


def ended(head: Head, job: str, name: str = "c") -> JobState:
    spec = {"name": "toy", "script": "train.py"}
    state = JobState(id=job, name="toy", cluster=name, code="", spec=spec, submitted=1, ordered_at=1, phase="stopped")
    head.store.put(job_key(job, "state.json"), state.model_dump_json().encode())
    return state


async def test_a_new_head_names_the_newest_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    async with new_head(tmp_path, monkeypatch) as head:
        for verb in ("relaunch", "follow"):
            with pytest.raises(SpotrunError, match="no job has run on this cluster yet"):
                await ctl_(verb)
        for job in ("b-20260101-000000", "a-20260102-000000", "a-20260102-000000-2", "a-20260102-000000-10"):
            ended(head, job)
        ended(head, "c-20260103-000000", "another")
        head.store.put(job_key("d-20260103-000000", "state.json"), b"junk")
        ids = ["a-20260102-000000-10", "a-20260102-000000-2", "a-20260102-000000", "b-20260101-000000"]
        for verb in ("relaunch", "follow"):
            with pytest.raises(SpotrunError, match="since this head began; name one of these: " + ", ".join(ids)):
                await ctl_(verb)
        assert await ctl_("jobs") == 0
        assert [each["job"] for each in json.loads(capfdbinary.readouterr().out)] == ids


async def test_a_follower_gets_signs_of_life_from_a_head_without_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(head_control, "ALIVE_EVERY", 0.1)
    async with new_head(tmp_path, monkeypatch) as head:
        ended(head, "a-20260102-000000")
        following = asyncio.create_task(ctl_("follow", "--job", "a-20260102-000000"))
        out = bytearray()

        def said() -> bool:
            out.extend(capfdbinary.readouterr().out)
            return out.count(b"\n") > 2

        await await_for(said, what="a status and two signs of life")
        following.cancel()
        first, *others = bytes(out).splitlines()
        assert json.loads(first)["job"]["id"] == "a-20260102-000000"
        assert others[:2] == [b"", b""]
        assert set(others) == {b""}


async def test_a_head_that_cannot_answer_is_not_reported_as_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreError("the bucket is away")

    async def cut(_: head_control.ControlServer, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with new_head(tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(Store, "find", away)
            with pytest.raises(SpotrunError, match=r"^the head does not answer: the bucket is away"):
                await ctl_("follow", "--job", "a")
    monkeypatch.setattr(head_control.ControlServer, "_follow", cut)
    async with new_head(tmp_path, monkeypatch):
        with pytest.raises(SpotrunError, match=r"^the head does not answer on "):
            await ctl_("follow")
