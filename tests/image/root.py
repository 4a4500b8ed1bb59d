"""A Debian in a folder, in which the provisioning scripts run as they do in the machine that becomes an image.

Whatever is mounted for that is mounted in a namespace of its own, and gone with the last process in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from images.debian import SUITE, archives

CODE = Path(__file__).parent.parent.parent
# What clouds' base images of Debian have, and debootstrap's smallest variant lacks.
BASE = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "libpam-systemd",
    "udev",
    "openssh-server",
    "sudo",
    "ca-certificates",
    "gpgv",
)
TOOLS = ("apt-get", "debootstrap", "unshare", "chroot", "dpkg-deb", "gpg", "systemd-analyze")
# Beside measurements, a bake takes the time that is left. CI measures nothing, and a bake is its longest part.
GENTLE = () if os.environ.get("CI") else ("nice", "-n", "19")
Bind = Mapping[str, str]

_ENTER = """
set -eu
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind --make-rslave /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir "$root/run/lock" "$root/run/sshd"
touch "$root/etc/resolv.conf"
mount --bind "$(readlink -f /etc/resolv.conf)" "$root/etc/resolv.conf"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"; mount --bind "$1" "$root$2"
    if [ "$1" != "$2" ]; then mount -o remount,bind,ro "$root$2"; fi
    shift 2
done
shift
exec chroot "$root" "$@"
"""


def missing() -> list[str]:
    """What this needs and does not find here."""
    found = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.defpath}:/usr/sbin:/sbin") is None]
    found += [] if os.getuid() == 0 else ["root"]
    return found or ([] if archives() else [f"Debian {SUITE} among this machine's apt sources"])


class Root:
    """folder: of the file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bootstrap(self) -> None:
        """Fill the folder with Debian's smallest system and what a cloud's image has besides."""
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(BASE)}", SUITE]
        found = archives()
        alone = ("unshare", "--mount")  # debootstrap mounts /proc in the folder, and does not unmount it if it is ended
        run([*GENTLE, *alone, *command, str(self.folder), found[0][0]], timeout=900)
        lines = [f"deb {url} {suite} main\n" for url, suite in found]
        self.path("/etc/apt/sources.list").write_text("".join(lines))

    def copy(self, folder: Path) -> Root:
        run([*GENTLE, "cp", "--archive", "--reflink=auto", str(self.folder), str(folder)], timeout=600)
        return Root(folder)

    def path(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, bind: Bind | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it as root; nothing of it is left running or mounted.

        bind: folders of this machine, and where they are in there. Those at another place than here can only be read.
        """
        return run(self.enter(*command, bind=bind), env=env, timeout=timeout, check=False)

    def enter(self, *command: str, bind: Bind | None = None) -> list[str]:
        """The command that runs a command in it. bind: as for `run`."""
        places = [place for pair in (bind or {}).items() for place in pair]
        inside = ["sh", "-c", _ENTER, "enter", str(self.folder), *places, "--", *command]
        return [*GENTLE, "unshare", "--mount", "--pid", "--fork", "--kill-child", *inside]

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def run(
    command: list[str], env: Mapping[str, str] | None = None, timeout: float = 60, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run to the end, output and errors together. AssertionError with all it said if it fails and `check` is set."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "HOME": "/root",
        "DPKG_FORCE": "unsafe-io",  # no waits for the disk, which take half of the time: a lost folder is made again
    }
    done = subprocess.run(
        command,
        env={**environment, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stdout[-8000:]}"
    return done
