"""Packing a job's folder: what is in, what stays out, and that equal folders are equal bundles."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest
import zstandard

from scripts import bundle
from spotrun.errors import SpotrunError
from spotrun.store import Store, code_key


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return [path.as_posix() for path in bundle.files(folder)]


def archive(folder: Path) -> bytes:
    out = io.BytesIO()
    bundle.pack(folder, bundle.files(folder), out)
    return out.getvalue()


def test_gitignore_is_honoured_as_git_does(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    files = {
        ".gitignore": "*.log\n/secret\ndata/\n!keep.log\nother/\n",
        "outer.log": "",
        "job/.gitignore": "# mine\n*.bin\n!small.bin\n/only_here\n",
        "job/train.py": "",
        "job/a.log": "",
        "job/keep.log": "",
        "job/a.bin": "",
        "job/small.bin": "",
        "job/only_here": "",
        "job/sub/only_here": "",
        "job/sub/.gitignore": "!a.log\n*.txt\n",
        "job/sub/a.log": "",
        "job/sub/b.txt": "",
        "job/sub/é ü.py": "",
        "job/b.txt": "",
        "job/data/x.py": "",
        "job/secret": "",
    }
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    subprocess.run(["git", "init", "-q", "."], cwd=repo, check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--others", "--cached", "--exclude-standard"],
        cwd=repo / "job", check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert names(repo / "job") == sorted(listed.stdout.split("\0")[:-1], key=Path)


def test_some_folders_never_go_along(tmp_path: Path) -> None:
    write(tmp_path, train_dot_py="", _dot_venv__lib="", _dot_git__HEAD="", sub__a_dot_py="")
    (tmp_path / "sub/__pycache__").mkdir()
    (tmp_path / "sub/__pycache__/a.pyc").touch()
    assert names(tmp_path) == ["sub/a.py", "train.py"]


def test_equal_folders_are_equal_bundles(tmp_path: Path) -> None:
    one = write(tmp_path / "one", b="2", a="1", c__d="3")
    two = write(tmp_path / "two", c__d="3", a="1", b="2")
    os.utime(two / "a", (1, 1))
    (two / "b").chmod(0o600)
    assert archive(one) == archive(two)
    (two / "b").chmod(0o700)
    assert archive(one) != archive(two)


def test_the_archive_holds_the_files(tmp_path: Path) -> None:
    write(tmp_path, a="1", sub__b="2" * 100_000)
    (tmp_path / "link").symlink_to("sub/b")
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(archive(tmp_path))).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        tar.extractall(tmp_path / "out", filter="data")
        assert {(member.uid, member.mtime, member.uname) for member in tar} == {(0, 0, "")}
    assert (tmp_path / "out/sub/b").read_text() == "2" * 100_000
    assert (tmp_path / "out/link").readlink() == Path("sub/b")


def test_a_bundle_is_sent_once(tmp_path: Path) -> None:
    folder, store = write(tmp_path / "job", train_dot_py="x"), Store(str(tmp_path / "bucket"))
    first = bundle.upload(store, folder, "train.py")
    assert first.sent
    assert len(store.get(code_key(first.sha256))) == first.size
    again = bundle.upload(store, folder, "train.py")
    assert (again.sha256, again.sent) == (first.sha256, False)


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "bucket"))
    folder = write(tmp_path / "job", train_dot_py="x", weights="w" * 3000, small="s" * 10)
    with pytest.raises(SpotrunError, match=r"a bundle takes at most .* the largest: weights \(.*\), small"):
        bundle.upload(store, folder, "train.py", limit=2000)
    (folder / "out").symlink_to("/etc/hostname")
    with pytest.raises(SpotrunError, match="out: a link to /etc/hostname, which nodes do not have"):
        bundle.files(folder)
    (folder / "out").unlink()
    (folder / ".gitignore").write_text("*.py\n")
    with pytest.raises(SpotrunError, match=r"train\.py: a \.gitignore excludes the job's script"):
        bundle.upload(store, folder, "train.py")


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "later").symlink_to("not-there-yet")
    assert names(tmp_path) == ["later"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SpotrunError, match="loop: cannot be packed: Too many levels of symbolic links"):
        bundle.files(tmp_path)
    (tmp_path / "loop").unlink()
    (tmp_path / "sub").mkdir()
    listed = os.scandir

    def refuse(folder: Path) -> object:  # as for another user's folder; root may read any
        if folder.name == "sub":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SpotrunError, match="sub: cannot be packed: Permission denied"):
        bundle.files(tmp_path)


def test_sockets_and_pipes_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a="")
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert names(tmp_path) == ["a"]
