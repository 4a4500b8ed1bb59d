"""The operator's side: strict SSH, exit statuses, what is shown, faults; against a stand-in head over real SSH."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import asyncssh
import pytest
from aiohttp import web
from rich.console import Console

from scripts import control, display, faults, jobs, logs, queue, report, ssh
from scripts import site as sites
from scripts.columns import duration
from scripts.make_command import LOCAL, here, make_command
from scripts.transports import Direct
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError, StoreError
from spotrun.head.head import Head
from spotrun.head.job_state import JobState
from spotrun.head.server import control as head_control
from spotrun.head.server import ctl
from spotrun.spec import ClusterSpec, load_cluster
from spotrun.store import Store, host_key, job_key, log_key, queue_key
from tests.fakes.cluster import Machines, machines
from tests.helpers import await_for, wait_for
from tests.scripts.statuses import FAILURE, status

ROOT = Path(__file__).parents[2]


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


SUCCEEDED = {"phase": "succeeded", "step": 100, "ended": 190.0, "goodput": 0.912, "samples_per_second": 0.0}


def fab(standin: Machines, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fabric", words[0], "--cluster", str(standin.cluster), *words[1:]]
    env = {**os.environ, "SPOTRUN_HOME": str(standin.home), "COLUMNS": "120"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, **options)


class Recorder:
    """A display that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.said: list[str] = []

    def show(self, status: Any) -> None:
        self.shown.append(status)

    def say(self, text: str) -> None:
        self.said.append(text)


# SSH


def test_a_known_host_key_opens(standin: Machines) -> None:
    standin.write(status_json=status())
    assert control.ask(standin.access, "status")["cluster"] == "c"


def test_an_unknown_host_key_is_refused(standin: Machines) -> None:
    standin.publish("head")
    with pytest.raises(ssh.Unreachable, match=r"head \(127\.0\.0\.1:\d+\): refused: its host key is unknown"):
        control.ask(standin.access, "status")


def test_a_changed_host_key_is_refused(standin: Machines) -> None:
    standin.publish("head", asyncssh.generate_private_key("ssh-ed25519"))
    with pytest.raises(ssh.Unreachable, match=r"head \(127\.0\.0\.1:\d+\): refused: its host key has changed"):
        control.ask(standin.access, "status")
    assert standin.calls() == []


def test_a_node_is_checked_behind_the_head_too(standin: Machines) -> None:
    outcomes: list[ssh.Outcome] = []
    assert ssh.run(standin.access, ["spot-1", "head"], "echo $((40 + 2))", 30, outcomes.append)
    assert [(each.node, each.output) for each in outcomes] == [("spot-1", "42\n"), ("head", "42\n")]
    standin.publish("spot-1", asyncssh.generate_private_key("ssh-ed25519"))
    outcomes.clear()
    assert not ssh.run(standin.access, ["spot-1"], "true", 30, outcomes.append)
    assert "spot-1" in outcomes[0].output
    assert "its host key has changed" in outcomes[0].output


def test_another_key_does_not_open(standin: Machines, tmp_path: Path) -> None:
    other = tmp_path / "other"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(other))
    access = ssh.Access("c", standin.store, Direct("spotrun", other), tmp_path)
    with pytest.raises(ssh.Unreachable, match="refused user spotrun with key"):
        control.ask(access, "status")


def test_machines_that_are_not_there(standin: Machines) -> None:
    with pytest.raises(SpotrunError, match="spot-9: there is no such machine in cluster c"):
        ssh.read_host(standin.access, "spot-9")
    standin.store.put("clusters/c/hosts/spot-9.json", b'{"node": 3}')
    with pytest.raises(ssh.Unreachable, match=r"spot-9\.json: not a host record"):
        ssh.read_host(standin.access, "spot-9")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", "ssh-ed25519 !!!"),
        ("keys", "ssh-ed25519 AAAAC"),  # no base64 is that long
        ("keys", "ssh-ed25519 AAAA"),
        ("keys", "ssh-rsa AAAAB3NzaC1yc2E=\n* ssh-ed25519 AAAA"),
        ("address", "127.0.0.1\n*"),
    ],
)
def test_a_host_record_with_junk_is_refused(standin: Machines, field: str, value: str) -> None:
    key = host_key("c", "head")
    record = json.loads(standin.store.get(key))
    record[field] = [value] if field == "keys" else value
    standin.store.put(key, json.dumps(record).encode())
    with pytest.raises(ssh.Unreachable, match=r"head.*: "):
        control.ask(standin.access, "status")
    if "\n" in value:
        with pytest.raises(ssh.Unreachable, match=r"hosts/head\.json: not a host record"):
            ssh.shell_command(standin.access, "head")


