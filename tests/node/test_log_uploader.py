"""The upload of logs while the bucket refuses one of them, and logs that grow too long."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from spotrun.node import log_uploader
from spotrun.node.log_uploader import GrowingFiles, LogUploader, shorten
from spotrun.store import Store


async def test_a_log_that_fails_keeps_no_other_log_back(tmp_path: Path) -> None:
    store, bucket = Store(str(tmp_path / "bucket")), tmp_path / "bucket"
    logs = LogUploader(store)
    for name in ("first", "refused", "last"):
        (tmp_path / name).write_text(f"text of {name}")
        logs.follow(tmp_path / name, f"logs/{name}/0.log")
    logs.follow(tmp_path / "not-written-yet", "logs/none/0.log")
    (bucket / "logs").mkdir()
    (bucket / "logs/refused").write_text("a file where a folder has to be")
    await logs.upload(all=True)
    assert {name: store.get(f"logs/{name}/0.log") for name in ("first", "last")} == {
        "first": b"text of first",
        "last": b"text of last",
    }
    (bucket / "logs/refused").unlink()
    await logs.upload(all=True)
    assert store.get("logs/refused/0.log") == b"text of refused", "the next upload tries it again"


async def test_other_files_that_grow_have_no_times_and_no_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_uploader, "LONGEST", 4)
    store, found, searches = Store(str(tmp_path / "bucket")), dict[Path, str](), list[int]()

    def search() -> dict[Path, str]:
        searches.append(len(found))
        return found

    files = GrowingFiles(store, search)
    (tmp_path / "events").write_text("longer than that")
    found[tmp_path / "events"] = "jobs/a/logs/tensorboard/n/events"
    found[tmp_path / "gone"] = "jobs/a/logs/tensorboard/n/gone"
    await files.upload(all=True)
    (tmp_path / "events").write_text("longer than that, and growing")
    await files.upload(all=True)
    assert store.list("jobs") == ["jobs/a/logs/tensorboard/n/events"]
    assert store.get("jobs/a/logs/tensorboard/n/events") == b"longer than that, and growing"
    assert searches == [2, 2]


async def test_a_search_that_takes_long_is_repeated_seldom(tmp_path: Path) -> None:
    searches = list[float]()

    def search() -> dict[Path, str]:
        searches.append(time.monotonic())
        time.sleep(0.05)
        return {}

    files = GrowingFiles(Store(str(tmp_path / "bucket")), search)
    for _ in range(3):
        await files.upload()
    assert len(searches) == 1
    await files.upload(all=True)
    assert len(searches) == 2


async def test_a_search_that_fails_ends_nothing(tmp_path: Path) -> None:
    """The script may do anything to its folders, such as nest a thousand of them."""

    def search() -> dict[Path, str]:
        raise RecursionError

    (tmp_path / "0.log").write_text("text")
    store = Store(str(tmp_path / "bucket"))
    files = GrowingFiles(store, search)
    logs = LogUploader(store)
    logs.follow(tmp_path / "0.log", "logs/0.log")
    await asyncio.gather(files.upload(all=True), logs.upload(all=True))
    assert store.list("") == ["logs/0.log", "logs/0.times.log"]


def test_a_log_that_is_too_long_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_uploader, "LONGEST", 1 << 20)
    path = tmp_path / "0.log"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # as a worker opens it
    os.write(handle, b"x" * (1 << 20))
    shorten(path)
    assert path.stat().st_size == 1 << 20
    os.write(handle, b"y")
    shorten(path)
    os.write(handle, b"the next line\n")
    os.close(handle)
    first = "spotrun: this log was longer than 1 MiB; all before this line was removed"
    assert path.read_text().splitlines() == [first, "the next line"]


async def test_a_log_that_is_refused_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An outage may last for days, and each log is tried every few seconds."""
    logs = LogUploader(Store(str(tmp_path / "bucket")))
    (tmp_path / "log").write_text("text")
    logs.follow(tmp_path / "log", "logs/0.log")
    for outage in (1, 2):
        (tmp_path / "bucket").rename(tmp_path / "away")
        (tmp_path / "bucket").write_text("a file where a folder has to be")
        (tmp_path / "log").write_text("more text" * outage)
        for _ in range(3):
            await logs.upload(all=True)
        assert caplog.text.count("logs/0.log was not uploaded, trying again: ") == outage
        (tmp_path / "bucket").unlink()
        (tmp_path / "away").rename(tmp_path / "bucket")
        await logs.upload(all=True)
        assert (tmp_path / "bucket/logs/0.log").read_text() == "more text" * outage


async def test_logs_of_generations_that_are_over_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may have hundreds of generations. What is in the bucket, and what nobody writes to, is forgotten."""
    monkeypatch.setattr(log_uploader, "LOOK", 0.0)
    store = Store(str(tmp_path / "bucket"))
    logs, open_logs = LogUploader(store), dict[int, int]()
    for number in range(6):
        path = tmp_path / f"{number:04d}" / "0.log"
        path.parent.mkdir()
        logs.turn_page()
        logs.follow(path, f"logs/{number}/0.log", lasts=number == 0)
        if number != 4:  # its worker has printed nothing
            open_logs[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(open_logs[number], b"text\n")
        if number != 2:  # a process that loads its data goes on to write there
            for older in [each for each in open_logs if each not in (number, 2)]:
                os.close(open_logs.pop(older))
        await logs.upload(all=True)
    os.write(open_logs[2], b"late\n")
    await logs.upload(all=True)
    assert sorted(path.parent.name for path in tmp_path.glob("*/0.log")) == ["0000", "0002", "0005"]
    assert not (tmp_path / "0003").exists()
    for known in (logs._keys, logs._times, logs._uploaded):
        assert {path.parent.name for path in known} == {"0000", "0002", "0005"}
    os.close(open_logs.pop(2))
    await logs.upload(all=True)
    assert sorted(path.parent.name for path in tmp_path.glob("*/0.log")) == ["0000", "0005"]
    texts = {number: store.get(f"logs/{number}/0.log") for number in (0, 1, 2, 3, 5)}
    assert texts == {number: b"text\nlate\n" if number == 2 else b"text\n" for number in texts}
    for handle in open_logs.values():
        os.close(handle)


async def test_an_old_log_that_the_bucket_refuses_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_uploader, "LOOK", 0.0)
    store = Store(str(tmp_path / "bucket"))
    logs = LogUploader(store)
    (tmp_path / "old.log").write_text("text")
    logs.follow(tmp_path / "old.log", "logs/old/0.log")
    logs.turn_page()
    (tmp_path / "bucket/logs").write_text("a file where a folder has to be")
    await logs.upload(all=True)
    assert (tmp_path / "old.log").exists()
    (tmp_path / "bucket/logs").unlink()
    await logs.upload(all=True)
    assert not (tmp_path / "old.log").exists()
    assert store.get("logs/old/0.log") == b"text"
