"""The upload of logs while the bucket refuses one of them, and logs that grow too long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotrun.node import log_uploader
from spotrun.node.log_uploader import LogUploader, shorten
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
    first = "spotrun: this log was longer than 1 MiB; everything before is removed"
    assert path.read_text().splitlines() == [first, "the next line"]
