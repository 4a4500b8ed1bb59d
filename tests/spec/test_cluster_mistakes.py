"""Mistakes in a cluster file: one line each says where, what, what is allowed, and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.spec import load_cluster
from spotrun.spec.machine_types import EFAS
from tests.spec.texts import AWS, CLUSTER, GCP, LABEL, refusal

CIDR = "a private IPv4 range from /16 to /20, such as 10.77.0.0/16"
NVLINK = (
    "has GPUs with NVLink 5, which need NVIDIA's subnet manager; spotrun's own image does not have it; set image, or"
    " take another machine"
)
# Text of the file, then the lines of the message without the file's name.
CLUSTER_MISTAKES = {
    "empty": ("", [": this cluster file is empty"]),
    "only a comment": ("# hello\n", [": this cluster file is empty"]),
    "a list": ("- a\n", [": a cluster file is a mapping (key: value), this is a list"]),
    "a number": ("5\n", [": a cluster file is a mapping (key: value), this is a number"]),
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
        [
            ":4: pools[0].max: '2': is not allowed; allowed: a whole number, at least 1;"
            " YAML reads this as text: write 2, without quotes"
        ],
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
    **{
        f"a bucket {url}": (
            text + f"bucket: {url}\n",
            [f":{line}: bucket: '{url}': is against the cloud's rules for the names of buckets; choose another"],
        )
        for text, line, urls in (
            (AWS, 6, ["s3://my_bucket", "s3://a..b", "s3://10.0.0.1", "s3://xn--runs", "s3://mine--x-s3"]),
            (GCP, 7, ["gs://goog-runs", "gs://my-google-runs", "gs://a..b", "gs://10.0.0.1"]),
        )
        for url in urls
    },
    "a name that no bucket may contain": (
        GCP.replace("name: a", "name: googles"),
        [
            ":1: name: 'googles': would be in the name of the bucket, which Google refuses; choose another, or set"
            " bucket"
        ],
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
    "GPUs with NVLink 5 on AWS": (
        AWS.replace("g5.2xlarge", "p6-b300.48xlarge"),
        [f":5: pools[0].machine: 'p6-b300.48xlarge': {NVLINK}"],
    ),
    "GPUs with NVLink 5 on Google Cloud": (
        GCP.replace("g2-standard-8}", "a4-highgpu-8g}\n- {name: q, zone: us-central1-b, machine: a4x-highgpu-4g}"),
        [f":6: pools[0].machine: 'a4-highgpu-8g': {NVLINK}", f":7: pools[1].machine: 'a4x-highgpu-4g': {NVLINK}"],
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
    "machines that EFA does not connect": (
        AWS.replace("g5.2xlarge", "p4d.24xlarge")
        + "- {name: q, zone: us-east-1c, machine: p5.48xlarge}\n"
        + "- {name: r, zone: us-east-1b, machine: p4de.24xlarge}\n"
        + "- {name: s, zone: us-east-1b, machine: p5.48xlarge}\n"
        + "network: {efa: true}\n",
        [
            ":8: pools[3].machine: 'p5.48xlarge': EFA does not connect it with p4d.24xlarge of pool p, which is in the"
            " same zone; put one of the two into another zone or another cluster"
        ],
    ),
    "a name that begins as ids of EC2's security groups do": (
        AWS.replace("name: a\n", "name: sg-1\n"),
        [":1: name: 'sg-1': would begin the names of security groups with sg-, which EC2 refuses; choose another"],
    ),
    "a name that makes security groups' names begin as ids do": (
        AWS.replace("name: a\n", "name: sg\n"),
        [":1: name: 'sg': would begin the names of security groups with sg-, which EC2 refuses; choose another"],
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
            ":5: local.market[0].where: 'local-b': is neither a zone of a pool nor a pool; allowed: local-a, p;"
            " did you mean local-a?"
        ],
    ),
    "a market change that is none": (
        CLUSTER + "local: {market: [{where: p, capacity: many}]}\n",
        [":5: local.market[0].capacity: 'many': is not allowed; allowed: a whole number, 0 or more"],
    ),
    "capacity of no zone": (
        CLUSTER + "local: {capacity: {local-b: 1}}\n",
        [
            ":5: local.capacity.local-b: 1: is neither a zone of a pool nor a pool; allowed: local-a, p;"
            " did you mean local-a?"
        ],
    ),
    "negative duration": (
        CLUSTER + "local: {boot_delay: -1}\n",
        [":5: local.boot_delay: -1: is negative; allowed: seconds, or a number with s, m, h or d, such as 90s or 5m"],
    ),
    "not a mapping inside": (CLUSTER + "head: 3\n", [":5: head: 3: is not allowed; allowed: keys machine and zone"]),
}


@pytest.mark.parametrize(("text", "expected"), CLUSTER_MISTAKES.values(), ids=CLUSTER_MISTAKES)
def test_cluster_mistakes(text: str, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    found = refusal(load_cluster, path)
    assert len(found) == len(expected), found
    for line, start in zip(sorted(found), sorted(f"{path}{line}" for line in expected), strict=True):
        assert line.startswith(start) if "constructor" in start else line == start
