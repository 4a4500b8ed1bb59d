"""Unpacking a job's bundle, which comes from outside."""

from __future__ import annotations

import errno
import hashlib
import io
import tarfile
from pathlib import Path

import pytest
import zstandard

from spotrun.errors import CorruptError, SetupError
from spotrun.node import bundle
from spotrun.store import Store, code_key


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size) if member.isfile() else None)
    path.write_bytes(zstandard.compress(buffer.getvalue()))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 1) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([member("../evil")], "leads out"),
        ([member("a/../../evil")], "leads out"),
        ([member("/tmp/evil")], "leads out"),
        ([member("link", tarfile.SYMTYPE, "../..")], "outside"),
        ([member("link", tarfile.SYMTYPE, "/etc")], "refused"),
        ([member("link", tarfile.LNKTYPE, "../evil")], "refused"),
        ([member("d", tarfile.SYMTYPE, "."), member("d/l", tarfile.SYMTYPE, ".."), member("d/l/evil")], "refused"),
        ([member("disk", tarfile.BLKTYPE)], "device"),
        ([member("tty", tarfile.CHRTYPE)], "device"),
        ([member("pipe", tarfile.FIFOTYPE)], "device"),
        ([member("link", tarfile.LNKTYPE, "nothing")], "cannot be unpacked"),
    ],
)
def test_hostile_archives(members: list[tarfile.TarInfo], words: str, tmp_path: Path) -> None:
    target = tmp_path / "inner" / "target"
    target.mkdir(parents=True)
    with pytest.raises(CorruptError, match="code/x") as caught:
        bundle.unpack(archive(tmp_path / "a", *members), target, "code/x")
    assert words in str(caught.value)
    assert not list(tmp_path.rglob("evil"))


def test_oversized_and_broken_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()
    whole = archive(tmp_path / "a", member("big", size=5000), member("more", size=5000))
    cut = tmp_path / "cut"
    cut.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(CorruptError, match="cannot be unpacked"):
        bundle.unpack(cut, target, "code/x")
    monkeypatch.setattr(bundle, "MAX_UNPACKED", 9000)
    with pytest.raises(CorruptError, match="refused: more than"):
        bundle.unpack(whole, target, "code/x")


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x", "GNU.sparse.realsize": "1"}


@pytest.mark.parametrize(
    ("headers", "data"), [({"comment": "x" * (2 << 20)}, b"x"), (SPARSE, b"2000000\n" + b"1\n" * 2_000_000)]
)
def test_headers_are_not_read_without_end(headers: dict[str, str], data: bytes, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = member("name", size=len(data))
        info.pax_headers = headers
        tar.addfile(info, io.BytesIO(data))
    (tmp_path / "a").write_bytes(zstandard.compress(buffer.getvalue()))
    with pytest.raises(CorruptError, match="refused: a header of more than 1 MiB"):
        bundle.unpack(tmp_path / "a", tmp_path, "code/x")


def test_a_full_disk_is_not_the_archives_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("spotrun.node.bundle.tarfile.TarFile.makefile", full)  # on Debian 12, that is a backport
    with pytest.raises(SetupError, match="No space left"):
        bundle.unpack(archive(tmp_path / "a", member("file")), tmp_path, "code/x")


class Disturbed(Store):
    """A bucket from which the first download arrives with a wrong byte."""

    fetched = 0

    def fetch(self, key: str, path: Path, size: int | None = None) -> None:
        super().fetch(key, path, size)
        self.fetched += 1
        if self.fetched == 1:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)


def test_a_bundle_that_was_damaged_on_its_way_is_read_again(tmp_path: Path) -> None:
    """Otherwise the job would fail, although its code is whole."""
    store, packed = Disturbed(str(tmp_path / "bucket")), archive(tmp_path / "a", member("train.py"))
    sha256 = hashlib.sha256(packed.read_bytes()).hexdigest()
    store.put(code_key(sha256), packed)
    code = bundle.fetch(store, sha256, tmp_path / "code")
    assert [path.name for path in code.iterdir()] == ["train.py"]
    assert [path.name for path in (tmp_path / "code").iterdir()] == [sha256], "nothing else is left"
    store.put(code_key(sha256), b"x" * packed.stat().st_size)
    with pytest.raises(CorruptError, match=r"is damaged: its sha256 is .*; submit the job again"):
        bundle.fetch(store, sha256, tmp_path / "other")
    assert store.fetched == 4
