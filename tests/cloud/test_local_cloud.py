"""The local cloud: groups, machines over SSH, faults, and what is left when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import asyncssh
import pytest

from spotrun.cloud import Instance, connect
from spotrun.cloud.local import cloud as client
from spotrun.cloud.local import procs
from spotrun.cloud.local.cloud import LocalCloud, down, find, up
from spotrun.cloud.local.layout import METADATA_PORT, SSH_PORT, Config, Layout, Pool
from spotrun.cloud.local.pools import LocalPools
from spotrun.errors import CloudError
from spotrun.spec import ClusterSpec
from tests.cloud.local_spec import IDLE, spec
from tests.helpers import await_for, wait_for

PEER = str(Path(__file__).parents[1] / "fakes/peer.py")


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
        known = ([asyncssh.import_public_key(self.host_key(node.name))], [], [])
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


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    if found.cloud is not None:
        await found.cloud.close()
    await asyncio.to_thread(down, "tiny", tmp_path)


async def test_group_grows_shrinks_and_recreates(cluster: Cluster) -> None:
    cloud = await cluster.up()
    before = await cluster.running()
    assert before["head-0"].address.endswith(".2")
    await cloud.resize("a", 3)
    await cloud.resize("b", 1)
    nodes = await cluster.running("a-0", "a-1", "a-2", "b-0")
    assert await cloud.sizes() == {"a": 3, "b": 1}
    assert (nodes["a-1"].zone, nodes["a-1"].market, nodes["b-0"].market) == ("local-a", "spot", "on-demand")
    assert len({node.address for node in nodes.values()}) == len({node.id for node in nodes.values()}) == 5
    prices = await cloud.prices()
    assert prices.keys() == {"a", "b"}
    assert prices["a"] < prices["b"]

    await cloud.recreate(["a-1"])
    again = await cluster.running("a-0", "a-1", "a-2", "b-0", ids=(nodes["a-1"].id,))
    assert again["a-1"].id != nodes["a-1"].id
    assert again["a-1"].address == nodes["a-1"].address
    assert again["a-0"] == nodes["a-0"]

    await cloud.remove(["a-0"])
    await cluster.running("a-1", "a-2", "b-0")
    assert (await cloud.sizes())["a"] == 2
    await cloud.resize("a", 1)  # the highest goes, what is left keeps its name
    await cluster.running("a-1", "b-0")
    await cloud.resize("a", 2)  # the lowest free name comes
    await cluster.running("a-0", "a-1", "b-0")


async def test_a_pool_ends_its_machines_after_a_while(cluster: Cluster) -> None:
    """As Google does with max_run_duration: it says when, ends them then, and makes others."""
    cloud = await cluster.up(pools=[{"name": "a", "zone": "local-a", "max": 4, "max_run_duration": 2}])
    await cloud.resize("a", 1)
    seen: dict[str, Instance] = {}

    async def another() -> bool:
        seen.update({node.id: node for node in await cloud.nodes() if node.pool == "a"})
        return len(seen) >= 2

    await await_for(another, what="the successor of a machine whose time is up")
    first, second = sorted(seen.values(), key=lambda node: node.created)[:2]
    assert first.name == second.name == "a-0"
    assert first.ends == pytest.approx(first.created + 2)
    assert second.created >= first.ends
    head = next(node for node in await cloud.nodes() if node.pool == "head")
    assert head.ends == 0.0


async def test_a_machine_has_the_devices_of_its_pool(cluster: Cluster) -> None:
    count = "import spotrun.machine.gpus as gpus; print(gpus.device_count(), flush=True)"
    role = (sys.executable, "-c", f"{count}; import time; time.sleep(1e6)")
    pools = [{"name": name, "zone": "local-a", "max": 1} for name in ("a", "b")]
    cloud = await cluster.up(role, pools=[{**pools[0], "devices": 4}, pools[1]])
    await cloud.resize("a", 1)
    await cloud.resize("b", 1)

    async def said() -> dict[str, str]:
        found = {name: (cluster.layout.folder(name) / "init.log").read_text() for name in ("a-0", "b-0", "head-0")}
        return found if all(found.values()) else {}

    await cluster.running("a-0", "b-0")
    assert await await_for(said, what="the words of all") == {"a-0": "4\n", "b-0": "1\n", "head-0": "1\n"}


async def test_a_machine_that_dies_by_itself_is_replaced(cluster: Cluster) -> None:
    cloud = await cluster.up()
    await cloud.resize("a", 1)
    nodes = await cluster.running("a-0")
    head_key = cluster.host_key("head-0")
    keys = {name: cluster.host_key(name) for name in nodes}
    for name in nodes:
        for pid in cluster.pids(name):
            with suppress(ProcessLookupError):  # the end of its first process ends a machine
                os.kill(pid, signal.SIGKILL)
    again = await cluster.running("a-0", ids=tuple(node.id for node in nodes.values()))
    assert again["head-0"].address == nodes["head-0"].address
    assert cluster.host_key("head-0") == head_key  # operators know it
    assert cluster.host_key("a-0") != keys["a-0"]


async def test_zone_runs_dry_and_recovers(cluster: Cluster) -> None:
    cloud = await cluster.up(local={"capacity": {"local-a": 2}})
    await cloud.resize("a", 3)
    await cluster.running("a-0", "a-1")
    [problem] = await cloud.problems()
    assert (problem.pool, problem.kind) == ("a", "stockout")
    assert "local-a" in problem.message
    assert (await cloud.sizes())["a"] == 3

    await cloud.stockout("local-a", True)
    await cloud.kill("a-0")

    async def gone() -> bool:
        return "a-0" not in await cluster.nodes() or (await cluster.nodes())["a-0"].state == "terminated"

    async def two_missing() -> bool:
        return "2 missing" in "".join(problem.message for problem in await cloud.problems())

    await await_for(two_missing, what="both missing machines in the problem")
    assert await gone()
    assert (await cloud.problems())[0].at == problem.at  # the same stock-out still
    await cloud.stockout("local-a", False)
    await await_for(lambda: one_missing(cloud), what="the machine that the zone has again")
    await cloud.resize("a", 2)
    await cluster.running("a-0", "a-1")
    assert await cloud.problems() == []


async def one_missing(cloud: LocalCloud) -> bool:
    return "1 missing" in "".join(problem.message for problem in await cloud.problems())


async def test_up_again_finds_it_and_follows_a_changed_file(cluster: Cluster) -> None:
    first = await cluster.up()
    await first.resize("a", 2)
    nodes = await cluster.running("a-0", "a-1")
    await first.close()
    second = await cluster.up()
    assert second.endpoint == first.endpoint
    assert await cluster.nodes() == nodes
    await second.close()
    pools = [{"name": "a", "zone": "local-a", "max": 1}, {"name": "c", "zone": "local-a", "max": 1}]
    third = await cluster.up(pools=pools)
    await third.resize("c", 1)
    after = await cluster.running("a-0", "c-0")
    assert after["a-0"] == nodes["a-0"]
    assert await third.sizes() == {"a": 1, "c": 1}


async def test_ssh_runs_commands(cluster: Cluster) -> None:
    cloud = await cluster.up()
    await cloud.resize("a", 1)
    node = (await cluster.running("a-0"))["a-0"]
    async with cluster.ssh(node) as ssh:
        result = await ssh.run("cat; echo oops >&2; exit 7", input="in" * 100_000)
        assert (result.stdout, result.stderr, result.exit_status) == ("in" * 100_000, "oops\n", 7)
        assert ((await ssh.run("kill -TERM $$")).exit_signal or ())[:2] == ("TERM", False)
        environment = dict(line.split("=", 1) for line in (await ssh.run("env")).stdout.splitlines() if "=" in line)
        assert environment["SPOTRUN_NODE"] == "a-0"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["GCE_METADATA_HOST"] == f"{node.address}:{METADATA_PORT}"
        assert "SPOTRUN_LOCAL_CLOUD_TOKEN" not in environment  # only the head may resize
        assert Path(environment["SPOTRUN_TMPFS"]).is_dir()
        assert Path((await ssh.run("command -v python")).stdout.strip()) == Path(sys.executable).parent / "python"
        left = await ssh.run("sleep 1000 & echo started")  # what it leaves behind does not hold the session
        assert left.stdout == "started\n"
        many = await asyncio.gather(*(ssh.run(f"exit {code}") for code in range(10)))
        assert [result.exit_status for result in many] == list(range(10))


async def test_ssh_terminal_and_files(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.up()
    head = (await cluster.running())["head-0"]
    async with cluster.ssh(head) as ssh:
        shell = await ssh.create_process(term_type="xterm", term_size=(100, 30))
        shell.stdin.write("test -t 0 && stty size; echo $((6*7)); exit 5\n")
        output = await shell.stdout.read()
        await shell.wait()
        assert "30 100" in output
        assert "42" in output
        assert shell.exit_status == 5
        async with ssh.start_sftp_client() as files, files.open(str(tmp_path / "note"), "w") as file:
            await file.write("hello")
        assert (tmp_path / "note").read_text() == "hello"
        sleeper = await ssh.create_process("echo $$; exec sleep 1000")
        pid = int(await sleeper.stdout.readline())
    await await_for(lambda: procs.status(pid)[0] in "ZX", what="the hang-up of the command whose client has left")


async def test_ssh_through_the_head_and_nobody_else(cluster: Cluster, tmp_path: Path) -> None:
    cloud = await cluster.up()
    await cloud.resize("a", 1)
    nodes = await cluster.running("a-0")
    async with cluster.ssh(nodes["head-0"]) as head, cluster.ssh(nodes["a-0"], through=head) as ssh:
        assert (await ssh.run("echo $SPOTRUN_NODE")).stdout == "a-0\n"
    stranger = asyncssh.generate_private_key("ssh-ed25519")
    for keys in ([stranger], []):
        with pytest.raises(asyncssh.PermissionDenied):
            await asyncssh.connect(
                nodes["a-0"].address, SSH_PORT, client_keys=keys, known_hosts=None, config=None, agent_path=None
            )
    known = ([stranger.convert_to_public()], [], [])
    with pytest.raises(asyncssh.HostKeyNotVerifiable):
        await asyncssh.connect(
            nodes["a-0"].address, SSH_PORT, client_keys=[str(cluster.layout.key)], known_hosts=known, config=None
        )


async def test_role_runs_in_the_machines_environment_and_again(cluster: Cluster) -> None:
    cloud = await cluster.up(role=("sh", "-c", 'echo {role} $SPOTRUN_NODE "$SPOTRUN_LOCAL_CLOUD" >> role; exit 1'))
    await cloud.resize("a", 1)
    await cluster.running("a-0")

    def lines(name: str) -> list[str]:
        path = cluster.layout.folder(name) / "scratch" / "role"
        return path.read_text().splitlines() if path.exists() else []

    assert (await await_for(lambda: lines("a-0") if len(lines("a-0")) > 1 else None))[:2] == ["agent a-0 "] * 2
    assert (await await_for(lambda: lines("head-0")))[0] == f"head head-0 {cloud.endpoint}"


async def test_orphans_stay_in_the_machine_and_are_collected(cluster: Cluster) -> None:
    await cluster.up()
    head = (await cluster.running())["head-0"]
    async with cluster.ssh(head) as ssh:
        # One that hides its mark, and has no parent any more.
        await ssh.run("setsid env -i sh -c 'echo $$ > pid; exec sleep 1000' > /dev/null 2>&1 &")
        path = cluster.layout.folder("head-0") / "scratch" / "pid"
        pid = int(await await_for(lambda: path.exists() and path.read_text().strip()))
        assert pid in cluster.pids("head-0")
        os.kill(pid, signal.SIGKILL)
        await await_for(lambda: procs.status(pid)[0] == "X", what="the orphan's collection")


async def test_preempt_tells_and_then_takes(cluster: Cluster) -> None:
    cloud = await cluster.up()
    await cloud.resize("a", 2)
    await cloud.resize("b", 1)
    nodes = await cluster.running("a-0", "a-1", "b-0")
    async with aiohttp.ClientSession(headers={"Metadata-Flavor": "Google"}) as session:

        async def ask(name: str, query: str = "") -> str:
            root = f"http://{nodes[name].address}:{METADATA_PORT}/computeMetadata/v1/instance"
            async with session.get(f"{root}/preempted{query}") as answer:
                return await answer.text()

        poll = asyncio.create_task(ask("a-0", "?wait_for_change=true"))
        assert await ask("a-0") == "FALSE"
        processes = cluster.pids("a-0")
        await cloud.preempt("a-0", 600)
        assert await poll == "TRUE"
        assert await ask("a-1") == "FALSE"
        assert (await cluster.nodes())["a-0"].state == "stopping"
        assert cluster.pids("a-0") == processes  # it lives until the end of its notice
    await cloud.preempt(nodes["a-1"].id, 0.2)
    await cluster.cloud.kill("a-0")
    assert not cluster.pids("a-0")
    await cluster.running("a-0", "a-1", "b-0", ids=(nodes["a-0"].id, nodes["a-1"].id))
    with pytest.raises(CloudError, match="on-demand"):
        await cloud.preempt("b-0", 30)
    await cloud.preempt("b-0", 0)  # without notice, anything can be taken
    await cluster.running("a-0", "a-1", "b-0", ids=(nodes["b-0"].id,))


async def test_preempt_as_ec2_says_it(cluster: Cluster) -> None:
    cloud = await cluster.up(local={"metadata": "ec2"})
    await cloud.resize("a", 1)
    node = (await cluster.running("a-0"))["a-0"]
    root = f"http://{node.address}:{METADATA_PORT}/latest"
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{root}/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}) as answer:
            headers = {"X-aws-ec2-metadata-token": await answer.text()}

        async def get(path: str) -> tuple[int, str]:
            async with session.get(f"{root}/meta-data/{path}", headers=headers) as answer:
                return answer.status, await answer.text()

        assert await get("instance-id") == (200, node.id)
        assert node.id.startswith("i-")
        assert await get("tags/instance/spotrun-role") == (200, "node")
        assert (await get("spot/instance-action"))[0] == 404
        await cloud.preempt("a-0")
        assert json.loads((await get("spot/instance-action"))[1])["action"] == "terminate"
        assert (await get("events/recommendations/rebalance"))[0] == 200


async def test_freeze_and_thaw(cluster: Cluster) -> None:
    cloud = await cluster.up()
    await cloud.resize("a", 1)
    node = (await cluster.running("a-0"))["a-0"]
    await cloud.freeze("a-0")
    pids = cluster.pids("a-0")
    assert len(pids) > 1
    assert {procs.status(pid)[0] for pid in pids} == {"T"}
    assert (await cluster.nodes())["a-0"].state == "running"  # the cloud sees nothing
    await cloud.thaw("a-0")
    assert cluster.pids("a-0") == pids
    assert "T" not in {procs.status(pid)[0] for pid in pids}
    async with cluster.ssh(node) as ssh:
        assert (await ssh.run("echo alive")).stdout == "alive\n"
    await cloud.freeze("a-0")
    await cloud.kill("a-0")
    assert not any(procs.status(pid)[0] not in "ZX" for pid in pids)
    await cluster.running("a-0", ids=(node.id,))


class Peer:
    """A `peer.py` on a machine, spoken to through files, which no cut reaches."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.folder = cluster.layout.folder(name) / "scratch" / "peer"
        self.words = 0

    def do(self, line: str) -> None:
        with (self.folder / "in").open("w") as pipe:
            pipe.write(line + "\n")

    def received(self) -> list[str]:
        return (self.folder / "out").read_text().splitlines()

    async def until(self, word: str) -> None:
        await await_for(lambda: word in self.received(), what=f"{word!r} at {self.folder}")

    async def sync(self) -> list[str]:
        """All that it has received, once everything that has arrived is taken in."""
        self.words += 1
        self.do(f"sync sync{self.words}")
        await self.until(f"sync{self.words}")
        return self.received()


