"""Machines for a `mirror` that are started from an image: its own systemd, in a container with a network of its own.

    python -m tests.image.containers <image's folder> <folder> <flavour> <region> <environment>

A machine finds its metadata server where the cloud has it, at 169.254.169.254, and the emulated services at the
addresses that their clients are told. What it writes is gone with it. As Google's, a notice presses its power button.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from spotrun.cloud.local import metadata
from spotrun.cloud.local.layout import Config, Layout
from spotrun.cloud.local.machine import Machine
from tests.e2e import mirror
from tests.e2e.tools import OPERATOR
from tests.helpers import await_for
from tests.image.netns import Namespace, Switch, relay

METADATA = "169.254.169.254"
LAG = 0.3  # seconds after the power button until the metadata tell of the preemption
POWER = signal.SIGRTMIN + 4  # systemd(1): poweroff.target
CGROUPS = Path("/sys/fs/cgroup")
Middleware = Callable[[web.Request, Callable[[web.Request], Awaitable[web.StreamResponse]]], Any]
TOOLS = ("systemd-nspawn", "nsenter", "ip", "unshare")
# The container's file system lies over the image. Once it is off, the machine is still there: the cloud takes it.
_START = """
set -eu
for each in $CGROUP; do echo $$ >"$each/cgroup.procs"; done
mount -t overlay -o "lowerdir=$ROOT,upperdir=$DISK/upper,workdir=$DISK/work" machine "$DISK/root"
systemd-nspawn "$@" || echo "the container ended with $?"
exec sleep infinity
"""
_NSPAWN = (
    "--quiet",
    "--boot",
    "--keep-unit",
    "--register=no",
    "--console=read-only",
    "--link-journal=no",
    "--resolv-conf=off",
    "--timezone=off",
)


@dataclass
class Container:
    """What a container has of this computer's."""

    network: Namespace
    runner: web.AppRunner
    cgroups: tuple[Path, ...]
    relays: list[asyncio.Task[None]] = field(default_factory=list)


