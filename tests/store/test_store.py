"""The bucket, as a folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from spotrun import store as keys
from spotrun.errors import NotFound, StoreError
from spotrun.store import Store, client
from tests.fakes.node import small_memory


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "bucket"))


def test_get_and_fetch_return_what_was_put(store: Store, tmp_path: Path) -> None:
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    assert store.get("a/b") == b"two"
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 65536)
    store.put("large", large)
    store.fetch("large", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == large.read_bytes()


def test_a_download_that_the_disk_has_no_room_for(store: Store, tmp_path: Path) -> None:
    """The kernel writes what there is room for. A file that is cut counts as damaged in the bucket: the job fails."""
    disk = tmp_path / "disk"
    disk.mkdir()
    store.put("large", bytes(5 << 20))
    with small_memory(disk):
        (disk / "other").write_bytes(bytes(30 << 20))
        with pytest.raises(StoreError, match=r"large: .*No space left"):
            store.fetch("large", disk / "large")


def test_no_part_of_a_download_comes_after_its_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then, the memory may have another use."""
    store.put("large", b"x" * (40 << 20))  # two parts
    part, begun = Store.part, threading.Event()

    def fail_first(self: Store, key: str, start: int, end: int) -> bytes:
        if start == 0:
            begun.wait(20)
            raise StoreError("lost")
        begun.set()
        time.sleep(0.2)
        return part(self, key, start, end)

    monkeypatch.setattr(Store, "part", fail_first)
    into = bytearray(40 << 20)
    with pytest.raises(StoreError, match="lost"):
        store.read_into("large", 0, memoryview(into))
    assert into[-1:] == b"x"


def test_an_object_that_is_too_large_is_not_read(store: Store) -> None:
    """A job's code may write a node's record; the head reads it."""
    store.put("record", b"x" * 100)
    assert store.find("record", 100) == store.get("record", 100) == b"x" * 100
    with pytest.raises(StoreError, match="record has 100 bytes; at most 99 are read"):
        store.find("record", 99)
    assert store.find("none", 99) is None


def test_a_missing_object(store: Store, tmp_path: Path) -> None:
    assert store.find("a") is None
    assert not store.exists("a")
    assert store.list("a") == []
    store.delete(["a"])
    with pytest.raises(NotFound, match="no object a"):
        store.get("a")
    with pytest.raises(NotFound, match="no object a"):
        store.fetch("a", tmp_path / "x")


def test_only_the_first_create_succeeds(store: Store) -> None:
    assert store.create("epoch/1", b"first")
    assert not store.create("epoch/1", b"second")
    assert store.get("epoch/1") == b"first"