async def test_cut_is_silence_both_ways_and_join_ends_it(cluster: Cluster) -> None:
    cloud = await cluster.up(role=(sys.executable, PEER, "peer"))
    await cloud.resize("a", 3)
    nodes = await cluster.running("a-0", "a-1", "a-2")
    a, b, c = (Peer(cluster, f"a-{index}") for index in range(3))
    for index, peer in enumerate((a, b, c)):
        await await_for((peer.folder / "in").exists)
        peer.do(f"listen {nodes[f'a-{index}'].address} 7000")
        await peer.until("listening")
    at = {index: f"{nodes[f'a-{index}'].address} 7000" for index in range(3)}
    a.do(f"dial toB {at[1]}")
    await a.until("connected toB")
    b.do(f"dial toA {at[0]}")
    await b.until("connected toA")
    b.do(f"dial toC {at[2]}")
    await b.until("connected toC")
    a.do("send toB one")
    b.do("send toA two")
    await b.until("one")
    await a.until("two")
    await cloud.freeze("a-2")
    await cloud.thaw("a-2")

    await cloud.cut("a-0")
    a.do("send toB three")
    b.do("send toA four")
    b.do("send toC five")
    b.do(f"dial again {at[0]}")  # a new connection to it
    a.do(f"dial out {at[1]}")  # and from it
    await c.until("five")  # the others talk
    await a.sync()
    await b.sync()
    await cloud.cut("a-0")  # what it has opened meanwhile is cut by now
    a.do("send out six")
    heard_a, heard_b = await a.sync(), await b.sync()
    assert not {"four"} & set(heard_a)
    assert not {"three", "six", "connected again"} & set(heard_b)
    assert not [line for line in heard_a + heard_b if line.startswith(("closed", "error"))]  # silence, not an end
    async with aiohttp.ClientSession(headers={"Metadata-Flavor": "Google"}) as session:
        root = f"http://{nodes['a-0'].address}:{METADATA_PORT}/computeMetadata/v1/instance"
        assert (await session.get(f"{root}/name")).status == 200

    await cloud.join("a-0")
    for word in ("three", "six", "connected again"):
        await b.until(word)
    await a.until("four")
    b.do("send again seven")
    await a.until("seven")


