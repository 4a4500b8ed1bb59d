"""A cluster of the local cloud, and how the tests talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncssh

from spotrun.cloud import Instance
from spotrun.cloud.local import procs
from spotrun.cloud.local.cloud import LocalCloud, up
from spotrun.cloud.local.layout import SSH_PORT, Layout
from tests.cloud.local_spec import IDLE, spec
from tests.helpers import await_for

KnownHosts = tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]]  # trusted, of CAs, revoked


class Cluster:
    """A local cluster, and how the tests talk to it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.layout = Layout.of(home, "tiny")
        self.cloud: LocalCloud = None  # type: ignore[assignment]

    async def up(self, role: tuple[str, ...] | None = IDLE, **values: Any) -> LocalCloud:
        self.cloud = await asyncio.to_thread(up, spec(**values), self.home, role)
        return self.cloud

    async def nodes(self) -> dict[str, Instance]:
        return {node.name: node for node in await self.cloud.nodes()}

    async def running(self, *names: str, ids: tuple[str, ...] = ()) -> dict[str, Instance]:
        """All machines, once exactly these and the head run, none of them with one of these ids."""

        async def look() -> dict[str, Instance]:
            nodes = await self.nodes()
            good = {name for name, node in nodes.items() if node.state == "running" and node.id not in ids}
            return nodes if good == {*names, "head-0"} == set(nodes) else {}

        return await await_for(look, what=f"machines {names}")

    def pids(self, name: str) -> set[int]:
        return procs.of_machine(self.layout.mark(name))

    def host_key(self, name: str) -> str:
        return (self.layout.folder(name) / "ssh" / "ssh_host_ed25519_key.pub").read_text()

    @asynccontextmanager
    async def ssh(self, node: Instance, through: Any = ()) -> AsyncIterator[asyncssh.SSHClientConnection]:
        known: KnownHosts = ([asyncssh.import_public_key(self.host_key(node.name))], [], [])
        async with asyncssh.connect(
            node.address,
            SSH_PORT,
            username="anyone",
            client_keys=[str(self.layout.key)],
            known_hosts=known,
            tunnel=through,
            config=None,
        ) as connection:
            yield connection


def left_behind(layout: Layout) -> list[str]:
    found = [f"process {pid}" for pid in procs.of_cluster(layout.unique)]
    return found + [str(layout.tmpfs)] * layout.tmpfs.exists() + [str(layout.record)] * layout.record.exists()


def is_gone(layout: Layout) -> bool:
    return not left_behind(layout)