def test_a_create_that_s3_has_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another write is under way, and may fail. If this counted as done, a block of metrics would be lost."""
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with ThreadingHTTPServer(("127.0.0.1", 0), Undecided) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        bucket = Store("s3://bucket", "us-east-1")
        try:
            with pytest.raises(StoreError, match="cannot create key: ConditionalRequestConflict: The conditional"):
                bucket.create("key", b"x")
            with pytest.raises(StoreError, match="cannot write key: ConditionalRequestConflict: The conditional"):
                bucket.replace("key", b"x", None)
        finally:
            server.shutdown()


class Undecided(BaseHTTPRequestHandler):
    """S3 while another client writes. https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html"""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        code = "<Code>ConditionalRequestConflict</Code>"
        self._say(409, f"<Error>{code}<Message>The conditional request cannot succeed.</Message></Error>")

    def do_GET(self) -> None:
        self._say(404, "<Error><Code>NoSuchKey</Code><Message>There is none.</Message></Error>")

    def log_message(self, *_: object) -> None:
        pass

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.mark.parametrize(("answers", "why"), [(False, "Connection refused"), (True, "no answer in time")])
def test_the_same_trouble_has_the_same_text(monkeypatch: pytest.MonkeyPatch, answers: bool, why: str) -> None:
    """With the time that each try took in it, the same trouble would be logged again by all who log it once."""
    quick = {"timeout": "0.2s", "allow_http": True}
    options = {"client_options": quick, "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}}
    monkeypatch.setattr(client, "_quick", lambda: options)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "x")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if answers:
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        bucket, texts = Store("s3://bucket", "us-east-1"), set()
        for _ in range(3):
            with pytest.raises(StoreError) as caught:
                bucket.put("a/b", b"x")
            texts.add(str(caught.value))
    request = f"Generic S3 error: Error performing PUT {url}/bucket/a/b"
    assert texts == {f"s3://bucket: cannot write a/b: {request} - HTTP error: error sending request ({why})"}


def test_a_download_with_too_few_bytes_is_no_download(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"12345")
    monkeypatch.setattr(Store, "part", lambda *_: b"123")
    with pytest.raises(StoreError, match="cannot read a: 3 of 5 bytes came"):
        store.fetch("a", tmp_path / "a")
    with pytest.raises(StoreError, match="cannot read a: 3 of 5 bytes came"):
        store.read_into("a", 0, memoryview(bytearray(5)))


def test_list_and_delete(store: Store) -> None:
    for key in ("jobs/a/2", "jobs/a/1", "jobs/ab/1"):
        store.put(key, b"")
    assert store.list("jobs/a") == ["jobs/a/1", "jobs/a/2"]
    store.delete(["jobs/a/1", "jobs/a/2"])
    assert store.list("jobs") == ["jobs/ab/1"]


def test_a_file_url_and_a_path_are_the_same_bucket(store: Store, tmp_path: Path) -> None:
    store.put("a", b"x")
    assert Store((tmp_path / "bucket").as_uri()).get("a") == b"x"


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    odd = Store(str(tmp_path / "a b%20#é"))
    odd.put("k", b"x")
    assert (tmp_path / "a b%20#é" / "k").read_bytes() == b"x"


def test_a_bucket_that_cannot_be_written(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "bucket"))
    store.put("a", b"x")
    with pytest.raises(StoreError, match="a/b"):  # `a` is a file
        store.put("a/b", b"y")


def test_a_url_with_an_unknown_scheme() -> None:
    with pytest.raises(StoreError, match="nope://x"):
        Store("nope://x")


def test_keys() -> None:
    assert keys.checkpoint_key("j", 12) == "jobs/j/checkpoints/0000000012/manifest.json"
    assert keys.checkpoint_key("j", 12).startswith(keys.checkpoints_key("j") + "/")
    assert keys.log_key("j", 3, "spot-0", 1) == "jobs/j/logs/0003/spot-0/1.log"
    assert keys.host_key("c", "head") == "clusters/c/hosts/head.json"


def test_ctrl_c_leaves_calls_behind() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import os, time; from spotrun.store.threads import at_once\n"
        # Not `print`: Python aborts if a thread holds the lock of stdout while the interpreter ends.
        "def call(seconds): os.write(1, b'\\n'); time.sleep(seconds); return -seconds\n"
        "assert list(at_once(call, [0.2, 0, 0.1], 2)) == [-0.2, 0, -0.1]\n"
        "list(at_once(call, [600] * 3, 2))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(5)] == ["\n"] * 5, "three short calls, then two at once"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert said.rstrip().endswith("KeyboardInterrupt")


def interrupted(call: str, url: str, asked: Callable[[], object]) -> str:
    """What an operator's process says if Ctrl-C comes when the call has asked the bucket at this URL."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path; from spotrun.store import Store\n"
        f"Store.as_operator('s3://bucket', 'us-east-1').{call}\n"
    )
    login = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    environment = {**os.environ, **login, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            kept = asked()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
        del kept
    return said


def test_ctrl_c_ends_an_operators_wait_for_a_bucket() -> None:
    """The bucket takes connections and says nothing. obstore tries again for minutes, and lets no signal through."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        said = interrupted("find('key')", f"http://127.0.0.1:{silent.getsockname()[1]}", silent.accept)
    assert said.rstrip().endswith("KeyboardInterrupt")


class Stalls(BaseHTTPRequestHandler):
    """A bucket with one object, which it does not send."""

    asked, over = threading.Event(), threading.Event()

    def do_HEAD(self) -> None:
        self.send_response(200)
        fields = {"Content-Length": str(1 << 30), "ETag": "x", "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.asked.set()
        self.over.wait(600)


def test_ctrl_c_ends_an_operators_download(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stalls) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            call, url = f"fetch('key', Path({str(tmp_path / 'file')!r}))", f"http://127.0.0.1:{server.server_port}"
            said = interrupted(call, url, lambda: Stalls.asked.wait(60))
        finally:
            Stalls.over.set()
            server.shutdown()
    assert said.rstrip().endswith("KeyboardInterrupt")