async def test_two_cuts_end_apart(cluster: Cluster) -> None:
    cloud = await cluster.up(role=(sys.executable, PEER, "peer"))
    await cloud.resize("a", 2)
    nodes = await cluster.running("a-0", "a-1")
    a, b = Peer(cluster, "a-0"), Peer(cluster, "a-1")
    await await_for(lambda: (a.folder / "in").exists() and (b.folder / "in").exists())
    b.do(f"listen {nodes['a-1'].address} 7000")
    await b.until("listening")
    a.do(f"dial toB {nodes['a-1'].address} 7000")
    await a.until("connected toB")
    await b.sync()
    await cloud.cut("a-0")
    await cloud.cut("a-1")
    await cloud.join("a-0")
    a.do("send toB one")
    await a.sync()
    assert "one" not in await b.sync()
    await cloud.kill("a-0")  # its end does not reach the other either
    assert not [line for line in await b.sync() if line.startswith(("closed", "error"))]
    await cluster.running("a-0", "a-1", ids=(nodes["a-0"].id,))
    await cloud.join("a-1")


def left_behind(layout: Layout) -> list[str]:
    found = [f"process {pid}" for pid in procs.of_cluster(layout.unique)]
    return found + [str(layout.tmpfs)] * layout.tmpfs.exists() + [str(layout.record)] * layout.record.exists()


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
    assert {path.name for path in cluster.layout.tmpfs.iterdir()} == {"head-0"}
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


