"""The image's template, scripts and units, as far as they can be looked at without making an image.

Where they are really run: tests/image.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from images import build, lint, versions
from spotrun.spec import names
from tests.helpers import wait_for

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


@pytest.mark.parametrize(
    "garbage",
    [gzip.compress(b"a")[:10] + b"\xff" * 40, gzip.compress(b"a")[:-9], b"<html>"],
    ids=["broken", "cut off", "a page"],
)
def test_a_registry_that_answers_nonsense_is_said_to_be_out_of_reach(garbage: bytes) -> None:
    ask = versions.Registries(_ask, lambda _: garbage)
    rows = versions.compare(PINNED, {"NVIDIA_REPOSITORY": "https://example.com"}, ask)
    (row,) = [row for row in rows if row.name == "NVIDIA_DRIVER"]
    assert row.note.startswith("NVIDIA's registry was not reached")


def test_an_answer_that_ends_early_is_no_answer() -> None:
    with (
        metadata({"GET /": (None, 200, "half", ("Content-Length", "1000"))}) as host,
        pytest.raises(OSError, match="Incomplete"),
    ):
        versions.fetch(f"http://{host}/")


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
    assert found["ConditionPathExists"] == [f"/run/spotrun-role/{role}"]
    for key in ("Wants", "After"):
        assert "spotrun-role.service" in " ".join(found[key]).split()
    assert "ExecCondition" not in found  # it would be in the sandbox, and a failure of that mean "skip"
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


# The programs that units run


class Server(BaseHTTPRequestHandler):
    """answers: {METHOD path: (header that the request must have, status, body, headers of the answer)}, or what
    returns one for each request. Status 0: it hangs up.
    """

    answers: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        found = self.answers.get(f"{self.command} {self.path}", (None, 404, "<html>not found</html>"))
        wanted, status, text, *more = found() if callable(found) else found
        if status == 0:
            return
        if wanted and self.headers.get(wanted[0]) != wanted[1]:
            status, text = 401, ""
        self.send_response(status)
        for header in more:
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def metadata(answers: dict[str, Any], port: int = 0) -> Iterator[str]:
    """A metadata server; answers as `Server` has them."""
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


@pytest.mark.parametrize(
    "request_of_ec2", ["PUT /latest/api/token", f"GET /latest/meta-data/tags/instance/{names.ROLE}"]
)
@pytest.mark.parametrize("first", [(None, 0, ""), (None, 503, "")], ids=["silence", "overload"])
def test_a_request_without_an_answer_is_no_answer(request_of_ec2: str, first: tuple[None, int, str]) -> None:
    """Though the server has said 404 to Google's question before."""
    answers = ec2("node", without=404)
    answers[request_of_ec2] = iter([first, answers[request_of_ec2]]).__next__
    with metadata(answers) as host:
        both = {"GCE_METADATA_HOST": host, "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{host}/"}
        assert ask("node", both) == 0


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