class Group(mirror.Group):
    """root: the image's folder."""

    def __init__(self, root: str, config: Config, layout: Layout, subnet: str, environment: Mapping[str, str]) -> None:
        super().__init__(config, layout, subnet, environment)
        self._root = Path(root)
        self._switch = Switch()
        self._machines: dict[str, Container] = {}

    def door(self, node: Machine) -> str:
        return f"{self.subnet}.{node.address.rpartition('.')[2]}"

    def _address(self, name: str) -> str:
        return f"10.77.0.{super()._address(name).rpartition('.')[2]}"

    def _give_notice(self, node: Machine) -> None:
        if self.config.metadata == "ec2":
            return super()._give_notice(node)
        for pid in _first(self._machines[node.name].cgroups):
            os.kill(pid, POWER)
        asyncio.get_running_loop().call_later(LAG, super()._give_notice, node)

    async def _listen(self, node: Machine) -> web.BaseSite:
        network = await asyncio.to_thread(self._switch.plug, node.address)
        await asyncio.to_thread(network.ip, "address", "add", f"{METADATA}/32", "dev", "lo")
        app = metadata.build(self.config.metadata, lambda _: node.subject)
        app.middlewares.append(os_login(Path(f"{self.layout.key}.pub").read_text()))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        machine = Container(network, runner, tuple(_cgroups(f"{self.layout.unique}-{node.name}")))
        self._machines[node.name] = machine
        doors = [(network.listen("127.0.0.1", port), partial(_connect, port)) for port in self._services()]
        ssh = socket.create_server((self.door(node), 22), backlog=64)
        doors.append((ssh, partial(self._switch.connect, node.address, 22)))
        for door, connect in doors:
            door.setblocking(False)
            machine.relays.append(asyncio.create_task(relay(door, connect)))
        site = web.SockSite(runner, network.listen(METADATA, 80))
        await site.start()
        return site

    async def _boot(self, node: Machine) -> asyncio.subprocess.Process:
        machine, disk = self._machines[node.name], self.layout.folder(node.name)
        await asyncio.to_thread(self._prepare, node.name, disk)
        for each in machine.cgroups:
            each.mkdir(exist_ok=True)
        where = [f"--directory={disk}/root", f"--machine={self.layout.unique}-{node.name}", f"--hostname={node.name}"]
        network = f"--network-namespace-path={machine.network.path}"
        unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _START, "start"]
        environment = {
            **self._env(node, node.environment(self.layout.mark(node.name), disk, disk, disk)),
            "CGROUP": " ".join(map(str, machine.cgroups)),
            "ROOT": str(self._root),
            "DISK": str(disk),
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
        }
        with (disk / "console.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *unshare, *_NSPAWN, *where, network,
                env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        node.pid = process.pid
        return process

    def _prepare(self, name: str, disk: Path) -> None:
        """What a cloud, or who set up this test of it, puts into a machine."""
        for part in ("upper", "work", "root"):
            shutil.rmtree(disk / part, ignore_errors=True)
            (disk / part).mkdir(parents=True, mode=0o755)
        settings = " ".join(_quoted(f"{name}={value}") for name, value in self._extra.items())
        files = {
            "systemd/system.conf.d/90-machine.conf": f"[Manager]\nDefaultEnvironment={settings}\n",
            "hostname": f"{name}\n",
            "systemd/journald.conf.d/90-machine.conf": "[Journal]\nForwardToConsole=yes\nMaxLevelConsole=info\n",
            "hosts": f"127.0.0.1 localhost {name}\n{METADATA} metadata.google.internal metadata\n",
        }
        if self.config.metadata == "ec2":  # in the place of EC2 Instance Connect
            files["ssh/sshd_config.d/05-operator.conf"] = "AuthorizedKeysFile /etc/ssh/operator.pub\n"
            files["ssh/operator.pub"] = Path(f"{self.layout.key}.pub").read_text()
        for file, text in files.items():
            path = disk / "upper/etc" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def _services(self) -> set[int]:
        return {int(port) for value in self._extra.values() for port in re.findall(r"127\.0\.0\.1:(\d+)", value)}

    async def _clear(self, node: Machine, site: web.BaseSite | None) -> None:
        machine = self._machines.pop(node.name, None)
        if machine is None:
            return await super()._clear(node, site)
        _kill(machine.cgroups)
        for task in machine.relays:
            task.cancel()
        await asyncio.gather(*machine.relays, return_exceptions=True)
        await super()._clear(node, site)
        await machine.runner.cleanup()
        machine.network.close()
        await _remove(machine.cgroups)


def missing() -> list[str]:
    """What starting machines needs and does not find here."""
    found = [tool for tool in TOOLS if shutil.which(tool) is None]
    if found:
        return found
    name = f"spotrun-probe-{os.getpid()}"
    for folder in _cgroups(name):
        try:
            folder.mkdir()
            folder.rmdir()
        except OSError as error:
            found.append(f"a control group of its own ({error})")
    layers = "lowerdir=/usr,upperdir=/mnt/upper,workdir=/mnt/work"
    overlay = f"mount -t tmpfs none /mnt && mkdir /mnt/upper /mnt/work && mount -t overlay -o {layers} none /mnt"
    probe = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", overlay]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return found + ([f"namespaces and overlays ({done.stderr.strip()})"] if done.returncode else [])


def os_login(key: str) -> Middleware:
    """What Google's metadata server says of who may log in: one operator, with this key, and without `sudo`.

    https://github.com/GoogleCloudPlatform/guest-oslogin is what asks.
    """
    keys = {"0": {"key": key.strip(), "fingerprint": "0"}}

    @web.middleware
    async def answer(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        path = re.sub("/+", "/", request.path)
        if not path.startswith("/computeMetadata/v1/oslogin/") or "Metadata-Flavor" not in request.headers:
            return await handler(request)
        account, query = OPERATOR["posixAccounts"][0], request.query
        if path.endswith("/authorize"):
            return web.json_response({"success": query["email"] == OPERATOR["name"] and query["policy"] == "login"})
        if not path.endswith("/users") or any(
            query.get(name, account[name]) != account[name] for name in ("username", "uid")
        ):
            return web.json_response({}, status=404)
        return web.json_response({"loginProfiles": [{**OPERATOR, "sshPublicKeys": keys}]})

    return answer


def _cgroups(name: str) -> Iterator[Path]:
    """Folders for a container: two systemds in one would end each other's processes. One for each hierarchy."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = CGROUPS / "unified" if (CGROUPS / "unified").is_dir() else CGROUPS
            yield root / path.lstrip("/") / name
        elif controllers == "name=systemd":
            yield CGROUPS / "systemd" / path.lstrip("/") / name


def _first(cgroups: tuple[Path, ...]) -> list[int]:
    """The container's first process, if it has come that far."""
    for each in cgroups:
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (each / "payload/init.scope/cgroup.procs").read_text().split()[:1]]
    return []


def _kill(cgroups: tuple[Path, ...]) -> None:
    for each in cgroups:
        with contextlib.suppress(OSError):
            (each / "cgroup.kill").write_text("1")


async def _remove(cgroups: tuple[Path, ...]) -> None:
    """Remove a container's folders. The kernel lets go of one when the last process in it has ended."""

    def removed() -> bool:
        for each in cgroups:
            for folder in (*sorted((path for path in each.rglob("*") if path.is_dir()), reverse=True), each):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return not any(each.exists() for each in cgroups)

    await await_for(removed, what=f"the end of all processes in {cgroups[0]}")


def _quoted(word: str) -> str:
    """For systemd's configuration files: systemd.syntax(7), and specifiers."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _connect(port: int) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=5)
    found.setblocking(False)
    return found


if __name__ == "__main__":
    mirror.main(sys.argv[2:], partial(Group, sys.argv[1]))