def test_a_command_that_takes_too_long_is_ended_on_the_node(standin: Machines) -> None:
    outcomes: list[ssh.Outcome] = []
    assert not ssh.run(standin.access, ["head"], "echo began; exec sleep 600", 0.5, outcomes.append)
    assert outcomes[0].code == ssh.EXIT_TIMEOUT
    assert outcomes[0].output == "began\nended after 0.5 s; give it more time with TIMEOUT=\n"


def test_a_host_key_of_another_kind_is_refused(standin: Machines) -> None:
    standin.publish("head", asyncssh.generate_private_key("ecdsa-sha2-nistp256"))
    with pytest.raises(ssh.Unreachable, match="refused: its host key has changed"):
        control.ask(standin.access, "status")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
def test_the_interactive_shell_is_as_strict(standin: Machines) -> None:
    def try_it() -> subprocess.CompletedProcess[str]:
        command = [*ssh.shell_command(standin.access, "spot-1"), "echo", "inside"]
        return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    good = try_it()
    assert (good.returncode, good.stdout) == (0, "inside\n"), good.stderr
    standin.publish(
        "spot-1", asyncssh.generate_private_key("ssh-ed25519")
    )  # now both keys are under the head's address
    (standin.access.scratch / "known_hosts-spot-1").unlink()
    standin.publish("head", asyncssh.generate_private_key("ssh-ed25519"))
    bad = try_it()
    assert bad.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in bad.stderr


# Following


def test_follow_outlives_the_head(standin: Machines) -> None:
    standin.write(follow_1=[status(step=10)], follow_2=[status(step=60), status(**SUCCEEDED)])
    seen = Recorder()
    last = jobs.follow(standin.access, None, seen)
    assert last["job"]["phase"] == "succeeded"
    assert [each["job"]["step"] for each in seen.shown] == [10, 60, 100]
    assert standin.calls() == ["follow", "follow --job digits-1"]
    assert seen.said[0].startswith("the head is away (")


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


@pytest.mark.parametrize("text", ["kill", "kill@", "kill@-1", "freeze@3", "kill@120%", "kill@3 preempt@4", "kill@3,"])
def test_malformed_faults(text: str) -> None:
    with pytest.raises(SpotrunError, match=r"FAULTS: .*allowed: kind@step or kind@share%"):
        faults.parse(text)


def test_shares_wait_until_the_length_is_known() -> None:
    plan = faults.parse("kill@50%")
    job = {"phase": "running", "generation": 1, "step": 60}
    assert faults.due(plan, {**job, "total_steps": 0}, 0) is None
    assert faults.due(plan, {**job, "total_steps": 100}, 0) == plan[0]
    assert faults.parse("none") == []


# What is shown


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
    assert "failures 4, restarts at most 3" in display.text(status(phase="failed", restarts=4)), "it said 4 of 3"


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
        {"kind": "kill", "node": "spot-1", "seconds": None, "steps_lost": None, "at": 2.0, "generation": 2},
    ]
    text = report.report(status(**SUCCEEDED, interruptions=interruptions, generation=3, cost=0.5)["job"])
    assert text.splitlines() == [
        "job digits-1 succeeded: 100 of 100 steps in 1 min 30 s, 3 generations",
        "  last values: loss 0.3123",
        "  interruption  node    seconds to the next step  steps lost",
        "  preempt       spot-2  0.4                       0",
        "  kill          spot-1",
        "  goodput 91.2% (share of node time that went into steps that counted)",
        "  node time 12.0 s, cost $0.50, and where it went is not known",  # a head of version 0.1 does not say
    ]
    failed = report.report(status(phase="failed", reason="ValueError: no", failure=FAILURE)["job"])
    assert "  rank 1 on spot-1: ValueError: no\n    Traceback\n      line\n" in failed
    assert [duration(each) for each in (0, 61, 7260)] == ["0.0 s", "1 min 1 s", "2 h 1 min"]


