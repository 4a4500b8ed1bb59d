"""Curves from a bucket: a live job's new blocks, blocks that arrive late, and blocks that a job's code has spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotrun.history.extras import read_extras
from spotrun.history.reader import LARGEST, NAMES, Reader, read_curves, read_headers
from spotrun.state import points
from spotrun.state.points import Header
from spotrun.store import Store, extras_key, metrics_key
from tests.history.blocks import block, put


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "bucket"))


def steps(reader: Reader) -> list[int]:
    return list(reader.curve("loss").counting().steps)


def test_new_blocks_are_read_without_the_old_ones(store: Store) -> None:
    reader = Reader(store, "j")
    assert not reader.update()
    put(store, 1, block(1, 0, range(1, 6)))
    assert reader.update()
    assert steps(reader) == [1, 2, 3, 4, 5]
    store.put(metrics_key("j", 1, 1), b"nobody reads this object again")
    put(store, 2, block(1, 0, range(6, 9)))
    put(store, 1, block(2, 6, range(7, 12)))
    assert reader.update()
    assert steps(reader) == list(range(1, 12))
    assert (reader.names, reader.problems) == (["loss"], [])
    assert not reader.update()


def test_a_limit_in_time_leaves_blocks_for_the_next_update(store: Store) -> None:
    for number in range(1, 41):
        put(store, number, block(1, 0, [number]))
    reader = Reader(store, "j")
    left: list[int] = []
    while not left or left[-1]:
        assert reader.update(seconds=0.0)
        left.append(reader.unread)
        assert steps(reader) == list(range(1, 41 - left[-1]))
    assert left == list(range(39, -1, -1))
    assert not reader.update(seconds=0.0)
    assert reader.unread == 0


def test_a_block_that_arrives_late(store: Store) -> None:
    """A node had no way to the bucket while another generation began; or an older agent's block comes last."""
    reader = Reader(store, "j")
    put(store, 1, block(1, 0, range(1, 4)))
    put(store, 3, block(1, 0, range(7, 9)))
    put(store, 1, block(2, 8, range(9, 12)))
    reader.update()
    put(store, 2, block(1, 0, range(4, 7)))
    reader.update()
    assert steps(reader) == list(range(1, 12))


