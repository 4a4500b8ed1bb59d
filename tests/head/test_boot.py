"""A head looks at its cluster's description now and then, whatever it finds there."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from spotrun.errors import StoreError
from spotrun.head import boot
from spotrun.head.boot import until_changed
from spotrun.head.identity import ClusterIdentity
from spotrun.spec import ClusterSpec
from spotrun.store import Store, cluster_key

SPEC = ClusterSpec.model_validate({"name": "c", "cloud": "local", "pools": [{"name": "p", "zone": "local-a"}]})
OWN = ClusterIdentity("c", "file:///bucket", "gcp", "local", "local")
CHANGED = SPEC.model_copy(update={"labels": {"team": "vision"}})


class Flaky(Store):
    """A bucket that answers as told: bytes, nothing, or not at all. Each look takes one; the last one stays."""

    def __init__(self, folder: Path, *answers: bytes | StoreError | None) -> None:
        super().__init__(str(folder))
        self.answers = list(answers)
        self.looks = 0

    def find(self, key: str, most: int | None = None) -> bytes | None:
        assert key == cluster_key("c")
        self.looks += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, StoreError):
            raise answer
        return answer


def text(spec: ClusterSpec) -> bytes:
    return spec.document().encode()


async def test_what_is_no_change_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bucket that does not answer the first time, junk, keys of another version, nothing, the same: then a change."""
    away = StoreError("the bucket is away")
    answers = [away, away, b"{", b'{"name": "c", "nonsense": 1}', None, text(SPEC), away, text(CHANGED)]
    store = Flaky(tmp_path, *answers)
    with caplog.at_level(logging.WARNING):
        await until_changed(store, OWN, SPEC.digest, 0.0)
    assert store.looks == len(answers)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("the bucket is away") == 2, "said when it begins, not at each look"
    assert sum("description in the bucket is not valid" in line for line in said) == 2


async def test_the_same_description_ends_no_head(tmp_path: Path) -> None:
    store = Flaky(tmp_path, text(SPEC))
    looking = asyncio.create_task(until_changed(store, OWN, SPEC.digest, 0.0))
    while store.looks < 20:
        await asyncio.sleep(0)
    assert not looking.done()
    looking.cancel()


async def test_another_clusters_description_ends_no_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = SPEC.model_copy(update={"name": "victim"})
    store = Flaky(tmp_path, text(other), text(other), text(CHANGED))
    with caplog.at_level(logging.WARNING):
        await until_changed(store, OWN, SPEC.digest, 0.0)
    assert store.looks == 3
    said = [record.getMessage() for record in caplog.records]
    assert sum("name is victim there, and c in the machine's metadata" in line for line in said) == 1


async def test_slow_calls_for_many_jobs_keep_no_other_call_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's lease is renewed while the bucket is slow with the checkpoints of all jobs."""

    async def serve(_: object) -> None:
        answer = threading.Event()
        slow = [asyncio.create_task(asyncio.to_thread(answer.wait, 60)) for _ in range(boot.THREADS - 1)]
        try:
            async with asyncio.timeout(30):
                await asyncio.to_thread(answer.is_set)
        finally:
            answer.set()
            await asyncio.gather(*slow)

    monkeypatch.setattr(boot, "_serve", serve)
    await boot.run()
