"""Wrong words from an operator: refused in one line that says what is allowed, with exit status 2, also as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from invoke.context import Context
from invoke.exceptions import Exit

import fabfile
from scripts import inputs, local_site
from scripts.make_command import LOCAL, make_command
from spotrun.cloud.local import cloud
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError, StoreError
from spotrun.spec import load_cluster
from spotrun.store import Store, job_key
from tests.fakes.cluster import Machines, machines
from tests.scripts.accounts import job
from tests.scripts.statuses import shared, status

Fab = Callable[..., tuple[int, str, str]]


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        monkeypatch.setenv("SPOTRUN_HOME", str(found.home))
        yield found


@pytest.fixture
def fab(standin: Machines, capsys: pytest.CaptureFixture[str]) -> Fab:
    """A task in this process: (exit status, stdout, stderr)."""

    def run(task: str, **options: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = 0
        try:
            getattr(fabfile, task).body(Context(), **{"cluster": str(standin.cluster), **options})
        except Exit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


WRONG = [
    ("ssh", {"node": "../head"}, "NODE: '../head': is not a node's name; `make status CLUSTER=… ` lists them"),
    ("run", {"node": "a//b", "cmd": "id"}, "NODE: 'a//b': is not a node's name"),
    ("logs", {"node": "-x"}, "NODE: '-x': is not a node's name"),
    ("kill", {"node": "a\nb"}, "NODE: 'a\\nb': is not a node's name"),
    ("kill", {"node": ""}, "NODE is missing: name a node, such as NODE=spot-0"),
    ("preempt", {"node": "x" * 99}, "is not a node's name"),
    ("logs", {"id": "../x"}, "ID: '../x': is not a job's id; `make status CLUSTER=… ` names the newest jobs"),
    ("status", {"id": "a//b"}, "ID: 'a//b': is not a job's id"),
    ("stop", {"id": "--job"}, "ID: '--job': is not a job's id"),
    ("stop", {"group": "A b"}, "GROUP: 'A b': is not a group's name; `make jobs CLUSTER=… ` lists the groups"),
    ("stop", {"id": "a-1", "group": "b"}, "GROUP and ID: give one of them: a group of jobs (b), or one job (a-1)"),
    ("follow", {"id": "a-1", "group": "b"}, "GROUP and ID: give one of them: a group of jobs (b), or one job (a-1)"),
    ("pause", {"id": "A"}, "ID: 'A': is not a job's id"),
    ("resume", {"id": "A"}, "ID: 'A': is not a job's id"),
    ("priority", {"id": "A", "to": "1"}, "ID: 'A': is not a job's id"),
    ("priority", {"id": "a-1"}, "TO is missing: give the job's new priority, such as TO=10; allowed: a whole number"),
    ("priority", {"to": "high"}, "TO: 'high': allowed: a whole number from -1000 to 1000"),
    ("priority", {"to": "-1001"}, "TO: '-1001': allowed: a whole number from -1000 to 1000"),
    ("budget", {"id": "A", "to": "1"}, "ID: 'A': is not a job's id"),
    ("budget", {"id": "a-1"}, "TO is missing: give what the job may cost in all, such as TO=250; allowed: dollars"),
    ("budget", {"to": "$5"}, "TO: '$5': allowed: dollars, a number more than zero"),
    ("budget", {"to": "0.0"}, "TO: '0.0': allowed: dollars, a number more than zero"),
    ("budget", {"to": "inf"}, "TO: 'inf': allowed: dollars, a number more than zero"),
    ("relaunch", {"id": "Ä"}, "ID: 'Ä': is not a job's id"),
    ("follow", {"id": "a b"}, "ID: 'a b': is not a job's id"),
    ("logs", {"rank": "first"}, "RANK: 'first': allowed: a whole number, at least 0"),
    ("logs", {"tail": "0"}, "TAIL: '0': allowed: a whole number, at least 1"),
    ("dashboard", {"port": "70000"}, "PORT: '70000': allowed: a whole number from 0 to 65535"),
    ("tensorboard", {"port": "70000"}, "PORT: '70000': allowed: a whole number from 0 to 65535"),
    ("simulate", {"runs": "999999999"}, "RUNS: '999999999': allowed: a whole number from 1 to 100000"),
    ("run", {"cmd": "id", "timeout": "abc"}, "TIMEOUT: 'abc': allowed: seconds, or a number with s, m,"),
    ("run", {"cmd": "id", "timeout": "-5"}, "TIMEOUT: '-5': allowed: seconds"),
    ("run", {"cmd": "id", "timeout": "nan"}, "TIMEOUT: 'nan': allowed: seconds"),
    ("run", {"cmd": "id", "timeout": "0"}, "TIMEOUT: '0': allowed: seconds"),
    ("run", {"cmd": "id", "timeout": "1e300"}, "TIMEOUT: '1e300': allowed: seconds"),
    ("preempt", {"node": "spot-1", "notice": "abc"}, "NOTICE: 'abc': allowed: seconds"),
    ("preempt", {"node": "spot-1", "notice": "inf"}, "NOTICE: 'inf': allowed: seconds"),
    ("run", {"cmd": " "}, "run: no command; for example: make run CLUSTER=… CMD='nvidia-smi -L'"),
    ("train", {"job": ""}, "JOB: is empty; name a job file, such as JOB=examples/digits/job.yaml"),
    ("train", {"job": "."}, ".: this is a folder, not a job file"),
    ("train", {"faults": "kill"}, "FAULTS: 'kill': allowed: kind@step"),
    ("status", {"cluster": " "}, "CLUSTER: is empty; name a cluster file, such as CLUSTER=clusters/local.yaml"),
    ("down", {"cluster": "a\0b"}, "is not text in UTF-8"),
    ("up", {"cluster": "it's.yaml"}, "it's.yaml: there is no such cluster file"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "options", "said"), WRONG, ids=[f"{task} {what}" for task, what, _ in WRONG])
def test_a_mistake_is_one_line_and_status_2(
    standin: Machines, fab: Fab, task: str, options: dict[str, object], said: str
) -> None:
    said = said.replace("CLUSTER=… `", make_command(str(standin.cluster), "x").split()[2] + "`")
    said = said.replace("CLUSTER=…", make_command(str(standin.cluster), "x").split()[2])
    code, out, err = fab(task, **options)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("spotrun: ")
    assert err.count("\n") == 1
    code, out, err_again = fab(task, **options, json=True)
    assert (code, err_again) == (2, err)
    assert json.loads(out) == {"error": err.removeprefix("spotrun: ").rstrip("\n")}
    assert standin.calls() == []


@pytest.mark.parametrize(
    ("targets", "typed", "said"),
    [
        ("train", "JBO", "`make train` does not take JBO; it takes JOB, FAULTS, CLUSTER, JSON; did you mean JOB?"),
        ("train", "job", "`make train` does not take job; it takes JOB, FAULTS, CLUSTER, JSON; did you mean JOB?"),
        ("train", "NODES", "`make train` does not take NODES; it takes JOB, FAULTS, CLUSTER, JSON"),
        ("stop", "JOB", "`make stop` does not take JOB; it takes ID, GROUP, CLUSTER, JSON"),
        ("down", "JSON NODE", "`make down` does not take NODE; it takes FORCE, ALL, CLUSTER, JSON"),
        ("up train", "JOB", ""),
        ("down", "VENV PYTHON TERRAFORM AWS_PROFILE SPOTRUN_HOME HOME TMPDIR SHELL CLUSTER", ""),
    ],
)
def test_a_variable_that_no_target_takes_is_refused(targets: str, typed: str, said: str) -> None:
    """Otherwise `make train JBO=mine.yaml` would train the default job, and `make stop JOB=one` stop another one."""
    environment = {"SPOTRUN_TARGETS": targets, "SPOTRUN_TYPED": typed}
    if not said:
        inputs.variables(environment)
        return
    with pytest.raises(SpotrunError) as error:
        inputs.variables(environment)
    assert str(error.value) == said


@pytest.mark.parametrize("task", ["stop", "pause", "resume", "priority", "budget", "relaunch"])
def test_an_empty_id_does_not_mean_the_only_job(task: str) -> None:
    """Otherwise `make stop ID=$UNSET` in a script would stop whatever job runs."""
    environment = {"SPOTRUN_TARGETS": task, "SPOTRUN_TYPED": "ID"}
    inputs.variables({**environment, "ID": "digits-1"})
    with pytest.raises(SpotrunError, match="ID is empty; name a job, or leave ID out"):
        inputs.variables({**environment, "ID": " "})


def test_an_empty_group_does_not_mean_the_only_job() -> None:
    with pytest.raises(SpotrunError, match="GROUP is empty; name a group, or leave GROUP out"):
        inputs.variables({"SPOTRUN_TARGETS": "stop", "SPOTRUN_TYPED": "GROUP", "GROUP": ""})


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("train examples/digits/job.yaml", "; did you mean JOB=examples/digits/job.yaml?"),
        ("train clusters/gcp-l4.yaml", "; did you mean CLUSTER=clusters/gcp-l4.yaml?"),
        ("down clusters/gcp-l4.yaml", "; did you mean CLUSTER=clusters/gcp-l4.yaml?"),
        ("stop digits-1", "; did you mean ID=digits-1?"),
        ("kill spot-1", "; did you mean NODE=spot-1?"),
        ("down all", ""),
    ],
)
def test_a_word_that_is_no_target_is_refused(
    standin: Machines, fab: Fab, monkeypatch: pytest.MonkeyPatch, targets: str, said: str
) -> None:
    """Otherwise `make down clusters/gcp-l4.yaml` would take the local cluster down: make ignores existing files."""
    monkeypatch.setenv("SPOTRUN_TARGETS", targets)
    task, word = targets.split()
    assert fab(task) == (2, "", f"spotrun: {word}: is not a target{said}\n")
    assert standin.calls() == []
    inputs.variables({"SPOTRUN_TARGETS": f"{task} .venv/.installed-dev"})


def test_a_task_refuses_such_a_variable(standin: Machines, fab: Fab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_TYPED", "JOB")
    assert fab("stop")[0] == 0, "what a `make` of other targets left in the environment does not matter"
    monkeypatch.setenv("SPOTRUN_TARGETS", "stop")
    code, _, err = fab("stop")
    assert code == 2
    assert "`make stop` does not take JOB" in err
    assert len(standin.calls()) == 1


def test_the_error_about_a_missing_job_names_a_make_target(standin: Machines, fab: Fab) -> None:
    standin.write(refuse="spotrun: there is no job nope in /bucket")
    code, _, err = fab("stop", id="nope")
    assert code == 2
    named = make_command(str(standin.cluster), "status")
    assert err == f"spotrun: there is no job nope in /bucket; `{named}` names the newest jobs\n"
    standin.write(status_json=status(step=1), jobs_json=[{"job": "digits-1", "phase": "running"}])
    assert "other jobs" not in fab("status")[1]
    jobs = [{"job": "digits-1", "phase": "running"}, {"job": "toy-2", "phase": "queued"}]
    standin.write(jobs_json=jobs)
    assert fab("status")[1].splitlines()[-1] == "other jobs: toy-2 queued"


ASKED = {
    "stop a job": ("stop", {"id": "a-1"}, "stop --job a-1", "job digits-1 stops; `"),
    "stop a group": ("stop", {"group": "search"}, "stop --group search", "group search stops: digits-1, digits-2\n"),
    "pause": ("pause", {"id": "a-1"}, "pause --job a-1", "job digits-1 pauses; `"),
    "pause the only job": ("pause", {}, "pause", "job digits-1 pauses; `"),
    "resume": ("resume", {"id": "a-1"}, "resume --job a-1", "job digits-1 resumes; follow it with: "),
    "a lower priority": (
        "priority",
        {"id": "a-1", "to": "-5"},
        "priority --job a-1 --to -5",
        "job digits-1 has priority -5 now\n",
    ),
    "more money": (
        "budget",
        {"id": "a-1", "to": "250.50"},
        "budget --job a-1 --to 250.5",
        "job digits-1 has a budget of $250.5 now\n",
    ),
}


@pytest.mark.parametrize(("task", "options", "asked", "said"), ASKED.values(), ids=ASKED)
def test_what_operators_ask_of_the_head(
    standin: Machines, fab: Fab, task: str, options: dict[str, object], asked: str, said: str
) -> None:
    code, out, err = fab(task, **options)
    assert (code, err, standin.calls()) == (0, "", [asked])
    assert out.startswith(said)
    code, out, _ = fab(task, **options, json=True)
    assert (code, json.loads(out)["job"]) == (0, "digits-1")


def test_jobs_lists_all_jobs_and_what_idle_devices_cost(standin: Machines, fab: Fab) -> None:
    document = shared()
    standin.write(jobs_json=document["jobs"], status_json=document)
    code, out, _ = fab("jobs")
    assert (code, out.splitlines()[-1]) == (0, "devices that no job held: $0.25 so far")
    first = [line.split()[0] for line in out.splitlines()[1:-1]]
    assert first == ["digits-1", "eval-1", "search", "trial-1", "trial-2"]
    code, out, _ = fab("jobs", json=True)
    assert (code, json.loads(out)) == (0, document["jobs"])


def test_the_error_about_a_too_large_job_names_its_file(standin: Machines, fab: Fab, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("script: train.py\nnodes: 99\n")
    (tmp_path / "train.py").touch()
    code, _, err = fab("train", job=str(file))
    assert code == 2
    assert err.startswith(f"spotrun: {file}: nodes: 99: cluster c has at most ")


def test_json_has_no_nan(standin: Machines, fab: Fab) -> None:
    standin.write(status_json=status(step=1, metrics={"loss": float("nan"), "norm": float("inf")}))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    code, out, _ = fab("status", json=True)
    assert code == 0
    assert json.loads(out, parse_constant=refuse)["job"]["metrics"] == {"loss": None, "norm": None}
    standin.write(status_json=status(step=1, metrics={"loss": None}))
    assert "loss nan" in fab("status")[1]
    assert "loss nan or inf" in fab("status")[1], "JSON has null for both"


def test_the_error_about_an_unreachable_head_is_json_too(standin: Machines, fab: Fab) -> None:
    code, out, _ = fab("status", cluster=str(standin.cluster), json=True)  # there is no status.json to answer with
    assert code == 3
    assert list(json.loads(out)) == ["error"]


def test_the_commands_in_an_error_name_the_cluster(standin: Machines, fab: Fab) -> None:
    """`make runs` would list the runs of the local cluster."""
    code, _, err = fab("show", id="x-1")
    runs = make_command(str(standin.cluster), "runs")
    assert (code, err) == (2, f"spotrun: ID: 'x-1': cluster c has no such run; `{runs}` lists them\n")


def test_a_home_that_cannot_be_written_is_a_mistake(
    standin: Machines, fab: Fab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(standin.cluster))  # a file
    code, _, err = fab("up")
    assert code in (2, 3)
    assert "Traceback" not in err


def test_a_token_that_cannot_be_written_is_no_error_of_the_port(
    standin: Machines, fab: Fab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home of the dashboard"
    home.mkdir(mode=0o700)
    (home / "dashboard").write_text("a file where the folder should be")
    monkeypatch.setenv("SPOTRUN_HOME", str(home))
    code, out, err = fab("dashboard")
    assert (code, out, err) == (2, "", f"spotrun: {home / 'dashboard'}: File exists\n")


def test_an_impossible_key_is_an_error_of_the_bucket(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for key in ("../a", "a//b", "a/./b", "a\0b", "\ud800"):
        for call in (store.find, store.exists, store.list, lambda key: store.put(key, b"")):
            with pytest.raises(StoreError):
                call(key)


def test_an_id_is_checked_before_the_cluster_is_reached(
    fab: Fab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "never up"))
    for task in ("stop", "relaunch", "follow", "logs", "status"):
        code, _, err = fab(task, id="digits.x")
        assert (code, "ID: 'digits.x': is not a job's id" in err) == (2, True), task


def test_logs_of_a_cluster_that_is_down_say_what_works_then(
    fab: Fab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path / "never up"))
    code, _, err = fab("logs", cluster=LOCAL, id="digits-20260101-000000")
    assert code == 3
    assert "is not up; `make up` brings it up; `make logs RANK=all` also prints logs while the cluster is down" in err


def test_one_note_is_one(fab: Fab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTRUN_HOME", str(tmp_path))
    state = job(1).replace(cluster="local")
    local_site.LocalSite(load_cluster(LOCAL), LOCAL).bucket().put(
        job_key(state.id, "state.json"), state.model_dump_json().encode()
    )
    said = [fab("note", cluster=LOCAL, id=state.id, text="a word") for _ in range(2)]
    assert [(code, out) for code, out, _ in said] == [(0, f"{state.id} has 1 note\n"), (0, f"{state.id} has 2 notes\n")]


def test_times() -> None:
    assert inputs.seconds("TIMEOUT", "", default=60.0) == 60
    assert inputs.seconds("TIMEOUT", "0.5") == 0.5
    assert [inputs.seconds("TIMEOUT", text) for text in ("2s", "1.5m", "2h")] == [2.0, 90.0, 7200.0]
    with pytest.raises(SpotrunError):
        inputs.seconds("NOTICE", "")


def test_down_with_another_home_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fab: Fab) -> None:
    """It must not say that the cluster is down: with its own home, the cluster is up."""
    file = tmp_path / "mine.yaml"
    name = "h" + tmp_path.name[-12:].lower().replace("_", "").strip("-")  # of this test alone
    file.write_text(f"name: {name}\ncloud: local\npools:\n- {{name: spot, zone: local-a}}\n")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    monkeypatch.setenv("SPOTRUN_HOME", str(wrong))
    code, out, _ = fab("down", cluster=str(file))
    assert (code, out) == (
        0,
        f"cluster {name} was never up with its state in {wrong} (another folder: set SPOTRUN_HOME)\n",
    )
    cloud.up(load_cluster(file), right, ["sleep", "600"])
    try:
        code, _, err = fab("down", cluster=str(file))
        assert code == 2
        assert (
            f"a cluster of that name is up with its state in {right}: `SPOTRUN_HOME={right} make down CLUSTER={file}`"
            in err
        )
        assert cloud.find(name, right) is not None
        monkeypatch.setenv("SPOTRUN_HOME", str(right))
        code, out, _ = fab("down", cluster=str(file))
        assert (code, out.startswith(f"cluster {name} is down;")) == (0, True)
    finally:
        cloud.down(name, right)
    assert cloud.homes(name) == []
    assert not Layout.of(wrong, name).state.exists()
