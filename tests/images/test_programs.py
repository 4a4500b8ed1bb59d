"""The programs that an image's units run at a boot and at a stop, asked as systemd would."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotrun.spec import names
from tests.fakes.answering import answering
from tests.helpers import wait_for

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
TOOLS = IMAGES / "root/usr/lib/spotrun"


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
    return subprocess.run([str(TOOLS / "role"), role], env=plain, timeout=300, check=False).returncode


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
    with answering(answers) as host:
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
    with answering(answers) as host:
        both = {"GCE_METADATA_HOST": host, "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{host}/"}
        assert ask("node", both) == 0


@pytest.mark.parametrize(
    ("answers", "request_of_role"),
    [
        (gce("head"), f"GET /computeMetadata/v1/instance/attributes/{names.ROLE}"),
        (ec2("head"), f"GET /latest/meta-data/tags/instance/{names.ROLE}"),
    ],
    ids=["gce", "ec2"],
)
def test_a_role_that_is_not_there_yet_is_waited_for(answers: dict[str, Any], request_of_role: str) -> None:
    """A group tags its machines, and the metadata server may learn of the tags after the machine has asked."""
    flavour = answers[request_of_role][0]
    answers[request_of_role] = iter([*[(flavour, 404, "")] * 5, answers[request_of_role]]).__next__
    with answering(answers) as host:
        both = {"GCE_METADATA_HOST": host, "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{host}/"}
        assert ask("head", both) == 0


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
        with answering(gce("node"), port):
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


def scratch(folder: Path, array: str, label: str) -> list[str]:
    """Run `scratch` on a machine with two disks of its own. array: what the system has made of them; label: its label.

    Returns the calls of the programs that change disks. mdadm finds disks busy that are in an array.
    """
    disks, programs, calls = folder / "disks", folder / "programs", folder / "calls"
    disks.mkdir()
    programs.mkdir()
    for index in range(2):
        (disks / f"google-local-nvme-ssd-{index}").touch()
        (folder / f"sys/class/block/google-local-nvme-ssd-{index}/holders" / array).mkdir(parents=True)
    stand_ins = {name: f'echo "{name} $*" >>{calls}' for name in ("mkfs.ext4", "mount")}
    stand_ins |= {"udevadm": "", "chown": "", "blkid": f"echo {label}"}
    stand_ins["mdadm"] = f'echo "mdadm $1 $2" >>{calls}; [ "$1{array}" = --create ]'
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SPOTRUN_SCRATCH": str(folder / "target"),
        "SPOTRUN_DISKS": str(disks),
        "SPOTRUN_SYS": str(folder / "sys"),
    }
    done = subprocess.run([str(TOOLS / "scratch")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [" ".join([call.split()[0], *call.split()[-2:]]) for call in calls.read_text().splitlines()]


@pytest.mark.parametrize(
    ("array", "label", "calls"),
    [
        ("", "", ["mdadm --assemble {new}", "mdadm --create {new}", "mkfs.ext4 {made} {new}", "mount {new} {target}"]),
        ("md127", "spotrun-scratch", ["mount /dev/md127 {target}"]),
        ("md127", "", ["mkfs.ext4 {made} /dev/md127", "mount /dev/md127 {target}"]),
    ],
    ids=["a new machine", "a restarted one", "a machine that stopped before it had a file system"],
)
def test_a_machines_own_disks_become_one_file_system(array: str, label: str, calls: list[str], tmp_path: Path) -> None:
    """The initramfs puts an array together under a name that it gives to arrays of other hosts."""
    told = {"new": "/dev/md/spotrun-scratch", "made": "lazy_itable_init=1,nodiscard", "target": tmp_path / "target"}
    assert scratch(tmp_path, array, label) == [call.format(**told) for call in calls]


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
    with answering(answers) as host:
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


@pytest.mark.parametrize(("cloud", "users"), [("gcp", "{ 0, 901 }"), ("aws", "{ 0, 901, 902 }")])
def test_who_reaches_the_heads_credentials(cloud: str, users: str, tmp_path: Path) -> None:
    """Only who is named; what the kernel makes of the rules, tests/image tells."""
    accounts = "spotrun-head) echo 901 ;; " + ("ec2-instance-connect) echo 902 ;; " if cloud == "aws" else "")
    for name, text in (
        ("id", f'case $2 in {accounts}*) echo "no such user" >&2; exit 1 ;; esac'),
        ("nft", f"cat >{tmp_path}/rules"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([str(TOOLS / "fence")], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rules = [line.strip() for line in (tmp_path / "rules").read_text().splitlines()]
    assert f"meta skuid {users} accept" in rules
    assert rules.index(f"meta skuid {users} accept") < rules.index(
        "ip daddr 169.254.169.254 tcp dport != 53 tcp flags & rst != rst reject with tcp reset"
    )


INSTALLER = """#!/bin/sh
: --skip-mpi --skip-limit-conf --no-verify
echo "$*" >"$CALLS"
"""


def efa(folder: Path, installer: str, files: str, version: str = "") -> tuple[int, str, str]:
    """Run 42-efa.sh with an installer that installs nothing. files: those of its package. Status, errors, options."""
    pinned = (IMAGES / "versions.env").read_text()
    wanted = dict(line.split("=", 1) for line in pinned.splitlines() if "=" in line and not line.startswith("#"))
    tree = folder / "aws-efa-installer"
    tree.mkdir()
    (tree / "efa_installer.sh").write_text(installer)
    (tree / "efa_installer.sh").chmod(0o755)
    archive, image = folder / "efa.tar.gz", folder / "image"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree, arcname=tree.name)
    shutil.copytree(IMAGES / "provision", image / "provision")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    (image / "versions.env").write_text(f"{pinned}\nEFA_INSTALLER=0-test\nEFA_INSTALLER_SHA256={sha256}\n")
    (image / "sources.env").write_text(f"EFA_INSTALLER_URL=file://{archive}\n")
    package = f"ii libnccl-ofi-ngc-v3 {version or wanted['AWS_OFI_NCCL']}-1"
    dpkg = f"case $* in *--show*) echo '{package}' ;; *) printf '{files}' ;; esac"
    for name, text in (("dpkg-query", dpkg), ("modinfo", "exit 0"), ("mkdir", "exit 9")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "IMAGE": str(image),
        "CLOUD": "aws",
        "CALLS": str(folder / "calls"),
    }
    script = image / "provision/42-efa.sh"
    done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=False)
    calls = folder / "calls"
    return done.returncode, done.stderr, calls.read_text() if calls.exists() else ""


def test_an_efa_installer_without_an_option_is_told_before_it_runs(tmp_path: Path) -> None:
    code, said, calls = efa(tmp_path, INSTALLER.replace("--skip-mpi", ""), "")
    assert (code, calls) == (1, "")
    assert "the EFA installer 0-test has no option --skip-mpi" in said


@pytest.mark.parametrize(
    ("text", "version", "wrong"),
    [
        ("OFI", "", "does not know the name 'AWS Libfabric'"),
        (None, "", "has no libnccl-net.so: NCCL would not find the plugin"),
        ("AWS Libfabric", "0.1", "brought aws-ofi-nccl libnccl-ofi-ngc-v3 0.1-1, but versions.env has"),
    ],
    ids=["another name", "another file", "another version"],
)
def test_an_efa_plugin_that_workers_could_not_use_ends_the_build(
    text: str | None, version: str, wrong: str, tmp_path: Path
) -> None:
    plugin = tmp_path / "libnccl-net.so"
    plugin.write_text(text or "")
    code, said, calls = efa(tmp_path, INSTALLER, f"{plugin if text else '/usr/share/doc/x'}\\n", version)
    assert code == 1, said
    assert calls == "-y --skip-mpi --skip-limit-conf --no-verify\n"
    assert wrong in said


def test_the_efa_plugin_for_containers_gets_the_name_that_nccl_looks_for(tmp_path: Path) -> None:
    plugin = tmp_path / "libnccl-net-ofi.so"
    plugin.write_text("AWS Libfabric")
    code, said, _ = efa(tmp_path, INSTALLER, f"{plugin}\\n")
    assert code == 9, said  # the stand-in's, at the script's last step
    assert (tmp_path / "libnccl-net.so").readlink() == Path("libnccl-net-ofi.so")


ENGINE = """#!/bin/sh
printf '%s\\n' "$@" >"$CALLS"
exit "$STATUS"
"""


@pytest.mark.parametrize(("status", "code"), [(0, 0), (7, 2)])
def test_a_trial_runs_the_steps_in_a_container(status: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "docker").write_text(ENGINE)
    (tmp_path / "docker").chmod(0o755)
    where = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls"), "STATUS": str(status)}
    environment = {"HOME": os.environ.get("HOME", "/"), **where}
    command = [sys.executable, "-m", "images.trial", "clusters/aws-g5.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    words = (tmp_path / "calls").read_text().splitlines()
    assert words[:2] == ["run", "--rm"]
    assert f"type=bind,source={IMAGES},target=/srv/images,readonly" in words
    steps = ["bash", "/srv/images/trial.sh", "/srv/images", "aws", "10", "42"]
    assert words[-9:] == ["docker.io/library/debian:12", "timeout", "0", *steps]
    assert ("end well in plain Debian 12" in done.stdout) == (status == 0)
    assert ("a build for aws would fail: exit status 7" in done.stderr) == (status == 7)


# A signal goes to the first process alone, which ignores it unless it says something else.
CONTAINER = """#!/bin/bash
[ "$1" = rm ] && exec touch "$CALLS.$3"
echo "$4" >"$CALLS.name"
while [ "$1" != docker.io/library/debian:12 ]; do shift; done
trap 'kill -INT $first' INT
setsid "${@:2}" & first=$!
wait; wait
"""


def test_ctrl_c_ends_a_trial_at_once_and_leaves_no_container(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text(CONTAINER)
    (tmp_path / "bash").write_text('#!/bin/bash\ntouch "$CALLS"\nsh -c "sleep 600; true"\ntouch "$CALLS.on"\n')
    for program in ("docker", "bash"):
        (tmp_path / program).chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-m", "images.trial", "clusters/aws-g5.yaml"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_for((tmp_path / "calls").exists, what="the container's start")
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.startswith("spotrun: interrupted; ")
    assert "Traceback" not in said
    assert not (tmp_path / "calls.on").exists()
    assert (tmp_path / f"calls.{(tmp_path / 'calls.name').read_text().strip()}").exists(), "the container is removed"
