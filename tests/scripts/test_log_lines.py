"""Lines of all ranks by time, from a bucket: also of nodes that are gone, live, in bounded memory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from scripts import log_lines, logs
from scripts import site as sites
from scripts.log_lines import Line, Wanted
from spotrun.errors import SpotrunError
from spotrun.node.log_uploader import LogUploader
from spotrun.store import Store, job_key, log_key, queue_key, times_key
from tests.scripts.accounts import job
from tests.scripts.accounts import store as bucket

JOB = "train-20261122-000001"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return bucket(tmp_path / "bucket", job(1))


def put(store: Store, generation: int, node: str, rank: int, *printed: tuple[float, str]) -> None:
    """A log to which these texts were written at these times."""
    key, text, times = log_key(JOB, generation, node, rank), "", ""
    for at, more in printed:
        text += more
        times += f"{at:.3f} {len(text.encode())}\n"
    store.put(key, text.encode())
    store.put(times_key(key), times.encode())


def lines(
    store: Store, begin: float = 0.0, places: dict[str, int] | None = None, **asked: Any
) -> list[tuple[float, int, str]]:
    final = asked.pop("final", True)
    chosen = log_lines.choose(store, JOB, Wanted(JOB, **asked), "clusters/local.yaml")
    found = log_lines.merged(store, chosen, begin, {} if places is None else places, final)
    return [(each.at, each.rank, each.text) for each in found]


def test_all_ranks_by_time(store: Store) -> None:
    put(store, 1, "spot-0", 0, (10.0, "a\nb\n"), (12.0, "c\n"))
    put(store, 1, "spot-1", 1, (9.5, "x\n"), (11.0, "y\n"), (13.0, "z without an end"))
    wanted = [(9.5, 1, "x"), (10.0, 0, "a"), (10.0, 0, "b"), (11.0, 1, "y"), (12.0, 0, "c")]
    wanted += [(13.0, 1, "z without an end")]
    assert lines(store) == wanted
    assert lines(store, final=False) == wanted[:-1]
    assert lines(store, rank="1") == [each for each in wanted if each[1] == 1]
    assert lines(store, node="spot-0") == [each for each in wanted if each[1] == 0]


def test_generations(store: Store) -> None:
    with pytest.raises(SpotrunError, match=f"job {JOB}: the bucket has no output of its workers"):
        lines(store)
    put(store, 1, "gone", 0, (10.0, "old\n"))
    put(store, 2, "spot-1", 0, (20.0, "new\n"))
    assert lines(store) == [(20.0, 0, "new")]
    assert lines(store, gen="1") == [(10.0, 0, "old")]
    assert lines(store, gen="all") == [(10.0, 0, "old"), (20.0, 0, "new")]
    with pytest.raises(SpotrunError, match="no such log; there are: generation 1 gone rank 0, generation 2 spot-1"):
        lines(store, gen="3")


def test_since(store: Store) -> None:
    """A line that was begun before is left out; a log that was not written to since gives nothing."""
    put(store, 1, "spot-0", 0, (10.0, "a\nb"), (20.0, "b\nc\n"), (30.0, "d\n"))
    put(store, 1, "spot-1", 1, (5.0, "x\n"))
    assert lines(store, begin=15.0, since="1m") == [(20.0, 0, "c"), (30.0, 0, "d")]
    assert lines(store, begin=5.0, since="1m")[:2] == [(5.0, 1, "x"), (10.0, 0, "a")]
    assert lines(store, begin=31.0, since="1m") == []
    key = log_key(JOB, 1, "spot-1", 1)
    store.put(key, b"x\nits last line before the machine was gone\n")  # the agent's notes lack it
    assert lines(store, begin=31.0, since="1m") == []


def test_live(store: Store) -> None:
    """Each look gives what is new, no line twice, and half a line when it is whole; a log that begins again as well."""
    places: dict[str, int] = {}
    put(store, 1, "spot-0", 0, (10.0, "a\nhal"))
    assert lines(store, 0.0, places, final=False) == [(10.0, 0, "a")]
    assert lines(store, 0.0, places, final=False) == []
    put(store, 1, "spot-0", 0, (10.0, "a\nhal"), (11.0, "f\nb\n"))
    assert lines(store, 0.0, places, final=False) == [(11.0, 0, "half"), (11.0, 0, "b")]
    put(store, 1, "spot-0", 0, (12.0, "again\n"))
    assert lines(store, 0.0, places, final=False) == [(12.0, 0, "again")]


def test_the_end_of_a_generation_that_failed_is_shown_with_the_next_one(store: Store) -> None:
    """Both may come between two looks."""
    places: dict[str, int] = {}

    def look() -> list[str]:
        chosen = log_lines.choose(store, JOB, Wanted(JOB), "clusters/local.yaml", live=True, known=places)
        return [each.text for each in log_lines.merged(store, chosen, 0.0, places, final=False)]

    put(store, 1, "spot-0", 0, (10.0, "a\n"))
    assert look() == ["a"]
    put(store, 1, "spot-0", 0, (10.0, "a\n"), (11.0, "RuntimeError: why\n"))
    put(store, 2, "spot-1", 0, (12.0, "b\n"))
    assert look() == ["RuntimeError: why", "b"]
    assert look() == []


def test_no_generation_is_left_out_while_logs_are_followed(store: Store) -> None:
    """A script that fails at once may begin several times between two looks. The first one to come may be the third."""
    for first in (1, 0):
        places: dict[str, int] = {}
        for known, generations in ((None, range(1, 1 + first)), (places, range(1, 4))):
            for number in generations:
                put(store, number, "spot-0", 0, (10.0 * number, f"of {number}\n"))
            chosen = log_lines.choose(store, JOB, Wanted(JOB), "clusters/local.yaml", live=True, known=known)
            found = [each.text for each in log_lines.merged(store, chosen, 0.0, places, final=False)]
        assert found == [f"of {number}" for number in range(1 + first, 4)]
        store.delete(store.list(f"jobs/{JOB}/logs"))


def test_each_line_of_a_progress_bar_is_a_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the lines of a bar would have no rank, and GREP would find an hour of bars at once."""
    text = "begin\r\n\r 10%\r 20%\nend\r 30%\r"
    wanted = ["begin", "", " 10%", " 20%", "end", " 30%"]
    put(store, 1, "spot-0", 0, (1.0, text))
    for piece in (1, 2, 3, 10_000):
        monkeypatch.setattr(log_lines, "PIECE", (piece, piece))
        assert [each[2] for each in lines(store)] == wanted
    places: dict[str, int] = {}
    assert [each[2] for each in lines(store, places=places, final=False)] == wanted[:-1]
    put(store, 1, "spot-0", 0, (1.0, text), (2.0, "\nnext\n"))
    assert [each[2] for each in lines(store, places=places, final=False)] == [" 30%", "next"]


