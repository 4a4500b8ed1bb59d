"""The image's template, scripts and units, as far as they can be looked at without making an image.

Where they are really run: tests/image.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from images import lint, versions
from spotrun.spec import names

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "images"
UNITS = IMAGES / "root/etc/systemd/system"
TOOLS = IMAGES / "root/usr/lib/spotrun"


def tool(name: str) -> str:
    """Skips, visibly, where it is not installed."""
    found = lint.find(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


# The template and the scripts


def test_scripts_are_clean() -> None:
    tool("shellcheck")
    assert len(lint.scripts()) > 20
    assert lint._shellcheck(tool("shellcheck"))


def test_the_template_is_formatted() -> None:
    done = subprocess.run([tool("packer"), "fmt", "-check", str(IMAGES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("source", lint.SOURCES)
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
    answer = lint.validate(packer, copy, lint.SOURCES[0], {**lint.EXAMPLE, name: value})
    assert said in " ".join(answer.split())


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


def test_nothing_secret_or_public() -> None:
    text = (IMAGES / "spotrun.pkr.hcl").read_text()
    for wanted in (
        "omit_external_ip = true",
        "use_iap          = true",
        'ssh_interface               = "session_manager"',
    ):
        assert re.sub(r" +", " ", wanted) in re.sub(r" +", " ", text)
    assert "associate_public_ip_address = false" in re.sub(r" +", " ", text)


# The versions


def test_versions_are_pinned_once() -> None:
    pinned = versions.read(IMAGES / "versions.env")
    for name, value in pinned.items():
        assert value, name
        if name.endswith("SHA256"):
            assert re.fullmatch("[0-9a-f]{64}", value), name
    constraints = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pinned["TORCH"] == constraints["torch"]
    others = [
        path
        for path in IMAGES.rglob("*")
        if path.is_file() and path.name != "versions.env" and "__pycache__" not in str(path)
    ]
    for name in ("KERNEL", "NVIDIA_DRIVER", "EFA_INSTALLER", "EFA_INSTALLER_SHA256", "SSM_AGENT"):
        assert [path for path in others if pinned[name] in path.read_text()] == [], name


APT = """\
linux-image-6.1.0-56-cloud-amd64 |  6.1.192-2 | http://mirror bookworm-security/main amd64 Packages
python3.11 | 3.11.2-6+deb12u6 | http://mirror bookworm/main amd64 Packages
    chrony | 4.3-2+deb12u9 | http://mirror bookworm/main amd64 Packages
    chrony | 4.3-2+deb12u3 | http://mirror bookworm/main amd64 Packages
    chrony |     9.9 | http://mirror sid/main amd64 Packages
