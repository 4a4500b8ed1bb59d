"""Blocks of metrics on their way from a node's disk to the bucket."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from spotrun.history.reader import Reader
from spotrun.node import metrics_uploader
from spotrun.node.metrics_uploader import MetricsUploader
from spotrun.state import points
from spotrun.state.points import BlockWriter, Call, Header
from spotrun.store import Store, metrics_key, substitute_key
from tests.helpers import await_for


class Site:
    """A job on a node, and the bucket."""

    def __init__(self, folder: Path) -> None:
        self.bucket, self.folder = folder / "bucket", folder / "metrics"
        self.store = Store(str(self.bucket))
        self.uploader = MetricsUploader(self.store, "j", self.folder)

    def log(self, generation: int, *steps: int, writer: BlockWriter | None = None) -> BlockWriter:
        """As a worker does it."""
        header = points.line(Header("j", generation, 0, 0))
        writer = writer or BlockWriter(self.folder / f"{generation:04d}", header)
        writer.append(b"".join(points.line(Call(step, 1.0, {"loss": float(step)})) for step in steps))
        return writer

    def steps(self) -> list[int]:
        """Those in the bucket."""
        reader = Reader(self.store, "j")
        reader.update()
        assert not reader.problems
        return list(reader.curve("loss").points.steps)

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


class Slow(Store):
    """A bucket whose answers take their time."""

    def create(self, key: str, data: bytes) -> bool:
        time.sleep(1.5 * metrics_uploader.LOOK)
        return super().create(key, data)


async def test_the_last_upload_waits_for_the_one_under_way(site: Site) -> None:
    site.uploader = MetricsUploader(Slow(str(site.bucket)), "j", site.folder)
    writer = site.log(1, 1)
    await site.uploader.upload()
    site.uploader.soon()
    under_way = asyncio.create_task(site.uploader.upload())
    await await_for(lambda: not list(site.folder.rglob("*.part")), what="the upload to begin")
    site.log(1, 2, writer=writer)
    await site.uploader.upload(all=True)
    await under_way
    assert site.steps() == [1, 2]


async def test_a_block_goes_when_it_is_due_and_the_next_one_begins(site: Site) -> None:
    writer = site.log(1, 1, 2)
    await site.uploader.upload()
    assert site.steps() == [], "it is not due yet"
    site.uploader.soon()
    await site.uploader.upload()
    assert site.steps() == [1, 2]
    site.log(1, 3, writer=writer)
    await site.uploader.upload(all=True)
    assert site.steps() == [1, 2, 3]
    assert site.left() == []
    assert site.store.list("jobs") == [metrics_key("j", 1, 1), metrics_key("j", 1, 2)]


async def test_a_substitutes_last_blocks_go_at_the_end_of_the_generation(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_uploader, "ROTATION", 0.0)
    monkeypatch.setattr(metrics_uploader, "LOOK", 0.0)
    monkeypatch.setattr(metrics_uploader, "INTERVAL", (0.0, 0.0))
    header = points.line(Header("j", 1, 1, 0))
    writer = BlockWriter(site.folder / "0001" / "rank-0001", header)
    for step in range(1, 9):
        site.log(1, step, writer=writer)
        await site.uploader.upload()
    assert site.store.list("jobs") == []
    assert len(site.left()) == metrics_uploader.KEPT
    site.bucket.rmdir()
    site.bucket.write_text("a file where the bucket should be")
    await site.uploader.upload(all=True)
    site.bucket.unlink()
    site.bucket.mkdir()
    await site.uploader.upload()
    assert site.store.list("jobs") == [substitute_key("j", 1, "rank-0001", block) for block in (6, 7, 8)]
    assert (site.left(), site.steps()) == ([], [6, 7, 8])


async def test_generations_that_are_over_leave_no_folders(site: Site) -> None:
    """A job may have thousands. A worker of the old generation that still writes makes its next block."""
    writer = site.log(1, 1)
    BlockWriter(site.folder / "0001" / points.rank_folder(1), points.line(Header("j", 1, 1, 0))).append(b"")
    BlockWriter(site.folder / "0001" / points.EXTRAS, points.line(Header("j", 1, 0, 0))).append(b"")
    await site.uploader.upload(all=True)
    assert (site.folder / "0001").is_dir(), "its worker may go on"
    site.log(2, 2)
    await site.uploader.upload(all=True)
    assert os.listdir(site.folder) == ["0002"]
    assert not any(path.is_relative_to(site.folder / "0001") for path in site.uploader._seen)
    site.log(1, 3, writer=writer)
    await site.uploader.upload(all=True)
    assert {metrics_key("j", 1, 1), metrics_key("j", 1, 2)} <= set(site.store.list("jobs"))


async def test_it_uploads_while_it_runs(site: Site) -> None:
    """At a notice, the uploader does not wait for the interval."""
    uploads = asyncio.create_task(site.uploader.run())
    try:
        site.log(1, 1, 2, 3)
        site.uploader.hurry()
        await await_for(lambda: site.steps() == [1, 2, 3], what="the points in the bucket")
    finally:
        uploads.cancel()


async def test_blocks_that_the_script_ends_are_forgotten(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so if it logs very much: then the agent sees most blocks only while they grow."""
    monkeypatch.setattr(points, "LONGEST", 300)
    writer = site.log(1, 1)
    for step in range(2, 40):
        await site.uploader.upload()
        site.log(1, step, writer=writer)
    await site.uploader.upload(all=True)
    assert site.steps() == list(range(1, 40))
    assert len(site.store.list("jobs")) > 5
    assert [path for path in site.uploader._seen if path.suffix == points.PART] == []