def site(tmp_path: Path) -> sites.Site:
    path, bucket = tmp_path / "c.yaml", tmp_path / "bucket"
    path.write_text(f"name: c\ncloud: local\nbucket: {bucket}\npools:\n  - {{name: spot, zone: local-a, max: 2}}\n")
    return sites.of_file(str(path))


def test_what_nodes_upload_after_the_end_is_shown(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of a long log comes some seconds after the end of its job."""
    put(store, 1, "spot-0", 0, (10.0, "training\n"))
    end = job(1, ended=time.time(), phase="failed").model_dump_json().encode()
    store.put(job_key(JOB, "state.json"), end)
    late = Timer(1.0, put, (store, 1, "spot-0", 0, (10.0, "training\n"), (11.0, "RuntimeError: why\n")))
    late.start()
    try:
        log_lines.show(site(tmp_path), Wanted(JOB), follow=True, raw=False, json=False)
    finally:
        late.join()
    assert [line.partition(" | ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "training",
        "RuntimeError: why",
    ]


def test_without_an_id_the_job_that_trains_is_meant(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `make logs` alone, which asks the head. A job that was submitted later waits, and has no logs."""
    members = [{"node": "spot-0", "boot": "b", "address": "127.0.0.1"}]
    current = {"number": 1, "members": members, "store": "127.0.0.1:1"}
    for each in (job(1, phase="running", current=current), job(2, phase="queued")):
        store.put(job_key(each.id, "state.json"), each.model_dump_json().encode())
    put(store, 1, "spot-0", 0, (10.0, "training\n"))
    asked: list[str] = []
    find = store.find

    def noted(key: str, most: int | None = None) -> bytes | None:
        asked.append(key)
        return find(key, most)

    monkeypatch.setattr(store, "find", noted)
    for names in (["train-20261122-000002", JOB], [JOB, "train-20261122-000002"]):
        queue = json.dumps({"jobs": names}).encode()
        store.put(queue_key("c"), queue)
        log_lines.show(site(tmp_path), Wanted(None, rank="all"), follow=False, raw=False, json=False)
        assert capsys.readouterr().out.endswith(" 1 spot-0 0 | training\n")
        asked.clear()
        assert log_lines._chosen(store, site(tmp_path)) == JOB
    assert asked == [queue_key("c"), job_key(JOB, "state.json")], "not the jobs that wait behind it"


def test_logs_without_times_or_with_junk(store: Store) -> None:
    """Of an agent of an older version, or spoilt by a job's code."""
    key = log_key(JOB, 1, "spot-0", 0)
    store.put(key, b"a\nb\xff\n")
    assert lines(store) == [(0.0, 0, "a"), (0.0, 0, "b\ufffd")]
    for junk in (b"junk\n99.0 1\n5.0 100\n1e5 3\n", b"1.0 " + b"9" * 5000 + b"\n", bytes(log_lines.TIMES + 1)):
        store.put(times_key(key), junk)
        assert [text for _, _, text in lines(store)] == ["a", "b\ufffd"]


def test_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the pieces, and of the longest line, the lines are the same."""
    text = "".join(f"line {n} {'x' * (n % 37)}\n" for n in range(200)) + "ä" * 50
    put(store, 1, "spot-0", 0, (1.0, text))
    for piece in (1, 7, 64, 10_000):
        monkeypatch.setattr(log_lines, "PIECE", (piece, piece))
        assert [each[2] for each in lines(store)] == text.splitlines()
    monkeypatch.setattr(log_lines, "PIECE", (10, 10))
    monkeypatch.setattr(log_lines, "LINE", 30)
    put(store, 1, "spot-0", 0, (1.0, "y" * 1000 + "\nend"))
    assert "".join(each[2] for each in lines(store)) == "y" * 1000 + "end"


def test_memory_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand ranks, a piece of each log is read at a time, and no whole log."""
    for rank in range(40):
        put(store, 1, f"spot-{rank}", rank, (1.0, "a line\n" * 5_000))
    monkeypatch.setattr(log_lines, "MEMORY", 1 << 20)
    read: list[int] = []

    class Counting(Store):
        def part(self, key: str, start: int, end: int) -> bytes:
            read.append(end - start)
            return super().part(key, start, end)

    counting = Counting(store.url)
    chosen = log_lines.choose(counting, JOB, Wanted(JOB), "clusters/local.yaml")
    count = sum(1 for _ in log_lines.merged(counting, chosen, 0.0, {}))
    assert count == 40 * 5_000
    assert max(read) <= max(log_lines.PIECE[0], (1 << 20) // 40)


async def test_the_agent_notes_times(tmp_path: Path, store: Store) -> None:
    """The text beside the log has a size for each time at which the log was longer."""
    uploader, path = LogUploader(store), tmp_path / "0.log"
    uploader.follow(path, log_key(JOB, 1, "spot-0", 0))
    began = time.time()
    for text in ("one\n", "two\n"):
        with path.open("a") as file:
            file.write(text)
        await uploader.upload(all=True)
    os.truncate(path, 0)
    path.write_text("new\n")
    await uploader.upload(all=True)
    ((at, _, text),) = lines(store)
    assert text == "new"
    assert began - 1 < at < time.time() + 1
    assert logs.every(store, JOB) == [logs.Log(log_key(JOB, 1, "spot-0", 0), 1, "spot-0", "0")], "the times are no log"


def test_a_line_is_shown_with_rank_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    each = Line(10.0, 3, 0, 1, "spot-0", "\x1b[31mred\x1b[0m")
    log_lines._print(each, raw=False, json=False)
    log_lines._print(each, raw=False, json=True)
    shown, found = capsys.readouterr().out.splitlines()
    assert shown == f"{time.strftime('%H:%M:%S', time.localtime(10))} 1 spot-0 3 | red"
    assert json.loads(found) == {"time": 10.0, "generation": 1, "node": "spot-0", "rank": 3, "text": each.text}
