"""`make profile` at the operator's: what nodes answer is checked, and the table says what took the time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import profile_requests, trace_table
from scripts.profile_requests import Trace, fetch, read_node, text
from scripts.trace_table import Row
from spotrun.store import Store
from spotrun.text import tidy

KEY = "jobs/digits-1/system/spot-1/profile-0002-3-41.json.gz"
ANSWER = {"rank": 3, "generation": 2, "steps": 5, "first": 41, "key": KEY, "problem": ""}


def event(name: str, start: float, took: float, kind: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": took, "pid": 1, "tid": thread}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([], {}, id="nothing"),
        pytest.param([event("a", 0, 10), event("b", 2, 3)], {"a": (1, 7), "b": (1, 3)}, id="one in another"),
        pytest.param(
            [event("b", 2, 3), event("c", 3, 1), event("a", 0, 10), event("b", 5, 2)],
            {"a": (1, 5), "b": (2, 4), "c": (1, 1)},
            id="three levels, in any order",
        ),
        pytest.param([event("a", 0, 10), event("b", 10, 3)], {"a": (1, 10), "b": (1, 3)}, id="one after the other"),
        pytest.param([event("a", 0, 10), event("b", 0, 4)], {"a": (1, 6), "b": (1, 4)}, id="they begin together"),
        pytest.param([event("a", 0, 10), event("a", 1, 4)], {"a": (2, 10)}, id="an operation in itself"),
        pytest.param([event("a", 0, 10), event("b", 2, 3, thread=2)], {"a": (1, 10), "b": (1, 3)}, id="two threads"),
        pytest.param([event("a", 0, 10) | {"tid": []}], {"a": (1, 10)}, id="a thread that is no number"),
        pytest.param([event("a", 0, 10), event("b", 2, 3, kind="kernel")], {"a": (1, 10)}, id="a kernel of a GPU"),
        pytest.param([event("a", 0, 10), {"ph": "M"}, {"ph": "s", "cat": "cpu_op"}], {"a": (1, 10)}, id="other events"),
    ],
)
def test_own_times(events: list[dict[str, Any]], expected: dict[str, tuple[int, float]]) -> None:
    rows = trace_table.processor({"traceEvents": events})
    assert {row.name: (row.calls, pytest.approx(row.seconds * 1e6)) for row in rows} == expected
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    assert sum(row.share for row in rows) == pytest.approx(1.0 if rows else 0.0)


def test_kernels() -> None:
    events = [event("gemm", 0, 10, "kernel"), event("gemm", 9, 10, "kernel"), event("Memcpy", 0, 5, "gpu_memcpy")]
    assert trace_table.gpu({"traceEvents": [*events, event("a", 0, 1)]}) == [
        Row("gemm", 2, pytest.approx(20e-6), pytest.approx(0.8)),
        Row("Memcpy", 1, pytest.approx(5e-6), pytest.approx(0.2)),
    ]


@pytest.mark.parametrize(
    "trace",
    [
        *({}, [], 7, {"traceEvents": 7}, {"traceEvents": [7]}),
        *({"traceEvents": [event("a", 0, 0) | {"ts": at}]} for at in (None, 10**400)),
    ],
)
def test_what_is_no_trace(trace: Any) -> None:
    with pytest.raises(ValueError, match="not a trace of torch's profiler"):
        trace_table.processor(trace)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param(json.dumps(ANSWER), Trace(3, "spot-1", 2, 5, 41, KEY), id="a trace"),
        pytest.param(json.dumps(ANSWER | {"rank": float("inf")}), None, id="an infinite rank"),
        pytest.param(json.dumps(ANSWER | {"steps": float("inf")}), None, id="infinitely many steps"),
        pytest.param("[" * 100_000, None, id="too deep"),
        pytest.param(
            json.dumps({"rank": 3, "generation": 2, "problem": "ended"}),
            Trace(3, "spot-1", 2, problem="ended"),
            id="a problem",
        ),
        *(
            pytest.param(
                json.dumps(ANSWER | {"key": key}),
                Trace(3, "spot-1", 2, problem="the node names a trace that is not its own"),
                id=f"a key {key!r}",
            )
            for key in ("", "jobs/digits-1/state.json", KEY.replace("spot-1", "spot-2"), "../../etc/passwd")
        ),
        *(pytest.param(output, None, id=output) for output in ("", "{}", "[]", "7", "warning", '{"rank": "a"}')),
    ],
)
def test_read_node(output: str, expected: Trace | None) -> None:
    assert read_node("spot-1", "digits-1", output) == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param(gzip.compress(json.dumps({"traceEvents": [event("a", 0, 10)]}).encode()), "", id="good"),
        pytest.param(b"", "", id="empty"),
        pytest.param(b"{}", "Not a gzipped file", id="not compressed"),
        pytest.param(gzip.compress(b"{}")[:-9], "", id="cut"),
        pytest.param(gzip.compress(b"{}")[:10] + b"\xff" * 20, "Error -3", id="damaged"),
        pytest.param(gzip.compress(b"["), "", id="no JSON"),
        pytest.param(gzip.compress(b"[" * 100_000), "", id="nested too deep"),
        pytest.param(gzip.compress(b" " * 300_000), "more than 0 MiB", id="larger than it may be"),
    ],
)
def test_fetch(data: bytes, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's code can write to its node's traces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_requests, "LARGEST", 200_000)
    store = Store(str(tmp_path / "bucket"))
    store.put(KEY, data)
    found = fetch(store, "digits-1", Trace(3, "spot-1", 2, 5, 41, KEY))
    path = "exports/digits-1/spot-1-profile-0002-3-41.json.gz"
    if found.operations:
        assert (found.path, found.problem) == (path, "")
        assert Path(path).read_bytes() == data
    else:
        assert found.problem.startswith(f"{path}: cannot be read: ")
        assert problem in found.problem


def test_a_screenful(tmp_path: Path) -> None:
    """However many operations and ranks there are; and an interrupted profile says so."""
    rows = [Row(f"op{n}", n, 1 / (n + 1), 0.01) for n in range(300)]
    trace = Trace(0, "spot-1", 1, 3, 7, KEY, "exports/x.json.gz", operations=rows, kernels=rows[:2])
    lost = Trace(1, "spot-2", 1, problem="the generation has ended")
    store = Store(str(tmp_path))
    said = text(tidy(profile_requests.document(store, "digits-1", 5, [trace, lost], {"spot-3": "no answer"})))
    lines = said.splitlines()
    assert len(lines) < 40
    assert lines[0] == f"rank 0 on spot-1: 3 of 5 steps, from step 7 on ({profile_requests.FEWER})"
    assert lines[1].split() == ["ms", "share", "calls", "operation,", "own", "time"]
    assert lines[2].split() == ["1000.00", "1.0%", "0", "op0"]
    assert "rank 1 on spot-2: no trace: the generation has ended" in lines
    assert "spot-3: no trace: no answer" in lines
    assert "https://ui.perfetto.dev" in lines[-1]
    many = profile_requests.document(store, "digits-1", 5, [trace] * 8, {})
    assert len(text(tidy(many)).splitlines()) < 8 * (3 + 2 * (profile_requests.LEAST + 2)) + 2
