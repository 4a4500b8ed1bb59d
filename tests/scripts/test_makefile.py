"""The Makefile: what a user types reaches the commands as it was typed, and runs nowhere on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts import inputs
from tests.fakes.cluster import Machines

ROOT = Path(__file__).parents[2]
HOSTILE = {
    "a variable": "echo $HOME ${HOME:-x} $X/*",
    "dollars": "echo $$ $",
    "a substitution": "echo $(id) `id`",
    "a function of make's": "$(shell touch {made})$(error no)",
    "quotes": "echo \"a\" 'b  c' \\\" it's",
    "lines": "echo a\necho b\n",
    "a leading dash": "-n",
    "an option of the command": "--json",
    "only dashes": "--",
    "a comment": "# a = b := c % d \\",
    "what is no ASCII": "echo ü",
    "bytes": b"echo \xff".decode(errors="surrogateescape"),
}
# What a `make test` around these tests has in its environment.
INHERITED = {
    *("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CLUSTER", "JOB", "NODE", "RANK", "CMD", "TIMEOUT", "FAULTS", "NOTICE", "ID"),
    *("GROUP", "MONTH", "MEASURE", "RATE", "OUT", "TO", "JSON", "FORCE", "ALL", "STRICT", "RAW", "TAIL"),
    *("WHERE", "SORT", "A", "B", "TAG", "TEXT", "GREP", "SINCE", "GEN", "FOLLOW", "STEPS"),
}
# Which targets take which variables, and what the command calls them.
TARGETS = {
    "run": {"CMD": "cmd", "NODE": "node", "TIMEOUT": "timeout", "CLUSTER": "cluster"},
    "train": {"JOB": "job", "FAULTS": "faults"},
    "logs": {"NODE": "node", "RANK": "rank", "ID": "id"},
    "stacks": {"ID": "id", "NODE": "node"},
    "profile": {"ID": "id", "STEPS": "steps", "RANK": "rank", "NODE": "node"},
    "preempt": {"NODE": "node", "NOTICE": "notice"},
    "stop": {"ID": "id", "GROUP": "group"},
    "advise": {"JOB": "job", "MEASURE": "measure", "RATE": "rate", "OUT": "out"},
    "cost": {"ID": "id", "GROUP": "group", "MONTH": "month"},
    "priority": {"ID": "id", "TO": "to"},
    "budget": {"ID": "id", "TO": "to"},
    "runs": {"WHERE": "where", "SORT": "sort"},
    "diff": {"A": "first", "B": "second"},
    "note": {"ID": "id", "TEXT": "text"},
    "tag": {"ID": "id", "TAG": "tag"},
    "export": {"ID": "id", "TO": "to", "OUT": "out"},
    "tensorboard": {"ID": "id", "GROUP": "group", "PORT": "port"},
}


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment, as far as the Makefile looks, whose Python tells what `scripts.fab` is called with."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin/python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nassert sys.argv[1:3] == ['-m', 'scripts.fab']\n"
        "json.dump([sys.argv[3:], dict(os.environ)], sys.stdout)\n"
    )
    program.chmod(0o755)
    for name in (".installed", ".installed-aws", ".installed-gcp"):
        (folder / name).touch()
    return folder


def make(venv: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in INHERITED}
    return subprocess.run(
        ["make", "--no-print-directory", f"VENV={venv}", *words],
        cwd=ROOT, env={**clean, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def called(done: subprocess.CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    assert done.returncode == 0, done.stderr
    words, environment = json.loads(done.stdout)
    return words, environment


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_variables_are_taken_as_typed(venv: Path, tmp_path: Path, text: str) -> None:
    made = tmp_path / "made"
    text = text.replace("{made}", str(made))
    for target, options in TARGETS.items():
        given = dict.fromkeys(options, text)
        typed = called(make(venv, target, *(f"{name}={value}" for name, value in given.items())))
        exported = called(make(venv, target, **given))
        for words, environment in (typed, exported):
            for name, option in options.items():
                assert words[words.index(f"--{option}") + 1] == " " + text, name
                assert environment[name] == text
    assert not made.exists()


def test_other_variables_are_not_run_either(venv: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    bad = f"$(shell touch {made})"
    _, environment = called(make(venv, "status", f"FORCE={bad}", f"OTHER={bad}", OTHER2=bad))
    assert (environment["OTHER"], environment["OTHER2"]) == (bad, bad)
    assert "MAKEFLAGS" not in environment, "a make that a target starts would get all of them"
    assert make(venv, "help", f'CLUSTER="; touch {made}; "').returncode == 0
    assert make(venv, "help", f"CLUSTER='; touch {made}; '").returncode == 0
    assert not made.exists()


def test_variables_that_were_not_given_stay_away(venv: Path) -> None:
    words, environment = called(make(venv, "logs"))
    assert words == ["logs", "--cluster", " clusters/local.yaml"]
    assert not {"RANK", "NODE", "JSON"} & set(environment)


def test_a_no_is_no(venv: Path) -> None:
    for no in ("0", "no", "No", "FALSE", ""):
        assert "--force" not in called(make(venv, "down", f"FORCE={no}"))[0]
    done = make(venv, "down", "FORCE=maybe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "FORCE: 'maybe': allowed: 1 or 0" in done.stderr
    assert called(make(venv, "down", "FORCE=1", "ALL=yes"))[0][-2:] == ["--force", "--all"]


def test_tasks_learn_what_was_typed(venv: Path) -> None:
    words, environment = called(make(venv, "stop", "JOB=digits-1", "cluster=x", "VENV2=y"))
    assert words == ["stop", "--cluster", " clusters/local.yaml"]
    assert environment["SPOTRUN_TARGETS"] == "stop"
    assert {"JOB", "cluster", "VENV2"} <= set(environment["SPOTRUN_TYPED"].split())
    assert "JOB" not in called(make(venv, "stop", JOB="digits-1"))[1]["SPOTRUN_TYPED"].split(), "not typed here"


def test_an_environment_whose_making_was_interrupted_is_made_again(venv: Path, tmp_path: Path) -> None:
    """`python -m venv` installs pip last, and that takes most of the time."""
    program = venv / "bin/python"
    whole, half = program.read_text(), "#!/bin/sh\necho No module named pip >&2; exit 1\n"
    whole = whole.replace(
        "import json, os, sys\n", "import json, os, sys\nif sys.argv[2] != 'scripts.fab': sys.exit()\n"
    )
    (tmp_path / "whole").write_text(whole)
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m venv" ] && exec cp {tmp_path}/whole "$3/bin/python"\nexit 0\n')
    other.chmod(0o755)
    program.write_text(half)
    (venv / ".installed").unlink()
    words, _ = called(make(venv, "status", f"PYTHON={other}"))
    assert words == ["status", "--cluster", " clusters/local.yaml"]
    (venv / ".installed").unlink()
    other.write_text("#!/bin/sh\nexit 1\n")
    done = make(venv, "status", f"PYTHON={other}")
    assert done.returncode == 0, "one that is whole is not made again"


def test_two_makes_install_one_after_the_other(venv: Path, tmp_path: Path) -> None:
    """Each would break what the other installs. The one that waits has nothing to install any more."""
    program, log = venv / "bin/python", tmp_path / "log"
    (tmp_path / "whole").write_text(program.read_text())
    (tmp_path / "whole").chmod(0o755)
    program.write_text(
        f'#!/bin/sh\n[ "$2" = scripts.fab ] && exec {tmp_path}/whole "$@"\n'
        f'[ "$2 $3" = "pip install" ] && {{ echo begins >> {log}; sleep 2; echo ends >> {log}; }}\nexit 0\n'
    )
    (venv / ".installed").unlink()
    with ThreadPoolExecutor() as both:
        done = list(both.map(lambda verb: make(venv, verb), ("status", "jobs")))
    assert [called(each)[0][0] for each in done] == ["status", "jobs"]
    assert log.read_text().split() == ["begins", "ends"]
    assert sum("Waiting for another make" in each.stderr for each in done) == 1


def test_every_variable_of_a_target_is_allowed() -> None:
    recipes = dict(
        re.findall(r"^([a-z-]+): \$\(READY\).*\n\t@\$\(FAB\) (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    for target, recipe in recipes.items():
        names = set(re.findall(r"call (?:flag|yes),([A-Z]+)|\$\$([A-Z]+)|(job_id)", recipe))
        used = {"ID" if found[2] else found[0] or found[1] for found in names}
        assert used == set(inputs.TAKES[target]), target
    phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == inputs.TAKES.keys()


@pytest.fixture
def real(venv: Path) -> Path:
    """The virtual environment with the real Python."""
    (venv / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    return venv


def test_targets_without_a_task_refuse_what_they_do_not_take(real: Path) -> None:
    (real / ".installed-dev").touch()
    for words, said in [
        (("images", "cluster=x"), "`make images` does not take cluster; it takes PRUNE, CLUSTER, JSON; did you mean"),
        (("soak", "run=3"), "`make soak` does not take run; it takes RUNS, SEED, CLUSTER, JSON; did you mean RUNS?"),
        (("images", "clusters/gcp-l4.yaml"), "clusters/gcp-l4.yaml: is not a target; did you mean CLUSTER="),
    ]:
        done = make(real, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"spotrun: {said}")
    listed = subprocess.run(["make", "-n", "test", "ARGS=x"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "scripts.inputs" not in listed.stdout, "`make test` pays for it only when there is something to check"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_run_runs_what_was_typed(standin: Machines, real: Path) -> None:
    cluster = standin.folder / "it's a $(cluster).yaml"
    shutil.copy(standin.cluster, cluster)
    common = (f"CLUSTER={cluster}", "NODE=spot-1")

    def run(command: str) -> tuple[int, str, str]:
        done = make(real, "run", f"CMD={command}", *common, SPOTRUN_HOME=str(standin.home))
        return done.returncode, done.stdout, done.stderr

    code, out, said = run('X=5; echo "$X" \'$X\' `echo a` $(echo b) $((1 + 1)) \\$; echo it"\'"s\necho -- last')
    assert (code, out) == (0, "spot-1: 5 $X a b 2 $\nspot-1: it's\nspot-1: -- last\n"), said
    code, out, said = run("-n; exit 3")
    assert code == 2, "make's own, for any failure"
    assert "-n: command not found" in out
    assert "spotrun: run: 1 of 1 node failed: spot-1 (exit status 3)\n" in said


def test_run_ends_as_its_commands_did(standin: Machines) -> None:
    env = {**os.environ, "SPOTRUN_HOME": str(standin.home)}

    def fab(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fabric", "run", "--cluster", str(standin.cluster), *words]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    failed = fab("--cmd", "exit 7", "--node", "head")
    assert (failed.returncode, failed.stderr) == (1, "spotrun: run: 1 of 1 node failed: head (exit status 7)\n")
    standin.store.delete(["clusters/c/hosts/spot-1.json"])
    gone = fab("--cmd", "true", "--node", "spot-1")
    assert gone.returncode == 3
    assert gone.stderr == "spotrun: run: 1 of 1 node failed: spot-1 (not reached, see above)\n"
    odd = fab("--cmd", b"echo \xff".decode(errors="surrogateescape"), "--node", "head")
    assert (odd.returncode, odd.stderr) == (2, "spotrun: CMD: b'echo \\xff': is not text in UTF-8\n")