BAD: list[tuple[str, Any, int, str]] = [
    ("resize", {"pool": "nope", "size": 1}, 409, "pools: a, b"),
    ("resize", {"pool": "head", "size": 0}, 409, "no pool 'head'"),
    ("resize", {"pool": "a", "size": 5}, 409, "0 to 4"),
    ("resize", {"pool": "a", "size": -1}, 409, "0 to 4"),
    ("resize", {"pool": "a", "size": "1"}, 400, "whole number"),
    ("resize", {"pool": "a", "size": True}, 400, "whole number"),
    ("resize", {"pool": ["a"]}, 400, "not a text"),
    ("resize", [], 400, "not a JSON object"),
    ("resize", b"{", 400, "not JSON"),
    ("resize", b"\xff\xfe", 400, "not JSON"),
    ("resize", b"[" * 100_000, 400, "not JSON"),
    ("resize", b" " * (2 << 20), 413, ""),
    ("kill", {"name": "a-9"}, 409, "machines: head-0"),
    ("kill", {"name": "a\r\nX: y"}, 409, "no machine"),
    ("kill", {}, 400, "not a text"),
    ("remove", {"names": "a-0"}, 400, "list of texts"),
    ("remove", {"names": ["head-0"]}, 409, "head cannot be removed"),
    ("preempt", {"name": "head", "notice": "soon"}, 400, "number of seconds"),
    ("preempt", {"name": "head", "notice": -1}, 400, "number of seconds"),
    ("preempt", {"name": "head", "notice": 1e6}, 400, "more than 86400 seconds"),
    ("preempt", b'{"name": "head", "notice": NaN}', 400, "number of seconds"),
    ("market", {"where": "local-z", "dry": True}, 409, "allowed: a, b, local-a, local-b"),
    ("market", {"where": "local-a", "dry": 1}, 400, "neither true nor false"),
    ("market", {"where": "a", "capacity": 1.5}, 400, "capacity: 1.5 is not a whole number"),
    ("market", {"where": "a", "price": "dear"}, 400, "price: 'dear' is not a number"),
    ("market", {"where": "a", "prise": 1}, 400, "prise: unknown; allowed: where, "),
    ("configure", {"cluster": "x"}, 400, "not a configuration"),
    ("configure", {"head": 1}, 400, "not a configuration"),
    ("shutdown", {}, 404, "does not exist"),
]


