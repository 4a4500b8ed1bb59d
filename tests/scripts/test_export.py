"""`make export`: what other programs get is what was logged."""

from __future__ import annotations

import csv
import errno
import math
import struct
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tensorboardX.proto.event_pb2 import Event

from scripts import export_runs
from spotrun.errors import SpotrunError
from spotrun.state import points
from spotrun.state.points import Call, Header
from spotrun.store import Store, metrics_key
from tests.scripts.accounts import job, store

JOB = "train-20261122-000001"
STEPS = [(1, 1, 0.5, 0), (1, 2, 1 / 3, 0), (1, 3, 0.25, 1), (2, 3, math.nan, 0), (2, 4, 1e-300, 0)]


@pytest.fixture
def bucket(tmp_path: Path) -> Store:
    found = store(tmp_path / "bucket", job(1))
    for generation, base in ((1, 0), (2, 2)):
        calls = [
            Call(step, 100.0 + step, {"loss": points.to_json(value), "a\nb": 1.0}, 0, 8.0 * step)
            for number, step, value, _ in STEPS
            if number == generation
        ]
        text = points.line(Header(JOB, generation, 0, base)) + b"".join(map(points.line, calls))
        found.put(metrics_key(JOB, generation, 1), points.compress(text))
    return found


def export(bucket: Store, kind: str, out: Path) -> dict[str, Any]:
    return export_runs.export(bucket, "c", JOB, kind, str(out))


def bits(values: list[float]) -> list[str]:
    return [each.hex() for each in values]


def test_csv(bucket: Store, tmp_path: Path) -> None:
    found = export(bucket, "csv", tmp_path / "out")
    with open(found["where"], newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert found["points"] == len(rows) == 10
    loss = [each for each in rows if each["name"] == "loss"]
    assert [(int(r["generation"]), int(r["step"]), int(r["void"])) for r in loss] == [(g, s, v) for g, s, _, v in STEPS]
    assert bits([float(r["value"]) for r in loss]) == bits([value for _, _, value, _ in STEPS])
    assert {each["name"] for each in rows} == {"loss", "a\\nb"}


def test_parquet(bucket: Store, tmp_path: Path) -> None:
    found = export(bucket, "parquet", tmp_path / "out")
    table = pyarrow.parquet.read_table(found["where"])
    rows = [each for each in table.to_pylist() if each["name"] == "loss"]
    assert table.column_names == list(export_runs.COLUMNS)
    assert [(r["generation"], r["step"], r["void"]) for r in rows] == [(g, s, bool(v)) for g, s, _, v in STEPS]
    assert bits([r["value"] for r in rows]) == bits([value for _, _, value, _ in STEPS])
    assert [r["samples"] for r in rows] == [8.0, 16.0, 24.0, 24.0, 32.0]


def test_tensorboard(bucket: Store, tmp_path: Path) -> None:
    """Event files with the points that count; a second export replaces the first, and no file of another program."""
    other = tmp_path / "out" / "events.out.tfevents.1.host.2.0"
    other.parent.mkdir()
    other.touch()
    for _ in range(2):
        found = export(bucket, "tensorboard", tmp_path / "out")
    (path,) = set(Path(found["where"]).glob("events.*")) - {other}
    assert other.exists()
    events, data = [], path.read_bytes()
    while data:  # a record: its length, a checksum, the event, a checksum
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    values = [
        (each.step, each.wall_time, value.simple_value)
        for each in events
        for value in each.summary.value
        if value.tag == "loss"
    ]
    assert [(step, at) for step, at, _ in values] == [(1, 101.0), (2, 102.0), (3, 103.0), (4, 104.0)]
    assert math.isnan(values[2][2])
    assert values[1][2] == pytest.approx(1 / 3, rel=1e-6)


def test_tensorboard_keeps_names_apart(tmp_path: Path) -> None:
    """TensorBoard takes curves of one tag for one curve."""
    names = ["a b", "a\nb", "a\tb", "red", "\x1b[31mred\x1b[0m", " ", "\r", "ünï"]
    found = store(tmp_path / "bucket", job(1))
    text = points.line(Header(JOB, 1, 0, 0)) + points.line(Call(1, 100.0, dict.fromkeys(names, 1.0)))
    found.put(metrics_key(JOB, 1, 1), points.compress(text))
    export(found, "tensorboard", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("events.*")
    data, tags = path.read_bytes(), list[str]()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        tags += [each.tag for each in Event.FromString(data[12 : 12 + length]).summary.value]
        data = data[16 + length :]
    assert len(set(tags)) == len(tags) == len(names)
    assert {"a b", "a\\nb", "ünï"} <= set(tags)
    assert not any(ord(each) < 32 for tag in tags for each in tag)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("xls", "TO: 'xls': allowed: csv, parquet, tensorboard, mlflow"),
        ("", "TO: '': allowed"),
    ],
)
def test_mistakes(bucket: Store, tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(SpotrunError, match=message):
        export(bucket, kind, tmp_path / "out")


def test_a_missing_library_is_named(bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(SpotrunError, match=r"TO=mlflow: needs a package .*'\.\[mlflow\]'` installs it"):
        export(bucket, "mlflow", tmp_path / "out")


def test_blocks_that_cannot_be_read_are_named(
    bucket: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put(metrics_key(JOB, 2, 1), b"damaged")
    assert export(bucket, "csv", tmp_path / "out")["points"] == 6
    assert f"not complete: {metrics_key(JOB, 2, 1)}" in capsys.readouterr().err
    bucket.put(metrics_key(JOB, 1, 1), b"damaged")
    with pytest.raises(SpotrunError, match=f"has no metrics of {JOB} that can be read: jobs/"):
        export(bucket, "csv", tmp_path / "out")


def test_a_run_without_points(tmp_path: Path) -> None:
    with pytest.raises(SpotrunError, match="has no metrics"):
        export(store(tmp_path / "bucket", job(1)), "csv", tmp_path / "out")


@pytest.mark.parametrize("kind", ["csv", "parquet", "tensorboard"])
def test_a_full_disk_leaves_the_earlier_export(
    kind: str, bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a table would look like the whole of a shorter run."""
    out = tmp_path / "out"
    export(bucket, kind, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    writes = {
        "csv": "csv.writer",
        "parquet": "pyarrow.parquet.ParquetWriter.write_table",
        "tensorboard": "scripts.event_files.EventFile.add",
    }

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(time, "time", lambda: 2e9)  # event files have the second in their names
    monkeypatch.setattr(writes[kind], full)
    with pytest.raises(SpotrunError, match=rf"^{out}.*: cannot be written: No space left on device$"):
        export(bucket, kind, out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
