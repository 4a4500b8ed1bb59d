"""One head at a time: the lease, and objects that only one head writes. See `headworld`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotrun.errors import ConflictError, StoreError
from spotrun.head import fenced
from spotrun.head.fenced import FencedStore
from spotrun.head.head import Head
from spotrun.head.job_state import Stop, apply
from spotrun.head.lease import Holder, Lease, Record
from spotrun.spec import ClusterSpec
from spotrun.store import Store, Version, cluster_key, epoch_key, job_key, lease_key, queue_key
from tests.fakes import gcs, moto_server
from tests.fakes.head import FakeMetadata
from tests.head.world import CODE, JOB, World
from tests.helpers import await_for

ELSEWHERE = Holder("other-machine", "other-boot/1", 1, "1")
HERE = Holder.of_this_process("head")


@pytest.fixture(scope="module")
def aws() -> Iterator[moto_server.Moto]:
    with moto_server.running() as aws:
        yield aws


@pytest.fixture(params=["folder", "s3", "gs"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "folder":
        yield Store(str(tmp_path / "bucket"))
    elif request.param == "s3":
        aws = request.getfixturevalue("aws")
        for name, value in aws.environment.items():
            monkeypatch.setenv(name, value)
        bucket = f"lease-test-{uuid.uuid4().hex[:8]}"
        aws.client("s3").create_bucket(Bucket=bucket)
        yield Store(f"s3://{bucket}")
    else:
        with gcs.running("lease-test") as google:
            for name, value in google.environment.items():
                monkeypatch.setenv(name, value)
            yield Store("gs://lease-test")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_object_is_replaced_on_a_condition(store: Store) -> None:
    assert store.read("a/b") == (None, None)
    first = store.replace("a/b", b"one", None)
    second = store.replace("a/b", b"two", first)
    assert store.read("a/b") == (b"two", second)
    for version in (first, None):
        with pytest.raises(ConflictError, match="another process has written a/b"):
            store.replace("a/b", b"three", version)
    assert store.get("a/b") == b"two"
    assert store.replace("a/b", b"two", first) == second, "an answer that was lost: it is there already"
    store.delete(["a/b"])
    with pytest.raises(ConflictError):
        store.replace("a/b", b"three", second)
    assert not store.exists("a/b")


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    """In a folder, where the comparison is spotrun's own: processes count up, none overwrites another's step."""
    code = """
import sys
from spotrun.errors import ConflictError
from spotrun.store import Store
store, done = Store(sys.argv[1]), 0
while done < 40:
    data, version = store.read("n")
    try:
        store.replace("n", str(int(data) + 1).encode(), version)
        done += 1
    except ConflictError:
        pass
