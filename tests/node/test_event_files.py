"""Which event files of a script go into the bucket while it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotrun.node import event_files
from spotrun.node.event_files import find


def write(path: Path, at: float = 0.0, size: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (at, at))
    return path


def test_only_event_files_in_these_folders(tmp_path: Path) -> None:
    root = tmp_path / "work"
    deep, other = write(root / "out/a/events.out.tfevents.1"), write(root / "logs/events.out.tfevents.2")
    write(root / "out/model.pt")
    write(root / "out/tfevents/model.pt")
    write(root / "elsewhere/events.out.tfevents.3")
    write(root / "out/events.out.tfevents.\n")
    os.mkfifo(root / "out/tfevents.pipe")
    secret = write(tmp_path / "secret/events.out.tfevents.4")
    (root / "out/tfevents.link").symlink_to(secret)
    (root / "linked").symlink_to(secret.parent)
    found = find(root, ["out", "logs", "linked", "missing", "../secret"])
    assert found == {deep: "out/a/events.out.tfevents.1", other: "logs/events.out.tfevents.2"}
    assert find(root, []) == {}


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "MOST", 2)
    monkeypatch.setattr(event_files, "LARGEST", 10)
    paths = [write(tmp_path / f"out/tfevents.{number}", at=number, size=1 + 10 * (number == 4)) for number in range(5)]
    assert set(find(tmp_path, ["out"])) == {paths[2], paths[3]}
