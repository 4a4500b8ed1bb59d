"""The operator's commands as processes: exit statuses, messages, Ctrl-C; against a stand-in head over real SSH."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from scripts import candidates, control, display, jobs, queue
from scripts import site as sites
from scripts.local_site import LocalSite
from scripts.make_command import LOCAL, here, make_command
from scripts.ssh import Access, Unreachable
from spotrun.cloud.local import cloud as local_cloud
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.store import Store, host_key, job_key, queue_key
from tests.fakes.cluster import Machines
from tests.helpers import wait_for
from tests.scripts.commands import fab, interrupted, interruptible
from tests.scripts.statuses import FAILURE, SUCCEEDED, status


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
    many = fab(standin, "profile", "--steps", "1001")
    assert (many.returncode, many.stderr) == (
        2,
        "spotrun: STEPS: '1001': allowed: a whole number from 1 to 1000\n",
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


def small_job(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    (folder / "job.yaml").write_text("script: train.py\n")
    return folder / "job.yaml"


SPEC = ClusterSpec(name="c", cloud="local", pools=({"name": "p", "zone": "local-a"},))


def test_a_lost_answer_may_mean_a_job(standin: Machines) -> None:
    """The head has the job, and the connection breaks before its answer. A second `make train` would cost twice."""
    path = small_job(standin.folder / "work")
    standin.write(die="")
    with pytest.raises(
        Unreachable, match="the head may have got the job; before you submit it again, look: `make jobs`"
    ):
        jobs.submit(standin.access, SPEC, str(path), print)
    assert (standin.folder / "submitted").exists()


def test_without_a_head_there_is_no_job(standin: Machines) -> None:
    path = small_job(standin.folder / "work")
    standin.write(refuse="spotrun: no head runs on this machine (there is no /run/spotrun/head.sock)")
    with pytest.raises(Unreachable, match="no head runs on this machine") as caught:
        jobs.submit(standin.access, SPEC, str(path), print)
    assert "may have got the job" not in str(caught.value)


def test_a_measurement_that_nobody_reads_does_not_train_on(
    standin: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make advise MEASURE=2m | head`: the job costs money until it is stopped, and nobody knows of it."""
    path = small_job(standin.folder / "work")

    class Up(LocalSite):
        def ready(self) -> control.Status:
            return {}

        def access(self) -> Access:
            return standin.access

    def refuse(text: str) -> None:
        standin.write(refuse="spotrun: not now")
        raise BrokenPipeError(text)

    with pytest.raises(BrokenPipeError, match="measuring on pool p for 60 s: job digits-1"):
        candidates.measure(Up(SPEC, "clusters/local.yaml"), str(path), 60.0, refuse)
    assert "stop --job digits-1" in standin.calls()
    said = "job digits-1 may still run, and cost money; stop it with `make stop ID=digits-1`: not now"
    assert said in capsys.readouterr().err


def test_control_c_while_a_job_is_submitted_says_so(standin: Machines) -> None:
    standin.write(slow="")
    code = "import sys; from scripts import control, site; control.submit(site.of_file(sys.argv[1]).access(), {})"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(standin.cluster)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "SPOTRUN_HOME": str(standin.home)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_for((standin.folder / "submitted").exists, what="the head to get the job")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    (standin.folder / "slow").unlink()
    jobs_of = make_command(str(standin.cluster), "jobs")
    assert f"interrupted; the head may have got the job; before you submit it again, look: `{jobs_of}`" in said


def test_a_folder_that_changes_while_its_job_is_submitted(standin: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be sent is refused before the head has the job, or not at all: after that, the job runs."""
    path = small_job(standin.folder / "work")
    submit = control.submit

    def slow(*words: Any) -> str:
        (path.parent / ".env").write_text("TOKEN=x\n")  # meanwhile, another program writes it
        return submit(*words)

    monkeypatch.setattr(control, "submit", slow)
    assert jobs.submit(standin.access, SPEC, str(path), print) == "digits-1"


def test_what_the_head_refuses_names_the_job_file(standin: Machines) -> None:
    (standin.folder / "work").mkdir()
    (standin.folder / "work/train.py").write_text("print()\n")
    path = standin.folder / "work/job.yaml"
    path.write_text("script: train.py\nafter: [first]\n")
    spec = ClusterSpec(name="c", cloud="local", pools=({"name": "p", "zone": "local-a"},))
    (standin.folder / "refuse").write_text("spotrun: after: 'first': cluster c has no job of that name or id\n")
    with pytest.raises(SpotrunError, match=f"^{path}: after: 'first': cluster c has no job of that name or id$"):
        jobs.submit(standin.access, spec, str(path), print)


def test_a_head_of_another_version_does_not_know_a_command(standin: Machines) -> None:
    program = (
        "import argparse; parser = argparse.ArgumentParser(prog='spotrun ctl');"
        "verbs = parser.add_subparsers(dest='verb', metavar='VERB'); verbs.add_parser('stop').add_argument('--job');"
        "parser.parse_args()"
    )
    for words, said in (
        (("budget", "--to", "5"), "argument VERB: invalid choice: 'budget'"),
        (("stop", "--group", "a"), "unrecognized arguments: --group a"),
    ):
        usage = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True).stderr
        standin.write(refuse=usage)
        with pytest.raises(SpotrunError, match=f"^the head runs another version of spotrun, .* command: {said}"):
            control.ask(standin.access, *words)


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


def test_up_does_not_wait_for_a_cluster_that_is_taken_down_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another terminal, `make down` has waited for the lock that `make up` had until the local cloud was there."""
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path))
    cluster = ClusterSpec.model_validate(
        {"name": "c", "cloud": "local", "pools": [{"name": "p", "zone": "local-a", "max": 1}]}
    )
    record = Layout.of(tmp_path, "c").record

    def brought_up(*_: object, **__: object) -> None:
        for path in (record, record.with_name("id_ed25519")):
            path.touch()

    def refused(*_: object) -> None:
        assert record.exists(), "asked again"
        record.unlink()
        raise Unreachable("connection refused")

    monkeypatch.setattr(local_cloud, "up", brought_up)
    monkeypatch.setattr(control, "ask", refused)
    with pytest.raises(
        Unreachable, match=r"^another command has taken cluster c down meanwhile; `make up` tries again$"
    ):
        LocalSite(cluster, LOCAL).up()


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
