"""The frame of the stacks: what is read, what is written where, at which price, and what none of them may hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import app, cdk, lint
from spotrun import spec
from spotrun.spec import load_cluster
from tests.infra.synthesized import CLOUD_FILES, ROOT, described, synthesized, walk

pytestmark = pytest.mark.clouds

GCP = """
name: demo
cloud: gcp
region: us-central1
project: my-project
pools: [{name: spot, zone: us-central1-a, machine: g2-standard-8}]
"""
AWS = """
name: demo
cloud: aws
region: eu-west-1
pools: [{name: spot, zone: eu-west-1a, machine: g5.2xlarge}]
"""
CLOUD_FILE = pytest.mark.parametrize("file", CLOUD_FILES, ids=[path.stem for path in CLOUD_FILES])


def labels(count: int) -> str:
    return f"labels: {{{', '.join(f'label-{number}: x' for number in range(count))}}}\n"


def infra(tmp_path: Path, file: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m infra` as `cdktf` and `make` run it, into tmp_path/a/out."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CLUSTER": file,
        "CDKTF_OUTDIR": str(tmp_path / "a/out"),
        **environment,
    }
    command = [sys.executable, "-m", "infra"]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)


# What every stack is.


@CLOUD_FILE
def test_both_stacks_of_every_cluster_file_synthesize(file: Path) -> None:
    cluster = synthesized(file)
    for stack in (cluster.base, cluster.pools):
        (provider,) = stack.document["provider"]
        assert re.fullmatch(
            r"[0-9]+\.[0-9]+\.[0-9]+", stack.document["terraform"]["required_providers"][provider]["version"]
        )
    described = json.dumps(cluster.pools.document)
    assert all(f"{cluster.spec.name}--{pool.name}" in described for pool in cluster.spec.pools)


@CLOUD_FILE
def test_nothing_may_come_in_from_anywhere(file: Path) -> None:
    """The whole internet stands in no rule but those of what may go out, and in routes."""
    for stack in (synthesized(file).base, synthesized(file).pools):
        for path, value in walk(stack.document.get("resource", {})):
            if value in ("0.0.0.0/0", "::/0"):
                assert re.search(r"egress|route", ".".join(path)), f"{path} is open to {value}"


@CLOUD_FILE
def test_no_machine_has_a_public_address(file: Path) -> None:
    public = {"access_config", "ipv6_access_config", "nat_ip", "public_ip", "ipv6_addresses"}
    switches = {"associate_public_ip_address", "map_public_ip_on_launch", "assign_ipv6_address_on_creation"}
    for stack in (synthesized(file).base, synthesized(file).pools):
        for path, value in walk(stack.document.get("resource", {})):
            assert not public & set(path), path
            assert path[-1:] == () or path[-1] not in switches or str(value).lower() == "false", path


@CLOUD_FILE
def test_machines_get_no_script_and_no_key(file: Path) -> None:
    """What is baked into the image reads the machine's labels; nothing is handed in, so nothing can be handed on."""
    words = {
        "metadata_startup_script",
        "startup-script",
        "user_data",
        "user_data_base64",
        "ssh-keys",
        "sshKeys",
        "key_name",
    }
    for stack in (synthesized(file).base, synthesized(file).pools):
        assert [path for path, _ in walk(stack.document) if words & set(path)] == []


@CLOUD_FILE
def test_everything_carries_the_clusters_label(file: Path) -> None:
    cluster = synthesized(file)
    for stack in (cluster.base, cluster.pools):
        ((provider,),) = stack.document["provider"].values()
        labels = provider["default_labels"] if cluster.spec.cloud == "gcp" else provider["default_tags"][0]["tags"]
        assert labels == {**cluster.spec.labels, "spotrun-cluster": cluster.spec.name}


@CLOUD_FILE
def test_the_head_finds_its_clusters_description_in_the_bucket(file: Path) -> None:
    cluster = synthesized(file)
    kind = {"gcp": ("google_storage_bucket_object", "name"), "aws": ("aws_s3_object", "key")}[cluster.spec.cloud]
    written = cluster.pools.one(kind[0])
    assert written[kind[1]] == f"clusters/{cluster.spec.name}/cluster.json"
    assert spec.described(written["content"].encode()) == load_cluster(file)