async def test_bad_requests_are_refused_and_change_nothing(cluster: Cluster) -> None:
    cloud = await cluster.up()
    before = await cluster.running()
    async with aiohttp.ClientSession() as session:
        for token in ("", "Bearer", "Bearer wrong", f"bearer {cloud.token}", "Bearer \udcff"):
            async with session.get(f"{cloud.endpoint}/v1/nodes", headers={"Authorization": token}) as answer:
                assert answer.status == 401
        headers = {"Authorization": f"Bearer {cloud.token}"}
        for verb, body, status, message in BAD:
            data = body if isinstance(body, bytes) else json.dumps(body)
            async with session.post(f"{cloud.endpoint}/v1/{verb}", data=data, headers=headers) as answer:
                found = await answer.json()
                assert (answer.status, message in found["error"]) == (status, True), (verb, body, found)
        async with session.get(f"{cloud.endpoint}/v1/secrets", headers=headers) as answer:
            assert answer.status == 404
    with pytest.raises(CloudError, match="0 to 4"):
        await cloud.resize("a", 5)
    assert await cluster.running() == before
    assert await cloud.sizes() == {"a": 0, "b": 0}


async def test_connect_finds_the_cloud_from_the_heads_environment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPOTRUN_LOCAL_CLOUD", raising=False)
    with pytest.raises(CloudError, match="SPOTRUN_LOCAL_CLOUD"):
        connect(spec())
    cloud = await cluster.up()
    monkeypatch.setenv("SPOTRUN_LOCAL_CLOUD", cloud.endpoint)
    monkeypatch.setenv("SPOTRUN_LOCAL_CLOUD_TOKEN", cloud.token)
    found = connect(spec())
    assert [node.pool for node in await found.nodes()] == ["head"]
    await found.close()


