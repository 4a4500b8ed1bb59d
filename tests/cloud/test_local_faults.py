"""The faults of the local cloud: preemption with notice, frozen machines, cut networks."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import pytest

from spotrun.cloud.local import procs
from spotrun.cloud.local.layout import METADATA_PORT
from spotrun.errors import CloudError
from tests.cloud.local_cluster import Cluster
from tests.helpers import await_for

pytestmark = pytest.mark.usefixtures("nothing_left")


PEER = str(Path(__file__).parents[1] / "fakes/peer.py")


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
    # On a busy machine, a process stops when its turn comes.
    await await_for(lambda: {procs.status(pid)[0] for pid in pids} == {"T"}, what="all processes to stop")
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
