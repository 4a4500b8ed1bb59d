"""Texts, images and histograms: what a script logs is what a reader finds."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from spotrun.history.extras import read_extras
from spotrun.node.metrics_uploader import MetricsUploader
from spotrun.state.control import Control
from spotrun.state.points import Header
from spotrun.store import Store
from spotrun.train import extras, metrics
from spotrun.train.metrics import Metrics


def begun(folder: Path) -> Metrics:
    found = Metrics(Control(folder / "control", create=True), str(folder / "metrics"))
    found.begin(Header("j", 1, 0, 0))
    return found


def decoded(png: bytes) -> np.ndarray:
    """The pixels of a PNG as `extras.png` writes it, with each chunk's checksum checked."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, {}
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length) == (zlib.crc32(kind + data),)
        chunks[kind], at = data, at + 12 + length
    width, height, depth, colours, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert depth == 8
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape((height, width, 3) if colours == 2 else (height, width))


async def test_all_kinds_reach_the_bucket(tmp_path: Path) -> None:
    """Each is as it was when it was logged. Those after the base of the next generation are void."""
    numbers, store = begun(tmp_path), Store(str(tmp_path / "bucket"))
    grey, colour = np.arange(12, dtype=np.uint8).reshape(3, 4), torch.randint(0, 256, (5, 2, 3), dtype=torch.uint8)
    wanted = colour.numpy().copy()
    numbers.log_extra("image", 1, 0, False, {"grey": grey, "colour": colour})
    colour.zero_()
    numbers.log_extra("text", 2, 0, False, {"said": "ä\n" + "x" * 100_000})
    numbers.log_extra("histogram", 3, 0, False, {"weights": torch.tensor([0.0, 1.0, 1.0, float("nan")])})
    numbers.begin(Header("j", 2, 0, base=2))
    await MetricsUploader(store, "j", tmp_path / "metrics").upload(all=True)
    found = {each.extra.name: each for each in read_extras(store, "j")}
    assert (decoded(base64.b64decode(found["grey"].extra.text)) == grey).all()
    assert (decoded(base64.b64decode(found["colour"].extra.text)) == wanted).all()
    assert found["said"].extra.text == ("ä\n" + "x" * 100_000)[: extras.TEXT]
    weights = found["weights"].extra
    assert (len(weights.edges), sum(weights.counts), weights.counts[-1]) == (extras.BINS + 1, 3, 2)
    assert [found[name].void for name in ("grey", "said", "weights")] == [False, False, True]
    assert [each.extra.name for each in read_extras(store, "j", "said")] == ["said"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("image", np.zeros((4, 4), np.float32)),
        ("image", np.zeros((4, 4, 4), np.uint8)),
        ("image", np.zeros((2000, 4), np.uint8)),
        ("image", np.zeros((0, 4), np.uint8)),
        ("image", "a text"),
        ("histogram", ["a", "b"]),
        ("histogram", object()),
    ],
)
def test_what_cannot_be_kept_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, value: object
) -> None:
    numbers = begun(tmp_path)
    for step in (1, 2):
        numbers.log_extra(kind, step, 0, False, {"odd": value})
        numbers.flush()
    numbers.log(3, 0, None, False, {"loss": 1.0})
    numbers.flush()
    assert caplog.text.count(f"run.log_{kind}(odd=…) is left out") == 1
    assert not (tmp_path / "metrics" / "0001" / "extras").exists()
    assert '"loss":1.0' in (tmp_path / "metrics" / "0001" / "000001.part").read_text()


def test_too_many_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = begun(tmp_path)
    monkeypatch.setattr(metrics, "EXTRAS_WAITING", 3)
    with numbers._lock:
        numbers.log_extra("text", 1, 0, False, {f"name {n}": "text" for n in range(10)})
    numbers.flush()
    assert (tmp_path / "metrics" / "0001" / "extras" / "000001.part").read_text().count("\n") == 1 + 3
    assert caplog.text.count("too often") == 1


def test_an_empty_histogram() -> None:
    assert extras.histogram(np.array([np.nan])) == ([], [])