@pytest.fixture
def unbooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalPools:
    """One of which no machine ever boots. It runs in this process, whose other children must not count as orphans."""
    monkeypatch.setattr(procs, "strays", lambda known: set())
    head = Pool("head", "z", "m", "on-demand", 1)
    pools = (Pool("p", "z", "m", "spot", 300),)
    layout = Layout(tmp_path / "local" / "c")
    layout.make()
    return LocalPools(Config("c", "r", "b", head, pools, boot_delay=1e6), layout, "127.9.9", "t")


async def test_a_machine_that_is_taken_before_it_has_begun_is_gone(unbooted: LocalPools) -> None:
    """A request may come between the two; the machine would be stopping for ever, and never be recreated."""
    cloud = unbooted
    cloud._begin(cloud.config.pools[0], 0)
    await asyncio.wait_for(cloud.kill("p-0"), 60)
    assert [each.state for each in cloud.instances()] == ["terminated"]


async def test_more_machines_than_addresses_end_no_other(unbooted: LocalPools) -> None:
    cloud = unbooted
    cloud.resize("p", 300)
    cloud._reconcile()
    assert len(cloud.instances()) == 246, "245 and the head"
    assert ["245 addresses, and all are in use" in each.message for each in cloud.problems()] == [True]
    for node in cloud.machines.values():
        cloud._end(node)
    await asyncio.gather(*(node.gone.wait() for node in cloud.machines.values()))


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


def test_daemon_and_machines_import_little() -> None:
    code = "import sys, spotrun.cloud.local.{}; print(*sorted({{'torch','pydantic','numpy'}} & set(sys.modules)))"
    for module in ("daemon", "init", "sshd"):
        found = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == ""


@pytest.fixture(autouse=True)
def _no_memory_left(tmp_path: Path) -> Iterator[None]:
    yield
    for home in (tmp_path, tmp_path / "other"):
        layout = Layout.of(home, "tiny")
        check: Callable[[], bool] = lambda layout=layout: not left_behind(layout) or layout.record.is_dir()  # noqa: E731
        wait_for(check, what="the end of everything")
