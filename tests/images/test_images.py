"""The image's template, scripts and units, as far as they can be looked at without making an image.

Where they are really run: tests/image.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from images import lint

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
UNITS = IMAGES / "root/etc/systemd/system"


def tool(name: str) -> str:
    """Skips, visibly, where it is not installed."""
    found = lint.find(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_scripts_are_clean() -> None:
    tool("shellcheck")
    assert len(lint.scripts()) > 20
    assert lint._shellcheck(tool("shellcheck"))


def test_the_template_is_formatted() -> None:
    done = subprocess.run([tool("packer"), "fmt", "-check", str(IMAGES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("source", lint.SOURCES.values())
def test_the_template_is_valid(source: str, tmp_path: Path) -> None:
    packer = tool("packer")
    copy = lint.template_for(lint.packer_version(packer), tmp_path)
    assert lint.validate(packer, copy, source, lint.EXAMPLE) == ""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("commit", "main", "40 hexadecimal digits"),
        ("built", "yesterday", "20261121-093000"),
        ("gcp_zone", "us-central1", "The zone must be"),
        ("aws_region", "us-east-1a", "The region must be"),
        ("aws_subnet", "vpc-0123", "The subnet must be"),
        ("gcp_project", "My Project", "must be its id"),
        ("disk_gb", "8", "20 GB or more"),
    ],
)
def test_wrong_variables_are_refused(name: str, value: str, said: str, tmp_path: Path) -> None:
    packer = tool("packer")
    copy = lint.template_for(lint.packer_version(packer), tmp_path)
    answer = lint.validate(packer, copy, lint.SOURCES["gcp"], {**lint.EXAMPLE, name: value})
    assert said in " ".join(answer.split())


def test_a_public_build_on_aws_is_asked_for(tmp_path: Path) -> None:
    """Nothing is public by default, and no rule of the template opens a port: Packer makes none for SSM's sessions."""
    packer = tool("packer")
    copy = lint.template_for(lint.packer_version(packer), tmp_path)
    values = {**lint.EXAMPLE, "aws_public": "true"}
    del values["aws_subnet"]
    assert lint.validate(packer, copy, lint.SOURCES["aws"], values) == ""
    template = (copy / "spotrun.pkr.hcl").read_text()
    assert "associate_public_ip_address = var.aws_public\n" in template
    assert not re.search("security_group|source_cidrs", template)
    variable = (copy / "variables.pkr.hcl").read_text().partition('variable "aws_public"')[2].partition("}")[0]
    assert re.search(r"default += false\n", variable)


def test_packer_outlives_the_reboot_over_ssm() -> None:
    """A tunnel's plugin may hold a dead connection open for a minute and a half, and refuse others until it ends."""
    template = (IMAGES / "spotrun.pkr.hcl").read_text()
    reboot, after = re.findall(r'^  provisioner "shell" \{\n(.*?)^  \}', template, re.MULTILINE | re.DOTALL)[2:4]
    assert "systemctl reboot" in reboot
    assert re.search(r"expect_disconnect += true\n", reboot)
    assert re.search(r"skip_clean += true\n", reboot)  # nothing is asked of a machine that goes down
    assert seconds(after, "pause_before") >= 90
    assert seconds(after, "start_retry_timeout") >= 600
    source = template[template.index('source "amazon-ebs"') : template.index("build {")]
    assert 60 <= seconds(source, "ssh_read_write_timeout") <= 300


def seconds(text: str, option: str) -> int:
    (found,) = re.findall(rf'^ +{option} += "(\d+)([sm])"$', text, re.MULTILINE)
    return int(found[0]) * {"s": 1, "m": 60}[found[1]]


def test_every_variable_is_described() -> None:
    text = (IMAGES / "variables.pkr.hcl").read_text()
    blocks = re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    assert [name for name, block in blocks if 'description = "' not in block] == []


def test_every_script_can_be_told_apart_and_stops_at_an_error() -> None:
    found = sorted((IMAGES / "provision").glob("[0-9]*.sh"))
    assert len({path.name[:2] for path in found}) == len(found) > 10
    for path in found:
        assert os.access(path, os.X_OK), path
        lines = path.read_text().splitlines()
        assert lines[0] == "#!/usr/bin/env bash"
        assert "set -euo pipefail" in lines[:8], path