def test_the_closing_report_says_where_the_node_time_went() -> None:
    times = {"counted": 6.0, "lost": 0.6, "starting": 3.6, "recovery": 0.6, "spare": 1.2, "unfit": 0.0, "napping": 0.0}
    job = status(**SUCCEEDED, node_time=times, snapshot_seconds=0.06)["job"]
    assert report.report(job).splitlines()[-6:] == [
        "  node time 12.0 s, of which:",
        "    50.0%  steps that counted; of it copying snapshots 0.50%",
        "    30.0%  starting: machines boot, are checked, install packages, import torch",
        "    10.0%  idle spares: ready, not needed now",
        "     5.0%  steps lost, and the time until an interruption was noticed",
        "     5.0%  recovery: from an interruption to the next step",
    ]
    newer = report.report({**job, "node_time": {"napping": 12.0}})
    assert newer.endswith("\n   100.0%  napping"), "a kind that this version does not know"


# Logs


def test_logs_are_the_newest_generations(standin: Machines) -> None:
    standin.write(status_json=status(step=1))
    for generation, node, rank in ((1, "spot-0", 0), (2, "spot-1", 0), (2, "spot-0", 1)):
        standin.store.put(log_key("digits-1", generation, node, rank), f"{generation} {rank}\n".encode())
    standin.store.put(log_key("digits-1", 2, "spot-0", "stacks"), b"")

    def found(node: str | None, rank: str | None) -> list[tuple[int, str, str]]:
        return [(log.generation, log.node, log.rank) for log in logs.find(standin.access, None, node, rank)]

    assert found(None, None) == [(2, "spot-1", "0")]
    assert found("spot-0", None) == [(2, "spot-0", "1")]
    assert found(None, "1") == [(2, "spot-0", "1")]
    with pytest.raises(SpotrunError, match="job digits-1: no log of rank 7; there are: spot-0 rank 0, spot-0 rank 1"):
        found(None, "7")
    assert logs.last_words(standin.access, "digits-1") == ["2 0"]


def test_logs_of_a_job_that_the_head_does_not_know(standin: Machines) -> None:
    standin.write(status_json=status(), jobs_json=[{"job": "digits-2", "phase": "succeeded"}])
    standin.store.put(log_key("digits-2", 1, "spot-0", 0), b"")
    assert [log.key for log in logs.find(standin.access, None, None, None)] == [log_key("digits-2", 1, "spot-0", 0)]
    with pytest.raises(SpotrunError, match="there is no job digits-3; `make status` names the newest jobs"):
        logs.find(standin.access, "digits-3", None, None)
    standin.write(jobs_json=[])
    with pytest.raises(SpotrunError, match="no job has run on this cluster yet; `make train` runs one"):
        logs.find(standin.access, None, None, None)


# The head's side of it


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


# The commands, with their exit statuses


def test_commands_succeed(standin: Machines) -> None:
    standin.write(status_json=status(step=1), follow_1=[status(step=50), status(**SUCCEEDED)])
    shown = fab(standin, "status", "--json")
    assert (shown.returncode, json.loads(shown.stdout)) == (0, status(step=1)), shown.stderr
    followed = fab(standin, "follow")
    assert followed.returncode == 0, followed.stderr
    assert "job digits-1 succeeded: 100 of 100 steps" in followed.stdout
    ran = fab(standin, "run", "--cmd", "echo \"$((1 + 1))\" 'a  b'")
    assert (ran.returncode, ran.stdout) == (0, "spot-1: 2 a  b\n"), ran.stderr
    told = fab(standin, "preempt", "--node", "spot-1", "--notice", "5")
    assert (told.returncode, standin.calls()[-1]) == (0, "preempt spot-1 --notice 5"), told.stderr


