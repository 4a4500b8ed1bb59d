"""Texts, images and provenance for the page of a run: bounded, with void marks, whatever a job's code has written."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from spotrun.dashboard import logged, runs
from spotrun.dashboard.logged import EACH, NAMES, Logged
from spotrun.dashboard.records import Records
from spotrun.history.provenance import NodeRecord, Provenance, Remarks
from spotrun.state.points import Extra, Header, compress, line
from spotrun.store import Store, about_key, extras_key, metrics_key, provenance_key, remarks_key
from tests.scripts.accounts import job, store

JOB = "train-20261122-000001"


@pytest.fixture
def bucket(tmp_path: Path) -> Store:
    return store(tmp_path, job(1, phase="running"))


@pytest.fixture
def records(bucket: Store) -> Records:
    return Records(bucket, "c")


def put(bucket: Store, generation: int, block: int, *calls: Extra, base: int = 0) -> None:
    header = Header(JOB, generation, 0, base)
    bucket.put(extras_key(JOB, generation, block), compress(b"".join(map(line, [header, *calls]))))
    bucket.put(metrics_key(JOB, generation, 1), compress(line(header)))


def said(step: int, name: str = "note", text: str = "") -> Extra:
    return Extra(step, float(step), "text", name, text=text or f"at {step}")


def shown(found: dict[str, Any], name: str = "note") -> list[tuple[int, bool]]:
    return [(each["step"], each["void"]) for each in found["items"] if each["name"] == name]


def test_the_newest_values_of_each_name(bucket: Store, records: Records) -> None:
    put(bucket, 1, 1, said(1, "rare"), *(said(step) for step in range(1, 3 * EACH)))
    put(bucket, 1, 2, Extra(90, 1.0, "histogram", "weights", edges=[0.0, 1.0], counts=[3]))
    found = Logged(records).read(JOB, {})
    assert shown(found) == [(step, False) for step in range(3 * EACH - 1, 2 * EACH - 1, -1)]
    assert shown(found, "rare") == [(1, False)]
    (weights,) = (each for each in found["items"] if each["kind"] == "histogram")
    assert (weights["edges"], weights["counts"]) == ([0.0, 1.0], [3])


def test_the_page_gets_only_what_is_new(bucket: Store, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = bucket.get

    def get(key: str, most: int | None = None) -> bytes:
        reads.append(key)
        return read(key, most)

    monkeypatch.setattr(bucket, "get", get)
    put(bucket, 1, 1, said(1))
    page = Logged(records)
    first = page.read(JOB, {})
    assert page.read(JOB, {"have": first["stamp"]})["items"] is None
    put(bucket, 1, 2, said(2))
    reads.clear()
    assert shown(page.read(JOB, {"have": first["stamp"]})) == [(2, False), (1, False)]
    assert extras_key(JOB, 1, 1) not in reads
    put(bucket, 2, 1, base=1)  # the interruption makes step 2 void, before anything is logged again
    assert shown(page.read(JOB, {"have": first["stamp"]})) == [(2, True), (1, False)]


def test_memory_and_answers_are_bounded(bucket: Store, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("BYTES", 10_000), ("KEPT", 20_000), ("BLOCKS", 30)):
        monkeypatch.setattr(logged, name, most)
    for block in range(1, 41):
        put(bucket, 1, block, said(block, f"name{block % 3}", "x" * 1000))
    page = Logged(records)
    found = page.read(JOB, {})
    assert found["left_out"] == 10
    assert len(found["items"]) == 10
    assert sum(logged._size(calls) for calls in page._blocks.values()) == page._size <= 20_000
    put(bucket, 1, 41, *(said(step, f"many{step}") for step in range(1000)))
    assert len({each["name"] for each in page.read(JOB, {})["items"]}) <= NAMES


def test_large_values_of_one_name_hide_no_other_name(
    bucket: Store, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logged, "BYTES", 2500)
    put(bucket, 1, 1, said(1, "prompt"), *(said(step, "sample", "x" * 1000) for step in range(2, 9)))
    found = Logged(records).read(JOB, {})
    assert (len(shown(found, "sample")), shown(found, "prompt")) == (2, [(1, False)])


def test_a_new_block_does_not_have_old_ones_read_again(
    bucket: Store, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all blocks together are larger than what is kept in memory."""
    reads: list[str] = []
    read = bucket.get

    def get(key: str, most: int | None = None) -> bytes:
        reads.extend([key] * ("/extras/" in key))
        return read(key, most)

    monkeypatch.setattr(bucket, "get", get)
    monkeypatch.setattr(logged, "KEPT", 20_000)
    noise = Random(1)
    for block in range(1, 41):
        put(bucket, 1, block, said(block, "sample", noise.randbytes(1000).hex()))
    page = Logged(records)
    page.read(JOB, {})
    reads.clear()
    put(bucket, 1, 41, said(41, "sample", noise.randbytes(1000).hex()))
    assert page.read(JOB, {})["left_out"] > 20
    assert reads == [extras_key(JOB, 1, 41)]


def test_what_cannot_be_read_is_left_out(bucket: Store, records: Records) -> None:
    """A job's code can write to its node's blocks."""
    put(bucket, 1, 1, said(1))
    bucket.put(extras_key(JOB, 1, 2), b"junk")
    assert shown(Logged(records).read(JOB, {})) == [(1, False)]
    bucket.put(about_key(JOB, "spot-1", "b"), b'{"node": 7}')
    bucket.put(about_key(JOB, "spot-2", "b"), b"x" * (2 << 20))
    bucket.put(provenance_key(JOB), b"[]")
    found = runs.origin(records, JOB, {})
    assert (found["provenance"], found["nodes"], found["left_out"]) == (None, [], 0)
    assert (found["remarks"]["tags"], found["remarks"]["notes"]) == ([], [])


def test_where_a_run_came_from(bucket: Store, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "NODES", 2)
    origin = Provenance(job=JOB, at=5.0, code="x", user="ann")
    bucket.put(provenance_key(JOB), origin.model_dump_json().encode())
    bucket.put(remarks_key(JOB), Remarks(tags=("best",)).model_dump_json().encode())
    for number in range(3):
        record = NodeRecord(node=f"spot-{number}", boot="b", at=9.0 - number, packages={"torch": "2.13.0"})
        bucket.put(about_key(JOB, record.node, "b"), record.model_dump_json().encode())
    found = runs.origin(records, JOB, {})
    assert found["provenance"]["user"] == "ann"
    assert found["remarks"]["tags"] == ["best"]
    assert [each["node"] for each in found["nodes"]] == ["spot-1", "spot-0"]
    assert found["left_out"] == 1