"""
PINNED = {
    "KERNEL_ABI": "6.1.0-56-cloud-amd64",
    "KERNEL": "6.1.192-2",
    "PYTHON": "3.11",
    "CHRONY": "4.3-2+deb12u3",
    "NODE_EXPORTER": "1.5.0-1+b6",
    "TORCH": "2.13.0",
    "NVIDIA_DRIVER": "580.1",
    "DCGM": "1:4.6.0-1",
    "DCGM_EXPORTER": "4.8.3-1",
    "EFA_INSTALLER": "1.50.0",
    "AWS_OFI_NCCL": "1.21.1",
    "EC2_INSTANCE_CONNECT": "0" * 40,
    "SSM_AGENT": "3.3.1.0",
}


def _ask(command: list[str]) -> str:
    if command[:2] == ["apt-cache", "madison"]:
        return APT
    if command[:2] == ["apt-cache", "depends"]:
        return "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-60-cloud-amd64\n"
    return "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.9.1\n"


def _get(url: str) -> bytes:
    if "efa-changelog" in url:
        return (
            b"| Version | Changes |\n| 1.51.0 | [Amazon OFI NCCL Plugin 1.22.0] |\n| 1.50.0 | OFI NCCL Plugin 1.21.1 |"
        )
    raise OSError("no way there")


def test_what_is_newest() -> None:
    rows = versions.compare(PINNED, {"NVIDIA_REPOSITORY": "https://example.com"}, versions.Registries(_ask, _get))
    found = {row.name: (row.newest, row.there) for row in rows}
    assert found["KERNEL"] == ("6.1.192-2", True)
    assert found["KERNEL_ABI"] == ("6.1.0-60-cloud-amd64", True)
    assert found["CHRONY"] == ("4.3-2+deb12u9", True)
    assert found["NODE_EXPORTER"] == ("", False)  # gone
    assert found["TORCH"] == ("2.15.0", True)
    assert found["NVIDIA_DRIVER"] == ("", None)
    assert found["EFA_INSTALLER"] == ("1.51.0", None)
    assert found["AWS_OFI_NCCL"] == ("1.22.0", None)
    assert {row.name for row in rows} >= set(PINNED)
    shown = versions.table(rows)
    assert "NVIDIA's registry was not reached: no way there" in shown
    assert re.search(r"NODE_EXPORTER .* not to be had any more", shown)


# The units


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
    assert found["ExecCondition"] == [f"/usr/lib/spotrun/role {role}"]
    assert found["Type"] == ["notify"]
    assert found["User"] == ["spotrun"]
    assert found["Restart"] == ["always"]
    assert int(found["WatchdogSec"][0]) >= 10


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


# The programs that units run


class Server(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        key = f"{self.command} {self.path}"
        wanted, status, text = self.answers.get(key, (None, 404, "<html>not found</html>"))
        if wanted and self.headers.get(wanted[0]) != wanted[1]:
            status, text = 401, ""
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def metadata(answers: dict[str, Any], port: int = 0) -> Iterator[str]:
    """A metadata server: {METHOD path: (header it must have, status, body)}."""
    handler = type("Handler", (Server,), {"answers": answers})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def gce(role: str | None, preempted: str = "FALSE") -> dict[str, Any]:
    flavour = ("Metadata-Flavor", "Google")
    found = {"GET /computeMetadata/v1/instance/preempted": (flavour, 200, preempted)}
    if role is not None:
        found[f"GET /computeMetadata/v1/instance/attributes/{names.ROLE}"] = (flavour, 200, role)
    return found


def ec2(role: str | None, without: int = 401) -> dict[str, Any]:
    """without: what it answers those that come without a token."""
    found: dict[str, Any] = {
        "PUT /latest/api/token": (("X-aws-ec2-metadata-token-ttl-seconds", "60"), 200, "a-token"),
        f"GET /computeMetadata/v1/instance/attributes/{names.ROLE}": (None, without, ""),
    }
    if role is not None:
        found[f"GET /latest/meta-data/tags/instance/{names.ROLE}"] = (
            ("X-aws-ec2-metadata-token", "a-token"),
            200,
            role,
        )
    return found


def ask(role: str, environment: dict[str, str]) -> int:
    plain = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run([str(TOOLS / "role"), role], env=plain, timeout=30, check=False).returncode


@pytest.mark.parametrize(
    ("answers", "wanted", "code"),
    [
        (gce("head"), "head", 0),
        (gce("head"), "node", 1),
        (gce("node\n"), "node", 0),
        (gce("node-of-others"), "node", 1),
        (gce(None), "node", 1),
        (ec2("node"), "node", 0),
        (ec2("node"), "head", 1),
        (ec2("head", without=404), "head", 0),
        (ec2(None), "head", 1),
    ],
)
def test_the_role_is_what_the_cloud_says(answers: dict[str, Any], wanted: str, code: int) -> None:
    with metadata(answers) as host:
        both = {"GCE_METADATA_HOST": host, "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{host}/"}
        assert ask(wanted, both) == code


def test_the_role_is_waited_for() -> None:
    """The network may come up later."""
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
    process = subprocess.Popen(
        [str(TOOLS / "role"), "node"], env={"PATH": os.environ["PATH"], "GCE_METADATA_HOST": f"127.0.0.1:{port}"}
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        with metadata(gce("node"), port):
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("devices", "gpu", "switch"),
    [
        ([], 1, 1),
        ([("0x10de", "0x030200")], 0, 1),  # L4, H100: a 3D controller
        ([("0x10de", "0x030200"), ("0x10de", "0x068000")], 0, 0),
        ([("0x8086", "0x030000"), ("0x1d0f", "0x068000")], 1, 1),
    ],
)
def test_what_nvidia_has_put_in(devices: list[tuple[str, str]], gpu: int, switch: int, tmp_path: Path) -> None:
    for index, (vendor, kind) in enumerate(devices):
        folder = tmp_path / f"bus/pci/devices/0000:00:0{index}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    environment = {"PATH": os.environ["PATH"], "SPOTRUN_SYS": str(tmp_path)}
    for what, code in (("gpu", gpu), ("nvswitch", switch), ("ethernet", 255)):
        done = subprocess.run([str(TOOLS / "has-nvidia"), what], env=environment, capture_output=True, check=False)
        assert done.returncode == code, what


@pytest.mark.parametrize(("preempted", "least", "most"), [("FALSE", 0, 2), ("TRUE", 1.2, 6)])
def test_a_stop_waits_while_the_machine_is_preempted(preempted: str, least: float, most: float) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with metadata(gce("node", preempted)) as host:
            environment = {"PATH": os.environ["PATH"], "GCE_METADATA_HOST": host, "SPOTRUN_NOTICE": "1.5"}
            began = time.monotonic()
            subprocess.run([str(TOOLS / "await-end"), str(sleeper.pid)], env=environment, check=True, timeout=30)
            assert least <= time.monotonic() - began <= most
    finally:
        sleeper.communicate(b"\n")


def test_a_stop_waits_no_longer_than_the_agent_lives() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with metadata(gce("node", "TRUE")) as host:
        environment = {"PATH": os.environ["PATH"], "GCE_METADATA_HOST": host, "SPOTRUN_NOTICE": "60"}
        waiting = subprocess.Popen([str(TOOLS / "await-end"), str(sleeper.pid)], env=environment)
        sleeper.communicate(b"\n")
        assert waiting.wait(20) == 0


# `make image`


def test_packer_is_told_of_the_cluster(tmp_path: Path) -> None:
    """A program in Packer's place writes down what it is called with."""
    calls = tmp_path / "calls"
    packer = tmp_path / "packer"
    packer.write_text(f'#!/bin/sh\n[ "$1" = version ] && {{ echo Packer v1.11.2; exit; }}\necho "$*" >>{calls}\n')
    packer.chmod(packer.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "images.build", "clusters/gcp-l4.yaml", "-debug"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"spotrun-\d{8}-\d{6}\n", done.stdout)
    first, second = calls.read_text().splitlines()
    assert first == "init images"
    for word in ("build -only *.googlecompute.gcp ", "-var gcp_project=my-project ", " -debug images"):
        assert word in second
    assert re.search(r"-var commit=[0-9a-f]{40}(-dirty)? ", second)
    assert len(list((ROOT / "build/image/wheel").glob("spotrun-*.whl"))) == 1


@pytest.mark.parametrize(("cluster", "said"), [("clusters/local.yaml", "cloud local starts from no image")])
def test_what_cannot_be_built(cluster: str, said: str) -> None:
    command = [sys.executable, "-m", "images.build", cluster]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