@CLOUD_FILE
def test_terraform_reads_every_stack(tmp_path: Path, file: Path) -> None:
    """What it can tell without a provider, which only AWS's tests have: that blocks and their meta-arguments are so."""
    terraform = shutil.which("terraform")
    if terraform is None:
        pytest.skip("terraform is not installed")
    for stack in (synthesized(file).base, synthesized(file).pools):
        document = {**stack.document, "terraform": {**stack.document["terraform"]}}
        document["terraform"].pop("backend")  # it would want to be initialized
        (tmp_path / "cdk.tf.json").write_text(json.dumps(document))
        command = [terraform, "providers", "-no-color"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        provider = {"gcp": "google", "aws": "aws"}[synthesized(file).spec.cloud]
        assert f"provider[registry.terraform.io/hashicorp/{provider}]" in done.stdout


# Where the state is.


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("", {"local": {"path": "{home}/terraform/demo-{stack}.tfstate"}}),
        ("state: gs://my-state/a/b", {"gcs": {"bucket": "my-state", "prefix": "a/b/demo-{stack}"}}),
        (
            "state: s3://my-state/a",
            {"s3": {"bucket": "my-state", "key": "a/demo-{stack}.tfstate", "encrypt": True, "use_lockfile": True}},
        ),
    ],
)
def test_state_is_where_the_cluster_file_says(tmp_path: Path, state: str, expected: dict[str, Any]) -> None:
    app.synthesize(described(f"{GCP}{state}\n", tmp_path), tmp_path / "out", tmp_path / "home")
    for stack in ("base", "pools"):
        document = json.loads((tmp_path / "out/stacks" / f"demo-{stack}" / "cdk.tf.json").read_text())
        text = json.dumps(expected).replace("{home}", str(tmp_path / "home")).replace("{stack}", stack)
        assert document["terraform"]["backend"] == json.loads(text)


def test_state_in_s3_of_an_aws_cluster_is_in_its_region(tmp_path: Path) -> None:
    app.synthesize(described(f"{AWS}state: s3://my-state/a\n", tmp_path), tmp_path / "out", tmp_path)
    document = json.loads((tmp_path / "out/stacks/demo-pools/cdk.tf.json").read_text())
    assert document["terraform"]["backend"]["s3"]["region"] == "eu-west-1"


def test_pools_come_after_base(tmp_path: Path) -> None:
    app.synthesize(described(GCP, tmp_path), tmp_path / "out", tmp_path)
    stacks = json.loads((tmp_path / "out/manifest.json").read_text())["stacks"]
    assert stacks["demo-pools"]["dependencies"] == ["demo-base"]
    assert stacks["demo-base"]["dependencies"] == []


# Wrong files and missing tools.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such cluster file"),
        ("name: demo\ncloud: local\npools: [{name: a, zone: local-a}]\n", "cloud local has no stacks"),
        (GCP.replace("us-central1-a", "us-east1-b"), "is not in region us-central1"),
        (GCP + 'image: "${file(\\"/etc/passwd\\")}"\n', "which Terraform would run as code"),
        (GCP + "image: some/where/else\n", "image is 'some/where/else'; allowed: "),
        (
            GCP.replace("g2-standard-8", "n1-standard-8") + "network: {placement: true}\n",
            "Google places no n1-standard-8",
        ),
        (GCP.replace("g2-standard-8", "g2-standard-8, max_run_duration: 5s"), "max_run_duration is 5 s"),
        (GCP + "labels: {spotrun-gpus: three}\n", "labels: spotrun-gpus: spotrun sets these itself"),
        (AWS + labels(44), "labels: 44 of them; AWS leaves room for 43"),
    ],
)
def test_a_wrong_file_never_reaches_terraform(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "cluster.yaml"
    if text is not None:
        file.write_text(text)
    done = infra(tmp_path, str(file))
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "a").exists()


