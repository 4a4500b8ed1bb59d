"""What the provisioning scripts make of Debian, after they have run twice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import warnings

import pytest

from tests.image import baked, registry
from tests.image.conftest import Image
from tests.image.netns import Namespace
from tests.image.root import run

ENABLED = [
    "spotrun-agent.service",
    "spotrun-head.service",
    "spotrun-scratch.service",
    "spotrun-host-key.service",
    "ssh.service",
    "chrony.service",
    "prometheus-node-exporter.service",
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-dcgm.service",
    "nvidia-dcgm-exporter.service",
]
OF_CLOUD = {"gcp": ["google-guest-agent.service"], "aws": ["amazon-ssm-agent.service"]}
HELD = [
    "linux-image-{KERNEL_ABI}",
    "linux-headers-{KERNEL_ABI}",
    "nvidia-driver-cuda",
    "nvidia-kernel-open-dkms",
    "firmware-nvidia-gsp",
    "nvidia-modprobe",
    "libnvidia-cfg1",
    "nvidia-fabricmanager",
    "datacenter-gpu-manager-4-core",
    "chrony",
    "prometheus-node-exporter",
]
OWNED = {  # path: (owner, group, mode)
    "/etc/sudoers.d/spotrun": ("root", "root", "440"),
    "/usr/local/bin/spotrun": ("root", "root", "755"),
    "/usr/lib/spotrun/role": ("root", "root", "755"),
    "/usr/lib/spotrun/scratch": ("root", "root", "755"),
    "/usr/lib/spotrun/fence": ("root", "root", "755"),
    "/etc/systemd/system/spotrun-agent.service": ("root", "root", "644"),
    "/etc/spotrun/image.json": ("root", "root", "644"),
    "/opt/spotrun": ("root", "root", "755"),
    "/opt/spotrun/venv/bin/spotrun": ("root", "root", "755"),
    "/home/spotrun": ("spotrun", "spotrun", "700"),
}


SUDO = ("sudo", "-n", "-u", "spotrun-head")


def said(image: Image, *command: str) -> str:
    done = image.root.run(*command)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def test_the_second_time_changes_nothing(image: Image) -> None:
    """The scripts ran twice; had that failed, nothing here would run."""
    for line in ("sshd;*;*;Al0000-2400;spotrun-operators,systemd-journal", "auth optional pam_group.so"):
        text = image.root.path("/etc/security/group.conf" if ";" in line else "/etc/pam.d/sshd").read_text()
        assert text.count(f"\n{line}\n") == 1
    assert image.root.path("/etc/chrony/chrony.conf").read_text().count("# # pool") == 0
    assert not re.search(r"Unpacking (?!nvidia|datacenter)", image.second), "packages were installed again"
    assert len(re.findall("^== ", image.first, re.MULTILINE)) == len(re.findall("^== ", image.second, re.MULTILINE))


def test_units_are_enabled(image: Image) -> None:
    wanted = ENABLED + OF_CLOUD[image.cloud]
    found = image.root.run("systemctl", "is-enabled", *wanted).stdout.split()
    assert dict(zip(wanted, found, strict=True)) == dict.fromkeys(wanted, "enabled")
    for unit in ("apt-daily.timer", "apt-daily-upgrade.timer"):
        assert image.root.run("systemctl", "is-enabled", unit).stdout.strip() == "masked"
    assert "unattended-upgrades" not in packages(image)


def test_units_are_valid(image: Image) -> None:
    units = ["spotrun-role.service", "spotrun-agent.service", "spotrun-head.service"]
    units += ["spotrun-scratch.service", "spotrun-host-key.service"]
    done = image.root.run("systemd-analyze", "verify", "--man=no", *units)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("unit", ["spotrun-agent.service", "spotrun-head.service"])
def test_units_are_sandboxed(unit: str, image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    score = re.search(r"level for \S+ ([\d.]+)", said(image, "systemd-analyze", "security", "--offline=yes", unit))
    assert score is not None
    with capsys.disabled():
        print(f"\n{image.cloud}: {unit}: exposure {score[1]} of 10")
    assert float(score[1]) < 5


def test_sshd_and_sudo_take_their_configuration(image: Image) -> None:
    root = image.root
    key = ["sh", "-c", "ssh-keygen -q -t ed25519 -N '' -f /run/key && sshd -T -h /run/key -o HostKey=/run/key"]
    done = root.run(*key)
    settings = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert settings["authorizedkeysfile"] == "none"
    assert settings["passwordauthentication"] == "no"
    assert settings["permitrootlogin"] == "no"
    assert settings["allowtcpforwarding"] == "yes"
    if image.cloud == "aws":
        assert settings["authorizedkeyscommand"].endswith("/eic_run_authorized_keys %u %f")
        assert settings["authorizedkeyscommanduser"] == "ec2-instance-connect"
    assert "parsed OK" in said(image, "visudo", "--check")


def test_debian_still_has_what_is_pinned(supplies: baked.Supplies) -> None:
    """All other tests go on with what Debian has now. In CI this is a warning: no change of the code made it so."""
    lines = "; ".join(f"{name}={value}" for name, value in supplies.replaced.items())
    if lines and os.environ.get("CI"):
        warnings.warn(f"Debian has replaced what is pinned; in images/versions.env write: {lines}", stacklevel=1)
    else:
        assert not lines, f"Debian has replaced what is pinned; in images/versions.env write: {lines}"


def test_versions_are_those_pinned(image: Image, supplies: baked.Supplies) -> None:
    """There is a newer one of each of NVIDIA's packages in the registry."""
    pinned = supplies.pinned
    manifest = json.loads(image.root.path("/etc/spotrun/image.json").read_text())
    assert (manifest["cloud"], manifest["commit"], manifest["built"]) == (image.cloud, baked.COMMIT, baked.BUILT)
    assert manifest["base"].startswith("Debian GNU/Linux 12")
    driver = f"{pinned['NVIDIA_DRIVER']}-1"
    wanted = {
        "kernel": pinned["KERNEL"],
        "nvidia_driver": driver,
        "nvidia_kernel_modules": driver,
        "fabric_manager": driver,
        "dcgm": pinned["DCGM"],
        "dcgm_exporter": pinned["DCGM_EXPORTER"],
        "node_exporter": pinned["NODE_EXPORTER"],
        "chrony": pinned["CHRONY"],
    }
    if image.cloud == "aws":
        wanted |= {"ssm_agent": pinned["SSM_AGENT"], "efa_installer": pinned["EFA_INSTALLER"]}
        wanted["aws_ofi_nccl"] = f"{pinned['AWS_OFI_NCCL']}-1"
    found = manifest["versions"]
    assert {name: found.get(name) for name in wanted} == wanted
    assert found["torch"].partition("+")[0] == pinned["TORCH"]
    assert found["python"].startswith(f"{pinned['PYTHON']}.")
    assert manifest["packages"] == packages(image)
    held = set(said(image, "apt-mark", "showhold").split())
    assert {name.format(**pinned) for name in HELD} <= held


