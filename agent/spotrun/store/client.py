"""The bucket: one small synchronous interface over obstore. `store.keys` says what lies where.

Callers in an event loop use `asyncio.to_thread`. URLs: `gs://…`, `s3://…`, `file:///…` or a plain path. The usual
environment variables of each cloud apply (`AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, …).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, PreconditionError
from obstore.store import LocalStore, ObjectStore, from_url

from spotrun.errors import (
    BadKeyError,
    ConflictError,
    NotFound,
    SpotrunError,
    StoreError,
    TooLargeError,
    UploadStopped,
)
from spotrun.locks import try_lock
from spotrun.store.keys import LOG_TAG, is_log
from spotrun.store.threads import at_once, result

Version = tuple[tuple[str, str], ...]  # tells one version of an object from the others
Credentials = Any  # one of obstore's credential providers; they share no type
_SMALL = 1 << 20  # bytes; a larger object is sent with the patience of an upload
_PART = 8 << 20  # bytes of an upload's part
_RANGE, _AT_ONCE = 32 << 20, 4  # bytes of a download's part, and how many parts are downloaded at once
_LOCK = 10.0  # seconds to wait while another process replaces an object in the same folder
# An error in the answer of S3 or GCS. S3's is on another line than the error's number.
_SAID = re.compile(r"<Code>([^<]+)</Code>\s*<Message>([^<]+)</Message>")
# How long a request took. Without that, the same trouble always has the same text, and is logged once.
_TOOK = re.compile(r" in [0-9.]+[mµn]?s(?:, after [^-]*?)? +- ")
# Why no connection was made. obstore says so only on a later line.
_CAUSE = re.compile(r'^ *(?:message|error): "([^"]+)",$', re.MULTILINE)
# S3's refusal during another write or removal of the object, which may fail: nobody has written yet. obstore does not
# tell this from an object that exists. https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html
_UNDECIDED = "ConditionalRequestConflict"
# A bucket that does not exist is a FileNotFoundError, a key that no bucket can have (a//b, ../a) a ValueError.
_ERRORS = (BaseError, OSError, ValueError)


class Store:
    """The bucket at `url`. Every method raises `StoreError`, naming the key, if the bucket does not answer."""

    def __init__(self, url: str, region: str = "", credentials: Credentials | None = None) -> None:
        """region: of an S3 bucket. credentials: default: those of the environment or the machine."""
        self.url = url
        options: dict[str, Any] = {"credential_provider": credentials} if credentials else {}
        if region and url.startswith("s3://"):
            options["region"] = region
        try:
            if "://" not in url or url.startswith("file://"):
                root = Path(unquote(urlsplit(url).path) if "://" in url else url).absolute()
                root.mkdir(parents=True, exist_ok=True)
                self._store: ObjectStore = LocalStore(root)
                self._quick: ObjectStore = self._store
            else:
                self._store = from_url(url, **options)
                self._quick = from_url(url, **options, **_quick())
        except _ERRORS as error:
            raise StoreError(f"{self.url}: cannot use this bucket: {_why(error)}") from None

    @classmethod
    def as_operator(cls, url: str, region: str = "") -> Store:
        """The bucket with the login of the cloud's own command line tools: profiles, single sign-on and so on.

        Raises `StoreError` if these tools are not logged in.
        """
        credentials: Credentials | None = None
        try:
            if url.startswith("s3://"):
                from obstore.auth.boto3 import Boto3CredentialProvider

                credentials = Boto3CredentialProvider()
            elif url.startswith("gs://") and not os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY"):
                import google.auth
                from obstore.auth.google import GoogleCredentialProvider

                found, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
                credentials = GoogleCredentialProvider(found)
        except Exception as error:  # of two libraries, each with many kinds of its own
            login = "aws sso login" if url.startswith("s3://") else "gcloud auth application-default login"
            raise StoreError(f"{url}: no credentials for the bucket, sign in with `{login}`: {_why(error)}") from None
        store = cls(url, region, credentials)
        store._quick = store._store  # an operator's network may be slow
        for name, method in inspect.getmembers(store, inspect.ismethod):
            if not name.startswith("_"):
                setattr(store, name, _left_at_ctrl_c(method))
        return store

    def get(self, key: str, most: int | None = None) -> bytes:
        """The object's bytes. Raises `NotFound`, and `TooLargeError` if it has more than `most` bytes."""
        with self._asking("read", key):
            found = obstore.get(self._quick, key)
            if most is not None and found.meta["size"] > most:
                raise TooLargeError(f"{self.url}: {key} has {found.meta['size']} bytes; at most {most} are read")
            return bytes(found.bytes())

    def find(self, key: str, most: int | None = None) -> bytes | None:
        """The object's bytes; None if there is no object. most: as in `get`."""
        try:
            return self.get(key, most)
        except NotFound:
            return None

    def put(self, key: str, data: bytes | Path, stopped: Callable[[], bool] | None = None) -> None:
        """Write or replace an object, whole or not at all. A `Path` is uploaded in parts.

        stopped: asked before each part. Once it is true, the upload of a `Path` raises `UploadStopped`.
        """
        # S3's lifecycle rules select objects by prefix and tag, and logs have no prefix of their own.
        tags = LOG_TAG if is_log(key) and self.url.startswith("s3://") else None
        with self._asking("write", key):
            if isinstance(data, Path):
                # At most 10,000 parts: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html, GCS alike
                part = max(_PART, data.stat().st_size // 9000)
                source = data if stopped is None else _parts(data, part, stopped)
                obstore.put(self._store, key, source, tags=tags, chunk_size=part)
            else:
                obstore.put(self._quick if len(data) <= _SMALL else self._store, key, data, tags=tags)

    def keep(self, key: str, path: Path, stopped: Callable[[], bool] | None = None) -> None:
        """Write an object that is never replaced. If the object already has the same bytes, the write has succeeded.

        The answer to an upload may get lost, and the upload is then repeated. The bucket refuses the second one if this
        machine has no right to replace objects: nodes have none for checkpoints.
        """
        try:
            self.put(key, path, stopped)
        except StoreError:
            if not self._holds(key, path):
                raise

    def create(self, key: str, data: bytes) -> bool:
        """Write the object unless there is one. Returns whether this call wrote it: of several, only one does."""
        with self._asking("create", key):
            try:
                obstore.put(self._quick, key, data, mode="create")
            except AlreadyExistsError as error:
                if _UNDECIDED in str(error):
                    raise
                return False
        return True

    def read(self, key: str) -> tuple[bytes | None, Version | None]:
        """The object's bytes and version; (None, None) if there is no object."""
        try:
            with self._asking("read", key):
                found = obstore.get(self._quick, key)
                return bytes(found.bytes()), _version(found.meta)
        except NotFound:
            return None, None

    def replace(self, key: str, data: bytes, version: Version | None) -> Version:
        """Replace an object that has this version, or create it if the version is None. Returns the new version.

        Raises `ConflictError` if the object has another version. An object with the same bytes is no conflict: the
        answer to a write may get lost, and obstore then writes again.
        """
        try:
            with self._alone(key, version), self._asking("write", key, AlreadyExistsError, PreconditionError):
                mode: Any = "create" if version is None else dict(version)
                folder = isinstance(self._store, LocalStore) and version is not None
                return _version(obstore.put(self._quick, key, data, mode="overwrite" if folder else mode))
        except (AlreadyExistsError, PreconditionError) as error:
            there, found = self.read(key)
            if there == data and found is not None:
                return found
            if _UNDECIDED in str(error):
                raise StoreError(f"{self.url}: cannot write {key}: {_why(error)}") from None
            if isinstance(self._store, LocalStore) and Path(str(self._store.prefix), key).is_dir():
                raise StoreError(f"{self.url}: cannot write {key}: a folder is in its place") from None
            raise ConflictError(f"{self.url}: another process has written {key}") from None

    def fetch(self, key: str, path: Path, size: int | None = None) -> None:
        """Download an object into a file. Raises `NotFound`. size: how many bytes to read; None: all."""
        size = self.size(key) if size is None else size
        with self._asking("read", key), path.open("wb") as file:
            self._ranges(key, 0, size, lambda at, data: _write(file.fileno(), at, data))

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Download the object's bytes from `start` on, as many as `into` has room for. Raises `NotFound`."""

        def keep(at: int, data: bytes) -> None:
            into[at - start : at - start + len(data)] = data

        self._ranges(key, start, start + len(into), keep)

    def size(self, key: str) -> int:
        """The number of the object's bytes. Raises `NotFound`."""
        with self._asking("look up", key):
            return int(obstore.head(self._quick, key)["size"])

    def age(self, key: str) -> float | None:
        """Seconds since the object was written, by this machine's clock; None if there is no object."""
        try:
            with self._asking("look up", key):
                return time.time() - float(obstore.head(self._quick, key)["last_modified"].timestamp())
        except NotFound:
            return None

    def exists(self, key: str) -> bool:
        """Whether there is an object of that key."""
        return self.age(key) is not None

    def part(self, key: str, start: int, end: int) -> bytes:
        """The object's bytes from `start` to before `end`, which must be greater. Raises `NotFound`."""
        with self._asking("read", key):
            return bytes(obstore.get_range(self._store, key, start=start, end=end))

    def list(self, prefix: str) -> list[str]:
        """All keys below a folder, sorted. Raises `NotFound` if there is no such bucket."""
        with self._asking("list", prefix):
            try:
                return sorted(item["path"] for batch in obstore.list(self._quick, prefix) for item in batch)
            except _ERRORS as error:
                if "NoSuchBucket" in str(error):  # S3's and GCS's own code; obstore has no class for it here
                    raise NotFound(f"{self.url}: there is no such bucket") from None
                raise

    def folders(self, prefix: str) -> Sequence[str]:
        """The names of the folders in a folder, sorted. Keys below these are not listed, however many there are."""
        with self._asking("list", prefix):
            found = obstore.list_with_delimiter(self._quick, prefix)
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def sizes(self, prefix: str) -> dict[str, int]:
        """The bytes of each object below a folder, by key."""
        with self._asking("list", prefix):
            return {item["path"]: int(item["size"]) for batch in obstore.list(self._quick, prefix) for item in batch}

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects. A key without an object is no error."""
        for key in keys:
            with self._asking("delete", key), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._quick, key)

    def _ranges(self, key: str, start: int, stop: int, take: Callable[[int, bytes], object]) -> None:
        """Download these bytes of an object, some ranges at a time. take: called with the place of each, and its bytes.

        Each range is a request of its own: obstore cancels a request after three minutes, even if data still arrives.
        """

        def get(at: int) -> None:
            data, size = self.part(key, at, min(at + _RANGE, stop)), min(_RANGE, stop - at)
            if len(data) != size:
                raise StoreError(f"{self.url}: cannot read {key}: {len(data)} of {size} bytes came, from {at} on")
            take(at, data)

        for _ in at_once(get, range(start, stop, _RANGE), _AT_ONCE, wait=True):
            pass

    @contextlib.contextmanager
    def _asking(self, verb: str, key: str, *kept: type[Exception]) -> Iterator[None]:
        """Turn obstore's errors, except those `kept`, into `StoreError`. It is a `NotFound` if there is no object."""
        try:
            yield
        except kept:
            raise
        except _ERRORS as error:
            if isinstance(error, FileNotFoundError) and verb in ("read", "look up"):
                raise NotFound(f"{self.url}: no object {key}") from None
            kind = BadKeyError if isinstance(error, InvalidPathError) else StoreError
            raise kind(f"{self.url}: cannot {verb} {key}: {_why(error)}") from error

    @contextlib.contextmanager
    def _alone(self, key: str, version: Version | None) -> Iterator[None]:
        """If the bucket is a folder, let one process at a time compare and write: obstore cannot do both at once."""
        if not isinstance(self._store, LocalStore) or version is None:
            yield
            return
        with self._asking("write", key):
            handle = os.open(str(self._store.prefix), os.O_RDONLY)
        try:
            deadline = time.monotonic() + _LOCK
            while not try_lock(handle):
                if time.monotonic() > deadline:  # perhaps its owner is suspended
                    raise StoreError(f"{self.url}: cannot write {key}: another process has locked the folder")
                time.sleep(0.01)
            if self.read(key)[1] != version:
                raise PreconditionError(key)
            yield
        finally:
            os.close(handle)

    def _holds(self, key: str, path: Path) -> bool:
        """Whether the object is there and has the bytes of the file."""
        try:
            size = path.stat().st_size
            if self.size(key) != size:
                return False
            with path.open("rb") as file:
                starts = range(0, size, _RANGE)
                return all(self.part(key, at, min(at + _RANGE, size)) == file.read(_RANGE) for at in starts)
        except (SpotrunError, OSError):
            return False


def _parts(path: Path, size: int, stopped: Callable[[], bool]) -> Path | Iterator[bytes]:
    """What to upload. An iterator takes three requests at least, so a file of one part is uploaded as it is."""
    if path.stat().st_size > size:
        return _read_parts(path, size, stopped)
    _check(path, stopped)
    return path


def _read_parts(path: Path, size: int, stopped: Callable[[], bool]) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(size):
            _check(path, stopped)
            yield data


def _check(path: Path, stopped: Callable[[], bool]) -> None:
    if stopped():
        raise UploadStopped(f"the upload of {path.name} was stopped")


def _write(handle: int, at: int, data: bytes) -> None:
    """Write all of it at this place. On a disk that becomes full, the first call writes a part, the next one fails."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(handle, rest, at)
        at, rest = at + count, rest[count:]


def _left_at_ctrl_c(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let Ctrl-C end a call. obstore does not, while it waits for a bucket: for minutes, with its retries.

    So another thread makes the call. It is left behind then, and does not keep the process alive.
    """

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return method(*args, **options)  # only the main thread gets a Ctrl-C
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(method(*args, **options))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return result(answer)

    return call


def _version(found: Any) -> Version:
    return tuple((name, found[name]) for name in ("e_tag", "version") if found[name] is not None)


def _quick() -> dict[str, Any]:
    """Options for documents: a request takes at most 20 s. The head may wait for one between a notice and an order.

    With obstore's defaults, a lost request would take 30 s, and its retries three minutes.
    """
    # If it is given any options, obstore does not read this variable.
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
    plain = plain or '"http://' in os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", "")
    return {
        "client_options": {"timeout": "6s", "connect_timeout": "3s", "allow_http": plain},
        "retry_config": {"retry_timeout": timedelta(seconds=14)},
    }


def _why(error: Exception) -> str:
    """What the bucket says, or else the first line of the message: obstore's messages are a page long."""
    text = str(error)
    if said := _SAID.search(text):
        return f"{said[1]}: {' '.join(said[2].split())}"
    first = _TOOK.sub(" - ", text.partition("\n")[0])
    if first.endswith("error sending request"):
        found = _CAUSE.search(text)
        cause = "no answer in time" if "kind: Timeout" in text else found[1] if found else ""
        first += f" ({cause})" if cause else ""
    return first or type(error).__name__