def test_a_failed_job_or_command_is_status_1(standin: Machines) -> None:
    standin.write(follow_1=[status(phase="failed", reason="ValueError: no", ended=120.0, failure=FAILURE)])
    followed = fab(standin, "follow")
    assert followed.returncode == 1
    assert "rank 1 on spot-1: ValueError: no" in followed.stdout
    assert fab(standin, "run", "--cmd", "exit 3", "--node", "head").returncode == 1


def test_a_users_mistake_is_status_2_and_one_line(standin: Machines) -> None:
    standin.write(refuse="spotrun: there is no node x-1; there are spot-0, spot-1")
    refused = fab(standin, "kill", "--node", "x-1")
    assert (refused.returncode, refused.stderr) == (2, "spotrun: there is no node x-1; there are spot-0, spot-1\n")
    unnamed = fab(standin, "kill")
    listing = make_command(str(standin.cluster), "status")
    assert (unnamed.returncode, unnamed.stderr) == (
        2,
        f"spotrun: NODE is missing: name a node, such as NODE=spot-0; `{listing}` lists them\n",
    )
    standin.cluster.write_text("name: c\ncloud: locl\npools: []\n")
    wrong = fab(standin, "status")
    assert wrong.returncode == 2
    assert (
        "cluster.yaml:2: cloud: 'locl': is not allowed; allowed: local, gcp, aws; did you mean local?" in wrong.stderr
    )
    assert "Traceback" not in refused.stderr + unnamed.stderr + wrong.stderr


def test_what_is_out_of_reach_is_status_3(standin: Machines) -> None:
    standin.publish("head", asyncssh.generate_private_key("ssh-ed25519"))
    changed = fab(standin, "status")
    assert changed.returncode == 3
    assert "its host key has changed" in changed.stderr
    shutil.rmtree(standin.home)
    away = fab(standin, "stop")
    bring = make_command(str(standin.cluster), "up")
    assert (away.returncode, away.stderr) == (3, f"spotrun: cluster c is not up; `{bring}` brings it up\n")


def test_train_finds_mistakes_before_anything_is_brought_up(standin: Machines) -> None:
    job = standin.folder / "job.yaml"
    job.write_text("script: train.py\nnodes: {min: 3}\n")
    missing = fab(standin, "train", "--job", str(job))
    assert (missing.returncode, "script: 'train.py': there is no such file in" in missing.stderr) == (2, True)
    (standin.folder / "train.py").touch()
    large = fab(standin, "train", "--job", str(job))
    assert (large.returncode, "cluster c has at most 2 nodes" in large.stderr) == (2, True)
    odd = fab(standin, "train", "--job", str(job), "--faults", "boom@3")
    assert (odd.returncode, "FAULTS: 'boom@3': allowed:" in odd.stderr) == (2, True)
    assert standin.calls() == []


def test_submitting_sends_job_and_code(standin: Machines) -> None:
    (standin.folder / "work").mkdir()
    (standin.folder / "work/train.py").write_text("print()\n")
    (standin.folder / "work/job.yaml").write_text("script: train.py\nenv: {A: 1}\n")
    spec = ClusterSpec(name="c", cloud="local", pools=({"name": "p", "zone": "local-a"},))
    said: list[str] = []
    assert jobs.submit(standin.access, spec, str(standin.folder / "work/job.yaml"), said.append) == "digits-1"
    sent = json.loads((standin.folder / "submitted").read_text())
    assert sent["job"]["env"] == {"A": "1"}
    assert standin.store.exists(f"code/{sent['code']}.tar.zst")
    assert said[-1] == "job digits-1 submitted"


