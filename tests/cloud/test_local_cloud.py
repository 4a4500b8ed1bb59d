"""The local cloud: groups of machines, SSH to them, their roles, and requests that it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import asyncssh
import pytest

from spotrun.cloud import Instance, connect
from spotrun.cloud.local import procs
from spotrun.cloud.local.cloud import LocalCloud
from spotrun.cloud.local.layout import METADATA_PORT, SSH_PORT, Config, Layout, Pool
from spotrun.cloud.local.pools import LocalPools
from spotrun.errors import CloudError
from tests.cloud.local_cluster import Cluster, KnownHosts
from tests.cloud.local_spec import spec
from tests.helpers import await_for

pytestmark = pytest.mark.usefixtures("nothing_left")


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
    """As Google does with max_run_duration: it says when, ends them then, and makes no others. The pool is smaller."""
    cloud = await cluster.up(pools=[{"name": "a", "zone": "local-a", "max": 4, "max_run_duration": 2}])
    await cloud.resize("a", 1)
    seen: dict[str, Instance] = {}

    async def another() -> bool:
        seen.update({node.id: node for node in await cloud.nodes() if node.pool == "a"})
        return len(seen) >= 2

    async def smaller() -> bool:
        await another()
        return (await cloud.sizes())["a"] == 0

    await await_for(smaller, what="the end of a machine whose time is over")
    assert len(seen) == 1
    await cloud.resize("a", 1)  # the machine may still end; its successor has its name
    await await_for(another, what="the successor that was asked for")
    first, second = sorted(seen.values(), key=lambda node: node.created)[:2]
    assert first.name == second.name == "a-0"
    assert first.ends == pytest.approx(first.created + 2)
    assert second.created >= first.ends
    head = next(node for node in await cloud.nodes() if node.pool == "head")
    assert head.ends == 0.0


@pytest.mark.parametrize("gpus", [None, "0"], ids=["no GPU", "a GPU"])
async def test_a_machine_has_the_devices_of_its_pool(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, gpus: str | None
) -> None:
    """If the shell names GPUs, a pool that does not set `devices` uses them. Otherwise they stay hidden."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if gpus is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    words = "m.device_count(), m.uses_gpus(), os.environ['CUDA_VISIBLE_DEVICES']"
    code = f"import os, time, spotrun.machine.gpus as m; print({words}, flush=True); time.sleep(1e6)"
    role = (sys.executable, "-c", code)
    pools = [{"name": name, "zone": "local-a", "max": 1} for name in ("a", "b")]
    cloud = await cluster.up(role, pools=[{**pools[0], "devices": 4}, pools[1]])
    await cloud.resize("a", 1)
    await cloud.resize("b", 1)

    async def said() -> dict[str, str]:
        found = {name: (cluster.layout.folder(name) / "init.log").read_text() for name in ("a-0", "b-0", "head-0")}
        return found if all(found.values()) else {}

    await cluster.running("a-0", "b-0")
    others = "1 False \n" if gpus is None else "1 True 0\n"
    assert await await_for(said, what="the words of all") == {"a-0": "4 False \n", "b-0": others, "head-0": others}


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
        printed = str((await ssh.run("env")).stdout)
        environment = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
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
    known: KnownHosts = ([stranger.convert_to_public()], [], [])
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


def test_daemon_and_machines_import_little() -> None:
    code = "import sys, spotrun.cloud.local.{}; print(*sorted({{'torch','pydantic','numpy'}} & set(sys.modules)))"
    for module in ("daemon", "init", "sshd"):
        found = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == ""
