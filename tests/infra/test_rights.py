"""What a node may do with its cluster's bucket is what agents do, and not what a job's code would like to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import pytest
from aiohttp import web

from spotrun.errors import StoreError
from spotrun.folders import Input
from spotrun.node import kept_folders
from spotrun.spec import ClusterSpec
from spotrun.state import slots
from spotrun.store import Store, checkpoint_key, head_key, host_key, kept_key, log_key, unfit_key
from spotrun.train import download
from spotrun.wire import Manifest, Order, SaveOrder
from tests.fakes import gcs
from tests.fakes.gcs import FakeGcs
from tests.fakes.node import world
from tests.helpers import await_for
from tests.infra import policies, synthesized
from tests.infra.policies import Allows

pytestmark = pytest.mark.clouds

Cloud = Literal["aws", "gcp"]
SPECS = {
    "gcp": {
        "name": "test",
        "cloud": "gcp",
        "region": "us-central1",
        "project": "my-project",
        "pools": [{"name": "pool", "zone": "us-central1-b", "machine": "g2-standard-8"}],
    },
    "aws": {
        "name": "test",
        "cloud": "aws",
        "region": "us-east-1",
        "pools": [{"name": "pool", "zone": "us-east-1a", "machine": "g5.xlarge"}],
    },
}
NODES = {"gcp": "test--pool-a1b2", "aws": "i-0123456789abcdef0"}
BUCKET = "the-bucket"


@pytest.fixture(params=["aws", "gcp"])
def cloud(request: pytest.FixtureRequest) -> Cloud:
    found: Cloud = request.param
    return found


def rights(cloud: Cloud, role: str = "node") -> Allows:
    cluster = synthesized.of(ClusterSpec.model_validate(SPECS[cloud]))
    return policies.of_aws(cluster, role) if cloud == "aws" else policies.of_gcp(cluster, role)


# What a job's code would like to do: each is refused. NODE is another node of the cluster.
ATTACKS = {
    "be the head": ("put", "clusters/test/head.json"),
    "remove the head's address": ("delete", "clusters/test/head.json"),
    "forge the head's host keys": ("put", "clusters/test/hosts/head.json"),
    "remove the head's host keys": ("delete", "clusters/test/hosts/head.json"),
    "remove another node's host keys": ("delete", "clusters/test/hosts/NODE.json"),
    "describe another cluster": ("put", "clusters/test/cluster.json"),
    "be a newer head": ("put", "clusters/test/epochs/000099"),
    "put a job into the queue": ("put", "clusters/test/queue.json"),
    "say whom the cloud was asked to replace": ("put", "clusters/test/replaced.json"),
    "write another cluster's head": ("put", "clusters/victim/head.json"),
    "write another cluster's host keys": ("put", "clusters/victim/hosts/NODE.json"),
    "read another cluster": ("get", "clusters/victim/head.json"),
    "replace another job's code": ("put", "code/0123.tar.zst"),
    "remove code": ("delete", "code/0123.tar.zst"),
    "change a job": ("put", "jobs/other-1/job.yaml"),
    "read another job's secrets": ("get", "jobs/other-1/job.yaml"),
    "say that a job has ended": ("put", "jobs/other-1/state.json"),
    "write a job's events": ("put", "jobs/other-1/events.jsonl"),
    "remove a checkpoint": ("delete", "jobs/other-1/checkpoints/0000000048/g1-shard-00001-of-00001.safetensors"),
    "remove a folder that a job has left": ("delete", "jobs/other-1/kept/0001/out/model.bin"),
    "remove its manifest": ("delete", "jobs/other-1/checkpoints/0000000048/manifest.json"),
    "make a checkpoint count": ("put", "jobs/other-1/checkpoints/0000000048/manifest.json"),
    "change what operators put there": ("put", "data/images/1.tar"),
    "remove what operators put there": ("delete", "data/images/1.tar"),
    "keep things of its own": ("put", "mine/loot.tar"),
    "read what is nobody's business": ("get", "secrets/key"),
    "call a cluster a job": ("put", "clusters/test/head.json/logs/x"),
    "call code a log": ("put", "code/jobs/x/logs/y"),
}


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_jobs_code_may_not(cloud: Cloud, attack: str, there: bool) -> None:
    deed, key = ATTACKS[attack]
    other = {"gcp": "test--pool-c3d4", "aws": "i-0fedcba9876543210"}[cloud]
    key = key.replace("NODE", other)
    if (cloud, attack) == ("gcp", "remove another node's host keys"):
        pytest.skip("who may replace an object in Google's storage may delete it; docs/security.md says so")
    assert not rights(cloud)(deed, key, there)


def test_a_checkpoint_in_googles_storage_is_not_replaced() -> None:
    key = checkpoint_key("other-1", 48, "g1-shard-00001-of-00001.safetensors")
    assert rights("gcp")("put", key, False)
    assert not rights("gcp")("put", key, True)


def test_a_node_may(cloud: Cloud) -> None:
    """Also what the run below does not get to."""
    node, allows = NODES[cloud], rights(cloud)
    for deed, key in [
        ("get", head_key("test")),
        ("get", "code/0123.tar.zst"),
        ("get", "data/images/1.tar"),
        ("get", checkpoint_key("other-1", 48)),
        ("put", checkpoint_key("j-1", 48, "g1-state-of-00002.json")),
        ("put", kept_key("j-1", 1, "out/model.bin")),
        ("get", kept_key("other-1", 1, "out/model.bin")),
        ("abort", checkpoint_key("j-1", 48, "g1-shard-00001-of-00002.safetensors")),
        ("list", ""),
    ]:
        assert allows(deed, key, False), (deed, key)
    for key in [
        host_key("test", node),
        unfit_key("test", node),
        f"clusters/test/alive/{node}.json",
        log_key("j-1", 1, node, 0),
        "jobs/j-1/metrics/0001/000001.jsonl.zst",
        f"jobs/j-1/system/{node}/000001.jsonl.zst",
    ]:
        assert allows("put", key, True), key
    assert allows("tag", log_key("j-1", 1, node, 0), True)
    for key in (unfit_key("test", node), f"clusters/test/alive/{node}.json"):
        assert allows("delete", key, True), key
        assert allows("get", key, True), key


def test_the_head_may_do_all(cloud: Cloud) -> None:
    for key in (head_key("test"), "clusters/test/epochs/000001", "jobs/j-1/state.json", "code/0123.tar.zst"):
        for deed in ("get", "put", "delete", "abort", "list"):
            assert rights(cloud, "head")(deed, key, True), (deed, key)


class Guarded:
    """The bucket as nodes meet it: what they may not do is refused, and noted. done: what they have done."""

    def __init__(self, allows: Allows) -> None:
        self._allows = allows
        self.done: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []

    def __call__(self, request: web.Request, key: str, there: bool) -> bool:
        deeds = [self._deed(request, key)]
        if "x-amz-tagging" in request.headers:
            deeds.append("tag")
        for deed in deeds:
            (self.done if self._allows(deed, key, there) else self.refused).append((deed, key))
        return all(self._allows(deed, key, there) for deed in deeds)

    def _deed(self, request: web.Request, key: str) -> str:
        if request.method in ("GET", "HEAD"):
            return "get" if key else "list"
        if request.query.keys() == {"delete"}:
            return "delete"
        if request.method == "DELETE":
            return "abort" if "uploadId" in request.query else "delete"
        return "put"


@contextlib.contextmanager
def bucket(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Guarded, Mapping[str, str], FakeGcs]]:
    """A bucket, with a way in for nodes that their rights guard. S3's protocol is the same, as far as agents go."""
    guard = Guarded(rights(cloud))
    s3 = cloud == "aws"
    with gcs.running(BUCKET, s3=s3) as opened, gcs.running(s3=s3) as guarded:
        guarded.buckets, guarded.guard = opened.buckets, guard
        for name, value in environment(cloud, opened).items():
            monkeypatch.setenv(name, value)
        yield guard, environment(cloud, guarded), opened