"""
    store = Store(str(tmp_path))
    store.put("n", b"0")
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    # Equal bytes are no conflict, so two writers may count one step both; nothing is lost beyond that.
    assert 40 <= int(store.get("n")) <= 120


async def test_owned_objects_are_not_overwritten(store: Store) -> None:
    old, new = FencedStore(store), FencedStore(store)
    await old.put("a", b"1")
    assert await new.find("a") == b"1"
    await new.put("a", b"2")
    with pytest.raises(ConflictError):
        await old.put("a", b"3")
    await new.put("a", b"4")
    assert store.get("a") == b"4"


async def test_an_answer_that_was_lost_is_no_conflict(tmp_path: Path) -> None:
    """The write arrived, its answer did not. The next write has other bytes."""
    store = LosesAnswers(str(tmp_path))
    owned = FencedStore(store)
    await owned.put("a/b", b"1")
    for data in (b"2", b"3"):
        store.losing = True
        with pytest.raises(StoreError):
            await owned.put("a/b", data)
        store.losing = False
    await owned.put("a/b", b"4")
    await owned.put("a/b", b"5")
    store.losing = True
    with pytest.raises(StoreError):
        await owned.put("a/b", b"6")
    store.losing = False
    await FencedStore(store).put("a/b", b"another head")
    with pytest.raises(ConflictError):
        await owned.put("a/b", b"7")
    assert store.get("a/b") == b"another head"


async def test_a_write_that_arrives_late_is_no_conflict(tmp_path: Path) -> None:
    """It got no answer, and reaches the bucket after this head has looked at the object for its next write."""
    store = Delays(str(tmp_path))
    owned = FencedStore(store)
    await owned.put("a/b", b"1")
    store.delaying = True
    for data in (b"2", b"3"):
        with pytest.raises(StoreError):
            await owned.put("a/b", data)
    store.delaying = False
    await owned.put("a/b", b"4")
    assert store.get("a/b") == b"4"
    assert store.arrived == [b"2"], "the other one was for an older version"
    await FencedStore(store).put("a/b", b"another head")
    with pytest.raises(ConflictError):
        await owned.put("a/b", b"5")


async def test_an_outage_takes_no_memory(tmp_path: Path) -> None:
    """Each write that fails has other bytes, and an outage may last for days."""
    store = Delays(str(tmp_path))
    owned = FencedStore(store)
    store.delaying = True
    for number in range(3 * fenced.UNSURE):
        with pytest.raises(StoreError):
            await owned.put("a/b", b"%d" % number)
    assert len(owned._unsure["a/b"]) == fenced.UNSURE


class LosesAnswers(Store):
    """A bucket whose answers to writes get lost while `losing`."""

    losing = False

    def replace(self, key: str, data: bytes, version: Version | None) -> Version:
        written = super().replace(key, data, version)
        if self.losing:
            raise StoreError(f"cannot write {key}: operation timed out")
        return written


class Delays(Store):
    """A bucket to which writes come late, while `delaying`: the next read sees what was there before them."""

    delaying = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.late: list[tuple[str, bytes, Version | None]] = []
        self.arrived: list[bytes] = []

    def replace(self, key: str, data: bytes, version: Version | None) -> Version:
        if self.delaying:
            self.late.append((key, data, version))
            raise StoreError(f"cannot write {key}: operation timed out")
        return super().replace(key, data, version)

    def read(self, key: str) -> tuple[bytes | None, Version | None]:
        found = super().read(key)
        if not self.delaying:
            late, self.late = self.late, []
            for each in late:
                with contextlib.suppress(ConflictError):
                    super().replace(*each)
                    self.arrived.append(each[1])
        return found


async def test_a_lease_that_is_renewed_is_not_taken(store: Store) -> None:
    """The second waits while the first renews, and has it at once when the first gives it back."""
    first = Lease(store, "c", HERE, term=30.0, every=0.1)
    await first.take()
    second = Lease(store, "c", ELSEWHERE, term=30.0, every=0.1)
    taking = asyncio.create_task(second.take())
    for _ in range(3):
        await asyncio.sleep(0)
        await first.renew()
    assert not taking.done()
    await first.release()
    await asyncio.wait_for(taking, 60)
    with pytest.raises(ConflictError):
        await first.renew()
    await second.renew()
    await first.release()  # not its own any more
    assert Record.model_validate_json(store.get(lease_key("c"))).holder == ELSEWHERE


async def test_a_lease_that_is_not_renewed_is_taken(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = Lease(store, "c", ELSEWHERE, term=0.2, every=0.05)
    await first.take()
    second = Lease(store, "c", HERE, term=0.2, every=0.05)
    await asyncio.wait_for(second.take(), 60)
    with pytest.raises(ConflictError):
        await first.check()


async def test_a_lease_of_a_process_that_has_ended_here_is_taken_at_once(tmp_path: Path) -> None:
    """Whether or not the sandbox shows the kernel's boot. A process that lives, or ran elsewhere, is waited for."""
    store = Store(str(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as process:
        started = replace(HERE, pid=process.pid, started=started_at(process.pid))
        assert not HERE.sees_dead(started)
        process.kill()
        await await_for(lambda: HERE.sees_dead(started), what="that a dead child is seen, collected or not")
    assert HERE.sees_dead(started)
    assert HERE.sees_dead(replace(HERE, pid=os.getppid(), started="1")), "another process has its number now"
    assert replace(HERE, host="").sees_dead(replace(started, host=""))
    for other in (replace(started, host="other"), replace(started, machine="other"), HERE):
        assert not HERE.sees_dead(other)
    await Lease(store, "c", started, term=600.0).take()
    await asyncio.wait_for(Lease(store, "c", HERE, term=600.0).take(), 60)


async def test_a_lease_that_cannot_be_read_is_taken_when_nobody_renews_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put(lease_key("c"), b"{")
    await asyncio.wait_for(Lease(store, "c", HERE, term=0.1, every=0.02).take(), 60)
    assert Record.model_validate_json(store.get(lease_key("c"))).holder == HERE


async def test_a_bucket_that_is_away_costs_no_lease(tmp_path: Path) -> None:
    """It cannot be renewed meanwhile, and nobody else can take it."""
    store = Store(str(tmp_path))
    lease = Lease(store, "c", HERE, term=0.0)
    await lease.take()
    (tmp_path / "clusters").rename(tmp_path / "away")
    (tmp_path / "clusters").write_text("")
    with pytest.raises((StoreError, ConflictError)) as error:
        await lease.check()
    assert isinstance(error.value, StoreError)
    (tmp_path / "clusters").unlink()
    (tmp_path / "away").rename(tmp_path / "clusters")
    await lease.check()


async def test_a_thawed_head_writes_nothing_more(world: World) -> None:
    """It was suspended in the middle of a turn, after its last look at the lease."""
    job = await world.started()
    old = world.head
    new = Head(world.cluster, world.store, world.cloud, 2)
    await new._turn(time.time())
    kept = {key: world.store.get(key) for key in (job_key(job.id, "state.json"), queue_key("c"))}
    assert old.job is not None
    with pytest.raises(ConflictError):
        await old.journal.write(apply(old.job, Stop("too late"), time.time()), [], time.time())
    with pytest.raises(ConflictError):
        await old.journal.replace(old.job)
    queued = await new.submit(JOB, CODE)
    with pytest.raises(ConflictError):
        await old.submit(JOB, CODE)
    assert world.store.get(job_key(job.id, "state.json")) == kept[job_key(job.id, "state.json")]
    assert world.queue() == [job.id, queued]


async def test_a_head_without_its_lease_ends_before_it_orders(world: World) -> None:
    job = await world.started()
    world.head.lease = Lease(world.store, "c", HERE, term=0.0)
    await world.head.lease.take()
    await world.turn()
    await Lease(world.store, "c", ELSEWHERE, term=0.0, every=0.0).take()
    orders = {name: len(sent) for name, sent in world.orders.items()}
    with pytest.raises(SystemExit):
        await world.head.run()
    with pytest.raises(SystemExit):
        await world.head.scaler.run()
    assert {name: len(sent) for name, sent in world.orders.items()} == orders
    assert world.written(job.id).stopping == ""
    assert world.cloud.calls == []


async def test_two_heads_do_not_alternate(tmp_path: Path) -> None:
    """Each is started again when it ends. One is suspended, the other takes over; thawed, the first stands by."""
    store = Store(str(tmp_path / "bucket"))
    cluster = {"name": "test", "cloud": "local", "region": "zone", "pools": [{"name": "p", "zone": "zone-a"}]}
    store.put(cluster_key("test"), ClusterSpec.model_validate(cluster).document().encode())
    keepers = [Keeper(tmp_path / name, store, f"127.0.9.{number}") for name, number in (("a", 81), ("b", 82))]
    try:
        first, second = keepers
        await first.start()
        await await_for(lambda: "listens on" in first.log, 60, "the first head")
        await second.start()
        await await_for(lambda: "has it" in second.log, 60, "that the second waits")
        frozen = holder(store)
        os.kill(frozen, signal.SIGSTOP)
        await await_for(lambda: "listens on" in second.log, 60, "the second head")
        os.kill(frozen, signal.SIGCONT)
        await await_for(lambda: "this head" in first.log, 60, "that the first gives way")
        await await_for(lambda: "has it" in first.log, 60, "that the first waits")
        before = renewals(store)
        await await_for(lambda: renewals(store) > before + 1, 60, "that the second renews")
        taken = epochs(store)
        assert taken <= 4, "one for each that took over, and some for a machine that stands still"
        second.processes[-1].kill()
        await await_for(lambda: epochs(store) > taken, 60, "another head")
    finally:
        for keeper in keepers:
            await keeper.stop()


class Keeper:
    """A machine's service manager: runs a head, and again when it ends."""

    def __init__(self, folder: Path, store: Store, address: str) -> None:
        self._folder = folder
        folder.mkdir()
        attributes = {"spotrun-cluster": "test", "spotrun-bucket": store.url}
        self._metadata = FakeMetadata("gce", attributes, name=f"head-{folder.name}", address=address)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def log(self) -> str:
        path = self._folder / "log"
        return path.read_text() if path.exists() else ""

    async def start(self) -> None:
        names = ("SPOTRUN_TMPFS", "SPOTRUN_SSH_KEYS", "SPOTRUN_SCRATCH")
        environment = {
            **os.environ,
            **dict.fromkeys(names, str(self._folder)),
            "GCE_METADATA_HOST": await self._metadata.start(),
            "SPOTRUN_LOCAL_CLOUD": "http://127.0.9.80:9",  # nobody is there, which must not matter
            "SPOTRUN_LOCAL_CLOUD_TOKEN": "t",
        }
        environment.pop("AWS_EC2_METADATA_SERVICE_ENDPOINT", None)
        self._task = asyncio.create_task(self._run(environment))

    async def _run(self, environment: dict[str, str]) -> None:
        while True:
            with (self._folder / "log").open("a") as log:
                command = [sys.executable, "-m", "spotrun.cli", "head"]
                self.processes.append(subprocess.Popen(command, env=environment, stderr=log))
            await asyncio.to_thread(self.processes[-1].wait)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                await asyncio.to_thread(process.wait)
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._metadata.stop()


def holder(store: Store) -> int:
    return Record.model_validate_json(store.get(lease_key("test"))).pid


def renewals(store: Store) -> int:
    return Record.model_validate_json(store.get(lease_key("test"))).renewals


def epochs(store: Store) -> int:
    return len(store.list(epoch_key("test", 0).rpartition("/")[0]))


def started_at(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
