"""Logs of any size: read in ranges, never whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scripts import logs
from spotrun.errors import NotFound, SpotrunError
from spotrun.store import Store, log_key
from tests.fakes import moto_server
from tests.fakes.cluster import Machines
from tests.scripts.statuses import status

ROOT = Path(__file__).parents[2]
KEY = "jobs/toy-1/logs/0001/spot-0/0.log"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "bucket"))


def text(store: Store, lines: int | None = None) -> str:
    return "".join(logs.read(store, KEY, lines))


def test_a_log_is_read_in_ranges(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "RANGE", 7)
    for content in (
        "",
        "a",
        "a\n",
        "one\ntwo\nthree\n",
        "ä" * 20 + "\nö\n",
        "a line longer than a range\nb",
        "\n" * 20,
        "one\rtwo\rthree\n",
    ):
        store.put(KEY, content.encode())
        assert text(store) == content
        for count in (1, 2, 3, 50):
            assert text(store, count) == "".join(content.splitlines(keepends=True)[-count:]), (content, count)
    store.put(KEY, "ä".encode()[:1] + b"\xff" + "ü".encode()[:1])
    assert text(store) == "\ufffd\ufffd\ufffd"


def test_each_line_of_a_progress_bar_counts(store: Store) -> None:
    """TAIL=2 of a bar that was drawn for an hour."""
    store.put(KEY, b"begin\r\n" + b"".join(b"\r%d %%" % number for number in range(5000)) + b"\r\nend\r\n")
    assert text(store, 2) == "4999 %\r\nend\r\n"


def test_pieces_end_with_lines(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an escape sequence is whole in its piece, unless its line is longer than a range."""
    monkeypatch.setattr(logs, "RANGE", 10)
    store.put(KEY, b"\x1b[31mred\x1b[0m\n" * 5)
    assert all(piece.endswith("\n") for piece in logs.read(store, KEY) if len(piece) > 20)


def test_a_log_that_is_not_there(store: Store) -> None:
    with pytest.raises(NotFound):
        text(store)


PROGRAM = """
    import sys
    from pathlib import Path
    from spotrun.store import Store
    from scripts import console, jobs, logs
    from scripts.ssh import Access

    def peak() -> int:
        found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(found["VmHWM"].split()[0])

    access = Access("c", Store(sys.argv[1]), None, Path())
    def show(job: str, lines: int | None = None) -> int:
        count = 0
        for text in logs.read(access.store, f"jobs/{job}/logs/0001/spot-0/0.log", lines):
            console.say(text, end="")
            count += len(text)
        return count + len(logs.last_words(access, job))
    show("small")
    before = peak()
    read, tail = show("large"), show("large", 3)
    print(f'{{"read": {read}, "tail": {tail}, "grown": {peak() - before}}}', file=sys.stderr)
"""


def look(bucket: str, environment: dict[str, str]) -> dict[str, int]:
    """What a process says that reads the log `large`; grown: kB of memory that it took for that."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), bucket], cwd=ROOT, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stderr)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_log_takes_little_memory(store: Store, tmp_path: Path) -> None:
    """200 MB of lines, and of one line without an end: they took over 600 MB."""
    store.put("jobs/small/logs/0001/spot-0/0.log", b"x\n" * 100)
    store.put(KEY.replace("toy-1", "large"), b"begin\n")
    with (tmp_path / "bucket" / KEY.replace("toy-1", "large")).open("wb") as file:
        for _ in range(180):
            file.write((b"x" * 79 + b"\n") * 13107)
        file.seek(20 << 20, os.SEEK_CUR)  # a hole: zeros
        file.write(b"\n1\n2\n3\n4\n5\n")
    found = look(str(tmp_path / "bucket"), dict(os.environ))
    assert found["read"] > 199 << 20
    assert found["tail"] == len("3\n4\n5\n") + logs.LAST
    assert found["grown"] < 100 << 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_log_in_s3_takes_little_memory(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes((b"x" * 79 + b"\n") * 13107 * 64)
    with moto_server.running() as aws, pytest.MonkeyPatch.context() as patch:
        for name, value in aws.environment.items():
            patch.setenv(name, value)
        aws.client("s3").create_bucket(Bucket="logs")
        store = Store("s3://logs", aws.region)
        store.put("jobs/small/logs/0001/spot-0/0.log", b"x\n" * 100)
        store.put(KEY.replace("toy-1", "large"), large)
        found = look("s3://logs", {**os.environ, **aws.environment})
    assert found["read"] == large.stat().st_size + logs.LAST
    assert found["tail"] == 3 * 80 + logs.LAST
    assert found["grown"] < 60 << 10, "whole, it took over 190 MB"


def test_logs_are_the_newest_generations(standin: Machines) -> None:
    standin.write(status_json=status(step=1))
    for generation, node, rank in ((1, "spot-0", 0), (2, "spot-1", 0), (2, "spot-0", 1)):
        standin.store.put(log_key("digits-1", generation, node, rank), f"{generation} {rank}\n".encode())
    standin.store.put(log_key("digits-1", 2, "spot-0", "stacks"), b"")

    def found(node: str | None, rank: str | None) -> list[tuple[int, str, str]]:
        return [(log.generation, log.node, log.rank) for log in logs.find(standin.access, None, node, rank)]

    assert found(None, None) == [(2, "spot-1", "0")]
    assert found("spot-0", None) == [(2, "spot-0", "1")]
    assert found(None, "1") == [(2, "spot-0", "1")]
    with pytest.raises(SpotrunError, match="job digits-1: no log of rank 7; there are: spot-0 rank 0, spot-0 rank 1"):
        found(None, "7")
    assert logs.last_words(standin.access, "digits-1") == ["2 0"]


def test_logs_of_a_job_that_the_head_does_not_know(standin: Machines) -> None:
    standin.write(status_json=status(), jobs_json=[{"job": "digits-2", "phase": "succeeded"}])
    standin.store.put(log_key("digits-2", 1, "spot-0", 0), b"")
    assert [log.key for log in logs.find(standin.access, None, None, None)] == [log_key("digits-2", 1, "spot-0", 0)]
    with pytest.raises(SpotrunError, match="there is no job digits-3; `make status` names the newest jobs"):
        logs.find(standin.access, "digits-3", None, None)
    standin.store.put("jobs/digits-3/state.json", b"")
    with pytest.raises(SpotrunError, match="job digits-3: the bucket has no output of its workers"):
        logs.find(standin.access, "digits-3", None, None)
    standin.store.put("jobs/digits-20260101-000000/state.json", b"")
    with pytest.raises(
        SpotrunError, match="no job digits; digits is a job's name; give an id: digits-20260101-000000;"
    ):
        logs.find(standin.access, "digits", None, None)
    standin.write(jobs_json=[])
    with pytest.raises(SpotrunError, match="no job has run on this cluster yet; `make train` runs one"):
        logs.find(standin.access, None, None, None)
