"""The bucket: one small synchronous interface over obstore, and the only place that knows its keys.

Callers in an event loop use `asyncio.to_thread`. URLs: `gs://…`, `s3://…`, `file:///…` or a plain path. The usual
environment variables of each cloud apply (`AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, …).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from spotrun.errors import NotFound, StoreError


class Store:
    """The bucket at `url`. Every method raises `StoreError` naming the key when the bucket does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            if "://" not in url or url.startswith("file://"):
                root = Path(unquote(urlsplit(url).path) if "://" in url else url).absolute()
                root.mkdir(parents=True, exist_ok=True)
                self._store: ObjectStore = LocalStore(root)
            else:
                self._store = from_url(url)
        except (BaseError, OSError, ValueError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StoreError(f"{self.url}: not a bucket that can be used: {problem}") from None

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises `NotFound`."""
        try:
            return bytes(obstore.get(self._store, key).bytes())
        except FileNotFoundError:
            raise NotFound(f"{self.url}: no object {key}") from None
        except BaseError as error:
            raise StoreError(f"{self.url}: cannot read {key}: {error}") from error

    def find(self, key: str) -> bytes | None:
        """The object's bytes, or None if there is none."""
        try:
            return self.get(key)
        except NotFound:
            return None

    def put(self, key: str, data: bytes | Path) -> None:
        """Write or replace an object, whole or not at all; a `Path` is uploaded in parts."""
        try:
            obstore.put(self._store, key, data)
        except BaseError as error:
            raise StoreError(f"{self.url}: cannot write {key}: {error}") from error

    def create(self, key: str, data: bytes) -> bool:
        """Write the object unless there is one already; False then. This is what fences writers."""
        try:
            obstore.put(self._store, key, data, mode="create")
        except AlreadyExistsError:
            return False
        except BaseError as error:
            raise StoreError(f"{self.url}: cannot create {key}: {error}") from error
        return True

    def fetch(self, key: str, path: Path) -> None:
        """Download an object into a file, in chunks. Raises `NotFound`."""
        try:
            with path.open("wb") as file:
                for chunk in obstore.get(self._store, key).stream(min_chunk_size=8 << 20):
                    file.write(chunk)
        except FileNotFoundError:
            raise NotFound(f"{self.url}: no object {key}") from None
        except BaseError as error:
            raise StoreError(f"{self.url}: cannot read {key}: {error}") from error

    def exists(self, key: str) -> bool:
        """Whether there is an object of that key."""
        try:
            obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        except BaseError as error:
            raise StoreError(f"{self.url}: cannot look up {key}: {error}") from error
        return True

    def list(self, prefix: str) -> list[str]:
        """All keys below a folder, sorted."""
        try:
            return sorted(item["path"] for batch in obstore.list(self._store, prefix) for item in batch)
        except BaseError as error:
            raise StoreError(f"{self.url}: cannot list {prefix}: {error}") from error

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are passed over."""
        for key in keys:
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                continue
            except BaseError as error:
                raise StoreError(f"{self.url}: cannot delete {key}: {error}") from error


def head_key(cluster: str) -> str:
    return f"clusters/{cluster}/head.json"


def epoch_key(cluster: str, epoch: int) -> str:
    """Created, never replaced: the head that creates it is head number `epoch`."""
    return f"clusters/{cluster}/epochs/{epoch:06d}"


def queue_key(cluster: str) -> str:
    """Ids of the jobs not yet ended, the active one first (JSON list)."""
    return f"clusters/{cluster}/queue.json"


def host_key(cluster: str, node: str) -> str:
    return f"clusters/{cluster}/hosts/{node}.json"


def code_key(sha256: str) -> str:
    return f"code/{sha256}.tar.zst"


def job_key(job: str, name: str = "job.yaml") -> str:
    """`name`: job.yaml, state.json, events.jsonl."""
    return f"jobs/{job}/{name}"


def checkpoints_key(job: str) -> str:
    return f"jobs/{job}/checkpoints"


def checkpoint_key(job: str, step: int, name: str = "manifest.json") -> str:
    return f"jobs/{job}/checkpoints/{step:010d}/{name}"


def log_key(job: str, generation: int, node: str, rank: int | str) -> str:
    return f"jobs/{job}/logs/{generation:04d}/{node}/{rank}.log"