def test_everything_in_root_is_put_somewhere() -> None:
    scripts = "\n".join(path.read_text() for path in (IMAGES / "provision").glob("*.sh"))
    for path in (IMAGES / "root").rglob("*"):
        if path.is_file():
            stem = path.name.removesuffix(".service") if path.parent == UNITS else path.name
            parts = {path.name, stem, path.parent.name.removesuffix(".service.d")}
            assert any(part in scripts for part in parts), path


@pytest.mark.parametrize("cloud", lint.SOURCES)
def test_packer_builds_what_it_is_asked_for(cloud: str, tmp_path: Path) -> None:
    """The template's own `build` block over sources that make nothing."""
    block = re.search(r"^build .*\n.*", (IMAGES / "spotrun.pkr.hcl").read_text(), re.MULTILINE)
    assert block is not None
    kinds = {source: f"null.{source.partition('.')[2]}" for source in lint.SOURCES.values()}
    text = block[0]
    for source, null in kinds.items():
        text = text.replace(source, null)
    nulls = [f'source "null" "{null.partition(".")[2]}" {{\n  communicator = "none"\n}}\n' for null in kinds.values()]
    (tmp_path / "null.pkr.hcl").write_text(f"{text}\n}}\n{''.join(nulls)}")
    command = [tool("packer"), "build", "-only", kinds[lint.SOURCES[cloud]], "null.pkr.hcl"]
    done = subprocess.run(command, cwd=tmp_path, env=lint._environment(), capture_output=True, text=True, check=False)
    assert re.findall(r"Build '(\S+)' finished", done.stdout) == [kinds[lint.SOURCES[cloud]]], done.stdout + done.stderr


def options(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize(("unit", "role"), [("spotrun-agent.service", "node"), ("spotrun-head.service", "head")])
def test_a_service_is_for_its_role_and_watched(unit: str, role: str) -> None:
    found = options(unit)
    assert found["ConditionPathExists"] == [f"/run/spotrun-role/{role}"]
    for key in ("Wants", "After"):
        assert "spotrun-role.service" in " ".join(found[key]).split()
    assert "ExecCondition" not in found  # it would be in the sandbox, and a failure of that mean "skip"
    assert found["Type"] == ["notify"]
    assert found["User"] == [{"head": "spotrun-head", "node": "spotrun"}[role]]
    assert found["Restart"] == ["always"]
    assert int(found["WatchdogSec"][0]) >= 10


def test_fabric_manager_finds_the_driver_loaded() -> None:
    """Without the driver it ends, and nothing restarts it: on H100, a restart needs a reset of the GPUs first."""
    found = options("nvidia-fabricmanager.service.d/spotrun.conf")
    assert found["ExecCondition"] == ["/usr/lib/spotrun/has-nvidia nvswitch"]  # systemd runs this first
    assert found["ExecStartPre"] == ["-/usr/sbin/modprobe nvidia"]
    assert "Restart" not in found


@pytest.mark.parametrize("unit", ["spotrun-agent.service", "spotrun-head.service"])
def test_a_service_is_sandboxed(unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At most "OK", which ends at 5 (systemd-analyze(1)). What stays open, and why: docs/images.md."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        [analyze, "security", "--offline=yes", "--json=short", str(UNITS / unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd-analyze is too old for --offline")
    exposed = [row for row in json.loads(done.stdout) if row["exposure"]]
    plain = subprocess.run(
        [analyze, "security", "--offline=yes", str(UNITS / unit)], capture_output=True, text=True, check=False
    )
    score = re.search(r"exposure level for \S+: ([\d.]+)", plain.stdout)
    assert score is not None, plain.stdout + plain.stderr
    with capsys.disabled():
        print(f"\n{unit}: {score[1]} of 10, open: {', '.join(str(row['name']) for row in exposed)}")
    assert float(score[1]) < 5


@pytest.mark.parametrize(("code", "expected"), [(0, ["head", "node"]), (1, []), (255, [])])
def test_the_role_is_kept_for_the_services(code: int, expected: list[str], tmp_path: Path) -> None:
    program = tmp_path / "role"
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    kept = tmp_path / "kept"
    kept.mkdir()
    for line in options("spotrun-role.service")["ExecStart"]:
        words = shlex.split(line.replace("/usr/lib/spotrun/role", str(program)).replace("/run/spotrun-role", str(kept)))
        subprocess.run(words, check=True)
    assert sorted(path.name for path in kept.iterdir()) == expected