def test_down_refuses_while_a_job_runs(standin: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(standin.home))
    jobs_json = [{"job": "digits-0", "phase": "failed"}, *({"job": f"digits-{n}", "phase": "queued"} for n in (1, 2))]
    standin.write(jobs_json=jobs_json)
    spec = sites.load(str(standin.cluster))
    many = [{"job": f"digits-{n}", "phase": "running"} for n in range(40)]
    for found, said in [
        (jobs_json[:2], "not ended yet: digits-1; `make stop` saves a job's state"),
        (many, "digits-0, digits-1, digits-2, digits-3, digits-4, 35 more; `make stop ID=digits-0` saves a job's"),
        (jobs_json, "not ended yet: digits-1, digits-2; `make stop ID=digits-1` saves a job's state"),
    ]:
        standin.write(jobs_json=found)
        with pytest.raises(SpotrunError, match=said):
            sites.take_down(sites.site(spec), force=False)
    proposed = r"`make stop CLUSTER=my\.yaml ID=digits-1` .* `make down CLUSTER=my\.yaml FORCE=1`"
    with pytest.raises(SpotrunError, match=proposed):
        sites.take_down(sites.site(spec, "my.yaml"), force=False)
    standin.store.delete([host_key("c", "head")])
    assert "is down" in sites.take_down(sites.site(spec), force=False), "no job runs where no head came up"


def test_down_refuses_while_a_failed_job_keeps_a_node(standin: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(standin.home))
    spec = sites.load(str(standin.cluster))
    kept = {"job": "digits-0", "phase": "failed", "kept": {"node": "spot-1", "until": 1.0}}
    lets_go = "digits-0 has failed and keeps node spot-1 for SSH; `make stop ID=digits-0` lets it go"
    for found, said in [
        ([kept], f"cluster c: {lets_go}, `make down FORCE=1` ends it at once"),
        (
            [kept, {"job": "digits-1", "phase": "queued"}],
            "cluster c: not ended yet: digits-1; `make stop` saves a job's state and stops it;"
            f" {lets_go}, `make down FORCE=1` ends all at once",
        ),
    ]:
        standin.write(jobs_json=found)
        with pytest.raises(SpotrunError) as caught:
            sites.take_down(sites.site(spec), force=False)
        assert str(caught.value) == said


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"phase": "failed", "kept_node": {"member": {"node": "spot-1"}}}, [control.Unfinished("a", "spot-1")]),
        ({"phase": "failed", "kept_node": None}, []),
        ({"phase": "failed"}, []),
        ({"phase": "failed", "kept_node": "spot-1"}, [control.Unfinished("a")]),
        ({"phase": "running"}, [control.Unfinished("a")]),
    ],
    ids=["a kept node", "no kept node", "of an older version", "of an unknown version", "running"],
)
def test_the_bucket_says_what_a_cluster_without_a_head_still_has(
    tmp_path: Path, state: dict[str, object], found: list[control.Unfinished]
) -> None:
    store = Store(str(tmp_path))
    store.put(queue_key("c"), b'["a"]')
    store.put(job_key("a", "state.json"), json.dumps(state).encode())
    assert queue.unfinished(store, "c", "make down FORCE=1") == found


def test_hints_name_the_cluster() -> None:
    assert make_command(LOCAL, "stop") == "make stop"
    assert make_command("a b.yaml", "down", "FORCE=1") == "make down CLUSTER='a b.yaml' FORCE=1"
    said = "job x is held; `make relaunch ID=x` continues it, `make stop` does not"
    assert here(said, LOCAL) == said
    again = "`make relaunch CLUSTER=gcp.yaml ID=x`"
    assert here(said, "gcp.yaml") == f"job x is held; {again} continues it, `make stop CLUSTER=gcp.yaml` does not"
    assert here(here(said, "gcp.yaml"), "gcp.yaml") == here(said, "gcp.yaml")
    parked = {"job": "y", "text": "y is not readable; `make stop ID=y`"}
    shown = display.text({**status(), "held": ["x"], "parked": parked}, file="gcp.yaml")
    assert again in shown
    assert "`make stop CLUSTER=gcp.yaml ID=y`" in shown


def test_a_heads_refusal_names_the_cluster(standin: Machines) -> None:
    standin.write(refuse="spotrun: job x is held; `make relaunch ID=x` continues it")
    done = fab(standin, "stop")
    assert done.returncode == 2
    assert (
        done.stderr
        == f"spotrun: job x is held; `{make_command(str(standin.cluster), 'relaunch', 'ID=x')}` continues it\n"
    )


