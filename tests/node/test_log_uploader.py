"""The upload of logs, while the bucket refuses one of them."""

from __future__ import annotations

from pathlib import Path

from spotrun.node.log_uploader import LogUploader
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