PREEMPTED = "GET /computeMetadata/v1/instance/preempted"
CHANGE = f"{PREEMPTED}?wait_for_change=true&timeout_sec=2"
FLAVOUR = ("Metadata-Flavor", "Google")


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def stop(
    agent: subprocess.Popen[bytes], answers: dict[str, Any], seconds: str, first: str = ""
) -> tuple[subprocess.Popen[str], str]:
    """A stop of the agent, and the first line that it says. first: a folder to look for programs in."""
    with metadata(answers) as host:
        path = f"{first}:{os.environ['PATH']}"
        environment = {"PATH": path, "GCE_METADATA_HOST": host, "SPOTRUN_NOTICE": seconds}
        command = [str(TOOLS / "await-end"), str(agent.pid)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline()


@pytest.mark.parametrize(
    "answers",
    [gce("node"), gce("node") | {CHANGE: (FLAVOUR, 200, "FALSE")}, {}],
    ids=["no answer to the second question", "not preempted", "not Google's"],
)
def test_a_stop_does_not_wait_otherwise(answers: dict[str, Any], agent: subprocess.Popen[bytes]) -> None:
    process, said = stop(agent, answers, "3600")
    assert (process.wait(30), said) == (0, "")
    assert agent.poll() is None


@pytest.mark.parametrize(
    "answers",
    [gce("node", "TRUE"), gce("node") | {CHANGE: (FLAVOUR, 200, "TRUE")}],
    ids=["at once", "told a little later"],
)
def test_a_stop_waits_while_the_machine_is_preempted(answers: dict[str, Any], agent: subprocess.Popen[bytes]) -> None:
    process, said = stop(agent, answers, "3600")
    assert said == "this machine is being preempted: the agent has 3600 s to drain\n"
    assert process.poll() is None
    agent.communicate(b"\n")
    assert process.wait(30) == 0


def test_a_stop_does_not_wait_for_ever(agent: subprocess.Popen[bytes]) -> None:
    process, said = stop(agent, gce("node", "TRUE"), "1")
    assert "1 s to drain" in said
    assert process.wait(30) == 0
    assert agent.poll() is None


def test_the_time_to_drain_runs_while_the_metadata_are_asked(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    clock = tmp_path / "timeout"
    clock.write_text(f'#!/bin/sh\ntouch {tmp_path}/started\nexec {shutil.which("timeout")} "$@"\n')
    clock.chmod(0o755)

    def answer() -> tuple[Any, int, str]:
        wait_for((tmp_path / "started").exists, 2, "the clock")
        return FLAVOUR, 200, "TRUE"

    process, said = stop(agent, gce("node") | {CHANGE: answer}, "3600", str(tmp_path))
    assert "3600 s to drain" in said
    agent.communicate(b"\n")
    assert process.wait(30) == 0


# `make image`

PACKER = """#!/bin/sh
[ "$1" = version ] && { echo Packer v1.11.2; exit; }
echo "$*" >>"$CALLS/calls"
[ "$1" = build ] && [ -e "$CALLS/slow" ] || exit 0
cleanup() { # longer than anyone waits for a program that was interrupted
    touch "$CALLS/interrupted"
    while [ ! -e "$CALLS/go" ]; do sleep 0.05; done
    touch "$CALLS/cleaned"
    exit 1
}
trap cleanup INT
touch "$CALLS/started"
while :; do sleep 0.05; done
"""


@pytest.fixture
def bake(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python -m images.build` as a terminal would, with a program in Packer's place."""
    packer = tmp_path / "packer"
    packer.write_text(PACKER)
    packer.chmod(packer.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path)}
    environment.pop("PKR_VAR_aws_subnet", None)
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "images.build", *words]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_packer_is_told_of_the_cluster(bake: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = bake("clusters/gcp-l4.yaml", "-debug")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert re.fullmatch(r"spotrun-\d{8}-\d{6}\n", out)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first == "init images"
    for word in (f"build -only {lint.SOURCES['gcp']} ", "-var gcp_project=my-project ", " -debug images"):
        assert word in second
    assert re.search(r"-var commit=[0-9a-f]{40}(-dirty)? ", second)
    (made,) = (ROOT / "build/image/wheel").iterdir()
    assert re.fullmatch(r"spotrun-.*\.whl", made.name)


def test_an_interrupted_build_waits_until_packer_has_cleaned_up(
    bake: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    process = bake("clusters/gcp-l4.yaml")
    wait_for((tmp_path / "started").exists, 120, "Packer's start")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
    wait_for((tmp_path / "interrupted").exists, 30, "Packer's interruption")
    assert process.stderr is not None
    assert "packer is cleaning up, wait for it" in process.stderr.readline()
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=30)
    assert (tmp_path / "cleaned").exists()
    assert (process.returncode, out, err) == (130, "", "spotrun: interrupted\n")


def test_a_module_that_is_gone_is_in_no_wheel(tmp_path: Path) -> None:
    """setuptools builds in build/lib of the folder that it is given, and takes along what lies there."""
    old = ROOT / "build/lib/spotrun/gone_long_ago.py"
    old.parent.mkdir(parents=True, exist_ok=True)
    old.touch()
    try:
        build.wheel(tmp_path)
    finally:
        old.unlink()
    (made,) = tmp_path.glob("spotrun-*.whl")
    found = zipfile.ZipFile(made).namelist()
    assert {"spotrun/cli.py", "spotrun/cloud/prices.csv"} <= set(found)
    assert "spotrun/gone_long_ago.py" not in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage: python -m images.build CLUSTER"),
        (("clusters/local.yaml",), "cloud local starts from no image"),
        (("clusters/none.yaml",), "there is no such cluster file"),
        (("clusters/aws-g5.yaml", "-debug"), "it needs a subnet with a way out (NAT)"),
        (("clusters/aws-g5.yaml", "-var-file=images/none.pkrvars.hcl"), "none.pkrvars.hcl: No such file"),
    ],
)
def test_what_cannot_be_built(
    words: tuple[str, ...], said: str, bake: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    if "-debug" in words and list(IMAGES.glob("*.auto.pkrvars.*")):
        pytest.skip("a subnet may be named in images/*.auto.pkrvars.hcl here")
    process = bake(*words)
    _, err = process.communicate()
    assert process.returncode == 2
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("options", "environment", "settings", "expected"),
    [
        ([], {}, [], False),
        (["-var", "aws_subnet=subnet-0a"], {}, [], True),
        (["-var=aws_subnet=subnet-0a"], {}, [], True),
        (["-var", "aws_subnet="], {}, ['aws_subnet = ""\n'], False),
        (["-var", "gcp_subnetwork=subnet-0a"], {}, [], False),
        ([], {"PKR_VAR_aws_subnet": "subnet-0a"}, [], True),
        ([], {}, ['disk_gb = 40\naws_subnet     = "subnet-0a"\n'], True),
        ([], {}, ['# aws_subnet = "subnet-0a"\n', 'my_aws_subnet = "subnet-0a"'], False),
        ([], {}, ['{\n "aws_subnet": "subnet-0a"\n}'], True),
        ([], {}, ['{"disk_gb": 40, "aws_subnet": "subnet-0a"}'], True),
    ],
)
def test_where_a_subnet_may_be_named(
    options: list[str], environment: dict[str, str], settings: list[str], expected: bool
) -> None:
    assert build.names_subnet(options, environment, settings) is expected
