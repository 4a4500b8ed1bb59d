"""Packing a job's folder: what is in, what stays out, and that equal folders are equal bundles."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import zstandard

from scripts import bundle, jobs
from spotrun.errors import CorruptError, SpotrunError, StoreError
from spotrun.head import code_sweep
from spotrun.node import bundle as node_bundle
from spotrun.spec import ClusterSpec
from spotrun.spec import bundle as limits
from spotrun.store import Store, code_key
from tests.helpers import await_for


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


def test_some_folders_are_never_sent(tmp_path: Path) -> None:
    write(tmp_path, train_dot_py="", _dot_venv__lib="", _dot_git__HEAD="", sub__a_dot_py="")
    (tmp_path / "sub/__pycache__").mkdir()
    (tmp_path / "sub/__pycache__/a.pyc").touch()
    assert names(tmp_path) == ["sub/a.py", "train.py"]


@pytest.mark.parametrize("target", ["../job/lib/a.py", "lib/../../job/lib/a.py"])
def test_a_link_that_leaves_the_folder_on_its_way_is_refused(tmp_path: Path, target: str) -> None:
    """It works here only, since the folder has another name on a node. A node refuses the whole bundle for it."""
    folder = write(tmp_path / "job", train_dot_py="", lib__a_dot_py="")
    (folder / "a.py").symlink_to(target)
    assert (folder / "a.py").exists()
    with pytest.raises(SpotrunError, match=r"a\.py: a link to .*, which nodes do not have"):
        bundle.files(folder)
    (folder / "a.py").unlink()
    (folder / "lib/b.py").symlink_to("../lib/a.py")
    (folder / "lib/..c.py").symlink_to("../lib/..d.py")
    assert names(folder) == ["lib/..c.py", "lib/a.py", "lib/b.py", "train.py"]
    (tmp_path / "packed").write_bytes(archive(folder))
    node_bundle.unpack(tmp_path / "packed", tmp_path / "node", "packed")


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
    tarfile = node_bundle.tarfile  # type: ignore[attr-defined]  # on Debian 12, that is a backport
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


def test_the_error_names_what_cannot_be_packed(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "bucket"))
    folder = write(tmp_path / "job", train_dot_py="x", weights="w" * 3000, small="s" * 10)
    with pytest.raises(SpotrunError, match=r"a bundle may have at most .* The largest: weights \(.*\), small"):
        bundle.upload(store, folder, "train.py", limit=2000)
    (folder / "out").symlink_to("/etc/hostname")
    with pytest.raises(SpotrunError, match="out: a link to /etc/hostname, which nodes do not have"):
        bundle.files(folder)
    (folder / "out").unlink()
    (folder / ".gitignore").write_text("*.py\n")
    with pytest.raises(SpotrunError, match=r"train\.py: a \.gitignore or \.spotrunignore excludes the job's script"):
        bundle.upload(store, folder, "train.py")


def test_the_error_names_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Secrets

SECRETS = {
    **dict.fromkeys((".env", ".env.production", ".ENV"), "a file of environment variables"),
    **dict.fromkeys(("server.pem", "sub/tls.key", ".ssh/id_rsa", "id_ed25519", ".ssh/work"), "a private key"),
    **dict.fromkeys((".aws/credentials", "my-Credentials.json", "service_account.json"), "a cloud's credentials"),
    **dict.fromkeys((".netrc", ".docker/config.json"), "a password or a token"),
    "terraform.tfstate": "a state of Terraform, which has secrets in it",
    "deploy": "a private key",  # by what is in it
    "robot.json": "a private key",
}
HARMLESS = [".env.example", ".ssh/id_rsa.pub", "environment.py", "keys.py", "mykey", "credentials.py", "notes.json"]


@pytest.mark.parametrize(("name", "kind"), SECRETS.items(), ids=SECRETS)
def test_secrets_are_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    folder, store = write(tmp_path / "job", train_dot_py="x"), Store(str(tmp_path / "bucket"))
    (folder / name).parent.mkdir(exist_ok=True)
    holds = {"deploy": "-----BEGIN OPENSSH PRIVATE KEY-----\n", "robot.json": '{"private_key": "-----BEGIN PRIVATE'}
    (folder / name).write_text(holds.get(name, "x"))
    with pytest.raises(SpotrunError) as caught:
        bundle.upload(store, folder, "train.py")
    assert f"{folder}: {name} ({kind}): " in str(caught.value)
    line = f"!/{name}"
    assert f"on purpose, write `{line}` into {folder}/.spotrunignore" in str(caught.value)
    assert store.list("") == []
    (folder / ".spotrunignore").write_text(f"{line}\n")
    assert name in names(folder), "that line allows it"
    (folder / ".gitignore").write_text(f"/{name}\n")
    assert name in names(folder), "whatever git does with it"
    (folder / ".spotrunignore").unlink()
    assert name not in names(folder)


def test_harmless_files_with_similar_names_are_sent(tmp_path: Path) -> None:
    for name in HARMLESS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("private_key: -----BEGIN PRIVATE KEY-----")
    assert names(tmp_path) == sorted(HARMLESS, key=Path)


def test_all_secrets_are_counted_and_names_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    odd = ["a[1]*.pem", "b .key ", "c\\?.pem", "d.pem"]
    for name in odd:
        write(folder, **{"train_dot_py": "x"})
        (folder / name.rstrip()).write_text("x")
    with pytest.raises(SpotrunError, match="and 1 more: a bundle with secrets"):
        bundle.files(folder)
    lines = ["!/a\\[1]\\*.pem", "!/b .key", "!/c\\\\\\?.pem"]
    with pytest.raises(SpotrunError) as caught:
        bundle.files(folder)
    assert ", ".join(f"`{line}`" for line in lines) in str(caught.value)
    (folder / ".spotrunignore").write_text("\n".join([*lines, "/d.pem"]))
    assert names(folder) == [".spotrunignore", "a[1]*.pem", "b .key", "c\\?.pem", "train.py"]


def test_spotrunignore_counts_more_than_gitignore(tmp_path: Path) -> None:
    write(tmp_path, train_dot_py="", data="", made__x="", made__y="", _dot_gitignore="made/*\n")
    (tmp_path / "made/.gitignore").write_text("*\n")
    (tmp_path / ".spotrunignore").write_text("/data\n!/made/x\n")
    assert names(tmp_path) == [".gitignore", ".spotrunignore", "made/x", "train.py"]


# Limits


def test_packer_and_node_have_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (node_bundle.MAX_FILES, node_bundle.MAX_UNPACKED, node_bundle.MAX_ARCHIVE) == (
        limits.FILES,
        limits.BYTES,
        limits.PACKED,
    )
    folder = write(tmp_path / "job", train_dot_py="x", a="1", b="2")
    monkeypatch.setattr(limits, "FILES", 2)
    with pytest.raises(SpotrunError, match=r"3 files; a bundle may have at most 2\. In \.gitignore or"):
        bundle.files(folder)
    (folder / "a").unlink()
    (tmp_path / "packed").write_bytes(archive(folder))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(node_bundle, "MAX_FILES", 2)
    node_bundle.unpack(tmp_path / "packed", tmp_path / "out", "code/x")
    monkeypatch.setattr(node_bundle, "MAX_FILES", 1)
    with pytest.raises(CorruptError, match="refused: more than 256 MiB or 1 files"):
        node_bundle.unpack(tmp_path / "packed", tmp_path / "out", "code/x")


def test_a_job_is_refused_before_anything_is_brought_up(tmp_path: Path) -> None:
    write(tmp_path, train_dot_py="x", job_dot_yaml="script: train.py\n", _dot_env="TOKEN=1")
    spec = ClusterSpec(name="c", cloud="local", pools=({"name": "p", "zone": "local-a"},))
    with pytest.raises(SpotrunError, match=r"\.env \(a file of environment variables\)"):
        jobs.check(spec, str(tmp_path / "job.yaml"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import spotrun\nrun = spotrun.init(\n", r":2: SyntaxError: '\(' was never closed"),
        ("if True:\nprint(1)\n", r":2: IndentationError: expected an indented block"),
        ("return 1\n", r":1: SyntaxError: 'return' outside function"),
        ("a = 1\0\n", r"null bytes"),
        ("pattern = '\\d'\nmatch = 1\n", ""),
    ],
)
def test_a_script_that_is_not_python_is_refused_before_any_machine_is_asked_for(
    tmp_path: Path, text: str, why: str
) -> None:
    write(tmp_path, train_dot_py=text, job_dot_yaml="script: train.py\n")
    spec = ClusterSpec(name="c", cloud="local", pools=({"name": "p", "zone": "local-a"},))
    if not why:
        jobs.check(spec, str(tmp_path / "job.yaml"))
        return
    with pytest.raises(SpotrunError, match=rf"train\.py.*{why}"):
        jobs.check(spec, str(tmp_path / "job.yaml"))
    with_own_image = spec.model_copy(update={"image": "mine"})
    jobs.check(with_own_image, str(tmp_path / "job.yaml"))  # its Python may be newer than this computer's


def test_what_is_sent_is_listed(tmp_path: Path) -> None:
    folder = write(tmp_path / "job", train_dot_py="x", a="a" * 3000, b="b" * 2000, c="c" * 1500)
    packed = bundle.upload(Store(str(tmp_path / "bucket")), folder, "train.py")
    assert (packed.files, packed.bytes) == (4, 6501)
    assert str(packed).startswith(f"bundle {packed.sha256[:12]}: 4 files, 6.3 kB (")
    assert str(packed).endswith(" bytes packed); the largest: a (2.9 kB), b (2.0 kB), c (1.5 kB)")


# Code that no job refers to


def put(store: Store, root: Path, key: str, age: float, data: bytes = b"") -> str:
    store.put(key, data)
    then = time.time() - age
    os.utime(root / key, (then, then))
    return key


def test_unused_code_is_removed_once_it_is_old(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    old = put(store, tmp_path, code_key("a" * 64), code_sweep.AGE + 60)
    used = put(store, tmp_path, code_key("b" * 64), code_sweep.AGE * 50)
    new = put(store, tmp_path, code_key("c" * 64), code_sweep.AGE - 60)
    store.put("jobs/one/state.json", f'{{"code": "{"b" * 64}", "phase": "stopped", "new key": 1}}'.encode())
    sweeper = code_sweep.Sweeper(store)
    assert sweeper.sweep() == [old]
    assert store.list("code") == sorted([used, new])
    store.put("jobs/one/state.json", b"junk")
    assert sweeper.sweep() == [], "a job's code never changes"
    with pytest.raises(StoreError, match=r"jobs/one/state\.json does not say which code its job has"):
        code_sweep.Sweeper(store).sweep()
    store.delete(["jobs/one/state.json"])
    assert sweeper.sweep() == [used]


def test_code_of_a_job_that_is_just_submitted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its object is about to be removed, the code is sent again. The head checks the age again before it removes."""
    store = Store(str(tmp_path / "bucket"))
    folder = write(tmp_path / "job", train_dot_py="x")
    key = code_key(bundle.upload(store, folder, "train.py").sha256)
    then = time.time() - code_sweep.AGE - 60
    os.utime(tmp_path / "bucket" / key, (then, then))
    sweeper = code_sweep.Sweeper(store)
    read = sweeper._references

    def submitted_meanwhile() -> set[str]:
        found = read()
        assert not bundle.upload(store, folder, "train.py").sent
        return found

    monkeypatch.setattr(sweeper, "_references", submitted_meanwhile)
    assert sweeper.sweep() == []
    assert store.exists(key)
    assert bundle.FRESH * 2 <= code_sweep.AGE


async def test_the_sweeper_outlives_a_bucket_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, looked = Store(str(tmp_path)), 0

    def away(store: Store, prefix: str) -> list[str]:
        nonlocal looked
        looked += 1
        raise StoreError("the bucket is away")

    monkeypatch.setattr(Store, "list", away)
    monkeypatch.setattr(code_sweep, "FIRST", 0.0)
    monkeypatch.setattr(code_sweep, "EVERY", 0.01)
    running = asyncio.create_task(code_sweep.Sweeper(store).run())
    await await_for(lambda: looked >= 2, what="a second look")
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