def test_control_c_detaches(standin: Machines) -> None:
    standin.write(follow_1=[status(step=10)], hang="")
    with interruptible(standin, "follow") as process:
        assert process.stdout is not None
        assert "spot-1 joined" in process.stdout.readline()
        said = interrupted(process)
        assert "detached; the job goes on. Follow it again with: make follow CLUSTER=" in said


@pytest.mark.parametrize("program", ["fabric", "scripts.fab"])
def test_control_c_shows_no_traceback_while_modules_load(standin: Machines, tmp_path: Path, program: str) -> None:
    """The modules load in the first second of a command. The Makefile calls `scripts.fab`."""
    loading = tmp_path / "loading"
    slow = tmp_path / "modules/spotrun/__init__.py"  # the first of spotrun's own modules, as slow as on a cold disk
    slow.parent.mkdir(parents=True)
    slow.write_text(f"import time\nopen({str(loading)!r}, 'w').close()\ntime.sleep(60)\n")
    paths = {"PYTHONPATH": str(tmp_path / "modules")}
    with interruptible(standin, "status", program=program, **paths) as process:
        wait_for(loading.exists, what="the modules to load")
        assert interrupted(process) == ""


def test_control_c_ends_a_run(standin: Machines) -> None:
    """It does not wait until the commands end, which may take as long as TIMEOUT."""
    for node in ("spot-1", "head"):
        file = standin.folder / node
        command = f"touch {file}; while [ -e {file} ]; do sleep 0.1; done"
        words = ("--node", node, "--timeout", "3600", "--cmd", command)
        with interruptible(standin, "run", *words) as process:
            wait_for(file.exists, what="the command's begin")
            said = interrupted(process)
            assert "run: interrupted; the command may still run there, for at most 3600 s" in said
        file.unlink()  # it does: here it ends


def test_an_output_that_does_not_end_in_time_is_reported_in_a_line(
    standin: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "GRACE", 0.3)
    outcomes: list[ssh.Outcome] = []
    assert not ssh.run(standin.access, ["head"], "setsid sleep 5 & echo y", 0.2, outcomes.append)
    text = "its output did not end 0.3 s after TIMEOUT=0.2; write a large output to a file\n"
    assert outcomes == [ssh.Outcome("head", 255, text, reached=False)]


def test_an_output_is_shown_as_it_comes_and_only_its_end_is_kept(
    standin: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output may be larger than the operator's memory."""
    monkeypatch.setattr(ssh, "KEPT", 1000)
    gate = tmp_path / "gate"
    received: list[str] = []

    def take(node: str, text: str) -> None:
        received.append(text)
        gate.touch()  # the command goes on once its first line has come

    outcomes: list[ssh.Outcome] = []
    command = f"echo first; while [ ! -e {gate} ]; do sleep 0.05; done; seq 100000; printf '%s' no end >&2"
    assert ssh.run(standin.access, ["head"], command, 60, outcomes.append, take)
    whole = "first\n" + "".join(f"{number}\n" for number in range(1, 100_001)) + "no"
    assert "".join(received).startswith(whole)
    assert all(len(each) <= 2 * ssh.LINE for each in received)
    assert outcomes[0].output == "".join(received)[-1000:]
    assert outcomes[0].left_out == len("".join(received)) - 1000


@contextlib.contextmanager
def interruptible(
    standin: Machines, task: str, *words: str, program: str = "fabric", **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A task as it runs at a terminal, wherever the tests run: Ctrl-C reaches it."""
    command = [sys.executable, "-m", program, task, "--cluster", str(standin.cluster), *words]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "SPOTRUN_HOME": str(standin.home), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str]) -> str:
    """What the task says when it is interrupted."""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    wait_for(lambda: process.poll() is not None, what="the interrupted command's end")
    assert process.returncode == 130
    said = process.stderr.read()
    assert "Traceback" not in said
    return said