def test_no_cluster_file_is_said_in_a_line(tmp_path: Path) -> None:
    done = infra(tmp_path, "")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "spotrun: no cluster file: name one, such as CLUSTER=clusters/gcp-l4.yaml\n"


def test_a_folder_that_cannot_be_made_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = infra(tmp_path, str(CLOUD_FILES[0]), CDKTF_OUTDIR=str(tmp_path / "file/out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"spotrun: .*/file/out cannot be created: .*; set CDKTF_OUTDIR to another folder\n", done.stderr
    )


def test_missing_node_is_said_in_a_line(tmp_path: Path) -> None:
    done = infra(tmp_path, str(CLOUD_FILES[0]), PATH="/nonexistent", JSII_NODE="")
    assert done.returncode == 2
    assert done.stderr.startswith("spotrun: the stacks need Node.js")
    assert done.stderr.count("\n") == 1


# CDKTF, and its price.


@CLOUD_FILE
def test_synthesis_loads_little(tmp_path: Path, file: Path) -> None:
    """Under 150 MB of Python's own: leaf modules, not the providers' thousands. bench/synth.py has more."""
    code = (
        "import json, sys; from infra.__main__ import main; assert main() == 0;"
        "loaded = [name for name in sys.modules if name.startswith('cdktf_cdktf_provider_')];"
        # Not ru_maxrss, which a process takes over from the one that started it.
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM:'));"
        "print(json.dumps([int(peak.split()[1]) / 1024, len(loaded)]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CLUSTER": str(file), "CDKTF_OUTDIR": str(tmp_path / "out")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    memory, modules = json.loads(done.stdout)
    assert memory < 150
    assert modules < 150


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("compute_firewall", {"network": "n", "name": "n", "alow": []}),
        ("compute_firewall", {"network": "n", "name": "n", "allow": [{"protocol": "tcp", "port": ["22"]}]}),
        ("storage_bucket", {"name": "n", "location": "l", "versioning": {"on": True}}),
    ],
    ids=["argument", "in a list of blocks", "in a block"],
)
def test_an_argument_that_the_provider_lacks_is_an_error(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    stack = cdk.TerraformStack(cdk.new_app(str(tmp_path)), "stack")
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        cdk.google(name)(stack, "it", **arguments)


def test_a_resource_that_the_provider_lacks_is_an_error(tmp_path: Path) -> None:
    stack = cdk.TerraformStack(cdk.new_app(str(tmp_path)), "stack")
    with pytest.raises(ModuleNotFoundError, match="compute_fire_wall"):
        cdk.google("compute_fire_wall")(stack, "it")


def test_keys_stay_as_they_were_written(tmp_path: Path) -> None:
    """CDKTF by itself loses snake_case in lists, and hyphens in what a provider is told."""
    application = cdk.new_app(str(tmp_path))
    stack = cdk.TerraformStack(application, "stack")
    cdk.google("provider")(stack, "google", default_labels={"a-b": "c"})
    rule = {"action": {"type": "Delete"}, "condition": {"matches_prefix": ["x"]}}
    cdk.google("storage_bucket")(stack, "b", name="b", location="l", labels={"d-e": "f"}, lifecycle_rule=[rule])
    application.synth()
    document = json.loads((tmp_path / "stacks/stack/cdk.tf.json").read_text())
    assert document["provider"]["google"] == [{"default_labels": {"a-b": "c"}}]
    made = document["resource"]["google_storage_bucket"]["b"]
    assert (made["labels"], made["lifecycle_rule"]) == ({"d-e": "f"}, [rule])


@pytest.mark.timeout(900)
def test_the_cdktf_command_works_here(tmp_path: Path) -> None:
    if shutil.which("cdktf") is None:
        pytest.skip("cdktf is not installed: npm install -g cdktf-cli@0.21.0")
    shutil.copy(ROOT / "cdktf.json", tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "CLUSTER": str(CLOUD_FILES[0]), "CHECKPOINT_DISABLE": "1"}
    for words in (["synth"], ["list"]):
        done = subprocess.run(
            ["cdktf", *words],
            cwd=tmp_path,
            env={**os.environ, **environment, "CI": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        name = load_cluster(CLOUD_FILES[0]).name
        assert f"{name}-base" in done.stdout
        assert f"{name}-pools" in done.stdout
    assert (tmp_path / "cdktf.out/stacks").is_dir()


# Continuous integration and Checkov.

ACTIONS = sorted((ROOT / ".github").rglob("*.yml"))


@pytest.mark.parametrize("path", ACTIONS, ids=[path.parent.name + "/" + path.stem for path in ACTIONS])
def test_workflows_hold_no_keys_and_run_what_was_reviewed(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    for keys, value in walk(document):
        if keys and keys[-1] == "uses" and not value.startswith("./"):
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", value), (
                f"{value}: a tag can be moved, a commit cannot"
            )
        assert not isinstance(value, str) or "secrets." not in value, f"{keys}: a long-lived key"
        assert not {"credentials_json", "aws-access-key-id", "aws-secret-access-key"} & set(keys)
    for line in path.read_text().splitlines():
        if "uses:" in line and "@" in line:
            assert re.search(r"# v[0-9]+\.[0-9]+\.[0-9]+$", line), f"{line}: say which version that commit is"


@pytest.mark.parametrize(("name", "identity"), [("plan", "PLAN"), ("deploy", "DEPLOY")])
def test_workflows_may_little(name: str, identity: str) -> None:
    document = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    assert document["permissions"] == {"contents": "read"}
    (job,) = document["jobs"].values()
    assert job["permissions"] == {"contents": "read", "id-token": "write"}
    assert job["concurrency"]["group"].endswith("${{ matrix.cluster }}")
    (login,) = (step["with"] for step in job["steps"] if step.get("uses", "").startswith("./.github/actions/stacks"))
    assert login["gcp_account"] == f"${{{{ vars.GCP_{identity}_SERVICE_ACCOUNT }}}}"
    assert login["aws_role"] == f"${{{{ vars.AWS_{identity}_ROLE }}}}"
    triggers = document[True]  # YAML's word for `on`
    if name == "plan":
        assert list(triggers) == ["pull_request"]  # never pull_request_target, which has the repository's own rights
        assert "head.repo.full_name == github.repository" in job["if"]
        assert any(step.get("env", {}).get("TF_CLI_ARGS_plan") == "-lock=false" for step in job["steps"])
        return
    assert triggers["push"]["branches"] == ["main"]
    assert "refs/heads/main" in job["if"]
    assert job["environment"] == "spotrun"
    assert job["concurrency"]["cancel-in-progress"] is False


def test_workflows_log_in_by_oidc() -> None:
    steps = yaml.safe_load((ROOT / ".github/actions/stacks/action.yml").read_text())["runs"]["steps"]
    logins = {step["uses"].partition("@")[0]: step["with"] for step in steps if "uses" in step}
    assert set(logins["google-github-actions/auth"]) == {"workload_identity_provider", "service_account"}
    assert set(logins["aws-actions/configure-aws-credentials"]) == {"role-to-assume", "aws-region"}


def test_checkov_reads_the_stacks_of_every_cluster_file(tmp_path: Path) -> None:
    files = [str(path) for path in (ROOT / "clusters").glob("*.yaml")]
    assert lint.main(tmp_path, files) == 0
    assert {path.name for path in tmp_path.iterdir()} == {path.stem for path in CLOUD_FILES}
    for path in CLOUD_FILES:
        name = load_cluster(path).name
        found = {found.parent.name for found in (tmp_path / path.stem).rglob("cdk.tf.json")}
        assert found == {f"{name}-base", f"{name}-pools"}


def test_checkov_is_not_asked_about_a_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint.main(tmp_path, [str(tmp_path / "none.yaml")]) == 2
    assert "there is no such cluster file" in capsys.readouterr().err


def test_checkov_skips_nothing_without_a_reason() -> None:
    text = (ROOT / ".checkov.yaml").read_text()
    skipped = yaml.safe_load(text)["skip-check"]
    reasons = dict(re.findall(r"^  - (CKV\w+) # (.{20,})$", text, re.MULTILINE))
    assert set(reasons) == set(skipped)
    assert len(skipped) == len(set(skipped))