def test_the_base_is_up_to_date(image: Image) -> None:
    """But for what is pinned; and Debian's contrib is among the sources, which the base image does not list."""
    assert "0 upgraded, 0 newly installed" in image.pending, image.pending
    assert image.root.path("/etc/apt/sources.list.d/contrib.list").read_text().endswith(" bookworm contrib\n")
    assert "nvidia-support" in packages(image)


def test_one_kernel_and_its_modules(image: Image, supplies: baked.Supplies) -> None:
    """The modules are the registry's stand-ins; what is seen here is that they are looked for."""
    abi = supplies.pinned["KERNEL_ABI"]
    assert [path.name for path in image.root.path("/lib/modules").iterdir()] == [abi]
    wanted = {"nvidia.ko"} | ({"efa.ko"} if image.cloud == "aws" else set())
    assert {path.name for path in image.root.path(f"/lib/modules/{abi}/updates/dkms").iterdir()} == wanted


def test_nothing_of_the_builder_stays(image: Image) -> None:
    """After the last script. The machine then shuts down, and writes a random seed and such again."""
    for path in baked.TRACES:
        target = image.root.path(path)
        if path == "/etc/machine-id":
            assert target.read_text() == ""
        else:
            assert not target.exists(), path
    assert list(image.root.path("/etc/ssh").glob("ssh_host_*")) == []
    assert [path for path in image.root.path("/var/log").rglob("*") if path.is_file() and not path.is_symlink()] == []
    assert list(image.root.path("/var/lib/apt/lists").iterdir()) == []
    assert [path.name for path in image.root.path("/tmp").iterdir()] == ["image"]  # Packer removes it
    places = ["/etc", "/root", "/home", "/var/lib", "/usr/local", "/usr/lib/spotrun"]
    for form in ("PRIVATE KEY", "aws_secret_access_key"):
        folders = [str(image.root.path(place)) for place in places]
        found = baked.search(form, folders)
        assert found == [], form


CUDART = "/opt/spotrun/venv/lib/python3.11/site-packages/nvidia/cu13/lib/libcudart.so.13"
COMPILE = f"""
set -e
mkdir -p {CUDART.rpartition("/")[0]}
echo 'int cudaRuntimeGetVersion(int *version) {{ *version = 13000; return 0; }}' |
    gcc -shared -fPIC -Wl,-soname,libcudart.so.13 -x c -o {CUDART} -
"""
ASK = """
import ctypes
version = ctypes.c_int()
ctypes.CDLL("libcudart.so").cudaRuntimeGetVersion(ctypes.byref(version))
print(version.value)
"""


