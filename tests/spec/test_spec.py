"""Cluster file and job file: each mistake gives one line that says where, what, what is allowed, and what was meant."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from spotrun.errors import SpecError
from spotrun.spec import ClusterSpec, JobSpec, check_fit, devices_of, load_cluster, load_job
from spotrun.spec.cluster import IMAGE_GB
from spotrun.spec.fields import parse_duration
from spotrun.spec.machine_types import EFAS

CLUSTER = "name: a\ncloud: local\npools:\n- {name: p, zone: local-a, max: 2}\n"
GCP = (
    "name: a\ncloud: gcp\nregion: us-central1\nproject: my-project\n"
    "pools:\n- {name: p, zone: us-central1-b, machine: g2-standard-8}\n"
)
AWS = "name: a\ncloud: aws\nregion: us-east-1\npools:\n- {name: p, zone: us-east-1b, machine: g5.2xlarge}\n"
CIDR = "a private IPv4 range from /16 to /20, such as 10.77.0.0/16"
LABEL = "lower-case letters, digits and single inner hyphens, a letter first, at most 20 characters"
INTERVAL = "seconds, or a number with s, m, h or d, such as 90s or 5m, more than zero"
KEEP = (
    "a list of folders in the job's working folder: letters, digits, _, . and -, no . at the start, with / between"
    " folders, at most 200 characters"
)

# Text of the file, then the lines of the message without the file's name.
CLUSTER_MISTAKES = {
    "empty": ("", [": this cluster file is empty"]),
    "only a comment": ("# hello\n", [": this cluster file is empty"]),
    "a list": ("- a\n", [": a cluster file is a mapping (key: value), this is a list"]),
    "a word": ("hello\n", [": a cluster file is a mapping (key: value), this is text"]),
    "broken": ("name: [\n", [":2: this is not YAML: expected the node content, but found '<stream end>'"]),
    "two documents": ("a: 1\n---\nb: 2\n", [":2: this is not YAML: but found another document"]),
    "a tag": (
        "name: !!python/object:os.system x\n",
        [":1: this is not YAML: could not determine a constructor for the"],
    ),
    "no such date": ("name: 2020-99-99\n", [": this is not YAML that can be read: month must be in 1..12"]),
    "duplicate key": (CLUSTER + "name: b\n", [":5: name: this key is already on line 1; keep one"]),
    "duplicate key inside": (
        CLUSTER + "head:\n  zone: local-a\n  zone: local-b\n",
        [":7: head.zone: this key is already on line 6; keep one"],
    ),
    "unknown key": (
        CLUSTER + "regoin: local\n",
        [
            ":5: regoin: 'local': unknown key; allowed: name, cloud, region, project, bucket, head, pools, image,"
            " network, state, permissions_boundary, labels, local; did you mean region?"
        ],
    ),
    "unknown key inside": (
        CLUSTER.replace("max:", "mx:"),
        [
            ":4: pools[0].mx: 2: unknown key; allowed: name, zone, machine, market, max, devices, disk, accelerator,"
            " max_run_duration, notice; did you mean max?"
        ],
    ),
    "key is a number": (CLUSTER + "1: x\n", [": top level: the key 1 is not text; put it in quotes"]),
    "missing": ("name: a\ncloud: local\n", [": pools: is missing; give a list of at least one pool"]),
    "no pools": (
        "name: a\ncloud: local\npools: []\n",
        [":3: pools: []: is not allowed; allowed: a list of at least one pool"],
    ),
    "wrong name": (
        CLUSTER.replace("name: a", "name: A_b"),
        [f":1: name: 'A_b': is not a valid name; allowed: {LABEL}"],
    ),
    "long name": (
        CLUSTER.replace("name: a", "name: abcdefghijklmnopqrstu"),
        [f":1: name: 'abcdefghijklmnopqrstu': is not a valid name; allowed: {LABEL}"],
    ),
    "wrong cloud": (
        CLUSTER.replace("cloud: local", "cloud: gpc"),
        [":2: cloud: 'gpc': is not allowed; allowed: local, gcp, aws; did you mean gcp?"],
    ),
    "wrong market": (
        CLUSTER.replace("max: 2", "market: on_demand"),
        [":4: pools[0].market: 'on_demand': is not allowed; allowed: spot, flex, on-demand; did you mean on-demand?"],
    ),
    "too small": (
        CLUSTER.replace("max: 2", "max: 0"),
        [":4: pools[0].max: 0: is not allowed; allowed: a whole number, at least 1"],
    ),
    "boolean for a number": (
        CLUSTER.replace("max: 2", "max: yes"),
        [":4: pools[0].max: true: is not allowed; allowed: a whole number, at least 1"],
    ),
    "text for a number": (
        CLUSTER.replace("max: 2", 'max: "2"'),
        [":4: pools[0].max: '2': is not allowed; allowed: a whole number, at least 1"],
    ),
    "several": (
        CLUSTER.replace("name: a", "name: 7").replace("max: 2", "max: 0"),
        [
            f":1: name: 7: is not allowed; allowed: {LABEL}",
            ":4: pools[0].max: 0: is not allowed; allowed: a whole number, at least 1",
        ],
    ),
    "zone elsewhere": (
        GCP.replace("us-central1-b", "us-east1-b"),
        [":6: pools[0].zone: 'us-east1-b': is not in region us-central1; allowed: us-central1-<letter>"],
    ),
    "zone elsewhere on aws": (
        AWS.replace("us-east-1b", "us-east-1"),
        [":5: pools[0].zone: 'us-east-1': is not in region us-east-1; allowed: us-east-1<letter>"],
    ),
    "head's zone elsewhere": (
        CLUSTER + "head: {zone: b}\n",
        [":5: head.zone: 'b': is not in region local; allowed: local-<name>"],
    ),
    "region of another cloud": (
        GCP.replace("us-central1\n", "us-east-1\n"),
        [":3: region: 'us-east-1': is not a region of cloud gcp"],
    ),
    "no region, project or machine": (
        "name: a\ncloud: gcp\npools:\n- {name: p, zone: us-central1-b}\n",
        [
            ": region: is missing; cloud gcp needs one, such as us-central1 or us-east-1",
            ": project: is missing; cloud gcp needs the project's id",
            ":4: pools[0].machine: is missing; cloud gcp needs a machine type",
        ],
    ),
    "project on another cloud": (AWS + "project: x\n", [":6: project: 'x': is only for cloud gcp, this is aws"]),
    "local on another cloud": (
        AWS + "local: {boot_delay: 1s}\n",
        [":6: local: {'boot_delay': '1s'}: is only for cloud local, this is aws"],
    ),
    "efa on another cloud": (
        GCP + "network: {efa: true}\n",
        [":7: network.efa: true: is only for cloud aws, this is gcp"],
    ),
    "a boundary on another cloud": (
        GCP + "permissions_boundary: arn:aws:iam::123456789012:policy/p\n",
        [
            ":7: permissions_boundary: 'arn:aws:iam::123456789012:policy/p': is only for cloud aws, this is gcp",
        ],
    ),
    "a boundary that is no policy": (
        AWS + "permissions_boundary: arn:aws:iam::123456789012:role/p\n",
        [
            ":6: permissions_boundary: 'arn:aws:iam::123456789012:role/p': is not the ARN of a policy in this region's "
            "part of AWS; allowed: arn:aws:iam::<account>:policy/<name>",
        ],
    ),
    "placement on local": (
        CLUSTER + "network: {placement: true}\n",
        [":5: network.placement: true: is only for clouds gcp and aws, this is local"],
    ),
    "bucket of another cloud": (
        GCP + "bucket: s3://x\n",
        [":7: bucket: 's3://x': does not fit cloud gcp; allowed: gs://<bucket>"],
    ),
    "a path in the bucket": (
        GCP + "bucket: gs://spotrun/here\n",
        [":7: bucket: 'gs://spotrun/here': does not fit cloud gcp; allowed: gs://<bucket>"],
    ),
    "two hyphens": (
        CLUSTER.replace("name: a", "name: a--b"),
        [f":1: name: 'a--b': is not a valid name; allowed: {LABEL}"],
    ),
    "no project's id": (
        GCP.replace("my-project", "My project"),
        [":4: project: 'My project': is not a project's id (not its name and not its number)"],
    ),
    "machine of another cloud": (
        GCP.replace("g2-standard-8", "g5.2xlarge"),
        [":6: pools[0].machine: 'g5.2xlarge': is not a machine type of cloud gcp; allowed: such as g2-standard-8"],
    ),
    "head's machine of another cloud": (
        AWS + "head: {machine: e2-small}\n",
        [":6: head.machine: 'e2-small': is not a machine type of cloud aws; allowed: such as g5.2xlarge"],
    ),
    "accelerator where the machine has its own": (
        GCP.replace("g2-standard-8}", "g2-standard-8, accelerator: {type: nvidia-tesla-t4}}"),
        [
            ":6: pools[0].accelerator: {'type': 'nvidia-tesla-t4'}: is only for n1 machines; g2-standard-8 has its own"
            " GPUs or none"
        ],
    ),
    "accelerator on another cloud": (
        AWS.replace("g5.2xlarge}", "g5.2xlarge, accelerator: {type: t4, count: 9}}"),
        [":5: pools[0].accelerator.count: 9: is not allowed; allowed: a whole number from 1 to 8"],
    ),
    "longest run on another cloud": (
        AWS.replace("g5.2xlarge}", "g5.2xlarge, max_run_duration: 1h}"),
        [":5: pools[0].max_run_duration: '1h': is only for clouds gcp and local, this is aws"],
    ),
    "a notice on another cloud": (
        AWS.replace("g5.2xlarge}", "g5.2xlarge, notice: 120s}"),
        [":5: pools[0].notice: '120s': is only for cloud gcp, this is aws"],
    ),
    "devices on another cloud": (
        AWS.replace("g5.2xlarge}", "g5.2xlarge, devices: 4}"),
        [":5: pools[0].devices: 4: is only for cloud local, this is aws"],
    ),
    "no devices": (
        CLUSTER.replace("max: 2", "devices: 0"),
        [":4: pools[0].devices: 0: is not allowed; allowed: a whole number from 1 to 64"],
    ),
    "a notice that Google does not give": (
        GCP.replace("g2-standard-8}", "g2-standard-8, notice: 60s}"),
        [":6: pools[0].notice: '60s': is not a notice that Google gives; allowed: 120s, or no key for the usual 30s"],
    ),
    "a notice of machines that nobody preempts": (
        GCP.replace("g2-standard-8}", "g2-standard-8, market: on-demand, notice: 120s}"),
        [":6: pools[0].notice: '120s': is only for spot machines, this pool is on-demand"],
    ),
    "public range": (
        AWS + "network: {cidr: 8.8.0.0/16}\n",
        [f":6: network.cidr: '8.8.0.0/16': is not a private range of that size; allowed: {CIDR}"],
    ),
    "range of one's own machine": (
        AWS + "network: {cidr: 169.254.0.0/16}\n",
        [f":6: network.cidr: '169.254.0.0/16': is not a private range of that size; allowed: {CIDR}"],
    ),
    "a region of another AWS": (
        AWS.replace("us-east-1b", "cn-north-1a").replace("us-east-1", "cn-north-1"),
        [":3: region: 'cn-north-1': is in China, where AWS is a separate cloud that spotrun does not support"],
    ),
    "range with host bits": (
        AWS + "network: {cidr: 10.0.0.1/16}\n",
        [f":6: network.cidr: '10.0.0.1/16': 10.0.0.1/16 has host bits set; allowed: {CIDR}"],
    ),
    "small disk": (
        AWS.replace("g5.2xlarge}", "g5.2xlarge, disk: 8}"),
        [":5: pools[0].disk: 8: is not allowed; allowed: the boot disk in GB, a whole number, at least 20"],
    ),
    "disk smaller than the image": (
        AWS.replace("g5.2xlarge}", "g5.2xlarge, disk: 29}"),
        [":5: pools[0].disk: 29: is smaller than spotrun's own image of 30 GB"],
    ),
    "GPUs before Turing": (
        AWS.replace("g5.2xlarge", "p3.8xlarge"),
        [
            ":5: pools[0].machine: 'p3.8xlarge': has GPUs older than Turing (V100); spotrun's own image cannot use"
            " them; set image"
        ],
    ),
    "GPUs before Turing attached": (
        GCP.replace("g2-standard-8}", "n1-standard-8, accelerator: {type: nvidia-tesla-p4-vws}}"),
        [
            ":6: pools[0].accelerator: {'type': 'nvidia-tesla-p4-vws'}: has GPUs older than Turing (P4);"
            " spotrun's own image cannot use them; set image"
        ],
    ),
    "state without a folder": (
        AWS + "state: s3://bucket\n",
        [
            ":6: state: 's3://bucket': is not a folder in a bucket; allowed: a folder in a bucket,"
            " gs://<bucket>/<folder> or s3://<bucket>/<folder>"
        ],
    ),
    "state of the local cloud": (
        CLUSTER + "state: s3://bucket/folder\n",
        [":5: state: 's3://bucket/folder': is only for clouds gcp and aws, this is local"],
    ),
    "label in capitals": (
        AWS + "labels: {Team: a}\n",
        [f":6: labels.Team: 'a': is not a valid name; allowed: a label: its value, {LABEL.replace('20', '40')}"],
    ),
    "machine without EFA": (
        AWS + "network: {efa: true}\n",
        [
            ":5: pools[0].machine: 'g5.2xlarge': has no EFA, and network.efa is true; those that have one: "
            + ", ".join(sorted(EFAS, key=lambda each: not each.startswith("g5.")))
        ],
    ),
    "pool twice": (
        CLUSTER + "- {name: p, zone: local-b}\n",
        [":5: pools[1].name: 'p': is already the name of pools[0]"],
    ),
    "pool called head": (
        CLUSTER.replace("name: p", "name: head"),
        [":4: pools[0].name: 'head': is reserved for the head; choose another"],
    ),
    "flex on AWS": (
        AWS.replace("g5.2xlarge}", "g5.2xlarge, market: flex}"),
        [
            ":5: pools[0].market: 'flex': is only for clouds gcp and local, this is aws; allowed: spot, on-demand",
        ],
    ),
    "a flex machine that runs too long": (
        GCP.replace("g2-standard-8}", "g2-standard-8, market: flex, max_run_duration: 8d}"),
        [":6: pools[0].max_run_duration: '8d': is more than 7d, the longest that a flex machine runs"],
    ),
    "a market change of no place": (
        CLUSTER + "local: {market: [{where: local-b, price: 1}]}\n",
        [
            ":5: local.market[0].where: 'local-b': is no zone of a pool and no pool; allowed: local-a, p; did you mean"
            " local-a?"
        ],
    ),
    "a market change that is none": (
        CLUSTER + "local: {market: [{where: p, capacity: many}]}\n",
        [":5: local.market[0].capacity: 'many': is not allowed; allowed: a whole number, 0 or more"],
    ),
    "capacity of no zone": (
        CLUSTER + "local: {capacity: {local-b: 1}}\n",
        [":5: local.capacity.local-b: 1: is no zone of a pool and no pool; allowed: local-a, p; did you mean local-a?"],
    ),
    "negative duration": (
        CLUSTER + "local: {boot_delay: -1}\n",
        [":5: local.boot_delay: -1: is negative; allowed: seconds, or a number with s, m, h or d, such as 90s or 5m"],
    ),
    "not a mapping inside": (CLUSTER + "head: 3\n", [":5: head: 3: is not allowed; allowed: keys machine and zone"]),
}

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
    "budget": (
        "script: train.py\nbudget: 0\n",
        [":2: budget: 0: is not allowed; allowed: dollars, a number more than zero"],
    ),
    "yes among args": (
        "script: train.py\nargs: [--fast, yes]\n",
        [":2: args[1]: true: YAML reads this as a boolean: put it in quotes; allowed: a list of texts"],
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
            " labels, after, on, inputs, keep, keep_on_failure, procs_per_node, snapshot_interval, checkpoint_interval,"
            " keep_checkpoints, deadline, budget, policy, zones, restart_time, work, max_restarts,"
            " hang_timeout, start_timeout, grow_interval,"
            " hold_idle, heartbeat_timeout, env, requirements; did you mean max_restarts?"
        ],
    ),
}


def refusal(load, path: Path) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(path)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("text", "expected"), CLUSTER_MISTAKES.values(), ids=CLUSTER_MISTAKES)
def test_cluster_mistakes(text: str, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    found = refusal(load_cluster, path)
    assert len(found) == len(expected), found
    for line, start in zip(sorted(found), sorted(f"{path}{line}" for line in expected), strict=True):
        assert line.startswith(start) if "constructor" in start else line == start


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


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert refusal(load_job, missing) == [f"{missing}: there is no such job file"]
    assert refusal(load_job, tmp_path) == [f"{tmp_path}: this is a folder, not a job file"]
    assert refusal(load_cluster, tmp_path) == [f"{tmp_path}: this is a folder, not a cluster file"]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert refusal(load_cluster, binary)[0].startswith(f"{binary}: cannot read this cluster file: ")
    deep = tmp_path / "deep.yaml"
    deep.write_text("a: " + "[" * 3000)
    assert refusal(load_cluster, deep)[0].startswith(f"{deep}: this is not YAML that can be read: ")


def test_a_file_that_was_probably_not_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "clusters/mine.yaml": "pools: []",
        "toy/job.yaml": "script: a.py",
        "tab.yaml": "a:\n\tb: 1",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("train.py").touch()
    for load, name, said in [
        (load_cluster, "mine", "there is no such cluster file; did you mean clusters/mine.yaml?"),
        (load_cluster, "toy/job.yaml", "this looks like a job file, not a cluster file"),
        (load_job, "clusters/mine.yaml", "this looks like a cluster file, not a job file"),
        (load_job, "toy", "this is a folder, not a job file; did you mean toy/job.yaml?"),
        (load_job, "toy/job", "there is no such job file; did you mean toy/job.yaml?"),
        (load_job, "~/job.yaml", "there is no such job file; ~ is not expanded here: write the whole path"),
        (load_job, "train.py", "this is a Python file, not a job file"),
        (load_job, "tab.yaml", "2: this is not YAML: a tab; YAML takes only spaces here"),
    ]:
        found = refusal(load, Path(name))
        assert [line.replace("yaml:2", "yaml: 2") for line in found] == [f"{name}: {said}"]


def test_defaults_of_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    spec = load_cluster(path)
    assert (spec.region, spec.head.machine, spec.head.zone) == ("local", "local", "local-a")
    assert (spec.pools[0].machine, spec.pools[0].market, spec.local.recreate_delay) == ("local", "spot", 1.0)
    path.write_text(AWS)
    assert load_cluster(path).head.machine == "t3.small"


@pytest.mark.parametrize("text", [CLUSTER, GCP, AWS])
def test_a_cluster_survives_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    spec = load_cluster(path)
    assert ClusterSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_job_file_with_a_script_alone(tmp_path: Path) -> None:
    folder = tmp_path / "2 My_Nets"
    folder.mkdir()
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text("script: train.py\n")
    job = load_job(folder / "job.yaml")
    assert (job.name, job.nodes.min, job.nodes.max, job.checkpoint_interval) == ("my-nets", 1, 1, 300.0)
    assert JobSpec.model_validate(job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    ("folder", "name"), [("exp1", "exp1"), ("2024-run_07-", "run-07"), ("42", "job"), ("Über", "ber")]
)
def test_a_job_is_named_after_its_folder(folder: str, name: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "train.py").touch()
    (tmp_path / folder / "job.yaml").write_text("script: train.py\n")
    assert load_job(tmp_path / folder / "job.yaml").name == name


def test_values_as_people_write_them() -> None:
    job = JobSpec.model_validate(
        {"script": "a.py", "nodes": {"min": 2}, "args": ["--lr", 0.1, 3], "env": {"A": 1}, "deadline": "2h"}
    )
    assert (job.nodes.max, job.args, job.env, job.deadline) == (2, ("--lr", "0.1", "3"), {"A": "1"}, 7200.0)
    assert JobSpec.model_validate({"script": "a.py", "nodes": 4}).nodes.max == 4
    assert [parse_duration(each) for each in (90, 0.5, "90s", "1.5m", "1d")] == [90, 0.5, 90, 90, 86400]


def test_a_job_larger_than_the_cluster() -> None:
    cluster = ClusterSpec.model_validate(
        {"name": "a", "cloud": "local", "pools": [{"name": "p", "zone": "local-a", "max": 2}]}
    )
    check_fit(JobSpec(script="a.py", nodes={"min": 2, "max": 9}), cluster)
    with pytest.raises(SpecError, match=r"nodes: 3: cluster a has at most 2 nodes; lower it"):
        check_fit(JobSpec(script="a.py", nodes={"min": 3}), cluster)


SHARED = ClusterSpec.model_validate(
    {
        "name": "a",
        "cloud": "local",
        "pools": [
            {"name": "small", "zone": "local-a", "max": 8},
            {"name": "large", "zone": "local-a", "max": 2, "devices": 4},
        ],
    }
)
MISFITS = {
    "a pool that the cluster does not have": (
        {"pools": ["small", "big"]},
        "pools: 'big': cluster a has no such pool; allowed: small, large",
    ),
    "more devices than any machine has": (
        {"devices": 8},
        "devices: 8: cluster a has at most 4 a machine; lower it",
    ),
    "more devices than the machines of its pools have": (
        {"devices": 2, "pools": ["small"]},
        "devices: 2: cluster a has at most 1 a machine in pools small; lower it",
    ),
    "more nodes than there are with its devices": (
        {"devices": 2, "nodes": 3},
        "nodes: 3: cluster a has at most 2 nodes with 2 devices; lower it, or raise max of the pools",
    ),
    "more nodes than its pools have": (
        {"nodes": 3, "pools": ["large"]},
        "nodes: 3: cluster a has at most 2 nodes in pools large; lower it, or raise max of the pools",
    ),
}


@pytest.mark.parametrize(("keys", "expected"), MISFITS.values(), ids=MISFITS)
def test_a_job_that_can_never_fit(keys: dict[str, object], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_fit(JobSpec.model_validate({"script": "a.py", **keys}), SHARED)
    assert str(caught.value) == expected


@pytest.mark.parametrize("keys", [{"nodes": 10}, {"nodes": 2, "devices": 4}, {"nodes": 8, "pools": ["small"]}])
def test_a_job_as_large_as_the_cluster_fits(keys: dict[str, object]) -> None:
    check_fit(JobSpec.model_validate({"script": "a.py", **keys}), SHARED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CLUSTER, 1),
        (CLUSTER.replace("max: 2", "devices: 4"), 4),
        (AWS, 1),
        (AWS.replace("g5.2xlarge", "g5.48xlarge"), 8),
        (GCP.replace("g2-standard-8}", "n1-standard-8, accelerator: {type: nvidia-tesla-t4, count: 2}}"), 2),
        (GCP.replace("g2-standard-8", "z9-giant-1024"), None),
    ],
    ids=["local", "local with devices", "one GPU", "eight GPUs", "GPUs attached", "a type that is not known"],
)
def test_the_devices_of_a_machine(text: str, expected: int | None, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    cluster = load_cluster(path)
    assert devices_of(cluster.pools[0], cluster) == expected
    if expected is None:
        check_fit(JobSpec(script="a.py", devices=64), cluster)  # its nodes will tell


def test_a_job_of_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.yaml"
    path.write_text(
        "script: train.py\nafter: [search-1]\non: end\ninputs: {data: prepare/out/small/}\nkeep: [model/]\n"
    )
    job = load_job(path)
    assert (job.after, job.on, job.sources, job.keep) == (
        ("search-1",),
        "end",
        {"data": ("prepare", "out/small")},
        ("model",),
    )
    assert JobSpec.model_validate(job.model_dump(mode="json")) == job


def test_a_number_under_keep_is_the_number_of_checkpoints() -> None:
    old = JobSpec.model_validate({"script": "a.py", "keep": 7})
    assert (old.keep_checkpoints, old.keep) == (7, ())
    assert "keep" not in old.model_dump()  # version 0.1 reads a number there
    both = JobSpec.model_validate({"script": "a.py", "keep": ["out"], "keep_checkpoints": 2}, extra="allow")
    assert (both.keep_checkpoints, both.keep) == (2, ("out",))


def test_keys_of_a_newer_version_stay() -> None:
    found = JobSpec.model_validate({"script": "a.py", "keep": 7, "colour": "red"}, extra="allow")
    assert found.model_dump(mode="json")["colour"] == "red"


def test_the_example_files_are_valid() -> None:
    root = Path(__file__).parents[2]
    clusters = [load_cluster(path) for path in root.glob("clusters/*.yaml")]
    jobs = [load_job(path) for path in root.glob("examples/*/job.yaml")]
    assert "local" in {cluster.name for cluster in clusters}
    assert {"digits", "vit"} <= {job.name for job in jobs}


@pytest.mark.parametrize(
    "text",
    [
        AWS.replace("g5.2xlarge}", "g5.2xlarge, disk: 30}"),
        AWS.replace("g5.2xlarge}", "g5.2xlarge, disk: 20}") + "image: ami-0123456789abcdef0\n",
        CLUSTER.replace("max: 2", "disk: 20"),
        AWS.replace("g5.2xlarge", "p3.8xlarge") + "image: ami-0123456789abcdef0\n",
        GCP.replace("g2-standard-8}", "n1-standard-8, accelerator: {type: nvidia-tesla-v100}}") + "image: of-mine\n",
        GCP.replace("g2-standard-8}", "n1-standard-8, accelerator: {type: nvidia-tesla-t4}}"),
    ],
)
def test_other_images_may_run_on_other_machines(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert len(load_cluster(path).pools) == 1


def test_the_image_is_as_large_as_is_said() -> None:
    template = (Path(__file__).parents[2] / "images/variables.pkr.hcl").read_text()
    found = re.search(r'^variable "disk_gb" \{\n(?:  .*\n)*?  default     = (\d+)$', template, re.MULTILINE)
    assert found is not None
    assert int(found[1]) == IMAGE_GB


def test_specs_load_without_torch() -> None:
    code = "import sys, spotrun.spec; sys.exit('torch' in sys.modules or 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("given", "seconds"), [("30m", 1800.0), (90, 90.0)], ids=["minutes", "seconds"])
def test_a_node_is_kept_for_an_interval(given: object, seconds: float) -> None:
    job = JobSpec.model_validate({"script": "a.py", "keep_on_failure": given})
    assert job.keep_on_failure == seconds
    check_fit(job, SHARED)


@pytest.mark.parametrize("given", ["0s", "soon", True, -1], ids=["no time", "a word", "yes", "less than nothing"])
def test_a_node_is_not_kept_for_anything_else(given: object) -> None:
    with pytest.raises(ValueError, match="keep_on_failure"):
        JobSpec.model_validate({"script": "a.py", "keep_on_failure": given})