async def test_a_bucket_that_is_away(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks wait on the disk, and reach the bucket in order. Warnings do not repeat."""
    site.bucket.rmdir()
    site.bucket.write_text("a file where the bucket should be")
    writer = site.log(1, 1)
    for step in (2, 3, 4):
        await site.uploader.upload(all=True)
        site.log(1, step, writer=writer)
    await site.uploader.upload(all=True)
    assert len(site.left()) == 4
    assert 1 <= caplog.text.count("were not uploaded") <= 4
    site.bucket.unlink()
    site.bucket.mkdir()
    await site.uploader.upload()
    assert site.steps() == [1, 2, 3, 4]
    assert site.left() == []


async def test_a_restarted_agent_goes_on_with_what_it_finds(site: Site, tmp_path: Path) -> None:
    """A block that was uploaded, but not removed yet, stays as it is."""
    site.log(1, 1, 2)
    (path,) = [path for _, path in points.blocks(site.folder / "0001")]
    taken = points.take(path)
    assert taken is not None
    text = taken.read_bytes()
    await site.uploader.upload()
    taken.write_bytes(text)
    before = site.store.get(metrics_key("j", 1, 1))
    site.log(2, 3)
    again = MetricsUploader(site.store, "j", site.folder)
    await again.upload(all=True)
    assert site.store.get(metrics_key("j", 1, 1)) == before
    assert site.steps() == [1, 2, 3]


async def test_the_disk_has_bounds(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bucket, the oldest blocks are dropped."""
    site.bucket.rmdir()
    site.bucket.write_text("a file where the bucket should be")
    monkeypatch.setattr(metrics_uploader, "WAITING", 400)
    writer = site.log(1, 1)
    for step in range(2, 12):
        await site.uploader.upload(all=True)
        site.log(1, step, writer=writer)
    await site.uploader.upload(all=True)
    assert sum((site.folder / name).stat().st_size for name in site.left()) <= 400
    site.bucket.unlink()
    site.bucket.mkdir()
    await site.uploader.upload()
    assert site.steps()[-1] == 11


async def test_what_a_script_puts_into_the_folder(site: Site, tmp_path: Path) -> None:
    """A link to a file of the machine, a pipe, a folder: none of them is read, and the next generation's block goes."""
    folder = site.folder / "0001"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("of the machine")
    (folder / "000001.jsonl").symlink_to(tmp_path / "secret")
    (site.folder / "0002").mkdir()
    os.mkfifo(site.folder / "0002" / "000001.part")
    (site.folder / "0003" / "000001.part").mkdir(parents=True)
    site.log(4, 7)
    async with asyncio.timeout(120):
        await site.uploader.upload(all=True)
    assert site.steps() == [7]
    assert site.store.list("jobs") == [metrics_key("j", 4, 1)]
