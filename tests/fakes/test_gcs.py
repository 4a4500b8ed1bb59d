"""The bucket on Google Cloud Storage's own protocol: all methods of `Store`, through obstore, against the fake."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import BaseError

from spotrun.errors import NotFound, StoreError, UploadStopped
from spotrun.store import Store
from tests.fakes import gcs as fakegcs
from tests.fakes.gcs import FakeGcs

ODD = "jobs/a b+c%20é&<x>/1"  # everything that a URL or XML would take for something else


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fakegcs.running("bucket", "other") as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        yield fake


@pytest.fixture
def store(gcs: FakeGcs) -> Store:
    return Store("gs://bucket")


@pytest.mark.parametrize("key", ["a", "a/b/c", ODD])
def test_what_is_put_is_got(store: Store, gcs: FakeGcs, tmp_path: Path, key: str) -> None:
    store.put(key, b"one")
    store.put(key, b"two")
    assert store.get(key) == store.find(key) == b"two"
    assert store.exists(key)
    store.fetch(key, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"two"
    assert gcs.keys("bucket") == [key]
    assert gcs.keys("other") == []


def test_a_small_file_takes_one_request(store: Store, gcs: FakeGcs, tmp_path: Path) -> None:
    """A job may leave 20,000 files, and each request takes its time."""
    (tmp_path / "x").write_bytes(b"x" * 1000)
    (tmp_path / "empty").touch()
    store.keep("small", tmp_path / "x", lambda: False)
    store.keep("empty", tmp_path / "empty", lambda: False)
    assert gcs.requests == [("PUT", "/bucket/small"), ("PUT", "/bucket/empty")]
    with pytest.raises(UploadStopped, match="the upload of x was stopped"):
        store.keep("stopped", tmp_path / "x", lambda: True)
    assert gcs.keys("bucket") == ["empty", "small"]


@pytest.mark.parametrize("size", [0, 1, fakegcs.PART, 3 * fakegcs.PART + 17], ids=str)
def test_a_file_is_uploaded_in_parts(store: Store, gcs: FakeGcs, tmp_path: Path, size: int) -> None:
    data = (bytes(range(251)) * (size // 251 + 1))[:size]  # a prime, so that no two parts are equal
    (tmp_path / "x").write_bytes(data)
    store.put("big", tmp_path / "x")
    store.fetch("big", tmp_path / "y")
    assert (tmp_path / "y").read_bytes() == data
    assert (("POST", "/bucket/big") in gcs.requests) == (size > fakegcs.PART)
    assert gcs.uploads == {}


def test_what_is_not_there(store: Store, tmp_path: Path) -> None:
    assert store.find("a") is None
    assert not store.exists("a")
    assert store.list("a") == []
    store.delete(["a"])
    with pytest.raises(NotFound, match="no object a"):
        store.get("a")
    with pytest.raises(NotFound, match="no object a"):
        store.fetch("a", tmp_path / "x")


def test_only_one_creates(store: Store) -> None:
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda n: store.create("epoch/1", b"%d" % n), range(16)))
    assert won.count(True) == 1
    assert store.get("epoch/1") == b"%d" % won.index(True)
    store.delete(["epoch/1"])
    assert store.create("epoch/1", b"again")


def test_list_and_delete(store: Store) -> None:
    for key in ("jobs/a/2", "jobs/a/1", "jobs/ab/1", ODD):
        store.put(key, b"")
    assert store.list("jobs/a") == ["jobs/a/1", "jobs/a/2"]
    assert ODD in store.list("jobs")
    store.delete(["jobs/a/1", "jobs/a/2", "jobs/a/3"])
    assert store.list("jobs") == [ODD, "jobs/ab/1"]


def test_a_list_of_many_pages(store: Store, gcs: FakeGcs) -> None:
    names = [f"logs/{number:05d}" for number in range(2 * fakegcs.PAGE + 5)]
    gcs.buckets["bucket"] = {name: fakegcs.Object(b"", 1, 0.0) for name in [*names, "logsmore/1"]}
    assert store.list("logs") == names
    assert gcs.requests.count(("GET", "/bucket")) == 3


@pytest.mark.parametrize("status", [503, 429])
def test_a_server_that_is_busy_is_asked_again(store: Store, gcs: FakeGcs, status: int) -> None:
    gcs.fail(status, status)
    store.put("a", b"x")
    gcs.fail(status)
    assert store.get("a") == b"x"


def test_an_object_takes_one_write_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """GCS refuses more (https://cloud.google.com/storage/quotas#objects); what is written twice in a row gets there."""
    with fakegcs.running("bucket", slow=True) as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        store = Store("gs://bucket")
        for data in (b"1", b"2"):
            store.put("state.json", data)
        assert store.get("state.json") == b"2"
        assert fake.requests.count(("PUT", "/bucket/state.json")) > 2


def test_a_bucket_that_is_not_there(gcs: FakeGcs) -> None:
    store = Store("gs://nobodys")
    with pytest.raises(StoreError, match="cannot write a") as caught:
        store.put("a", b"x")
    assert "\n" not in str(caught.value)
    with pytest.raises(StoreError, match="there is no such bucket"):
        store.list("a")


def test_ranges(store: Store) -> None:
    store.put("a", b"0123456789")
    inner = store._store
    assert bytes(obstore.get_range(inner, "a", start=2, end=5)) == b"234"
    assert bytes(obstore.get(inner, "a", options={"range": {"offset": 7}}).bytes()) == b"789"
    assert bytes(obstore.get(inner, "a", options={"range": {"suffix": 2}}).bytes()) == b"89"
    with pytest.raises(BaseError):
        obstore.get_range(inner, "a", start=20, end=30)


def test_folders_and_pages_of_them(store: Store) -> None:
    for key in ("a/1", "a/2", "b/1", "c"):
        store.put(key, b"")
    found = obstore.list_with_delimiter(store._store)
    assert list(found["common_prefixes"]) == ["a", "b"]
    assert [each["path"] for each in found["objects"]] == ["c"]


def test_another_process_sees_the_same(store: Store, gcs: FakeGcs) -> None:
    store.put("a", b"x")
    code = "from spotrun.store import Store; s = Store('gs://bucket'); print(s.get('a'), s.create('a', b''))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **gcs.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "b'x' False"


def test_what_the_fake_does_not_know_fails_the_test() -> None:
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(fakegcs.running("bucket"))
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with pytest.raises(urllib.error.HTTPError, match="501"):
            direct.open(urllib.request.Request(f"{fake.endpoint}/bucket/a?acl", data=b"", method="PUT"))
        with pytest.raises(AssertionError, match=r"PUT /bucket/a\?acl"):
            stack.close()


def test_a_large_object_is_fetched_in_ranges(tmp_path: Path) -> None:
    """Each a request of its own, put together in order; the last one is short."""
    data = os.urandom(1 << 20) * 70 + b"the end"
    (tmp_path / "data").write_bytes(data)
    with fakegcs.running("bucket") as gcs, pytest.MonkeyPatch.context() as patch:
        for name, value in gcs.environment.items():
            patch.setenv(name, value)
        store = Store("gs://bucket")
        store.put("shard", tmp_path / "data")
        before = len(gcs.requests)
        store.fetch("shard", tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == data
        assert sorted(verb for verb, _ in gcs.requests[before:]) == ["GET", "GET", "GET", "HEAD"]
        store.put("empty", b"")
        store.fetch("empty", tmp_path / "empty")
        assert (tmp_path / "empty").read_bytes() == b""