def test_nccls_plugin_finds_torchs_cuda(image: Image, supplies: baked.Supplies) -> None:
    """It asks for libcudart.so. The one here is a stand-in where torch comes without CUDA."""
    ask = ("/opt/spotrun/venv/bin/python", "-I", "-c", ASK)
    link = image.root.path(f"{registry.PLUGIN}/libcudart.so")
    if "TORCH_CUDA" not in supplies.changed:
        assert (image.root.run(*ask).returncode == 0) == (image.cloud == "aws")
        return
    assert not link.is_symlink()
    pinned = image.root.path(f"{baked.IMAGE}/versions.env")
    before = pinned.read_text()
    pinned.write_text(f"{before}\nTORCH_CUDA={supplies.pinned['TORCH_CUDA']}\n")
    try:
        if image.cloud == "aws":
            with pytest.raises(AssertionError, match="torch brought 0 files libcudart"):
                baked.provision(image.root, supplies, image.cloud, 51, 51)
        said(image, "sh", "-c", COMPILE)
        for _ in range(2):
            baked.provision(image.root, supplies, image.cloud, 51, 51)
        assert link.is_symlink() == (image.cloud == "aws")
        if image.cloud == "aws":
            assert said(image, *ask) == "13000"
    finally:
        pinned.write_text(before)
        said(image, "rm", "-rf", CUDART.rpartition("/cu13/")[0], f"{registry.PLUGIN}/libcudart.so")
        said(image, "ldconfig")


def test_owners_and_modes(image: Image) -> None:
    for path, wanted in OWNED.items():
        assert tuple(said(image, "stat", "--format=%U %G %a", path).split()) == wanted, path
    # Nobody but root may change what the services run.
    loose = said(
        image, "find", "/opt/spotrun", "/usr/lib/spotrun", "/usr/local/bin", "-not", "-type", "l", "-perm", "/022"
    )
    assert loose == ""
    assert said(image, "find", "/opt/spotrun", "-not", "-user", "root") == ""


def test_everything_is_compiled(image: Image) -> None:
    """What is not, each first start compiles, and cannot keep."""
    site = image.root.path("/opt/spotrun/venv/lib/python3.11/site-packages")
    for package in ("spotrun", "torch", "aiohttp", "pydantic"):
        sources = [path for path in (site / package).rglob("*.py") if "templates" not in path.parts]
        lacking = [path for path in sources if not list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))]
        assert len(lacking) < len(sources) // 100 + 1, lacking[:5]


LOGIN = """
set -e
port=$1 user=$2; shift 2
cd /run
for key in host mine; do ssh-keygen -q -t ed25519 -N '' -f "$key"; done
/usr/sbin/sshd -p "$port" -o ListenAddress=127.0.0.1 -o HostKey=/run/host -o AuthorizedKeysCommand=none \\
    -o AuthorizedKeysFile=/run/mine.pub -o StrictModes=no -E /run/log
echo "[127.0.0.1]:$port $(cut -d' ' -f1,2 host.pub)" >known
# It may go to the background before it listens: ssh tries once a second.
ssh -F none -i mine -o UserKnownHostsFile=/run/known -o BatchMode=yes -o ConnectionAttempts=30 \\
    -p "$port" "$user@127.0.0.1" "$@" 2>&1 || cat log
"""


@pytest.mark.parametrize(
    ("user", "command", "expected"),
    [
        ("alice", "spotrun ctl status", "no head runs on this machine"),
        ("alice", "spotrun stacks a/b", "'a/b': is not a job's id"),
        ("alice", "spotrun profile a/b", "'a/b': is not a job's id"),
        ("alice", "sudo -n -u spotrun id", "a password is required"),
        ("alice", "sudo -n -u spotrun-head id", "a password is required"),
        ("spotrun", "sudo -n -u spotrun-head id", "a password is required"),
        ("alice", "id -nG", "spotrun-operators"),
        ("alice", "id -nG", "systemd-journal"),
        ("spotrun", "spotrun ctl jobs", "no head runs on this machine"),
    ],
)
def test_who_logs_in_may_ask_the_head(user: str, command: str, expected: str, image: Image) -> None:
    """Over the image's own sshd, with its PAM configuration, from an account that the image does not know."""
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
    image.root.run("useradd", "--create-home", "--shell", "/bin/bash", "alice")
    try:
        assert expected in image.root.run("sh", "-c", LOGIN, "login", str(port), user, command).stdout
    finally:
        image.root.run("userdel", "--remove", "alice")


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["ctl", "status"], "a password is required"), (["agent", "--help"], "usage: spotrun agent")],
)
def test_other_accounts_may_not(words: list[str], expected: str, image: Image) -> None:
    """A service's, say: none has the group."""
    become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--"]
    assert expected in image.root.run(*become, "spotrun", *words).stdout


