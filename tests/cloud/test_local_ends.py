"""What is left of a local cluster when it goes down, when its daemon is killed, and beside another cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from spotrun.cloud import Instance
from spotrun.cloud.local import cloud as client
from spotrun.cloud.local import procs
from spotrun.cloud.local.cloud import down, find, up
from spotrun.cloud.local.layout import METADATA_PORT, SSH_PORT, ZYGOTE_MARK, Layout, ensure_key
from spotrun.errors import CloudError
from spotrun.spec import ClusterSpec
from tests.cloud.local_cluster import Cluster, left_behind
from tests.cloud.local_spec import IDLE, spec

pytestmark = pytest.mark.usefixtures("nothing_left")


def ports_free(record: dict[str, Any], nodes: dict[str, Instance]) -> None:
    gateway = record["endpoint"].removeprefix("http://").split(":")
    ports = [(gateway[0], int(gateway[1])), (gateway[0], SSH_PORT)]
    ports += [(node.address, port) for node in nodes.values() for port in (SSH_PORT, METADATA_PORT)]
    for address in ports:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen()


async def busy(cluster: Cluster) -> dict[str, Instance]:
    """Machines with files in memory, a process that hides, and one that is frozen."""
    await cluster.cloud.resize("a", 2)
    nodes = await cluster.running("a-0", "a-1")
    for name in nodes:
        (cluster.layout.tmpfs / name / "snapshot").write_bytes(bytes(1 << 20))
    async with cluster.ssh(nodes["a-0"]) as ssh:
        await ssh.run("setsid env -i sleep 1000 > /dev/null 2>&1 &")
    await cluster.cloud.freeze("a-1")
    return nodes


async def test_down_leaves_only_the_bucket(cluster: Cluster) -> None:
    await cluster.up()
    nodes = await busy(cluster)
    (cluster.layout.bucket / "kept").write_text("kept")
    record = json.loads(cluster.layout.record.read_text())
    everything = procs.of_cluster(cluster.layout.unique)
    await cluster.cloud.close()
    await asyncio.to_thread(down, "tiny", cluster.home)
    assert left_behind(cluster.layout) == []
    assert [pid for pid in everything if procs.status(pid)[0] not in "ZX"] == []
    ports_free(record, nodes)
    assert (cluster.layout.bucket / "kept").read_text() == "kept"
    assert find("tiny", cluster.home) is None
    with pytest.raises(CloudError, match="make up"):
        await cluster.cloud.nodes()
    await asyncio.to_thread(down, "tiny", cluster.home)  # again does no harm


@pytest.mark.parametrize("when", ["running", "booting", "ending"])
async def test_killed_daemon_then_up_is_clean(cluster: Cluster, when: str) -> None:
    await cluster.up()
    nodes = await busy(cluster)
    record = json.loads(cluster.layout.record.read_text())
    before = procs.of_cluster(cluster.layout.unique) - {record["pid"]}
    if when == "booting":
        await cluster.cloud.resize("a", 4)
    if when == "ending":
        await cluster.cloud.resize("a", 0)
    os.kill(record["pid"], signal.SIGKILL)
    await asyncio.to_thread(procs.await_exit, record["pid"], 10)
    await cluster.cloud.close()
    cloud = await cluster.up()
    assert await cloud.sizes() == {"a": 0, "b": 0}
    after = await cluster.running(ids=tuple(node.id for node in nodes.values()))
    assert after.keys() == {"head-0"}
    assert [pid for pid in before if procs.status(pid)[0] not in "ZX"] == []
    assert {path.name for path in cluster.layout.tmpfs.iterdir()} == {"head-0", ZYGOTE_MARK}
    await cloud.resize("a", 1)
    await cluster.running("a-0")


async def test_a_daemon_that_does_not_answer_keeps_its_machines(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.up()
    before = await cluster.running()
    monkeypatch.setattr(client, "_ANSWER", 0.5)
    pid = json.loads(cluster.layout.record.read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CloudError, match=rf"\(pid {pid}\) runs but does not answer; `make down` ends it"):
            await cluster.up()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await cluster.running() == before


async def test_killed_daemon_then_down_is_clean(cluster: Cluster) -> None:
    await cluster.up()
    nodes = await busy(cluster)
    record = json.loads(cluster.layout.record.read_text())
    os.kill(record["pid"], signal.SIGKILL)
    await asyncio.to_thread(procs.await_exit, record["pid"], 10)
    await asyncio.to_thread(down, "tiny", cluster.home)
    assert left_behind(cluster.layout) == []
    ports_free(record, nodes)


async def test_down_with_a_full_disk(cluster: Cluster) -> None:
    """What trains may have filled it. A limit for the size of files takes the place of a full disk."""
    await cluster.up()
    code = (
        "import resource, sys; from pathlib import Path; from spotrun.cloud.local.cloud import down;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); down('tiny', Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(cluster.home)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert left_behind(cluster.layout) == []


def test_a_key_pair_is_one_pair(tmp_path: Path) -> None:
    """Of several first commands at once, each makes the key; and one was killed before it had the public key."""
    meet = Barrier(8)

    def make(folder: Path) -> str:
        meet.wait()
        return ensure_key(folder / "key")

    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            folder = tmp_path / str(number)
            folder.mkdir()
            lines = set(pool.map(make, [folder] * 8))
            private = load_ssh_private_key((folder / "key").read_bytes(), None)
            public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
            assert (lines, (folder / "key.pub").read_text().strip()) == ({public}, public)
            assert sorted(path.name for path in folder.iterdir()) == ["key", "key.pub"]
    (tmp_path / "0/key.pub").write_text("")
    line = ensure_key(tmp_path / "0/key")
    assert line.startswith("ssh-ed25519 ")
    assert line == (tmp_path / "0/key.pub").read_text().strip()


async def test_two_clusters_at_once(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(tmp_path / "other")
    try:
        await asyncio.gather(cluster.up(), other.up())
        mine, theirs = await cluster.running(), await other.running()
        assert mine["head-0"].address != theirs["head-0"].address
        await asyncio.to_thread(down, "tiny", cluster.home)
        assert await other.running() == theirs
    finally:
        await other.cloud.close()
        await asyncio.to_thread(down, "tiny", other.home)


def test_of_two_ups_at_once_one_starts_the_cloud(tmp_path: Path) -> None:
    starts: list[int] = []
    pools = [{"name": "p", "zone": "local-a"}]
    spec = ClusterSpec.model_validate({"name": "twice", "cloud": "local", "pools": pools})
    try:
        with ThreadPoolExecutor(2) as pool:
            ups = [
                pool.submit(up, spec, tmp_path, ("sleep", "600"), starting=lambda: starts.append(1)) for _ in range(2)
            ]
            assert len({each.result(120).endpoint for each in ups}) == 1
        assert starts == [1]
    finally:
        down("twice", tmp_path)


def test_an_up_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a suspended one: the next one must say that it waits, and must not wait for ever."""
    layout = Layout.of(tmp_path, "c")
    with client._lock(layout):
        monkeypatch.setattr(client, "_LOCKED", 0.2)
        with pytest.raises(CloudError, match=rf"is under way \(pid {os.getpid()}\)"):
            down("c", tmp_path)
    down("c", tmp_path)


def test_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path, "tiny")
    layout.tmpfs.parent.mkdir(exist_ok=True)
    layout.record.mkdir(parents=True)  # in the way of its record
    (layout.record / "x").touch()
    with pytest.raises((CloudError, OSError)):
        up(spec(), tmp_path, IDLE)
    assert not procs.of_cluster(layout.unique)