def test_substitutes_have_what_rank_0_has_lost(store: Store) -> None:
    """Rank 0's machine was lost with steps 5 to 8, of which the state has 5 to 7. Its last block may still arrive."""
    reader = Reader(store, "j")
    put(store, 1, block(1, 0, range(1, 5)))
    put(store, 3, block(1, 0, range(3, 9), rank=1))
    put(store, 9, block(1, 0, range(2, 7), rank=2))
    put(store, 1, block(2, 7, range(8, 10)))
    reader.update()
    assert steps(reader) == list(range(1, 10))
    values = list(reader.curve("loss").counting().values)
    assert [round(value // 100) for value in values] == [0, 0, 0, 0, 1, 1, 1, 0, 0]
    put(store, 2, block(1, 0, range(5, 7)))
    reader.update()
    assert steps(reader) == list(range(1, 10))
    values = list(reader.curve("loss").counting().values)
    assert [round(value // 100) for value in values] == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert list(reader.curve("loss").void) == [0] * 7 + [1] + [0] * 2


def test_a_generation_of_which_only_a_substitute_is_left(store: Store) -> None:
    """Rank 0's machine was lost before its first upload. What came after the base is void all the same."""
    put(store, 1, block(1, 0, range(1, 7)))
    put(store, 1, block(2, 4, range(5, 8), rank=1))
    reader = Reader(store, "j")
    reader.update()
    assert steps(reader) == list(range(1, 8))
    assert list(reader.curve("loss").void) == [0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert {number: header.base for number, header in read_headers(store, "j").items()} == {1: 0, 2: 4}


def test_what_only_a_substitute_logs_is_not_read(store: Store) -> None:
    """Ranks may log under names of their own, and a substitute may be behind rank 0."""
    mine = block(1, 0, range(1, 7))
    other = block(1, 0, range(1, 7), rank=1)
    for call in other.calls:
        call.values["own"] = 1.0
    put(store, 1, mine)
    put(store, 1, other)
    reader = Reader(store, "j", most=2)
    reader.update()
    assert reader.names == ["loss"]
    assert len(reader.curve("own").points) == 0
    assert max(reader.curve("loss").points.values) < 100


def test_blocks_that_cannot_be_read_are_named_and_left_out(store: Store) -> None:
    put(store, 1, block(1, 0, range(1, 4)))
    text = points.line(Header("j", 1, 0, 0))
    store.put(metrics_key("j", 1, 2), b"junk")
    store.put(metrics_key("j", 1, 3), points.compress(b"junk\n"))
    store.put(metrics_key("j", 1, 4), points.compress(b'{"job": "j", "generation": 1, "rank": 0, "base": -1}\n'))
    store.put(metrics_key("j", 1, 5), points.compress(text.replace(b'"format":1', b'"format":2')))
    store.put(metrics_key("j", 1, 6), points.compress(text.replace(b'"j"', b'"other"')))
    store.put(metrics_key("j", 1, 7), points.compress(text + bytes(points.MOST)))
    torn = text + points.line(block(1, 0, [4]).calls[0]) + b'{"step": -1, "time": 0, "values": {}}\n{"step":5,"ti'
    store.put(metrics_key("j", 1, 8), points.compress(torn))
    store.put("jobs/j/metrics/README", b"is no block")
    reader = Reader(store, "j")
    reader.update()
    assert steps(reader) == [1, 2, 3, 4]
    assert [problem.split(" ")[0].rstrip(":")[-16:] for problem in reader.problems] == [
        f"{number:06d}.jsonl.zst" for number in range(2, 9)
    ]
    assert "update it" in reader.problems[3]
    assert "1 of its lines cannot be read" in reader.problems[6], "the part of a line at the end is not missed"


def test_the_last_line_of_a_process_that_was_killed_is_no_problem(store: Store) -> None:
    text = points.line(Header("j", 1, 0, 0)) + b"".join(map(points.line, block(1, 0, [1, 2]).calls))
    store.put(metrics_key("j", 1, 1), points.compress(text + b'{"step":3,"ti'))
    reader = Reader(store, "j")
    reader.update()
    assert (steps(reader), reader.problems) == ([1, 2], [])


def test_an_object_that_is_cut_has_the_points_that_are_left_and_a_problem(store: Store) -> None:
    put(store, 1, block(1, 0, range(1, 50_001)))
    data = store.get(metrics_key("j", 1, 1))
    store.put(metrics_key("j", 1, 1), data[: len(data) // 2])
    reader = Reader(store, "j")
    reader.update()
    found = steps(reader)
    assert found == list(range(1, len(found) + 1))
    assert 0 < len(found) < 50_000
    (problem,) = reader.problems
    assert "000001.jsonl.zst is cut" in problem


def test_a_name_in_each_step_takes_bounded_memory(store: Store) -> None:
    for number in (1, 2):
        many = block(1, 0, range(2000 * number - 1999, 2000 * number + 1))
        for call in many.calls:
            call.values[f"loss_{call.step}"] = 1.0
        put(store, number, many)
    whole, short = Reader(store, "j"), Reader(store, "j", most=100)
    whole.update()
    short.update()
    assert (len(whole.names), whole.problems) == (4001, [])
    assert len(short.names) == NAMES
    assert short.problems == [f"j has logged more than {NAMES} names: only the first {NAMES} are read"]
    assert short.curve("loss").points.steps[-1] == 4000


def test_an_object_that_is_too_large_spoils_no_curve(store: Store) -> None:
    """A node may write to the metrics of any job."""
    put(store, 1, block(1, 0, range(1, 4)))
    store.put(metrics_key("j", 1, 2), bytes(LARGEST + 1))
    store.put(extras_key("j", 1, 1), bytes(LARGEST + 1))
    put(store, 3, block(1, 0, range(4, 6)))
    reader = Reader(store, "j")
    reader.update()
    assert steps(reader) == [1, 2, 3, 4, 5]
    assert f"at most {LARGEST} are read" in reader.problems[0]
    assert read_extras(store, "j") == []


def test_unknown_keys_are_ignored(store: Store) -> None:
    """The node may have a newer version."""
    text = (
        b'{"job":"j","generation":1,"rank":0,"base":0,"mood":"good"}\n{"step":1,"time":5,"values":{"loss":2},"x":[]}\n'
    )
    store.put(metrics_key("j", 1, 1), points.compress(text))
    curve = read_curves(store, "j")["loss"]
    assert (list(curve.points.values), list(curve.points.times)) == ([2.0], [5.0])


def test_only_the_names_that_are_asked_for(store: Store) -> None:
    put(store, 1, block(1, 0, range(1, 4)))
    assert list(read_curves(store, "j", "acc", "loss")) == ["acc", "loss"]
    assert len(read_curves(store, "j", "acc")["acc"].points) == 0


def test_a_long_curve_takes_bounded_memory(store: Store) -> None:
    for number in range(20):
        put(store, number + 1, block(1, 0, range(1000 * number + 1, 1000 * number + 1001)))
    whole, short = Reader(store, "j"), Reader(store, "j", most=500)
    whole.update()
    short.update()
    curve = short.curve("loss")
    assert len(whole.curve("loss").points) == 20_000
    assert len(curve.points) <= 1000
    for extreme in (min, max):
        assert extreme(curve.points.values) == extreme(whole.curve("loss").points.values)


def test_many_generations_take_no_more_memory_than_some(store: Store) -> None:
    """A job of two weeks may have hundreds. The curve still has points of each, in order."""
    for number in range(1, 201):
        put(store, 1, block(number, 100 * number - 100, range(100 * number - 99, 100 * number + 1)))
    reader = Reader(store, "j", most=50)
    reader.update()
    curve = reader.curve("loss")
    assert len(curve.points) < 20_000 / 10
    assert set(curve.generations) == set(range(1, 201))
    assert not any(curve.void)
    found = list(curve.points.steps)
    assert (found, found[0], found[-1]) == (sorted(set(found)), 1, 20_000)
