"""Cluster files and job files: how they are read, their defaults, and which jobs fit into which cluster."""

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
from tests.spec.texts import AWS, CLUSTER, GCP, refusal


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


EFA = ClusterSpec.model_validate(
    {
        "name": "a",
        "cloud": "aws",
        "region": "us-west-2",
        "pools": [
            {"name": "b", "zone": "us-west-2b", "machine": "p4d.24xlarge", "max": 4},
            {"name": "also-b", "zone": "us-west-2b", "machine": "p4d.24xlarge", "max": 2},
            {"name": "c", "zone": "us-west-2c", "machine": "p4d.24xlarge", "max": 4},
        ],
        "network": {"efa": True},
    }
)
SOCKET = {"env": {"NCCL_NET": "Socket"}}
WHY = "cluster a uses EFA, which does not cross zones"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"zones": "any"}, f"zones: any: {WHY}; set zones: one, or env: {{NCCL_NET: Socket}} for TCP"),
        (
            {"nodes": 7},
            f"nodes: 7: {WHY}, and has at most 6 nodes a zone; lower it, raise max of the pools, or set"
            " env: {NCCL_NET: Socket} for TCP",
        ),
        (
            {"nodes": 5, "pools": ["b", "c"]},
            f"nodes: 5: {WHY}, and has at most 4 nodes a zone in pools b, c; lower it, raise max of the pools, or set"
            " env: {NCCL_NET: Socket} for TCP",
        ),
    ],
    ids=["zones: any", "more nodes than a zone has", "more nodes than its pools have in a zone"],
)
def test_with_efa_a_job_in_several_zones_must_choose_tcp(keys: dict[str, object], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_fit(JobSpec.model_validate({"script": "a.py", **keys}), EFA)
    assert str(caught.value) == expected
    check_fit(JobSpec.model_validate({"script": "a.py", **keys, **SOCKET}), EFA)


@pytest.mark.parametrize(
    "keys",
    [{"nodes": {"min": 6, "max": 10}}, {"zones": "any", "pools": ["b", "also-b"]}],
    ids=["a zone has room for nodes.min", "its pools are in one zone"],
)
def test_with_efa_a_job_in_one_zone_fits(keys: dict[str, object]) -> None:
    check_fit(JobSpec.model_validate({"script": "a.py", **keys}), EFA)


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


def test_arguments_and_variables_are_what_is_written(tmp_path: Path) -> None:
    """YAML reads 16:9 as 969, 007 as 7, 1.10 as 1.1, and 2024_01 as 202401."""
    (tmp_path / "train.py").touch()
    written = ["16:9", "007", "1.10", "2024_01", "1e-3", "0.00001", ".5", "3"]
    (tmp_path / "job.yaml").write_text(
        f"script: train.py\nargs: [{', '.join(written)}]\nenv: {{VERSION: 2.10}}\nkeep: 2\nbudget: 1.50\n"
    )
    job = load_job(tmp_path / "job.yaml")
    assert (list(job.args), job.env) == (written, {"VERSION": "2.10"})
    assert (job.keep_checkpoints, job.budget) == (2, 1.5)
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
    [AWS.replace("name: a\n", "name: sgd\n"), GCP.replace("name: a\n", "name: sg\n")],
    ids=["another word on AWS", "on Google Cloud"],
)
def test_names_that_only_look_like_ids_of_security_groups(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert load_cluster(path).name.startswith("sg")


@pytest.mark.parametrize(
    "text",
    [
        AWS.replace("g5.2xlarge}", "g5.2xlarge, disk: 30}"),
        AWS.replace("g5.2xlarge}", "g5.2xlarge, disk: 20}") + "image: ami-0123456789abcdef0\n",
        AWS.replace("g5.2xlarge", "p6-b200.48xlarge") + "image: ami-0123456789abcdef0\n",
        GCP.replace("g2-standard-8", "a4-highgpu-8g") + "image: of-mine\n",
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