def environment(cloud: Cloud, server: FakeGcs) -> dict[str, str]:
    if cloud == "gcp":
        return server.environment
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
    return {**server.environment, **keys, "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true"}


async def test_an_agent_gets_by_with_its_rights(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of a name that was unfit before registers, fetches code, trains, saves, logs; its state is restored."""
    node, url = NODES[cloud], ("gs://" if cloud == "gcp" else "s3://") + BUCKET
    with bucket(cloud, monkeypatch) as (guard, inside, _):
        Store(url).put(unfit_key("test", node), b"{}")
        async with world(tmp_path, node, url=url, environment=inside) as w:
            bundle = w.bundle()
            await w.ready(bundle, [node])
            save = SaveOrder(step=40, index=0, parts=1)
            await w.begin(bundle, 1, [node], save=save)
            report = await w.head.wait(node, lambda r: bool(r.parts), "its part of the checkpoint")
            await w.head.order(node, Order(epoch=1))
            await w.head.wait(node, lambda r: r.phase == "idle" and r.job is None, "idle again")
            await await_for(lambda: not w.store.exists(unfit_key("test", node)), 60, "no word of an unfit machine")
        assert guard.refused == []
        manifest = Manifest(job=bundle.id, generation=1, step=40, created=1.0, files=report.parts[0].files)
        w.store.put(checkpoint_key(bundle.id, 40), manifest.model_dump_json().encode())
        for name, value in inside.items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / "slots"
        folder.mkdir()
        await asyncio.to_thread(download.fetch, Store(url), bundle.id, 40, folder, 0)
        assert slots.newest(folder, bundle.id)[0][1].step == 40
    assert guard.refused == []
    kinds = {(deed, key.split("/")[0], key.split("/")[2] if key.count("/") > 1 else "") for deed, key in guard.done}
    assert kinds >= {
        ("put", "clusters", "hosts"),
        ("get", "clusters", "head.json"),
        ("get", "clusters", "unfit"),
        ("delete", "clusters", "unfit"),
        ("get", "code", ""),
        ("put", "jobs", "checkpoints"),
        ("put", "jobs", "logs"),
        ("get", "jobs", "checkpoints"),
    }
    assert (("tag", "jobs", "logs") in kinds) == (cloud == "aws")


async def test_a_log_in_a_folder_that_is_kept(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may upload it, the rule for old logs does not delete it, and the next job gets it."""
    for folder in ("work/out", "target"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "work/out/train.log").write_text("done")
    with bucket(cloud, monkeypatch) as (guard, inside, _):
        for name, value in inside.items():
            monkeypatch.setenv(name, value)
        store, said = Store(("gs://" if cloud == "gcp" else "s3://") + BUCKET), asyncio.Event()
        keeper = kept_folders.Keeper(store, said.set)
        keeper.want("j-1", tmp_path / "work", ("out",), 1)
        await said.wait()
        assert keeper.keeping is not None
        ref, keeping = keeper.keeping.ref, keeper.keeping
        assert ref is not None, keeping
        wanted = Input(name="in", job="j-1", folder="out", ref=ref)
        await asyncio.to_thread(kept_folders.fetch, store, wanted, tmp_path / "target")
        assert (tmp_path / "target/in/train.log").read_text() == "done"
        assert guard.refused == []
        assert not any(deed == "tag" or key.endswith(".log") for deed, key in guard.done)


async def test_kept_folders_whose_last_answer_was_lost(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files and their list are in the bucket. The next try may replace none of them, and need not."""
    (tmp_path / "work/out").mkdir(parents=True)
    (tmp_path / "work/out/model").write_text("weights")
    refs = []
    with bucket(cloud, monkeypatch) as (_, inside, _):
        for name, value in inside.items():
            monkeypatch.setenv(name, value)
        store = Store(("gs://" if cloud == "gcp" else "s3://") + BUCKET)
        for _ in range(2):
            said = asyncio.Event()
            keeper = kept_folders.Keeper(store, said.set)
            keeper.want("j-1", tmp_path / "work", ("out",), 1)
            await said.wait()
            assert keeper.keeping is not None
            assert keeper.keeping.trouble == ""
            refs.append(keeper.keeping.ref)
            keeper.stop()
    assert refs[0] is not None
    assert refs[0] == refs[1]


def test_large_parts_go_up_and_a_lost_answer_does_no_harm(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = checkpoint_key("j-1", 48, "g1-shard-00001-of-00001.safetensors")
    file = tmp_path / "shard"
    file.write_bytes(bytes(range(256)) * (40 << 10))  # 10 MiB: more than a part of an upload
    with bucket(cloud, monkeypatch) as (guard, inside, opened):
        for name, value in inside.items():
            monkeypatch.setenv(name, value)
        store = Store(("gs://" if cloud == "gcp" else "s3://") + BUCKET)
        store.keep(key, file)
        assert guard.refused == []
        store.keep(key, file)  # the answer was lost: the agent asks again
        assert bool(guard.refused) == (cloud == "gcp")
        assert opened.buckets[BUCKET][key].data == file.read_bytes()
        if cloud == "gcp":
            file.write_bytes(file.read_bytes()[:-1] + b"!")
            with pytest.raises(StoreError, match="cannot write"):
                store.keep(key, file)
        with pytest.raises(StoreError):
            store.delete([key])
        assert key in opened.buckets[BUCKET]
