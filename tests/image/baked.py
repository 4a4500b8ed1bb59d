"""Bake an image into a folder: what `make image` uploads, then the provisioning scripts, twice."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from images import build, versions
from tests.image import registry
from tests.image.root import CODE, GENTLE, Root

IMAGE = "/tmp/image"
SUPPLIES = "/srv/supplies"  # where the supplies are seen, and only for reading: the scripts empty /tmp
COMMIT, BUILT = "c0ffee" + "0" * 34, "20261121-093000"
PATIENCE = 1800.0  # seconds for a run of scripts on a slow machine
PYTHON = "3.11"  # Debian 12's
# What a machine has when an image is made of it, and no image may have.
TRACES = (
    "/etc/ssh/ssh_host_ed25519_key",
    "/etc/ssh/ssh_host_ed25519_key.pub",
    "/etc/ssh/ssh_host_rsa_key",
    "/etc/machine-id",
    "/root/.ssh/authorized_keys",
    "/root/.bash_history",
    "/home/admin/.ssh/authorized_keys",
    "/home/packer/.ssh/authorized_keys",
    "/home/packer/.bash_history",
    "/var/lib/cloud/instance/user-data.txt",
    "/var/lib/dhcp/dhclient.leases",
    "/var/lib/systemd/random-seed",
    "/var/log/auth.log",
    "/var/log/cloud-init.log",
    "/var/log/journal/0123/system.journal",
    "/root/.cache/pip/a",
    "/tmp/script_1234.sh",
    "/etc/oslogin_passwd.cache",
    "/etc/oslogin_passwd.cache.bak",
    "/etc/oslogin_passwd.cache.bin",
    "/etc/oslogin_group.cache",
    "/etc/oslogin_group.cache.bak",
    "/etc/google_instance_id",
    "/var/google-sudoers.d/operator_example_com",
    "/var/google-users.d/operator_example_com",
    "/home/operator_example_com/.profile",
    "/root/.gnupg/pubring.kbx",
)


@dataclass(frozen=True)
class Supplies:
    """What an image is made of besides Debian: all of it on this machine.

    pinned: what the image should have. replaced: of it, what differs from versions.env, as Debian has it no more.
    changed: what versions.env and sources.env say in the image: the stand-ins, and what was replaced.
    """

    folder: Path
    pinned: dict[str, str]
    replaced: dict[str, str]
    changed: dict[str, str]


def prepare(folder: Path) -> Supplies:
    """Download Python's packages, build spotrun's, make the stand-ins.

    A pin that Debian has replaced since gives way to what Debian has now. Raises OSError if Debian does not answer.
    """
    pinned = versions.read(CODE / "images/versions.env")
    rows = versions.debian(pinned, versions.Registries(versions.run, versions.fetch, versions.exists))
    unknown = [row.note for row in rows if row.there is None]
    if unknown:
        raise OSError(unknown[0])
    replaced = versions.replaced(rows)
    folder.mkdir(parents=True)
    build.wheel(folder / "wheel")
    pip = [*GENTLE, sys.executable, "-m", "pip"]
    (wheel,) = (folder / "wheel").glob("spotrun-*.whl")
    where = ["--dest", str(folder / "wheels"), "--only-binary=:all:", "--python-version", PYTHON]
    # pip weighs markers by the Python that runs it, not by --python-version: what only Debian's takes is named.
    wanted = [f"{wheel}[train,gcp,aws]", "backports.tarfile", "-r", str(CODE / "images/requirements.txt")]
    _pip(
        [
            *pip,
            "download",
            "--quiet",
            *where,
            "-c",
            str(CODE / "constraints.txt"),
            "-r",
            str(CODE / "images/requirements.txt"),
            *wanted,
        ]
    )
    pinned = pinned | replaced
    changed = registry.serve(folder / "registry", f"{SUPPLIES}/registry", pinned) | replaced
    if list((folder / "wheels").glob("torch-*+cpu-*.whl")):
        changed["TORCH_CUDA"] = ""  # what this machine's pip finds is without
    return Supplies(folder, pinned, replaced, changed)


def upload(root: Root, supplies: Supplies) -> None:
    """As Packer does it."""
    target = root.path(IMAGE)
    target.mkdir(parents=True)
    for name in ("provision", "root"):
        shutil.copytree(CODE / "images" / name, target / name)
    for path in ("constraints.txt", "images/requirements.txt"):
        shutil.copy(CODE / path, target)
    shutil.copytree(supplies.folder / "wheel", target / "wheel")
    for name in ("versions.env", "sources.env"):
        text = (CODE / "images" / name).read_text()
        for key, value in supplies.changed.items():
            text = re.sub(rf"^{key}=.*$", f"{key}={value}", text, flags=re.MULTILINE)
        (target / name).write_text(text)


def provision(root: Root, supplies: Supplies, cloud: str, first: int, last: int) -> str:
    """Run the scripts with these numbers; what they said. AssertionError if one fails."""
    environment = {
        "IMAGE": IMAGE,
        "CLOUD": cloud,
        "SPOTRUN_COMMIT": COMMIT,
        "SPOTRUN_BUILT": BUILT,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": f"{SUPPLIES}/wheels",
    }
    command = ["bash", f"{IMAGE}/provision/run.sh", str(first), str(last)]
    done = root.run(*command, env=environment, bind={str(supplies.folder): SUPPLIES}, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def _pip(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def search(text: str, folders: list[str]) -> list[str]:
    """Files with this text in these folders, but for what documents or tests it."""
    command = ["grep", "-rIl", "--", text, *folders]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False).stdout.split()
    return [path for path in found if not path.endswith((".py", ".pyc", ".md"))]