@pytest.mark.parametrize("whom", ["spotrun", "spotrun-head"])
def test_nobody_else_may_become_spotrun(whom: str, image: Image) -> None:
    image.root.run("useradd", "bob")
    become = [
        "setpriv",
        "--reuid=bob",
        "--regid=bob",
        "--groups=spotrun-operators",
        "--",
        "sudo",
        "-n",
        "-u",
        whom,
    ]
    try:
        for command in (["id"], ["/opt/spotrun/venv/bin/spotrun", "head"], ["/opt/spotrun/venv/bin/python"]):
            assert "a password is required" in image.root.run(*become, *command).stdout
    finally:
        image.root.run("userdel", "bob")


CONNECT = """
import socket
try:
    socket.create_connection(("169.254.169.254", 80), 10).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


def test_who_logs_in_cannot_ask_for_the_heads_credentials(image: Image) -> None:
    """In a network of its own, with a metadata server at its address. The machines of test_boot may make no fence."""
    network = Namespace()
    network.ip("address", "add", "169.254.169.254/32", "dev", "lo")
    inside = ["nsenter", f"--net={network.path}"]
    probe = run([*inside, *image.root.enter("nft", "list", "ruleset")], timeout=120, check=False)
    if probe.returncode:
        pytest.skip(f"this kernel has no nftables: {probe.stdout}")
    asking = ["/opt/spotrun/venv/bin/python", "-c", CONNECT]

    def ask(user: str) -> str:
        become = ["setpriv", f"--reuid={user}", "--regid=nogroup", "--clear-groups", "--"]
        return run([*inside, *image.root.enter(*become, *asking)], timeout=120).stdout.strip()

    users = ["root", "spotrun-head", "spotrun", "nobody", *(["ec2-instance-connect"] if image.cloud == "aws" else [])]
    with contextlib.closing(network.listen("169.254.169.254", 80)):
        assert {user: ask(user) for user in users} == dict.fromkeys(users, "connected")
        for _ in range(2):  # a head that starts again
            run([*inside, *image.root.enter("/usr/lib/spotrun/fence")], timeout=120)
        refused = {"spotrun": "ConnectionRefusedError", "nobody": "ConnectionRefusedError"}
        assert {user: ask(user) for user in users} == dict.fromkeys(users, "connected") | refused
    network.close()


def test_a_machine_makes_its_own_key(image: Image) -> None:
    """As spotrun-host-key.service does; a boot after that leaves it alone."""
    unit = image.root.path("/etc/systemd/system/spotrun-host-key.service").read_text()
    command = re.search(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    assert command is not None
    try:
        said(image, "sh", "-c", command[1])
        assert said(image, "ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub").startswith("256 ")
        assert said(image, "stat", "--format=%U %a", "/etc/ssh/ssh_host_ed25519_key") == "root 600"
    finally:
        for path in image.root.path("/etc/ssh").glob("ssh_host_*"):
            path.unlink()


SCRATCH = """
set -e
mknod /dev/loop-control c 10 237
for minor in 0 1 2 3 4 5 6 7; do mknod "/dev/loop$minor" b 7 "$minor"; done
truncate --size=64M /run/disk
device=$(losetup --find --show /run/disk)
trap 'umount /var/lib/spotrun || :; losetup --detach "$device"' EXIT
mkdir -p /run/disks /var/lib/spotrun
ln -s "$device" "/run/disks/$1"
export SPOTRUN_DISKS=/run/disks
/usr/lib/spotrun/scratch
findmnt --noheadings --output FSTYPE,OPTIONS /var/lib/spotrun
stat --format='owner %U' /var/lib/spotrun
touch /var/lib/spotrun/kept
/usr/lib/spotrun/scratch
umount /var/lib/spotrun
/usr/lib/spotrun/scratch
ls /var/lib/spotrun
"""


@pytest.mark.parametrize("name", ["google-local-nvme-ssd-0", "nvme-Amazon_EC2_NVMe_Instance_Storage_AWS0123"])
def test_the_machines_own_disk_is_scratch(name: str, image: Image) -> None:
    """On a loop device. Several disks make an array, for which kernels of test machines may have no module."""
    found = said(image, "sh", "-c", SCRATCH, "scratch", name)
    for wanted in ("of 1 disk(s)", "ext4", "noatime", "nosuid", "owner spotrun", "is mounted already", "kept"):
        assert wanted in found


def test_without_own_disks_the_boot_disk_serves(image: Image) -> None:
    assert "no disks of its own" in said(image, "/usr/lib/spotrun/scratch")


def packages(image: Image) -> dict[str, str]:
    listed = said(image, "dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t${Package}\t${Version}\n")
    rows = [line.split("\t") for line in listed.splitlines()]
    return {name: version for status, name, version in rows if status[1] == "i"}
