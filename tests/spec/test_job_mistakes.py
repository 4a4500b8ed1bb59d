"""Mistakes in a job file: one line each says where, what, what is allowed, and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.errors import SpecError
from spotrun.spec import load_job
from tests.spec.texts import LABEL, refusal

INTERVAL = "seconds, or a number with s, m, h or d, such as 90s or 5m, more than zero"
KEEP = (
    "a list of folders in the job's working folder: letters, digits, _, . and -, no . at the start, with / between"
    " folders, at most 200 characters"
)
JOB_MISTAKES = {
    "no script": (
        "args: []\n",
        [": script: is missing; give a Python file in the job file's folder, such as train.py"],
    ),
    "script not there": (
        "script: trian.py\n",
        [":1: script: 'trian.py': there is no such file in {folder}; did you mean train.py?"],
    ),
    "script outside": (
        "script: ../train.py\n",
        [
            ":1: script: '../train.py': is outside the job file's folder, which is all that reaches the nodes; allowed:"
            " a Python file in the job file's folder, such as train.py"
        ],
    ),
    "script absolute": (
        "script: /etc/x.py\n",
        [
            ":1: script: '/etc/x.py': is outside the job file's folder, which is all that reaches the nodes; allowed:"
            " a Python file in the job file's folder, such as train.py"
        ],
    ),
    "script is a link to outside": (
        "script: link.py\n",
        [":1: script: 'link.py': is a link to outside the job file's folder, which is all that reaches the nodes"],
    ),
    "not Python": (
        "script: run.sh\n",
        [
            ":1: script: 'run.sh': is not a Python file; allowed: a Python file in the job file's folder,"
            " such as train.py"
        ],
    ),
    "min over max": (
        "script: train.py\nnodes: {min: 3, max: 2}\n",
        [":2: nodes.max: 2: is less than nodes.min, which is 3"],
    ),
    "no nodes": (
        "script: train.py\nnodes: 0\n",
        [":2: nodes: 0: is not allowed; allowed: a whole number, or keys min, max and spares"],
    ),
    "deadline too short": (
        "script: train.py\ndeadline: 2m\n",
        [
            ":2: deadline: '2m': is not more than checkpoint_interval, which is 300 s: the job would end before its"
            " first checkpoint"
        ],
    ),
    "interval of nothing": (
        "script: train.py\ncheckpoint_interval: 0\n",
        [f":2: checkpoint_interval: 0: is not more than zero; allowed: {INTERVAL}"],
    ),
    "interval without unit": (
        "script: train.py\nhang_timeout: 5 minutes\n",
        [f":2: hang_timeout: '5 minutes': is not a duration; allowed: {INTERVAL}"],
    ),
    "infinite interval": (
        "script: train.py\nstart_timeout: .inf\n",
        [f":2: start_timeout: inf: is not a duration; allowed: {INTERVAL}"],
    ),
    "steps or auto": (
        "script: train.py\nsnapshot_interval: often\n",
        [":2: snapshot_interval: 'often': is not allowed; allowed: steps, a whole number, at least 1, or auto"],
    ),
    "more workers than any machine can run": (
        "script: train.py\nprocs_per_node: 1025\n",
        [
            ":2: procs_per_node: 1025: is not allowed; allowed: a whole number from 1 to 1024, or auto: one for each"
            " device"
        ],
    ),
    "budget": (
        "script: train.py\nbudget: 0\n",
        [":2: budget: 0: is not allowed; allowed: dollars, a number more than zero"],
    ),
    "args as in a shell": (
        "script: train.py\nargs: --epochs 3\n",
        [":2: args: '--epochs 3': is not allowed; allowed: a list of texts, such as [--epochs=3]"],
    ),
    "yes among args": (
        "script: train.py\nargs: [--fast, yes]\n",
        [
            ":2: args[1]: true: YAML reads this as a boolean: put it in quotes;"
            " allowed: a list of texts, such as [--epochs=3]"
        ],
    ),
    "a date among args": (
        "script: train.py\nargs: [--day, 2026-11-29]\n",
        [
            ":2: args[1]: datetime.date(2026, 11, 29): YAML reads this as a date: put it in quotes;"
            " allowed: a list of texts, such as [--epochs=3]"
        ],
    ),
    "env of spotrun's own": (
        "script: train.py\nenv: {MASTER_PORT: 1}\n",
        [":2: env.MASTER_PORT: 1: is set by spotrun itself; allowed: a variable: its text; quote true, no, on"],
    ),
    "env's name": (
        "script: train.py\nenv: {a-b: c}\n",
        [
            ":2: env.a-b: 'c': is not a valid name of an environment variable;"
            " allowed: a variable: its text; quote true, no, on"
        ],
    ),
    "option among requirements": (
        "script: train.py\nrequirements: [--pre]\n",
        [
            ":2: requirements[0]: '--pre': is not a package requirement; allowed: a list of package requirements,"
            " such as scikit-learn>=1.5"
        ],
    ),
    "priority out of bounds": (
        "script: train.py\npriority: 1001\n",
        [":2: priority: 1001: is not allowed; allowed: a whole number from -1000 to 1000"],
    ),
    "a number in quotes": (
        'script: train.py\npriority: "5"\n',
        [
            ":2: priority: '5': is not allowed; allowed: a whole number from -1000 to 1000;"
            " YAML reads this as text: write 5, without quotes"
        ],
    ),
    "a number with an exponent, which is text in YAML": (
        "script: train.py\nbudget: 1e3\n",
        [
            ":2: budget: '1e3': is not allowed; allowed: dollars, a number more than zero;"
            " YAML reads this as text: write 1000, without quotes"
        ],
    ),
    "priority in words": (
        "script: train.py\npriority: high\n",
        [":2: priority: 'high': is not allowed; allowed: a whole number from -1000 to 1000"],
    ),
    "a job with no device": (
        "script: train.py\ndevices: 0\n",
        [":2: devices: 0: is not allowed; allowed: a whole number, at least 1"],
    ),
    "a group in capitals": (
        "script: train.py\ngroup: Search\n",
        [f":2: group: 'Search': is not a valid name; allowed: {LABEL.replace('20', '40')}"],
    ),
    "`after` is a name and not a list": (
        "script: train.py\nafter: prepare\n",
        [":2: after: 'prepare': is not allowed; allowed: a list of jobs' ids or names"],
    ),
    "a job to wait for whose name is not valid": (
        "script: train.py\nafter: [prepare, Data set]\n",
        [":2: after[1]: 'Data set': is not a valid name; allowed: a list of jobs' ids or names"],
    ),
    "a value of `on` that is not allowed": (
        "script: train.py\nafter: [prepare]\non: failure\n",
        [":3: on: 'failure': is not allowed; allowed: success, end"],
    ),
    "`on` without `after`": (
        "script: train.py\non: end\n",
        [":2: on: 'end': says how the jobs of after must end, and after is empty"],
    ),
    "an input without a folder": (
        "script: train.py\ninputs: {data: prepare}\n",
        [
            ":2: inputs.data: 'prepare': is not a job and a folder that the job keeps; allowed: a folder's name:"
            " <a job's id or name>/<a folder that the job keeps>"
        ],
    ),
    "an input in a folder of a folder": (
        "script: train.py\ninputs: {a/b: prepare/out}\n",
        [
            ":2: inputs.a/b: 'prepare/out': is not the name of a folder; allowed: a folder's name:"
            " <a job's id or name>/<a folder that the job keeps>"
        ],
    ),
    "an input from outside the other job's folder": (
        "script: train.py\ninputs: {data: prepare/../../other}\n",
        [
            ":2: inputs.data: 'prepare/../../other': is not the path of a folder within another one; allowed:"
            " a folder's name: <a job's id or name>/<a folder that the job keeps>"
        ],
    ),
    "a folder to keep that is outside": (
        "script: train.py\nkeep: [out, ../data]\n",
        [f":2: keep[1]: '../data': is not the path of a folder within another one; allowed: {KEEP}"],
    ),
    "the whole working folder to keep": (
        "script: train.py\nkeep: [.]\n",
        [f":2: keep[0]: '.': is not the path of a folder within another one; allowed: {KEEP}"],
    ),
    "no checkpoints to keep": (
        "script: train.py\nkeep: 0\n",
        [f":2: keep: 0: is not allowed; allowed: {KEEP}"],
    ),
    "near key": (
        "script: train.py\nmax_restart: 1\n",
        [
            ":2: max_restart: 1: unknown key; allowed: name, script, args, nodes, devices, priority, pools, group,"
            " labels, after, on, inputs, keep, keep_on_failure, procs_per_node, snapshot_interval, exact,"
            " checkpoint_interval, keep_checkpoints, deadline, budget, policy, zones, restart_time, work, max_restarts,"
            " hang_timeout, start_timeout, grow_interval,"
            " hold_idle, heartbeat_timeout, env, requirements; did you mean max_restarts?"
        ],
    ),
}


@pytest.mark.parametrize(("text", "expected"), JOB_MISTAKES.values(), ids=JOB_MISTAKES)
def test_job_mistakes(text: str, expected: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").touch()
    (tmp_path / "outside.py").touch()
    (folder / "link.py").symlink_to(tmp_path / "outside.py")
    path = folder / "job.yaml"
    path.write_text(text)
    assert refusal(load_job, path) == [f"{path}{line}".replace("{folder}", str(folder)) for line in expected]


@pytest.mark.parametrize(("key", "meant"), [("gpus", "devices"), ("command", "script"), ("packages", "requirements")])
def test_a_key_of_another_program_gets_a_hint_at_our_key(key: str, meant: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"script: train.py\n{key}: 2\n")
    with pytest.raises(SpecError, match=f"unknown key; .*; did you mean {meant}\\?$"):
        load_job(tmp_path / "job.yaml")
